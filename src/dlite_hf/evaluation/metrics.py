# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Rows of an evaluation -> figures.

A row is a dictionary: one prompt at one temperature, with a measurement for each method. Every function takes rows of
one temperature and pools them: it adds up over all rows first and divides once, so that a long answer counts as much
as its tokens do. A figure is None where a counter that it needs is missing in any row, and where there is nothing to
divide by; it is never guessed.
"""

import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from .methods import PLAIN


Row = dict[str, Any]
CONFIDENCE = 0.95
RESAMPLES = 2_000
MIN_SESSIONS = 5  # an interval over two would be its least and its largest value, and no 95% of anything
SEED = 0
# Prompt lengths in tokens at which a bucket begins; 1k is 1,024.
LENGTH_BUCKETS = {"0-1k": 0, "1-4k": 1024, "4-8k": 4096, "8-16k": 8192, "16-32k": 16384, "32k+": 32768}
# Turns at which a bucket begins, the first turn being 0, and what a reader calls it.
TURN_BUCKETS = {"1": 0, "2": 1, "3": 2, "4": 3, "5-8": 4, "9+": 8}
UNCATEGORISED = "uncategorised"


@dataclass(frozen=True)
class Estimate:
    """A figure and the bounds of its 95% interval; they are None where there are fewer than `MIN_SESSIONS`."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class RoundTimes:
    """Where the milliseconds of a mean round go; bookkeeping is what is neither drafting nor verifying."""

    drafting: float
    verifying: float
    bookkeeping: float


def measured_rows(rows: Iterable[Row], method: str) -> list[Row]:
    """The rows in which `method` ran."""
    return [row for row in rows if method in row["measurements"]]


def _counters(rows: Iterable[Row], method: str, *names: str) -> list[tuple[Any, ...]] | None:
    """These counters of every measurement of `method`; None where one is missing, or where there is no measurement."""
    found = [tuple(row["measurements"][method].get(name) for name in names) for row in measured_rows(rows, method)]
    return None if not found or any(None in each for each in found) else found


def _ratio(pairs: Iterable[tuple[float, float]] | None) -> float | None:
    numerators, denominators = zip(*pairs, strict=True) if pairs else ((), ())
    return sum(numerators) / sum(denominators) if sum(denominators) else None


def tau(rows: Iterable[Row], method: str) -> Estimate | None:
    """Tokens emitted a verification, the target's own token of a round included, the prefill's tokens not counted."""
    rows = measured_rows(rows, method)
    counters = _counters(rows, method, "emitted", "rounds")
    return None if counters is None else _bootstrap(rows, counters, lambda sums: sums[0] / sums[1])


def accepted(rows: Iterable[Row], method: str) -> float | None:
    """Draft tokens accepted a verification: tau without the target's own tokens."""
    counters = _counters(rows, method, "accepted_per_position", "rounds")
    return _ratio([(sum(positions), rounds) for positions, rounds in counters] if counters else None)


def acceptance(rows: Iterable[Row], method: str) -> list[float] | None:
    """The share of all rounds in which the draft token at position 1, 2, ... was accepted."""
    counters = _counters(rows, method, "accepted_per_position", "rounds")
    rounds = sum(each for _, each in counters) if counters else 0
    return [count / rounds for count in _position_counts(counters)] if counters and rounds else None


def conditional_acceptance(rows: Iterable[Row], method: str) -> list[float | None] | None:
    """The share of the rounds that got to position j of their draft in which it was accepted, for j = 1, 2, ...

    Where it is not known how far drafts reached, a round that accepted position j - 1 counts as having got to j. None
    stands behind a position that no round accepted.
    """
    counters = _counters(rows, method, "accepted_per_position", "rounds")
    rounds = sum(each for _, each in counters) if counters else 0
    if not counters or not rounds:
        return None
    accepted = _position_counts(counters)
    if tested := _counters(rows, method, "tested_per_position"):
        return [count / got_to for count, got_to in zip_longest(accepted, _position_counts(tested), fillvalue=0)]
    return [count / before if before else None for before, count in pairwise([rounds, *accepted])]


def knows_draft_lengths(rows: Iterable[Row], method: str) -> bool:
    """Whether it was counted how far the drafts of `method` reached."""
    return _counters(rows, method, "tested_per_position") is not None


def _position_counts(counters: Sequence[tuple[Any, ...]]) -> list[int]:
    """Rounds that accepted, or tested, position 1, 2, ...; a row's list, the first counter, ends with its last one."""
    length = max(len(positions) for positions, *_ in counters)
    return [sum(sum(positions[j : j + 1]) for positions, *_ in counters) for j in range(length)]


def flagged_rows(rows: Iterable[Row], method: str) -> list[Row]:
    """Rows whose answer has another length than plain generation's: their times do not compare."""
    return [
        row
        for row in measured_rows(measured_rows(rows, method), PLAIN)
        if row["measurements"][method]["tokens"] != row["measurements"][PLAIN]["tokens"]
    ]


def speedup(rows: Iterable[Row], method: str, *, decode_only: bool = False) -> Estimate | None:
    """Plain generation's seconds a token over those of `method`, on the same prompts; below 1 it is slower.

    Flagged rows are left out, so both made as many tokens and this is seconds over seconds.

    Args:
        rows: rows of one temperature.
        method: a name in `measurements`.
        decode_only: whether to leave out the prefill, the time until the first token and the tokens that came with it.
    """
    rows = measured_rows(measured_rows(rows, method), PLAIN)
    flagged = {id(row) for row in flagged_rows(rows, method)}
    rows = [row for row in rows if id(row) not in flagged]
    names = ("seconds", "tokens", "first_token_seconds", "prefill_tokens") if decode_only else ("seconds", "tokens")
    both = [_counters(rows, each, *names) for each in (PLAIN, method)]
    if both[0] is None or both[1] is None:
        return None
    if decode_only:
        both = [[(each[0] - each[2], each[1] - each[3]) for each in arm or ()] for arm in both]
    counters = [plain + drafted for plain, drafted in zip(*both, strict=True)]
    return _bootstrap(rows, counters, lambda sums: (sums[0] / sums[1]) / (sums[2] / sums[3]))


def tokens_per_second(rows: Iterable[Row], method: str) -> float | None:
    """Tokens generated a second, prefills included."""
    return _ratio(_counters(rows, method, "tokens", "seconds"))


def first_token_seconds(rows: Iterable[Row], method: str) -> float | None:
    """Seconds from the call to its first token, the median over rows."""
    counters = _counters(rows, method, "first_token_seconds")
    return statistics.median(seconds for (seconds,) in counters) if counters else None


def round_times(rows: Iterable[Row], method: str) -> RoundTimes | None:
    """Milliseconds of a mean round, prefills left out."""
    counters = _counters(
        rows, method, "rounds", "drafting_seconds", "verifying_seconds", "seconds", "first_token_seconds"
    )
    rounds, drafting, verifying, seconds, first = map(sum, zip(*counters, strict=True)) if counters else (0,) * 5
    if not rounds:
        return None
    rest = seconds - first - drafting - verifying
    return RoundTimes(*(1000 * each / rounds for each in (drafting, verifying, rest)))


def extra_peak_bytes(rows: Iterable[Row], method: str) -> int | None:
    """The largest peak memory of a call, over the largest one of plain generation on the same prompts."""
    rows = measured_rows(measured_rows(rows, method), PLAIN)
    peaks = [_counters(rows, each, "peak_bytes") for each in (method, PLAIN)]
    if peaks[0] is None or peaks[1] is None:
        return None
    return max(peaks[0])[0] - max(peaks[1])[0]


def identical(rows: Iterable[Row], method: str) -> tuple[int, int] | None:
    """How many greedy answers were plain generation's token for token, and how many were compared."""
    compared = [row["identical"][method] for row in rows if method in row["identical"]]
    return (sum(compared), len(compared)) if compared else None


def keeps_no_cache(rows: Iterable[Row], method: str) -> bool:
    """Whether plain generation went on from cached turns where `method` began every prompt anew."""
    plain, drafted = _cached_tokens(rows, method)
    return plain > 0 and drafted == 0


def keeps_more_cache(rows: Iterable[Row], method: str) -> bool:
    """Whether `method` went on from cached turns where plain began every prompt anew, as a static cache has to."""
    plain, drafted = _cached_tokens(rows, method)
    return drafted > 0 and plain == 0


def _cached_tokens(rows: Iterable[Row], method: str) -> tuple[int, int]:
    """Those of plain generation and of `method`, on the same prompts."""
    rows = measured_rows(measured_rows(rows, method), PLAIN)
    plain, drafted = (
        sum(row["measurements"][each].get("cached_tokens") or 0 for row in rows) for each in (PLAIN, method)
    )
    return plain, drafted


def is_near_tie(divergence: Mapping[str, Any] | None) -> bool:
    """Whether the token in which an output parts is the best but for twice the rounding of longer forwards.

    Where one of them was not measured, nothing is excused.
    """
    if divergence is None or None in (divergence["gap"], divergence["largest_rounding"]):
        return False
    return bool(divergence["gap"] <= 2 * divergence["largest_rounding"])


def _bootstrap(
    rows: Sequence[Row], counters: Sequence[tuple[float, ...]], combine: Callable[[np.ndarray], np.ndarray]
) -> Estimate | None:
    """`combine` of the summed counters, with a percentile interval over sessions drawn with replacement.

    All turns of a session are drawn together, since they share a context.

    Args:
        rows: one for each entry of `counters`.
        counters: the numbers that are summed, of each row.
        combine: sums `[counters, resamples]` -> figures `[resamples]`.
    """
    numbers: dict[tuple[str, str], int] = {}
    for row in rows:
        numbers.setdefault((row["task"], row["id"]), len(numbers))
    sessions = np.zeros((len(numbers), len(counters[0])))
    np.add.at(sessions, [numbers[row["task"], row["id"]] for row in rows], np.array(counters, dtype=float))
    with np.errstate(divide="ignore", invalid="ignore"):  # a draw may have no round; it is dropped below
        value = float(combine(sessions.sum(axis=0)[:, None])[0])
        if not np.isfinite(value):
            return None
        if len(sessions) < MIN_SESSIONS:
            return Estimate(value)
        figures = combine((_draws(len(sessions)) @ sessions).T)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(figures[np.isfinite(figures)], [tail, 100 - tail])
    return Estimate(value, float(low), float(high))


@lru_cache(maxsize=64)  # a report has dozens of figures over the same number of sessions
def _draws(num_sessions: int) -> np.ndarray:
    """How often each session is drawn in each resample, `[resamples, sessions]`."""
    shares = np.full(num_sessions, 1 / num_sessions)
    return np.random.default_rng(SEED).multinomial(num_sessions, shares, size=RESAMPLES).astype(float)


def by_task(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each task, in the order in which tasks appear."""
    return _group(rows, lambda row: row["task"])


def by_temperature(rows: Iterable[Row]) -> dict[float, list[Row]]:
    """The rows of each temperature, the lowest first."""
    return dict(sorted(_group(rows, lambda row: row["temperature"]).items()))


def by_category(rows: Iterable[Row], categories: Mapping[str, str]) -> dict[str, list[Row]]:
    """The rows of each category, such as general, long or agent, by the category of each task."""
    return _group(rows, lambda row: categories.get(row["task"], UNCATEGORISED))


def general_and_tasks(rows: Iterable[Row], categories: Mapping[str, str]) -> dict[str, list[Row]]:
    """The rows of all general tasks together, and those of each task of another category."""
    return _group(rows, lambda row: "general tasks" if categories.get(row["task"]) == "general" else row["task"])


def by_length(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each bucket of prompt tokens, the shortest first; buckets without rows are left out."""
    return _in_buckets(rows, "prompt_tokens", LENGTH_BUCKETS)


def by_turn(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each turn of a session, counted from 1, late turns together."""
    return _in_buckets(rows, "turn", TURN_BUCKETS)


def _group(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _in_buckets(rows: Iterable[Row], field: str, buckets: Mapping[str, int]) -> dict[str, list[Row]]:
    names, starts = list(buckets), list(buckets.values())
    groups = _group(rows, lambda row: bisect_right(starts, row[field]) - 1)
    return {names[i]: groups[i] for i in sorted(groups)}


__all__ = [
    "Estimate",
    "RoundTimes",
    "acceptance",
    "accepted",
    "by_category",
    "by_length",
    "by_task",
    "by_temperature",
    "by_turn",
    "conditional_acceptance",
    "extra_peak_bytes",
    "first_token_seconds",
    "flagged_rows",
    "general_and_tasks",
    "identical",
    "is_near_tie",
    "keeps_more_cache",
    "keeps_no_cache",
    "knows_draft_lengths",
    "measured_rows",
    "round_times",
    "speedup",
    "tau",
    "tokens_per_second",
]
