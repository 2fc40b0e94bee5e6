# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What pictures show, read back from their axes; and that drawing leaves pyplot alone."""

import subprocess
import sys

import pytest
from PIL import Image

from dlite_hf.evaluation import plots

from .reports import measurement, plain, report, row


COUNTERS = {"rounds": 4, "emitted": 10, "accepted_per_position": [3, 2, 1]}


@pytest.fixture
def made():
    """Two tasks of two prompts; `stock` knows no counters."""
    rows = [
        row(
            id,
            task,
            prompt_tokens=length,
            dlite=measurement(seconds=seconds, **COUNTERS, **times),
            stock=measurement(),
        )
        for task, length in (("gsm8k", 100), ("bfcl", 5000))
        for id, seconds in (("a", 5.0), ("b", 6.0))
        for times in [{"drafting_seconds": 0.4, "verifying_seconds": 3.2}]
    ]
    return report(rows, ("plain", "stock", "dlite"))


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_speedups(made):
    figure = plots.plot_speedups(made)
    (ax,) = figure.axes
    assert legend(figure) == ["stock", "dlite"]
    bars = [bar.get_height() for bar in ax.patches]
    assert bars == pytest.approx([11 / 6] * 2 + [2.0] * 2)  # both tasks of `stock`, then of `dlite`
    assert [label.get_text() for label in ax.get_xticklabels()] == ["gsm8k", "bfcl"]
    assert any(list(line.get_ydata()) == [1, 1] for line in ax.lines)  # the line of plain generation
    assert plots.plot_speedups(made, decode_only=True).axes[0].patches[2].get_height() == pytest.approx(20 / 9)


def test_the_interval_of_a_speedup():
    """Plain needs 11 s for each; of five draws, the slow prompt is in at most three, and often in none."""
    rows = [row(name, dlite=measurement(seconds=10.0 if name == "c" else 5.0)) for name in "abcde"]
    (ax,) = plots.plot_speedups(report(rows)).axes
    (segment,) = [
        segment for each in ax.collections for segment in each.get_segments() if segment[0, 1] != segment[1, 1]
    ]
    assert segment[:, 1] == pytest.approx((55 / 40, 55 / 25))
    # Without an interval there is no whisker, which would look like certainty.
    (ax,) = plots.plot_speedups(report(rows[:4])).axes
    assert len(ax.patches) == 1 and not ax.collections


def test_many_tasks_stand_in_several_panels():
    rows = [row(task=f"task_{i}", dlite=measurement()) for i in range(8)]
    figure = plots.plot_speedups(report(rows))
    assert [len(ax.patches) for ax in figure.axes] == [4, 4]
    assert len(figure.legends) == 1


def test_a_method_without_a_cache_between_turns_is_marked():
    measured = {"dlite": measurement(cached_tokens=50), "stock": measurement()}
    made = report([row(turn=1, plain=plain(cached_tokens=50), **measured)], ("plain", "stock", "dlite"))
    assert legend(plots.plot_speedups(made)) == ["stock (no cache between turns)", "dlite"]
    assert legend(plots.plot_speedups(made, decode_only=True)) == ["stock", "dlite"]


def test_tau_by_length(made):
    """The general tasks in one panel, each other task in its own."""
    rows = [*made.rows, row("c", "gsm8k", prompt_tokens=2000, dlite=measurement(**{**COUNTERS, "emitted": 8}))]
    rows.append(row("d", "swe", prompt_tokens=5000, dlite=measurement(**COUNTERS)))
    figure = plots.plot_tau_by_length(report(rows, ("plain", "stock", "dlite")))
    assert legend(figure) == ["dlite"]  # nothing is drawn for what nobody counted
    assert [ax.get_title() for ax in figure.axes] == ["general tasks", "bfcl", "swe"]
    assert [[label.get_text() for label in ax.get_xticklabels()] for ax in figure.axes] == [
        ["0-1k\n2 prompts", "1-4k\n1 prompt"],
        ["4-8k\n2 prompts"],
        ["4-8k\n1 prompt"],
    ]
    assert [list(ax.lines[0].get_ydata()) for ax in figure.axes] == [[2.5, 2.0], [2.5], [2.5]]


def test_acceptance(made):
    figure = plots.plot_acceptance(made)
    curves = [[list(line.get_ydata()) for line in ax.lines] for ax in figure.axes]
    assert curves == [[[0.75, 0.5, 0.25]], [[0.75, pytest.approx(2 / 3), 0.5]]]
    assert legend(figure) == ["dlite"]


def test_time_of_a_round(made):
    figure = plots.plot_round_times(made)
    (ax,) = figure.axes
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([100.0, 800.0, 225.0])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["dlite"]
    assert [text.get_text() for text in ax.texts] == ["100.0", "800.0", "225.0"]


def test_training_curves():
    log = [{"step": 20, "loss": 2.0, "accuracy": 0.5, "expected_tau": 1.5}, {"step": 30, "eval_tau": 1.7}]
    figure = plots.plot_training({"teacher": log, "student": log[1:]})
    assert [[list(line.get_xydata()[0]) for line in ax.lines] for ax in figure.axes] == [
        [[20, 2.0]],
        [[20, 0.5]],
        [[20, 1.5]],
    ]
    assert legend(figure) == ["teacher"]


def test_pictures_are_saved_for_each_temperature(tmp_path):
    rows = [row(dlite=measurement(**COUNTERS)), row(temperature=1.0, dlite=measurement(seconds=3.0))]
    files = plots.save_plots(report(rows), tmp_path / "plots")
    assert sorted(file.name for file in files) == [
        "acceptance-t0.png",
        "speedup-decoding-t0.png",
        "speedup-decoding-t1.png",
        "speedup-t0.png",
        "speedup-t1.png",
        "tau-by-length-t0.png",
    ]
    for file in files:
        with Image.open(file) as image:
            assert image.format == "PNG" and image.width > 600


def test_nothing_measured_is_no_picture():
    made = report([row()], ("plain",))
    drawn = [plots.plot_speedups, plots.plot_tau_by_length, plots.plot_acceptance, plots.plot_round_times]
    assert [plot(made) for plot in drawn] == [None] * 4


def test_drawing_leaves_pyplot_alone():
    code = (
        "import sys; from dlite_hf.evaluation import plots; assert 'matplotlib' not in sys.modules\n"
        "plots.plot_training({'a': [{'step': 1, 'loss': 2.0}]}); assert 'matplotlib.pyplot' not in sys.modules"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_names_are_shown_as_they_are(tmp_path):
    """Mathematics between dollars would raise, and matplotlib keeps `_names` out of legends."""
    names = ("_own", "$\\frac$")
    rows = [row(task="$\\frac$", **{name: measurement(**COUNTERS) for name in names})]
    made = report(rows, ("plain", *names))
    figure = plots.plot_speedups(made)
    assert legend(figure) == [" _own", r"\$\frac\$"]
    assert plots.save_plots(made, tmp_path)
