# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What first weights are worth: the same training from random ones, from the target's head, and from its layers too.

    python training/compare_initialization.py --target <folder> --train_files answers.jsonl --store store \
        --eval_files heldout.jsonl --heldout_store heldout_store --prompts <folder of JSON lines> \
        --output_dir out --bf16 --mask_token_id 4 --num_hidden_layers 3 --sequential_rank 128 --max_steps 300

Every arm sees the same anchors in the same order (stores as `training/train_stored.py` writes them). Prints, for each,
the expected tau on held-out answers and the tau of real `generate()` calls on prompts. One run each.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from check_lossless import read_prompts
from train import ScriptArguments
from train_stored import StoredAnchors, StoredTrainer, load_store
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel

from dlite_hf import DLiteConfig, DLiteForDrafting, DLiteTrainingArguments, speculation_statistics
from dlite_hf.target import text_decoder


@dataclass
class ComparisonArguments:
    store: Path = field(metadata={"help": "The hidden states to train on."})
    heldout_store: Path = field(metadata={"help": "The hidden states of answers held out."})
    prompts: Path = field(metadata={"help": "Folder of JSON lines with `turns`."})


def random_weights(target: PreTrainedModel, config: DLiteConfig) -> DLiteForDrafting:
    return DLiteForDrafting(config)


def target_head(target: PreTrainedModel, config: DLiteConfig) -> DLiteForDrafting:
    overrides = {name: getattr(config, name) for name in ("mask_token_id", "num_hidden_layers", "sequential_rank")}
    return DLiteForDrafting.from_target(target, **overrides)


def target_head_and_layers(target: PreTrainedModel, config: DLiteConfig) -> DLiteForDrafting:
    """Copies the target's last decoder layers as well; what they lack, the head norms, stays as it is."""
    drafter = target_head(target, config)
    _, target_layers = text_decoder(target)
    for layer, target_layer in zip(drafter.layers, target_layers[-len(drafter.layers) :], strict=True):
        layer.load_state_dict(target_layer.state_dict(), strict=False)
    return drafter


@torch.no_grad()
def measure_tau(target: PreTrainedModel, drafter: DLiteForDrafting, tokenizer, prompts: list) -> float:  # noqa: ANN001
    with speculation_statistics() as stats:
        for _, _, text in prompts:
            inputs = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            target.generate(**inputs, assistant_model=drafter, max_new_tokens=64, do_sample=False)
    return stats.tau


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, ComparisonArguments, DLiteTrainingArguments))
    script_args, comparison_args, args = parser.parse_args_into_dataclasses()
    target = AutoModelForCausalLM.from_pretrained(script_args.target, dtype=script_args.target_dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(script_args.target)
    config = DLiteConfig.from_target(
        target.config,
        mask_token_id=script_args.mask_token_id,
        num_hidden_layers=script_args.num_hidden_layers,
        sequential_rank=script_args.sequential_rank,
    )
    store, heldout = (
        load_store(file, conversations, target, tokenizer, config, args.max_length)
        for file, conversations in (
            (comparison_args.store, script_args.train_files),
            (comparison_args.heldout_store, script_args.eval_files),
        )
    )
    anchors = StoredAnchors(store)
    prompts = read_prompts(comparison_args.prompts, 2)
    results = []
    for make in (random_weights, target_head, target_head_and_layers):
        torch.manual_seed(args.seed)
        drafter = make(target, config)
        drafter.set_attn_implementation("eager")  # its backward pass is the fastest on a CPU
        trainer = StoredTrainer(drafter, target, args, train_dataset=anchors, data_collator=anchors.collate)
        trainer.store = store
        trainer.train()
        trainer.store = heldout
        metrics = trainer.evaluate(StoredAnchors(heldout))
        tau = measure_tau(target, drafter.to(target.dtype).eval(), tokenizer, prompts)
        results.append((make.__name__, metrics["eval_expected_tau"], tau))
    print(f"{'first weights':26s} expected tau (held out)  tau ({len(prompts)} prompts)")
    for name, expected_tau, tau in results:
        print(f"{name:26s} {expected_tau:23.3f}  {tau:.3f}")


if __name__ == "__main__":
    main()
