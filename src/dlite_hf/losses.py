# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The training losses over the vocabulary, never holding all `[N * K, V]` logits: CE, total variation, forward KL."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable


# Rows of one matmul over the vocabulary: enough for its speed, and few enough to hold their logits.
ROWS_PER_MATMUL = 512
# Rows whose fp32 distributions exist at a time: the scratch tensors of them should stay in the cache of a CPU.
_ROWS_PER_CHUNK = 16


class LossWeights(NamedTuple):
    """
    Args:
        ce: of the cross entropy.
        tv: of the total variation, which is not halved.
        kl: of the forward KL divergence from the teacher.
    """

    ce: float = 0.1
    tv: float = 1.0
    kl: float = 0.0


STABLE = LossWeights()


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


class TargetDistribution(NamedTuple):
    """
    What the target predicts at P positions, over the V_d tokens that the drafter can propose.

    Args:
        logits: `[P, V_d]`, in the target's own dtype. Fewer columns give the missing tokens probability zero.
        log_normalizer: the logarithm of the sum of all V exponentials `[P]`, where `logits` leaves some of them out.
        top: the column of the most likely of all V tokens `[P]`, -1 where it is left out; with `log_normalizer`.
    """

    logits: torch.Tensor
    log_normalizer: torch.Tensor | None = None
    top: torch.Tensor | None = None


def position_weights(num_draft_tokens: int, decay: float, device: torch.device | None = None) -> torch.Tensor:
    """w_k = exp(-(k - 1) / decay) for k = 1..K, `[K]` in fp32: a draft position counts only if those before it hold.

    Raises:
        ValueError: if `decay` is not positive.
    """
    if decay <= 0:
        raise ValueError(f"`decay` is {decay}, but must be positive; a large one weighs all positions alike.")
    return torch.exp(torch.arange(num_draft_tokens, device=device) / -decay)


def target_distribution(logits: torch.Tensor, draft_vocab_ids: torch.Tensor | None) -> TargetDistribution:
    """The distribution of a target with these logits `[P, V]`, cut to the draft vocabulary where there is one.

    Args:
        logits: the target's logits.
        draft_vocab_ids: the sorted ids of the draft vocabulary `[V_d]`; `None` for all V.
    """
    if draft_vocab_ids is None:
        return TargetDistribution(logits)
    inside = draft_vocab_ids[draft_vocab_ids < logits.shape[-1]]
    log_normalizer = torch.cat([rows.float().logsumexp(dim=-1) for rows in logits.split(_ROWS_PER_CHUNK)])
    top = logits.argmax(dim=-1)
    column = torch.searchsorted(inside, top).clamp_max(len(inside) - 1)
    return TargetDistribution(logits[:, inside], log_normalizer, torch.where(inside[column] == top, column, -1))


def drafting_loss(
    head_states: torch.Tensor,
    output_weight: torch.Tensor,
    target: TargetDistribution,
    target_rows: torch.Tensor,
    weights: torch.Tensor,
    token_labels: torch.Tensor | None = None,
    loss_weights: LossWeights = STABLE,
    teacher_states: torch.Tensor | None = None,
    teacher_output_weight: torch.Tensor | None = None,
) -> DraftingLoss:
    """The weighted sum of the losses of all rows (the paper's equations 6, 7); the caller divides by a sum of weights.

        q = softmax(output_weight u);  p = the target's distribution;  t = softmax(teacher_output_weight u_teacher)
        loss = sum w (ce * -log q[label] + tv * sum_v |p - q| + kl * sum_v t log (t / q))

    q and t have the tokens that the drafter can propose; TV counts what p gives to others. The gradients are computed
    on the way, a few rows at a time, so that neither the logits nor the distributions of all rows exist at once.
    Matmuls run in the autocast dtype where autocast is on, the rest in fp32 at least. Rows of zero weight are skipped.

    Args:
        head_states: u `[N, K, r]`.
        output_weight: the head's vocabulary projection `[V_d, r]`.
        target: the target's distributions at the P positions needed.
        target_rows: which row of `target` predicts the same token as u `[N, K]`.
        weights: w `[N, K]`.
        token_labels: labels `[N, K]` of the cross entropy, as rows of `output_weight`; the target's most likely token
            by default. A label of -1, which the drafter cannot propose, has no cross entropy.
        loss_weights: the weight of each loss.
        teacher_states: the teacher's u `[N, K, r_teacher]`, for the KL divergence.
        teacher_output_weight: the teacher's vocabulary projection `[V_d, r_teacher]`.

    Raises:
        ValueError: if the target has more logits than the drafter, or a KL divergence lacks its teacher.
    """
    vocab_size, num_target_logits = output_weight.shape[0], target.logits.shape[-1]
    if num_target_logits > vocab_size:
        raise ValueError(
            f"The target has {num_target_logits} logits, but the drafter's vocabulary is {vocab_size}; make the "
            "drafter with the target's number as `vocab_size`."
        )
    if loss_weights.kl == 0:
        teacher_states = teacher_output_weight = None
    elif teacher_states is None or teacher_output_weight is None or len(teacher_output_weight) != vocab_size:
        found = None if teacher_output_weight is None else len(teacher_output_weight)
        raise ValueError(
            f"The KL divergence needs a teacher over the drafter's {vocab_size} tokens, but it has {found}; give the "
            "teacher the drafter's draft vocabulary."
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
            target,
            target_rows[anchors, positions],
            weights[anchors, positions],
            None if token_labels is None else token_labels[anchors, positions],
            loss_weights,
            None if teacher_states is None else teacher_states[anchors, positions],
            teacher_output_weight,
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
        target: TargetDistribution,
        target_rows: torch.Tensor,
        weights: torch.Tensor,
        labels: torch.Tensor | None,
        loss_weights: LossWeights,
        teacher_states: torch.Tensor | None,
        teacher_weight: torch.Tensor | None,
        dtype: torch.dtype,
        needs_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_rows, vocab_size = states.shape[0], output_weight.shape[0]
        rows, projection = states.to(dtype), output_weight.to(dtype)
        chunk_dtype = torch.promote_types(dtype, torch.float32)
        weights = weights.to(chunk_dtype)
        # Allocated once: fresh pages for every chunk would cost as much as the arithmetic.
        num_scratch = 3 if teacher_states is None else 5
        scratch = rows.new_empty(num_scratch, min(_ROWS_PER_CHUNK, num_rows), vocab_size, dtype=chunk_dtype)
        loss = weights.new_zeros(())
        total_variation = torch.empty_like(weights)
        correct = torch.empty_like(weights, dtype=torch.bool)
        grad_states, grad_weight = torch.zeros_like(states), torch.zeros_like(output_weight)

        for first in range(0, num_rows, ROWS_PER_MATMUL):
            block = slice(first, first + ROWS_PER_MATMUL)
            logits = rows[block] @ projection.T
            teacher_logits = None
            if teacher_states is not None and teacher_weight is not None:
                teacher_logits = teacher_states[block].to(dtype) @ teacher_weight.to(dtype).T
            for offset in range(0, logits.shape[0], _ROWS_PER_CHUNK):
                chunk_logits = logits[offset : offset + _ROWS_PER_CHUNK]
                size = chunk_logits.shape[0]
                chunk = slice(first + offset, first + offset + size)
                z, q, difference = scratch[:3, :size]
                w = weights[chunk]

                needed, index = target_rows[chunk].unique_consecutive(return_inverse=True)
                p, top, outside = _probabilities(target, needed, vocab_size, chunk_dtype)
                top, outside = top[index], outside[index]
                label = top if labels is None else labels[chunk]

                z.copy_(chunk_logits)
                torch.softmax(z, dim=-1, out=q)
                # log sum exp z, which the softmax knew, from the largest entry of either side.
                log_normalizer = z.amax(dim=-1) - q.amax(dim=-1).log()
                ce = loss_weights.ce * w * (label >= 0)
                label = label.clamp_min(0)[:, None]
                loss += (ce * (log_normalizer - z.gather(1, label)[:, 0])).sum()
                correct[chunk] = q.argmax(dim=-1) == top
                if teacher_logits is not None:
                    y, t = scratch[3:, :size]
                    y.copy_(teacher_logits[offset : offset + size])
                    torch.softmax(y, dim=-1, out=t)
                    log_ratio = log_normalizer - y.amax(dim=-1) + t.amax(dim=-1).log()
                    loss += (loss_weights.kl * w * (y.sub_(z).mul_(t).sum(dim=-1) + log_ratio)).sum()

                torch.index_select(p, 0, index, out=difference)
                torch.sub(q, difference, out=difference)
                signed = torch.sign(difference, out=z)
                total_variation[chunk] = difference.abs_().sum(dim=-1) + outside
                if needs_grad:
                    # dTV/dz = q (s - sum s q), s = sign(q - p);  dCE/dz = q - onehot;  dKL/dz = q - t
                    signed.mul_(q)
                    tv, kl = loss_weights.tv * w[:, None], loss_weights.kl * w[:, None]
                    q.mul_(ce[:, None] + kl - tv * signed.sum(dim=-1, keepdim=True)).addcmul_(signed, tv)
                    q.scatter_add_(1, label, -ce[:, None])
                    if teacher_logits is not None:
                        q.addcmul_(t, -kl)
                    chunk_logits.copy_(q)  # from here on the gradient of the logits
            if needs_grad:
                grad_states[block] = logits @ projection
                grad_weight += logits.T @ rows[block]

        if needs_grad:
            ctx.save_for_backward(grad_states, grad_weight)
        ctx.mark_non_differentiable(total_variation, correct)
        return loss + loss_weights.tv * (weights * total_variation).sum(), total_variation, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        # A scalar scales a tensor of any dtype without changing it.
        return *(gradient * grad_loss for gradient in ctx.saved_tensors), *[None] * 9


def _probabilities(
    target: TargetDistribution, rows: torch.Tensor, vocab_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The target's probabilities `[P, V_d]` of some rows, the most likely token's column, and what V_d leaves out."""
    logits = target.logits[rows]
    logits = nn.functional.pad(logits, (0, vocab_size - logits.shape[-1]), value=torch.finfo(logits.dtype).min)
    logits = logits.to(dtype)
    if target.log_normalizer is None or target.top is None:
        p = logits.softmax(dim=-1)
        return p, p.argmax(dim=-1), p.new_zeros(len(rows))
    p = (logits - target.log_normalizer[rows, None]).exp_()
    return p, target.top[rows], (1 - p.sum(dim=-1)).clamp_min_(0)
