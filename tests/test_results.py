# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The figures in documents and cards are those of the stored reports, and a difference is seen."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from dlite_hf import DLiteForDrafting
from dlite_hf.evaluation.methods import weights_sha256
from dlite_hf.evaluation.report import Report

from .evaluation.reports import measurement, report, row
from .test_model_card import save_drafter


ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "training" / "write_results.py"
SECTION = "Before.\n\n<!-- results: report.json summary -->\n{}<!-- end -->\n\nAfter.\n"
SUMMARY = (
    "* dlite, temperature 0, prompts: 1. tau not measured; 1.0 tokens/s without it, 2.0 with it; 2.00x end to end, "
    "2.22x in decoding; 1 of 1 texts identical."
)
RECIPE = """\
drafter: model_cards/tiny-DLite
evaluations: [training/results/report.json]
repo_id: me/tiny-DLite
license: mit
"""


def load_script():
    spec = importlib.util.spec_from_file_location("write_results", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


write_results = load_script()


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository with a report and a document; the script works on it."""
    (tmp_path / "training" / "results").mkdir(parents=True)
    report([row(dlite=measurement(seconds=5.5))]).save(tmp_path / "training" / "results" / "report.json")
    (tmp_path / "RESULTS.md").write_text(SECTION.format(""))
    monkeypatch.setattr(write_results, "ROOT", tmp_path)
    return tmp_path


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["write_results.py", *arguments])
    return write_results.main()


def test_the_repository_says_what_its_reports_say():
    assert list(write_results.outdated(ROOT)) == [], "run `python training/write_results.py`"


def test_every_picture_that_a_document_shows_is_there():
    shown = [link for name in write_results.DOCUMENTS for link in re.findall(r"\]\((\S+?\.png)\)", read(name))]
    assert shown and [link for link in shown if not (ROOT / link).exists()] == []


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_shipped_drafter_that_was_measured_has_a_recipe_for_its_card():
    reports = [Report.load(file) for file in sorted((ROOT / write_results.RESULTS).glob("*.json")) if is_report(file)]
    measured = {name for each in reports for name in each.drafters}
    shipped = {f"model_cards/{folder.name}" for folder in (ROOT / "model_cards").iterdir() if folder.name in measured}
    assert shipped and shipped <= set(write_results.card_recipes(ROOT))


def test_reports_are_of_the_weights_that_are_shipped():
    files = filter(is_report, sorted((ROOT / write_results.RESULTS).glob("*.json")))
    measured = {
        (method["checkpoint"], report.conditions["dtype"], method["sha256"])
        for report in map(Report.load, files)
        for method in report.methods
        if (ROOT / "model_cards" / str(method["checkpoint"])).is_dir()
    }
    assert measured
    for name, dtype, sha256 in measured:
        assert weights_sha256(DLiteForDrafting.from_pretrained(ROOT / "model_cards" / name, dtype=dtype)) == sha256


def is_report(file):
    return json.loads(file.read_text(encoding="utf-8")).keys() == {"conditions", "methods", "rows"}


def test_a_section_is_filled_and_the_rest_is_left(root, monkeypatch, capsys):
    assert run(monkeypatch) == 0
    assert (root / "RESULTS.md").read_text() == SECTION.format(f"\n{SUMMARY}\n\n")
    assert capsys.readouterr().out == "Wrote RESULTS.md.\n"
    assert run(monkeypatch, "--check") == 0 and capsys.readouterr().out == ""


def test_a_figure_that_differs_is_found_and_not_written(root, monkeypatch, capsys):
    run(monkeypatch)
    edited = (root / "RESULTS.md").read_text().replace("2.00x", "3.00x")
    (root / "RESULTS.md").write_text(edited)
    assert run(monkeypatch, "--check") == 1
    assert "RESULTS.md differs from its reports" in capsys.readouterr().out
    assert (root / "RESULTS.md").read_text() == edited


def test_a_report_that_changes_is_found(root, monkeypatch):
    run(monkeypatch)
    report([row(dlite=measurement(seconds=11.0))]).save(root / "training" / "results" / "report.json")
    assert list(write_results.outdated(root)) == ["RESULTS.md"]


def test_pictures_are_those_of_the_report(root, monkeypatch):
    document, folder = root / "RESULTS.md", root / "training" / "results" / "report"
    document.write_text(document.read_text() + "![Speedups](training/results/report/speedup-t0.png)\n")
    assert sorted(write_results.outdated(root)) == ["RESULTS.md", "training/results/report/report.sha256"]
    run(monkeypatch)
    before = (folder / "speedup-t0.png").read_bytes()
    assert write_results.outdated(root) == {}
    report([row(dlite=measurement(seconds=2.0))]).save(root / "training" / "results" / "report.json")
    assert "training/results/report/report.sha256" in write_results.outdated(root)
    run(monkeypatch)
    assert write_results.outdated(root) == {} and (folder / "speedup-t0.png").read_bytes() != before


def test_several_sections(root):
    text = SECTION.format("old\n") + SECTION.replace("summary", "slower").format("old\n")
    filled = write_results.fill(text, root / "training" / "results")
    assert SUMMARY in filled and "On no task was a method slower" in filled and "old" not in filled
    assert write_results.fill("No section.\n", root) == "No section.\n"


def test_tables_of_other_measurements(root):
    """Four sequences of 8 tokens in 2 s; what a GPU is expected to do; and an arm of the ablations."""
    each = {"method": "plain", "kind": "plain", "batch_size": 4, "new_tokens": 32, "seconds": [2.0], "note": None}
    (root / "batches.json").write_text(json.dumps({"rows": [{**each, "tokens_per_second": 16.0}]}))
    names = ("plain_ms", "verify_ms", "backbone_ms", "head_ms", "draft_kv_bytes", "memory_bytes", "launch_seconds")
    each = {"gpu": "H200", "drafter": "DLite", "tau": 2.5, "context": 512, "batch_size": 1, "speedup": 1.75}
    each |= {**dict.fromkeys(names, 1e-6), "target_weight_bytes": 2.0, "fits": True}
    (root / "gpu.json").write_text(json.dumps({"rows": [each]}))
    arm = {"parameters": 14_366_656, "expected_tau": 1.1795, "accuracy": 0.1065, "tau": 1.1756, "seconds": 86.9}
    (root / "arms.json").write_text(json.dumps({"r = 64": arm}))
    text = "".join(
        f"<!-- results: {file}.json {view} -->\n<!-- end -->\n"
        for file, view in (("batches", "concurrency"), ("gpu", "roofline"), ("arms", "ablations"))
    )
    filled = write_results.fill(text, root)
    assert "| plain | 16.0 |" in filled and "| 1.75x |" in filled
    assert "| r = 64 | 14.4M | 1.179 | 0.106 | 1.176 |" in filled


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (SECTION.replace("<!-- end -->", ""), ValueError, "lacks its `<!-- end -->`"),
        ("<!-- results: a.json summary -->\n" + SECTION, ValueError, "lacks its `<!-- end -->`"),
        (SECTION.replace("report.json summary", "report.json"), ValueError, "is not written"),
        (SECTION.replace("summary", "figures"), ValueError, "names no view; there are conditions, tables"),
        (SECTION.replace("report.json", "lost.json"), FileNotFoundError, "lost.json"),
    ],
)
def test_a_section_that_cannot_be_filled_is_an_error(root, text, error, message):
    with pytest.raises(error, match=message):
        write_results.fill(text, root / "training" / "results")


def test_a_card_is_remade_from_its_recipe(root, monkeypatch):
    save_drafter(root / "model_cards" / "tiny-DLite")
    (root / "training" / "results" / "tiny.yaml").write_text(RECIPE)
    run(monkeypatch)
    card = root / "model_cards" / "tiny-DLite" / "README.md"
    assert "license: mit" in card.read_text() and "2.00x" in card.read_text()
    assert write_results.outdated(root) == {}
    card.write_text(card.read_text().replace("2.00x", "3.00x"))
    assert list(write_results.outdated(root)) == ["model_cards/tiny-DLite/README.md"]
