# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What a training run has done so far, by stage; it goes into checkpoints and is taken up again with them."""

import math
import time
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from .training_args import DLiteTrainingArguments


class TrainingProgress(TrainerCallback, ExportableState):
    """Counts optimizer steps, anchors, tokens and seconds of every stage.

    Attributes:
        stages (`dict[str, dict[str, float]]`): `steps`, `anchors`, `tokens` (that went through the target) and
            `seconds` by stage, in the order in which they were trained.
    """

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, float]] = {}
        self._pending: list[tuple[str, torch.Tensor]] = []
        self._last_time = time.perf_counter()
        self._logged = (self._last_time, 0.0, 0)

    def count(self, stage: str, totals: torch.Tensor) -> None:
        """Takes note of an optimizer step over `totals`: the sum of weights, anchors and tokens `[3]`."""
        self._pending.append((stage, totals))  # read later: reading it now would wait for the device in every step

    def _settle(self) -> None:
        for stage, totals in self._pending:
            counts = self.stages.setdefault(stage, dict.fromkeys(("steps", "anchors", "tokens", "seconds"), 0))
            counts["steps"] += 1
            counts["anchors"] += int(totals[1])
            counts["tokens"] += int(totals[2])
        now = time.perf_counter()
        if self._pending:
            # Between two logs the seconds go by the number of steps.
            share = (now - self._last_time) / len(self._pending)
            for stage, _ in self._pending:
                self.stages[stage]["seconds"] += share
        self._last_time = now
        self._pending = []

    def counts(self) -> dict[str, dict[str, float]]:
        """`stages`, up to now."""
        self._settle()
        return self.stages

    def speed(self, state: TrainerState) -> dict[str, float]:
        """`tokens_per_second` since the last call, and `remaining_hours` at that speed."""
        self._settle()
        then, tokens_then, step_then = self._logged
        tokens = sum(counts["tokens"] for counts in self.stages.values())
        self._logged = (self._last_time, tokens, state.global_step)
        seconds, steps = self._last_time - then, state.global_step - step_then
        if steps < 1:
            return {}
        remaining = (state.max_steps - state.global_step) * seconds / steps
        return {"tokens_per_second": (tokens - tokens_then) / seconds, "remaining_hours": remaining / 3600}

    def on_train_begin(
        self, args: DLiteTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.warmup_epochs:
            # Not `state.num_train_epochs`, which is rounded up.
            epochs = state.max_steps / math.ceil(len(kwargs["train_dataloader"]) / args.gradient_accumulation_steps)
            if args.warmup_epochs + args.transition_epochs > epochs:
                raise ValueError(
                    f"`warmup_epochs` {args.warmup_epochs:g} and `transition_epochs` {args.transition_epochs:g} are "
                    f"more than the {epochs:g} epochs of this run, so that it never gets to the stable stage; train "
                    "longer."
                )
        saved = state.stateful_callbacks.get(type(self).__name__)
        self.stages = {}
        if saved and state.global_step:
            self.stages = {stage: dict(counts) for stage, counts in saved["attributes"]["stages"].items()}
        self._pending = []
        self._last_time = time.perf_counter()
        self._logged = (self._last_time, sum(each["tokens"] for each in self.stages.values()), state.global_step)

    def on_train_end(
        self, args: DLiteTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._settle()

    def state(self) -> dict[str, Any]:
        self._settle()
        return {"args": {}, "attributes": {"stages": self.stages}}
