# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""From samples to what a drafter learns: batches, anchors, blocks and their weights, the tokens that occur most."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from .losses import position_weights


class DraftVocabulary(NamedTuple):
    """The tokens that a drafter with a reduced vocabulary can propose.

    Args:
        token_ids: their ids, sorted.
        coverage: the fraction of the corpus's supervised tokens that are among them.
    """

    token_ids: list[int]
    coverage: float


def most_frequent_tokens(
    samples: Iterable[dict[str, Any]], size: int, always_include: Collection[int], vocab_size: int
) -> DraftVocabulary:
    """The `size` most frequent supervised tokens of a corpus; where two are as frequent, the lower id.

    Args:
        samples: `input_ids` and `supervised`.
        size: how many tokens; those that never occur fill it up, lowest ids first.
        always_include: ids that are among them however rare, such as the target's end-of-turn ids.
        vocab_size: the target's vocabulary size.

    Raises:
        ValueError: if `size` is out of its range, `always_include` does not fit into it, a token is not in the
            vocabulary, or nothing is supervised.
    """
    included = sorted(set(always_include))
    if not max(1, len(included)) <= size <= vocab_size:
        raise ValueError(
            f"A draft vocabulary of size {size} was asked for, but it must hold at least one token and the "
            f"{len(included)} of `always_include`, and at most the {vocab_size} of the vocabulary; choose one between."
        )
    counts = torch.zeros(vocab_size, dtype=torch.long)
    largest = max(included, default=0)
    for sample in samples:
        input_ids = torch.as_tensor(sample["input_ids"], dtype=torch.long)
        supervised = torch.as_tensor(sample["supervised"], dtype=torch.bool)
        token_ids, number = input_ids[supervised].unique(return_counts=True)
        largest = max([largest, *token_ids[-1:].tolist()])
        if largest >= vocab_size:
            break
        counts[token_ids] += number
    if largest >= vocab_size:
        raise ValueError(
            f"Token id {largest} is not in a vocabulary of {vocab_size}; give the samples, the end-of-turn ids and "
            "the vocabulary size of one target."
        )
    total = int(counts.sum())
    if total == 0:
        raise ValueError("No token of the samples is supervised, so none is frequent; give samples of answers.")
    rank = counts.clone()
    rank[included] = total + 1
    # Stable: tokens that are as frequent, or never occur, stay in the order of their ids.
    chosen = rank.sort(descending=True, stable=True).indices[:size]
    return DraftVocabulary(chosen.sort().values.tolist(), int(counts[chosen].sum()) / total)


def drafting_data_collator(
    features: Sequence[dict[str, Any]], max_length: int | None = None
) -> dict[str, torch.Tensor]:
    """Pads samples on the right: `input_ids`, `attention_mask` and `supervised`, each `[B, T]`.

    Longer ones are cut after `max_length` tokens. The anchors are drawn later, by [`sample_blocks`]: a data loader
    fetches ahead of the step, and what it drew at random would differ after a resumption.
    """
    input_ids = [torch.as_tensor(feature["input_ids"][:max_length], dtype=torch.long) for feature in features]
    supervised = [torch.as_tensor(feature["supervised"][:max_length], dtype=torch.bool) for feature in features]
    return {
        "input_ids": pad_sequence(input_ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(ids) for ids in input_ids], batch_first=True),
        "supervised": pad_sequence(supervised, batch_first=True),
    }


def sample_anchors(
    supervised: torch.Tensor, max_anchors: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Anchors `[N, 2]` (row, position) of a batch, sorted: up to `max_anchors` a row, uniform without replacement.

    Position a is valid where tokens a and a + 1 are supervised and a >= 1, since features are read at a - 1.

    Args:
        supervised: `[B, T]`, false in the padding.
        max_anchors: the most anchors that a row gets.
        generator: a source of randomness on the CPU; the global one by default.
    """
    valid = supervised[:, :-1] & supervised[:, 1:]
    valid[:, :1] = False
    anchors = []
    for row, row_valid in enumerate(valid.cpu()):
        positions = row_valid.nonzero()[:, 0]
        if len(positions) > max_anchors:
            chosen = torch.randperm(len(positions), generator=generator)[:max_anchors]
            positions = positions[chosen.sort().values]
        anchors.append(torch.stack([torch.full_like(positions, row), positions], dim=1))
    return torch.cat(anchors).to(supervised.device)


def sample_blocks(
    batch: dict[str, torch.Tensor],
    *,
    max_anchors: int,
    num_draft_tokens: int,
    anchor_group_size: int,
    loss_decay: float,
    generator: torch.Generator | None = None,
) -> dict[str, torch.Tensor]:
    """Draws the anchors of a padded batch, and lays out the block of K tokens behind each of them.

    Args:
        batch: `input_ids`, `attention_mask` and `supervised`, each `[B, T]`.
        max_anchors: as in [`sample_anchors`].
        num_draft_tokens: K.
        anchor_group_size: G.
        loss_decay: gamma of the weights, see [`~dlite_hf.losses.position_weights`].
        generator: as in [`sample_anchors`].

    Returns:
        `input_ids` and `attention_mask` as they are, `anchors` `[N, 2]`, `draft_token_ids` `[N, K]`,
        `previous_token_ids` `[N, G]` with the anchor last, and `weights` `[N, K]`, zero from the first unsupervised
        position of a block on. A batch without a valid anchor has one whose weights are all zero.
    """
    input_ids, supervised = batch["input_ids"], batch["supervised"]
    anchors = sample_anchors(supervised, max_anchors, generator)
    if len(anchors) == 0:
        anchors = anchors.new_tensor([[0, 1]])
    rows, positions = anchors[:, :1], anchors[:, 1:]
    length = input_ids.shape[1]
    drafted = positions + torch.arange(1, num_draft_tokens + 1, device=anchors.device)
    previous = positions + torch.arange(1 - anchor_group_size, 1, device=anchors.device)
    inside = drafted < length
    drafted = drafted.clamp_max(length - 1)
    # What comes after a hole cannot be drafted: the product drops to zero and stays there.
    reached = (supervised[rows, drafted] & inside).cumprod(dim=1)
    return {
        "input_ids": input_ids,
        "attention_mask": batch["attention_mask"],
        "anchors": anchors,
        "draft_token_ids": input_ids[rows, drafted],
        "previous_token_ids": input_ids[rows, previous],
        "weights": position_weights(num_draft_tokens, loss_decay, anchors.device) * reached,
    }
