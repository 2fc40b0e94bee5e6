# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""SmolLM2-135M-Instruct without and with its DLite drafter: the same text, how it was made, and how fast."""

import os
import sys
import time
from itertools import takewhile
from pathlib import Path

import torch
from smollm2 import load_smollm2
from transformers.generation import BaseStreamer

from dlite_hf import DLiteForDrafting, speculation_statistics


DRAFTER = Path(__file__).parents[1] / "model_cards" / "SmolLM2-135M-Instruct-DLite"
PROMPTS = [
    "A baker fills 6 trays with 14 rolls each. She sells 50 rolls in the morning and 17 in the afternoon. How many "
    "rolls are left?",
    "Nora cycles 9 kilometers to work and the same way back, 4 days a week. How many kilometers does she cycle in 3 "
    "weeks?",
    "Write a Python function `initials(full_name)` that returns the first letter of each word, in capitals.",
    "Write a Python function `running_maximum(values)` that returns a list whose i-th item is the largest of the "
    "first i + 1 values.",
    "Explain in a few sentences why the sky looks red at sunset.",
]
MAX_NEW_TOKENS = 128
GREEN, PLAIN = "\033[32m", "\033[0m"


class ColoringStreamer(BaseStreamer):
    """Prints tokens as they come, in green those that the drafter proposed and the target accepted."""

    def __init__(self, tokenizer, stats=None):
        self.tokenizer = tokenizer
        self.stats = stats
        self.color = not os.environ.get("NO_COLOR") and (sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR")))
        self.token_ids = None
        self.printed = 0

    def put(self, value):
        if self.token_ids is None:  # the prompt comes first
            self.token_ids = []
            return
        self.token_ids += value.flatten().tolist()
        text = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # half a character waits for the token that completes it
            self._print(text)

    def end(self):
        self._print(self.tokenizer.decode(self.token_ids, skip_special_tokens=True))
        print()

    def _print(self, text):
        piece, self.printed = text[self.printed :], len(text)
        # The target's own first token comes before any draft, so without an origin.
        accepted = self.stats is not None and self.stats.token_origins and self.stats.token_origins[-1] > 0
        print(f"{GREEN}{piece}{PLAIN}" if self.color and accepted and piece else piece, end="", flush=True)


def generate(target, inputs, **kwargs):
    """The new token ids of a greedy call, and its seconds."""
    start = time.perf_counter()
    output = target.generate(**inputs, do_sample=False, **kwargs)
    return output[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - start


def comparison(plain, drafted):
    """In words, whether two lists of token ids are the same."""
    if plain == drafted:
        return "identical"
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain, drafted, strict=False)))
    return f"differs from token {same + 1}"


def print_row(name, text, plain_tokens, plain_seconds, drafted_tokens, drafted_seconds, emitted, rounds):
    tau = emitted / rounds if rounds else float("nan")
    plain_speed, drafted_speed = plain_tokens / plain_seconds, drafted_tokens / drafted_seconds
    print(
        f"{name:<7} {text:<24} {tau:5.2f} {plain_speed:9.1f} {drafted_speed:9.1f} {drafted_speed / plain_speed:8.2f}x"
    )


def main():
    target, tokenizer, weights = load_smollm2(torch.bfloat16)
    drafter = DLiteForDrafting.from_pretrained(DRAFTER, dtype=torch.bfloat16)
    print(f"\nTarget: {target.config.name_or_path}, {weights} weights, bfloat16, threads: {torch.get_num_threads()}")
    print(f"Drafter: {DRAFTER.name}, trained for {drafter.config.target_quantization or 'original'} weights")
    if ColoringStreamer(tokenizer).color:
        print(f"{GREEN}Green{PLAIN}: proposed by the drafter, accepted by the target")

    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        for prompt in PROMPTS
    ]
    for kwargs in ({}, {"assistant_model": drafter}):  # warm-up
        generate(target, prompts[0], max_new_tokens=16, **kwargs)

    texts, figures = [], []
    for prompt, inputs in zip(PROMPTS, prompts, strict=True):
        print(f"\n>>> {prompt}\n\n--- without drafter")
        plain, plain_seconds = generate(
            target, inputs, streamer=ColoringStreamer(tokenizer), max_new_tokens=MAX_NEW_TOKENS
        )
        print("\n--- with drafter")
        with speculation_statistics() as stats:
            drafted, drafted_seconds = generate(
                target,
                inputs,
                assistant_model=drafter,
                streamer=ColoringStreamer(tokenizer, stats),
                max_new_tokens=MAX_NEW_TOKENS,
            )
        texts.append(comparison(plain, drafted))
        counts = (stats.num_emitted_tokens, stats.num_rounds)
        figures.append((len(plain), plain_seconds, len(drafted), drafted_seconds, *counts))

    print(f"\n{'':<7} {'':<24} {'':>5} {'tokens/s':>9} {'tokens/s':>9}")
    print(f"{'prompt':<7} {'text':<24} {'tau':>5} {'without':>9} {'with':>9} {'speedup':>9}")
    for number, (text, row) in enumerate(zip(texts, figures, strict=True), start=1):
        print_row(number, text, *row)
    identical = texts.count("identical")
    print_row("all", f"{identical} of {len(texts)} identical", *map(sum, zip(*figures, strict=True)))
    print("\ntau: tokens emitted per verification by the target. Tokens/s include the prompt's forward.")
    if identical < len(texts):
        print(
            "In bfloat16 a forward over several tokens rounds differently than one over a single token, so where the\n"
            "target's two best tokens nearly tie, the other one can win. In float32 the texts are identical."
        )


if __name__ == "__main__":
    main()
