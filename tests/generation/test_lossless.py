# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Greedy output with a drafter is the target's own, for every kind of target and drafter."""

import math

import pytest
import torch

from ..replay import expected_pivots, generate_with_statistics, make_replay_drafter
from ..targets import ARCHITECTURES, make_drafter, make_inputs, make_target


def describe_difference(sequences, plain):
    """Where two outputs part, and how close the target's two best tokens were there."""
    place = int((sequences[0] != plain.sequences[0]).nonzero()[0])
    scores = plain.scores[place - plain.sequences.shape[1]][0]
    best = scores.topk(2).values
    return f"first difference at {place}, where the top-2 gap is {float(best[0] - best[1]):.2e}"


def check_lossless(target, num_draft_tokens, num_right, prompt_lengths, max_new_tokens, feature_tolerance=1e-3):
    """Generates with and without a drafter, greedily, and compares outputs, cache lengths and the features seen."""
    drafter = make_drafter(target, num_draft_tokens=num_draft_tokens)
    replaying = num_right != "random"
    if replaying:
        drafter = make_replay_drafter(drafter, num_right)
    num_drafted = num_accepted = 0
    for seed, length in enumerate(prompt_lengths):
        inputs = make_inputs(target, length, seed)
        options = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
        plain = target.generate(**inputs, **options, output_scores=True)
        assert len(set(plain.sequences[0, -max_new_tokens:].tolist())) >= 9, "too dull to test with"
        if replaying:
            others = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
            drafter.replay(target, plain.sequences, **others)
        output, statistics = generate_with_statistics(target, drafter, **inputs, **options)
        assert torch.equal(output.sequences, plain.sequences), describe_difference(output.sequences, plain)
        assert output.cache.get_seq_length() == plain.cache.get_seq_length() == plain.sequences.shape[1] - 1
        if replaying:
            pivots = expected_pivots(statistics, inputs["input_ids"].shape[1])
            assert drafter.pivots == pivots[: len(drafter.pivots)]
            assert len(pivots) - len(drafter.pivots) <= 1  # the last token may leave no room for a draft
            assert max(drafter.errors) < feature_tolerance
        if num_right is None:
            assert statistics.num_rounds == math.ceil((max_new_tokens - 1) / (num_draft_tokens + 1))
        num_drafted += statistics.num_drafted_tokens
        num_accepted += sum(statistics.accepted_per_position)
    if replaying:
        assert num_accepted > 0
    if num_right is None:
        assert num_accepted == num_drafted
    else:
        assert num_accepted < num_drafted


@pytest.mark.parametrize("num_right", [None, 1, 3, "random"], ids=["oracle", "1_right", "3_right", "random"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5, 7, 15])
def test_every_drafter_and_block_size(num_draft_tokens, num_right):
    if num_draft_tokens == 1 and num_right in (1, 3):
        pytest.skip("a block of one token cannot be right and then wrong")
    if num_right == 3:
        num_right = min(3, num_draft_tokens - 1)
    check_lossless(make_target("llama"), num_draft_tokens, num_right, (1, 2, 3, 7, 12, 20, 31, 40), 64)


@pytest.mark.parametrize("num_right", [None, 3, "random"], ids=["oracle", "3_right", "random"])
@pytest.mark.parametrize("num_draft_tokens", [2, 7])
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "llama"])
def test_every_architecture(architecture, num_draft_tokens, num_right):
    if num_right == 3:
        num_right = min(3, num_draft_tokens - 1)
    check_lossless(make_target(architecture), num_draft_tokens, num_right, (1, 5, 20, 33), 32)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["mistral", "gemma3"])
def test_sliding_windows(architecture, attn_implementation):
    target = make_target(architecture)
    target.set_attn_implementation(attn_implementation)
    for num_right in (None, 3):
        check_lossless(target, 7, num_right, (20,), 40)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_features_are_those_of_a_forward_from_scratch(architecture):
    # In double, where these random targets do not amplify rounding: a wrong row or norm is off by far more.
    target = make_target(architecture).double()
    if architecture == "qwen3_moe":
        target.set_experts_implementation("eager")  # the others have no double
    check_lossless(target, 3, 2, (5, 20), 32, feature_tolerance=1e-5)
