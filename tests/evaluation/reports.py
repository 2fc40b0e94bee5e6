# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Small reports, written by hand."""

from dlite_hf.evaluation.report import Report


def measurement(tokens=11, seconds=6.0, **fields):
    """The first of `tokens` after one second; counters are null unless given."""
    nulls = dict.fromkeys(
        [
            "accepted_per_position",
            "drafted",
            "drafting_seconds",
            "emitted",
            "peak_bytes",
            "rounds",
            "tested_per_position",
            "verifying_seconds",
        ]
    )
    defaults = {"tokens": tokens, "prefill_tokens": 1, "cached_tokens": 0, "first_token_seconds": 1.0}
    return {**nulls, **defaults, "seconds": seconds, **fields}


def plain(tokens=11, seconds=11.0, **fields):
    """Plain generation: a verification a token."""
    return measurement(tokens, seconds, rounds=tokens - 1, emitted=tokens - 1, accepted_per_position=[], **fields)


def row(id="a", task="gsm8k", turn=0, temperature=0.0, prompt_tokens=100, identical=None, divergence=None, **measured):
    """A row with `plain` as above unless given; the others are identical to it if they have as many tokens."""
    measurements = {"plain": plain(), **measured}
    if identical is None:
        identical = {
            name: each["tokens"] == measurements["plain"]["tokens"]
            for name, each in measurements.items()
            if name != "plain" and temperature == 0
        }
    return {
        "task": task,
        "id": id,
        "turn": turn,
        "temperature": temperature,
        "prompt_tokens": prompt_tokens,
        "order": list(measurements),
        "measurements": measurements,
        "identical": identical,
        "divergence": divergence or {},
    }


def report(rows, methods=("plain", "dlite"), checkpoint="tiny-DLite", **conditions):
    """A report; a method's kind is the beginning of its name, and `dlite` ran the checkpoint."""
    described = [
        {
            "name": name,
            "kind": name.split("-")[0],
            "checkpoint": checkpoint if name == "dlite" else None,
            "parameters": 1234 if name == "dlite" else 0,
            "settings": {},
            "num_draft_tokens": 7 if name == "dlite" else None,
            "note": None,
        }
        for name in methods
    ]
    tasks = [
        {"name": "gsm8k", "category": "general", "source": "openai/gsm8k", "revision": "cc7b047", "records": 2},
        {"name": "bfcl", "category": "agent", "file": "bfcl.jsonl", "sha256": "ab12", "records": 1},
    ]
    return Report(
        {"target": {"name": "owner/target", "dtype": "float32"}, "tasks": tasks, **conditions}, described, rows
    )
