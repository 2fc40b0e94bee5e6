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
from typing import Any

from ..estimate import PEAK_FLOPS
from . import metrics
from .costs import BFLOAT16_BYTES, Drafter, Gpu, Target, Work
from .markdown import make_table, number
from .methods import PLAIN
from .metrics import Row


SIMULATED = "Simulated from counted bytes and operations, not measured."

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
    memory = target.num_bytes + drafter.num_parameters * BFLOAT16_BYTES + target_kv + draft_kv
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


__all__ = ["GPUS", "LAUNCH_SECONDS", "SIMULATED", "compare_with_measurement", "roofline_table", "simulate"]
