# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Parts of a report as Markdown: what a report, a model card and the documents show of it."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from . import metrics
from .markdown import (
    NOT_RECORDED,
    estimate,
    make_table,
    milliseconds,
    number,
    recorded,
    shares,
)
from .methods import PLAIN
from .metrics import MIN_SESSIONS, Estimate, Row
from .paper import beside_the_paper
from .report import Report


class View(NamedTuple):
    """A part of a report; without a title it is none of the whole report, and an empty text has nothing to say."""

    title: str | None
    render: Callable[[Report], str]


_CONDITIONS = {
    "target": "target",
    "machine": "machine",
    "device": "device",
    "threads": "threads",
    "dtype": "dtype",
    "attn_implementation": "attention",
    "torch": "torch",
    "transformers": "transformers",
    "dlite_hf": "dlite_hf",
    "temperatures": "temperatures",
    "thinking": "thinking mode",
    "chat_template_kwargs": "chat template arguments",
    "generation": "generation settings",
    "max_new_tokens": "new tokens, at most",
    "min_prompt_tokens": "prompt tokens, at least",
    "max_prompt_tokens": "prompt tokens, at most",
    "num_prompts": "records of a task, at most",
    "seed": "seed",
    "started_at": "started",
    "finished_at": "finished",
}
_COLUMNS = {
    "method": {
        "name": "method",
        "kind": "kind",
        "checkpoint": "checkpoint",
        "parameters": "parameters",
        "num_draft_tokens": "K",
        "settings": "settings",
    },
    "task": {key: key for key in ("name", "category", "source", "revision", "file", "sha256", "records")},
}
_CARD_CONDITIONS = ("thinking", "max_new_tokens", "attn_implementation", "machine", "threads", "torch", "transformers")
_READING = (
    "tau is the number of tokens emitted per verification by the target, pooled: the target's own token of a round is "
    "counted, the prefill's is not; accepted counts the drafter's tokens alone. A speedup compares seconds a token "
    "with plain generation's on the same prompts, run in turns; decoding leaves out the prefill. In brackets, 95% "
    f"intervals of a bootstrap over sessions, where there are at least {MIN_SESSIONS}."
)
_NO_CACHE = (
    "† reads the whole prompt again in every turn, while plain generation keeps its cache: that is in its time end to "
    "end."
)
_ENDS_EARLY = (
    "With a confidence, a draft can end early: at the positions that it lacks nothing is accepted, though nothing was "
    "rejected"
)
_LAST_COLUMN = "; the last column counts only rounds that had one there."
_MORE_CACHE = (
    "‡ keeps more of its cache between turns than plain generation, whose cache cannot be cropped: that is in its "
    "time end to end, and in that to the first token."
)
_FLAGGED = (
    "Flagged answers have another length than plain generation's: they are left out of that method's speedups, which "
    "are thus over other prompts than those of a method with other answers flagged."
)
_SAMPLED = (
    "Sampled answers mostly have one length where all were cut at the limit: it is those that the speedups compare."
)
_NEAR_TIE = (
    "\n\nAt a near tie the token where an output parts lies below the target's best logit by at most twice the "
    "rounding between forwards of one token and of several, near that place."
)
_TOOL_TIME = "The time that tools took is in no figure."


def _condition(report: Report, key: str) -> str:
    return recorded(report.conditions[key]) if key in report.conditions else NOT_RECORDED


def _by_temperature(report: Report, render: Callable[[list[Row]], str]) -> str:
    parts = []
    for temperature, rows in metrics.by_temperature(report.rows).items():
        if text := render(rows):
            parts.append(f"**{_temperature(temperature)}**\n\n{text}")
    return "\n\n".join(parts)


def _temperature(temperature: float) -> str:
    return "Greedy (temperature 0)" if temperature == 0 else f"Temperature {temperature:g}"


def _prompts(rows: list[Row]) -> str:
    sessions = len({(row["task"], row["id"]) for row in rows})
    return str(len(rows)) if sessions == len(rows) else f"{len(rows)} of {sessions} sessions"


def _end_to_end(rows: list[Row], method: str) -> str:
    cell = estimate(metrics.speedup(rows, method), "x")
    if metrics.keeps_no_cache(rows, method):
        return f"{cell} †"
    return f"{cell} ‡" if metrics.keeps_more_cache(rows, method) else cell


def _decoding(rows: list[Row], method: str) -> Estimate | None:
    return metrics.speedup(rows, method, decode_only=True)


def _cache_notes(text: str) -> list[str]:
    """What the marks in a text mean."""
    return [note for note in (_NO_CACHE, _MORE_CACHE) if f" {note[0]}" in text]


def _task_groups(rows: list[Row], categories: dict[str, str]) -> list[tuple[str, list[Row]]]:
    """The rows of each task, of each category with several tasks, and of all; a task may have the name of a group."""
    groups = list(metrics.by_task(rows).items())
    by_category = metrics.by_category(rows, categories)
    if len(by_category) > 1:
        for category, part in by_category.items():
            if len(metrics.by_task(part)) > 1:
                groups.append((f"all of {category}", part))
    if len(metrics.by_task(rows)) > 1:
        groups.append(("all", rows))
    return groups


def tables(report: Report) -> str:
    """For each temperature a table of tasks and methods."""
    header = ["task", "method", "prompts", "tau", "accepted", "speedup, end to end", "speedup, decoding", "tokens/s"]
    header += ["first token, ms", "identical", "flagged"]

    def render(rows: list[Row]) -> str:
        lines = []
        for name, group in _task_groups(rows, report.categories):
            for method in report.names:
                if not (part := metrics.measured_rows(group, method)):
                    continue
                same = metrics.identical(part, method)
                lines.append(
                    [
                        name,
                        method,
                        _prompts(part),
                        estimate(metrics.tau(part, method)),
                        number(metrics.accepted(part, method)),
                        _end_to_end(part, method),
                        estimate(_decoding(part, method), "x"),
                        number(metrics.tokens_per_second(part, method), 1),
                        milliseconds(metrics.first_token_seconds(part, method)),
                        "-" if same is None else f"{same[0]} of {same[1]}",
                        len(metrics.flagged_rows(part, method)),
                    ]
                )
        # Plain generation is what speedups are over, and it drafts nothing.
        for line in lines:
            if line[1] == PLAIN:
                line[4:7] = ["-"] * 3
        return _with_notes(report, make_table(header, lines), rows)

    text = _by_temperature(report, render)
    return f"{_READING}\n\n{text}"


def _with_notes(report: Report, table: str, rows: list[Row]) -> str:
    notes = _cache_notes(table)
    if any(metrics.flagged_rows(rows, method) for method in report.names):
        notes.append(_FLAGGED)
        if rows[0]["temperature"]:
            notes.append(_SAMPLED)
    if any(report.categories.get(row["task"]) == "agent" for row in rows):
        notes.append(_TOOL_TIME)
    return "\n\n".join([table, *([" ".join(notes)] if notes else [])])


def _grouped_table(report: Report, first: list[str], groups: Iterable[tuple[list[str], list[Row]]]) -> str:
    header = [*first, "method", "prompts", "tau", "speedup, end to end", "speedup, decoding", "first token, ms"]
    lines = [
        [
            *names,
            method,
            _prompts(part),
            estimate(metrics.tau(part, method)),
            "-" if method == PLAIN else _end_to_end(part, method),
            "-" if method == PLAIN else estimate(_decoding(part, method), "x"),
            milliseconds(metrics.first_token_seconds(part, method)),
        ]
        for names, group in groups
        for method in report.names
        if (part := metrics.measured_rows(group, method))
    ]
    table = make_table(header, lines)
    return "\n\n".join([table, *_cache_notes(table)])


def lengths(report: Report) -> str:
    """For each temperature a table by length of the prompt; 1k is 1,024 tokens.

    The general tasks are together. Others are apart, since sets of long prompts differ in more than length.
    """

    def render(rows: list[Row]) -> str:
        groups = (
            ([name, bucket], part)
            for name, group in metrics.general_and_tasks(rows, report.categories).items()
            for bucket, part in metrics.by_length(group).items()
        )
        return _grouped_table(report, ["task", "prompt tokens"], groups)

    return _by_temperature(report, render)


def turns(report: Report) -> str:
    """For each temperature a table of agent sessions by turn; empty without such sessions."""

    def render(rows: list[Row]) -> str:
        agents = [row for row in rows if report.categories.get(row["task"]) == "agent"]
        groups = (([turn], part) for turn, part in metrics.by_turn(agents).items())
        return _grouped_table(report, ["turn"], groups) if agents else ""

    return _by_temperature(report, render)


def rounds(report: Report) -> str:
    """For each temperature what a mean round costs and accepts."""
    header = ["method", "draft, ms", "verify, ms", "bookkeeping, ms", "memory of a call over plain's, MB"]
    header += ["accepted at position 1, 2, ... of all rounds", "the same, of rounds that got so far"]

    def render(rows: list[Row]) -> str:
        lines = []
        for method in report.names:
            if method == PLAIN or not metrics.measured_rows(rows, method):
                continue
            times, peak = metrics.round_times(rows, method), metrics.extra_peak_bytes(rows, method)
            parts = (times.drafting, times.verifying, times.bookkeeping) if times else (None,) * 3
            positions = shares(metrics.acceptance(rows, method))
            conditional = shares(metrics.conditional_acceptance(rows, method))
            memory = number(None if peak is None else peak / 1e6, 1)
            lines.append([method, *(number(part) for part in parts), memory, positions, conditional])
        return make_table(header, lines) if lines else ""

    tables = _by_temperature(report, render)
    early = [each for each in report.methods if "assistant_confidence_threshold" in (each.get("settings") or {})]
    if not tables or not early:
        return tables
    is_known = all(metrics.knows_draft_lengths(report.rows, method["name"]) for method in early)
    return f"{tables}\n\n{_ENDS_EARLY}{_LAST_COLUMN if is_known else '.'}"


def slower(report: Report) -> str:
    """Every task and method with a speedup below 1."""
    lines = []
    for temperature, rows in metrics.by_temperature(report.rows).items():
        for task, part in metrics.by_task(rows).items():
            for method in report.names:
                both = {"end to end": metrics.speedup(part, method), "decoding": _decoding(part, method)}
                texts = {"end to end": _end_to_end(part, method), "decoding": estimate(both["decoding"], "x")}
                below = [f"{name} {texts[name]}" for name, each in both.items() if each and each.value < 1]
                if below and method != PLAIN:
                    lines.append(f"* {method} on {task}, temperature {temperature:g}: {', '.join(below)}")
    text = "\n".join(lines) or "On no task was a method slower than plain generation."
    return "\n\n".join([text, *_cache_notes(text)])


def differences(report: Report) -> str:
    """How many greedy outputs part from plain generation's, and how many of them at a near tie."""
    lines, explanation = [], ""
    for method in report.names:
        if (same := metrics.identical(report.rows, method)) is None:
            continue
        parted = [row for row in report.rows if not row["identical"].get(method, True)]
        near = sum(metrics.is_near_tie(row.get("divergence", {}).get(method)) for row in parted)
        line = f"* {method}: {same[0]} of {same[1]} outputs are plain generation's"
        if parted:
            line += f"; of the {len(parted)} others, {near} part from it first at a near tie"
            explanation = _NEAR_TIE
        lines.append(f"{line}.")
        lines += [
            f"  * no near tie: {row['task']} {row['id']}, turn {row['turn'] + 1}"
            for row in parted
            if not metrics.is_near_tie(row.get("divergence", {}).get(method))
        ]
    return "\n".join(lines) + explanation


def skipped(report: Report) -> str:
    """Turns that were not run, since their prompts are too long or too short."""
    counts = {task: count for task, count in (report.conditions.get("skipped_turns") or {}).items() if count}
    temperatures = len(report.conditions.get("temperatures") or [0.0])
    together = f" at {temperatures} temperatures, together" if temperatures > 1 else ""
    return "\n".join(f"* {task}: {count:,} turns{together}" for task, count in counts.items())


def notes(report: Report) -> str:
    """What methods have to say of themselves."""
    return "\n".join(f"* {method['name']}: {method['note']}" for method in report.methods if method.get("note"))


def conditions(report: Report) -> str:
    """A table of the conditions, one of the methods, and one of the tasks."""
    parts = [make_table(["", ""], [(label, _condition(report, key)) for key, label in _CONDITIONS.items()])]
    for title, entries in (("method", report.methods), ("task", report.conditions.get("tasks") or [])):
        columns = _COLUMNS[title]
        lines = [["-" if each.get(key) is None else recorded(each[key]) for key in columns] for each in entries]
        if lines:
            parts.append(make_table([title, *list(columns.values())[1:]], lines))
    return "\n\n".join(parts)


def summary(report: Report) -> str:
    """One line for each method and temperature, over all tasks."""
    lines = []
    for temperature, rows in metrics.by_temperature(report.rows).items():
        for method in report.names:
            if method == PLAIN or not (part := metrics.measured_rows(rows, method)):
                continue
            plain, drafted = (number(metrics.tokens_per_second(part, each), 1) for each in (PLAIN, method))
            line = (
                f"* {method}, temperature {temperature:g}, prompts: {_prompts(part)}. "
                f"tau {estimate(metrics.tau(part, method))}; {plain} tokens/s without it, {drafted} with it; "
                f"{_end_to_end(part, method)} end to end, {estimate(_decoding(part, method), 'x')} in decoding"
            )
            if same := metrics.identical(part, method):
                line += f"; {same[0]} of {same[1]} texts identical"
            lines.append(f"{line}.")
    text = "\n".join(lines)
    return "\n\n".join([text, *_cache_notes(text)])


def card(report: Report) -> str:
    """A section of a model card: [`Report.of_drafter`] leaves what belongs into it."""
    dtype = report.conditions.get("dtype") or f"dtype {NOT_RECORDED}"
    tasks = list(metrics.by_task(report.rows))
    heading = f"{dtype}: {', '.join(tasks[:4])}" + (f" and {len(tasks) - 4} more" if len(tasks) > 4 else "")
    stated = [f"{_CONDITIONS[key]}: {_condition(report, key)}" for key in _CARD_CONDITIONS]
    stated += [
        f"K of {method['name']}: {recorded(method.get('num_draft_tokens'))}"
        for method in report.methods
        if method["name"] != PLAIN
    ]
    stated += [
        f"settings of {method['name']}: {recorded(method['settings'])}"
        for method in report.methods
        if method.get("settings")
    ]
    parts = {"": tables, "Slower than plain generation:": slower, "A round:": rounds, "Outputs:": differences}
    texts = [f"{label}\n\n{text}".strip() for label, render in parts.items() if (text := render(report))]
    return "\n\n".join([f"### {heading}", f"Measured with {'; '.join(stated)}.", *texts])


VIEWS = {
    "conditions": View("Conditions", conditions),
    "tables": View("Figures", tables),
    "lengths": View("By length of the prompt", lengths),
    "turns": View("By turn of agent sessions", turns),
    "rounds": View("A round", rounds),
    "slower": View("Slower than plain generation", slower),
    "differences": View("Outputs", differences),
    "skipped": View("Not run, since the prompt is too long or too short", skipped),
    "notes": View("Notes", notes),
    "summary": View(None, summary),
    "paper": View(None, beside_the_paper),
}


__all__ = ["VIEWS", "View", "card"]
