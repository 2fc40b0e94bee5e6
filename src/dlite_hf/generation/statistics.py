# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""`speculation_statistics()`: what the drafter did in the calls of `generate` inside a block."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch


_running_statistics: ContextVar["SpeculationStatistics | None"] = ContextVar("dlite_running_statistics", default=None)
RoundObserver = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]


@dataclass
class SpeculationStatistics:
    """What happened in the `generate` calls of one block, added up over them.

    Args:
        num_rounds: verifications by the target; a prefill is none.
        num_drafted_tokens: tokens that the drafter proposed.
        token_origins: for every token that a verification emitted, in order: 0 for the target's own, j >= 1 for an
            accepted draft token at position j of its block. What an end of sequence or a limit cut off is not in it.
        tested_positions: for every draft token that a verification compared with the target, accepted or not, its
            position in its block: the positions up to the first rejection, or to the draft's end.
        drafting_seconds: wall time of drafting.
        verifying_seconds: wall time of the target's verification forwards.
        on_round: called after every round, see [`speculation_statistics`].
    """

    num_rounds: int = 0
    num_drafted_tokens: int = 0
    token_origins: list[int] = field(default_factory=list)
    tested_positions: list[int] = field(default_factory=list)
    drafting_seconds: float = 0.0
    verifying_seconds: float = 0.0
    on_round: RoundObserver | None = field(default=None, repr=False, compare=False)

    def add(self, other: "SpeculationStatistics") -> None:
        """Counts what `other` counted, too."""
        self.num_rounds += other.num_rounds
        self.num_drafted_tokens += other.num_drafted_tokens
        self.token_origins += other.token_origins
        self.tested_positions += other.tested_positions
        self.drafting_seconds += other.drafting_seconds
        self.verifying_seconds += other.verifying_seconds

    @property
    def num_emitted_tokens(self) -> int:
        """Tokens that the verifications emitted; the token that a prefill yields is not counted."""
        return len(self.token_origins)

    @property
    def accepted_per_position(self) -> list[int]:
        """How many draft tokens were accepted at position 1, 2, ... of their block."""
        return _per_position(self.token_origins)

    @property
    def tested_per_position(self) -> list[int]:
        """How many draft tokens were compared with the target at position 1, 2, ... of their block."""
        return _per_position(self.tested_positions)

    @property
    def tau(self) -> float:
        """Acceptance length: tokens emitted per verification, the target's own token included; NaN without any."""
        return self.num_emitted_tokens / self.num_rounds if self.num_rounds else float("nan")


def _per_position(positions: list[int]) -> list[int]:
    """How often 1, 2, ... is among them."""
    counts = Counter(positions)
    return [counts[position] for position in range(1, max(positions, default=0) + 1)]


@contextmanager
def speculation_statistics(on_round: RoundObserver | None = None) -> Iterator[SpeculationStatistics]:
    """Collects [`SpeculationStatistics`] of the drafted `generate` calls that this thread makes inside the block.

    Outside such a block nothing is recorded; a block inside another adds to it when it ends. On an accelerator, timing
    waits for the device twice a round.

    Args:
        on_round: called after every round with the draft `[1, k]`, the logits `[1, k, V]` that it was drawn from
            (`None` where k is 0), and the tokens `[1, n]` emitted; not for the rounds of a block inside this one.
    """
    statistics = SpeculationStatistics(on_round=on_round)
    token = _running_statistics.set(statistics)
    try:
        yield statistics
    finally:
        _running_statistics.reset(token)
        if (outer := _running_statistics.get()) is not None:
            outer.add(statistics)


def running_statistics() -> SpeculationStatistics | None:
    """The statistics that the current thread collects, if it does."""
    return _running_statistics.get()


def time_when_idle(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds by the clock, once the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return clock()
