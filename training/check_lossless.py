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
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from dlite_hf import DLiteForDrafting, speculation_statistics
from dlite_hf.conversations import template_inputs
from dlite_hf.json_lines import read_json_lines
from dlite_hf.training_record import hardware


ARMS = ("plain", "drafted")


def read_prompts(
    folder: Path, num_per_file: int, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int
) -> list[tuple[str, str, BatchEncoding]]:
    """(set, id, prompt) of the first records of every file that have one of at most `max_prompt_tokens`.

    A record has `turns`, user texts of which the first is asked, or `messages` (and `tools`), a conversation that is
    taken up before the latest assistant's message whose prompt is short enough.
    """
    prompts = []
    for file in sorted(folder.glob("*.jsonl")):
        found: list[tuple[str, str, BatchEncoding]] = []
        for record in read_json_lines(file):
            if "turns" in record:
                record["messages"], places = [{"role": "user", "content": record["turns"][0]}], [1]
            else:
                places = [i for i, message in enumerate(record["messages"]) if message["role"] == "assistant"]
            messages, tools = template_inputs(record)
            options = {"tools": tools, "add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
            inputs = [tokenizer.apply_chat_template(messages[:place], **options) for place in places]
            inputs = [each for each in inputs if each["input_ids"].shape[1] <= max_prompt_tokens]
            if inputs and len(found) < num_per_file:
                found.append((file.stem, record["id"], inputs[-1]))
        prompts += found
    return prompts


class FirstToken(BaseStreamer):
    """Notes when the first token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())  # the prompt comes first of all

    def end(self) -> None:
        pass


def timed_generate(target: PreTrainedModel, inputs: BatchEncoding, **kwargs: Any) -> tuple[list[int], float, float]:
    """The answer, the seconds until its first token, and those until its end."""
    streamer, started = FirstToken(), time.perf_counter()
    sequences = target.generate(**inputs, do_sample=False, streamer=streamer, **kwargs)
    seconds = time.perf_counter() - started
    return sequences[0, inputs["input_ids"].shape[1] :].tolist(), streamer.times[1] - started, seconds


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
    parser.add_argument("--max_prompt_tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    drafter = DLiteForDrafting.from_pretrained(args.drafter, dtype=args.dtype).eval()
    step = drafter.config.num_draft_tokens + 1
    limit = min(args.max_prompt_tokens, target.config.max_position_embeddings - args.max_new_tokens)
    rows: list[dict[str, Any]] = []
    for name, prompt_id, inputs in read_prompts(args.prompts, args.num_per_file, tokenizer, limit):
        options = {"max_new_tokens": args.max_new_tokens}
        if not rows:  # warm up both arms
            timed_generate(target, inputs, max_new_tokens=16)
            timed_generate(target, inputs, max_new_tokens=16, assistant_model=drafter)
        plain, plain_first, plain_seconds = timed_generate(target, inputs, **options)
        with speculation_statistics() as stats:
            drafted, drafted_first, drafted_seconds = timed_generate(
                target, inputs, assistant_model=drafter, **options
            )
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
            "plain_first_token_seconds": plain_first,
            "drafted_first_token_seconds": drafted_first,
            "drafting_seconds": stats.drafting_seconds,
            "verifying_seconds": stats.verifying_seconds,
        }
        if args.dtype != "float32":
            chunked, *_ = timed_generate(target, inputs, prefill_chunk_size=64, **options)
            row["identical_in_chunks"] = plain == chunked
            if plain != drafted:
                row |= compare(target, inputs, plain, drafted, step)
        rows.append(row)
        print(json.dumps({key: value for key, value in row.items() if key != "accepted_per_position"}), flush=True)

    report = {
        "machine": hardware(target.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": args.dtype,
        "temperature": 0.0,
        "thinking": None,
        "num_draft_tokens": step - 1,
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
        decoding = [
            [(row[f"{arm}_tokens"] - 1) / (row[f"{arm}_seconds"] - row[f"{arm}_first_token_seconds"]) for arm in ARMS]
            for row in part
            if min(row["plain_tokens"], row["drafted_tokens"]) > 1
        ]
        decoding_speedup = statistics.median(drafted / plain for plain, drafted in decoding) if decoding else math.nan
        print(
            f"{name:17s} {len(part):3d} prompts, {sum(row['identical'] for row in part):3d} identical, tau {tau:.2f}, "
            f"plain {speed['plain']:.1f} tokens/s, drafted {speed['drafted']:.1f} tokens/s, "
            f"median speedup {speedup:.2f}x, without the prefill {decoding_speedup:.2f}x"
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
