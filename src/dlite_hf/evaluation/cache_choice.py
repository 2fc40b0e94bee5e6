# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Which of Transformers' caches a method runs with: the faster one, or a comparison would flatter the other method."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from .measuring import CACHE_SETTINGS
from .methods import PLAIN, Method
from .sessions import PrefixCache


Prompt = TypeVar("Prompt")


def with_faster_caches(
    methods: Sequence[Method],
    prompts: Iterable[Prompt],
    time: Callable[[Method, Prompt, PrefixCache], float],
    *,
    compiles: bool,
    max_cache_len: int | None,
    what: str,
) -> list[Method]:
    """The methods, each with a dynamic cache or a static one, whichever takes less time, and a note that says so.

    Only plain generation and DLite drafters are timed: assisted decoding of Transformers drafts beyond the end of a
    static cache. A method whose settings name a cache keeps it.

    Args:
        methods: the methods.
        prompts: what they are timed with; unless forwards are compiled, all methods go on from one cache of what comes
            before each.
        time: runs a method with a prompt, whose prefix the cache may hold, and returns the seconds of the whole call,
            as a static cache can be faster in decoding and slower in reading; a ValueError where it cannot run. Of two
            such runs the better counts, as the first may compile.
        compiles: whether Transformers compiles the forward for a static cache, which it would do anew for every length
            of a draft: a drafter is not timed then.
        max_cache_len: the static cache's, where it is to be of one size.
        what: what the runs generate, for the note.
    """
    kinds = (PLAIN,) if compiles else (PLAIN, "dlite")
    size = {} if max_cache_len is None else {"max_cache_len": max_cache_len}
    static = {
        method.name: replace(method, settings={**method.settings, "cache_implementation": "static", **size})
        for method in methods
        if method.kind in kinds and not method.settings.keys() & {*CACHE_SETTINGS}
    }
    seconds = {name: [0.0, 0.0] for name in static}
    reasons: dict[str, str] = {}
    for prompt in prompts:
        for is_static in (False, True):
            kept = PrefixCache()
            for method in methods:
                if method.name not in static or method.name in reasons:
                    continue
                try:
                    runs = [
                        # A compiled forward is recorded anew for every cache, as it is for every session.
                        time(static[method.name] if is_static else method, prompt, PrefixCache() if compiles else kept)
                        for _ in range(2)
                    ]
                except ValueError as error:
                    if not is_static:
                        raise
                    reasons[method.name] = str(error)
                else:
                    seconds[method.name][is_static] += min(runs)
    chosen = []
    for method in methods:
        if method.name in reasons:
            method = _noted(method, f"A static cache does not serve: {reasons[method.name]}")
        elif method.name in static:
            dynamic_seconds, static_seconds = seconds[method.name]
            kind, faster = ("static", static[method.name]) if static_seconds < dynamic_seconds else ("dynamic", method)
            method = _noted(
                faster,
                f"{what} took {dynamic_seconds:.3f} s with a dynamic cache, {static_seconds:.3f} s with a static one"
                f"{' and a compiled forward' if compiles else ''}; the {kind} one is used.",
            )
        chosen.append(method)
    return chosen


def _noted(method: Method, note: str) -> Method:
    return replace(method, note=" ".join(filter(None, (method.note, note))))


__all__ = ["with_faster_caches"]
