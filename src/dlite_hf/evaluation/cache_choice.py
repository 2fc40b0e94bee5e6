# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Which of Transformers' caches a method runs with: the faster one, or a comparison would flatter the other method."""

from collections.abc import Callable
from dataclasses import replace

from .measuring import CACHE_SETTINGS
from .methods import PLAIN, Method


def with_faster_cache(
    method: Method, time: Callable[[Method], list[float]], *, compiles: bool, max_cache_len: int | None, what: str
) -> Method:
    """The method with a dynamic cache or with a static one, whichever takes less time, and a note that says so.

    Only plain generation and DLite drafters are timed: assisted decoding of Transformers drafts beyond the end of a
    static cache. A method whose settings name a cache keeps it.

    Args:
        method: the method.
        time: runs a method behind several prompts, and returns the seconds of decoding of each; a ValueError where it
            cannot run. Of two such runs the better counts, as the first may compile.
        compiles: whether Transformers compiles the forward for a static cache, which it would do anew for every length
            of a draft: a drafter is not timed then.
        max_cache_len: the static cache's, where it is to be of one size.
        what: what a run generates, for the note.
    """
    kinds = (PLAIN,) if compiles else (PLAIN, "dlite")
    if method.kind not in kinds or method.settings.keys() & {*CACHE_SETTINGS}:
        return method
    size = {} if max_cache_len is None else {"max_cache_len": max_cache_len}
    static = replace(method, settings={**method.settings, "cache_implementation": "static", **size})
    dynamic_runs, static_runs = [], []
    for _ in range(2):
        dynamic_runs.append(time(method))
        try:
            static_runs.append(time(static))
        except ValueError as error:
            return replace(method, note=_joined(method.note, f"A static cache does not serve: {error}"))
    seconds = [sum(map(min, zip(*runs, strict=True))) for runs in (dynamic_runs, static_runs)]
    name, chosen = ("static", static) if seconds[1] < seconds[0] else ("dynamic", method)
    note = (
        f"{what} took {seconds[0]:.3f} s with a dynamic cache, {seconds[1]:.3f} s with a static one"
        f"{' and a compiled forward' if compiles else ''}; the {name} one is used."
    )
    return replace(chosen, note=_joined(method.note, note))


def _joined(*sentences: str | None) -> str:
    return " ".join(filter(None, sentences))


__all__ = ["with_faster_cache"]
