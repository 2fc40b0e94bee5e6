# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The training loss: cross entropy and total variation over the vocabulary, never holding all `[N * K, V]` logits."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable


# Rows of one matmul over the vocabulary: enough for its speed, and few enough to hold their logits.
_ROWS_PER_MATMUL = 512
# Rows whose fp32 distributions exist at a time: three scratch tensors of them should stay in the cache of a CPU.
_ROWS_PER_CHUNK = 16


class DraftingLoss(NamedTuple):
    """
    Args:
        loss: the weighted sum over rows, a scalar; only this carries a gradient.
        num_rows: rows of non-zero weight at every draft position `[K]`.
        num_correct: how many of them have the target's most likely token on top `[K]`.
        acceptance: the sum over them of 1 - TV / 2 `[K]`, the probability that speculative sampling accepts.
    """

    loss: torch.Tensor
    num_rows: torch.Tensor
    num_correct: torch.Tensor
    acceptance: torch.Tensor


def position_weights(num_draft_tokens: int, decay: float, device: torch.device | None = None) -> torch.Tensor:
    """w_k = exp(-(k - 1) / decay) for k = 1..K, `[K]` in fp32: a draft position counts only if those before it hold.

    Raises:
        ValueError: if `decay` is not positive.
    """
    if decay <= 0:
        raise ValueError(f"`decay` is {decay}, but must be positive; a large one weighs all positions alike.")
    return torch.exp(torch.arange(num_draft_tokens, device=device) / -decay)


def drafting_loss(
    head_states: torch.Tensor,
    output_weight: torch.Tensor,
    target_logits: torch.Tensor,
    target_rows: torch.Tensor,
    weights: torch.Tensor,
    token_labels: torch.Tensor | None = None,
    *,
    ce_weight: float = 0.1,
    tv_weight: float = 1.0,
) -> DraftingLoss:
    """The weighted sum of the losses of all rows (the paper's equation 7); the caller divides by a sum of weights.

        q = softmax(output_weight u);  p = softmax(target_logits[row])
        loss = sum w (ce_weight * -log q[label] + tv_weight * sum_v |p - q|)

    The gradients are computed on the way, a few rows at a time, so that neither the logits nor the distributions of
    all rows exist at once. Matmuls run in the autocast dtype where autocast is on, the rest in fp32 at least. Rows of
    zero weight cost nothing.

    Args:
        head_states: u `[N, K, r]`.
        output_weight: the head's vocabulary projection `[V, r]`.
        target_logits: the target's logits at the positions needed `[P, V]`, in its own dtype. A target with fewer rows
            than the drafter gives the missing tokens probability zero.
        target_rows: which row of `target_logits` predicts the same token as u `[N, K]`.
        weights: w `[N, K]`.
        token_labels: labels `[N, K]` of the cross entropy; the target's most likely token by default.
        ce_weight: weight of the cross entropy.
        tv_weight: weight of the total variation, which is not halved.

    Raises:
        ValueError: if the target has more logits than the drafter.
    """
    vocab_size, num_target_logits = output_weight.shape[0], target_logits.shape[-1]
    if num_target_logits > vocab_size:
        raise ValueError(
            f"The target has {num_target_logits} logits, but the drafter's vocabulary is {vocab_size}; make the "
            "drafter with the target's number as `vocab_size`."
        )
    anchors, positions = weights.nonzero(as_tuple=True)
    # Neighbouring anchors share target positions: sorted by them, a chunk needs few target distributions.
    order = target_rows[anchors, positions].argsort()
    anchors, positions = anchors[order], positions[order]

    device_type = head_states.device.type
    dtype = torch.promote_types(head_states.dtype, output_weight.dtype)
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    needs_grad = torch.is_grad_enabled() and (head_states.requires_grad or output_weight.requires_grad)
    with torch.autocast(device_type, enabled=False):
        loss, total_variation, correct = _ChunkedLoss.apply(
            head_states[anchors, positions],
            output_weight,
            target_logits,
            target_rows[anchors, positions],
            weights[anchors, positions],
            None if token_labels is None else token_labels[anchors, positions],
            ce_weight,
            tv_weight,
            dtype,
            needs_grad,
        )

    def per_position(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(weights.shape[1]).index_add_(0, positions, values)

    return DraftingLoss(
        loss,
        num_rows=per_position(torch.ones_like(total_variation)),
        num_correct=per_position(correct.to(total_variation.dtype)),
        acceptance=per_position(1 - total_variation / 2),
    )


class _ChunkedLoss(torch.autograd.Function):
    """Rows `[R, r]` sorted by target row in; loss, TV `[R]` and whether the two argmax agree `[R]` out."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        output_weight: torch.Tensor,
        target_logits: torch.Tensor,
        target_rows: torch.Tensor,
        weights: torch.Tensor,
        labels: torch.Tensor | None,
        ce_weight: float,
        tv_weight: float,
        dtype: torch.dtype,
        needs_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_rows, vocab_size = states.shape[0], output_weight.shape[0]
        rows, projection = states.to(dtype), output_weight.to(dtype)
        chunk_dtype = torch.promote_types(dtype, torch.float32)
        weights = weights.to(chunk_dtype)
        # Allocated once: fresh pages for every chunk would cost as much as the arithmetic.
        scratch = [rows.new_empty(min(_ROWS_PER_CHUNK, num_rows), vocab_size, dtype=chunk_dtype) for _ in range(3)]
        cross_entropy = torch.empty_like(weights)
        total_variation = torch.empty_like(weights)
        correct = torch.empty_like(weights, dtype=torch.bool)
        grad_states, grad_weight = torch.zeros_like(states), torch.zeros_like(output_weight)

        for first in range(0, num_rows, _ROWS_PER_MATMUL):
            block = slice(first, first + _ROWS_PER_MATMUL)
            logits = rows[block] @ projection.T
            for offset in range(0, logits.shape[0], _ROWS_PER_CHUNK):
                chunk_logits = logits[offset : offset + _ROWS_PER_CHUNK]
                chunk = slice(first + offset, first + offset + chunk_logits.shape[0])
                z, q, difference = (buffer[: chunk_logits.shape[0]] for buffer in scratch)

                needed, index = target_rows[chunk].unique_consecutive(return_inverse=True)
                p = target_logits[needed]
                p = nn.functional.pad(p, (0, vocab_size - p.shape[-1]), value=torch.finfo(p.dtype).min)
                p = p.to(chunk_dtype).softmax(dim=-1)
                top = p.argmax(dim=-1)[index]
                label = (top if labels is None else labels[chunk])[:, None]

                z.copy_(chunk_logits)
                torch.softmax(z, dim=-1, out=q)
                # log sum exp z, which the softmax knew, from the largest entry of either side.
                log_normalizer = z.amax(dim=-1) - q.amax(dim=-1).log()
                cross_entropy[chunk] = log_normalizer - z.gather(1, label)[:, 0]
                correct[chunk] = q.argmax(dim=-1) == top

                torch.index_select(p, 0, index, out=difference)
                torch.sub(q, difference, out=difference)
                signed = torch.sign(difference, out=z)
                total_variation[chunk] = difference.abs_().sum(dim=-1)
                if needs_grad:
                    # dTV/dz = q (s - sum s q), s = sign(q - p);  dCE/dz = q - onehot
                    signed.mul_(q)
                    ce, tv = ce_weight * weights[chunk, None], tv_weight * weights[chunk, None]
                    q.mul_(ce - tv * signed.sum(dim=-1, keepdim=True)).addcmul_(signed, tv)
                    q.scatter_add_(1, label, -ce)
                    chunk_logits.copy_(q)  # from here on the gradient of the logits
            if needs_grad:
                grad_states[block] = logits @ projection
                grad_weight += logits.T @ rows[block]

        if needs_grad:
            ctx.save_for_backward(grad_states, grad_weight)
        ctx.mark_non_differentiable(total_variation, correct)
        loss = (weights * (ce_weight * cross_entropy + tv_weight * total_variation)).sum()
        return loss, total_variation, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        # A scalar scales a tensor of any dtype without changing it.
        return *(gradient * grad_loss for gradient in ctx.saved_tensors), *[None] * 8
