# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Tokens a second over the batch size: what is timed, what is not, and what the target is given."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from dlite_hf.evaluation import concurrency
from dlite_hf.evaluation.concurrency import CONTINUOUS_BATCHING, concurrency_table, measure_concurrency
from dlite_hf.evaluation.methods import Method
from tests import targets


PLAIN = Method("plain", "plain")
LOOKUP = Method("prompt_lookup", "prompt_lookup", {"prompt_lookup_num_tokens": 10})
PROMPTS = [[5], [6, 7, 8], [9, 10]]


class ScriptedTarget:
    """Takes what a script says of each call, on a clock that only it moves; continuous batching fails."""

    training, device, config = False, torch.device("cpu"), SimpleNamespace(_attn_implementation="sdpa")

    def __init__(self, seconds=lambda name, size, call: 1.0):
        self.generation_config = GenerationConfig(eos_token_id=1, repetition_penalty=3.0, pad_token_id=2)
        self.now, self.seconds, self.calls = 0.0, seconds, []

    def generate(self, input_ids, attention_mask, max_new_tokens, **kwargs):
        name = "prompt_lookup" if "prompt_lookup_num_tokens" in kwargs else "plain"
        penalty = self.generation_config.repetition_penalty
        self.now += self.seconds(name, len(input_ids), len(self.calls))
        call = {"name": name, "ids": input_ids.tolist(), "mask": attention_mask.tolist(), "penalty": penalty}
        call["eos_token_id"] = self.generation_config.eos_token_id
        self.calls.append({**call, **kwargs, "max_new_tokens": max_new_tokens})
        return torch.cat([input_ids, torch.ones(len(input_ids), max_new_tokens, dtype=torch.long)], dim=1)

    def continuous_batching_context_manager(self, **kwargs):
        raise AttributeError("no pages on this machine")

    def measure(self, methods=(PLAIN,), **kwargs):
        return measure_concurrency(self, PROMPTS, methods, clock=lambda: self.now, **kwargs)


def test_tokens_a_second_are_those_of_all_sequences_over_the_median():
    seconds = iter([100.0, 2.0, 8.0, 4.0])  # to warm up, then three repeats
    target = ScriptedTarget(lambda *call: next(seconds))
    row, _ = target.measure(batch_sizes=[2], max_new_tokens=10)
    assert row["seconds"] == [2.0, 8.0, 4.0]
    assert row["median_seconds"] == 4.0
    assert row["new_tokens"] == 20
    assert row["tokens_per_second"] == 5.0
    assert row["note"] is None


def test_prompts_are_padded_on_the_left_and_begin_again_when_they_run_out():
    target = ScriptedTarget()
    row, continuous = target.measure(batch_sizes=[4], max_new_tokens=3, repeats=1)
    call = target.calls[-1]
    assert call["ids"] == [[2, 2, 5], [6, 7, 8], [2, 9, 10], [2, 2, 5]]
    assert call["mask"] == [[0, 0, 1], [1, 1, 1], [0, 1, 1], [0, 0, 1]]
    assert (row["prompt_tokens"], row["padding_tokens"], row["distinct_prompts"]) == (7, 5, 3)
    assert continuous["padding_tokens"] == 0


def test_every_sequence_gets_all_tokens_whatever_the_targets_own_configuration_says():
    target = ScriptedTarget()
    target.measure(batch_sizes=[1], max_new_tokens=7, repeats=1)
    call = target.calls[-1]
    assert (call["max_new_tokens"], call["eos_token_id"]) == (7, None) and "min_new_tokens" not in call
    assert call["do_sample"] is False
    assert call["penalty"] != 3.0
    assert target.generation_config.repetition_penalty == 3.0


def test_methods_take_turns_in_being_first():
    target = ScriptedTarget()
    target.measure([PLAIN, Method("plain again", "plain", {"other": True})], batch_sizes=[2], repeats=2)
    others = ["other" in call for call in target.calls]
    assert others[:4] == [False, True, False, True]  # warm-up and the first repeat
    assert others[4:] == [True, False]


def test_one_sequence_a_call_is_measured_alone_and_never_in_a_loop():
    target = ScriptedTarget(lambda name, size, call: {"plain": 2.0, "prompt_lookup": 1.0}[name])
    rows = target.measure([PLAIN, LOOKUP], batch_sizes=[1, 4], max_new_tokens=10)
    alone, together = [row for row in rows if row["method"] == "prompt_lookup"]
    assert alone["tokens_per_second"] == 10.0
    assert (together["seconds"], together["median_seconds"], together["tokens_per_second"]) == (None, None, None)
    assert together["note"] == "serves one sequence a call"
    assert {len(call["ids"]) for call in target.calls if call["name"] == "prompt_lookup"} == {1}


def test_a_batch_that_does_not_fit_says_so_and_leaves_no_figure():
    def seconds(name, size, call):
        if size == 2 and call > 4:  # in its second repeat
            raise torch.OutOfMemoryError
        return 1.0

    small, _, large, _ = ScriptedTarget(seconds).measure(batch_sizes=[1, 2], repeats=2)
    assert small["tokens_per_second"] == 128.0
    assert (large["seconds"], large["note"]) == (None, "out of memory")


def test_where_continuous_batching_fails_its_row_says_why():
    row = ScriptedTarget().measure(batch_sizes=[1])[-1]
    assert row["method"] == CONTINUOUS_BATCHING
    assert row["tokens_per_second"] is None
    assert row["note"] == "does not work here (AttributeError: no pages on this machine)"


def test_without_a_plain_method_there_is_no_continuous_batching():
    rows = ScriptedTarget().measure([LOOKUP], batch_sizes=[1, 2])
    assert [row["method"] for row in rows] == ["prompt_lookup", "prompt_lookup"]


class ScriptedManager:
    """Answers each request by `results`, which are `None` where nothing came in time."""

    def __init__(self, results):
        self.results, self.requests = iter(results), []

    def add_requests(self, prompts, max_new_tokens):
        self.requests.append((prompts, max_new_tokens))

    def get_result(self, timeout):
        return next(self.results)

    def is_running(self):
        return False


def answer(num_tokens, error=None, is_finished=True):
    return SimpleNamespace(generated_tokens=[1] * num_tokens, error=error, is_finished=lambda: is_finished)


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        ([answer(3, error="no room")], "no room"),
        ([answer(2)], "an answer has 2 tokens"),
        ([answer(3), None], "its thread ended before the answers were complete"),
    ],
)
def test_continuous_batching_that_gives_up_is_not_timed(results, reason):
    target = ScriptedTarget()

    @contextmanager
    def manager(**kwargs):
        yield ScriptedManager([answer(1), answer(1), *results])

    target.continuous_batching_context_manager = manager
    row = target.measure(batch_sizes=[2], max_new_tokens=3)[-1]
    assert row["seconds"] is None
    assert row["note"] == f"does not work here (RuntimeError: {reason})"


def test_an_unfinished_answer_is_waited_for():
    manager = ScriptedManager([answer(1, is_finished=False), answer(3)])
    concurrency._serve(manager, [[4]], 3)
    assert list(manager.results) == []  # both were taken


@pytest.mark.parametrize("attn_implementation", ["sdpa", "sdpa_packed"])
def test_a_real_target_with_a_drafter_and_continuous_batching(attn_implementation):
    target = targets.make_target("llama")
    target.set_attn_implementation(attn_implementation)
    dlite = Method("dlite", "dlite", assistant=targets.make_drafter(target))
    rows = measure_concurrency(target, PROMPTS, [PLAIN, dlite], batch_sizes=[1, 3], max_new_tokens=4, repeats=1)
    measured = {(row["method"], row["batch_size"]): row["tokens_per_second"] is not None for row in rows}
    assert measured == {
        ("plain", 1): True,
        ("dlite", 1): True,
        (CONTINUOUS_BATCHING, 1): True,
        ("plain", 3): True,
        ("dlite", 3): False,
        (CONTINUOUS_BATCHING, 3): True,
    }
    assert target.config._attn_implementation == attn_implementation
    assert json.loads(json.dumps(rows)) == rows


def test_a_target_that_stops_early_is_refused():
    target = ScriptedTarget()
    target.generate = lambda input_ids, **kwargs: input_ids
    with pytest.raises(ValueError, match=r"'plain' returned sequences \[2, 3\] for 2 prompts of 3 tokens and 128 new"):
        target.measure(batch_sizes=[2])


@pytest.mark.parametrize(
    ("prompts", "methods", "options", "message"),
    [
        ([], [PLAIN], {}, "got 0 prompts"),
        ([[1], []], [PLAIN], {}, "none without tokens"),
        ([[1]], [], {}, "at least one"),
        ([[1]], [PLAIN, PLAIN], {}, "its own name"),
        ([[1]], [Method(CONTINUOUS_BATCHING, "plain")], {}, "other than 'continuous batching'"),
        ([[1]], [PLAIN], {"batch_sizes": [0]}, "at least 1"),
        ([[1]], [PLAIN], {"repeats": 0}, "at least 1"),
    ],
)
def test_arguments_that_make_no_sense(prompts, methods, options, message):
    with pytest.raises(ValueError, match=message):
        measure_concurrency(ScriptedTarget(), prompts, methods, **options)


def test_a_target_in_training_mode_is_refused():
    target = ScriptedTarget()
    target.training = True
    with pytest.raises(ValueError, match=r"call `target.eval\(\)`"):
        target.measure()


def test_the_table():
    target = ScriptedTarget(lambda name, size, call: {"plain": 2.5, "prompt_lookup": 2.0}[name])
    rows = target.measure([PLAIN, LOOKUP], batch_sizes=[1, 2, 64], max_new_tokens=10)
    assert concurrency_table(rows).splitlines() == [
        "Generated tokens a second, all sequences together, prefill included; 10 new tokens each, median of 3.",
        "",
        "| batch size | 1 | 2 | 64 |",
        "| --- | --- | --- | --- |",
        "| plain | 4.0 | 8.0 | 256.0 |",
        "| prompt_lookup | 5.0 (1.25x) | - | - |",
        "| continuous batching | - | - | - |",
        "",
        "* continuous batching, batch size 1, 2, 64: does not work here (AttributeError: no pages on this machine).",
        "* prompt_lookup, batch size 2, 64: serves one sequence a call.",
    ]
