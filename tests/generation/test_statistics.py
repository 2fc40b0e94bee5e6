# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""`speculation_statistics()` on scripted acceptances."""

import asyncio
import math
import threading

import pytest
import torch

from dlite_hf import speculation_statistics
from dlite_hf.generation import decoding
from dlite_hf.generation.statistics import running_statistics

from ..replay import ReplayDrafter
from ..targets import make_drafter, make_inputs, make_target


PROMPT_LENGTH = 6
SCRIPT = [3, 0, 5, 1, 2]  # the prefill's token, then rounds of 4, 1, 6, 2 and 3 tokens
NUM_NEW_TOKENS = 1 + 4 + 1 + 6 + 2 + 3
ORIGINS = [1, 2, 3, 0] + [0] + [1, 2, 3, 4, 5, 0] + [1, 0] + [1, 2, 0]


class ScriptedDrafter(ReplayDrafter):
    """Right for `script[i]` tokens in round i."""

    def draft(self, *args):
        self.num_right = self.script[len(self.pivots)]
        return super().draft(*args)


class Scripted:
    """A target, a prompt and a drafter whose acceptances are known."""

    def __init__(self, script, seed=0):
        self.target = make_target("llama")
        self.inputs = make_inputs(self.target, PROMPT_LENGTH, seed)
        self.plain = self.target.generate(**self.inputs, max_new_tokens=40, do_sample=False)
        self.new_tokens = self.plain[0, PROMPT_LENGTH:].tolist()
        self.drafter = ScriptedDrafter(make_drafter(self.target, num_draft_tokens=5).config).eval()
        self.script = script

    def generate(self, **options):
        self.drafter.script = self.script
        self.drafter.replay(self.target, self.plain)
        output = self.target.generate(**self.inputs, assistant_model=self.drafter, do_sample=False, **options)
        assert torch.equal(output, self.plain[:, : output.shape[1]])
        return output


@pytest.fixture
def scripted():
    return Scripted(SCRIPT)


def test_tau_is_emitted_tokens_over_verifications(scripted):
    with speculation_statistics() as statistics:
        scripted.generate(max_new_tokens=NUM_NEW_TOKENS)
    assert statistics.num_rounds == 5
    assert statistics.num_emitted_tokens == 16, "the prefill's token is not counted"
    assert statistics.tau == 16 / 5
    assert statistics.token_origins == ORIGINS
    assert statistics.accepted_per_position == [4, 3, 2, 1, 1]
    assert statistics.tested_per_position == [5, 4, 2, 2, 1], "4, 1, 5, 2 and 2 tokens of the drafts"
    assert statistics.num_drafted_tokens == 5 + 5 + 5 + 4 + 2, "the last drafts stop before the limit"
    assert statistics.drafting_seconds > 0 and statistics.verifying_seconds > 0


@pytest.mark.parametrize(
    "num_new_tokens, origins, num_drafted",
    [
        (2, [0], 0),
        (3, [1, 0], 1),
        (5, [1, 2, 3, 0], 3),
        (6, [1, 2, 3, 0, 0], 4),
        (8, [1, 2, 3, 0, 1, 2, 0], 5 + 2),
        (10, [1, 2, 3, 0, 1, 2, 3, 4, 0], 5 + 4),
    ],
)
def test_the_last_round_ends_at_the_limit(num_new_tokens, origins, num_drafted):
    scripted = Scripted([3, 5])
    with speculation_statistics() as statistics:
        scripted.generate(max_new_tokens=num_new_tokens)
    assert statistics.token_origins == origins
    assert statistics.num_drafted_tokens == num_drafted
    assert statistics.num_rounds == (1 if num_new_tokens <= 5 else 2)
    assert statistics.tau == len(origins) / statistics.num_rounds


def test_the_last_round_is_cut_at_eos():
    scripted = Scripted([3, 5], seed=1)
    end = 1 + 4 + 2  # the second token of the second draft
    eos_token_id = scripted.new_tokens[end - 1]
    assert eos_token_id not in scripted.new_tokens[: end - 1]
    with speculation_statistics() as statistics:
        output = scripted.generate(max_new_tokens=30, eos_token_id=eos_token_id)
    assert output.shape[1] == PROMPT_LENGTH + end
    assert statistics.token_origins == [1, 2, 3, 0, 1, 2], "three right tokens after it are not counted"
    assert (statistics.num_rounds, statistics.num_drafted_tokens, statistics.tau) == (2, 10, 3.0)
    assert (statistics.accepted_per_position, statistics.tested_per_position) == ([2, 2, 1], [2, 2, 1, 1])


def test_a_call_that_ends_with_its_prefill_has_no_round(scripted):
    with speculation_statistics() as statistics:
        scripted.generate(max_new_tokens=30, eos_token_id=scripted.new_tokens[0])
    assert (statistics.num_rounds, statistics.token_origins, statistics.accepted_per_position) == (0, [], [])
    assert math.isnan(statistics.tau)


def test_calls_of_a_block_are_pooled(scripted):
    other = Scripted([0, 0], seed=1)
    with speculation_statistics() as statistics:
        scripted.generate(max_new_tokens=NUM_NEW_TOKENS)
        first_seconds = statistics.verifying_seconds
        other.generate(max_new_tokens=3)
    assert (statistics.num_rounds, statistics.num_drafted_tokens) == (5 + 2, 21 + 1)
    assert statistics.token_origins == ORIGINS + [0, 0]
    assert statistics.tested_per_position == [5 + 1, 4, 2, 2, 1]
    assert statistics.tau == 18 / 7, "over all rounds, not a mean of 16 / 5 and 1"
    assert statistics.verifying_seconds > first_seconds


def test_plain_calls_do_not_count(scripted):
    with speculation_statistics() as statistics:
        scripted.target.generate(**scripted.inputs, max_new_tokens=5)
    assert statistics.num_rounds == statistics.num_emitted_tokens == 0


def test_outside_a_block_nothing_is_recorded_or_measured(scripted, monkeypatch):
    with speculation_statistics() as statistics:
        scripted.generate(max_new_tokens=5)
    before = list(statistics.token_origins)
    assert running_statistics() is None
    monkeypatch.setattr(decoding, "time_when_idle", None)
    scripted.generate(max_new_tokens=NUM_NEW_TOKENS)
    assert statistics.token_origins == before and statistics.num_rounds == 1


def test_a_block_ends_with_an_exception(scripted):
    with pytest.raises(KeyError, match="ours"), speculation_statistics():
        raise KeyError("ours")
    assert running_statistics() is None


def test_an_inner_block_counts_for_the_outer_one_too(scripted):
    with speculation_statistics() as outer:
        scripted.generate(max_new_tokens=5)
        with speculation_statistics() as inner:
            scripted.generate(max_new_tokens=NUM_NEW_TOKENS)
        scripted.generate(max_new_tokens=5)
    assert inner.token_origins == ORIGINS
    assert outer.token_origins == ORIGINS[:4] + ORIGINS + ORIGINS[:4]
    assert outer.num_rounds > inner.num_rounds > 0
    assert outer.drafting_seconds > inner.drafting_seconds > 0


def test_threads_have_their_own():
    calls = [Scripted(SCRIPT), Scripted([0, 2, 4], seed=1)]
    results = {}
    barrier = threading.Barrier(2, timeout=60)

    def work(i):
        with speculation_statistics() as statistics:
            barrier.wait()
            calls[i].generate(max_new_tokens=(NUM_NEW_TOKENS, 10)[i])
            barrier.wait()
        results[i] = statistics.token_origins

    with speculation_statistics() as outside:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {0: ORIGINS, 1: [0, 1, 2, 0, 1, 2, 3, 4, 0]}
    assert outside.num_rounds == 0


def test_a_thread_of_asyncio_counts_for_the_block_that_it_came_from(scripted):
    async def work():
        with speculation_statistics() as statistics:
            await asyncio.to_thread(scripted.generate, max_new_tokens=NUM_NEW_TOKENS)
        return statistics.token_origins

    assert asyncio.run(work()) == ORIGINS


@pytest.mark.parametrize("do_sample", [False, True])
def test_collecting_changes_no_output(do_sample):
    target = make_target("llama")
    drafter, inputs = make_drafter(target), make_inputs(target, PROMPT_LENGTH)
    options = {**inputs, "assistant_model": drafter, "max_new_tokens": 40, "do_sample": do_sample}
    torch.manual_seed(0)
    expected = target.generate(**options)
    torch.manual_seed(0)
    with speculation_statistics() as statistics:
        output = target.generate(**options)
    assert torch.equal(output, expected)
    assert statistics.num_emitted_tokens == 39
