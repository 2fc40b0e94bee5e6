# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Tasks by name: where their data lies on the Hub, or in a local file, and how a row of it becomes a record.

A record has an `id` and either `turns`, user texts in order, or `messages` (and `tools`), a recorded conversation.
"""

import difflib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from ..json_lines import read_json_lines


@dataclass(frozen=True)
class Task:
    """Records to generate answers for, and where they are from.

    Args:
        name: what the report calls it.
        category: `"general"`, `"long"` or `"agent"`.
        records: the records, each with a unique `id` and either `turns` or `messages`.
        source: the Hub id of the data set; `None` for a local file.
        revision: its commit; `None` for a local file.
        file: the local file's name, without its folder; `None` for a data set of the Hub.
        sha256: of the whole local file, in hexadecimal.
    """

    name: str
    category: str
    records: list[dict[str, Any]]
    source: str | None = None
    revision: str | None = None
    file: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class _HubTask:
    """A data set of the Hub.

    Args:
        category: as in [`Task`].
        source: its Hub id.
        revision: the commit that is loaded.
        turns: what a row asks: the user texts, in order.
        config: the name of its configuration, if it has several.
        split: the split.
        id_column: the column of the ids; without one, rows are numbered.
        only: a column and the value that its rows must have.
        data_file: read this JSON lines file of the repository, and nothing else of it.
        paper_prompts: how many of its rows the paper took, where that is not all that fit.
    """

    category: str
    source: str
    revision: str
    turns: Callable[[dict[str, Any]], list[str]]
    config: str | None = None
    split: str = "test"
    id_column: str | None = None
    only: tuple[str, str] | None = None
    data_file: str | None = None
    paper_prompts: int | None = None


def _mathematics(row: dict[str, Any]) -> list[str]:
    return [f"{row['problem']}\nPlease reason step by step, and put your final answer within \\boxed{{}}."]


def _contest(row: dict[str, Any]) -> list[str]:
    prompt = f"Write a Python program that solves this problem.\n\n{row['question_content']}"
    if row["starter_code"]:
        return [f"{prompt}\n\nBegin with this code:\n```python\n{row['starter_code']}\n```"]
    return [f"{prompt}\n\nRead the input from stdin and write the result to stdout."]


def _instruction(row: dict[str, Any]) -> list[str]:
    return [f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]]


def _issue(row: dict[str, Any]) -> list[str]:
    return [f"Problem Statement:\n{row['problem_statement']}\n\nPlease fix the issue described above."]


def _choice(row: dict[str, Any]) -> list[str]:
    choices = "\n".join(f"({letter}) {row[f'choice_{letter}']}" for letter in "ABCD")
    return [
        f"Read this text and answer the question about it.\n\n<text>\n{row['context']}\n</text>\n\n"
        f"Question: {row['question']}\n{choices}\n\nThink step by step, then give the letter of the right choice."
    ]


def _longbench(domain: str) -> _HubTask:
    return _HubTask(
        "long",
        "zai-org/LongBench-v2",
        "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9",
        _choice,
        split="train",
        id_column="_id",
        only=("domain", domain),
    )


# The wording of prompts is ours where a data set has none.
_HUB_TASKS = {
    "gsm8k": _HubTask(
        "general",
        "openai/gsm8k",
        "cc7b047b6e5bb11b4f1af84efc572db110a51b3c",
        lambda row: [row["question"]],
        config="main",
        paper_prompts=128,
    ),
    "math500": _HubTask(
        "general",
        "HuggingFaceH4/MATH-500",
        "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        _mathematics,
        id_column="unique_id",
        paper_prompts=128,
    ),
    "aime25": _HubTask(
        "general",
        "math-ai/aime25",
        "563bb8404243c5f09de6ec262f2db674fe5bce9b",
        _mathematics,
        id_column="id",
    ),
    "humaneval": _HubTask(
        "general",
        "openai/openai_humaneval",
        "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        lambda row: [row["prompt"]],
        id_column="task_id",
    ),
    "mbpp": _HubTask(
        "general",
        "google-research-datasets/mbpp",
        "4bb6404fdc6cacfda99d4ac4205087b89d32030c",
        lambda row: [row["prompt"]],
        config="sanitized",
        id_column="task_id",
        paper_prompts=128,
    ),
    # The repository's loading script no longer runs; of its files, this is the newest release's.
    "livecodebench": _HubTask(
        "general",
        "livecodebench/code_generation_lite",
        "0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
        _contest,
        id_column="question_id",
        data_file="test6.jsonl",
        paper_prompts=128,
    ),
    "mt_bench": _HubTask(
        "general",
        "HuggingFaceH4/mt_bench_prompts",
        "e3a795c5e9a82ee40611c416b8a7786c73198991",
        lambda row: list(row["prompt"]),
        split="train",
        id_column="prompt_id",
    ),
    "alpaca": _HubTask(
        "general",
        "tatsu-lab/alpaca",
        "dce01c9b08f87459cf36a430d809084718273017",
        _instruction,
        split="train",
        paper_prompts=128,
    ),
    "longbench_multi_document_qa": _longbench("Multi-Document QA"),
    "longbench_in_context_learning": _longbench("Long In-context Learning"),
    "longbench_code_repository": _longbench("Code Repository Understanding"),
    "longbench_dialogue_history": _longbench("Long-dialogue History Understanding"),
    "swe_bench": _HubTask(
        "agent",
        "princeton-nlp/SWE-bench_Lite",
        "6ec7bb89b9342f664a54a6e0a6ea6501d3437cc2",
        _issue,
        id_column="instance_id",
        paper_prompts=50,
    ),
}

# Agent tasks whose recorded sessions the Hub does not hold, and what there is instead.
_LOCAL_TASKS = {
    "agent_long_bench": (
        "`ign1s/AgentLongBench` on the Hub is one archive of many settings, whose files keep `question` and `answer` "
        "apart from `messages`; unpack it, append both to the messages of the settings you mean"
    ),
    "agent_memory_bench": (
        "AgentMemoryBench is no data set of the Hub, and its sessions only arise while its environments run; record "
        "them"
    ),
    "bfcl": (
        "`gorilla-llm/Berkeley-Function-Calling-Leaderboard` on the Hub holds the user's turns and the tools, but no "
        "tool results, which only its simulators give; replay it through them"
    ),
}

TASK_CATEGORIES: dict[str, str] = {name: task.category for name, task in _HUB_TASKS.items()} | dict.fromkeys(
    _LOCAL_TASKS, "agent"
)
"""The category of every task that has a name."""


def load_task(spec: str, num_records: int | None = None) -> Task:
    """Loads a task.

    Args:
        spec: a name of [`TASK_CATEGORIES`], which is loaded from the Hub with `datasets`; or a local `.jsonl` file,
            called by its stem; or `name=file`. A local file's category is that of the task whose name it has, else
            `"agent"` if it holds `messages`, else `"general"`.
        num_records: takes the first so many records; by default as many as the paper took of a named task, and all of
            a file.

    Raises:
        OSError: if there is no such file, or the Hub cannot be reached and the revision was not downloaded before.
        ValueError: if there is no such task, or the Hub does not hold it in a usable form; if `num_records` is less
            than 1; if a local file is empty, or has a record without a unique `id` and one of `turns` and `messages`.
    """
    if num_records is not None and num_records < 1:
        raise ValueError(f"`num_records` is {num_records}, but a task needs at least 1 record.")
    name, separator, file = spec.partition("=")
    if not separator or Path(name).name != name:  # a folder's name may have the sign too
        name, file = Path(spec).stem, spec
    if file.endswith(".jsonl"):
        return _load_file(Path(file), name, num_records)
    if spec in _LOCAL_TASKS:
        raise ValueError(f"{_LOCAL_TASKS[spec]}, and give the JSON lines file as {spec}=<file>.")
    if spec not in _HUB_TASKS:
        near = difflib.get_close_matches(spec, TASK_CATEGORIES) or sorted(TASK_CATEGORIES)
        raise ValueError(f"There is no task {spec!r}; give {', '.join(near)}, or a file that ends with .jsonl.")
    return _load_from_hub(spec, num_records)


def _load_file(file: Path, name: str, num_records: int | None) -> Task:
    records = list(islice(read_json_lines(file), num_records))
    if not records:
        raise ValueError(f"{file} holds no record; give a file with one record a line.")
    for number, record in enumerate(records, start=1):
        check_record(record, f"{file}, line {number},")
    _check_ids(records, str(file))
    category = "agent" if any("messages" in record for record in records) else "general"
    with file.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    return Task(name, TASK_CATEGORIES.get(name, category), records, file=file.name, sha256=sha256)


def _load_from_hub(name: str, num_records: int | None) -> Task:
    from datasets import load_dataset  # only here, so that local files need no `datasets`

    task = _HUB_TASKS[name]
    num_records = num_records or task.paper_prompts
    # Downloaded first: offline, `load_dataset` by a Hub id takes the newest revision that it finds, whatever is asked.
    repository = snapshot_download(
        task.source, repo_type="dataset", revision=task.revision, allow_patterns=task.data_file
    )
    if task.data_file is None:
        rows = load_dataset(repository, task.config, split=task.split)
    else:
        file = str(Path(repository, task.data_file))
        rows = load_dataset("json", data_files={task.split: file}, split=task.split)
    try:
        if task.only is not None:
            column, value = task.only
            rows = rows.select([i for i, each in enumerate(rows[column]) if each == value])
        if num_records is not None:
            rows = rows.select(range(min(num_records, len(rows))))
        ids = range(len(rows)) if task.id_column is None else rows[task.id_column]
        records = [
            {"id": f"{name}/{row_id}", "source": task.source, "turns": task.turns(row)}
            for row_id, row in zip(ids, rows, strict=True)
        ]
    except KeyError as error:
        raise ValueError(
            f"{task.source} has the columns {rows.column_names}, but {name} needs {error}; give a local JSON lines "
            f"file as {name}=<file>."
        ) from error
    if not records:
        raise ValueError(f"{task.source} has no rows for {name}; give a local JSON lines file as {name}=<file>.")
    _check_ids(records, task.source)
    return Task(name, task.category, records, source=task.source, revision=task.revision)


def check_record(record: dict[str, Any], place: str) -> None:
    """Raises a ValueError unless `record` is one that can be answered; `place` is what the error calls it."""
    formats = [key for key in ("turns", "messages") if record.get(key)]
    if record.get("id") is None or len(formats) != 1:
        raise ValueError(
            f"{place} has the fields {sorted(record)}; give an `id` and either `turns`, user texts, or `messages`."
        )
    entries = record[formats[0]]
    is_valid = isinstance(entries, list) and all(
        isinstance(entry, str) if formats == ["turns"] else isinstance(entry, dict) and "role" in entry
        for entry in entries
    )
    if not is_valid:
        raise ValueError(
            f"{place} has `{formats[0]}` {str(entries)[:80]!r}; `turns` are a list of texts, `messages` a list of "
            "dictionaries with a `role`."
        )
    for message in entries if formats == ["messages"] else []:
        _check_message(message, place)
    if not _are_dictionaries(record.get("tools") or []):
        raise ValueError(
            f"{place} has `tools` {str(record['tools'])[:80]!r}; they are a list of dictionaries, not their text."
        )


def _check_message(message: dict[str, Any], place: str) -> None:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    is_text = content is None or isinstance(content, str | list)
    if not (is_text and all(isinstance(part, dict) and part.get("type") == "text" for part in parts)):
        raise ValueError(f"{place} has the content {str(content)[:80]!r}; only text can be given to the target.")
    if not _are_dictionaries(message.get("tool_calls") or []):
        raise ValueError(
            f"{place} has `tool_calls` {str(message['tool_calls'])[:80]!r}; they are a list of dictionaries."
        )


def _are_dictionaries(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, dict) for value in values)


def _check_ids(records: Iterable[dict[str, Any]], place: str) -> None:
    repeated = [name for name, count in Counter(str(record["id"]) for record in records).items() if count > 1]
    if repeated:
        raise ValueError(f"{place} has the id {repeated[0]!r} more than once; give every record its own.")


__all__ = ["TASK_CATEGORIES", "Task", "check_record", "load_task"]
