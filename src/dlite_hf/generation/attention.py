# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""`attn_implementation="sdpa_packed"`: a draft is verified without a copy of the cache for every query head."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


SDPA_PACKED = "sdpa_packed"
# A longer chunk is of a prompt: packing gains nothing there, and its mask would be repeated.
_MOST_PACKED_TOKENS = 16
# To Transformers, packed queries are those of a module without groups, that is not causal beyond its mask.
_PACKED_MODULE = SimpleNamespace(is_causal=False)
# Of attention sinks, which `sdpa` leaves out, and of sparse models, which make a mask of them only for implementations
# that they know by name.
_UNKNOWN_ARGUMENTS = ("s_aux", "indices", "block_indices")


def sdpa_packed_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    Transformers' `sdpa`, with grouped queries packed for up to 16 tokens, as it packs them itself for one token with
    a mask: `[N, G * H, T, D]` becomes `[N, H, G * T, D]` beside keys `[N, H, L, D]`, which `sdpa` would copy G times.

    Raises:
        ValueError: if the model's attention has sinks or a sparse pattern, or shares its last layers' cache.
    """
    unknown = [name for name in _UNKNOWN_ARGUMENTS if kwargs.get(name) is not None]
    # Such a model prepares queries for `sdpa` alone, by its name.
    if getattr(getattr(module, "config", None), "num_kv_shared_layers", 0):
        unknown.append("num_kv_shared_layers")
    if unknown:
        raise ValueError(
            f"`{SDPA_PACKED}` does not serve {type(module).__name__} with {unknown}; load the model with another "
            "`attn_implementation`, such as 'eager'."
        )
    num_sequences, num_heads, num_tokens, head_dim = query.shape
    num_groups = num_heads // key.shape[1]
    # One for all heads, with a row for each query.
    has_shared_mask = attention_mask is not None and attention_mask.shape[1:3] == (1, num_tokens)
    if (
        num_groups == 1
        or num_tokens > _MOST_PACKED_TOKENS
        or position_bias is not None
        or not (has_shared_mask or (attention_mask is None and num_tokens == 1))
    ):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, is_causal=is_causal, position_bias=position_bias, **kwargs
        )
    packed = query.reshape(num_sequences, key.shape[1], num_groups * num_tokens, head_dim)
    if attention_mask is not None:
        attention_mask = attention_mask.repeat(1, 1, num_groups, 1)
    output, _ = sdpa_attention_forward(_PACKED_MODULE, packed, key, value, attention_mask, is_causal=False, **kwargs)
    # As in `sdpa`, the batch is the output's: queries that are learned have one row for all.
    output = output.view(len(output), num_groups, num_tokens, key.shape[1], value.shape[-1]).permute(0, 2, 3, 1, 4)
    return output.reshape(len(output), num_tokens, num_heads, value.shape[-1]), None


def register_attention() -> None:
    """Lets `from_pretrained(attn_implementation="sdpa_packed")` and `set_attn_implementation` know it."""
    AttentionInterface.register(SDPA_PACKED, sdpa_packed_attention_forward)
    AttentionMaskInterface.register(SDPA_PACKED, sdpa_mask)
