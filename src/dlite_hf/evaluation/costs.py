# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Bytes and operations of a target and of its drafters, counted from their configurations."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from ..configuration_dlite import DLiteConfig
from ..estimate import DrafterFlops, TargetSize
from ..modeling_dlite import DLiteForDrafting


# Assumed, as serving frameworks fuse them: norm with residual, qkv, head norms with rotary, cache write, attention, o,
# norm with residual, gate and up, activation, down.
_LAYER_KERNELS = 10
_DLITE_STEP_KERNELS = 6  # embedding row, state projection, gate, hidden projection, vocabulary, choice of a token
_MARKOV_STEP_KERNELS = 3  # embedding row, vocabulary with addition, choice of a token
BFLOAT16_BYTES = 2

# What the rivals' papers and releases use (Qwen3-4B and 8B).
_DFLASH_NUM_TAPPED = 5
_DSPARK_RANK = 256


class Gpu(NamedTuple):
    """Peaks of a GPU: dense bfloat16 operations a second, bytes of memory a second, bytes of memory."""

    name: str
    flops: float
    bandwidth: float
    memory: float


class Work(NamedTuple):
    """Bytes moved, floating-point operations, and kernels of a step."""

    bytes: float
    flops: float
    kernels: int

    def seconds(self, gpu: Gpu, launch_seconds: float) -> float:
        """The longer of both, and the kernels' launches."""
        return max(self.bytes / gpu.bandwidth, self.flops / gpu.flops) + self.kernels * launch_seconds


@dataclass(frozen=True)
class Target:
    """A target in numbers.

    Args:
        size: its parameters and products.
        vocab_size: rows of its vocabulary, V.
        hidden_size: H.
        windows: for each layer, how many tokens of context it reads; `None` for all.
        kv_numbers: numbers that one token leaves in the cache of one layer.
        weight_bytes: of one weight of its layers; embedding and head are bfloat16, as quantisers leave them.
    """

    size: TargetSize
    vocab_size: int
    hidden_size: int
    windows: tuple[int | None, ...]
    kv_numbers: int
    weight_bytes: float = BFLOAT16_BYTES

    @classmethod
    def of(cls, config: PreTrainedConfig, weight_bytes: float = BFLOAT16_BYTES) -> "Target":
        """Counted from a configuration; nothing is loaded.

        Raises:
            ValueError: for a mixture of experts, since which experts a verification reads hangs on its tokens, and for
                layers without a key-value cache.
        """
        text_config = config.get_text_config(decoder=True)
        if getattr(text_config, "num_experts_per_tok", None):
            raise ValueError(
                f"{text_config.model_type!r} is a mixture of experts: how many of them a verification reads hangs on "
                "its tokens, which is not counted here; give a dense target."
            )
        num_layers = text_config.num_hidden_layers
        window = getattr(text_config, "sliding_window", None)
        # Without types, as in Mistral, all layers slide if any does.
        default = "full_attention" if window is None else "sliding_attention"
        layer_types = getattr(text_config, "layer_types", None) or [default] * num_layers
        if unknown := set(layer_types) - {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"Layers of the types {sorted(unknown)} are not counted here, only full and sliding attention; give "
                "another target."
            )
        sizes = DLiteConfig.from_target(config, mask_token_id=0)
        return cls(
            size=TargetSize.of(config),
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            windows=tuple(window if each == "sliding_attention" else None for each in layer_types),
            kv_numbers=2 * sizes.num_key_value_heads * sizes.head_dim,
            weight_bytes=weight_bytes,
        )

    @property
    def num_bytes(self) -> float:
        """Of all its weights."""
        return (
            self.size.products * self.weight_bytes + (self.size.num_parameters - self.size.products) * BFLOAT16_BYTES
        )

    def kv_bytes(self, context: int, batch_size: int) -> float:
        """Bytes of the cache that one forward reads."""
        return batch_size * self._context(context) * self.kv_numbers * BFLOAT16_BYTES

    def _context(self, context: int) -> int:
        """Cached tokens that are read, added up over the layers."""
        return sum(context if window is None else min(context, window) for window in self.windows)

    def forward(self, num_tokens: int, context: int, batch_size: int) -> list[Work]:
        """The steps of a forward over `num_tokens` tokens of each sequence, behind `context` cached ones."""
        rows, num_layers = batch_size * num_tokens, len(self.windows)
        products, scores = self.size.products, self.size.scores / num_layers
        seen = num_layers * num_tokens + self._context(context)
        return [
            # Beside the layers: the embeddings and the last norm.
            Work(products * self.weight_bytes, 2 * rows * products, num_layers * (_LAYER_KERNELS - 1) + 2),
            Work(
                self.kv_bytes(context, batch_size) + rows * num_layers * self.kv_numbers * BFLOAT16_BYTES,
                2 * rows * seen * scores,
                num_layers,
            ),
            _vocabulary(self.size.head, rows, self.vocab_size, kernels=2),
        ]


def _vocabulary(weights: float, rows: int, vocab_size: int, kernels: int) -> Work:
    """A projection to logits, which are written, and read once to choose a token."""
    return Work((weights + 2 * rows * vocab_size) * BFLOAT16_BYTES, 2 * rows * weights, kernels)


@dataclass(frozen=True)
class Drafter:
    """A drafter in numbers: a backbone that runs once a round, and a head.

    Args:
        name: what tables call it.
        config: of its backbone.
        backbone_weights: numbers that the backbone reads once a round.
        history_window: how many tokens of context it reads keys and values of: 0 none, `None` all.
        lm_head_weights: numbers of a projection to the vocabulary that all K positions share, read once a round.
        step_weights: numbers that are read again for each of the K positions, one after the other.
        step_kernels: kernels of such a step.
        num_parameters: what it adds to the target's.
    """

    name: str
    config: DLiteConfig
    backbone_weights: int
    history_window: int | None
    lm_head_weights: int
    step_weights: int
    step_kernels: int
    num_parameters: int

    @classmethod
    def of(cls, config: DLiteConfig, name: str = "DLite") -> "Drafter":
        """A DLite drafter; one with a history, such as a teacher, also reads its window from a cache."""
        with torch.device("meta"):
            drafter = DLiteForDrafting(config)
        total = drafter.num_parameters()
        head = drafter.sequential_head
        embedding = head.prev_token_embedding.weight.numel()  # a row is read
        head_size = sum(parameter.numel() for parameter in head.parameters())
        return cls(
            name=name,
            config=config,
            backbone_weights=total - head_size,
            history_window=max(config.history_window - 1, 0),
            lm_head_weights=0,
            step_weights=head_size - embedding,
            step_kernels=_DLITE_STEP_KERNELS,
            num_parameters=total,
        )

    @classmethod
    def dflash(cls, target_config: PreTrainedConfig, **overrides: Any) -> "Drafter":
        """DFlash's kind: DLite's backbone, but the target's `lm_head`, and keys and values of the whole context.

        Those of newly verified tokens are projected with weights that the block reads anyway; they are not counted.

        Args:
            target_config: the target's configuration.
            overrides: fields of the backbone's `DLiteConfig`, such as `num_draft_tokens`.
        """
        num_layers = target_config.get_text_config(decoder=True).num_hidden_layers
        tapped = list(range(min(_DFLASH_NUM_TAPPED, num_layers)))  # which ones costs nothing
        fields = {"target_layer_ids": tapped, "context_fusion": "feature", "mask_token_id": 0, **overrides}
        config = DLiteConfig.from_target(target_config, **fields)
        backbone = cls.of(config)
        return replace(
            backbone,
            name="DFlash-like",
            history_window=None,
            lm_head_weights=config.hidden_size * config.vocab_size,
            step_weights=0,
            step_kernels=0,
            num_parameters=backbone.backbone_weights,
        )

    @classmethod
    def dspark(cls, target_config: PreTrainedConfig, **overrides: Any) -> "Drafter":
        """DSpark's kind: as [`Drafter.dflash`], and a bias of rank 256 for each position, from the token before."""
        dflash = cls.dflash(target_config, **overrides)
        weights = dflash.config.vocab_size * _DSPARK_RANK
        return replace(
            dflash,
            name="DSpark-like",
            step_weights=weights,
            step_kernels=_MARKOV_STEP_KERNELS,
            num_parameters=dflash.num_parameters + 2 * weights,
        )

    def kv_bytes(self, context: int, batch_size: int) -> float:
        """Bytes of its own cache that a round reads."""
        per_token = self.config.num_hidden_layers * 2 * self.config.num_key_value_heads * self.config.head_dim
        return batch_size * self._history(context) * per_token * BFLOAT16_BYTES

    def _history(self, context: int) -> int:
        return context if self.history_window is None else min(context, self.history_window)

    def backbone(self, context: int, batch_size: int) -> list[Work]:
        """The steps of the backbone's forward over a block of each sequence."""
        config, layers = self.config, self.config.num_hidden_layers
        num_queries = config.anchor_group_size + config.num_draft_tokens
        scores = 2 * config.num_attention_heads * config.head_dim * layers
        flops = DrafterFlops.of(config, batch_size, 0, "sdpa").backbone
        return [
            # Beside the layers: the embeddings, depth embeddings, norm of the context, last norm.
            Work(self.backbone_weights * BFLOAT16_BYTES, flops, layers * (_LAYER_KERNELS - 1) + 4),
            Work(
                self.kv_bytes(context, batch_size),
                2 * batch_size * num_queries * self._history(context) * scores,
                layers,
            ),
        ]

    def head(self, batch_size: int) -> list[Work]:
        """The steps of proposing K tokens from the backbone's states."""
        num_tokens, vocab_size = self.config.num_draft_tokens, self.config.draft_vocab_size or self.config.vocab_size
        steps = [_vocabulary(self.step_weights, batch_size, vocab_size, self.step_kernels)] * num_tokens
        if not self.lm_head_weights:
            return steps
        shared = _vocabulary(self.lm_head_weights, batch_size * num_tokens, self.config.vocab_size, kernels=2)
        return [shared, *(steps if self.step_weights else [])]


__all__ = ["BFLOAT16_BYTES", "Drafter", "Gpu", "Target", "Work"]
