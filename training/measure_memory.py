# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Peak memory of a long prompt without and with a drafter, each call in a process of its own, median of three.

    python training/measure_memory.py --target <folder> --drafter <folder>

Prints three arms for the target given and for a small random one with sliding windows: plain, drafted, and drafted
with Transformers' native capture of the prompt's hidden states, which shows what keeping only the last row saves. The
drafter's weights are loaded in every arm, so that they cancel out.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from dlite_hf import DLiteForDrafting
from dlite_hf.generation.integration import TargetSteps


ARMS = ("plain", "drafted", "native")
LIMIT = 32  # MiB that drafting may add to a plain call, its weights aside
SLIDING = "sliding"


def load(target: str, drafter_folder: str) -> tuple[PreTrainedModel, DLiteForDrafting]:
    if target != SLIDING:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
        return model, DLiteForDrafting.from_pretrained(drafter_folder, dtype=torch.bfloat16)
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
    config = MistralConfig(**sizes, vocab_size=512, num_key_value_heads=8, sliding_window=64, eos_token_id=None)
    model = MistralForCausalLM(config).eval()
    # All layers tapped, so that capturing the whole prompt natively shows.
    drafter = DLiteForDrafting.from_target(
        model, mask_token_id=0, num_hidden_layers=2, target_layer_ids=list(range(8))
    )
    return model, drafter


def peak_memory() -> int:
    """The most resident memory since the peak was last forgotten, in bytes."""
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


def measure(arm: str, target: str, drafter: str, prompt_tokens: int) -> None:
    """Prints the peak resident memory of one call, in bytes, over what this process held before it (Linux)."""
    model, assistant = load(target, drafter)
    torch.manual_seed(0)
    input_ids = torch.randint(5, model.config.vocab_size, (1, prompt_tokens))
    kwargs: dict[str, Any] = {} if arm == "plain" else {"assistant_model": assistant}
    if arm == "native":
        prefill = TargetSteps.prefill

        def prefill_natively(self: TargetSteps, input_ids: torch.Tensor) -> Any:
            self.model_kwargs["output_hidden_states"] = [i + 1 for i in self.layer_ids]
            outputs, _ = prefill(self, input_ids)
            return outputs, outputs

        TargetSteps.prefill = prefill_natively
    model.generate(input_ids[:, :32], max_new_tokens=8, do_sample=False, **kwargs)  # what is allocated once
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak that loading had
    before = peak_memory()
    model.generate(input_ids, max_new_tokens=24, min_new_tokens=24, do_sample=False, **kwargs)
    print(peak_memory() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompt_tokens", type=int, default=6000)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm is not None:
        measure(args.arm, args.target, args.drafter, args.prompt_tokens)
        return
    for target in (args.target, SLIDING):
        peaks: dict[str, list[int]] = {arm: [] for arm in ARMS}
        for _ in range(3):
            for arm in ARMS:
                command = [sys.executable, __file__, "--arm", arm, "--target", target, "--drafter", args.drafter]
                command += ["--prompt_tokens", str(args.prompt_tokens)]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads' arenas blur the peak
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
                peaks[arm].append(int(output.split()[-1]))
        medians = {arm: statistics.median(values) / 2**20 for arm, values in peaks.items()}
        spread = max(max(values) - min(values) for values in peaks.values()) / 2**20
        name = "a sliding-window target" if target == SLIDING else target
        print(f"{name}, prompt of {args.prompt_tokens} tokens, peak MiB, median of 3 (largest spread {spread:.1f}):")
        for arm in ARMS:
            added = medians[arm] - medians["plain"]
            verdict = "ok" if added <= LIMIT else "too much"
            print(f"  {arm:8s} {medians[arm]:8.1f}  over plain {added:+7.1f}  {verdict}")


if __name__ == "__main__":
    main()
