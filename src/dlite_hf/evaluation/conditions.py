# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What an evaluation was made under: a report says it, and a resumption must have it in common."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..training_record import hardware, versions, without_folders
from .measuring import sampling_options
from .methods import ignored_settings, weights_sha256
from .tasks import Task


def describe_conditions(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    *,
    target_name: str | None,
    target_quantization: str | None,
    temperatures: Sequence[float],
    chat_template_kwargs: dict[str, Any] | None,
    **limits: int | None,
) -> dict[str, Any]:
    """The conditions as JSON: arguments of [`~dlite_hf.evaluation.evaluate`], and what they stand for here.

    Args:
        target: the target.
        tokenizer: its tokenizer.
        tasks: the tasks, cut to what is run of them.
        target_name: by default the folder or id that the target was loaded from; of a folder only the last name is
            kept.
        target_quantization: by default what the target says.
        temperatures: of the sampling.
        chat_template_kwargs: for the chat template.
        limits: further arguments, kept as they are.
    """
    dtype = str(target.dtype).removeprefix("torch.")
    template = json.dumps(tokenizer.chat_template)
    unsaid = "the chat template's default" if "enable_thinking" in template else None
    return {
        "target": {
            "name": without_folders(target_name or target.config.name_or_path),
            "parameters": target.num_parameters(),
            "sha256": weights_sha256(target),
            "dtype": dtype,
            "quantization": target_quantization or _quantization(target),
        },
        "machine": hardware(target.device),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        **{name: version for name, version in versions().items() if name in ("torch", "transformers", "dlite_hf")},
        "dtype": dtype,
        "attn_implementation": target.config._attn_implementation,
        "temperatures": list(temperatures),
        "thinking": (chat_template_kwargs or {}).get("enable_thinking", unsaid),
        "chat_template_sha256": hashlib.sha256(template.encode()).hexdigest(),
        "chat_template_kwargs": chat_template_kwargs,
        "generation": {
            "used": {str(temperature): sampling_options(temperature) for temperature in temperatures},
            "eos_token_id": target.generation_config.eos_token_id,
            "ignored": ignored_settings(target.generation_config),  # what the target's own configuration says
        },
        **limits,
        "tasks": [
            {name: getattr(task, name) for name in ("name", "category", "source", "revision", "file", "sha256")}
            | {"records": len(task.records)}
            for task in tasks
        ],
    }


def _quantization(target: PreTrainedModel) -> str | None:
    method = getattr(target, "quantization_method", None)
    return None if method is None else str(getattr(method, "value", method))


__all__ = ["describe_conditions"]
