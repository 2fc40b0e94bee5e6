# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""SIMULATED speedups on a given GPU, from counted bytes and operations and the GPU's peak speeds. Nothing is measured.

A step takes as long as its bytes need at the peak bandwidth or its products at the peak of the tensor cores, whichever
is longer, and a fixed time for each kernel. Real kernels reach less of both peaks, so milliseconds are lower bounds;
in a speedup most of that cancels.

```python
target = Target.of(config)
drafter = Drafter.of(DLiteConfig.from_target(config, mask_token_id=0))
print(roofline_table([simulate(target, drafter, GPUS["h200"], tau=3.0, context=32768)]))
```
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from ..configuration_dlite import DLiteConfig
from ..estimate import PEAK_FLOPS, DrafterFlops, TargetSize
from ..modeling_dlite import DLiteForDrafting
from . import metrics
from .markdown import make_table, number
from .methods import PLAIN
from .metrics import Row


SIMULATED = "Simulated from counted bytes and operations, not measured."


class Gpu(NamedTuple):
    """Peaks of a GPU: dense bfloat16 operations a second, bytes of memory a second, bytes of memory."""

    name: str
    flops: float
    bandwidth: float
    memory: float


# Bandwidth and memory from NVIDIA's data sheets of the H200, the H800 (SXM, the H100's) and the GeForce RTX 40 laptops
# (128 bits of GDDR6 at 16 Gbit/s). For the last the sheet names 321 TOPS of sparse 8-bit products; an eighth of them
# are dense bfloat16 ones with fp32 sums: 144 tensor cores * 128 a cycle * 2.175 GHz, at its highest power.
GPUS = {
    "h200": Gpu("H200", PEAK_FLOPS["h200"], 4.8e12, 141e9),
    "h800": Gpu("H800", PEAK_FLOPS["h800"], 3.35e12, 80e9),
    "rtx-4070-laptop": Gpu("RTX 4070 laptop", 40.1e12, 256e9, 8e9),
}

# Assumed, not measured: the pause between two kernels of a CUDA graph. Kernels that Python launches one by one come
# several times as far apart, which then decides the time of small models.
LAUNCH_SECONDS = 1e-6

# Assumed, as serving frameworks fuse them: norm with residual, qkv, head norms with rotary, cache write, attention, o,
# norm with residual, gate and up, activation, down.
_LAYER_KERNELS = 10
_DLITE_STEP_KERNELS = 6  # embedding row, state projection, gate, hidden projection, vocabulary, choice of a token
_MARKOV_STEP_KERNELS = 3  # embedding row, vocabulary with addition, choice of a token
_NUMBER = 2  # bytes of a bfloat16 number

# What the rivals' papers and releases use (Qwen3-4B and 8B).
_DFLASH_NUM_TAPPED = 5
_DSPARK_RANK = 256


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
    weight_bytes: float = _NUMBER

    @classmethod
    def of(cls, config: PreTrainedConfig, weight_bytes: float = _NUMBER) -> "Target":
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
        return self.size.products * self.weight_bytes + (self.size.num_parameters - self.size.products) * _NUMBER

    def kv_bytes(self, context: int, batch_size: int) -> float:
        """Bytes of the cache that one forward reads."""
        return batch_size * self._context(context) * self.kv_numbers * _NUMBER

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
                self.kv_bytes(context, batch_size) + rows * num_layers * self.kv_numbers * _NUMBER,
                2 * rows * seen * scores,
                num_layers,
            ),
            _vocabulary(self.size.head, rows, self.vocab_size, kernels=2),
        ]


def _vocabulary(weights: float, rows: int, vocab_size: int, kernels: int) -> Work:
    """A projection to logits, which are written, and read once to choose a token."""
    return Work((weights + 2 * rows * vocab_size) * _NUMBER, 2 * rows * weights, kernels)


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
        return batch_size * self._history(context) * per_token * _NUMBER

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
            Work(self.backbone_weights * _NUMBER, flops, layers * (_LAYER_KERNELS - 1) + 4),
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


def simulate(
    target: Target,
    drafter: Drafter,
    gpu: Gpu,
    *,
    tau: float,
    context: int,
    batch_size: int = 1,
    launch_seconds: float = LAUNCH_SECONDS,
) -> dict[str, Any]:
    """Expected times of a round, and the speedup of decoding that follows. SIMULATED.

    Args:
        target: the target.
        drafter: its drafter.
        gpu: where both run, in bfloat16 (the target's layers as its `weight_bytes` say).
        tau: tokens emitted a verification, measured or assumed.
        context: tokens of each sequence before the round.
        batch_size: sequences that run together, all in step.
        launch_seconds: assumed for each kernel.

    Returns:
        A JSON-able dictionary with `simulated` true, the inputs, `plain_ms` (one token without a drafter), `verify_ms`
        (K + 1 tokens), `backbone_ms`, `head_ms`, `round_ms`, `speedup`, `tokens_per_second` of all sequences together,
        `verify_share`, `backbone_share` and `head_share` of the round, `target_kv_bytes` and `draft_kv_bytes` read a
        round, `memory_bytes` (weights and caches), and `fits`, whether the GPU has that much.

    Raises:
        ValueError: unless `1 <= tau <= K + 1`, `context` is at least 0 and `batch_size` at least 1, or if target and
            drafter have different sizes.
    """
    num_verified = drafter.config.num_draft_tokens + 1
    if not 1 <= tau <= num_verified:
        raise ValueError(f"`tau` is {tau}, but {drafter.name} emits from 1 to {num_verified} tokens a verification.")
    if context < 0 or batch_size < 1:
        raise ValueError(f"`context` is {context} and `batch_size` {batch_size}; give at least 0 and at least 1.")
    sizes = (target.hidden_size, target.vocab_size)
    if (drafter.config.hidden_size, drafter.config.vocab_size) != sizes:
        raise ValueError(
            f"The drafter is for a target of hidden size {drafter.config.hidden_size} and {drafter.config.vocab_size} "
            f"tokens, but this one has {sizes[0]} and {sizes[1]}; give the drafter of this target."
        )

    def milliseconds(steps: Iterable[Work]) -> float:
        return 1000 * sum(step.seconds(gpu, launch_seconds) for step in steps)

    plain = milliseconds(target.forward(1, context, batch_size))
    verify = milliseconds(target.forward(num_verified, context, batch_size))
    backbone = milliseconds(drafter.backbone(context, batch_size))
    head = milliseconds(drafter.head(batch_size))
    total = verify + backbone + head
    target_kv, draft_kv = target.kv_bytes(context, batch_size), drafter.kv_bytes(context, batch_size)
    memory = target.num_bytes + drafter.num_parameters * _NUMBER + target_kv + draft_kv
    return {
        "simulated": True,
        "gpu": gpu.name,
        "drafter": drafter.name,
        "tau": tau,
        "num_draft_tokens": num_verified - 1,
        "context": context,
        "batch_size": batch_size,
        "launch_seconds": launch_seconds,
        "target_weight_bytes": target.weight_bytes,
        "plain_ms": plain,
        "verify_ms": verify,
        "backbone_ms": backbone,
        "head_ms": head,
        "round_ms": total,
        "speedup": plain * tau / total,
        "tokens_per_second": 1000 * batch_size * tau / total,
        "verify_share": verify / total,
        "backbone_share": backbone / total,
        "head_share": head / total,
        "target_kv_bytes": target_kv,
        "draft_kv_bytes": draft_kv,
        "memory_bytes": memory,
        "fits": memory <= gpu.memory,
    }


def roofline_table(simulated: Sequence[dict[str, Any]]) -> str:
    """The results of [`simulate`] in Markdown, said to be simulated."""
    header = [
        "GPU",
        "drafter",
        "tau",
        "context",
        "batch",
        "plain ms",
        "verify ms",
        "backbone ms",
        "head ms",
        "speedup",
        "draft KV MB",
        "memory GB",
    ]
    lines = [
        [
            each["gpu"],
            each["drafter"],
            number(each["tau"]),
            f"{each['context']:,}",
            each["batch_size"],
            *(number(each[name]) for name in ("plain_ms", "verify_ms", "backbone_ms", "head_ms")),
            number(each["speedup"], unit="x"),
            f"{each['draft_kv_bytes'] / 1e6:,.0f}",
            number(each["memory_bytes"] / 1e9, 1) + ("" if each["fits"] else " (does not fit)"),
        ]
        for each in simulated
    ]
    assumed = [
        ", ".join(f"{value:g}" for value in sorted(values))
        for values in (
            {1e6 * each["launch_seconds"] for each in simulated},
            {each["target_weight_bytes"] for each in simulated},
        )
    ]
    introduction = (
        f"**{SIMULATED}** Peak speeds of the GPU; assumed: {assumed[0]} us a kernel, {assumed[1]} bytes a weight of "
        "the target's layers."
    )
    return f"{introduction}\n\n{make_table(header, lines)}"


def compare_with_measurement(simulated: dict[str, Any], rows: Iterable[Row], method: str) -> str:
    """A simulation beside a report's rows, in Markdown: how far peak speeds are from what a GPU really does.

    The simulation has not been checked on a GPU by its authors, who had none at hand: this is the check, for whoever
    has a report of `dlite-hf evaluate` from such a machine. Tests run it on made-up rows only.

    Args:
        simulated: a result of [`simulate`], for the GPU, batch size 1, the drafter and about the context of the rows.
        rows: a report's rows of one temperature.
        method: the drafter's name in them.

    Raises:
        ValueError: if the simulation is of several sequences at once, or no row measures both plain generation and
            `method`.
    """
    if simulated["batch_size"] != 1:
        raise ValueError(
            f"The simulation is of {simulated['batch_size']} sequences at once, but reports measure one; simulate 1."
        )
    both = metrics.measured_rows(metrics.measured_rows(rows, method), PLAIN)
    if not both:
        raise ValueError(f"No row measures both {PLAIN!r} and {method!r}; give rows that do.")
    plain = [row["measurements"][PLAIN] for row in both]
    plain_tokens = sum(each["tokens"] - each["prefill_tokens"] for each in plain)
    plain_seconds = sum(each["seconds"] - each["first_token_seconds"] for each in plain)
    context = sum(row["prompt_tokens"] + each["tokens"] / 2 for row, each in zip(both, plain, strict=True)) / len(both)
    times, tau = metrics.round_times(both, method), metrics.tau(both, method)
    speedup = metrics.speedup(both, method, decode_only=True)
    draft_ms = simulated["backbone_ms"] + simulated["head_ms"]
    figures: list[tuple[str, float, float | None, str]] = [
        ("ms a plain token", simulated["plain_ms"], 1000 * plain_seconds / plain_tokens if plain_tokens else None, ""),
        ("ms a verification", simulated["verify_ms"], None if times is None else times.verifying, ""),
        ("ms of drafting a round", draft_ms, None if times is None else times.drafting, ""),
        ("ms of bookkeeping a round", 0.0, None if times is None else times.bookkeeping, ""),
        ("tau", simulated["tau"], None if tau is None else tau.value, ""),
        ("speedup of decoding", simulated["speedup"], None if speedup is None else speedup.value, "x"),
    ]
    lines = [
        [
            name,
            number(ours, unit=unit),
            number(real, unit=unit),
            "-" if real is None or not ours else number(real / ours),
        ]
        for name, ours, real, unit in figures
    ]
    introduction = (
        f"Simulated for {simulated['gpu']} at {simulated['context']:,} tokens of context; measured: {method!r}, "
        f"{len(both)} rows, {context:,.0f} tokens of context on average."
    )
    return f"{introduction}\n\n{make_table(['', 'simulated', 'measured', 'measured / simulated'], lines)}"


__all__ = [
    "GPUS",
    "LAUNCH_SECONDS",
    "SIMULATED",
    "Drafter",
    "Gpu",
    "Target",
    "Work",
    "compare_with_measurement",
    "roofline_table",
    "simulate",
]
