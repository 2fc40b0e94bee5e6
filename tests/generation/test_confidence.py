# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""`assistant_confidence_threshold`: a draft ends where the drafter is not confident, and the output stays exact."""

import itertools

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper
from transformers.utils.logging import warning_once

from ..replay import ReplayDrafter, expected_pivots, generate_with_statistics
from ..targets import ARCHITECTURES, make_drafter, make_inputs, make_target


K = 6
LENGTHS = (3, 0, 1, 6, 0, 0, 2)
OPTIONS = {"max_new_tokens": 40, "do_sample": False}


class UnsureDrafter(ReplayDrafter):
    """Proposes `LENGTHS[i]` tokens in round i, of which at most the first four are the target's own."""

    num_right = 4

    def draft(self, *args):
        assert args[6] == 0.3
        draft_ids, logits = super().draft(*args)
        length = min(LENGTHS[(len(self.pivots) - 1) % len(LENGTHS)], draft_ids.shape[1])
        return draft_ids[:, :length], logits[:, :length]


@pytest.mark.parametrize(
    "architecture, cache_implementation", [*((name, "dynamic") for name in ARCHITECTURES), ("llama", "static")]
)
def test_drafts_of_any_length_are_exact(architecture, cache_implementation):
    target = make_target(architecture)
    inputs = make_inputs(target, 9)
    others = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    options = {**OPTIONS, "cache_implementation": cache_implementation}
    plain = target.generate(**inputs, **OPTIONS)
    drafter = UnsureDrafter(make_drafter(target, num_draft_tokens=K).config).eval()
    drafter.replay(target, plain, **others)
    output, statistics = generate_with_statistics(
        target, drafter, **inputs, **options, assistant_confidence_threshold=0.3
    )
    assert torch.equal(output, plain)
    pivots = expected_pivots(statistics, inputs["input_ids"].shape[1])
    assert drafter.pivots == pivots[: len(drafter.pivots)] and len(drafter.pivots) > len(LENGTHS)
    assert max(drafter.errors) < 1e-3
    assert statistics.accepted_per_position[:4] > [0, 0, 0, 0] and len(statistics.accepted_per_position) == 4


def make_lively_drafter(target):
    """One whose probabilities differ from token to token, and from prompt to prompt."""
    drafter = make_drafter(target, num_draft_tokens=K)
    torch.manual_seed(2)
    for parameter in drafter.sequential_head.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    # All placeholders look much alike to random layers: the token before decides.
    drafter.sequential_head.state_hidden_mlp.weight.data[:, drafter.config.sequential_rank :] *= 0.02
    return drafter


def make_arguments(target, drafter, seed):
    """What `draft` is shown, with random hidden states at the pivot."""
    torch.manual_seed(seed)
    token_ids = torch.randint(1, 80, (1, 1))
    placeholders = torch.full((1, K), drafter.config.mask_token_id)
    embeds = target.get_input_embeddings()(torch.cat([token_ids, placeholders], dim=1)).detach()
    return torch.randn(1, len(drafter.config.target_layer_ids), target.config.hidden_size), embeds, token_ids


@pytest.mark.parametrize("kind", ["argmax", "processed", "sampled", "reduced"])
def test_a_draft_ends_where_its_probability_falls_below(kind):
    target = make_target("llama")
    drafter = make_lively_drafter(target)
    if kind == "reduced":
        drafter.reduce_draft_vocabulary(range(3, 60))
    sampler = None
    if kind in ("processed", "sampled"):
        processors = LogitsProcessorList([TemperatureLogitsWarper(0.7)])

        def sampler(logits, drafted):
            scores = processors(drafted, logits)
            # Not the likeliest, so that it shows whose probability is counted.
            return scores.topk(2).indices[:, -1] if kind == "sampled" else scores.argmax(dim=-1), scores

    seen = set()
    for seed, threshold in itertools.product(range(8), (0.001, 0.02, 0.1, 0.3, 0.8)):
        arguments = make_arguments(target, drafter, seed)
        whole_ids, whole_logits = drafter.draft(*arguments, K, sampler)
        probs = whole_logits[0].softmax(dim=-1)
        drawn = probs.gather(-1, whole_ids[0, :, None])[:, 0]
        length = 0
        while length < K and float(drawn[:length].prod() * probs[length].max()) >= threshold:
            length += 1
        draft_ids, logits = drafter.draft(*arguments, K, sampler, None, threshold)
        assert torch.equal(draft_ids, whole_ids[:, :length])
        assert logits.shape == (1, length, target.config.vocab_size)
        assert torch.equal(logits, whole_logits[:, :length])
        seen.add(length)
    assert 0 in seen and len(seen) > 3, "too alike to test with"


def test_where_nothing_is_allowed_a_draft_ends():
    target = make_target("llama")
    drafter = make_lively_drafter(target)

    def sampler(logits, drafted):
        scores = logits if drafted.shape[1] < 2 else torch.full_like(logits, -torch.inf)
        return scores.argmax(dim=-1), scores

    arguments = make_arguments(target, drafter, 0)
    assert drafter.draft(*arguments, K, sampler)[0].shape == (1, K)
    assert drafter.draft(*arguments, K, sampler, None, 1e-6)[0].shape == (1, 2)


def test_the_most_confident_of_several_sequences_goes_on():
    target = make_target("llama")
    drafter = make_lively_drafter(target)
    alone = [make_arguments(target, drafter, seed) for seed in range(8)]
    together = [torch.cat(each) for each in zip(*alone, strict=True)]
    differing = 0
    for threshold in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5):
        lengths = [drafter.draft(*each, K, None, None, threshold)[0].shape[1] for each in alone]
        assert drafter.draft(*together, K, None, None, threshold)[0].shape == (8, max(lengths))
        differing += min(lengths) < max(lengths)
    assert differing > 1, "too alike to test with"


@pytest.mark.parametrize("threshold, is_set", [(0.0, False), (0.4, False), (None, False), (0.39, True), (0.9, True)])
def test_what_a_call_asks_for(monkeypatch, caplog, threshold, is_set):
    warning_once.cache_clear()
    target = make_target("llama")
    drafter = make_drafter(target, num_draft_tokens=K)
    draft, thresholds = drafter.draft, []

    def spy(*args):
        thresholds.append(args[6])
        return draft(*args)

    monkeypatch.setattr(drafter, "draft", spy)
    inputs = make_inputs(target, 8)
    plain = target.generate(**inputs, **OPTIONS)
    output = target.generate(**inputs, **OPTIONS, assistant_model=drafter, assistant_confidence_threshold=threshold)
    assert torch.equal(output, plain)
    assert set(thresholds) == {threshold if is_set else 0.0}  # 0.4 is Transformers' own default
    assert not [record for record in caplog.records if record.name.startswith("dlite_hf")]


@pytest.mark.parametrize("threshold", [-0.1, 1.0, 40])
def test_a_threshold_that_makes_no_sense_is_refused(threshold):
    target = make_target("llama")
    with pytest.raises(ValueError, match=f"`assistant_confidence_threshold` is {threshold}, but must be at least 0"):
        target.generate(
            **make_inputs(target, 5),
            **OPTIONS,
            assistant_model=make_drafter(target),
            assistant_confidence_threshold=threshold,
        )
