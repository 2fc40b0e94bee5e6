# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What DLite's paper measured (arXiv 2610.23787, Tables 1 to 3), on an H800 with K = 7, beside our own figures."""

from collections.abc import Callable

from . import metrics
from .markdown import estimate, make_table, recorded
from .metrics import Estimate, Row
from .report import Report


# Task -> arm -> tokens a verification.
PAPER_TAU = {
    "gsm8k": {"4B DSpark": 6.27, "4B DLite": 6.38},
    "mbpp": {"4B DSpark": 5.48, "4B DLite": 5.64},
    "mt_bench": {"4B DLite": 3.94},
    "livecodebench": {"8B DSpark": 5.43, "8B DLite": 5.66},
    "alpaca": {"8B DSpark": 3.64, "8B DLite": 3.78},
    "longbench_multi_document_qa": {"4B DSpark": 2.20, "4B DLite": 2.74},
    "longbench_code_repository": {"4B DSpark": 2.44, "4B DLite": 3.14},
    "longbench_dialogue_history": {"8B DSpark": 4.01, "8B DLite": 4.77},
    "agent_memory_bench": {"4B DSpark": 2.10, "4B DLite": 2.80},
    "agent_long_bench": {"4B DSpark": 1.84, "4B DLite": 2.51},
    "bfcl": {"4B DSpark": 2.54, "4B DLite": 2.78},
    "swe_bench": {"4B DSpark": 1.89, "4B DLite": 3.15, "8B DSpark": 1.94, "8B DLite": 3.19},
}
_SPEEDUP_TASKS = (
    "agent_memory_bench",
    "agent_long_bench",
    "bfcl",
    "swe_bench",
    "longbench_multi_document_qa",
    "longbench_in_context_learning",
    "longbench_code_repository",
    "longbench_dialogue_history",
)
_SPEEDUPS = {
    "4B EAGLE-3": (1.66, 1.70, 1.58, 1.48, 1.70, 1.76, 1.68, 2.23),
    "4B DFlash": (1.22, 0.95, 1.44, 1.47, 1.60, 1.71, 1.45, 2.62),
    "4B DSpark": (1.72, 1.45, 2.11, 1.64, 1.81, 2.01, 2.02, 3.16),
    "4B DLite": (2.39, 2.07, 2.37, 2.68, 2.18, 2.58, 2.66, 3.88),
    "8B DSpark": (1.83, 1.68, 1.82, 1.60, 1.98, 2.28, 2.02, 3.02),
    "8B DLite": (2.20, 2.31, 2.30, 2.74, 2.32, 2.74, 2.53, 3.96),
}
# Task -> arm -> speedup of decoding over plain decoding.
PAPER_SPEEDUP = {
    task: {arm: speedups[i] for arm, speedups in _SPEEDUPS.items()} for i, task in enumerate(_SPEEDUP_TASKS)
}


def beside_the_paper(report: Report) -> str:
    """The paper's figures beside those of our greedy rows, for the DLite drafters that were measured."""
    greedy = metrics.by_task(row for row in report.rows if row["temperature"] == 0)
    ours = [method["name"] for method in report.methods if method["kind"] == "dlite"]

    def table(
        figures: dict[str, dict[str, float]], unit: str, measure: Callable[[list[Row], str], Estimate | None]
    ) -> str:
        arms = list(dict.fromkeys(arm for each in figures.values() for arm in each))
        lines = [
            [task]
            + [f"{figures[task][arm]:.2f}{unit}" if arm in figures[task] else "-" for arm in arms]
            + [estimate(measure(greedy.get(task, []), method), unit) for method in ours]
            for task in figures
        ]
        return make_table(["task", *(f"paper, {arm}" for arm in arms), *(f"here, {name}" for name in ours)], lines)

    def decoding(rows: list[Row], method: str) -> Estimate | None:
        return metrics.speedup(rows, method, decode_only=True)

    target, machine = (report.conditions.get("target") or {}).get("name"), report.conditions.get("machine")
    introduction = (
        f"The paper: Qwen3-4B and Qwen3-8B on an H800. Here: {recorded(target)} on {recorded(machine)}, greedy. "
        "Target, training and machine differ, so the figures say little about each other; compare methods "
        "within one source."
    )
    first_turns = greedy.get("swe_bench", [])
    if first_turns and not any(row["turn"] for row in first_turns):
        introduction += " The paper's swe_bench are sessions of an agent; here only first turns were run."
    speedups, acceptance = table(PAPER_SPEEDUP, "x", decoding), table(PAPER_TAU, "", metrics.tau)
    return f"{introduction}\n\nSpeedup of decoding:\n\n{speedups}\n\ntau:\n\n{acceptance}"


__all__ = ["PAPER_SPEEDUP", "PAPER_TAU", "beside_the_paper"]
