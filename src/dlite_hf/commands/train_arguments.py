# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `dlite-hf train`, what must hold between them, and what follows from them."""

import math
import os
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedConfig

from ..configuration_dlite import evenly_spaced_layer_ids
from ..estimate import PEAK_FLOPS, UTILIZATION
from ..training_args import DLiteTrainingArguments
from .template_kwargs import TEMPLATE_KWARGS_HELP, read_template_kwargs


# What shapes a new drafter, and its teacher alike.
_SHARED = (
    "num_hidden_layers",
    "sequential_rank",
    "num_draft_tokens",
    "anchor_group_size",
    "target_layer_ids",
    "context_fusion",
    "mask_token_id",
)
_NEW_DRAFTER = (*_SHARED, "num_context_layers", "draft_vocab_size", "history_window")


@dataclass
class TrainArguments:
    _argument_group_name = "the drafter, its target and its data"

    target: str = field(metadata={"help": "Folder or Hub id of the target, a causal LM."})
    train_files: list[str] = field(metadata={"help": "JSON lines of conversations that the target has answered."})
    target_revision: str | None = field(default=None, metadata={"help": "Its revision on the Hub."})
    target_dtype: str = field(
        default="bfloat16",
        metadata={"help": "The dtype that the target runs in.", "choices": ["bfloat16", "float16", "float32"]},
    )
    eval_files: list[str] = field(default_factory=list, metadata={"help": "Held-out conversations, the same way."})
    num_eval_conversations: int = field(
        default=0, metadata={"help": "Instead of `eval_files`: so many of the training conversations are held out."}
    )
    chat_template_kwargs: str | None = field(default=None, metadata={"help": TEMPLATE_KWARGS_HELP})
    drafter: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of a drafter to train on, instead of new weights."}
    )
    num_hidden_layers: int | None = field(default=None, metadata={"help": "Layers of the drafter; 5 by default."})
    sequential_rank: int | None = field(
        default=None, metadata={"help": "Rank of the sequential head; about an eighth of the hidden size by default."}
    )
    num_draft_tokens: int | None = field(default=None, metadata={"help": "Tokens of a draft, K; 7 by default."})
    anchor_group_size: int | None = field(default=None, metadata={"help": "Real tokens in a block, 1 (default) or 2."})
    num_context_layers: int | None = field(
        default=None, metadata={"help": "Layers read of the target, evenly spaced; about a third of them by default."}
    )
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Or which layers, one by one."})
    context_fusion: str | None = field(
        default=None,
        metadata={
            "help": "What becomes of the layers read: a slot each (default), or one projected together.",
            "choices": ["sequence", "feature"],
        },
    )
    mask_token_id: int | None = field(
        default=None, metadata={"help": "The placeholder; by default the first row the tokenizer does not use."}
    )
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Draft only the most frequent tokens of the answers, so many; all by default."}
    )
    history_window: int | None = field(
        default=None, metadata={"help": "Tokens of history that the drafter itself reads; 0, none, by default."}
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "The drafter's attention; on a CPU, 'eager' has the fastest backward pass."}
    )
    teacher_epochs: float = field(
        default=0.0, metadata={"help": "Epochs of a teacher with history, trained first; 0 for no teacher."}
    )
    teacher_max_steps: int = field(
        default=-1, metadata={"help": "Ends the teacher's run after so many steps, as `max_steps` does the drafter's."}
    )
    teacher_history_window: int = field(default=512, metadata={"help": "Tokens of history that the teacher reads."})
    teacher_ce_weight: float = field(default=1.0, metadata={"help": "`ce_weight` of the teacher's run."})
    teacher_tv_weight: float = field(default=0.0, metadata={"help": "`tv_weight` of the teacher's run."})
    teacher: str | None = field(
        default=None, metadata={"help": "Folder of a teacher trained before, instead of `teacher_epochs`."}
    )

    def __post_init__(self) -> None:
        read_template_kwargs(self.chat_template_kwargs)
        if not self.train_files:
            raise ValueError(
                "`train_files` is empty; name a file of conversations, as `dlite-hf regenerate` writes it."
            )
        if self.eval_files and self.num_eval_conversations:
            raise ValueError(
                f"`eval_files` is {self.eval_files} and `num_eval_conversations` {self.num_eval_conversations}; give "
                "one of them."
            )
        if self.num_context_layers is not None and self.target_layer_ids is not None:
            raise ValueError(
                f"`num_context_layers` is {self.num_context_layers} and `target_layer_ids` {self.target_layer_ids}; "
                "give one of them."
            )
        if self.teacher is not None and self.teacher_epochs:
            raise ValueError(
                f"`teacher` is {self.teacher!r} and `teacher_epochs` {self.teacher_epochs}; give the one to take a "
                "finished teacher, or the other to train one."
            )
        weights = (self.teacher_ce_weight, self.teacher_tv_weight)
        if min(weights) < 0 or sum(weights) == 0:
            raise ValueError(
                f"`teacher_ce_weight` is {self.teacher_ce_weight} and `teacher_tv_weight` {self.teacher_tv_weight}, "
                "but none may be negative, and one must be positive."
            )
        if self.teacher_max_steps > 0 and not self.teacher_epochs:
            raise ValueError(
                f"`teacher_max_steps` is {self.teacher_max_steps}, but `teacher_epochs` 0 trains no teacher; raise "
                "the epochs, or leave the steps out."
            )
        if self.drafter is not None:
            given = [name for name in _NEW_DRAFTER if getattr(self, name) is not None]
            if given or self.teacher or self.teacher_epochs:
                raise ValueError(
                    f"`drafter` is {self.drafter!r}, whose shape is fixed and which needs no teacher; leave out "
                    f"{', '.join(given or ['teacher', 'teacher_epochs'])}, or `drafter`."
                )

    @property
    def template_options(self) -> dict[str, Any] | None:
        """`chat_template_kwargs`, read."""
        return read_template_kwargs(self.chat_template_kwargs)


@dataclass
class EstimateArguments:
    _argument_group_name = "the estimate: what it assumes, read with --estimate alone"

    estimate: bool = field(
        default=False, metadata={"help": "Say what the run would cost, and stop before anything large is loaded."}
    )
    num_conversations: int | None = field(
        default=None, metadata={"help": "Conversations to train on; by default those of the files."}
    )
    mean_tokens: float | None = field(
        default=None, metadata={"help": "Tokens of a conversation, prompt included; by default as in the files."}
    )
    mean_answer_tokens: float | None = field(
        default=None, metadata={"help": "Supervised tokens of a conversation; by default as in the files."}
    )
    assumed_device: str = field(
        default="h100",
        metadata={
            "help": "Whose peak speed is assumed; cpu: of this machine's cores, without AMX.",
            "choices": sorted(PEAK_FLOPS),
        },
    )
    assumed_num_devices: int = field(default=1, metadata={"help": "How many of them share the work."})
    assumed_utilization: float | None = field(
        default=None,
        metadata={
            "help": "The fraction of the peak that training reaches; measure yours in a short run. 0.4 by default, of "
            f"cpu {UTILIZATION['cpu']}."
        },
    )

    def __post_init__(self) -> None:
        if self.assumed_num_devices < 1:
            raise ValueError(f"`assumed_num_devices` is {self.assumed_num_devices}, but must be at least 1.")
        if self.assumed_utilization is not None and not 0 < self.assumed_utilization <= 1:
            raise ValueError(f"`assumed_utilization` is {self.assumed_utilization}, but must be above 0, at most 1.")


def check_arguments(train_args: TrainArguments, training_args: DLiteTrainingArguments) -> None:
    """What no single one of the argument classes can know.

    Raises:
        ValueError: if the arguments contradict each other.
    """
    has_teacher = train_args.teacher is not None or train_args.teacher_epochs > 0
    if has_teacher != (training_args.warmup_epochs > 0):
        raise ValueError(
            f"`warmup_epochs` is {training_args.warmup_epochs}, `teacher_epochs` {train_args.teacher_epochs} and "
            f"`teacher` {train_args.teacher!r}; a warm-up learns from a teacher, so give both or neither."
        )
    if training_args.max_steps > 0 and train_args.teacher_epochs and train_args.teacher_max_steps <= 0:
        raise ValueError(
            f"`max_steps` is {training_args.max_steps}, but would leave the teacher its `teacher_epochs` "
            f"{train_args.teacher_epochs:g}; give `teacher_max_steps` as well."
        )
    staged = training_args.warmup_epochs + training_args.transition_epochs
    if training_args.max_steps <= 0 and staged > training_args.num_train_epochs:
        raise ValueError(
            f"`warmup_epochs` and `transition_epochs` are {staged:g} epochs, but `num_train_epochs` is "
            f"{training_args.num_train_epochs:g} and counts them; raise it."
        )
    if training_args.resume_from_checkpoint is not None:
        raise ValueError(
            f"`resume_from_checkpoint` is {training_args.resume_from_checkpoint!r}, but the command goes on by itself "
            "from the newest checkpoint in `output_dir`; leave it out, and remove newer checkpoints if there are any."
        )
    if training_args.save_only_model:
        raise ValueError(
            "`save_only_model` leaves the optimizer and the schedule out of checkpoints, without which a run that was "
            "killed cannot go on; leave it out."
        )
    if training_args.push_to_hub:
        raise ValueError(
            "`push_to_hub` would upload checkpoints without a card; leave it out, and publish the finished drafter "
            "with `dlite-hf card --push`."
        )
    evaluates = training_args.eval_strategy != "no"
    if evaluates != bool(train_args.eval_files or train_args.num_eval_conversations):
        raise ValueError(
            f"`eval_strategy` is {training_args.eval_strategy.value!r}, `eval_files` {train_args.eval_files} and "
            f"`num_eval_conversations` {train_args.num_eval_conversations}; to evaluate, set `eval_strategy` to "
            "'steps' or 'epoch' and hold conversations out by one of the others, else set none of the three."
        )


def teacher_arguments(train_args: TrainArguments, training_args: DLiteTrainingArguments) -> DLiteTrainingArguments:
    """The teacher's own run, in a folder inside the student's."""
    changes: dict[str, Any] = {
        "output_dir": os.path.join(training_args.output_dir, "teacher"),
        "num_train_epochs": train_args.teacher_epochs,
        "max_steps": train_args.teacher_max_steps,
        "warmup_epochs": 0.0,
        "transition_epochs": 0.0,
        "ce_weight": train_args.teacher_ce_weight,
        "tv_weight": train_args.teacher_tv_weight,
    }
    return replace(training_args, **changes)


def stage_epochs(training_args: DLiteTrainingArguments, num_conversations: int, num_devices: int) -> dict[str, float]:
    """Epochs of each stage of the drafter's own run, in their order.

    Args:
        training_args: of the drafter's run.
        num_conversations: what an epoch has.
        num_devices: how many share a step.

    Raises:
        ValueError: if `max_steps` ends the run inside the warm-up or the transition.
    """
    staged = {"warmup": training_args.warmup_epochs, "transition": training_args.transition_epochs}
    epochs = training_args.num_train_epochs
    if training_args.max_steps > 0:
        epochs = training_args.max_steps / steps_per_epoch(training_args, num_conversations, num_devices)
    stable = round(epochs - sum(staged.values()), 9)  # 34 / 25 epochs are not quite 1 + 0.36
    if stable < 0:
        raise ValueError(
            f"`max_steps` {training_args.max_steps} are {epochs:.3g} epochs, but `warmup_epochs` and "
            f"`transition_epochs` are {sum(staged.values()):g}, so that the drafter would never learn from the target "
            "itself; raise the first, or lower the others."
        )
    return {**staged, "stable": stable}


def steps_per_epoch(training_args: DLiteTrainingArguments, num_conversations: int, num_devices: int) -> int:
    """Optimizer steps of an epoch."""
    per_step = training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps * num_devices
    return math.ceil(num_conversations / per_step)


def drafter_overrides(train_args: TrainArguments, target_config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a new drafter's configuration that the arguments give."""
    overrides = {name: getattr(train_args, name) for name in _SHARED}
    if train_args.num_context_layers is not None:
        num_layers = target_config.get_text_config(decoder=True).num_hidden_layers
        overrides["target_layer_ids"] = evenly_spaced_layer_ids(num_layers, train_args.num_context_layers)
    return overrides
