# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Figures as the cells of a Markdown table, and the table. A figure that is None is said to be not measured."""

from collections.abc import Iterable, Sequence
from typing import Any

from .metrics import Estimate


NOT_MEASURED, NOT_RECORDED = "not measured", "not recorded"


def make_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", r"\|") for cell in line) + " |" for line in lines)


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure with its unit, such as `1.25x`."""
    return NOT_MEASURED if value is None else f"{value:.{digits}f}{unit}"


def estimate(value: Estimate | None, unit: str = "") -> str:
    """A figure with its interval, such as `1.25x [1.10, 1.41]`."""
    if value is None:
        return NOT_MEASURED
    if value.low is None or value.low == value.high:  # few sessions, or plain generation's tau
        return number(value.value, unit=unit)
    return f"{value.value:.2f}{unit} [{value.low:.2f}, {value.high:.2f}]"


def milliseconds(seconds: float | None) -> str:
    """Seconds in milliseconds, without the unit."""
    return NOT_MEASURED if seconds is None else f"{1000 * seconds:,.0f}"


def shares(values: Iterable[float | None] | None) -> str:
    """Percentages, such as `37%, 17%, -`."""
    if values is None:
        return NOT_MEASURED
    return ", ".join("-" if each is None else f"{each:.0%}" for each in values) or "none"


def recorded(value: Any) -> str:
    """What a report says of a condition; None is what nobody set."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        texts = {name: recorded(each) for name, each in value.items()}
        nested = {name: f"({text})" for name, text in texts.items() if isinstance(value[name], dict)}
        return ", ".join(f"{name} {text}" for name, text in {**texts, **nested}.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(recorded, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


__all__ = ["NOT_MEASURED", "NOT_RECORDED", "estimate", "make_table", "milliseconds", "number", "recorded", "shares"]
