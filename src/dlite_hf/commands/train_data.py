# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The conversations of `dlite-hf train`: read from their files, some of them held out, and tokenised."""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset, Features, Json, List, Value, concatenate_datasets
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..conversations import tokenize_conversations
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


class TrainData(NamedTuple):
    """
    Args:
        train: samples to train on.
        held_out: samples to evaluate on, if there are any.
        records: what was trained on, file by file, without what is held out of it.
    """

    train: Dataset
    held_out: Dataset | None
    records: list[DataRecord]


def read_data(
    train_args: TrainArguments,
    training_args: DLiteTrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: list[int],
) -> TrainData:
    """Samples (see [`~dlite_hf.conversations.tokenize_conversations`]) of the files that the arguments name.

    Raises:
        OSError: if a file does not exist.
        ValueError: if a line is no conversation, if there are too few to hold so many out, or as tokenising does.
    """

    def tokenize(conversations: Dataset) -> Dataset:
        options = (tokenizer, eos_token_ids, training_args.max_length, train_args.template_options)
        return tokenize_conversations(conversations, *options)

    parts = [(file, read_conversations(file)) for file in train_args.train_files]
    held_out = None
    if train_args.eval_files:
        held_out = concatenate_datasets([read_conversations(file) for file in train_args.eval_files])
    elif train_args.num_eval_conversations:
        parts, held_out = _hold_out(parts, train_args.num_eval_conversations, training_args.seed)
    if held_out is not None and len(held_out) < _FEW_EVAL_CONVERSATIONS and training_args.process_index == 0:
        logger.warning(
            f"Only {len(held_out)} conversations are held out: two checkpoints may differ in tau by chance; "
            f"{_FEW_EVAL_CONVERSATIONS} or more tell them apart better."
        )
    samples, records = [], []
    for file, part in parts:
        samples.append(tokenize(part))
        fields = part.select_columns(["license", "source"])
        records.append(describe_data(file, fields, supervised_tokens=_num_supervised(samples[-1])))
    return TrainData(concatenate_datasets(samples), None if held_out is None else tokenize(held_out), records)


def _hold_out(parts: list[tuple[str, Dataset]], number: int, seed: int) -> tuple[list[tuple[str, Dataset]], Dataset]:
    """The parts without `number` conversations drawn from all of them, as far as anything is left, and those."""
    total = sum(len(part) for _, part in parts)
    if not 0 < number < total:
        raise ValueError(
            f"`num_eval_conversations` is {number}, but there are {total} conversations, of which some must be left "
            "to train on."
        )
    is_held_out = np.zeros(total, dtype=np.bool_)
    is_held_out[np.random.default_rng(seed).choice(total, number, replace=False)] = True
    train, held_out, start = [], [], 0
    for file, part in parts:
        here = is_held_out[start : start + len(part)]
        start += len(part)
        held_out.append(part.select(np.flatnonzero(here)))
        if not here.all():
            train.append((file, part.select(np.flatnonzero(~here))))
    return train, concatenate_datasets(held_out)


def _num_supervised(samples: Dataset) -> int:
    tables = samples.with_format("arrow").iter(batch_size=1000)
    return sum(chunk.flatten().true_count for table in tables for chunk in table["supervised"].chunks)


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
