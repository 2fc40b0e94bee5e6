# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What the arguments of `dlite-hf train` ask for, in the numbers of an estimate."""

import math
import os
from itertools import chain, islice
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, PreTrainedConfig, Qwen3Config

from ..configuration_dlite import DLiteConfig
from ..conversations import tokenize_conversations
from ..estimate import TargetSize, Workload
from ..training_args import DLiteTrainingArguments
from .train_arguments import EstimateArguments, TrainArguments, drafter_overrides, teacher_arguments
from .train_data import read_conversations


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
        overrides["mask_token_id"] = train_args.mask_token_id or 0  # any row costs the same
        drafter = DLiteConfig.from_target(config, history_window=train_args.history_window, **overrides)
    teacher = None
    if train_args.teacher is not None:
        teacher = DLiteConfig.from_pretrained(train_args.teacher)
    elif train_args.teacher_epochs:
        teacher = DLiteConfig.from_target(config, history_window=train_args.teacher_history_window, **overrides)

    num_conversations, mean_tokens, mean_answer_tokens = _measure(train_args, training_args, estimate_args)
    per_step = (
        training_args.per_device_train_batch_size
        * training_args.gradient_accumulation_steps
        * estimate_args.assumed_num_devices
    )
    steps_per_epoch = math.ceil(num_conversations / per_step)
    student_epochs = training_args.num_train_epochs
    if training_args.max_steps > 0:
        student_epochs = training_args.max_steps / steps_per_epoch
    stable_epochs = student_epochs - training_args.warmup_epochs - training_args.transition_epochs
    checkpoints = _num_checkpoints(training_args, math.ceil(student_epochs * steps_per_epoch), student_epochs)
    if train_args.teacher_epochs:
        of_teacher = teacher_arguments(train_args, training_args)
        teacher_steps = math.ceil(of_teacher.num_train_epochs * steps_per_epoch)
        checkpoints += _num_checkpoints(of_teacher, teacher_steps, of_teacher.num_train_epochs)
    return Workload(
        target=TargetSize.of(config),
        drafter=drafter,
        teacher=teacher,
        epochs={
            "teacher": train_args.teacher_epochs,
            "warmup": training_args.warmup_epochs,
            "transition": training_args.transition_epochs,
            "stable": stable_epochs,
        },
        num_conversations=num_conversations,
        mean_tokens=mean_tokens,
        mean_answer_tokens=mean_answer_tokens,
        max_length=training_args.max_length,
        max_anchors=training_args.max_anchors,
        batch_size=training_args.per_device_train_batch_size,
        batches_per_step=training_args.gradient_accumulation_steps,
        num_devices=estimate_args.assumed_num_devices,
        target_bytes=getattr(torch, train_args.target_dtype).itemsize,
        activation_bytes=2 if training_args.bf16 or training_args.fp16 else 4,
        checkpoints_kept=checkpoints,
        device=estimate_args.assumed_device,
        utilization=estimate_args.assumed_utilization,
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
    """Number of conversations, mean tokens and mean supervised tokens: as given, else as in the files."""
    number, mean_tokens = estimate_args.num_conversations, estimate_args.mean_tokens
    mean_answer_tokens, longest = estimate_args.mean_answer_tokens, training_args.max_length
    if number is not None and mean_tokens is not None and mean_answer_tokens is not None:
        return number, min(mean_tokens, longest), min(mean_answer_tokens, longest)
    missing = [file for file in train_args.train_files if not os.path.exists(file)]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} cannot be counted, since it does not exist; say `num_conversations`, `mean_tokens` "
            "and `mean_answer_tokens`."
        )
    parts = [read_conversations(file) for file in train_args.train_files]
    tokenizer = AutoTokenizer.from_pretrained(train_args.target, revision=train_args.target_revision)
    first = list(islice(chain.from_iterable(parts), _NUM_MEASURED))
    samples = tokenize_conversations(first, tokenizer, [tokenizer.eos_token_id], longest, train_args.template_options)
    return (
        number or sum(map(len, parts)) - train_args.num_eval_conversations,
        mean_tokens or sum(map(len, samples["input_ids"])) / len(first),
        mean_answer_tokens or sum(map(sum, samples["supervised"])) / len(first),
    )


def _num_checkpoints(args: DLiteTrainingArguments, steps: int, epochs: float) -> int:
    """Checkpoints on disk at the end of a run."""
    if args.save_strategy == "no":
        return 0
    saves = math.ceil(epochs) if args.save_strategy == "epoch" else math.ceil(steps / args.save_steps)
    return min(saves, args.save_total_limit or saves)
