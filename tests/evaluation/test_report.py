# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""A report survives its file, refuses what it is not, and says what its rows say: losses, gaps and flags included."""

import json

import pytest

from dlite_hf.evaluation.report import Report
from dlite_hf.evaluation.views import VIEWS

from .reports import measurement, plain, report, row


FULL = {"rounds": 4, "emitted": 10, "accepted_per_position": [3, 2, 1]}


def lines_of(text, *cells):
    """The cells of the table lines that begin with `cells`."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [each[len(cells) :] for each in rows if each[: len(cells)] == list(cells)]


def test_round_trip(tmp_path):
    original = report([row("ä", dlite=measurement(**FULL)), row("b", dlite=measurement())], machine="a machine")
    original.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == original
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    assert sum(line.startswith('{"task"') for line in text.splitlines()) == 2  # a row a line


def test_figures_that_are_no_json_are_not_saved(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        report([row(dlite=measurement(seconds=float("nan")))]).save(tmp_path / "report.json")
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("rows", "report.json is no JSON"),
        ("[]", "must have `conditions`, `methods` and `rows`"),
        ('{"rows": []}', "must have `conditions`, `methods` and `rows`"),
        ('{"conditions": [], "methods": [], "rows": []}', "report.json is no report .*`conditions` is a list"),
        ('{"conditions": {}, "methods": [], "rows": []}', "`methods` must be a list with at least one entry"),
        ('{"conditions": {}, "methods": [{"name": "a"}], "rows": []}', r"`methods` lacks \['kind'\] in entry 0"),
        ('{"conditions": {}, "methods": [{"name": "a", "kind": "b"}], "rows": [1]}', "`rows` lacks .* in entry 0"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path, content, message):
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        Report.load(tmp_path / "report.json")


def test_rows_must_fit_the_methods():
    with pytest.raises(ValueError, match=r"Row 1 measures \['other'\], but `methods` lists only \['plain', 'dlite'\]"):
        report([row(), row(other=measurement())])
    with pytest.raises(ValueError, match=r"names that repeat, \['plain', 'plain'\]"):
        report([row()], methods=("plain", "plain"))
    with pytest.raises(ValueError, match=r"Row 0 lacks \['seconds'\] of 'dlite'"):
        report([row(dlite={"tokens": 1})])


def test_the_table_of_tasks():
    """Plain needs 11 s for each of two prompts; drafted 5 and 6 s, of which 1 s each is prefill."""
    rows = [row("a", dlite=measurement(seconds=5.0, **FULL)), row("b", dlite=measurement(seconds=6.0, **FULL))]
    rows.append(row("c", task="bfcl", dlite=measurement(seconds=22.0, **FULL)))
    text = report(rows).to_markdown()
    ((prompts, tau, accepted, speedup, decoding, speed, first, same, flagged),) = lines_of(text, "gsm8k", "dlite")
    assert (prompts, tau, accepted, speed, first, same, flagged) == (
        "2",
        "2.50",
        "1.50",
        "2.0",
        "1,000",
        "2 of 2",
        "0",
    )
    assert (speedup, decoding) == ("2.00x", "2.22x")
    (whole,) = lines_of(text, "bfcl", "dlite")
    assert whole[3:5] == ["0.50x", "0.48x"]
    (alone,) = lines_of(text, "gsm8k", "plain")
    assert alone == ["2", "1.00", "-", "-", "-", "1.0", "1,000", "-", "0"]
    assert len(lines_of(text, "all", "dlite")) == 1 and not lines_of(text, "all of general", "dlite")
    assert "The time that tools took is in no figure." in text


def test_what_is_slower_is_said():
    rows = [row(dlite=measurement(seconds=22.0), prompt=measurement(seconds=5.0))]
    text = VIEWS["slower"].render(report(rows, ("plain", "dlite", "prompt")))
    assert text == "* dlite on gsm8k, temperature 0: end to end 0.50x, decoding 0.48x"
    text = VIEWS["slower"].render(report([row(dlite=measurement(seconds=5.0))]))
    assert text == "On no task was a method slower than plain generation."


def test_a_missing_counter_is_not_measured():
    made = report([row(dlite=measurement())])
    (cells,) = lines_of(VIEWS["tables"].render(made), "gsm8k", "dlite")
    assert cells[1:3] == ["not measured"] * 2
    (cells,) = lines_of(VIEWS["rounds"].render(made), "dlite")
    assert cells == ["not measured"] * 6


def test_rounds_say_that_drafts_end_early():
    made = report([row(dlite=measurement(**FULL))])
    assert "can end early" not in VIEWS["rounds"].render(made)
    made.methods[1]["settings"] = {"assistant_confidence_threshold": 0.2}
    text = VIEWS["rounds"].render(made)
    assert text.endswith(
        "draft can end early: at the positions that it lacks nothing is accepted, though nothing was rejected."
    )
    made.rows[0]["measurements"]["dlite"]["tested_per_position"] = [3, 3, 2]
    text = VIEWS["rounds"].render(made)
    assert "75%, 50%, 25% | 100%, 67%, 50% |" in text
    assert text.endswith("nothing was rejected; the last column counts only rounds that had one there.")


def test_flagged_rows_are_counted_and_explained():
    rows = [row("a", dlite=measurement(seconds=5.5)), row("b", dlite=measurement(tokens=9, seconds=1.0))]
    text = VIEWS["tables"].render(report(rows))
    ((*_, speedup, _, _, _, same, flagged),) = lines_of(text, "gsm8k", "dlite")
    assert (speedup, same, flagged) == ("2.00x", "1 of 2", "1")
    assert "left out of that method's speedups" in text
    assert "left out" not in VIEWS["tables"].render(report(rows[:1]))


def test_temperatures_have_tables_of_their_own():
    rows = [row(dlite=measurement(seconds=5.5)), row(temperature=1.0, dlite=measurement(seconds=2.75))]
    text = VIEWS["tables"].render(report(rows))
    greedy, sampled = text.split("**Temperature 1**")
    assert "**Greedy (temperature 0)**" in greedy
    assert lines_of(greedy, "gsm8k", "dlite")[0][3] == "2.00x" and lines_of(sampled, "gsm8k", "dlite")[0][3] == "4.00x"
    assert lines_of(sampled, "gsm8k", "dlite")[0][7] == "-" and "Flagged" not in text
    rows.append(row("b", temperature=1.0, dlite=measurement(tokens=9)))
    greedy, sampled = VIEWS["tables"].render(report(rows)).split("**Temperature 1**")
    assert "Flagged" not in greedy and "Sampled answers mostly have one length" in sampled
    assert lines_of(sampled, "gsm8k", "dlite")[0][-1] == "1"


def make_agent_report():
    """Two sessions of two turns; `stock` has no cache in the second."""
    rows = [
        row(id, "bfcl", turn, 0.0, 900 + 800 * turn, plain=plain(cached_tokens=500 * turn), **measured)
        for id in ("a", "b")
        for turn in (0, 1)
        for measured in [
            {"dlite": measurement(seconds=5.5, cached_tokens=500 * turn, **FULL), "stock": measurement(seconds=11.0)}
        ]
    ]
    return report([*rows, row(dlite=measurement(**FULL))], ("plain", "dlite", "stock"))


def test_by_length_and_by_turn():
    made = make_agent_report()
    lengths, turns = (VIEWS[name].render(made) for name in ("lengths", "turns"))
    assert lines_of(lengths, "bfcl", "0-1k", "dlite") == [["2", "2.50", "2.00x", "2.22x", "1,000"]]
    assert len(lines_of(lengths, "bfcl", "1-4k", "dlite")) == 1
    assert len(lines_of(lengths, "general tasks", "0-1k", "dlite")) == 1
    assert lines_of(turns, "1", "dlite") == lines_of(turns, "2", "dlite") == [["2", "2.50", "2.00x", "2.22x", "1,000"]]
    assert VIEWS["turns"].render(report([row(dlite=measurement())])) == ""  # no agents
    (whole,) = lines_of(VIEWS["tables"].render(made), "bfcl", "dlite")
    assert whole[0] == "4 of 2 sessions"


def test_methods_without_a_cache_between_turns_are_marked():
    made = make_agent_report()
    for name in ("tables", "turns", "lengths"):
        text = VIEWS[name].render(made)
        assert text.count("†") > 1 and "† reads the whole prompt again" in text
        assert not any("†" in line for line in text.splitlines() if "| dlite |" in line)
    assert lines_of(VIEWS["turns"].render(made), "2", "stock")[0][2] == "1.00x †"
    assert lines_of(VIEWS["turns"].render(made), "1", "stock")[0][2] == "1.00x"


def test_a_round():
    counters = {"drafting_seconds": 0.4, "verifying_seconds": 3.2, "peak_bytes": 3_500_000}
    made = report([row(plain=plain(peak_bytes=1_000_000), dlite=measurement(seconds=6.0, **FULL, **counters))])
    assert lines_of(VIEWS["rounds"].render(made), "dlite") == [
        ["100.00", "800.00", "350.00", "2.5", "75%, 50%, 25%", "75%, 67%, 50%"]
    ]


def test_outputs_that_part():
    tie, gap = ({"first_difference": 3, "gap": each, "largest_rounding": 0.25} for each in (0.5, 0.75))
    parted = {"identical": {"dlite": False}, "dlite": measurement()}
    rows = [row(dlite=measurement()), row("b", divergence={"dlite": tie}, **parted)]
    text = VIEWS["differences"].render(report(rows))
    assert "* dlite: 1 of 2 outputs are plain generation's; of the 1 others, 1 part" in text and "no near" not in text
    rows.append(row("c", turn=2, divergence={"dlite": gap}, **parted))
    text = VIEWS["differences"].render(report(rows))
    assert "of the 2 others, 1 part from it first at a near tie" in text
    assert "  * no near tie: gsm8k c, turn 3" in text and "at most twice the rounding" in text
    assert VIEWS["differences"].render(report(rows[:1])) == "* dlite: 1 of 1 outputs are plain generation's."
    assert VIEWS["differences"].render(report([row(temperature=1.0, dlite=measurement())])) == ""


def test_conditions():
    made = report(
        [row(dlite=measurement())], thinking=False, num_prompts=None, temperatures=[0.0], generation={"used": {"a": 1}}
    )
    text = VIEWS["conditions"].render(made)
    assert lines_of(text, "target") == [["name owner/target, dtype float32"]]
    assert lines_of(text, "thinking mode") == [["off"]] and lines_of(text, "temperatures") == [["0.0"]]
    assert lines_of(text, "records of a task, at most") == [["not set"]]
    assert lines_of(text, "generation settings") == [["used (a 1)"]]
    assert lines_of(text, "machine") == [["not recorded"]]
    assert lines_of(text, "dlite") == [["dlite", "tiny-DLite", "1,234", "7", "none"]]
    assert lines_of(text, "gsm8k") == [["general", "openai/gsm8k", "cc7b047", "-", "-", "2"]]


def test_skipped_turns_and_notes_are_said():
    made = report([row(dlite=measurement())], skipped_turns={"bfcl": 1200, "gsm8k": 0})
    assert "## Not run, since the prompt is too long or too short\n\n* bfcl: 1,200 turns" in made.to_markdown()
    assert "## Notes" not in made.to_markdown() and "turns of gsm8k" not in made.to_markdown()
    made.methods[1]["note"] = "It is small."
    assert "## Notes\n\n* dlite: It is small." in made.to_markdown()


def test_the_paper_beside_ours():
    rows = [row(dlite=measurement(seconds=5.0, **FULL)), row("b", "bfcl", dlite=measurement(seconds=6.0))]
    rows.append(row("c", "bfcl", temperature=1.0, dlite=measurement(seconds=1.5)))
    text = VIEWS["paper"].render(report(rows))
    speedups, taus = text.split("\n\ntau:\n\n")
    assert lines_of(speedups, "bfcl") == [["1.58x", "1.44x", "2.11x", "2.37x", "1.82x", "2.30x", "2.00x"]]
    assert lines_of(taus, "gsm8k")[0] == ["6.27", "6.38", "-", "-", "2.50"]
    assert lines_of(taus, "bfcl")[0][-1] == lines_of(taus, "mbpp")[0][-1] == "not measured"
    # The paper's are sessions.
    said = "here only first turns were run"
    first, second = (row("d", "swe_bench", turn, dlite=measurement()) for turn in (0, 1))
    assert said in VIEWS["paper"].render(report([first]))
    assert said not in text and said not in VIEWS["paper"].render(report([first, second]))


def test_a_summary_is_a_line_for_each_method():
    made = report([row(dlite=measurement(seconds=5.5, **FULL)), row(temperature=1.0, dlite=measurement())])
    greedy, sampled = VIEWS["summary"].render(made).splitlines()
    assert greedy == (
        "* dlite, temperature 0, prompts: 1. tau 2.50; 1.0 tokens/s without it, 2.0 with it; 2.00x end to end, 2.22x "
        "in decoding; 1 of 1 texts identical."
    )
    assert "temperature 1" in sampled and "identical" not in sampled


def test_the_methods_of_one_drafter():
    """Beside it stays what needs no drafter: a card should not hide what costs nothing."""
    measured = {name: measurement() for name in ("prompt", "other", "dlite")}
    made = report([row(**measured)], ("plain", *measured), "some-DLite")
    made.methods[2]["checkpoint"] = "small"
    part = made.of_drafter("some-DLite")
    assert part.names == list(part.rows[0]["measurements"]) == ["plain", "prompt", "dlite"]
    assert part.rows[0]["identical"] == {"prompt": True, "dlite": True}
    assert made.names == ["plain", "prompt", "other", "dlite"]
    with pytest.raises(ValueError, match=r"no drafter 'another', but \['small', 'some-DLite'\]"):
        made.of_drafter("another")


def test_the_report_is_strict_json(tmp_path):
    report([row(dlite=measurement())]).save(tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert content["rows"][0]["measurements"]["dlite"]["rounds"] is None


def test_a_category_of_several_tasks_has_lines_of_its_own():
    rows = [row(task=task, dlite=measurement(seconds=5.5)) for task in ("gsm8k", "mbpp", "bfcl")]
    made = report(rows)
    made.conditions["tasks"].append({"name": "mbpp", "category": "general"})
    text = VIEWS["tables"].render(made)
    assert lines_of(text, "all of general", "dlite")[0][0] == "2" and lines_of(text, "all", "dlite")[0][0] == "3"
    assert not lines_of(text, "all of agent", "dlite")


def test_a_task_may_have_the_name_of_a_group():
    rows = [row(task=task, dlite=measurement()) for task in ("all", "gsm8k")]
    lines = lines_of(VIEWS["tables"].render(report(rows)), "all", "dlite")
    assert [line[0] for line in lines] == ["1", "2"]


def test_drafters_of_one_name_are_not_mixed():
    made = report([row(dlite=measurement(), other=measurement())], ("plain", "dlite", "other"), "some-DLite")
    made.methods[2]["checkpoint"] = "some-DLite"
    assert made.of_drafter("some-DLite").names == ["plain", "dlite", "other"]
    made.methods[1]["sha256"], made.methods[2]["sha256"] = "0" * 64, "1" * 64
    with pytest.raises(ValueError, match=r"several drafters 'some-DLite', as \['dlite', 'other'\]"):
        made.of_drafter("some-DLite")


def test_skipped_turns_of_several_temperatures_are_said_to_be():
    made = report([row(dlite=measurement())], skipped_turns={"bfcl": 2}, temperatures=[0.0, 1.0])
    assert VIEWS["skipped"].render(made) == "* bfcl: 2 turns at 2 temperatures, together"


def test_methods_that_keep_more_cache_than_plain_are_marked():
    made = report([row(task="bfcl", turn=1, dlite=measurement(seconds=5.5, cached_tokens=50))])
    for name in ("tables", "turns", "lengths"):
        text = VIEWS[name].render(made)
        assert "2.00x ‡ |" in text and "‡ keeps more of its cache" in text and "†" not in text
