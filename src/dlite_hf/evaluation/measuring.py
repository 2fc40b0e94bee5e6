# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""One timed call of `generate`: its seconds, and how many tokens came in which round."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel, StaticCache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from ..generation.statistics import SpeculationStatistics, speculation_statistics, time_when_idle
from .methods import PLAIN, Method, neutral_generation_config


# Seconds from any fixed moment on.
Clock = Callable[[], float]


@dataclass(frozen=True)
class Measurement:
    """What one call of `generate` took. A counter that a method does not offer is `None`.

    Args:
        tokens: generated tokens.
        prefill_tokens: those of them that came out of the call's first forward: one, but more where a draft was
            verified within the prefill, as assisted decoding of Transformers does.
        cached_tokens: tokens of the prompt that the cache held before the call.
        first_token_seconds: from the call to its first token.
        seconds: the whole call.
        rounds: forwards of the target after the prefill, each of which verifies a draft, if only an empty one.
        emitted: tokens that the rounds emitted, `tokens - prefill_tokens`.
        accepted_per_position: in how many rounds the draft token at position 1, 2, ... was accepted and emitted. Of
            Transformers' own methods only the tokens of a round are seen, and the last of them counts as the target's:
            where an end of sequence or a limit cut a draft there, one accepted token of the call is missing.
        tested_per_position: in how many rounds the draft token at position 1, 2, ... was compared with the target.
        drafted: draft tokens proposed.
        drafting_seconds: spent on drafting.
        verifying_seconds: spent on the rounds' forwards of the target.
        peak_bytes: CUDA only: the most memory allocated during the call, beyond what was allocated before.
    """

    tokens: int
    prefill_tokens: int
    cached_tokens: int
    first_token_seconds: float
    seconds: float
    rounds: int | None = None
    emitted: int | None = None
    accepted_per_position: list[int] | None = None
    tested_per_position: list[int] | None = None
    drafted: int | None = None
    drafting_seconds: float | None = None
    verifying_seconds: float | None = None
    peak_bytes: int | None = None


def sampling_options(temperature: float) -> dict[str, Any]:
    """Arguments of `generate`: greedy at temperature 0, else the whole distribution at this temperature."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def measure(
    target: PreTrainedModel,
    method: Method,
    prompt_ids: torch.Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    cache: Cache | None = None,
    cached_tokens: int = 0,
    clock: Clock = time.perf_counter,
) -> tuple[Measurement, GenerateDecoderOnlyOutput]:
    """Generates once, and measures it.

    Neither the target's own generation configuration, special tokens apart, nor what an earlier call left in an
    assistant's has an effect; both are afterwards as before. On an accelerator the times are taken once the device is
    idle; timing a DLite drafter's rounds waits for it twice a round.

    Args:
        target: the target, in evaluation mode.
        method: how to generate.
        prompt_ids (`torch.LongTensor` of shape `[1, T]`): the whole prompt.
        max_new_tokens: where the answer is cut.
        temperature: 0 is greedy.
        seed: of the random numbers that sampling draws.
        cache: one that holds the first `cached_tokens` of the prompt.
        cached_tokens: how many those are.
        clock: tells the time in seconds.

    Returns:
        The measurement, and what `generate` returned: `sequences` `[1, T + tokens]`, and the `cache`.
    """
    prompt_ids = prompt_ids.to(target.device)
    options = {**method.generate_kwargs(), **sampling_options(temperature), "max_new_tokens": max_new_tokens}
    if cache is None and options.get("cache_implementation") == "static":
        # `generate` would make none shorter than any before it, and the target would remember its length.
        config = target.config.get_text_config(decoder=True)
        needed = prompt_ids.shape[1] + max_new_tokens  # an earlier answer may have become longer when it was rendered
        cache = StaticCache(config=config, max_cache_len=max(needed, options.get("max_cache_len", 0)))
    if cache is not None:
        options = {name: value for name, value in options.items() if name not in CACHE_SETTINGS} | {"cache": cache}
    stopwatch = _Stopwatch(clock, target.device)
    if temperature > 0:
        torch.manual_seed(seed)
    is_cuda, allocated = target.device.type == "cuda", 0
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(target.device)
        allocated = torch.cuda.memory_allocated(target.device)
    with (
        use_generation_config(target, neutral_generation_config(target.generation_config)),
        use_generation_config(method.assistant, getattr(method.assistant, "generation_config", None)),
        speculation_statistics() as statistics,
    ):
        started = stopwatch.time()
        output = target.generate(
            input_ids=prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            **{"streamer" if method.custom_generate is None else "token_streamer": stopwatch},
            return_dict_in_generate=True,
            **options,
        )
        seconds = stopwatch.time() - started
    tokens = output.sequences.shape[1] - prompt_ids.shape[1]
    if stopwatch.first_token_at is None or sum(stopwatch.tokens_per_forward) != tokens:
        raise ValueError(
            f"{method.name!r} returned {tokens} tokens, but streamed {sum(stopwatch.tokens_per_forward)}; without a "
            "stream that is true it cannot be measured."
        )
    counters = (
        _counters_of_statistics(statistics, tokens)
        if method.kind in ("dlite", "custom")
        else _counters_of_stream(stopwatch.tokens_per_forward, has_draft=method.kind != PLAIN)
    )
    measurement = Measurement(
        tokens=tokens,
        cached_tokens=cached_tokens,
        first_token_seconds=stopwatch.first_token_at - started,
        seconds=seconds,
        peak_bytes=torch.cuda.max_memory_allocated(target.device) - allocated if is_cuda else None,
        **counters,
    )
    return measurement, output


# How `generate` would make a cache, which it must not where it is given one.
CACHE_SETTINGS = ("cache_implementation", "max_cache_len")


class _Stopwatch(BaseStreamer):
    """Notes when the first token came, and how many tokens came at once: `generate` puts those of one forward."""

    def __init__(self, clock: Clock, device: torch.device):
        self._clock = clock
        self._device = device
        self._has_prompt = False
        self.first_token_at: float | None = None
        self.tokens_per_forward: list[int] = []

    def time(self) -> float:
        """Seconds, once the device is idle."""
        return time_when_idle(self._device, self._clock)

    def put(self, value: torch.Tensor) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        if self.first_token_at is None:
            self.first_token_at = self.time()
        self.tokens_per_forward.append(value.numel())

    def end(self) -> None:
        pass


def _counters_of_statistics(statistics: SpeculationStatistics, tokens: int) -> dict[str, Any]:
    return {
        "prefill_tokens": tokens - statistics.num_emitted_tokens,
        "rounds": statistics.num_rounds,
        "emitted": statistics.num_emitted_tokens,
        "accepted_per_position": statistics.accepted_per_position,
        "tested_per_position": statistics.tested_per_position,
        "drafted": statistics.num_drafted_tokens,
        "drafting_seconds": statistics.drafting_seconds,
        "verifying_seconds": statistics.verifying_seconds,
    }


def _counters_of_stream(tokens_per_forward: list[int], has_draft: bool) -> dict[str, Any]:
    prefill_tokens, *rounds = tokens_per_forward
    accepted = [sum(tokens > position for tokens in rounds) for position in range(1, max(rounds, default=1))]
    return {
        "prefill_tokens": prefill_tokens,
        "rounds": len(rounds),
        "emitted": sum(rounds),
        "accepted_per_position": accepted if has_draft else None,
    }


@contextmanager
def use_generation_config(model: PreTrainedModel | None, config: GenerationConfig | None) -> Iterator[None]:
    """Gives `model` a copy of `config` meanwhile: Transformers writes into an assistant's."""
    if model is None or config is None:
        yield
        return
    before, model.generation_config = model.generation_config, copy.deepcopy(config)
    try:
        yield
    finally:
        model.generation_config = before


__all__ = [
    "CACHE_SETTINGS",
    "Clock",
    "Measurement",
    "measure",
    "sampling_options",
    "use_generation_config",
]
