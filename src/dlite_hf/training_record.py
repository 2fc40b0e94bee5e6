# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What a training run leaves beside the weights, `training_record.json`: how the drafter came about, for its card.

record = TrainingRecord.load(folder) if TrainingRecord.exists(folder) else TrainingRecord()
record.runs.append(TrainingRun(stages=[StageRecord("stable", 2000, 256_000, 2760.0)], target=..., ...))
record.save(folder)
"""

import importlib.metadata
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from . import __version__


FILE_NAME = "training_record.json"
STAGES = ("teacher", "warmup", "transition", "stable")
NOT_STATED = "not stated"
_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft")


def is_local_path(name: str) -> bool:
    """Whether `name` is a path, of this machine or of another one, and no id on the Hub."""
    return bool(re.match(r"\.{0,2}[/\\]|~|file:|[A-Za-z]:[/\\]", name)) or os.path.exists(name)


def without_folders(name: str) -> str:
    """The last part of a path, since folders name users and machines; any other text, a Hub id too, as it is."""
    return PureWindowsPath(name).name if is_local_path(name) else name


@strict
@dataclass
class StageRecord:
    """One stage of a run: optimizer steps, anchors that it saw (a repeated one counts again), and wall time."""

    stage: str
    steps: int
    anchors: int
    seconds: float | int

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"`stage` is {self.stage!r}, but must be one of {STAGES}.")


@strict
@dataclass
class DataRecord:
    """One file of conversations, without those held out; `licenses` and `sources` count conversations."""

    file: str
    conversations: int
    supervised_tokens: int | None = None
    licenses: dict[str, int] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.file = PureWindowsPath(self.file).name
        sources: Counter[str] = Counter()
        for source, count in self.sources.items():
            sources[without_folders(source)] += count
        self.sources = dict(sources)


@strict
@dataclass
class TargetRecord:
    """The target as it ran in training. Of a folder only its last name is kept."""

    name_or_path: str
    revision: str | None = None
    dtype: str | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        self.name_or_path = without_folders(self.name_or_path)


def versions() -> dict[str, str]:
    """The versions of Python, of dlite-hf and of what it trained with, as far as installed."""
    found = {"python": platform.python_version(), "dlite_hf": __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware(device: torch.device | str | None = None, num_devices: int = 1) -> str:
    """What a run used: the accelerators' name and number, or the CPU's model, instruction set, threads and cores.

    Args:
        device: where the drafter was; by default the machine's accelerator if it has one, else its CPU.
        num_devices: how many of them, over all processes.
    """
    device = torch.device(device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if device.type == "cuda":
        return f"{num_devices} x {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return f"{num_devices} x {device.type}"
    model = None
    if os.path.exists("/proc/cpuinfo"):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        model = next(iter(re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)), None)
    model = model or platform.processor() or platform.machine()
    capability = torch.backends.cpu.get_cpu_capability()
    processes = f", processes: {num_devices}" if num_devices > 1 else ""
    return f"{model} ({capability}), {os.cpu_count()} CPUs, threads: {torch.get_num_threads()}{processes}"


@strict
@dataclass(kw_only=True)
class TrainingRun:
    """One call of `train()`. Batch sizes count sequences; `finished_at` is an ISO date; `best_step` is the step whose
    weights were kept, where that need not be the last."""

    stages: list[StageRecord]
    target: TargetRecord
    learning_rate: float | int
    lr_scheduler_type: str
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    num_processes: int
    seed: int
    ce_weight: float | int
    tv_weight: float | int
    ce_labels: str
    loss_decay: float | int
    max_length: int | None = None
    history_window: int = 0
    best_step: int | None = None
    data: list[DataRecord] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=versions)
    hardware: str = field(default_factory=hardware)
    finished_at: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())


@strict
@dataclass
class TrainingRecord:
    """All runs that led to a drafter, in their order. Two records merge by joining their `runs`."""

    runs: list[TrainingRun] = field(default_factory=list)

    def save(self, folder: str | os.PathLike) -> None:
        """Writes `training_record.json` into `folder`."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        Path(folder, FILE_NAME).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def exists(folder: str | os.PathLike) -> bool:
        """Whether `folder` holds a record."""
        return Path(folder, FILE_NAME).is_file()

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "TrainingRecord":
        """Reads what `save` wrote.

        Raises:
            FileNotFoundError: if `folder` holds no record.
            ValueError: if the file has another shape.
        """
        text = Path(folder, FILE_NAME).read_text(encoding="utf-8")
        try:
            values = json.loads(text)
            return cls(**{**values, "runs": [_read_run(run) for run in values["runs"]]})
        except (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{FILE_NAME} in {Path(folder).name!r} is no training record ({type(error).__name__}: {error}); "
                "remove it, or write it with `TrainingRecord.save`."
            ) from error


def _read_run(values: dict[str, Any]) -> TrainingRun:
    nested = {
        "stages": [StageRecord(**each) for each in values["stages"]],
        "data": [DataRecord(**each) for each in values["data"]],
        "target": TargetRecord(**values["target"]),
    }
    return TrainingRun(**{**values, **nested})


def describe_data(
    file: str | os.PathLike, conversations: Iterable[dict[str, Any]], supervised_tokens: int | None = None
) -> DataRecord:
    """Counts the fields `license` and `source` of the conversations of a file.

    Args:
        file: where they come from; only its name is kept.
        conversations: records, see [`~dlite_hf.conversations.tokenize_conversation`].
        supervised_tokens: how many of their tokens are learned, where that is known.
    """
    licenses: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    for conversation in conversations:
        licenses[conversation.get("license") or NOT_STATED] += 1
        sources[conversation.get("source") or NOT_STATED] += 1
    return DataRecord(os.fspath(file), licenses.total(), supervised_tokens, dict(licenses), dict(sources))


__all__ = [
    "DataRecord",
    "StageRecord",
    "TargetRecord",
    "TrainingRecord",
    "TrainingRun",
    "describe_data",
    "hardware",
    "versions",
]
