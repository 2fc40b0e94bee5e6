# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What each choice is worth at an equal budget: the same anchors in the same order, one choice changed at a time.

    python training/compare_ablations.py --target <folder> --store store.pt --heldout_store heldout.pt \
        --prompts <folder of JSON lines> --output ablations.json --output_dir out --bf16 --use_cpu --mask_token_id 4 \
        --max_steps 300

Stores are written by `training/train_stored.py`. Every arm trains for `max_steps` from its first weights; the arm with
a teacher spends a quarter of them on the warm-up, and its teacher's own training comes on top. For each it prints the
expected tau on held-out answers and the tau of greedy `generate()` calls. A run that was stopped goes on with the arms
that its output lacks.
"""

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from train_stored import StoredAnchors, StoredArguments, StoredTrainer, make_drafter, most_frequent
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed

from dlite_hf import DLiteForDrafting, DLiteTrainingArguments, speculation_statistics
from dlite_hf.evaluation.sessions import make_sessions, render_prompt
from dlite_hf.evaluation.tasks import load_task


@dataclass
class ComparisonArguments:
    heldout_store: Path = field(metadata={"help": "The hidden states of answers held out."})
    prompts: Path = field(metadata={"help": "Folder of JSON lines with `turns`, two of each file are used."})
    output: Path = field(metadata={"help": "JSON file of the results."})
    arms: list[str] = field(default_factory=list, metadata={"help": "Which arms to train; all by default."})
    new_tokens: int = field(default=64, metadata={"help": "Tokens generated for each prompt."})


BASE = {"num_hidden_layers": 3, "sequential_rank": 128, "draft_vocab_size": 8192}
TEACHER = {"history_window": 128, "history_layer_ids": [0, 16, 29]}
# Arm -> (fields of the drafter, fields of the training).
ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "base: one stage, no history, sequence, r = 128": ({}, {}),
    "two stages": ({}, {"warmup": 0.25}),
    "history 128": (TEACHER, {}),
    "history 512": ({**TEACHER, "history_window": 512}, {}),
    "feature concat": ({"context_fusion": "feature"}, {}),
    "r = 64": ({"sequential_rank": 64}, {}),
    "r = 256": ({"sequential_rank": 256}, {}),
    "random first weights": ({"random_weights": True}, {}),
    "2 layers": ({"num_hidden_layers": 2}, {}),
    "5 layers": ({"num_hidden_layers": 5}, {}),
    "labels of the sample": ({}, {"ce_labels": "token"}),
    "whole vocabulary": ({"draft_vocab_size": None}, {}),
    "5 taps": ({"target_layer_ids": [0, 9, 16, 24, 29]}, {}),
}


class Comparison:
    """What all arms share."""

    def __init__(self, stored: StoredArguments, comparison: ComparisonArguments, args: DLiteTrainingArguments):
        self.stored, self.comparison, self.args = stored, comparison, args
        self.target = AutoModelForCausalLM.from_pretrained(stored.target, dtype=stored.target_dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(stored.target)
        self.store = torch.load(stored.store, mmap=True)
        self.heldout = torch.load(comparison.heldout_store, mmap=True)
        self.prompts = [
            render_prompt(self.tokenizer, session.turns[0].context([]), session.tools)
            for file in sorted(comparison.prompts.glob("*.jsonl"))
            for session in make_sessions(load_task(str(file), 2))
        ]

    def train(
        self, model: dict[str, Any], training: dict[str, Any], teacher: DLiteForDrafting | None = None
    ) -> StoredTrainer:
        set_seed(self.args.seed)
        fields = replace(self.stored, **{**BASE, **model})
        drafter = make_drafter(fields, self.target, self.tokenizer)
        drafter.set_attn_implementation("eager")
        if fields.draft_vocab_size is not None:
            drafter.reduce_draft_vocabulary(most_frequent(self.store, fields.draft_vocab_size))
        anchors = StoredAnchors(self.store)
        args = replace(self.args, **training)
        trainer = StoredTrainer(
            drafter,
            self.target,
            args,
            teacher=teacher,
            train_dataset=anchors,
            data_collator=anchors.collate,
            store=self.store,
        )
        trainer.train()
        return trainer

    def run(self, model: dict[str, Any], training: dict[str, Any]) -> dict[str, float]:
        training, teacher, teacher_seconds = dict(training), None, 0.0
        started = time.perf_counter()
        if "warmup" in training:
            teacher = self.train({**model, **TEACHER}, {"ce_weight": 1.0, "tv_weight": 0.0}).drafter
            steps_per_epoch = len(StoredAnchors(self.store)) / self.args.per_device_train_batch_size
            training["warmup_epochs"] = training.pop("warmup") * self.args.max_steps / steps_per_epoch
            teacher_seconds = time.perf_counter() - started
        trainer = self.train(model, training, teacher)
        seconds = time.perf_counter() - started - teacher_seconds
        heldout = StoredAnchors(self.heldout)
        trainer.store, trainer.data_collator = self.heldout, heldout.collate
        metrics = trainer.evaluate(heldout)
        with speculation_statistics() as statistics:
            for prompt_ids in self.prompts:
                self.target.generate(
                    prompt_ids,
                    attention_mask=torch.ones_like(prompt_ids),
                    assistant_model=trainer.drafter.eval(),
                    max_new_tokens=self.comparison.new_tokens,
                    do_sample=False,
                )
        return {
            "expected_tau": metrics["eval_expected_tau"],
            "accuracy": metrics["eval_accuracy"],
            "tau": statistics.tau,
            "parameters": sum(parameter.numel() for parameter in trainer.drafter.parameters()),
            "seconds": seconds,
            "teacher_seconds": teacher_seconds,
        }


def main() -> None:
    parser = HfArgumentParser((StoredArguments, ComparisonArguments, DLiteTrainingArguments))
    stored, comparison, args = parser.parse_args_into_dataclasses()
    comparing = Comparison(stored, comparison, args)
    results = json.loads(comparison.output.read_text()) if comparison.output.exists() else {}
    for name in comparison.arms or ARMS:
        if name not in results:
            results[name] = comparing.run(*ARMS[name])
            comparison.output.write_text(json.dumps(results, indent=1))
        print(name, {key: round(value, 3) for key, value in results[name].items()}, flush=True)


if __name__ == "__main__":
    main()
