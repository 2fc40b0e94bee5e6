# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The JSON report of an evaluation as a section of a model card."""

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


NOT_MEASURED, NOT_RECORDED = "not measured", "not recorded"
_CONDITIONS = {
    "temperature": "Temperature",
    "thinking": "Thinking mode",
    "num_draft_tokens": "K",
    "max_new_tokens": "New tokens, at most",
    "machine": "Hardware",
    "threads": "Threads",
    "torch": "torch",
    "transformers": "transformers",
}
_ROW_FIELDS = {"set", "identical", "rounds", "emitted"}


def read_report(file: str | os.PathLike) -> dict[str, Any]:
    """A report of `training/check_lossless.py`.

    Raises:
        ValueError: if the file is none.
    """
    try:
        report = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{Path(file).name} is no JSON ({error}); pass a report of an evaluation.") from error
    rows = report.get("rows") if isinstance(report, dict) else None
    if not rows or not all(isinstance(row, dict) and row.keys() >= _ROW_FIELDS for row in rows):
        raise ValueError(
            f"{Path(file).name} is no report of an evaluation: it needs `rows`, each with {sorted(_ROW_FIELDS)}."
        )
    return report


def make_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", r"\|") for cell in line) + " |" for line in lines)


def _tau(rows: list[dict[str, Any]]) -> float | None:
    """Tokens emitted per verification, pooled over all rounds."""
    rounds = sum(row["rounds"] for row in rows)
    return sum(row["emitted"] for row in rows) / rounds if rounds else None


def _tokens_per_second(row: dict[str, Any], arm: str) -> float | None:
    tokens, seconds = row.get(f"{arm}_tokens"), row.get(f"{arm}_seconds")
    return tokens / seconds if tokens and seconds else None


def _speeds(rows: list[dict[str, Any]]) -> tuple[float, float, float] | None:
    """Plain and drafted tokens/s, pooled, and the median speedup; None unless both arms were timed on every prompt."""
    pairs = [(_tokens_per_second(row, "plain"), _tokens_per_second(row, "drafted")) for row in rows]
    speedups = [drafted / plain for plain, drafted in pairs if plain and drafted]
    if len(speedups) < len(rows):
        return None
    plain, drafted = (
        sum(row[f"{arm}_tokens"] for row in rows) / sum(row[f"{arm}_seconds"] for row in rows)
        for arm in ("plain", "drafted")
    )
    return plain, drafted, statistics.median(speedups)


def make_report_section(report: dict[str, Any]) -> str:
    """Markdown: the conditions, a table with a line for every set, where it was slower, and which outputs differ."""
    rows = report["rows"]
    names = list(dict.fromkeys(row["set"] for row in rows))
    groups = [(name, [row for row in rows if row["set"] == name]) for name in names]
    lines, slower = [], []
    for name, part in groups + ([("all", rows)] if len(groups) > 1 else []):
        tau, speeds = _tau(part), _speeds(part)
        cells = [NOT_MEASURED] * 3 if speeds is None else [f"{speeds[0]:.1f}", f"{speeds[1]:.1f}", f"{speeds[2]:.2f}x"]
        identical = sum(row["identical"] for row in part)
        lines.append((name, len(part), identical, NOT_MEASURED if tau is None else f"{tau:.2f}", *cells))
        if speeds is not None and speeds[2] < 1:
            slower.append(f"{name} ({speeds[2]:.2f}x)")
    header = ["set", "prompts", "identical", "tau", "plain, tokens/s", "drafted, tokens/s", "speedup"]
    paragraphs = [
        f"### {report.get('dtype', 'dtype ' + NOT_RECORDED)}",
        _conditions(report),
        make_table(header, lines),
    ]
    if slower:
        paragraphs.append(f"Slower than plain generation on {', '.join(slower)}.")
    if positions := _accepted_per_position(rows):
        paragraphs.append(f"Accepted at draft position 1, 2, ... of all rounds: {positions}.")
    paragraphs += _differences(rows)
    return "\n\n".join(paragraphs)


def _conditions(report: dict[str, Any]) -> str:
    words = {None: NOT_RECORDED, True: "on", False: "off"}
    sentences = []
    for name, label in _CONDITIONS.items():
        value = report.get(name)
        sentences.append(f"{label}: {words[value] if value is None or isinstance(value, bool) else value}.")
    return " ".join(sentences)


def _differences(rows: list[dict[str, Any]]) -> list[str]:
    """What a report knows about prompts whose drafted output is not plain generation's."""
    sentences = []
    different = [row for row in rows if not row["identical"]]
    if different and all("top2_gap" in row and "largest_rounding" in row for row in different):
        near = sum(row["top2_gap"] is not None and row["top2_gap"] <= 2 * row["largest_rounding"] for row in different)
        sentences.append(
            f"{len(different)} of {len(rows)} outputs differ from plain generation's, {near} of them first at a near "
            "tie: the target's two best logits lie within twice the rounding between forwards of one token and of "
            "K + 1."
        )
    if all("identical_in_chunks" in row for row in rows):
        chunked = sum(not row["identical_in_chunks"] for row in rows)
        sentences.append(f"Plain generation that prefills in chunks differs from itself on {chunked} of {len(rows)}.")
    return sentences


def _accepted_per_position(rows: list[dict[str, Any]]) -> str | None:
    rounds = sum(row["rounds"] for row in rows)
    if not rounds or any("accepted_per_position" not in row for row in rows):
        return None
    length = max(len(row["accepted_per_position"]) for row in rows)
    counts = [sum(sum(row["accepted_per_position"][k : k + 1]) for row in rows) for k in range(length)]
    return ", ".join(f"{count / rounds:.0%}" for count in counts)


__all__ = ["make_report_section", "make_table", "read_report"]
