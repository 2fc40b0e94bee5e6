# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Which positions are anchors, how blocks are laid out, and which tokens are frequent."""

import math

import pytest
import torch
from datasets import Dataset

from dlite_hf.data import drafting_data_collator, most_frequent_tokens, sample_anchors, sample_blocks


def brute_force_anchors(supervised):
    """Per row, all a with tokens a and a + 1 supervised, 1 <= a <= T - 2."""
    return [[a for a in range(1, len(row) - 1) if row[a] and row[a + 1]] for row in supervised.tolist()]


def test_anchors_are_exactly_the_valid_positions():
    supervised = torch.rand(50, 30, generator=torch.Generator().manual_seed(0)) > 0.4
    supervised[:5] = True
    supervised[5:10] = False
    anchors = sample_anchors(supervised, max_anchors=512).tolist()
    assert anchors == [[row, a] for row, each in enumerate(brute_force_anchors(supervised)) for a in each]


def test_anchors_are_drawn_uniformly_without_replacement_and_sorted():
    supervised = torch.tensor([[False] * 3 + [True] * 11, [False] * 9 + [True] * 3 + [False] * 2])
    valid = brute_force_anchors(supervised)
    counts = torch.zeros(14)
    for seed in range(600):
        anchors = sample_anchors(supervised, 4, torch.Generator().manual_seed(seed))
        first = anchors[anchors[:, 0] == 0, 1].tolist()
        assert len(first) == 4 and first == sorted(set(first)) and set(first) <= set(valid[0])
        assert anchors[anchors[:, 0] == 1, 1].tolist() == valid[1]
        counts[first] += 1
    # 600 * 4 / 10 draws of each are expected, with a standard deviation of 12.
    assert ((counts[valid[0]] - 240).abs() < 60).all()


def test_the_collator_pads_on_the_right():
    batch = drafting_data_collator(
        [{"input_ids": [5, 6, 7], "supervised": [False, True, True]}, {"input_ids": [8], "supervised": [True]}]
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["supervised"].tolist() == [[False, True, True], [True, False, False]]
    cut = drafting_data_collator([{"input_ids": [5, 6, 7], "supervised": [False, True, True]}], max_length=2)
    assert cut["input_ids"].tolist() == [[5, 6]] and cut["supervised"].tolist() == [[False, True]]


def make_blocks(features, **overrides):
    options = {"max_anchors": 512, "num_draft_tokens": 3, "anchor_group_size": 2, "loss_decay": 4.0}
    return sample_blocks(drafting_data_collator(features), **{**options, **overrides})


def test_blocks_hold_the_tokens_around_their_anchor():
    ids = list(range(10, 20))
    blocks = make_blocks([{"input_ids": ids, "supervised": [False] * 4 + [True] * 6}])
    assert blocks["anchors"].tolist() == [[0, a] for a in range(4, 9)]
    for (_, a), previous, drafted, weights in zip(
        *(blocks[name].tolist() for name in ("anchors", "previous_token_ids", "draft_token_ids", "weights")),
        strict=True,
    ):
        inside = min(3, len(ids) - 1 - a)
        assert previous == [ids[a - 1], ids[a]]
        assert drafted[:inside] == ids[a + 1 : a + 1 + inside]
        assert weights == pytest.approx([math.exp(-k / 4) for k in range(inside)] + [0] * (3 - inside))
    assert (
        make_blocks([{"input_ids": ids, "supervised": [True] * 10}], anchor_group_size=1)["previous_token_ids"].shape[
            1
        ]
        == 1
    )


def test_weights_are_zero_behind_a_hole_and_in_the_padding():
    features = [
        {"input_ids": list(range(9)), "supervised": [True, True, True, False, True, True, True, True, True]},
        {"input_ids": list(range(4)), "supervised": [True] * 4},
    ]
    blocks = make_blocks(features, num_draft_tokens=4)
    reached = {
        tuple(anchor): (row > 0).sum().item()
        for anchor, row in zip(blocks["anchors"].tolist(), blocks["weights"], strict=True)
    }
    # Row 0 has its hole at 3: from anchor 1 only token 2 counts. Row 1 ends at 3, the batch at 8.
    assert reached == {(0, 1): 1, (0, 4): 4, (0, 5): 3, (0, 6): 2, (0, 7): 1, (1, 1): 2, (1, 2): 1}
    for row in (blocks["weights"] > 0).tolist():
        assert row == sorted(row, reverse=True)


def test_a_batch_without_anchors_has_one_of_no_weight():
    blocks = make_blocks([{"input_ids": [1, 2, 3, 4], "supervised": [False, True, False, True]}])
    assert blocks["weights"].tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("changed", [3, 6, 11])
def test_a_later_token_reaches_no_earlier_block(changed, group_size):
    """Changing token t leaves what a block is given before t, and its labels at other positions, as they were."""
    ids = list(range(10, 22))
    features = [{"input_ids": ids, "supervised": [False, True, True, False] + [True] * 8}] * 2
    before = make_blocks(features, anchor_group_size=group_size)
    other = {**features[0], "input_ids": ids[:changed] + [99] + ids[changed + 1 :]}
    after = make_blocks([features[0], other], anchor_group_size=group_size)
    rows, positions = before["anchors"].T
    assert torch.equal(before["anchors"], after["anchors"]) and torch.equal(before["weights"], after["weights"])

    is_given = (rows[:, None] == 1) & (positions[:, None] + torch.arange(1 - group_size, 1) == changed)
    assert torch.equal(before["previous_token_ids"] != after["previous_token_ids"], is_given)
    drafted = positions[:, None] + torch.arange(1, 4)
    is_label = (rows[:, None] == 1) & (drafted.clamp_max(len(ids) - 1) == changed)
    assert torch.equal(before["draft_token_ids"] != after["draft_token_ids"], is_label)
    assert is_label.any()


def test_padding_reaches_no_block():
    short = {"input_ids": [10, 11, 12, 13, 14], "supervised": [False, False, True, True, True]}
    alone = make_blocks([short])
    padded = make_blocks([short, {"input_ids": list(range(30)), "supervised": [False] * 28 + [True] * 2}])
    is_short = padded["anchors"][:, 0] == 0
    assert is_short.sum() == 2
    for name in ("anchors", "previous_token_ids", "weights"):
        assert torch.equal(padded[name][is_short], alone[name])
    counts = alone["weights"] > 0
    assert torch.equal(padded["draft_token_ids"][is_short][counts], alone["draft_token_ids"][counts])


SAMPLES = [
    {"input_ids": [9, 9, 9, 9, 5, 5, 5, 7], "supervised": [False] * 4 + [True] * 4},
    {"input_ids": [4, 3, 7, 1], "supervised": [False, True, True, True]},
]  # supervised: 5 three times, 7 twice, 1 and 3 once


@pytest.mark.parametrize("as_dataset", [False, True])
def test_the_most_frequent_tokens_and_their_coverage(as_dataset):
    samples = Dataset.from_list(SAMPLES) if as_dataset else SAMPLES
    assert most_frequent_tokens(samples, 2, [], vocab_size=10) == ([5, 7], 5 / 7)
    assert most_frequent_tokens(samples, 3, [], vocab_size=10) == ([1, 5, 7], 6 / 7)
    # The end of turn takes a place, whether it occurs or not.
    assert most_frequent_tokens(samples, 2, [1], vocab_size=10) == ([1, 5], 4 / 7)
    assert most_frequent_tokens(samples, 2, [8, 8], vocab_size=10) == ([5, 8], 3 / 7)
    # Filled up with the lowest ids, the prompts' tokens among them like any other.
    assert most_frequent_tokens(samples, 7, [8], vocab_size=10) == ([0, 1, 2, 3, 5, 7, 8], 1.0)
    assert most_frequent_tokens(samples, 10, [8], vocab_size=10).token_ids == list(range(10))
    assert most_frequent_tokens(samples, 500, [8, 8], vocab_size=1000).token_ids == list(range(500))
    assert most_frequent_tokens(samples, 1, [8, 8], vocab_size=10) == ([8], 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size 0 .* 10 "),
        ({"size": 11}, "size 11 .* 10 "),
        ({"size": 1, "always_include": [1, 2]}, "size 1 .* 2 of `always_include`"),
        ({"vocab_size": 7}, "id 7 .* 7"),
        ({"always_include": [12]}, "id 12 .* 10"),
        ({"samples": [{"input_ids": [1, 2], "supervised": [False, False]}]}, "No token"),
    ],
)
def test_refuses_what_is_no_draft_vocabulary(options, message):
    with pytest.raises(ValueError, match=message):
        most_frequent_tokens(**{"samples": SAMPLES, "size": 2, "always_include": [], "vocab_size": 10, **options})
