# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What `DLiteTrainer` refuses before it starts: models, data and arguments that do not fit together."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .modeling_dlite import DLiteForDrafting, drafter_in
from .target import check_compatible
from .training_args import DLiteTrainingArguments


logger = logging.get_logger(__name__)


def check_training(
    model: Any,
    target: PreTrainedModel,
    teacher: Any,
    args: DLiteTrainingArguments,
    train_dataset: Any,
    eval_dataset: Any,
) -> DLiteForDrafting:
    """The drafter to train: `model`, or what a PEFT model has inside.

    Args: those of [`~dlite_hf.trainer.DLiteTrainer`].

    Raises:
        TypeError: if `model` or `teacher` is not a drafter, or an adapter changes the head's vocabulary projection.
        ValueError: if two of them do not fit together.
    """
    drafter = _checked_drafter(model, teacher)
    check_compatible(target, drafter.config)
    if (teacher is not None) != (args.warmup_epochs > 0):
        raise ValueError(
            f"`teacher` is {'given' if teacher is not None else 'missing'}, but `warmup_epochs` is "
            f"{args.warmup_epochs}; a warm-up learns from a teacher, so give both or neither."
        )
    if args.label_smoothing_factor:
        raise ValueError(
            f"`label_smoothing_factor` is {args.label_smoothing_factor}, but the loss compares the drafter with the "
            "target's own distribution, which is not smoothed; leave it out."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"One process sees {args.n_gpu} GPUs and would split each batch over them, which tears anchors from "
            "their sequences; start one process a GPU with `accelerate launch`."
        )
    if args.warmup_epochs and not hasattr(train_dataset, "__len__"):
        raise ValueError(
            f"`warmup_epochs` is {args.warmup_epochs}, but a training set without a length has no epochs; give "
            "one with a length."
        )
    if isinstance(eval_dataset, dict) and args.load_best_model_at_end:
        metric = str(args.metric_for_best_model).removeprefix("eval_")
        if not any(metric.startswith(f"{name}_") for name in eval_dataset):
            raise ValueError(
                f"`metric_for_best_model` is {metric!r}, but each of the evaluation sets {list(eval_dataset)} has "
                f"its own; choose one, such as '{next(iter(eval_dataset))}_tau'."
            )
    narrow = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} - {torch.float32}
    if narrow:
        logger.warning_once(
            f"The drafter's weights are {sorted(map(str, narrow))}: small updates get lost in them; load it with "
            "`dtype=torch.float32` and train with `bf16=True`."
        )
    if teacher is not None:
        _check_teacher(teacher, drafter)
        check_compatible(target, teacher.config)
    return drafter


def _checked_drafter(model: Any, teacher: Any) -> DLiteForDrafting:
    """The drafter itself, out of the PEFT model that may be around it."""
    drafter = drafter_in(model)
    if drafter is None:
        raise TypeError(
            f"`model` is a {type(model).__name__}, but must be a drafter; make one with "
            "`DLiteForDrafting.from_target(target)`."
        )
    if drafter is not model and teacher is not None:
        raise ValueError(
            "`model` is a PEFT model and `teacher` is given, but a teacher's head replaces the drafter's; train an "
            "adapter without `teacher`."
        )
    if hasattr(drafter.sequential_head.output_proj, "lora_A"):
        raise TypeError(
            "An adapter changes `output_proj`, whose weight the loss reads directly; leave it out of "
            "`target_modules`, or train it whole as one of `modules_to_save`."
        )
    return drafter


def _check_teacher(teacher: Any, drafter: DLiteForDrafting) -> None:
    if not isinstance(teacher, DLiteForDrafting):
        raise TypeError(f"`teacher` is a {type(teacher).__name__}, but must be a drafter with history.")
    if teacher.config.history_window == 0:
        raise ValueError(
            "`teacher` has `history_window` 0, but a teacher keeps history; train one with a window first."
        )
    for name in ("vocab_size", "num_draft_tokens", "anchor_group_size", "sequential_rank", "draft_vocab_size"):
        of_teacher, of_drafter = getattr(teacher.config, name), getattr(drafter.config, name)
        if of_teacher != of_drafter:
            raise ValueError(
                f"The teacher's `{name}` is {of_teacher}, but the drafter's {of_drafter}; make both with the same, "
                "since the teacher's head is copied."
            )
    own, taught = drafter.sequential_head.draft_vocab_ids, teacher.sequential_head.draft_vocab_ids
    if own is not None and taught is not None and not torch.equal(own.cpu(), taught.cpu()):
        raise ValueError(
            f"Of the {len(own)} tokens that the drafter can propose, the teacher has "
            f"{int(torch.isin(own.cpu(), taught.cpu()).sum())}; make both with the same `draft_vocab_ids`."
        )
