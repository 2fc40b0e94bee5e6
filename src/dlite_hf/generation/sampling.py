# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Draws from distributions over the vocabulary, and the rule that makes a drawn draft follow the target's."""

import torch


def draw(weights: torch.Tensor) -> torch.Tensor:
    """Ids `[N]`, drawn as often as `weights` `[N, V]` say; they need not sum to 1.

    `torch.multinomial` draws a random number for every token of the vocabulary, which takes a CPU a millisecond; there
    one is enough, looked up in the cumulated weights.

    Raises:
        RuntimeError: if there is no positive weight, or one is not finite.
    """
    if weights.device.type == "cpu":
        cumulated = weights.cumsum(dim=-1, dtype=torch.float64)
        total = cumulated[:, -1:]
        if (total > 0).all() and total.isfinite().all():
            places = torch.searchsorted(cumulated, total * torch.rand_like(total), right=True)
            return places.squeeze(-1).clamp_max(weights.shape[-1] - 1)
    return torch.multinomial(weights, num_samples=1).squeeze(-1)


def speculative_sample(
    scores: torch.Tensor, draft_ids: torch.Tensor, draft_logits: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps or replaces drafted tokens so that the result follows softmax(scores) (Leviathan et al. 2023).

    Args:
        scores: the target's processed logits `[N, V]`.
        draft_ids: the drafted tokens `[N]`.
        draft_logits: the processed logits `[N, V]` that they were drawn from; `None` for a draft that was not drawn,
            which is a point mass.

    Returns:
        The tokens `[N]`, and whether each is the drafted one by acceptance `[N]`.
    """
    target_probs = scores.softmax(dim=-1)
    if draft_logits is None:
        draft_probs = torch.zeros_like(target_probs).scatter_(-1, draft_ids[:, None], 1.0)
    else:
        draft_probs = draft_logits.float().softmax(dim=-1)
    target_prob = target_probs.gather(-1, draft_ids[:, None])
    draft_prob = draft_probs.gather(-1, draft_ids[:, None])
    accepted = (torch.rand_like(target_prob) * draft_prob < target_prob).squeeze(-1)
    if accepted.all():
        return draft_ids, accepted
    residual = (target_probs - draft_probs).clamp_min_(0)
    # Two equal distributions leave no residual but for rounding; the target's own is then the limit.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, target_probs)
    return torch.where(accepted, draft_ids, draw(residual)), accepted


__all__ = ["draw", "speculative_sample"]
