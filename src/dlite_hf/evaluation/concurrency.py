# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Tokens a second of many sequences at once, over the batch size: the shape of the paper's Table 4.

```python
prompts = [render_prompt(tokenizer, session.turns[0].context([]))[0].tolist() for session in make_sessions(task)]
print(concurrency_table(measure_concurrency(target, prompts, make_methods(target))))
```
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from ..generation.attention import SDPA_PACKED
from ..generation.statistics import time_when_idle
from .markdown import make_table
from .measuring import Clock, use_generation_config
from .methods import PLAIN, Method, neutral_generation_config


BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)  # the paper's
CONTINUOUS_BATCHING = "continuous batching"  # plain generation by `generate_batch`, which is no call of `generate`
_ONE_SEQUENCE = "serves one sequence a call"
_PAGE_SIZE = ContinuousBatchingConfig().page_size  # tokens
_MAX_BATCH_TOKENS = 8192  # of one forward, as Transformers limits it


def measure_concurrency(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    methods: Sequence[Method],
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    max_new_tokens: int = 128,
    repeats: int = 3,
    clock: Clock = time.perf_counter,
) -> list[dict[str, Any]]:
    """Generates greedily for 1, 2, 4, ... prompts at once, and takes the time of all of it, prefill included.

    Every sequence gets exactly `max_new_tokens`, since no token ends one: a batch runs as long as its
    longest sequence does, so with ends allowed the tokens a second would tell how alike the answers' lengths are.
    Prompts are padded on the left. At each batch size all methods run once unrecorded, then take turns in being first.

    Beside the plain methods runs Transformers' own continuous batching, without padding; its set-up is not timed. A
    method that serves one sequence a call, as DLite and all assisted decoding of Transformers do, is measured at the
    batch size 1 only: a loop over the sequences would be no batch.

    Args:
        target: the target, in evaluation mode.
        prompts: token ids of one task's prompts. A batch takes the first ones, from the beginning again where there
            are fewer than its size.
        methods: ways to generate, each with its own name.
        batch_sizes: how many sequences at once.
        max_new_tokens: tokens of each sequence.
        repeats: recorded runs; the figure is their median.
        clock: tells the time in seconds.

    Returns:
        A dictionary for each batch size and method: `method`, `kind`, `batch_size`, `distinct_prompts`,
        `prompt_tokens`, `padding_tokens`, `new_tokens` (of all sequences together), `seconds` (a list), and
        `median_seconds` and `tokens_per_second`. These three are `None` where it could not run, and `note` says why.

    Raises:
        ValueError: if the target is in training mode, there is no prompt or method, a name repeats, or a number is
            below 1; or if `generate` did not return `max_new_tokens`.
    """
    _check(target, prompts, methods, [max_new_tokens, repeats, *batch_sizes])
    rows = []
    for batch_size in batch_sizes:
        batch = list(islice(cycle(map(list, prompts)), batch_size))
        runs: dict[str, Callable[[], float]] = {
            method.name: partial(_generate, target, method, batch, max_new_tokens, clock)
            for method in methods
            if method.kind == PLAIN or batch_size == 1
        }
        kinds = {method.name: method.kind for method in methods}
        if PLAIN in kinds.values():
            kinds[CONTINUOUS_BATCHING] = CONTINUOUS_BATCHING
            runs[CONTINUOUS_BATCHING] = partial(_generate_continuously, target, batch, max_new_tokens, clock)
        seconds, notes = _time(runs, repeats)
        prompt_tokens = sum(map(len, batch))
        for name, kind in kinds.items():
            median = statistics.median(seconds[name]) if name in seconds else None
            padding = 0 if kind == CONTINUOUS_BATCHING else batch_size * max(map(len, batch)) - prompt_tokens
            rows.append(
                {
                    "method": name,
                    "kind": kind,
                    "batch_size": batch_size,
                    "distinct_prompts": min(batch_size, len(prompts)),
                    "prompt_tokens": prompt_tokens,
                    "padding_tokens": padding,
                    "new_tokens": batch_size * max_new_tokens,
                    "seconds": seconds.get(name),
                    "median_seconds": median,
                    "tokens_per_second": None if median is None else batch_size * max_new_tokens / median,
                    "note": notes.get(name, None if name in runs else _ONE_SEQUENCE),
                }
            )
    return rows


def concurrency_table(rows: Sequence[dict[str, Any]]) -> str:
    """Tokens a second in Markdown, a column for each batch size, and why there are none where there are none.

    In brackets: over the first plain method at the same batch size, which is itself measured anew for each.
    """
    sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
    figures = {(row["method"], row["batch_size"]): row["tokens_per_second"] for row in rows}
    first = next((row["method"] for row in rows if row["kind"] == PLAIN), None)

    def cell(name: str, size: int) -> str:
        figure, plain = figures[name, size], figures.get((first, size)) if first is not None else None
        if figure is None:
            return "-"
        return f"{figure:,.1f}" + (f" ({figure / plain:.2f}x)" if plain and name != first else "")

    names = list(dict.fromkeys(row["method"] for row in rows))
    table = make_table(["batch size", *sizes], [[name, *(cell(name, size) for size in sizes)] for name in names])
    reasons = Counter((row["method"], row["note"]) for row in rows if row["note"] is not None)
    notes = [
        f"* {name}, batch size "
        + ", ".join(str(row["batch_size"]) for row in rows if (row["method"], row["note"]) == (name, note))
        + f": {note}."
        for name, note in reasons
    ]
    new_tokens = rows[0]["new_tokens"] // rows[0]["batch_size"]
    repeats = max((len(row["seconds"]) for row in rows if row["seconds"]), default=0)
    introduction = (
        f"Generated tokens a second, all sequences together, prefill included; {new_tokens:,} new tokens each, "
        f"median of {repeats}."
    )
    return "\n\n".join([introduction, table, *(["\n".join(notes)] if notes else [])])


def _check(target: Any, prompts: Sequence[Any], methods: Sequence[Method], numbers: Iterable[int]) -> None:
    if target.training:
        raise ValueError("The target is in training mode, so dropout may run; call `target.eval()`.")
    if not prompts or not all(prompts):
        raise ValueError(f"There must be at least one prompt, and none without tokens; got {len(prompts)} prompts.")
    names = [method.name for method in methods]
    if not names or len({*names, CONTINUOUS_BATCHING}) <= len(names):
        raise ValueError(
            f"The methods are {names}; give at least one, and each its own name, other than {CONTINUOUS_BATCHING!r}."
        )
    if min(numbers) < 1:
        raise ValueError("`max_new_tokens`, `repeats` and every one of `batch_sizes` must be at least 1.")


def _time(runs: dict[str, Callable[[], float]], repeats: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The seconds of each run's repeats, and why the others have none."""
    seconds: dict[str, list[float]] = {}
    notes: dict[str, str] = {}
    for repeat in range(-1, repeats):
        shift = max(repeat, 0) % max(len(runs), 1)
        for name in [*runs, *runs][shift : shift + len(runs)]:
            if name in notes or (repeat < 0 and name == CONTINUOUS_BATCHING):  # which warms up within every call
                continue
            try:
                elapsed = runs[name]()
            except (torch.OutOfMemoryError, _ContinuousBatchingError) as error:
                notes[name] = "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error)
                seconds.pop(name, None)
            else:
                if repeat >= 0:
                    seconds.setdefault(name, []).append(elapsed)
    return seconds, notes


def _generate(
    target: PreTrainedModel, method: Method, prompts: list[list[int]], max_new_tokens: int, clock: Clock
) -> float:
    """Seconds of one call of `generate` for all prompts, which it gets padded on the left."""
    config = neutral_generation_config(target.generation_config)
    config.eos_token_id = None  # nothing ends early, and no processor has to see to it
    length = max(map(len, prompts))
    input_ids = torch.full((len(prompts), length), config.pad_token_id or 0)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, length - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, length - len(prompt) :] = 1
    inputs = {"input_ids": input_ids.to(target.device), "attention_mask": attention_mask.to(target.device)}
    with (
        use_generation_config(target, config),
        use_generation_config(method.assistant, getattr(method.assistant, "generation_config", None)),
    ):
        started = time_when_idle(target.device, clock)
        sequences = target.generate(
            **inputs,
            **method.generate_kwargs(),
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        seconds = time_when_idle(target.device, clock) - started
    if sequences.shape != (len(prompts), length + max_new_tokens):
        raise ValueError(
            f"{method.name!r} returned sequences {list(sequences.shape)} for {len(prompts)} prompts of {length} "
            f"tokens and {max_new_tokens} new ones; only a full batch can be timed."
        )
    return seconds


class _ContinuousBatchingError(RuntimeError):
    """Continuous batching does not work for this target on this device."""


def _generate_continuously(
    target: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int, clock: Clock
) -> float:
    """Seconds from handing in all prompts until the last answer is complete.

    The manager is there for this call alone, since it changes the target's attention meanwhile.

    Raises:
        _ContinuousBatchingError: whatever went wrong.
    """
    config = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=-1, pad_token_id=0)
    settings = ContinuousBatchingConfig(
        # Room for all of them and no more: on a CPU the default is 90% of the machine's memory.
        num_blocks=sum(math.ceil((len(prompt) + max_new_tokens) / _PAGE_SIZE) for prompt in prompts),
        max_batch_tokens=min(_MAX_BATCH_TOKENS, sum(map(len, prompts))),
        safety_margin=0.0,
        allow_block_sharing=False,  # else a later repeat would find its prompts in the cache
    )
    is_packed = target.config._attn_implementation == SDPA_PACKED
    try:
        if is_packed:
            target.set_attn_implementation("sdpa")  # of the two it knows this one
        with target.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=settings
        ) as manager:
            _serve(manager, prompts, 1)  # its thread makes the cache with the first forward
            started = time_when_idle(target.device, clock)
            _serve(manager, prompts, max_new_tokens)
            return time_when_idle(target.device, clock) - started
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # which models, attentions and devices it serves is documented nowhere
        raise _ContinuousBatchingError(f"does not work here ({type(error).__name__}: {error})") from error
    finally:
        if is_packed:
            target.set_attn_implementation(SDPA_PACKED)


def _serve(manager: Any, prompts: list[list[int]], max_new_tokens: int) -> None:
    manager.add_requests(prompts, max_new_tokens=max_new_tokens)
    num_finished = 0
    while num_finished < len(prompts):
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("its thread ended before the answers were complete")
        elif result.is_finished():
            if result.error is not None or len(result.generated_tokens) != max_new_tokens:
                raise RuntimeError(result.error or f"an answer has {len(result.generated_tokens)} tokens")
            num_finished += 1


__all__ = ["BATCH_SIZES", "CONTINUOUS_BATCHING", "concurrency_table", "measure_concurrency"]
