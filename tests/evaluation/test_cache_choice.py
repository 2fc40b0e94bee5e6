# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Which cache a method gets, from times that are given."""

import pytest

from dlite_hf.evaluation.cache_choice import with_faster_caches
from dlite_hf.evaluation.methods import Method


METHODS = [
    Method("plain", "plain"),
    Method("stock", "prompt_lookup"),
    Method("dlite", "dlite"),
    Method("told", "dlite", {"cache_implementation": "dynamic"}),
]


def choose(time, **options):
    defaults = {"compiles": False, "max_cache_len": None, "what": "8 tokens"}
    return with_faster_caches(METHODS, ["a", "b"], time, **{**defaults, **options})


def test_the_better_of_two_runs_behind_all_prompts_counts():
    seconds = {
        ("plain", False, "a"): [5.0, 3.0],
        ("plain", False, "b"): [1.0, 9.0],
        ("plain", True, "a"): [9.0, 1.0],
        ("plain", True, "b"): [2.5, 2.0],
        ("dlite", False, "a"): [1.0, 1.0],
        ("dlite", False, "b"): [1.0, 1.0],
        ("dlite", True, "a"): [1.0, 0.5],
        ("dlite", True, "b"): [3.0, 3.0],
    }
    caches = {}

    def time(method, prompt, kept):
        is_static = "cache_implementation" in method.settings
        caches.setdefault((prompt, is_static), []).append(kept)
        return seconds[method.name, is_static, prompt].pop(0)

    plain, stock, dlite, told = choose(time)
    assert (plain.settings, dlite.settings) == ({"cache_implementation": "static"}, {})
    assert (
        plain.note == "8 tokens took 4.000 s with a dynamic cache, 3.000 s with a static one; the static one is used."
    )
    assert dlite.note.endswith("2.000 s with a dynamic cache, 3.500 s with a static one; the dynamic one is used.")
    assert [stock, told] == [METHODS[1], METHODS[3]]
    # One prefill of a prompt serves all methods, but never caches of two kinds.
    assert [len(each) for each in caches.values()] == [4] * 4
    assert all(len({*map(id, each)}) == 1 for each in caches.values())
    assert len({id(each[0]) for each in caches.values()}) == 4


def test_a_static_cache_that_does_not_serve_is_not_tried_again():
    calls = []

    def time(method, prompt, kept):
        calls.append((method.name, "cache_implementation" in method.settings, prompt))
        if calls[-1][:2] == ("dlite", True):
            raise ValueError("it is too short.")
        return 1.0

    _, _, dlite, _ = choose(time)
    assert (dlite.settings, dlite.note) == ({}, "A static cache does not serve: it is too short.")
    assert calls.count(("dlite", True, "a")) == 1 and ("dlite", True, "b") not in calls


def test_a_method_that_cannot_run_at_all_says_so():
    def time(method, prompt, kept):
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        choose(time)


def test_where_forwards_are_compiled_only_plain_generation_is_timed():
    names, caches = set(), []

    def time(method, prompt, kept):
        names.add(method.name)
        caches.append(kept)
        return 1.0 if "cache_implementation" in method.settings else 2.0

    plain, *others = choose(time, compiles=True, max_cache_len=64)
    assert plain.settings == {"cache_implementation": "static", "max_cache_len": 64}
    assert plain.note.endswith("2.000 s with a static one and a compiled forward; the static one is used.")
    assert names == {"plain"} and others == METHODS[1:]
    assert len({*map(id, caches)}) == len(caches) == 8  # each is recorded anew, as that of a session is
