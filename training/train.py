# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Trains a drafter for a target on conversations that the target itself has answered.

    python training/train.py --target <folder or Hub id> --train_files answers.jsonl --output_dir out --bf16

Writes Trainer checkpoints to the output folder, takes the run up again with `--resume_from_checkpoint true` (the
newest one) or a checkpoint's folder, and leaves the drafter, in the target's dtype, in `<output_dir>/drafter`.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from dlite_hf import DLiteForDrafting
from dlite_hf.trainer import DLiteTrainer
from dlite_hf.training_args import DLiteTrainingArguments


logger = logging.get_logger("dlite_hf.train")


@dataclass
class ScriptArguments:
    target: str = field(metadata={"help": "Folder or Hub id of the target."})
    train_files: list[str] = field(metadata={"help": "JSON lines of conversations that end with the target's answer."})
    eval_files: list[str] = field(default_factory=list, metadata={"help": "Held-out conversations, the same way."})
    target_dtype: str = field(default="bfloat16", metadata={"help": "The dtype that the target runs in."})
    num_hidden_layers: int | None = field(default=None, metadata={"help": "Depth of the drafter's backbone."})
    sequential_rank: int | None = field(default=None, metadata={"help": "Rank of the sequential head."})
    mask_token_id: int | None = field(default=None, metadata={"help": "The placeholder's row in the embedding."})
    attn_implementation: str | None = field(
        default=None, metadata={"help": "The drafter's attention; on a CPU, 'eager' has the fastest backward pass."}
    )
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "The target's layers to read."})


def read_conversations(files: Iterable[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in Path(file).read_text(encoding="utf-8").splitlines()]


def new_drafter(
    script_args: ScriptArguments, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **overrides: Any
) -> DLiteForDrafting:
    """The drafter that the arguments ask for, before its training."""
    drafter = DLiteForDrafting.from_target(
        target,
        tokenizer,
        num_hidden_layers=script_args.num_hidden_layers,
        sequential_rank=script_args.sequential_rank,
        mask_token_id=script_args.mask_token_id,
        target_layer_ids=script_args.target_layer_ids,
        **overrides,
    )
    if script_args.attn_implementation is not None:
        drafter.set_attn_implementation(script_args.attn_implementation)
    return drafter


def main() -> None:
    script_args, args = HfArgumentParser((ScriptArguments, DLiteTrainingArguments)).parse_args_into_dataclasses()
    logging.set_verbosity_info()
    target = AutoModelForCausalLM.from_pretrained(script_args.target, dtype=script_args.target_dtype)
    tokenizer = AutoTokenizer.from_pretrained(script_args.target)
    torch.manual_seed(args.seed)
    drafter = new_drafter(script_args, target, tokenizer)
    trainer = DLiteTrainer(
        drafter,
        target,
        args,
        train_dataset=read_conversations(script_args.train_files),
        eval_dataset=read_conversations(script_args.eval_files) or None,
        processing_class=tokenizer,
    )
    resume = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if resume == "true" else resume)
    if trainer.is_world_process_zero():
        drafter.to(target.dtype).save_pretrained(Path(args.output_dir) / "drafter")


if __name__ == "__main__":
    main()
