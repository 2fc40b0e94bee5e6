# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Trains a drafter on stored hidden states of a small target: one pass of the target, then anchors from everywhere.

    python training/train_stored.py --target <folder or Hub id> --train_files answers.jsonl --store store --bf16 \
        --output_dir out --mask_token_id 4 --num_hidden_layers 3 --sequential_rank 128

On a machine without an accelerator the target's forward costs more than the drafter's training. This script runs the
target once over the conversations and stores, for the answers alone, the hidden states of the tapped layers (S * H
numbers a token, printed before the first is written); a batch then draws its anchors from the whole corpus, and the
target's logits follow from the stored last layer. For any but a small corpus use `training/train.py`, which runs the
target beside the drafter.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from train import ScriptArguments, new_drafter, read_conversations
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from dlite_hf import DLiteConfig, DLiteTrainer, DLiteTrainingArguments
from dlite_hf.data import sample_blocks, tokenize_conversations
from dlite_hf.target import capture_hidden_states, gather_features


logger = logging.get_logger("dlite_hf.train")


@dataclass
class StoreArguments:
    store: Path = field(metadata={"help": "File that holds the hidden states; written if it does not exist."})
    target_name: str | None = field(default=None, metadata={"help": "The target's name in the configuration."})
    target_quantization: str | None = field(default=None, metadata={"help": "How the target's weights were made."})


def load_store(
    file: Path,
    conversation_files: list[str],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: DLiteConfig,
    max_length: int,
) -> dict[str, torch.Tensor]:
    """The store in `file`, written from the conversations first where it does not exist."""
    if not file.exists():
        conversations = read_conversations(conversation_files)
        samples = tokenize_conversations(conversations, tokenizer, [tokenizer.eos_token_id], max_length)
        write_store(target, samples, config, file)
    return torch.load(file, mmap=True)


@torch.no_grad()
def write_store(target: PreTrainedModel, samples: list[dict[str, Any]], config: DLiteConfig, file: Path) -> None:
    """Stores the blocks of all samples and the features `[S, H]` of every token from the first pivot on."""
    num_tokens = sum(sum(sample["supervised"]) + 1 for sample in samples)
    size = num_tokens * len(config.target_layer_ids) * config.hidden_size * target.dtype.itemsize
    logger.warning(f"Storing {num_tokens} tokens of hidden states takes {size / 2**30:.2f} GiB in {file}.")
    features = torch.empty(num_tokens, len(config.target_layer_ids), config.hidden_size, dtype=target.dtype)
    blocks: dict[str, list[torch.Tensor]] = {"pivots": [], "previous": [], "drafted": [], "weights": []}
    start = 0
    for number, sample in enumerate(samples):
        input_ids = torch.tensor([sample["input_ids"]])
        supervised = torch.tensor([sample["supervised"]])
        first = int(supervised[0].nonzero()[0]) - 1
        with capture_hidden_states(target, config.target_layer_ids, None) as capture:
            target(input_ids=input_ids, use_cache=False, logits_to_keep=1)
        rows = gather_features(capture.hidden_states, config.target_layer_ids, slice(first, None))
        assert rows is not None
        features[start : start + rows.shape[1]] = rows[0]
        batch = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "supervised": supervised}
        block = sample_blocks(
            batch,
            max_anchors=input_ids.shape[1],
            num_draft_tokens=config.num_draft_tokens,
            anchor_group_size=config.anchor_group_size,
            loss_decay=4.0,
        )
        blocks["pivots"].append(block["anchors"][:, 1] - 1 - first + start)
        blocks["previous"].append(block["previous_token_ids"])
        blocks["drafted"].append(block["draft_token_ids"])
        blocks["weights"].append(block["weights"])
        start += rows.shape[1]
        if number % 100 == 99:
            logger.warning(f"{number + 1} of {len(samples)} conversations stored")
    torch.save({"features": features[:start], **{name: torch.cat(parts) for name, parts in blocks.items()}}, file)


class StoredAnchors(Dataset):
    """The anchors of a store, one an item."""

    def __init__(self, store: dict[str, torch.Tensor]):
        self.store = store

    def __len__(self) -> int:
        return len(self.store["pivots"])

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"index": index}

    def collate(self, items: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        index = torch.tensor([item["index"] for item in items])
        return {
            "input_ids": index,
            "attention_mask": torch.ones_like(index),
            "anchors": self.store["pivots"][index],
            "previous_token_ids": self.store["previous"][index],
            "draft_token_ids": self.store["drafted"][index],
            "weights": self.store["weights"][index],
        }


class StoredTrainer(DLiteTrainer):
    """[`DLiteTrainer`] whose target has spoken before: features come from the store."""

    store: dict[str, torch.Tensor]

    def _sample_blocks(self, batch: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
        return batch  # every item is a block already

    @torch.no_grad()
    def _run_target(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        features = self.store["features"]
        predicting = anchors[:, None] + torch.arange(1, self.model.config.num_draft_tokens + 1)
        needed, rows = predicting.clamp_max(len(features) - 1).unique(return_inverse=True)
        # The last tapped layer is the decoder's output; what lies behind a block's end has no weight.
        logits = self.target.get_output_embeddings()(features[needed, -1])
        return features[anchors], logits, rows


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, StoreArguments, DLiteTrainingArguments))
    script_args, store_args, args = parser.parse_args_into_dataclasses()
    logging.set_verbosity_info()
    target = AutoModelForCausalLM.from_pretrained(script_args.target, dtype=script_args.target_dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(script_args.target)
    torch.manual_seed(args.seed)
    drafter = new_drafter(
        script_args,
        target,
        tokenizer,
        target_name_or_path=store_args.target_name,
        target_quantization=store_args.target_quantization,
    )
    store = load_store(store_args.store, script_args.train_files, target, tokenizer, drafter.config, args.max_length)
    anchors = StoredAnchors(store)
    trainer = StoredTrainer(
        drafter, target, args, train_dataset=anchors, processing_class=tokenizer, data_collator=anchors.collate
    )
    trainer.store = store
    resume = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if resume == "true" else resume)
    drafter.to(target.dtype).save_pretrained(Path(args.output_dir) / "drafter")


if __name__ == "__main__":
    main()
