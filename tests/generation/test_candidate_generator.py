# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""`DLiteCandidateGenerator` by Transformers' own contract: in its stock loop at batch 1, and called by hand."""

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

from dlite_hf import DLiteCandidateGenerator
from dlite_hf.target import embed_tokens

from ..replay import make_replay_drafter
from ..targets import make_drafter, make_inputs, make_target


class Recorder(DLiteCandidateGenerator):
    """Notes what the loop was offered and what it accepted."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_drafted, self.num_accepted, self.lengths = [], [], []

    def get_candidates(self, input_ids, *args, **kwargs):
        candidate_ids, logits = super().get_candidates(input_ids, *args, **kwargs)
        self.num_drafted.append(candidate_ids.shape[1] - input_ids.shape[1])
        self.lengths.append(candidate_ids.shape[1])
        assert (logits is None) == (self.num_drafted[-1] == 0)
        return candidate_ids, logits

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        self.num_accepted.append(int(num_matches))


@pytest.fixture
def stock_loop(monkeypatch):
    """`stock_loop(target, drafter)`: makes the target's `generate` draft with ours in Transformers' own loop."""
    recorders = []

    def install(target, drafter):
        def get_candidate_generator(generation_config, assistant_model, logits_processor, **kwargs):
            assert assistant_model is drafter
            recorders.append(Recorder(drafter, target, generation_config, logits_processor))
            return recorders[-1]

        original = GenerationMixin._assisted_decoding.__wrapped__
        assert not hasattr(original, "__wrapped__"), "Transformers' own"
        monkeypatch.setattr(GenerationMixin, "_assisted_decoding", original)
        monkeypatch.setattr(target, "_get_candidate_generator", get_candidate_generator, raising=False)
        return recorders

    return install


@pytest.fixture
def target():
    return make_target("llama")


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("num_right", [None, 3], ids=["oracle", "3_right"])
def test_greedy_equality_in_the_stock_loop(stock_loop, architecture, num_right):
    target = make_target(architecture)
    inputs = make_inputs(target, 20)
    plain = target.generate(**inputs, max_new_tokens=32, do_sample=False)
    drafter = make_replay_drafter(make_drafter(target, num_draft_tokens=7), num_right)
    drafter.replay(target, plain)
    recorders = stock_loop(target, drafter)
    output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=32, do_sample=False)
    assert torch.equal(output, plain)
    (recorder,) = recorders
    assert recorder.num_drafted[0] == 0, "before the prefill there are no features"
    assert max(drafter.errors) < 1e-3
    drafted, accepted = sum(recorder.num_drafted), sum(recorder.num_accepted)
    if num_right is None:
        assert 0 < drafted == accepted
    else:
        assert 0 < accepted < drafted
        assert set(recorder.num_accepted[1:-1]) == {3}
    assert max(recorder.lengths) < 20 + 32, "no room was left for the target's own token"


@pytest.mark.parametrize("options", [{}, {"top_k": 20, "temperature": 0.7, "repetition_penalty": 1.3}])
def test_sampling_in_the_stock_loop(stock_loop, target, options):
    inputs = make_inputs(target, 10)
    drafter = make_drafter(target)
    recorders = stock_loop(target, drafter)
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(
            target.generate(**inputs, assistant_model=drafter, max_new_tokens=40, do_sample=True, **options)
        )
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    assert all(output.shape == (1, 50) for output in outputs)
    assert 0 < sum(recorders[0].num_accepted) + sum(recorders[2].num_accepted)
    assert sum(recorders[0].num_accepted) < sum(recorders[0].num_drafted)


class CallLog:
    """Stands for a drafter's `draft`, and notes its arguments."""

    def __init__(self, drafter, monkeypatch):
        self.calls = []
        draft = drafter.draft

        def spy(*args):
            self.calls.append(args)
            return draft(*args)

        monkeypatch.setattr(drafter, "draft", spy)


def make_outputs(target, num_rows, seed=0):
    """Model outputs with random hidden states of `num_rows` positions."""
    generator = torch.Generator().manual_seed(seed)
    return BaseModelOutput(hidden_states=tuple(torch.randn(1, num_rows, 32, generator=generator) for _ in range(6)))


def make_generator(target, drafter, max_length=50, **kwargs):
    return DLiteCandidateGenerator(drafter, target, GenerationConfig(max_length=max_length), **kwargs)


@pytest.mark.parametrize(
    "room, num_drafted", [(0, 0), (1, 0), (2, 1), (7, 6), (8, 7), (9, 7)], ids=lambda value: str(value)
)
def test_a_draft_leaves_room_for_the_targets_token(target, room, num_drafted):
    input_ids = make_inputs(target, 10)["input_ids"]
    generator = make_generator(target, make_drafter(target, num_draft_tokens=7), max_length=10 + room)
    candidate_ids, logits = generator.get_candidates(input_ids, model_outputs=make_outputs(target, 10))
    assert torch.equal(candidate_ids[:, :10], input_ids) and candidate_ids.shape == (1, 10 + num_drafted)
    assert logits is None if num_drafted == 0 else logits.shape == (1, num_drafted, 97)


@pytest.mark.parametrize("asked, num_drafted", [(None, 7), (2, 2), (9, 7)])
def test_fewer_tokens_on_demand(target, asked, num_drafted):
    generator = make_generator(target, make_drafter(target, num_draft_tokens=7), num_draft_tokens=asked)
    candidate_ids, _ = generator.get_candidates(torch.tensor([[5, 6]]), model_outputs=make_outputs(target, 2))
    assert candidate_ids.shape[1] == 2 + num_drafted


@pytest.mark.parametrize("model_outputs", [None, BaseModelOutput(), BaseModelOutput(hidden_states=(None,) * 6)])
def test_without_hidden_states_nothing_is_drafted(target, model_outputs):
    generator = make_generator(target, make_drafter(target))
    input_ids = torch.tensor([[5, 6, 7]])
    candidate_ids, logits = generator.get_candidates(input_ids, model_outputs=model_outputs)
    assert torch.equal(candidate_ids, input_ids) and logits is None


def test_the_pivot_is_the_last_accepted_position(target, monkeypatch):
    drafter = make_drafter(target, num_draft_tokens=4)
    log = CallLog(drafter, monkeypatch)
    generator = make_generator(target, drafter)
    ids = torch.arange(1, 11)[None]
    prefill, empty = make_outputs(target, 10, seed=1), BaseModelOutput()
    generator.get_candidates(ids, model_outputs=prefill)
    rounds = [(make_outputs(target, 5, seed=2 + n), n) for n in (0, 2, 4)]
    for outputs, num_matches in rounds:
        generator.get_candidates(ids, model_outputs=outputs, n_last_matches=num_matches)
    generator.get_candidates(ids, model_outputs=empty)  # a round without a draft shows one row
    last = make_outputs(target, 1, seed=9)
    generator.get_candidates(ids, model_outputs=last, n_last_matches=0)
    expected = [(prefill, 9), *rounds, (last, 0)]
    for (features, *_), (outputs, row) in zip(log.calls, expected, strict=True):
        states = [outputs.hidden_states[i + 1][0, row] for i in drafter.config.target_layer_ids]
        assert torch.equal(features[0], torch.stack(states))


@pytest.mark.parametrize("group_size, num_tokens, num_real", [(1, 1, 1), (1, 5, 1), (2, 1, 1), (2, 2, 2), (2, 5, 2)])
def test_the_group_holds_the_last_real_tokens(target, monkeypatch, group_size, num_tokens, num_real):
    # After a prompt of embeddings the sequence has one token: a group of two is then one short.
    drafter = make_drafter(target, anchor_group_size=group_size, num_draft_tokens=3)
    log = CallLog(drafter, monkeypatch)
    ids = torch.arange(11, 11 + num_tokens)[None]
    make_generator(target, drafter).get_candidates(ids, model_outputs=make_outputs(target, 8))
    ((_, inputs_embeds, previous_token_ids, num_draft_tokens, sampler, history, threshold),) = log.calls
    assert torch.equal(previous_token_ids, ids[:, -num_real:])
    expected = torch.cat([ids[:, -num_real:], torch.full((1, 3), drafter.config.mask_token_id)], dim=1)
    assert torch.equal(inputs_embeds, embed_tokens(target, expected))
    assert num_draft_tokens == 3 and sampler is None and history is None and threshold == 0


def test_only_the_drafters_layers_are_asked_for(target):
    generator = make_generator(target, make_drafter(target, target_layer_ids=[1, 4]))
    assert generator.requires_model_outputs
    assert generator.model_kwargs_overrides == {"output_hidden_states": [2, 5]}
