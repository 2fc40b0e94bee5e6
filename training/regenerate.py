# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Lets a target answer prompts, greedily: the conversations that a drafter is trained on.

    python training/regenerate.py --target <folder or Hub id> --prompts prompts.jsonl --output answers.jsonl

A line of the prompts has an `id` and either `messages` that end with a user or tool message, or `turns`, user texts of
which the first is asked. A run that was stopped goes on where it was.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from dlite_hf import regenerate


def read_conversation(line: str) -> dict[str, Any]:
    record = json.loads(line)
    if "messages" not in record:
        record["messages"] = [{"role": "user", "content": record.pop("turns")[0]}]
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num_prompts", type=int, help="how many to answer, drawn at random; all by default")
    parser.add_argument("--max_new_tokens", type=int, default=160)
    parser.add_argument("--max_prompt_tokens", type=int, default=512)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    logging.get_logger("dlite_hf").setLevel(logging.INFO)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    conversations = [read_conversation(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    random.Random(args.seed).shuffle(conversations)
    counts = regenerate(
        target,
        tokenizer,
        conversations[: args.num_prompts],
        args.output,
        batch_size=args.batch_size,
        max_prompt_tokens=args.max_prompt_tokens,
        max_new_tokens=args.max_new_tokens,
        do_sample=False,
    )
    print(counts)


if __name__ == "__main__":
    main()
