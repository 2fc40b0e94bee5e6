# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""`dlite-hf evaluate`, from folders to a report."""

import json
import sys
from dataclasses import replace

import pytest

from dlite_hf import cli
from dlite_hf.commands import evaluate as command
from dlite_hf.evaluation.concurrency import concurrency_table
from dlite_hf.evaluation.report import Report

from .targets import make_chatml_tokenizer, make_drafter, make_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, a drafter for it, and two tasks."""
    folder = tmp_path_factory.mktemp("evaluate")
    target = make_target("llama")
    target.generation_config.update(do_sample=True, top_k=20, pad_token_id=0)
    target.save_pretrained(folder / "target")
    make_chatml_tokenizer().save_pretrained(folder / "target")
    make_drafter(target).save_pretrained(folder / "drafter")
    short = [{"id": str(i), "turns": [text]} for i, text in enumerate(("one one one", "two", "three"))]
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    (folder / "short.jsonl").write_text("".join(json.dumps(record) + "\n" for record in short))
    (folder / "agent.jsonl").write_text(json.dumps({"id": "m", "messages": messages}) + "\n")
    return folder


def test_a_recipe_and_its_report(folder, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"target: {folder}/target\ntasks: ['{folder}/short.jsonl', 'sessions={folder}/agent.jsonl']\n"
        f"drafters: dlite={folder}/drafter\nmethods: [plain, prompt_lookup]\nnum_prompts: 2\nmax_new_tokens: 8\n"
        "temperatures: [0, 1]\nchat_template_kwargs: {enable_thinking: false}\ntarget_name: owner/tiny\n"
        f"target_quantization: q4_1\noutput_dir: {tmp_path}/out\ndevice: cpu\n"
        "attn_implementation: sdpa_packed\nconfidence_thresholds: [0.25]\n"
    )
    assert cli.main(["evaluate", str(recipe), "--seed", "3"]) == 0
    output = capsys.readouterr().out
    report = Report.load(tmp_path / "out" / "report.json")
    names = ["plain", "prompt_lookup", "dlite", "dlite, confidence 0.25"]
    assert report.names == names
    assert report.methods[3]["settings"]["assistant_confidence_threshold"] == 0.25
    places = [("short", "0", 0), ("short", "1", 0), ("sessions", "m", 0), ("sessions", "m", 1)]
    assert [(row["task"], row["id"], row["turn"]) for row in report.rows] == 2 * places
    assert [row["temperature"] for row in report.rows] == [0.0] * 4 + [1.0] * 4
    assert all(row["identical"] == dict.fromkeys(names[1:], True) for row in report.rows[:4])
    conditions = report.conditions
    target = {"name": "owner/tiny", "dtype": "float32", "quantization": "q4_1"}
    assert target.items() <= conditions["target"].items()
    assert (conditions["thinking"], conditions["seed"], conditions["num_prompts"]) == (False, 3, 2)
    assert conditions["attn_implementation"] == "sdpa_packed"
    assert conditions["generation"]["ignored"] == {"do_sample": True, "top_k": 20}
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.startswith("# ") and text in output
    assert len(list((tmp_path / "out").glob("*.png"))) == int(output.split(" plots to ")[0].rpartition(" ")[2]) > 0
    # Once more: nothing is left to do, and the rows are as they were.
    assert cli.main(["evaluate", str(recipe), "--seed", "3"]) == 0
    assert Report.load(tmp_path / "out" / "report.json").rows == report.rows


def test_many_sequences_at_once(folder, tmp_path, capsys):
    fields = ["--target", f"{folder}/target", "--tasks", f"{folder}/short.jsonl", f"{folder}/agent.jsonl"]
    fields += ["--methods", "plain", "--max_new_tokens", "4", "--batch_sizes", "1", "2", "--temperatures", "1"]
    fields += ["--device", "cpu"]
    assert cli.main(["evaluate", "--output_dir", str(tmp_path / "out"), *fields]) == 0
    content = json.loads((tmp_path / "out" / "concurrency.json").read_text())
    rows, report = content["rows"], Report.load(tmp_path / "out" / "report.json")
    conditions = content["conditions"]
    shared = ("target", "machine", "threads", "torch", "attn_implementation", "max_new_tokens")
    assert {name: conditions[name] for name in shared} == {name: report.conditions[name] for name in shared}
    assert [task["name"] for task in conditions["tasks"]] == ["short"] and content["methods"] == report.methods
    assert not {"temperatures", "generation", "skipped_turns"} & conditions.keys()  # of the prompts one by one
    plain = [row for row in rows if row["method"] == "plain"]
    assert [(row["batch_size"], row["new_tokens"]) for row in plain] == [(1, 4), (2, 8)]
    lengths = [row["prompt_tokens"] for row in report.rows]
    assert [row["prompt_tokens"] for row in plain] == [lengths[0], sum(lengths[:2])]
    assert concurrency_table(rows) in capsys.readouterr().out


def test_plain_generation_is_as_fast_there_as_in_the_report(folder, tmp_path, monkeypatch):
    """It may have a static cache."""
    settings = {"cache_implementation": "static", "max_cache_len": 64}

    def choose(self):
        plain, *others = self.progress.methods
        return [replace(plain, settings=settings), *others]

    seen = []
    monkeypatch.setattr("dlite_hf.evaluation.runner._Run._with_faster_caches", choose)
    monkeypatch.setattr(
        command, "measure_concurrency", lambda target, prompts, methods, **options: seen.extend(methods)
    )
    monkeypatch.setattr(command, "concurrency_table", lambda rows: "")
    fields = ["--target", f"{folder}/target", "--tasks", f"{folder}/short.jsonl", "--device", "cpu"]
    fields += ["--max_new_tokens", "4", "--batch_sizes", "1"]
    assert cli.main(["evaluate", "--output_dir", str(tmp_path / "out"), *fields]) == 0
    assert [(method.name, method.settings) for method in seen] == [
        ("plain", settings),
        ("prompt_lookup", {"prompt_lookup_num_tokens": 10}),
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["--batch_sizes", "0"], "`batch_sizes` is [0]"),
        (
            ["--batch_sizes", "1", "--min_prompt_tokens", "100", "--max_new_tokens", "8"],
            "No first turn of short has from 100 to 248 tokens",
        ),
        (["--tasks"], "`tasks` is empty"),
        (["--tasks", "gsm9k"], "There is no task 'gsm9k'"),
        (["--chat_template_kwargs", "[]"], "must be a JSON object"),
        (["--methods", "prompt_lookup"], "compared with 'plain'"),
        (["--drafters", "/nothing/here"], "/nothing/here"),
        (["--confidence_thresholds", "0.4"], "A confidence threshold is 0.4, but must lie between 0 and 1"),
    ],
)
def test_mistakes_are_told_in_one_line(folder, tmp_path, capsys, fields, message):
    fields = ["--target", f"{folder}/target", "--tasks", f"{folder}/short.jsonl", "--device", "cpu", *fields]
    assert cli.main(["evaluate", "--output_dir", str(tmp_path / "out"), *fields]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("dlite-hf: error: ") and message in error
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_nothing_is_begun(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fields = ["--target", f"{folder}/target", "--tasks", f"{folder}/short.jsonl"]
    assert cli.main(["evaluate", "--output_dir", str(tmp_path / "out"), *fields]) == 2
    assert "matplotlib" in capsys.readouterr().err and not (tmp_path / "out").exists()
