# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Arguments of `DLiteTrainer`."""

from dataclasses import dataclass, field

from transformers import SchedulerType, TrainingArguments


@dataclass
class DLiteTrainingArguments(TrainingArguments):
    r"""
    [`~transformers.TrainingArguments`] with the paper's recipe as defaults, and what only a drafter's training knows.

    Args:
        max_length (`int`, defaults to 4096): tokens of a sample; longer ones are cut on the right.
        max_anchors (`int`, defaults to 512): anchors drawn from a sample in a step, uniformly without replacement.
        loss_decay (`float`, defaults to 4.0): gamma in w_k = exp(-(k - 1) / gamma).
        ce_weight (`float`, defaults to 0.1): weight of the cross entropy.
        tv_weight (`float`, defaults to 1.0): weight of the total variation, sum_v |p - q|.
        ce_labels (`str`, defaults to `"argmax"`): label of the cross entropy, `"argmax"` for the target's most likely
            token, which greedy verification asks for, or `"token"` for the token of the sample.
        warmup_epochs (`float`, defaults to 0.0): epochs at the start that learn from a teacher, the paper's 2.
        transition_epochs (`float`, defaults to 0.0): epochs after them that blend into the stable stage.
        eval_num_prompts (`int`, defaults to 32): held-out prompts that an evaluation generates for, to measure tau.
        eval_max_new_tokens (`int`, defaults to 128): tokens generated for each.

    Raises:
        ValueError: if one of these is out of its range.
    """

    _argument_group_name = "the training: what only a drafter's knows"

    learning_rate: float = field(default=4e-4, metadata={"help": "The initial learning rate for the optimizer."})
    lr_scheduler_type: SchedulerType | str = field(default="cosine", metadata={"help": "The scheduler type to use."})
    warmup_steps: float = field(
        default=0.04, metadata={"help": "Warm-up steps; below 1, the fraction of all steps that they are."}
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "The columns of a sample are not arguments of the drafter's forward."}
    )
    # The vocabulary projection is used after the wrapped forward, where a search for unused parameters misses it.
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Every parameter of a drafter gets a gradient in every step."}
    )

    max_length: int = field(default=4096, metadata={"help": "Tokens of a sample; longer ones are cut on the right."})
    max_anchors: int = field(default=512, metadata={"help": "Anchors drawn from a sample in a step."})
    loss_decay: float = field(default=4.0, metadata={"help": "gamma in w_k = exp(-(k - 1) / gamma)."})
    ce_weight: float = field(default=0.1, metadata={"help": "Weight of the cross entropy."})
    tv_weight: float = field(default=1.0, metadata={"help": "Weight of the total variation, which is not halved."})
    ce_labels: str = field(
        default="argmax",
        metadata={
            "help": "The cross entropy's label: the target's most likely token, or the sample's own.",
            "choices": ["argmax", "token"],
        },
    )
    warmup_epochs: float = field(default=0.0, metadata={"help": "Epochs at the start that learn from a teacher."})
    transition_epochs: float = field(
        default=0.0, metadata={"help": "Epochs after the warm-up that blend into the stable stage."}
    )
    eval_num_prompts: int = field(
        default=32, metadata={"help": "Held-out prompts that an evaluation generates for, to measure tau."}
    )
    eval_max_new_tokens: int = field(default=128, metadata={"help": "Tokens that it generates for each."})

    def __post_init__(self) -> None:
        # A loss can fall while acceptance falls, too.
        self.metric_for_best_model: str | None = self.metric_for_best_model or (
            "tau" if self.load_best_model_at_end else None
        )
        super().__post_init__()
        if self.max_length < 3:
            raise ValueError(f"`max_length` is {self.max_length}, but a prompt, an anchor and a draft token need 3.")
        if self.max_anchors < 1:
            raise ValueError(f"`max_anchors` is {self.max_anchors}, but must be at least 1.")
        if self.loss_decay <= 0:
            raise ValueError(f"`loss_decay` is {self.loss_decay}, but must be positive.")
        if min(self.ce_weight, self.tv_weight) < 0 or self.ce_weight + self.tv_weight == 0:
            raise ValueError(
                f"`ce_weight` is {self.ce_weight} and `tv_weight` {self.tv_weight}, but none may be negative, and one "
                "must be positive."
            )
        if min(self.warmup_epochs, self.transition_epochs) < 0 or (self.transition_epochs and not self.warmup_epochs):
            raise ValueError(
                f"`warmup_epochs` is {self.warmup_epochs} and `transition_epochs` {self.transition_epochs}, but none "
                "may be negative, and a transition follows a warm-up."
            )
        if self.eval_num_prompts < 1:
            raise ValueError(f"`eval_num_prompts` is {self.eval_num_prompts}, but must be at least 1.")
        if self.eval_max_new_tokens < 3:
            raise ValueError(
                f"`eval_max_new_tokens` is {self.eval_max_new_tokens}, but only the 3rd token and later ones follow a "
                "draft; raise it to 3 or more."
            )
        if self.ce_labels not in ("argmax", "token"):
            raise ValueError(f"`ce_labels` is {self.ce_labels!r}, but must be 'argmax' or 'token'.")


__all__ = ["DLiteTrainingArguments"]
