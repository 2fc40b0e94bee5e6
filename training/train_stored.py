# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Trains a drafter on stored hidden states of a small target: one pass of the target, then anchors from everywhere.

    python training/train_stored.py --target <folder or Hub id> --train_files answers.jsonl --store store.pt --bf16 \
        --output_dir out --mask_token_id 4 --num_hidden_layers 3 --sequential_rank 128 --draft_vocab_size 8192

On a machine without an accelerator the target's forward costs more than the drafter's training. This script runs the
target once over the conversations and stores, for the answers and a window before them, the hidden states of the
tapped layers (S * H numbers a token, printed before the first is written); a batch then draws its anchors from the
whole corpus, and the target's logits over the draft vocabulary follow from the stored last layer. For any but a small
corpus use `dlite-hf train`, which runs the target beside the drafter.

`--history_window` with `--ce_weight 1 --tv_weight 0` trains a teacher; `--teacher` with `--warmup_epochs` learns from
it. `--drafter` goes on from another drafter's weights.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel, Trainer
from transformers.utils import logging

from dlite_hf import DLiteConfig, DLiteForDrafting, DLiteTrainer, DLiteTrainingArguments
from dlite_hf.conversations import end_of_turn_ids, tokenize_conversations
from dlite_hf.data import most_frequent_tokens, sample_blocks
from dlite_hf.history import DLiteHistory
from dlite_hf.json_lines import read_json_lines
from dlite_hf.losses import TargetDistribution
from dlite_hf.target import capture_hidden_states, gather_features
from dlite_hf.trainer import TargetOutputs
from dlite_hf.training_record import TrainingRecord, describe_data


logger = logging.get_logger("dlite_hf.train")


@dataclass
class StoredArguments:
    target: str = field(metadata={"help": "Folder or Hub id of the target."})
    store: Path = field(metadata={"help": "File that holds the hidden states; written if it does not exist."})
    train_files: list[str] = field(default_factory=list, metadata={"help": "JSON lines of conversations, for it."})
    store_window: int = field(default=128, metadata={"help": "Tokens before an answer that are stored, too."})
    target_dtype: str = field(default="bfloat16", metadata={"help": "The dtype that the target runs in."})
    target_name: str | None = field(default=None, metadata={"help": "The target's name in the configuration."})
    target_quantization: str | None = field(default=None, metadata={"help": "How the target's weights were made."})
    drafter: str | None = field(default=None, metadata={"help": "A drafter whose weights to start from."})
    teacher: str | None = field(default=None, metadata={"help": "The teacher of the warm-up."})
    num_hidden_layers: int | None = field(default=None, metadata={"help": "Depth of the drafter's backbone."})
    sequential_rank: int | None = field(default=None, metadata={"help": "Rank of the sequential head."})
    mask_token_id: int | None = field(default=None, metadata={"help": "The placeholder's row in the embedding."})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "The target's layers to read."})
    context_fusion: str | None = field(default=None, metadata={"help": "'sequence' or 'feature'."})
    history_window: int | None = field(default=None, metadata={"help": "W of a teacher, or of the ablation."})
    history_layer_ids: list[int] | None = field(default=None, metadata={"help": "The layers read of the history."})
    draft_vocab_size: int | None = field(default=None, metadata={"help": "The most frequent tokens of the answers."})
    random_weights: bool = field(default=False, metadata={"help": "Take no first weights from the target."})


@torch.no_grad()
def write_store(
    target: PreTrainedModel,
    samples: Sequence[dict[str, Any]],
    config: DLiteConfig,
    window: int,
    file: Path,
    train_files: Sequence[str] = (),
) -> None:
    """Stores the blocks of all samples, and of every token from `window` before the first pivot on what the target
    says: hidden states, the most likely next token, and the logarithm of the sum of all exponentials. The tokens
    themselves and their positions are for drafters that read all of a conversation, see `training/baselines`. Of
    `train_files`, where the samples are from, it stores the hashes."""
    starts = [max(0, sample["supervised"].index(True) - 1 - window) for sample in samples]
    num_tokens = sum(len(sample["input_ids"]) - start for sample, start in zip(samples, starts, strict=True))
    layer_ids = config.captured_layer_ids
    size = num_tokens * len(layer_ids) * config.hidden_size * target.dtype.itemsize
    logger.warning(f"Storing {num_tokens} tokens of hidden states takes {size / 2**30:.2f} GiB in {file}.")
    features = torch.empty(num_tokens, len(layer_ids), config.hidden_size, dtype=target.dtype)
    parts: dict[str, list[torch.Tensor]] = {}
    end = 0
    for number, (sample, first) in enumerate(zip(samples, starts, strict=True)):
        input_ids, supervised = torch.tensor([sample["input_ids"]]), torch.tensor([sample["supervised"]])
        start, end = end, end + input_ids.shape[1] - first
        with capture_hidden_states(target, layer_ids, None) as capture:
            logits = target(input_ids=input_ids, use_cache=False, logits_to_keep=end - start).logits[0].float()
        rows = gather_features(capture.hidden_states, layer_ids, slice(first, None))
        if rows is None:
            raise ValueError(f"{type(target).__name__} ran without the hooks that read its layers.")
        features[start:end] = rows[0]
        block = sample_blocks(
            {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "supervised": supervised},
            max_anchors=input_ids.shape[1],
            num_draft_tokens=config.num_draft_tokens,
            anchor_group_size=config.anchor_group_size,
            loss_decay=4.0,
        )
        pivots = block["anchors"][:, 1] - 1 - first + start
        for name, values in (
            ("pivots", pivots),
            ("starts", torch.full_like(pivots, start)),
            ("previous", block["previous_token_ids"]),
            ("drafted", block["draft_token_ids"]),
            ("weights", block["weights"]),
            ("token_ids", input_ids[0, first:]),
            ("positions", torch.arange(first, input_ids.shape[1])),
            ("top", logits.argmax(dim=-1)),
            ("log_normalizer", logits.logsumexp(dim=-1)),
        ):
            parts.setdefault(name, []).append(values)
        if number % 100 == 99:
            logger.warning(f"{number + 1} of {len(samples)} conversations stored")
    tensors = {name: torch.cat(values) for name, values in parts.items()}
    origin = {"window": window, "train_files": _hashes(train_files)}
    torch.save({"features": features, "layer_ids": torch.tensor(layer_ids), **origin, **tensors}, file)


def read_store(file: Path, window: int, train_files: Sequence[str]) -> dict[str, Any]:
    """A store that was written before; without `train_files`, of whichever conversations.

    Raises:
        ValueError: if it holds another window, or is of other files.
    """
    store = torch.load(file, mmap=True)
    given = {"window": window, **({"train_files": _hashes(train_files)} if train_files else {})}
    for name, value in given.items():
        if store[name] != value:
            raise ValueError(
                f"The store {file} was written with `{name}` {store[name]}, but this run has {value}; name another "
                "`store`, which is then written."
            )
    return store


def _hashes(files: Sequence[str]) -> dict[str, str]:
    return {Path(file).name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}


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
            "attention_mask": torch.ones_like(index),
            "anchors": torch.stack([self.store["starts"][index], self.store["pivots"][index]], dim=1),
            "previous_token_ids": self.store["previous"][index],
            "draft_token_ids": self.store["drafted"][index],
            "weights": self.store["weights"][index],
        }


class StoredTrainer(DLiteTrainer):
    """[`DLiteTrainer`] whose target has spoken before: what it said comes from the store."""

    def __init__(self, *args: Any, store: dict[str, torch.Tensor], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.store = store
        self.layer_ids = store["layer_ids"].tolist()
        for name, model in (("drafter", self.drafter), ("teacher", self.teacher)):
            if model is None:
                continue
            if missing := sorted(set(model.config.captured_layer_ids) - set(self.layer_ids)):
                raise ValueError(
                    f"The {name} reads the layers {missing}, but the store holds {self.layer_ids}; write another one, "
                    "or choose `target_layer_ids` and `history_layer_ids` among them."
                )
            if model.config.history_window - 1 > store["window"]:
                raise ValueError(
                    f"The {name}'s `history_window` is {model.config.history_window}, but the store holds "
                    f"{store['window']} tokens before an answer; write one with a larger `store_window`."
                )
        weight = self.target.get_output_embeddings().weight
        vocab_ids = self.drafter.sequential_head.draft_vocab_ids
        self.lm_head = weight if vocab_ids is None else weight[vocab_ids].contiguous()

    # Anchors are no prompts to generate for.
    evaluation_loop = Trainer.evaluation_loop

    def _sample_blocks(self, batch: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
        return batch  # every item is a block already

    @torch.no_grad()
    def _run_target(self, inputs: dict[str, torch.Tensor]) -> TargetOutputs:
        pivots = inputs["anchors"][:, 1:]
        predicting = pivots + torch.arange(1, self.drafter.config.num_draft_tokens + 1)
        # What lies behind a block's end has no weight.
        needed, rows = predicting.clamp_max(len(self.store["features"]) - 1).unique(return_inverse=True)
        # The last layer stored is the decoder's output.
        logits = self.store["features"][needed, -1] @ self.lm_head.T
        top = self.drafter.sequential_head.draft_rows(self.store["top"][needed])
        return TargetOutputs((), TargetDistribution(logits, self.store["log_normalizer"][needed], top), rows)

    def _features(
        self, drafter: DLiteForDrafting, inputs: dict[str, torch.Tensor], target: TargetOutputs
    ) -> tuple[torch.Tensor, DLiteHistory | None]:
        starts, pivots = inputs["anchors"].unbind(dim=1)

        def read(rows: torch.Tensor, layer_ids: list[int]) -> torch.Tensor:
            columns = torch.tensor([self.layer_ids.index(i) for i in layer_ids])
            return self.store["features"][rows[..., None], columns]

        context, history, window = read(pivots, drafter.config.target_layer_ids), None, drafter.config.history_window
        if window:
            # A sequence an anchor: its own window, which begins where the conversation does or W - 1 before the pivot.
            first = torch.maximum(starts, pivots - window + 1)
            rows = (first[:, None] + torch.arange(window - 1)).clamp_max(len(self.store["features"]) - 1)
            features = read(rows, drafter.config.history_layer_ids)
            history = DLiteHistory(features, torch.arange(len(pivots)), pivots + 1 - first)
        return context, history


def most_frequent(store: dict[str, torch.Tensor], size: int) -> list[int]:
    """The most frequent tokens of the answers, and of what the target finds most likely."""
    tokens = torch.cat([store["drafted"][store["weights"] > 0], store["top"][store["pivots"]]])
    sample = {"input_ids": tokens.tolist(), "supervised": [True] * len(tokens)}
    vocabulary = most_frequent_tokens([sample], size, (), int(tokens.max()) + 1)
    logger.warning(f"{size} tokens cover {vocabulary.coverage:.2%} of the answers.")
    return vocabulary.token_ids


def make_drafter(args: StoredArguments, target: PreTrainedModel, tokenizer: Any) -> DLiteForDrafting:
    overrides = {
        "num_hidden_layers": args.num_hidden_layers,
        "sequential_rank": args.sequential_rank,
        "mask_token_id": args.mask_token_id,
        "target_layer_ids": args.target_layer_ids,
        "context_fusion": args.context_fusion,
        "history_window": args.history_window,
        "history_layer_ids": args.history_layer_ids,
        "target_name_or_path": args.target_name,
        "target_quantization": args.target_quantization,
    }
    if args.random_weights and args.drafter is not None:
        raise ValueError(f"`drafter` is {args.drafter!r}, but `random_weights` starts from none; drop one of the two.")
    if args.random_weights:
        return DLiteForDrafting(DLiteConfig.from_target(target.config, tokenizer, **overrides))
    drafter = DLiteForDrafting.from_target(target, tokenizer, **overrides)
    if args.drafter is not None:
        start = DLiteForDrafting.from_pretrained(args.drafter, dtype=torch.float32)
        if start.config.draft_vocab_size is not None:
            drafter.reduce_draft_vocabulary(start.sequential_head.draft_vocab_ids.tolist())
        for name in ("num_hidden_layers", "target_layer_ids", "context_fusion", "mask_token_id"):
            if getattr(start.config, name) != getattr(drafter.config, name):
                raise ValueError(
                    f"{args.drafter} has `{name}` {getattr(start.config, name)}, but this training "
                    f"{getattr(drafter.config, name)}; give the same."
                )
        missing = drafter.load_state_dict(start.state_dict(), strict=False).missing_keys
        logger.warning(f"From {args.drafter}, but for {missing or 'nothing'}.")  # a window of history adds weights
    return drafter


def main() -> None:
    script_args, args = HfArgumentParser((StoredArguments, DLiteTrainingArguments)).parse_args_into_dataclasses()
    logging.set_verbosity_info()
    target = AutoModelForCausalLM.from_pretrained(script_args.target, dtype=script_args.target_dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(script_args.target)
    torch.manual_seed(args.seed)
    drafter = make_drafter(script_args, target, tokenizer)
    drafter.set_attn_implementation("eager")  # it has the fastest backward pass on a CPU
    if not script_args.store.exists():
        conversations = [each for file in script_args.train_files for each in read_json_lines(file)]
        end_ids = end_of_turn_ids(target.generation_config)
        samples = tokenize_conversations(conversations, tokenizer, end_ids, args.max_length)
        origin = (script_args.store_window, script_args.store, script_args.train_files)
        write_store(target, list(samples), drafter.config, *origin)
    store = read_store(script_args.store, script_args.store_window, script_args.train_files)
    if script_args.draft_vocab_size is not None and drafter.config.draft_vocab_size is None:
        drafter.reduce_draft_vocabulary(most_frequent(store, script_args.draft_vocab_size))
    teacher = None
    if script_args.teacher is not None:
        teacher = DLiteForDrafting.from_pretrained(script_args.teacher, dtype=torch.float32)
        teacher.set_attn_implementation("eager")
    anchors = StoredAnchors(store)
    trainer = StoredTrainer(
        drafter,
        target,
        args,
        teacher=teacher,
        train_dataset=anchors,
        processing_class=tokenizer,
        data_collator=anchors.collate,
        store=store,
    )
    trainer.training_data = [describe_data(file, read_json_lines(file)) for file in script_args.train_files]
    for folder in (script_args.drafter, script_args.teacher):
        if folder is not None and TrainingRecord.exists(folder):
            trainer.earlier_runs += TrainingRecord.load(folder).runs
    resume = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if resume == "true" else resume)
    folder = Path(args.output_dir) / "drafter"
    drafter.to(target.dtype).save_pretrained(folder)
    trainer.training_record().save(folder)


if __name__ == "__main__":
    main()
