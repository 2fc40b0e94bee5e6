# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The conversations of `dlite-hf train`: read from their files, and some of them held out."""

import os
from collections.abc import Iterator
from typing import Any

from datasets import Dataset, Features, Json, List, Value, concatenate_datasets
from datasets.exceptions import DatasetGenerationError
from transformers.utils import logging

from ..json_lines import read_json_lines
from ..training_args import DLiteTrainingArguments
from ..training_record import DataRecord, describe_data
from .train_arguments import TrainArguments


logger = logging.get_logger(__name__)

_CONVERSATION = Features(
    {
        "id": Value("string"),
        "messages": List(Json()),
        "tools": List(Json()),
        "finish_reasons": List(Value("string")),
        "finish_reason": Value("string"),
        "generation": Json(),
        "source": Value("string"),
        "license": Value("string"),
    }
)

# Fewer prompts than this, and two checkpoints differ in tau by chance.
_FEW_EVAL_CONVERSATIONS = 32


def read_data(
    train_args: TrainArguments, training_args: DLiteTrainingArguments
) -> tuple[Dataset, Dataset | None, list[DataRecord]]:
    """Conversations to train on, those held out, and what the former are."""
    parts = [read_conversations(file) for file in train_args.train_files]
    data = [
        describe_data(file, part.select_columns(["license", "source"]))
        for file, part in zip(train_args.train_files, parts, strict=True)
    ]
    train, held_out = concatenate_datasets(parts), None
    if train_args.eval_files:
        held_out = concatenate_datasets([read_conversations(file) for file in train_args.eval_files])
    elif train_args.num_eval_conversations:
        number = train_args.num_eval_conversations
        if not 0 < number < len(train):
            raise ValueError(
                f"`num_eval_conversations` is {number}, but there are {len(train)} conversations, of which some must "
                "be left to train on."
            )
        parts = train.train_test_split(test_size=number, seed=training_args.seed)
        train, held_out = parts["train"], parts["test"]
    if held_out is not None and len(held_out) < _FEW_EVAL_CONVERSATIONS and training_args.process_index == 0:
        logger.warning(
            f"Only {len(held_out)} conversations are held out: two checkpoints may differ in tau by chance; "
            f"{_FEW_EVAL_CONVERSATIONS} or more tell them apart better."
        )
    return train, held_out, data


def read_conversations(file: str | os.PathLike) -> Dataset:
    """The conversations of a JSON lines file, with the fields that training reads; any others are left out.

    Raises:
        OSError: if there is no such file.
        ValueError: if a line is not a conversation.
    """
    # `datasets` would read a plain file and one with tools as different tables, which do not go together. The size and
    # the time are there for its cache, which knows a file by them.
    stat = os.stat(file)
    source = {"file": os.path.abspath(file), "size": stat.st_size, "modified": stat.st_mtime_ns}
    try:
        return Dataset.from_generator(_lines, features=_CONVERSATION, gen_kwargs=source)
    except DatasetGenerationError as error:
        raise ValueError(str(error.__cause__)) from error


def _lines(file: str, size: int, modified: int) -> Iterator[dict[str, Any]]:
    for number, record in enumerate(read_json_lines(file), start=1):
        if not isinstance(record.get("messages"), list):
            raise ValueError(f"{file}, line {number}, has no list `messages`; give one conversation a line.")
        yield {name: record.get(name) for name in _CONVERSATION}
