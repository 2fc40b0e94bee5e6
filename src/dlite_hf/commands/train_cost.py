# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What the arguments of `dlite-hf train` ask for, in the numbers of an estimate."""

import math
import os
from itertools import chain, islice
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
)
from transformers.utils import logging

from ..configuration_dlite import DLiteConfig
from ..conversations import end_of_turn_ids, tokenize_conversations
from ..estimate import UTILIZATION, TargetSize, Workload
from ..training_args import DLiteTrainingArguments
from .train_arguments import (
    EstimateArguments,
    TrainArguments,
    drafter_overrides,
    stage_epochs,
    steps_per_epoch,
    teacher_arguments,
)
from .train_data import read_conversations


logger = logging.get_logger(__name__)

# The recipes' targets, known without a network. Of a configuration only sizes are read here.
_QWEN3 = {
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_NAMED_TARGETS: dict[str, tuple[type, dict[str, Any]]] = {
    "Qwen/Qwen3-4B": (
        Qwen3Config,
        {**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    ),
    "Qwen/Qwen3-8B": (
        Qwen3Config,
        {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (
        LlamaConfig,
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
}

# Lengths are measured on the first conversations: enough for a mean.
_NUM_MEASURED = 1000


def workload(
    train_args: TrainArguments, training_args: DLiteTrainingArguments, estimate_args: EstimateArguments
) -> Workload:
    """The run in numbers, from the target's configuration and the files, or what the recipe says of them.

    Raises:
        ValueError: if neither the files nor the recipe tell the number and the length of the conversations.
        OSError: if the target's configuration is missing.
    """
    config = target_config(train_args.target, train_args.target_revision)
    if train_args.drafter is not None:
        drafter = DLiteConfig.from_pretrained(train_args.drafter)
    else:
        overrides = {**drafter_overrides(train_args, config), "draft_vocab_size": train_args.draft_vocab_size}
        overrides |= {"mask_token_id": train_args.mask_token_id or 0}  # any row costs the same
        drafter = DLiteConfig.from_target(config, history_window=train_args.history_window, **overrides)
    teacher = None
    if train_args.teacher is not None:
        teacher = DLiteConfig.from_pretrained(train_args.teacher)
    elif train_args.teacher_epochs:
        teacher = DLiteConfig.from_target(config, history_window=train_args.teacher_history_window, **overrides)

    num_conversations, mean_tokens, mean_answer_tokens = _measure(train_args, training_args, estimate_args)
    num_devices = estimate_args.assumed_num_devices
    epochs = stage_epochs(training_args, num_conversations, num_devices)
    size = (num_conversations, num_devices)
    num_checkpoints = _num_checkpoints(training_args, sum(epochs.values()), *size)
    num_evaluations = _num_evaluations(training_args, sum(epochs.values()), *size)
    if train_args.teacher_epochs:
        of_teacher = teacher_arguments(train_args, training_args)
        teacher_epochs = sum(stage_epochs(of_teacher, *size).values())
        num_checkpoints += _num_checkpoints(of_teacher, teacher_epochs, *size)
        num_evaluations += _num_evaluations(of_teacher, teacher_epochs, *size)
        epochs = {"teacher": teacher_epochs, **epochs}
    return Workload(
        target=TargetSize.of(config),
        drafter=drafter,
        teacher=teacher,
        epochs=epochs,
        num_conversations=num_conversations,
        mean_tokens=mean_tokens,
        mean_answer_tokens=mean_answer_tokens,
        max_length=training_args.max_length,
        max_anchors=training_args.max_anchors,
        batch_size=training_args.per_device_train_batch_size,
        batches_per_step=training_args.gradient_accumulation_steps,
        num_devices=num_devices,
        attn_implementation=train_args.attn_implementation or "sdpa",
        target_bytes=getattr(torch, train_args.target_dtype).itemsize,
        activation_bytes=2 if training_args.bf16 or training_args.fp16 else 4,
        checkpoints_kept=num_checkpoints,
        device=estimate_args.assumed_device,
        utilization=estimate_args.assumed_utilization or UTILIZATION[estimate_args.assumed_device],
        num_evaluations=num_evaluations,
        eval_prompts=min(
            training_args.eval_num_prompts, train_args.num_eval_conversations or training_args.eval_num_prompts
        ),
        eval_new_tokens=training_args.eval_max_new_tokens,
    )


def target_config(name_or_path: str, revision: str | None = None) -> PreTrainedConfig:
    """The target's configuration; that of the recipes' targets needs no network.

    Raises:
        OSError: if it cannot be found.
    """
    if name_or_path in _NAMED_TARGETS:
        config_class, sizes = _NAMED_TARGETS[name_or_path]
        return config_class(**sizes)
    return AutoConfig.from_pretrained(name_or_path, revision=revision)


def _measure(
    train_args: TrainArguments, training_args: DLiteTrainingArguments, estimate_args: EstimateArguments
) -> tuple[int, float, float]:
    """Number of conversations, mean tokens and mean supervised tokens: as in the files, or as given until they are
    there."""
    guesses = (estimate_args.num_conversations, estimate_args.mean_tokens, estimate_args.mean_answer_tokens)
    longest = training_args.max_length
    missing = [file for file in train_args.train_files if not os.path.exists(file)]
    if missing:
        number, mean_tokens, mean_answer_tokens = guesses
        if number is None or mean_tokens is None or mean_answer_tokens is None:
            raise ValueError(
                f"{', '.join(missing)} cannot be counted, since it does not exist; say `num_conversations`, "
                "`mean_tokens` and `mean_answer_tokens`."
            )
        return number, min(mean_tokens, longest), min(mean_answer_tokens, longest)
    if any(guess is not None for guess in guesses):
        logger.warning(
            "`num_conversations`, `mean_tokens` and `mean_answer_tokens` are not used: `train_files` exist, and are "
            "counted."
        )
    parts = [read_conversations(file) for file in train_args.train_files]
    tokenizer = AutoTokenizer.from_pretrained(train_args.target, revision=train_args.target_revision)
    first = list(islice(chain.from_iterable(parts), _NUM_MEASURED))
    end_ids = _end_of_turn_ids(train_args, tokenizer)
    samples = tokenize_conversations(first, tokenizer, end_ids, longest, train_args.template_options)
    return (
        sum(map(len, parts)) - train_args.num_eval_conversations,
        sum(map(len, samples["input_ids"])) / len(first),
        sum(map(sum, samples["supervised"])) / len(first),
    )


def _end_of_turn_ids(train_args: TrainArguments, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        config = GenerationConfig.from_pretrained(train_args.target, revision=train_args.target_revision)
    except OSError:  # a target without one
        return [tokenizer.eos_token_id]
    return end_of_turn_ids(config) or [tokenizer.eos_token_id]


def _num_checkpoints(args: DLiteTrainingArguments, epochs: float, num_conversations: int, num_devices: int) -> int:
    """Checkpoints on disk at the end of a run."""
    num_steps = epochs * steps_per_epoch(args, num_conversations, num_devices)
    saves = _num_times(args.save_strategy, args.save_steps, epochs, num_steps)
    return min(saves, args.save_total_limit or saves)


def _num_evaluations(args: DLiteTrainingArguments, epochs: float, num_conversations: int, num_devices: int) -> int:
    num_steps = epochs * steps_per_epoch(args, num_conversations, num_devices)
    return _num_times(args.eval_strategy, args.eval_steps, epochs, num_steps)


def _num_times(strategy: str, interval: float | None, epochs: float, num_steps: float) -> int:
    """How often something happens that happens at the end, too; an interval below 1 is a fraction of all steps."""
    if strategy == "no":
        return 0
    if strategy == "epoch" or interval is None:
        return math.ceil(round(epochs, 6))
    return math.ceil(round(num_steps / (interval if interval >= 1 else math.ceil(interval * num_steps)), 6))
