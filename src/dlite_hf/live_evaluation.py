# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What a drafter in training is worth: the acceptance length of real `generate()` calls on held-out prompts."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import logging

from .generation.statistics import speculation_statistics
from .modeling_dlite import DLiteForDrafting
from .training_args import DLiteTrainingArguments


logger = logging.get_logger(__name__)


def prompts_of(samples: Iterable[dict[str, Any]]) -> Iterable[list[int]]:
    """The prompt before the last supervised turn of every sample (`input_ids`, `supervised`) that has one."""
    for sample in samples:
        supervised = list(sample["supervised"])
        starts = [i for i in range(1, len(supervised)) if supervised[i] and not supervised[i - 1]]
        if starts:
            yield list(sample["input_ids"][: starts[-1]])


def live_tau(
    target: PreTrainedModel,
    drafter: DLiteForDrafting,
    samples: Iterable[dict[str, Any]],
    args: DLiteTrainingArguments,
    accelerator: Accelerator,
) -> float:
    """tau of `target.generate(assistant_model=drafter)`, greedy, pooled over `args.eval_num_prompts` prompts.

    Every process generates for its share of them.
    """
    drafter = _gathered(drafter)
    training = drafter.training
    drafter.eval()
    own = islice(prompts_of(samples), accelerator.process_index, args.eval_num_prompts, accelerator.num_processes)
    with speculation_statistics() as statistics:
        for prompt in own:
            input_ids = torch.tensor([prompt], device=target.device)
            target.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                assistant_model=drafter,
                max_new_tokens=args.eval_max_new_tokens,
                do_sample=False,
            )
    drafter.train(training)
    counts = torch.tensor([[statistics.num_emitted_tokens, statistics.num_rounds]], device=accelerator.device)
    emitted, rounds = accelerator.gather(counts).sum(dim=0).tolist()
    return emitted / rounds if rounds else float("nan")


def _gathered(drafter: DLiteForDrafting) -> DLiteForDrafting:
    """The drafter, or a copy of it where FSDP2 holds it in shards: drafting calls parts of it by themselves."""
    if not any(isinstance(parameter, DTensor) for parameter in drafter.parameters()):
        return drafter
    copy = DLiteForDrafting(drafter.config).to(drafter.device)
    copy.load_state_dict(
        {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in drafter.state_dict().items()
        }
    )
    return copy
