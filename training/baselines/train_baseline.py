# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Trains a rival's drafter as `training/train_stored.py` trains DLite's: the same anchors in the same order.

    python training/baselines/train_baseline.py --method dflash --target <folder or Hub id> \
        --train_files answers.jsonl --store rivals.pt --output_dir out/dflash --mask_token_id 4 --num_hidden_layers 3 \
        --bf16 --per_device_train_batch_size 16 --gradient_accumulation_steps 8 --max_steps 1000

The store is written if it does not exist: of every token of the conversations, prompts included, the hidden states of
the layers that any of the three methods reads, so that one store serves all. Its size is printed before it is written.
The drafter is left in `<output_dir>/drafter`, in the target's dtype.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import BaselineTrainer, dflash_layer_ids, eagle3_layer_ids, stored_layer_ids
from dflash import DFlashTrainer, make_dflash
from dspark import DSparkTrainer, make_dspark
from eagle3 import Eagle3Trainer, make_eagle3
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel
from transformers.utils import logging

from dlite_hf import DLiteConfig, DLiteTrainingArguments
from dlite_hf.conversations import end_of_turn_ids, tokenize_conversations
from dlite_hf.json_lines import read_json_lines


sys.path.append(str(Path(__file__).parents[1]))
from train_stored import StoredAnchors, most_frequent, read_store, write_store  # noqa: I001


TRAINERS: dict[str, type[BaselineTrainer]] = {
    "dflash": DFlashTrainer,
    "dspark": DSparkTrainer,
    "eagle3": Eagle3Trainer,
}


@dataclass
class BaselineArguments:
    method: str = field(metadata={"help": "The rival.", "choices": list(TRAINERS)})
    target: str = field(metadata={"help": "Folder or Hub id of the target."})
    store: Path = field(metadata={"help": "File that holds the hidden states; written if it does not exist."})
    train_files: list[str] = field(default_factory=list, metadata={"help": "JSON lines of conversations, for it."})
    target_dtype: str = field(default="bfloat16", metadata={"help": "The dtype that the target runs in."})
    num_hidden_layers: int | None = field(default=None, metadata={"help": "Depth of the backbone, 5 by default."})
    mask_token_id: int | None = field(default=None, metadata={"help": "The placeholder's row in the embedding."})
    target_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "The target's layers to read; the method's own by default."}
    )
    markov_rank: int | None = field(default=None, metadata={"help": "DSpark: the rank of its bias, 256 by default."})
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "EAGLE-3: the most frequent tokens of the answers; all by default."}
    )

    def __post_init__(self) -> None:
        for name, methods in (
            ("num_hidden_layers", ("dflash", "dspark")),
            ("markov_rank", ("dspark",)),
            ("draft_vocab_size", ("eagle3",)),
        ):
            if getattr(self, name) is not None and self.method not in methods:
                raise ValueError(f"`{name}` is set, but {self.method} has none; drop it.")


def make_drafter(
    args: BaselineArguments, target: PreTrainedModel, tokenizer: Any, store: dict[str, torch.Tensor]
) -> PreTrainedModel:
    """A new drafter of the method."""
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
    own_layer_ids = eagle3_layer_ids(num_layers) if args.method == "eagle3" else dflash_layer_ids(num_layers)
    shape = DLiteConfig.from_target(
        target.config,
        tokenizer,
        num_hidden_layers=args.num_hidden_layers,
        mask_token_id=args.mask_token_id,
        target_layer_ids=args.target_layer_ids or own_layer_ids,
    )
    if args.method == "dflash":
        return make_dflash(shape)
    if args.method == "dspark":
        return make_dspark(shape, args.markov_rank or 256)
    size = args.draft_vocab_size
    return make_eagle3(shape, target, None if size is None else most_frequent(store, size))


def ready_store(
    args: BaselineArguments, target: PreTrainedModel, tokenizer: Any, max_length: int
) -> dict[str, torch.Tensor]:
    """The store, written first if it does not exist.

    Raises:
        ValueError: if it exists and is of other conversations, or cut at another length.
    """
    if not args.store.exists():
        conversations = [each for file in args.train_files for each in read_json_lines(file)]
        samples = tokenize_conversations(
            conversations, tokenizer, end_of_turn_ids(target.generation_config), max_length
        )
        num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        layer_ids = sorted({*stored_layer_ids(num_layers), *(args.target_layer_ids or ())})
        config = DLiteConfig.from_target(
            target.config, tokenizer, mask_token_id=args.mask_token_id, target_layer_ids=layer_ids
        )
        write_store(target, list(samples), config, max_length, args.store, args.train_files)
    return read_store(args.store, max_length, args.train_files)


def main() -> None:
    baseline, args = HfArgumentParser((BaselineArguments, DLiteTrainingArguments)).parse_args_into_dataclasses()
    logging.set_verbosity_info()
    target = AutoModelForCausalLM.from_pretrained(baseline.target, dtype=baseline.target_dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(baseline.target)
    store = ready_store(baseline, target, tokenizer, args.max_length)
    torch.manual_seed(args.seed)
    drafter = make_drafter(baseline, target, tokenizer, store)
    drafter.set_attn_implementation("eager")  # it has the fastest backward pass on a CPU
    trainer = TRAINERS[baseline.method](drafter, target, args, store, StoredAnchors(store))
    resume = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if resume == "true" else resume)
    drafter.to(target.dtype).save_pretrained(Path(args.output_dir) / "drafter")
    trainer.state.save_to_json(str(Path(args.output_dir) / "trainer_state.json"))


if __name__ == "__main__":
    main()
