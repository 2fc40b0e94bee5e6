# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Tasks from local files, and what is asked of the Hub; none of it reads the network."""

import hashlib
import json
import os
import re
import sys

import datasets
import pytest

from dlite_hf.evaluation import tasks
from dlite_hf.evaluation.tasks import _HUB_TASKS, TASK_CATEGORIES, load_task


MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
# Rows with the columns of the data sets, and what they ask.
ROWS = {
    "gsm8k": ({"question": "2 + 2?", "answer": "#### 4"}, ["2 + 2?"]),
    "aime25": (
        {"id": "0", "problem": "Find x.", "answer": "70"},
        ["Find x.\nPlease reason step by step, and put your final answer within \\boxed{}."],
    ),
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "def f():\n", "test": ""}, ["def f():\n"]),
    "mt_bench": ({"prompt_id": 7, "category": "writing", "prompt": ["Write.", "Shorter."]}, ["Write.", "Shorter."]),
    "swe_bench": (
        {"instance_id": "a__b-1", "problem_statement": "It fails."},
        ["Problem Statement:\nIt fails.\n\nPlease fix the issue described above."],
    ),
}
LONGBENCH_ROW = {"context": "A text.", "question": "Which?", **{f"choice_{x}": f"choice {x}" for x in "ABCD"}}


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def hub(monkeypatch):
    """`hub(rows)` stands in for the Hub; `hub.calls` are the calls of `snapshot_download` and of `load_dataset`."""

    def answer_with(rows):
        def snapshot_download(*args, **kwargs):
            answer_with.calls.append((args, kwargs))
            return "snapshot"

        def load_dataset(*args, **kwargs):
            answer_with.calls.append((args, kwargs))
            return datasets.Dataset.from_list(rows)

        monkeypatch.setattr(tasks, "snapshot_download", snapshot_download)
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    answer_with.calls = []
    return answer_with


def test_a_local_file_of_turns(tmp_path):
    records = [{"id": i, "turns": [f"question {i}"], "source": "mine"} for i in range(3)]
    file = write_lines(tmp_path / "riddles.jsonl", *records)
    task = load_task(file, num_records=2)
    assert (task.name, task.category, task.file) == ("riddles", "general", "riddles.jsonl")
    assert task.records == records[:2]
    assert task.source is None and task.revision is None
    assert task.sha256 == hashlib.sha256((tmp_path / "riddles.jsonl").read_bytes()).hexdigest()
    assert load_task(file).records == load_task(file, num_records=9).records == records


@pytest.mark.parametrize(
    "stem, name, category",
    [
        ("sessions", None, "agent"),
        ("sessions", "mine", "agent"),
        ("longbench_dialogue_history", None, "long"),
        ("sessions", "gsm8k", "general"),
    ],
)
def test_the_category_of_a_local_file_of_messages(tmp_path, stem, name, category):
    file = write_lines(tmp_path / f"{stem}.jsonl", {"id": "a", "messages": MESSAGES, "tools": []})
    task = load_task(f"{name}={file}" if name else file)
    assert (task.name, task.category) == (name or stem, category)
    assert task.file == f"{stem}.jsonl"


def test_a_folder_may_have_the_sign_of_a_name(tmp_path):
    (tmp_path / "lr=1").mkdir()
    file = write_lines(tmp_path / "lr=1" / "mine.jsonl", {"id": 1, "turns": ["Hi"]})
    assert load_task(file).name == "mine"
    assert load_task(f"yours={file}").name == "yours"


def test_local_files_need_no_datasets(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert load_task(write_lines(tmp_path / "gsm8k.jsonl", {"id": 1, "turns": ["Hi"]})).category == "general"
    with pytest.raises(ImportError):
        load_task("gsm8k")


@pytest.mark.parametrize(
    "record, message",
    [
        ({"id": 1, "prompt": "Hi"}, r"line 2, has the fields \['id', 'prompt'\]; give an `id` and either `turns`"),
        ({"id": 1, "turns": []}, "line 2, has the fields"),
        ({"turns": ["Hi"]}, "line 2, has the fields"),
        ({"id": 1, "turns": ["Hi"], "messages": MESSAGES}, "line 2, has the fields"),
        ({"id": 1, "turns": "Hi"}, "line 2, has `turns` 'Hi'; `turns` are a list of texts"),
        ({"id": 1, "messages": [{"content": "Hi"}]}, "line 2, has `messages`"),
        ({"id": None, "turns": ["Hi"]}, "line 2, has the fields"),
        # Templates would render these, as something that nobody said.
        ({"id": 1, "messages": MESSAGES, "tools": '[{"name": "f"}]'}, "line 2, has `tools` .*not their text"),
        ({"id": 1, "messages": MESSAGES, "tools": ["f"]}, "line 2, has `tools`"),
        ({"id": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "line 2, .*only text"),
        ({"id": 1, "messages": [{"role": "user", "content": 5}]}, "line 2, has the content '5'"),
        ({"id": 1, "messages": [*MESSAGES, {"role": "assistant", "tool_calls": "f"}]}, "line 2, has `tool_calls` 'f'"),
        ({"id": "0", "turns": ["Hi"]}, "has the id '0' more than once"),
    ],
)
def test_a_record_that_is_none(tmp_path, record, message):
    file = write_lines(tmp_path / "mine.jsonl", {"id": 0, "turns": ["Hi"]}, record)
    with pytest.raises(ValueError, match=message):
        load_task(file)
    assert len(load_task(file, num_records=1).records) == 1


def test_contents_that_are_no_text_alone(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, call, {"role": "tool", "content": ""}]
    record = {"id": 1, "messages": messages, "tools": None}
    assert load_task(write_lines(tmp_path / "mine.jsonl", record)).records == [record]


def test_what_is_no_task(tmp_path):
    with pytest.raises(ValueError, match=r"There is no task 'gsm8'; give gsm8k, or a file that ends with \.jsonl"):
        load_task("gsm8")
    with pytest.raises(ValueError, match="There is no task 'xyzzy'; give agent_long_bench, .*, swe_bench, or a file"):
        load_task("xyzzy")
    with pytest.raises(ValueError, match="holds no record"):
        load_task(write_lines(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match="`num_records` is 0"):
        load_task("gsm8k", num_records=0)
    with pytest.raises(FileNotFoundError):
        load_task(str(tmp_path / "missing.jsonl"))


@pytest.mark.parametrize("name", ["agent_long_bench", "agent_memory_bench", "bfcl"])
def test_a_task_that_the_hub_does_not_hold(tmp_path, hub, name):
    hub([])
    with pytest.raises(ValueError, match=f"give the JSON lines file as {name}=<file>"):
        load_task(name)
    assert hub.calls == []
    file = write_lines(tmp_path / "recorded.jsonl", {"id": 1, "messages": MESSAGES})
    assert load_task(f"{name}={file}").category == "agent"


def test_every_name_has_a_category_and_the_hubs_a_full_commit():
    assert {name for name, category in TASK_CATEGORIES.items() if category == "long"} == {
        "longbench_multi_document_qa",
        "longbench_in_context_learning",
        "longbench_code_repository",
        "longbench_dialogue_history",
    }
    assert {name for name, category in TASK_CATEGORIES.items() if category == "agent"} == {
        "swe_bench",
        "agent_long_bench",
        "agent_memory_bench",
        "bfcl",
    }
    assert all(re.fullmatch("[0-9a-f]{40}", task.revision) for task in _HUB_TASKS.values())


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_hub(hub, name):
    row, turns = ROWS[name]
    hub([row])
    task = load_task(name)
    assert [record["turns"] for record in task.records] == [turns]
    assert task.source == task.records[0]["source"] == hub.calls[0][0][0]
    assert task.revision == hub.calls[0][1]["revision"]
    assert (task.category, task.file, task.sha256) == (TASK_CATEGORIES[name], None, None)


def test_what_is_asked_of_the_hub(hub):
    rows = [{"question": f"question {i}", "answer": ""} for i in range(3)]
    hub(rows)
    task = load_task("gsm8k", num_records=2)
    revision = "cc7b047b6e5bb11b4f1af84efc572db110a51b3c"
    downloaded = {"repo_type": "dataset", "revision": revision, "allow_patterns": None}
    assert hub.calls == [(("openai/gsm8k",), downloaded), (("snapshot", "main"), {"split": "test"})]
    assert [record["id"] for record in task.records] == ["gsm8k/0", "gsm8k/1"]
    assert len(load_task("gsm8k", num_records=9).records) == 3


def test_a_named_task_has_as_many_records_as_in_the_paper(hub):
    hub([{"question": f"question {i}", "answer": ""} for i in range(200)])
    assert len(load_task("gsm8k").records) == 128 and len(load_task("gsm8k", 200).records) == 200
    hub([{"id": str(i), "problem": "Find x.", "answer": "1"} for i in range(200)])
    assert len(load_task("aime25").records) == 200


def test_a_snapshot_is_read_as_the_hubs_page_says(tmp_path, monkeypatch):
    """Its README names the files of each configuration and split; offline, too."""
    for config in ("main", "socratic"):
        (tmp_path / config).mkdir()
        for split in ("train", "test"):
            rows = [{"question": f"{config}, {split}", "answer": ""}]
            datasets.Dataset.from_list(rows).to_parquet(tmp_path / config / f"{split}-00000-of-00001.parquet")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {config}\n  data_files:\n"
            + "".join(f"  - split: {split}\n    path: {config}/{split}-*\n" for split in ("train", "test"))
            for config in ("main", "socratic")
        )
        + "---\n"
    )
    monkeypatch.setattr(tasks, "snapshot_download", lambda *arguments, **options: str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert [record["turns"] for record in load_task("gsm8k").records] == [["main, test"]]


def test_mathematics_has_the_ids_of_its_data_set(hub):
    hub([{"unique_id": "test/algebra/1.json", "problem": "Find x.", "answer": "1"}])
    record = load_task("math500").records[0]
    assert record["id"] == "math500/test/algebra/1.json"
    assert record["turns"][0].startswith("Find x.\n")


def test_alpaca_has_an_input_or_none(hub):
    hub([{"instruction": "Name one.", "input": ""}, {"instruction": "Sort.", "input": "3 1"}])
    assert [record["turns"] for record in load_task("alpaca").records] == [["Name one."], ["Sort.\n\n3 1"]]


def test_livecodebench_is_one_file_of_its_repository(hub):
    row = {"question_content": "Add.", "starter_code": ""}
    hub([{"question_id": "a", **row}, {"question_id": "b", **row, "starter_code": "class Solution:"}])
    with_stdin, with_code = (record["turns"][0] for record in load_task("livecodebench").records)
    assert "Add." in with_stdin and "stdin" in with_stdin
    assert "Add." in with_code and "class Solution:" in with_code and "stdin" not in with_code
    (_, downloaded), loaded = hub.calls
    assert (downloaded["revision"], downloaded["allow_patterns"]) == (
        "0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
        "test6.jsonl",
    )
    file = os.path.join("snapshot", "test6.jsonl")
    assert loaded == (("json",), {"data_files": {"test": file}, "split": "test"})


def test_longbench_is_one_domain(hub):
    domains = ["Single-Document QA", "Multi-Document QA", "Long In-context Learning", "Multi-Document QA"]
    hub([{"_id": str(i), "domain": domain, **LONGBENCH_ROW} for i, domain in enumerate(domains)])
    task = load_task("longbench_multi_document_qa")
    assert [record["id"] for record in task.records] == [f"{task.name}/1", f"{task.name}/3"]
    assert [record["id"] for record in load_task(task.name, 1).records] == [f"{task.name}/1"]
    prompt = task.records[0]["turns"][0]
    assert "<text>\nA text.\n</text>" in prompt and "Question: Which?\n(A) choice A\n(B) choice B\n" in prompt
    with pytest.raises(ValueError, match="has no rows for longbench_code_repository"):
        load_task("longbench_code_repository")


def test_columns_that_have_changed(hub):
    hub([{"id": "1", "text": "Find x."}])
    with pytest.raises(ValueError, match=r"has the columns \['id', 'text'\], but aime25 needs 'problem'"):
        load_task("aime25")
