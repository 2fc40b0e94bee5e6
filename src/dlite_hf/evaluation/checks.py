# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What an evaluation refuses before it begins."""

import math
from collections.abc import Sequence

from transformers import PreTrainedModel

from .methods import PLAIN, Method
from .tasks import Task


def check_evaluation(
    target: PreTrainedModel,
    methods: Sequence[Method],
    tasks: Sequence[Task],
    temperatures: Sequence[float],
    limits: dict[str, int | None],
) -> None:
    """Refuses what makes no sense together.

    Raises:
        ValueError: if the target is in training mode, plain generation is missing, a name or a temperature repeats, or
            a number is out of range.
    """
    if target.training:
        raise ValueError("The target is in training mode, so dropout may run; call `target.eval()`.")
    names = [method.name for method in methods]
    if len(set(names)) < len(names) or [method.name for method in methods if method.kind == PLAIN] != [PLAIN]:
        raise ValueError(f"The methods are {names}; give every method its own name, and {PLAIN!r} among them.")
    task_names = [task.name for task in tasks]
    if not tasks or len(set(task_names)) < len(task_names):
        raise ValueError(f"The tasks are {task_names}; give at least one, and every task its own name.")
    is_valid = all(math.isfinite(temperature) and temperature >= 0 for temperature in temperatures)
    if not temperatures or not is_valid or len(set(temperatures)) < len(temperatures):
        raise ValueError(
            f"`temperatures` is {list(temperatures)}; give at least one, none twice, none below 0 or infinite."
        )
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise ValueError(f"`{name}` is {limit}, but must be at least 1.")


def prompt_room(target: PreTrainedModel, max_new_tokens: int, max_prompt_tokens: int | None) -> int:
    """How many tokens a prompt may have.

    Raises:
        ValueError: if none.
    """
    context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    rooms = [each for each in (max_prompt_tokens, context and context - max_new_tokens) if each is not None]
    if rooms and min(rooms) < 1:
        raise ValueError(
            f"`max_new_tokens` {max_new_tokens} and `max_prompt_tokens` {max_prompt_tokens} leave no room for a "
            f"prompt in a context of {context} tokens; lower the one or raise the other."
        )
    return min(rooms, default=2**31)


def check_assistants(methods: Sequence[Method], room: int, max_new_tokens: int) -> None:
    """Refuses an assistant that prompts could leave without a context: it would fail there, or draft noise.

    Raises:
        ValueError: if there is one.
    """
    for method in methods:
        if method.kind != "assistant" or method.assistant is None:
            continue
        context = getattr(method.assistant.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if context is not None and context < room + max_new_tokens:
            raise ValueError(
                f"{method.name!r} has a context of {context} tokens, but prompts may have {room} and answers "
                f"{max_new_tokens}; pass `max_prompt_tokens` {context - max_new_tokens}, or drop it."
            )


__all__ = ["check_assistants", "check_evaluation", "prompt_room"]
