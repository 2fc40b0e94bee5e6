# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""How anchors of the same sequence share its history: the packing, positions and mask of a drafter that keeps one."""

from typing import NamedTuple

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .configuration_dlite import DLiteConfig


# Anchors that share a row under a dense mask, most of which is empty: their blocks do not see one another.
ANCHORS_PER_DENSE_ROW = 16


class DLiteHistory(NamedTuple):
    """
    What a drafter with a history window reads of the tokens before the pivots.

    Args:
        features (`torch.FloatTensor` of shape `[B, T, M, H]`):
            The target's hidden states of its M layers `config.history_layer_ids` at T tokens of B sequences.
        sequence_ids (`torch.LongTensor` of shape `[N]`): which sequence an anchor belongs to.
        anchor_positions (`torch.LongTensor` of shape `[N]`):
            Where the anchor stands, a, counted from the first of the T tokens: it reads a - W .. a - 2.
    """

    features: torch.Tensor
    sequence_ids: torch.Tensor
    anchor_positions: torch.Tensor


class HistoryLayout:
    """
    Anchors packed into rows of up to g anchors of one sequence, so that its history is projected once and masked.

    The keys of a row are the history's T tokens, then g * S context slots, then g * Q queries.

    Args:
        history: the history, and what belongs to which sequence.
        config: of the drafter; its attention implementation decides on g and the mask's form.
        num_context_slots: S.
        group_size: G.
        num_queries: Q = G + K.
        dtype: of the mask, where it is added to scores.

    Raises:
        ValueError: if the attention implementation cannot take a mask of our own.
    """

    def __init__(
        self,
        history: DLiteHistory,
        config: DLiteConfig,
        num_context_slots: int,
        group_size: int,
        num_queries: int,
        dtype: torch.dtype,
    ):
        implementation, window = config._attn_implementation, config.history_window
        if implementation not in ("eager", "sdpa", "flex_attention"):
            raise ValueError(
                f"`attn_implementation` is {implementation!r}, but a drafter with `history_window` {window} needs a "
                "mask; use 'eager', 'sdpa' or 'flex_attention'."
            )
        sequence_ids, device = history.sequence_ids, history.sequence_ids.device
        num_sequences, num_tokens = history.features.shape[:2]
        self.num_anchors = len(sequence_ids)
        counts = sequence_ids.bincount(minlength=num_sequences)
        group = int(counts.max())
        if implementation != "flex_attention":  # which skips what is masked
            group = min(group, ANCHORS_PER_DENSE_ROW)
        rows_per_sequence = (counts + group - 1) // group
        order = sequence_ids.argsort(stable=True)
        owner = sequence_ids[order]
        rank = torch.arange(self.num_anchors, device=device) - (counts.cumsum(0) - counts)[owner]
        row = (rows_per_sequence.cumsum(0) - rows_per_sequence)[owner] + rank // group
        self.sequence_of_row = torch.arange(num_sequences, device=device).repeat_interleave(rows_per_sequence)
        # Free places hold one more anchor, number N, of zeros, which sees itself alone.
        self._slots = torch.full((len(self.sequence_of_row), group), self.num_anchors, device=device)
        self._slots[row, rank % group] = order
        self._place = torch.empty_like(order).scatter_(0, order, row * group + rank % group)

        anchors = torch.cat([history.anchor_positions, history.anchor_positions.new_zeros(1)])[self._slots]
        slots = torch.arange(group, device=device)
        slot_of_query = slots.repeat_interleave(num_queries)
        no_slot = slots.new_full((num_tokens,), -1)
        slot_of_key = torch.cat([no_slot, slots.repeat_interleave(num_context_slots), slot_of_query])

        def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            slot = slot_of_query[query]
            anchor = anchors[row, slot]
            in_window = (key < num_tokens) & (key >= anchor - window) & (key <= anchor - 2)
            return in_window | (slot_of_key[key] == slot)

        num_rows = len(self.sequence_of_row)
        self.mask = ALL_MASK_ATTENTION_FUNCTIONS[implementation](
            batch_size=num_rows,
            q_length=len(slot_of_query),
            kv_length=len(slot_of_key),
            mask_function=sees,
            dtype=dtype,
            device=device,
            allow_is_causal_skip=False,
        )
        # All positions count from the history's first token: rotary attention sees differences alone.
        offsets = torch.arange(num_queries, device=device) - (group_size - 1)
        history_positions = torch.arange(num_tokens, device=device).expand(num_rows, -1)
        context_positions = (anchors - 1)[..., None].expand(-1, -1, num_context_slots).flatten(1)
        block_positions = (anchors[..., None] + offsets).flatten(1)
        self.position_ids = torch.cat([history_positions, context_positions, block_positions], dim=1)

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """`[N, M, H]` of the anchors as `[rows, g * M, H]`."""
        states = torch.cat([states, states.new_zeros(1, *states.shape[1:])])
        return states[self._slots].flatten(1, 2)

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """`[rows, g * M, H]` as `[N, M, H]` of the anchors."""
        return states.unflatten(1, (self._slots.shape[1], -1)).flatten(0, 1)[self._place]
