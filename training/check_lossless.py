# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Does a drafter leave a real target's greedy output as it is, and what does it gain? Both sides of one run.

    python training/check_lossless.py --target <folder> --drafter <folder> --prompts <folder of JSON lines> \
        --dtype float32 --output float32.json

Every prompt is answered without and with the drafter, one after the other. In float32 the two must be identical. In
bfloat16 a forward of K + 1 tokens rounds otherwise than one of a single token: where the outputs part, the gap between
the target's two best tokens is compared with how much that rounding moves the best token's logit, and the number of
prompts that part is given beside how many part when plain generation merely prefills in chunks.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dlite_hf import DLiteForDrafting, speculation_statistics


ARMS = ("plain", "drafted")


def read_prompts(folder: Path, num_per_file: int) -> list[tuple[str, str, str]]:
    """(set, id, first user text) of the first prompts of every file."""
    prompts = []
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines()[:num_per_file]:
            record = json.loads(line)
            prompts.append((file.stem, record["id"], record["turns"][0]))
    return prompts


def timed_generate(target: PreTrainedModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> tuple[list[int], float]:
    started = time.perf_counter()
    sequences = target.generate(**inputs, do_sample=False, **kwargs)
    seconds = time.perf_counter() - started
    return sequences[0, inputs["input_ids"].shape[1] :].tolist(), seconds


@torch.no_grad()
def cached_logits(target: PreTrainedModel, prompt_ids: torch.Tensor, answer: list[int], step: int) -> torch.Tensor:
    """The logits `[T, V]` behind every answer token, `step` tokens a forward, the prompt cached before."""
    cache = target(prompt_ids, logits_to_keep=1).cache
    tokens = torch.tensor([answer])
    logits = [target(tokens[:, i : i + step], cache=cache).logits[0] for i in range(0, len(answer), step)]
    return torch.cat(logits).float()


def compare(target: PreTrainedModel, inputs: dict, plain: list[int], drafted: list[int], step: int) -> dict[str, Any]:
    """Where two outputs part, the target's top-2 gap there, and the rounding of a longer forward."""
    place = next(i for i, pair in enumerate(zip(plain, drafted, strict=False)) if pair[0] != pair[1])
    single = cached_logits(target, inputs["input_ids"], plain, 1)
    several = cached_logits(target, inputs["input_ids"], plain, step)
    best = single.max(dim=-1)
    rounding = (several.gather(1, best.indices[:, None])[:, 0] - best.values).abs().max()
    # The token at `place` follows the logits behind the one before it; the first one follows the prompt's own.
    gap = single[place - 1].topk(2).values if place else None
    return {
        "first_difference": place,
        "top2_gap": float(gap[0] - gap[1]) if gap is not None else None,
        "largest_rounding": float(rounding),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num_per_file", type=int, default=8)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    drafter = DLiteForDrafting.from_pretrained(args.drafter, dtype=args.dtype).eval()
    step = drafter.config.num_draft_tokens + 1
    limit = target.config.max_position_embeddings - args.max_new_tokens
    rows: list[dict[str, Any]] = []
    for name, prompt_id, text in read_prompts(args.prompts, args.num_per_file):
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        if inputs["input_ids"].shape[1] > limit:
            print(f"{name} {prompt_id}: skipped, {inputs['input_ids'].shape[1]} tokens")
            continue
        options = {"max_new_tokens": args.max_new_tokens}
        if not rows:  # warm up both arms
            timed_generate(target, inputs, max_new_tokens=16)
            timed_generate(target, inputs, max_new_tokens=16, assistant_model=drafter)
        plain, plain_seconds = timed_generate(target, inputs, **options)
        with speculation_statistics() as stats:
            drafted, drafted_seconds = timed_generate(target, inputs, assistant_model=drafter, **options)
        row = {
            "set": name,
            "id": prompt_id,
            "prompt_tokens": inputs["input_ids"].shape[1],
            "plain_tokens": len(plain),
            "drafted_tokens": len(drafted),
            "identical": plain == drafted,
            "rounds": stats.num_rounds,
            "emitted": stats.num_emitted_tokens,
            "accepted_per_position": stats.accepted_per_position,
            "plain_seconds": plain_seconds,
            "drafted_seconds": drafted_seconds,
            "drafting_seconds": stats.drafting_seconds,
            "verifying_seconds": stats.verifying_seconds,
        }
        if args.dtype != "float32":
            chunked, _ = timed_generate(target, inputs, prefill_chunk_size=64, **options)
            row["identical_in_chunks"] = plain == chunked
            if plain != drafted:
                row |= compare(target, inputs, plain, drafted, step)
        rows.append(row)
        print(json.dumps({key: value for key, value in row.items() if key != "accepted_per_position"}), flush=True)

    report = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": args.dtype,
        "max_new_tokens": args.max_new_tokens,
        "rows": rows,
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    summarize(rows, args.dtype)


def summarize(rows: list[dict[str, Any]], dtype: str) -> None:
    for name in [*sorted({row["set"] for row in rows}), "all"]:
        part = [row for row in rows if name in (row["set"], "all")]
        tau = sum(row["emitted"] for row in part) / max(sum(row["rounds"] for row in part), 1)
        # Outputs that part may end at different lengths, so speeds are a token's.
        speed = {
            arm: sum(row[f"{arm}_tokens"] for row in part) / sum(row[f"{arm}_seconds"] for row in part) for arm in ARMS
        }
        speedup = statistics.median(
            row["drafted_tokens"] / row["drafted_seconds"] * row["plain_seconds"] / row["plain_tokens"] for row in part
        )
        print(
            f"{name:14s} {len(part):3d} prompts, {sum(row['identical'] for row in part):3d} identical, tau {tau:.2f}, "
            f"plain {speed['plain']:.1f} tokens/s, drafted {speed['drafted']:.1f} tokens/s, "
            f"median speedup {speedup:.2f}x"
        )
    if dtype != "float32":
        print(
            f"{sum(not row['identical_in_chunks'] for row in rows)} prompts differ plain against plain in chunks of 64"
        )
        for row in rows:
            if not row["identical"]:
                gap, rounding = row["top2_gap"], row["largest_rounding"]
                verdict = "a near tie" if gap is not None and gap <= 2 * rounding else "NOT A NEAR TIE"
                print(
                    f"{row['set']} {row['id']}: parts at token {row['first_difference']}, top-2 gap {gap}, "
                    f"largest rounding {rounding}: {verdict}"
                )


if __name__ == "__main__":
    main()
