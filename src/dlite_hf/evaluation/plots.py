# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Pictures of a report, and of training logs; needs matplotlib, `pip install "dlite-hf[evaluate]"`.

Figures are made without pyplot, so a notebook's backend and its open figures stay as they are.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import metrics
from .methods import PLAIN
from .metrics import Estimate, Row
from .report import Report


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's colours, which the colour-blind can tell apart; hatches and markers say the same in grey.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "---", "ooo", "+++")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_PARTS = {"drafting": "draft", "verifying": "verify", "bookkeeping": "bookkeeping"}
_TASKS_A_PANEL = 6
_DPI = 150


def save_plots(report: Report, folder: str | os.PathLike) -> list[Path]:
    """Draws what the report has figures for, one PNG a picture and temperature, and returns the files.

    Args:
        report: the report.
        folder: where to; it is made if it is missing.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Report, float], Figure | None]] = {
        "speedup": plot_speedups,
        "speedup-decoding": lambda report, temperature: plot_speedups(report, temperature, decode_only=True),
        "tau-by-length": plot_tau_by_length,
        "acceptance": plot_acceptance,
        "round": plot_round_times,
    }
    files = []
    for temperature in metrics.by_temperature(report.rows):
        for name, plot in pictures.items():
            figure = plot(report, temperature)
            if figure is not None:
                files.append(Path(folder, f"{name}-t{temperature:g}.png"))
                figure.savefig(files[-1], dpi=_DPI)
    return files


def plot_speedups(report: Report, temperature: float = 0.0, *, decode_only: bool = False) -> "Figure | None":
    """Bars of speedups by task and method, with 95% intervals and a line at 1x; None where none was measured."""
    tasks = metrics.by_task(_rows(report, temperature))
    methods = _drafting_methods(report)
    bars = {
        (task, method): metrics.speedup(rows, method, decode_only=decode_only)
        for task, rows in tasks.items()
        for method in methods
    }
    methods = [method for method in methods if any(bars[task, method] for task in tasks)]
    if not methods:
        return None
    # As many tasks in every panel, so that bars are equally wide; the last one may have a gap.
    num_panels = -(-len(tasks) // _TASKS_A_PANEL)
    width = -(-len(tasks) // num_panels)
    figure = _new_figure(max(6.0, 1.2 + width * (0.4 + 0.34 * len(methods))), 0.9 + 2.8 * num_panels)
    axes: Any = figure.subplots(num_panels, 1, sharey=True, squeeze=False)
    names = list(tasks)
    cacheless = {method for method in methods if metrics.keeps_no_cache(_rows(report, temperature), method)}
    noted = set() if decode_only else cacheless
    labels = {
        method: _literal(f"{method} (no cache between turns)" if method in noted else method) for method in methods
    }
    for panel, (ax,) in enumerate(axes):
        _draw_bars(ax, names[panel * width :][:width], methods, bars, labels, report)
        ax.set_xlim(-0.5, width - 0.5)
        ax.set_ylabel("speedup")
    _finish(
        figure,
        f"Speedup over plain generation, {'decoding' if decode_only else 'end to end'}",
        temperature,
        axes[0, 0],
        len(methods),
    )
    return figure


def _draw_bars(
    ax: "Axes",
    tasks: Sequence[str],
    methods: Sequence[str],
    bars: Mapping[tuple[str, str], Estimate | None],
    labels: Mapping[str, str],
    report: Report,
) -> None:
    width = 0.84 / len(methods)
    for place, method in enumerate(methods):
        shown = [(i, bars[task, method]) for i, task in enumerate(tasks)]
        points = [(i, each) for i, each in shown if each is not None]
        centres = [i + (place - (len(methods) - 1) / 2) * width for i, _ in points]
        colour, hatch, _ = _style(report, method)
        heights = [each.value for _, each in points]
        ax.bar(
            centres,
            heights,
            0.94 * width,
            label=labels[method],
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0,
        )
        _draw_intervals(ax, centres, [each for _, each in points], "#333333")
        for centre, (_, each) in zip(centres, points, strict=True):
            top = each.value if each.high is None else each.high
            ax.annotate(
                f"{each.value:.2f}",
                (centre, top),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=7,
            )
    ax.axhline(1, color="black", linewidth=1, linestyle="--", zorder=3)
    ax.set_xticks(range(len(tasks)), [_wrap(task) for task in tasks])
    ax.margins(y=0.12)
    ax.set_ylim(bottom=0)


def plot_tau_by_length(report: Report, temperature: float = 0.0) -> "Figure | None":
    """Lines of tau against the length of the prompt, with 95% intervals; None where none was measured.

    The general tasks share a panel. Others have their own, since sets of long prompts differ in more than length.
    """
    rows = _rows(report, temperature)
    methods = [method for method in _drafting_methods(report) if metrics.tau(rows, method) is not None]
    if not methods:
        return None
    groups = metrics.general_and_tasks(rows, report.categories)
    num_columns = min(len(groups), 2)
    num_rows = -(-len(groups) // num_columns)
    figure = _new_figure(2 + 5 * num_columns, 1 + 3 * num_rows)
    axes = figure.subplots(num_rows, num_columns, sharey=True, squeeze=False).flat
    for place, (ax, (name, group)) in enumerate(zip(axes, groups.items(), strict=False)):
        _draw_taus(ax, metrics.by_length(group), methods, report)
        ax.set_title(_literal(name), fontsize=10)
        if place % num_columns == 0:
            ax.set_ylabel("tokens a verification, tau")
    for ax in axes[len(groups) :]:
        ax.remove()
    _finish(figure, "tau by length of the prompt", temperature, axes[0], len(methods))
    return figure


def _draw_taus(ax: "Axes", buckets: Mapping[str, list[Row]], methods: Sequence[str], report: Report) -> None:
    for place, method in enumerate(methods):
        taus = [(i, metrics.tau(rows, method)) for i, rows in enumerate(buckets.values())]
        points = [(i, each) for i, each in taus if each is not None]
        colour, _, marker = _style(report, method)
        # Side by side, so that intervals do not cover each other.
        shift = 0.06 * (place - (len(methods) - 1) / 2)
        centres, estimates = [i + shift for i, _ in points], [each for _, each in points]
        ax.plot(
            centres,
            [each.value for each in estimates],
            color=colour,
            marker=marker,
            markersize=5,
            label=_literal(method),
        )
        _draw_intervals(ax, centres, estimates, colour)
    labels = [f"{name}\n{len(rows)} prompt{'s' if len(rows) > 1 else ''}" for name, rows in buckets.items()]
    ax.set_xticks(range(len(buckets)), labels)
    ax.set_xlim(-0.5, len(buckets) - 0.5)
    ax.axhline(1, color="black", linewidth=1, linestyle="--")
    ax.set_xlabel("tokens of the prompt (1k = 1,024)")


def plot_acceptance(report: Report, temperature: float = 0.0) -> "Figure | None":
    """Acceptance by position in the draft: of all rounds, and of those that got so far; None where none is known."""
    rows = _rows(report, temperature)
    figure = _new_figure(10, 4)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    drawn = longest = 0
    for method in _drafting_methods(report):
        if not (shares := metrics.acceptance(rows, method)):
            continue
        conditional = metrics.conditional_acceptance(rows, method) or []
        drawn, longest = drawn + 1, max(longest, len(shares), len(conditional))
        colour, _, marker = _style(report, method)
        for ax, values in ((left, shares), (right, conditional)):
            points = [(position, each) for position, each in enumerate(values, start=1) if each is not None]
            ax.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, label=_literal(method))
    if not drawn:
        return None
    left.set_title("of all rounds", fontsize=10)
    right.set_title("of rounds that got so far", fontsize=10)
    left.set_ylabel("share accepted")
    left.set_ylim(0, 1)
    left.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    left.set_xticks(range(1, longest + 1))
    for ax in (left, right):
        ax.set_xlabel("position in the draft")
    _finish(figure, "Acceptance by position", temperature, left, drawn)
    return figure


def plot_round_times(report: Report, temperature: float = 0.0) -> "Figure | None":
    """Where the milliseconds of a mean round go, a bar a method; None where no method tells."""
    rows = _rows(report, temperature)
    found = [(method, metrics.round_times(rows, method)) for method in _drafting_methods(report)]
    times = [(method, each) for method, each in found if each is not None]
    if not times:
        return None
    figure = _new_figure(8, 1.7 + 0.5 * len(times))
    ax = figure.subplots()
    longest = max(each.drafting + each.verifying + each.bookkeeping for _, each in times)
    left = [0.0] * len(times)
    for place, (part, label) in enumerate(_PARTS.items()):
        widths = [getattr(each, part) for _, each in times]
        ax.barh(range(len(times)), widths, 0.6, left, label=label, color=_COLOURS[place], hatch=_HATCHES[place])
        for row, width in enumerate(widths):
            if width > 0.06 * longest:  # narrower ones have no room for a number
                ax.text(
                    left[row] + width / 2,
                    row,
                    f"{width:.1f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
                )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    ax.set_yticks(range(len(times)), [_literal(method) for method, _ in times])
    ax.invert_yaxis()
    ax.set_xlabel("milliseconds a round")
    _finish(figure, "Time of a round, prefill left out", temperature, ax, len(_PARTS), grid="x")
    return figure


def plot_training(logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> "Figure":
    """Curves of training logs: loss, accuracy, and the tau expected from acceptance, or measured.

    Args:
        logs: by what a curve is called, the entries that `DLiteTrainer` logged; those without a figure are left out.
    """
    figure = _new_figure(13, 4)
    panels = figure.subplots(1, 3)
    titles = {"loss": "loss", "accuracy": "accuracy of a draft token", "expected_tau": "expected tau"}
    for ax, (key, title) in zip(panels, titles.items(), strict=True):
        for place, (name, entries) in enumerate(logs.items()):
            points = [(each["step"], each[key]) for each in entries if key in each]
            if points:
                style = {"color": _COLOURS[place % len(_COLOURS)], "linestyle": ("-", "--", "-.", ":")[place % 4]}
                ax.plot(*zip(*points, strict=True), label=_literal(name), linewidth=1.4, **style)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("step")
    _add_legend(figure, panels[0], len(logs))
    return figure


def _rows(report: Report, temperature: float) -> list[Row]:
    return metrics.by_temperature(report.rows).get(temperature, [])


def _drafting_methods(report: Report) -> list[str]:
    return [name for name in report.names if name != PLAIN]


def _style(report: Report, method: str) -> tuple[str, str, str]:
    """Colour, hatch and marker of a method, the same in all pictures of a report."""
    place = _drafting_methods(report).index(method)
    return tuple(each[place % len(each)] for each in (_COLOURS, _HATCHES, _MARKERS))  # type: ignore[return-value]


def _draw_intervals(ax: "Axes", centres: Sequence[float], estimates: Sequence[Estimate], colour: str) -> None:
    """A whisker where there is an interval: one of no length would look like certainty."""
    for centre, each in zip(centres, estimates, strict=True):
        if each.low is not None and each.high is not None:
            lengths = [[max(each.value - each.low, 0.0)], [max(each.high - each.value, 0.0)]]
            ax.errorbar([centre], [each.value], yerr=lengths, fmt="none", ecolor=colour, capsize=2)


def _new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _finish(
    figure: "Figure", title: str, temperature: float, ax: "Axes", num_entries: int, grid: Literal["x", "y"] = "y"
) -> None:
    """The title, one legend below all panels, and thin lines behind what is drawn."""
    figure.suptitle(f"{title} ({'greedy' if temperature == 0 else f'temperature {temperature:g}'})", fontsize=11)
    _add_legend(figure, ax, num_entries, grid)


def _add_legend(figure: "Figure", ax: "Axes", num_entries: int, grid: Literal["x", "y"] = "y") -> None:
    for each in figure.axes:
        each.set_axisbelow(True)
        each.grid(axis=grid, alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(num_entries, 5), frameon=False, fontsize=9)


def _wrap(task: str) -> str:
    """A task's name over several lines, so that neighbours do not meet."""
    return _literal(task.replace("_", "\n") if len(task) > 9 else task)


def _literal(name: str) -> str:
    """A name for a picture: matplotlib would read mathematics between dollars, and leave `_name` out of legends."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


__all__ = ["plot_acceptance", "plot_round_times", "plot_speedups", "plot_tau_by_length", "plot_training", "save_plots"]
