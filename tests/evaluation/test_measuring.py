# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What a measurement counts, beside the forwards that the target really ran."""

import copy

import pytest
import torch

from dlite_hf.evaluation import divergence, measuring
from dlite_hf.evaluation.divergence import answer_logits, compare
from dlite_hf.evaluation.measuring import measure, sampling_options
from dlite_hf.evaluation.methods import Method, make_methods
from dlite_hf.evaluation.sessions import PrefixCache
from dlite_hf.generation import decoding
from dlite_hf.generation.statistics import SpeculationStatistics, time_when_idle

from ..replay import make_replay_drafter
from ..targets import make_drafter, make_inputs, make_target
from .test_methods import make_assistant, make_dflash


LENGTH = 24


class FakeClock:
    """A second passes each time it is asked."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1
        return self.now


@pytest.fixture(scope="module")
def target():
    return make_target("llama")


@pytest.fixture
def forwards(target):
    """How many tokens each forward of the target got."""
    lengths = []
    hook = target.model.layers[-1].register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append((args[0] if args else kwargs["hidden_states"]).shape[1]),
        with_kwargs=True,
    )
    yield lengths
    hook.remove()


def run(target, method, **options):
    prompt_ids = make_inputs(target, 20)["input_ids"]
    measurement, output = measure(target, method, prompt_ids, **{"max_new_tokens": LENGTH, **options})
    return measurement, output.sequences[0, 20:].tolist()


def plain_answer(target, max_new_tokens=LENGTH):
    inputs = make_inputs(target, 20)
    return target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)[0, 20:].tolist()


def test_plain(target, forwards):
    measurement, answer = run(target, Method("plain", "plain"))
    assert forwards == [20] + [1] * (LENGTH - 1)
    assert (measurement.tokens, measurement.prefill_tokens) == (LENGTH, 1)
    assert (measurement.rounds, measurement.emitted) == (LENGTH - 1, LENGTH - 1)
    others = ("accepted_per_position", "tested_per_position", "drafted", "drafting_seconds", "verifying_seconds")
    assert [getattr(measurement, name) for name in (*others, "peak_bytes")] == [None] * 6
    assert answer == plain_answer(target)


def check_counts(measurement, forwards, prompt_length=20):
    """A method of Transformers: every forward after the first is a round, and every token came from one of them."""
    assert measurement.rounds == len(forwards) - 1
    assert measurement.emitted == measurement.tokens - measurement.prefill_tokens
    accepted = measurement.accepted_per_position
    assert sum(accepted) == measurement.emitted - measurement.rounds
    assert accepted == sorted(accepted, reverse=True) and all(accepted)
    # A forward with k draft tokens got k + 1, and accepted at most k.
    assert sum(accepted) <= sum(length - 1 for length in forwards[1:])
    assert measurement.prefill_tokens <= 1 + forwards[0] - prompt_length
    assert measurement.drafted is None and measurement.drafting_seconds is None


def test_prompt_lookup_of_transformers(target, forwards):
    (method,) = make_methods(target)[1:]
    # A prompt that ends as the target goes on, twice, so that its draft is verified within the prefill.
    prompt = make_inputs(target, 8, 5)["input_ids"]
    answer = target.generate(prompt, max_new_tokens=12, do_sample=False)[:, 8:]
    prompt_ids = torch.cat([prompt, answer, prompt, answer[:, :6]], dim=1)
    forwards.clear()
    measurement, output = measure(target, method, prompt_ids, max_new_tokens=LENGTH)
    check_counts(measurement, forwards, prompt_ids.shape[1])
    assert forwards[0] == prompt_ids.shape[1] + 10, "the prefill verifies ten draft tokens"
    expected = target.generate(prompt_ids, max_new_tokens=LENGTH, do_sample=False)
    assert output.sequences.tolist() == expected.tolist()


def test_what_the_prefill_of_an_assisted_call_emits(target, forwards):
    """The target itself as an assistant: its whole draft is accepted within the prefill, and is no round's."""
    assistant = make_target("llama")
    assistant.generation_config.update(num_assistant_tokens=6, assistant_confidence_threshold=0.0)
    measurement, answer = run(target, Method("itself", "assistant", assistant=assistant))
    # 7 tokens from the prefill, 7 and 7 from two rounds, and the last 3 of 24 from a third.
    assert forwards == [26, 7, 7, 3]
    assert (measurement.prefill_tokens, measurement.rounds, measurement.emitted) == (7, 3, 17)
    assert measurement.accepted_per_position == [3, 3, 2, 2, 2, 2]
    assert answer == plain_answer(target)


def test_an_assistant_starts_every_call_alike(target):
    assistant = make_assistant()
    assistant.generation_config.update(num_assistant_tokens=6, num_assistant_tokens_schedule="heuristic")
    method = Method("small", "assistant", assistant=assistant)
    first, _ = run(target, method)
    assert assistant.generation_config.num_assistant_tokens == 6
    again, _ = run(target, method)
    assert again.rounds == first.rounds < LENGTH and again.prefill_tokens == first.prefill_tokens


@pytest.mark.parametrize("kind", ["early_exit", "dflash"])
def test_other_methods_of_transformers(target, forwards, kind, tmp_path):
    if kind == "dflash":
        make_dflash().save_pretrained(tmp_path)
        method = make_methods(target, ["plain"], [f"dflash={tmp_path}"])[1]
    else:
        method = make_methods(target, ["plain", "early_exit=4"])[1]
    forwards.clear()
    measurement, answer = run(target, method)
    # The last layer runs in the target's own forwards alone: exits skip it.
    check_counts(measurement, forwards)
    assert forwards[0] == 20 if kind == "dflash" else forwards[0] > 20
    assert measurement.tokens == LENGTH and answer == plain_answer(target)


def test_dlite(target, forwards):
    """Three tokens a draft, of which the first two are right."""
    drafter = make_replay_drafter(make_drafter(target, num_draft_tokens=3), num_right=2)
    expected = plain_answer(target)
    drafter.replay(target, torch.cat([make_inputs(target, 20)["input_ids"], torch.tensor([expected])], dim=1))
    forwards.clear()
    measurement, answer = run(target, Method("dlite", "dlite", assistant=drafter, num_draft_tokens=3))
    assert answer == expected
    # One token from the prefill, 3 from each of seven rounds, and the last two from an eighth.
    assert forwards == [20, 4, 4, 4, 4, 4, 4, 4, 2]
    assert (measurement.prefill_tokens, measurement.rounds, measurement.emitted) == (1, 8, 23)
    assert (measurement.accepted_per_position, measurement.drafted) == ([8, 7], 22)
    assert measurement.tested_per_position == [8, 7, 7]  # the last draft has one token
    assert 0 < measurement.drafting_seconds + measurement.verifying_seconds < measurement.seconds


def test_times(target):
    measurement, _ = run(target, Method("plain", "plain"), clock=FakeClock())
    # Asked at the start, at the first token, and at the end.
    assert (measurement.first_token_seconds, measurement.seconds) == (1.0, 2.0)


def test_times_are_taken_once_the_device_is_idle(target, monkeypatch):
    events = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: events.append(device.type))

    def clock():
        events.append("clock")
        return 5.0

    for device, expected in (("cuda", ["cuda", "clock"]), ("cpu", ["clock"])):
        events.clear()
        assert time_when_idle(torch.device(device), clock) == 5.0 and events == expected
    # Neither a round nor a measurement asks another clock.
    monkeypatch.setattr(decoding, "time_when_idle", lambda device: (5.0, device))
    assert decoding._clock(SpeculationStatistics(), target.device) == (5.0, target.device)
    devices = []
    monkeypatch.setattr(measuring, "time_when_idle", lambda device, clock: devices.append(device) or len(devices))
    measurement, _ = run(target, Method("plain", "plain"), clock=None)
    assert (measurement.first_token_seconds, measurement.seconds, devices) == (1, 2, [target.device] * 3)


def test_leftovers_change_nothing(target):
    prompt_ids = make_inputs(target, 20)["input_ids"]
    expected = plain_answer(target)
    config = target.generation_config
    try:
        target.generation_config = copy.deepcopy(config)
        target.generation_config.update(
            do_sample=True, top_k=3, repetition_penalty=3.0, speculation_type="dflash", max_length=25
        )
        left = target.generation_config
        before = left.to_dict()
        for method in (Method("plain", "plain"), Method("small", "assistant", assistant=make_assistant())):
            _, output = measure(target, method, prompt_ids, max_new_tokens=LENGTH)
            assert output.sequences[0, 20:].tolist() == expected
            assert target.generation_config is left and left.to_dict() == before
    finally:
        target.generation_config = config


def test_sampling_draws_from_the_whole_distribution_with_a_seed(target):
    assert sampling_options(0.0) == {"do_sample": False}
    plain = Method("plain", "plain")
    _, first = run(target, plain, temperature=1.0, seed=3)
    _, again = run(target, plain, temperature=1.0, seed=3)
    _, other = run(target, plain, temperature=1.0, seed=4)
    assert first == again != plain_answer(target) and other != first
    # Transformers' own default keeps fifty tokens.
    torch.manual_seed(3)
    inputs = make_inputs(target, 20)
    drawn = target.generate(**inputs, do_sample=True, temperature=5.0, top_k=0, max_new_tokens=LENGTH)
    assert run(target, plain, temperature=5.0, seed=3)[1] == drawn[0, 20:].tolist()


def test_a_kept_cache(target, forwards):
    method, kept = Method("plain", "plain"), PrefixCache()
    prompt_ids = make_inputs(target, 20)["input_ids"]
    _, output = measure(target, method, prompt_ids, max_new_tokens=5)
    kept.keep(output.sequences, output.cache)
    longer = torch.cat([output.sequences, prompt_ids[:, :4]], dim=1)
    cache, cached_tokens = kept.prepare(longer, 8)
    forwards.clear()
    measurement, output = measure(target, method, longer, max_new_tokens=5, cache=cache, cached_tokens=cached_tokens)
    assert (measurement.cached_tokens, forwards[0]) == (24, 5)
    assert output.sequences.tolist() == target.generate(longer, max_new_tokens=5, do_sample=False).tolist()


def test_a_static_cache_and_a_kept_one(target):
    settings = {"cache_implementation": "static", "max_cache_len": 64}
    static = Method("plain", "plain", settings)
    _, answer = run(target, static)
    assert answer == plain_answer(target)
    _, output = measure(target, static, make_inputs(target, 20)["input_ids"], max_new_tokens=5)
    assert output.cache.get_max_length() == 64
    # A cache that is given takes the place of one that would be made.
    _, given = measure(target, static, output.sequences, max_new_tokens=5, cache=output.cache, cached_tokens=24)
    assert given.cache is output.cache
    assert given.sequences[0, 20:].tolist() == plain_answer(target, max_new_tokens=10)


def test_a_static_cache_is_as_long_as_it_is_said(target):
    """`generate` makes none shorter than any before it."""
    for said, length in ((90, 90), (50, 50), (10, 20 + LENGTH)):  # and long enough
        method = Method("plain", "plain", {"cache_implementation": "static", "max_cache_len": said})
        _, output = measure(target, method, make_inputs(target, 20)["input_ids"], max_new_tokens=LENGTH)
        assert output.cache.get_max_length() == length
        assert output.sequences[0, 20:].tolist() == plain_answer(target)


def test_a_stream_that_is_not_the_answer(target, monkeypatch):
    original = target.generate
    monkeypatch.setattr(target, "generate", lambda streamer, **options: original(**options))
    with pytest.raises(ValueError, match="'plain' returned 24 tokens, but streamed 0"):
        run(target, Method("plain", "plain"))


@torch.no_grad()
def test_where_outputs_part(target, monkeypatch):
    prompt_ids = make_inputs(target, 20)["input_ids"]
    plain = plain_answer(target)
    logits, several = answer_logits(target, prompt_ids, plain, (1, 5))
    assert logits.argmax(dim=-1).tolist() == plain
    torch.testing.assert_close(several, logits, rtol=1e-4, atol=1e-3)
    monkeypatch.setattr(target.config, "use_cache", False)  # as a checkpoint of a training run may say
    for place in (0, 7):
        fresh = target(torch.cat([prompt_ids, torch.tensor([plain[:place]]).long()], dim=1)).logits[0, -1]
        for token in (int(fresh.topk(2).indices[1]), int(fresh.argmin())):  # a wrong loop is not excused by the second
            other = [*plain[:place], token, *plain[place + 1 :]]
            found = compare(target, prompt_ids, plain, other, 4)
            assert found["first_difference"] == place and found["largest_rounding"] < 1e-3
            assert found["gap"] == pytest.approx(float(fresh.max() - fresh[token]), abs=1e-3)
    for one, two in ((plain[:5], plain), (plain, plain[:5])):
        found = compare(target, prompt_ids, one, two, 4)
        assert (found["first_difference"], found["gap"]) == (5, None)


@torch.no_grad()
def test_a_kept_cache_spares_the_prompt_where_outputs_part(target, forwards):
    prompt_ids = make_inputs(target, 20)["input_ids"]
    _, output = measure(target, Method("plain", "plain"), prompt_ids, max_new_tokens=LENGTH)
    plain, prefix = output.sequences[0, 20:].tolist(), PrefixCache()
    prefix.keep(output.sequences, output.cache)
    other = [*plain[:7], (plain[7] + 1) % target.config.vocab_size, *plain[8:]]
    forwards.clear()
    found = compare(target, prompt_ids, plain, other, 4, prefix)
    assert forwards == [1] + [1] * 14 + [4, 4, 4, 2]  # the prompt's last token, then the answer twice
    fresh = compare(target, prompt_ids, plain, other, 4)
    assert found["gap"] == pytest.approx(fresh["gap"], abs=1e-3)
    assert prefix.prepare(output.sequences, 1) == (output.cache, 20 + LENGTH - 1)  # as it was


def test_rounding_far_from_where_outputs_part_excuses_nothing(target, monkeypatch):
    logits = torch.zeros(2, 40, 97)
    logits[:, :, 5] = 1.0
    logits[1, 3, 5] = 9.0
    monkeypatch.setattr(
        divergence, "answer_logits", lambda target, prompt_ids, answer, *others: logits[:, : len(answer)]
    )
    for place, rounding in ((11, 8.0), (12, 0.0)):
        found = compare(target, torch.tensor([[3]]), [5] * 40, [5] * place + [6] * 2, 4)
        assert found == {"first_difference": place, "gap": 1.0, "largest_rounding": rounding}


def test_logits_that_are_not_finite_are_no_near_tie():
    """Such as float16's overflow: JSON cannot hold them, and no rounding explains them."""
    target = make_target("llama")
    with torch.no_grad():
        target.lm_head.weight[5] = float("inf")
    found = compare(target, torch.tensor([[3, 4, 5]]), [5, 6, 7], [5, 6, 8], 4)
    assert found == {"first_difference": 2, "gap": None, "largest_rounding": None}
