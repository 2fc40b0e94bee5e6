# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""First weights of a drafter, taken from its target."""

from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from .target import text_decoder


if TYPE_CHECKING:
    from .modeling_dlite import DLiteForDrafting


@torch.no_grad()
def copy_from_target(drafter: "DLiteForDrafting", target: PreTrainedModel) -> None:
    """Starts the head as the best rank-r copy of the target's `lm_head`, behind the target's final norm.

    With lm_head = U S V^T, cut to rank r: `output_proj` = U sqrt(S), the hidden part of `state_hidden_mlp` =
    sqrt(S) V^T, so that before training logits_k is about lm_head_r(norm(x_k)); `prev_token_embedding` = U sqrt(S).
    The rest keeps its random weights. A target without an output embedding of the hidden size leaves all of it random.
    """
    head, rank = drafter.sequential_head, drafter.config.sequential_rank
    lm_head = target.get_output_embeddings()
    if lm_head is None or lm_head.weight.shape[-1] != drafter.config.hidden_size:
        return
    weight = lm_head.weight.float()
    rank = min(rank, *weight.shape)
    # The Gram matrix is [H, H]: its eigenvectors are V, far cheaper than the SVD of [V, H].
    eigenvalues, vectors = torch.linalg.eigh(weight.T.double() @ weight.double())
    vectors = vectors[:, -rank:].flip(1).float()
    scale = eigenvalues[-rank:].flip(0).clamp_min(torch.finfo(torch.float32).tiny).pow(0.25).float()
    factors = weight @ (vectors / scale)
    head.output_proj.weight[: weight.shape[0], :rank].copy_(factors)
    head.prev_token_embedding.weight[: weight.shape[0], :rank].copy_(factors)
    head.state_hidden_mlp.weight[:rank, drafter.config.sequential_rank :].copy_((vectors * scale).T)
    gain = _final_norm_gain(target, drafter.config.hidden_size)
    if gain is not None:
        drafter.norm.weight.copy_(gain)


def _final_norm_gain(target: PreTrainedModel, hidden_size: int) -> torch.Tensor | None:
    """What the decoder's final norm multiplies with `[H]`, measured on it, since Gemma's stores the gain minus one."""
    children = [child for child in text_decoder(target)[0].children() if not isinstance(child, nn.Embedding)]
    norms = [child for child in children if getattr(getattr(child, "weight", None), "shape", None) == (hidden_size,)]
    if len(norms) != 1:
        return None
    # Mean zero and mean square one: an RMSNorm and a LayerNorm both return gain * signs + bias.
    signs = torch.ones_like(cast(torch.Tensor, norms[0].weight))
    signs[1::2] = -1
    return (norms[0](signs) - norms[0](-signs)) / 2 * signs
