# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Figures of rows written by hand, against sums done by hand."""

import pytest

from dlite_hf.evaluation import metrics
from dlite_hf.evaluation.metrics import Estimate, RoundTimes

from .reports import measurement, plain, row


def test_tau_is_pooled_over_rounds():
    """8 tokens in 2 rounds and 6 in 6: 14 / 8, where the mean of the rows' own would be 2.5."""
    rows = [
        row("a", dlite=measurement(9, rounds=2, emitted=8, accepted_per_position=[2, 2, 2])),
        row("b", dlite=measurement(7, rounds=6, emitted=6, accepted_per_position=[])),
    ]
    assert metrics.tau(rows, "dlite").value == 14 / 8
    assert metrics.accepted(rows, "dlite") == 6 / 8
    assert metrics.tau(rows, "plain") == Estimate(1.0)
    assert metrics.accepted(rows, "plain") == 0


def test_a_last_round_that_is_cut_counts_what_it_emitted():
    """Three rounds: 3 accepted and the target's own; 1 and the target's own; 2 accepted, the second an end."""
    cut = row(dlite=measurement(9, rounds=3, emitted=4 + 2 + 2, accepted_per_position=[3, 2, 1]))
    assert metrics.tau([cut], "dlite") == Estimate(8 / 3)
    assert metrics.accepted([cut], "dlite") == 6 / 3


def test_acceptance_per_position():
    rows = [
        row("a", dlite=measurement(rounds=6, emitted=12, accepted_per_position=[4, 2])),
        row("b", dlite=measurement(rounds=4, emitted=6, accepted_per_position=[1, 1, 0])),
    ]
    assert metrics.acceptance(rows, "dlite") == [5 / 10, 3 / 10, 0]
    assert metrics.conditional_acceptance(rows, "dlite") == [5 / 10, 3 / 5, 0]
    nothing = [row(dlite=measurement(rounds=2, emitted=2, accepted_per_position=[0, 0]))]
    assert metrics.conditional_acceptance(nothing, "dlite") == [0, None]
    # Where drafts end early, a round that accepted all of its draft did not get to the next position.
    rows[0]["measurements"]["dlite"]["tested_per_position"] = [6, 3, 1]
    assert metrics.conditional_acceptance(rows, "dlite") == [5 / 10, 3 / 5, 0]  # not known of all rows
    rows[1]["measurements"]["dlite"]["tested_per_position"] = [2, 1]
    assert metrics.conditional_acceptance(rows, "dlite") == [5 / 8, 3 / 4, 0]
    assert metrics.acceptance(rows, "dlite") == [5 / 10, 3 / 10, 0]
    empty = [row(dlite=measurement(rounds=2, emitted=2, accepted_per_position=[], tested_per_position=[]))]
    assert metrics.conditional_acceptance(empty, "dlite") == []


def test_speedups_are_of_seconds():
    """Plain 11 s + 11 s, of which 1 s each is prefill; drafted 6 s + 5 s."""
    rows = [row("a", dlite=measurement(seconds=6.0)), row("b", dlite=measurement(seconds=5.0))]
    assert metrics.speedup(rows, "dlite").value == pytest.approx(22 / 11)
    assert metrics.speedup(rows, "dlite", decode_only=True).value == pytest.approx(20 / 9)
    assert metrics.speedup(rows, "plain") == Estimate(1.0)


def test_decoding_leaves_out_what_came_with_the_prefill():
    """10 tokens in 10 s against 8 tokens, since the first forward emitted three, in 4 s."""
    rows = [row(stock=measurement(11, 5.0, prefill_tokens=3))]
    assert metrics.speedup(rows, "stock", decode_only=True).value == pytest.approx(1 / (4 / 8))
    assert metrics.speedup(rows, "stock").value == pytest.approx(11 / 5)


def test_slower_than_plain_is_below_one():
    assert metrics.speedup([row(dlite=measurement(seconds=22.0))], "dlite") == Estimate(0.5)


def test_an_answer_of_another_length_is_flagged_and_left_out():
    rows = [
        row("a", dlite=measurement(seconds=5.5)),
        row("b", dlite=measurement(tokens=3, seconds=1.5), prompt=measurement(seconds=11.0)),
    ]
    assert metrics.flagged_rows(rows, "dlite") == rows[1:]
    assert metrics.speedup(rows, "dlite") == Estimate(2.0)
    assert metrics.speedup(rows, "prompt").value == 1.0  # flagged for one method alone
    assert metrics.flagged_rows(rows, "prompt") == []
    assert metrics.speedup(rows[1:], "dlite") is None
    assert metrics.tokens_per_second(rows, "dlite") == 14 / 7


def test_sampled_answers_of_another_length_are_flagged_too():
    rows = [row("a", temperature=1.0, dlite=measurement(tokens=21, seconds=7.0))]
    rows.append(row("b", temperature=1.0, dlite=measurement(seconds=5.5)))
    assert metrics.flagged_rows(rows, "dlite") == rows[:1]
    assert metrics.speedup(rows, "dlite").value == pytest.approx(2.0)
    assert metrics.identical(rows, "dlite") is None


def test_times():
    rows = [
        row("a", dlite=measurement(11, 6.0, rounds=4, drafting_seconds=1.0, verifying_seconds=3.0)),
        row("b", dlite=measurement(11, 4.0, rounds=6, drafting_seconds=0.5, verifying_seconds=2.0)),
        row(
            "c", dlite=measurement(2, 2.5, rounds=0, drafting_seconds=0, verifying_seconds=0, first_token_seconds=2.5)
        ),
    ]
    assert metrics.round_times(rows, "dlite") == pytest.approx(RoundTimes(150.0, 500.0, 150.0))
    assert metrics.first_token_seconds(rows, "dlite") == 1.0
    assert metrics.tokens_per_second(rows, "dlite") == 24 / 12.5
    assert metrics.round_times(rows[2:], "dlite") is None


def test_memory_over_plain():
    rows = [
        row("a", plain=plain(peak_bytes=50), dlite=measurement(peak_bytes=90)),
        row("b", plain=plain(peak_bytes=70), dlite=measurement(peak_bytes=80)),
    ]
    assert metrics.extra_peak_bytes(rows, "dlite") == 20


@pytest.mark.parametrize(
    "figure",
    [
        metrics.tau,
        metrics.accepted,
        metrics.acceptance,
        metrics.conditional_acceptance,
        metrics.round_times,
        metrics.extra_peak_bytes,
    ],
)
def test_a_missing_counter_is_none(figure):
    counters = {"rounds": 2, "emitted": 4, "accepted_per_position": [1], "peak_bytes": 5}
    counters |= {"drafting_seconds": 0.1, "verifying_seconds": 0.2}
    whole = row("a", plain=plain(peak_bytes=1), dlite=measurement(**counters))
    assert figure([whole], "dlite") is not None
    assert figure([whole, row("b", plain=plain(peak_bytes=1), dlite=measurement())], "dlite") is None
    assert figure([whole], "absent") is None and figure([], "dlite") is None


def test_no_round_has_no_tau():
    empty = [row(dlite=measurement(1, rounds=0, emitted=0, accepted_per_position=[]))]
    assert metrics.tau(empty, "dlite") is None
    assert metrics.acceptance(empty, "dlite") is metrics.conditional_acceptance(empty, "dlite") is None
    assert metrics.speedup([], "dlite") is metrics.tokens_per_second([], "dlite") is None


def test_identical_outputs():
    rows = [row("a", dlite=measurement()), row("b", dlite=measurement(), identical={"dlite": False})]
    assert metrics.identical(rows, "dlite") == (1, 2)
    assert metrics.identical(rows, "plain") is None


@pytest.mark.parametrize(
    ("divergence", "is_near"),
    [
        ({"gap": 0.5, "largest_rounding": 0.25}, True),
        ({"gap": 0.51, "largest_rounding": 0.25}, False),
        ({"gap": None, "largest_rounding": 0.25}, False),
        ({"gap": 0.1, "largest_rounding": None}, False),
        (None, False),
    ],
)
def test_near_ties(divergence, is_near):
    assert metrics.is_near_tie(divergence) is is_near


def make_sessions(num_sessions, num_turns):
    """Sessions whose turns are alike, and which differ from one another."""
    return [
        row(f"s{i}", turn=turn, dlite=measurement(rounds=10, emitted=10 + 3 * i, seconds=4.0 + i))
        for i in range(num_sessions)
        for turn in range(num_turns)
    ]


def test_the_interval_is_one_over_sessions():
    """Turns of one session add no evidence: twice as many turns of the same sessions leave the interval as it is."""
    one, two = (metrics.tau(make_sessions(8, num_turns), "dlite") for num_turns in (1, 5))
    assert one == two
    assert one.low < one.value < one.high
    assert metrics.tau(make_sessions(1, 5), "dlite") == Estimate(1.0)  # five turns of one session are no five
    assert metrics.tau(make_sessions(8, 1), "dlite") == one  # seeded


def test_the_interval_narrows_with_sessions():
    def width(num_copies):
        rows = [{**each, "id": f"{each['id']}-{copy}"} for copy in range(num_copies) for each in make_sessions(8, 1)]
        estimate = metrics.speedup(rows, "dlite")
        return estimate.high - estimate.low

    assert width(16) == pytest.approx(width(1) / 4, rel=0.2)  # a mean of n: 1 / sqrt(n)


def test_the_interval_holds_the_middle_95_percent():
    """Of five draws, the one other session is in none in 33% of all cases, in three or more in 6%, in four in 0.7%."""
    rows = [row(f"s{i}", dlite=measurement(rounds=1, emitted=6 if i == 2 else 1)) for i in range(5)]
    assert metrics.tau(rows, "dlite") == Estimate(2.0, 1.0, (2 * 1 + 3 * 6) / 5)
    assert metrics.tau(rows[:4], "dlite") == Estimate(9 / 4)  # too few for an interval


@pytest.mark.parametrize(
    ("first", "last", "bucket"),
    [
        (0, 1023, "0-1k"),
        (1024, 4095, "1-4k"),
        (4096, 8191, "4-8k"),
        (8192, 16383, "8-16k"),
        (16384, 32767, "16-32k"),
        (32768, 10**6, "32k+"),
    ],
)
def test_length_buckets(first, last, bucket):
    assert list(metrics.by_length([row(prompt_tokens=first), row(prompt_tokens=last)])) == [bucket]


def test_groups():
    rows = [
        row(task="bfcl", turn=4, prompt_tokens=5000, temperature=1.0),
        row(task="gsm8k", turn=0, prompt_tokens=10),
        row(task="mine", turn=8),
        row(task="bfcl", turn=1),
    ]
    assert metrics.by_task(rows) == {"bfcl": [rows[0], rows[3]], "gsm8k": rows[1:2], "mine": rows[2:3]}
    assert list(metrics.by_temperature(rows)) == [0.0, 1.0]
    assert list(metrics.by_length(rows)) == ["0-1k", "4-8k"]
    assert metrics.by_turn(rows) == {"1": rows[1:2], "2": rows[3:], "5-8": rows[:1], "9+": rows[2:3]}
    by_category = metrics.by_category(rows, {"bfcl": "agent", "gsm8k": "general"})
    assert {name: len(each) for name, each in by_category.items()} == {"agent": 2, "general": 1, "uncategorised": 1}


def test_who_keeps_no_cache_between_turns():
    rows = [
        row(turn=0, stock=measurement(), dlite=measurement()),
        row(turn=1, plain=plain(cached_tokens=50), stock=measurement(), dlite=measurement(cached_tokens=50)),
    ]
    assert metrics.keeps_no_cache(rows, "stock") and not metrics.keeps_no_cache(rows, "dlite")
    assert not metrics.keeps_no_cache(rows[:1], "stock")  # a first turn has nothing to keep


def test_who_keeps_more_cache_than_plain():
    """As where a static cache of sliding windows cannot be cropped, and the drafter's own can."""
    rows = [row(turn=1, plain=plain(), stock=measurement(), dlite=measurement(cached_tokens=50))]
    assert metrics.keeps_more_cache(rows, "dlite") and not metrics.keeps_more_cache(rows, "stock")
    assert not metrics.keeps_no_cache(rows, "dlite") and not metrics.keeps_no_cache(rows, "stock")
    # A token more or less, by where outputs part, is no other way to keep a cache.
    rows = [row(turn=1, plain=plain(cached_tokens=50), dlite=measurement(cached_tokens=51))]
    assert not metrics.keeps_more_cache(rows, "dlite")
