# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""A drafter with a history window: the formula, the packing of anchors, what it sees and what not, and generation."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dlite_hf import DLiteConfig, DLiteForDrafting, speculation_statistics
from dlite_hf import history as history_module
from dlite_hf.generation.candidate_generator import DLiteCandidateGenerator
from dlite_hf.history import DLiteHistory

from .reference import reference
from .targets import make_drafter as make_drafter_for
from .targets import make_inputs, make_target


H, V, R, K, W, N = 16, 23, 6, 3, 4, 11
SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "target_layer_ids": [0, 2, 4],
    "history_window": W,
}


def make_drafter(group_size=1, implementation="eager", **overrides):
    config = DLiteConfig(
        **{**SIZES, **overrides},
        vocab_size=V,
        hidden_size=H,
        intermediate_size=20,
        num_draft_tokens=K,
        anchor_group_size=group_size,
        sequential_rank=R,
        mask_token_id=V - 1,
        num_target_layers=5,
        attn_implementation=implementation,
    )
    drafter = DLiteForDrafting(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.normal_(std=0.3)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    return drafter


def make_batch(group_size=1, num_anchors=N, num_sequences=2, length=9):
    """Anchors of several sequences, unsorted; more of one sequence than of another."""
    generator = torch.Generator().manual_seed(1)
    sequence_ids = torch.randint(num_sequences, (num_anchors,), generator=generator)
    history = DLiteHistory(
        features=torch.randn(num_sequences, length, 3, H, generator=generator),
        sequence_ids=sequence_ids,
        anchor_positions=torch.randint(1, length + 1, (num_anchors,), generator=generator),
    )
    return {
        "context_features": torch.randn(num_anchors, 3, H, generator=generator),
        "inputs_embeds": torch.randn(num_anchors, group_size + K, H, generator=generator),
        "previous_token_ids": torch.randint(V - 1, (num_anchors, group_size), generator=generator),
        "draft_token_ids": torch.randint(V - 1, (num_anchors, K), generator=generator),
        "history": history,
    }


@torch.no_grad()
def hidden_states_of(drafter, batch):
    return drafter(**batch).last_hidden_state


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("context_fusion", ["sequence", "feature"])
def test_matches_the_formula(implementation, group_size, context_fusion, monkeypatch):
    monkeypatch.setattr(history_module, "ANCHORS_PER_DENSE_ROW", 3)  # several rows a sequence, the last not full
    drafter, batch = make_drafter(group_size, implementation, context_fusion=context_fusion), make_batch(group_size)
    weights = {name: value.double().numpy() for name, value in drafter.state_dict().items()}
    arrays = {name: value.numpy() for name, value in batch.items() if name != "history"}
    features, sequence_ids, anchors = (each.numpy() for each in batch["history"])
    pairs = [(features[sequence], anchor) for sequence, anchor in zip(sequence_ids, anchors, strict=True)]
    expected, head_states, *_ = reference(weights, SimpleNamespace(**SIZES), **arrays, history=pairs)
    with torch.no_grad():
        output = drafter(**batch)
    np.testing.assert_allclose(output.last_hidden_state, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(output.head_states, head_states, rtol=1e-5, atol=1e-5)


def test_positions_may_count_from_any_token_of_the_sequence():
    drafter, batch = make_drafter(), make_batch(num_anchors=1, num_sequences=1, length=40)
    history = batch["history"]._replace(anchor_positions=torch.tensor([38]))
    window = history._replace(features=history.features[:, 34:], anchor_positions=torch.tensor([4]))
    whole = hidden_states_of(drafter, {**batch, "history": history})
    torch.testing.assert_close(hidden_states_of(drafter, {**batch, "history": window}), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_an_anchor_sees_its_window_and_nothing_else(implementation):
    drafter, batch = make_drafter(implementation=implementation), make_batch()
    before, history = hidden_states_of(drafter, batch), batch["history"]
    for sequence in range(2):
        for t in range(history.features.shape[1]):
            features = history.features.clone()
            features[sequence, t] += 1.0
            changed = hidden_states_of(drafter, {**batch, "history": history._replace(features=features)}) != before
            a = history.anchor_positions
            sees = (history.sequence_ids == sequence) & (t >= a - W) & (t <= a - 2)
            assert changed.flatten(1).any(dim=1).tolist() == sees.tolist(), (sequence, t)


def test_anchors_do_not_see_one_another():
    drafter, batch = make_drafter(), make_batch()
    before = hidden_states_of(drafter, batch)
    for name in ("context_features", "inputs_embeds"):
        changed = batch[name].clone()
        changed[5] += 1.0
        differs = (hidden_states_of(drafter, {**batch, name: changed}) != before).flatten(1).any(dim=1)
        assert differs.nonzero().flatten().tolist() == [5]


def test_every_parameter_of_the_history_matters():
    drafter, batch = make_drafter(), make_batch()
    before = hidden_states_of(drafter, batch)
    for parameter in (*drafter.history_fuse.parameters(), *drafter.history_norm.parameters()):
        original = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn_like(parameter))
        assert (hidden_states_of(drafter, batch) - before).abs().max() > 1e-3
        with torch.no_grad():
            parameter.copy_(original)


def test_refuses_a_history_that_does_not_belong():
    batch = make_batch()
    without = {name: value for name, value in batch.items() if name != "history"}
    with pytest.raises(ValueError, match="missing.*4"):
        make_drafter()(**without)
    with pytest.raises(ValueError, match="given.*0"):
        make_drafter(history_window=0)(**batch)
    drafter = make_drafter()
    drafter.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2'.*'sdpa'"):
        drafter(**batch)


@pytest.mark.parametrize("prefill_chunk_size", [None, 3])
def test_generation_reads_the_window_of_a_fresh_forward(monkeypatch, prefill_chunk_size):
    target = make_target("llama")
    # A drafter that gets tokens accepted, so that rounds of every length follow one another.
    drafter = make_drafter_for(target, history_window=6, num_draft_tokens=3)
    inputs, options = make_inputs(target, 11), {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**inputs, **options)
    rounds, accepted, draft = [], iter([3, 1, 0, 2] * 10), drafter.draft

    def spy(features, embeds, previous, num_draft_tokens, sampler, history, *options):
        """Right for 3, 1, 0, 2, ... tokens, then wrong; remembers the history, and where the anchor stands."""
        ids, logits = draft(features, embeds, previous, num_draft_tokens, sampler, history, *options)
        anchor = lengths[-1] - 1
        rounds.append((history, anchor))
        truth, right = plain[0, anchor + 1 :], next(accepted)
        for k in range(min(ids.shape[1], len(truth))):
            ids[0, k] = truth[k] if k < right else (truth[k] + 1) % 90
        return ids, logits

    lengths, get_candidates = [], DLiteCandidateGenerator.get_candidates

    def noting_length(self, input_ids, *args, **kwargs):
        lengths.append(input_ids.shape[1])
        return get_candidates(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(drafter, "draft", spy)
    monkeypatch.setattr(DLiteCandidateGenerator, "get_candidates", noting_length)
    with speculation_statistics() as statistics:
        output = target.generate(**inputs, **options, assistant_model=drafter, prefill_chunk_size=prefill_chunk_size)
    assert torch.equal(output, plain)
    assert statistics.tau > 1.5
    with torch.no_grad():
        states = target(plain, output_hidden_states=True).hidden_states
    for history, anchor in rounds:
        assert history.anchor_positions.tolist() == [history.features.shape[1]]
        rows = [states[i + 1][:, max(0, anchor - 6) : anchor] for i in drafter.config.history_layer_ids]
        torch.testing.assert_close(history.features, torch.stack(rows, dim=2), rtol=1e-3, atol=1e-3)


def test_padding_on_the_left_is_no_history(monkeypatch):
    target = make_target("llama")
    drafter, inputs = make_drafter_for(target, history_window=6), make_inputs(target, 4)
    padded = {
        "input_ids": torch.nn.functional.pad(inputs["input_ids"], (3, 0)),
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (3, 0)),
    }
    histories, draft = [], drafter.draft

    def spy(*args):
        histories.append(args[5].features)
        return draft(*args)

    monkeypatch.setattr(drafter, "draft", spy)
    first = []
    for each in (inputs, padded):
        histories.clear()
        target.generate(**each, assistant_model=drafter, max_new_tokens=3, do_sample=False)
        first.append(histories[0])
    assert first[0].shape[1] == 4
    torch.testing.assert_close(first[1], first[0], rtol=1e-3, atol=1e-3)
