# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Several calls on one target: caches that are kept, and calls that leave no trace."""

import gc
import sys
import threading

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StaticCache
from transformers.generation.streamers import BaseStreamer

from ..replay import generate_with_statistics, make_replay_drafter
from ..targets import make_drafter, make_inputs, make_target


ARCHITECTURES = ["llama", "mistral", "gemma3"]  # the latter two with windows of 8
WINDOW = 8
NUM_NEW_TOKENS = 12
OPTIONS = {"max_new_tokens": NUM_NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}


def make_prompt(target, length=20, seed=0):
    return make_inputs(target, length, seed)["input_ids"]


def generate_plain(target, input_ids, **options):
    """The target's own output for the whole of `input_ids`."""
    return target.generate(input_ids, attention_mask=torch.ones_like(input_ids), **{**OPTIONS, **options})


def make_replay_for(target, input_ids, num_right, **overrides):
    """A drafter that is right `num_right` times a round after `input_ids`."""
    drafter = make_replay_drafter(make_drafter(target, **{"num_draft_tokens": 5, **overrides}), num_right)
    drafter.replay(target, generate_plain(target, input_ids).sequences)
    return drafter


def generate_turn(target, input_ids, num_right, **options):
    """A drafted turn, and what its drafter did; with `num_right="plain"` a plain turn."""
    if num_right == "plain":
        return generate_plain(target, input_ids, **options)
    drafter = make_replay_for(target, input_ids, num_right)
    options = {"attention_mask": torch.ones_like(input_ids), **OPTIONS, **options}
    output, statistics = generate_with_statistics(target, drafter, input_ids=input_ids, **options)
    accepted, drafted = sum(statistics.accepted_per_position), statistics.num_drafted_tokens
    assert accepted == drafted > 0 if num_right is None else 0 < accepted < drafted
    assert max(drafter.errors) < 1e-3
    return output


def check_cache(cache, length):
    """As plain generation leaves it: `length` tokens, sliding layers within their window, no past recorded."""
    assert cache.get_seq_length() == length
    for layer in cache.layers:
        assert layer.get_seq_length() == length
        assert layer.is_sliding or layer.keys.shape[-2] == length
        assert not layer.is_sliding or layer.keys.shape[-2] == min(length, WINDOW - 1)
        assert not getattr(layer, "record_past", False)


def our_hooks(target):
    """Hooks on the target's modules, Transformers' own inert ones for `output_hidden_states` left out."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for module in target.modules() for kind in kinds for hook in getattr(module, kind).values()]
    return [hook for hook in hooks if hook.__module__ != "transformers.utils.output_capturing"]


def configs(target, drafter):
    return [target.config.to_dict(), target.generation_config.to_dict(), drafter.config.to_dict()]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "turns",
    [(None, None, None), (2, 2, 2), (2, "plain", 2), ("plain", 2, "plain")],
    ids=["oracle", "2_right", "drafted_plain_drafted", "plain_drafted_plain"],
)
def test_turns_on_one_cache(architecture, turns):
    target = make_target(architecture)
    sequences, cache = torch.zeros(1, 0, dtype=torch.long), None
    for seed, num_right in enumerate(turns):
        input_ids = torch.cat([sequences, make_prompt(target, (20, 3, 11)[seed], seed)], dim=1)
        output = generate_turn(target, input_ids, num_right, cache=cache)
        assert cache is None or output.cache is cache
        sequences, cache = output.sequences, output.cache
        assert torch.equal(sequences, generate_plain(target, input_ids).sequences)
        check_cache(cache, sequences.shape[1] - 1)


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_a_turn_of_new_tokens_alone(architecture):
    # With the mask of the whole conversation, `generate` takes the new tokens without the old ones.
    target = make_target(architecture)
    first = generate_turn(target, make_prompt(target), num_right=2)
    input_ids = torch.cat([first.sequences, make_prompt(target, 4, seed=1)], dim=1)
    plain = generate_plain(target, input_ids).sequences
    new_ids = input_ids[:, first.cache.get_seq_length() :]
    drafter = make_replay_for(target, input_ids, num_right=2)
    options = {"attention_mask": torch.ones_like(input_ids), "cache": first.cache, **OPTIONS}
    output, statistics = generate_with_statistics(target, drafter, input_ids=new_ids, **options)
    assert torch.equal(output.sequences[:, new_ids.shape[1] :], plain[:, input_ids.shape[1] :])
    check_cache(output.cache, plain.shape[1] - 1)
    assert 0 < sum(statistics.accepted_per_position) < statistics.num_drafted_tokens


@pytest.mark.parametrize("num_right", [None, 2])
def test_turns_on_a_static_cache(num_right):
    target = make_target("llama")
    cache = StaticCache(config=target.config, max_cache_len=80)
    sequences = torch.zeros(1, 0, dtype=torch.long)
    for seed in range(2):
        input_ids = torch.cat([sequences, make_prompt(target, 10, seed)], dim=1)
        output = generate_turn(target, input_ids, num_right, cache=cache)
        assert output.cache is cache
        sequences = output.sequences
        assert torch.equal(sequences, generate_plain(target, input_ids).sequences)
        assert int(cache.get_seq_length()) == sequences.shape[1] - 1


def test_a_cache_that_records_its_past_goes_on_doing_so():
    target = make_target("mistral")
    cache = DynamicCache(config=target.config)
    cache.activate_past_recording()
    generate_turn(target, make_prompt(target), num_right=2, cache=cache)
    assert all(layer.record_past for layer in cache.layers)


def test_prompts_alternate():
    target = make_target("llama")
    prompts = [make_prompt(target, 9), make_prompt(target, 14, seed=1)]
    plain = [generate_plain(target, prompt).sequences for prompt in prompts]
    assert not torch.equal(plain[0][:, -NUM_NEW_TOKENS:], plain[1][:, -NUM_NEW_TOKENS:])
    drafter = make_drafter(target)
    before = configs(target, drafter)
    for i in (0, 1, 0, 1):
        assert torch.equal(generate_turn(target, prompts[i], num_right=2).sequences, plain[i])
        assert torch.equal(target.generate(prompts[i], assistant_model=drafter, **OPTIONS).sequences, plain[i])
        assert not our_hooks(target)
    assert configs(target, drafter) == before


def test_two_drafters_on_one_target():
    target = make_target("llama")
    prompt = make_prompt(target)
    plain = generate_plain(target, prompt).sequences
    small = make_replay_for(target, prompt, 1, num_draft_tokens=2, target_layer_ids=[1, 4])
    large = make_replay_for(target, prompt, 3, num_draft_tokens=7, target_layer_ids=[0, 2, 3], anchor_group_size=2)
    for drafter in (small, large, small):
        drafter.pivots.clear()
        output, statistics = generate_with_statistics(target, drafter, input_ids=prompt, **OPTIONS)
        assert torch.equal(output.sequences, plain)
        assert 0 < sum(statistics.accepted_per_position) < statistics.num_drafted_tokens
        assert max(drafter.errors) < 1e-3
    assert not our_hooks(target)


@torch.no_grad()
def test_the_target_alone_is_as_before():
    target = make_target("gemma3")
    prompt = make_prompt(target)
    # `output_hidden_states` installs Transformers' own hooks for good: they are there on both sides.
    options = {**OPTIONS, "output_scores": True, "output_hidden_states": True}
    before, modules = target.generate(prompt, **options), dict(target.named_modules())
    generate_turn(target, prompt, num_right=2)
    after = target.generate(prompt, **options)
    assert torch.equal(after.sequences, before.sequences)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(after.scores, before.scores, strict=True))
    assert torch.equal(after.hidden_states[-1][3], before.hidden_states[-1][3])
    assert dict(target.named_modules()) == modules and "_get_candidate_generator" not in vars(target)
    assert not our_hooks(target)


class RaisingProcessor(LogitsProcessor):
    """Raises at its fifth token."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        if self.num_calls == 5:
            raise KeyError("fifth token")
        return scores


class RaisingStreamer(BaseStreamer):
    """Raises at its fifth token."""

    def __init__(self):
        self.num_puts = -1  # the prompt comes first

    def put(self, value):
        self.num_puts += 1
        if self.num_puts == 5:
            raise KeyError("fifth token")

    def end(self):
        raise AssertionError("the call did not end")


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@pytest.mark.parametrize("culprit", ["processor", "streamer"])
@pytest.mark.parametrize("num_right", [None, 2], ids=["oracle", "2_right"])
def test_an_exception_leaves_no_trace(architecture, culprit, num_right):
    target = make_target(architecture)
    prompt = make_prompt(target)
    plain = generate_plain(target, prompt).sequences
    drafter = make_replay_for(target, prompt, num_right)
    before = configs(target, drafter)
    cache = DynamicCache(config=target.config)
    options = {"attention_mask": torch.ones_like(prompt), "cache": cache, **OPTIONS}
    if culprit == "processor":
        options["logits_processor"] = LogitsProcessorList([RaisingProcessor()])
    else:
        options["streamer"] = RaisingStreamer()
    with pytest.raises(KeyError, match="fifth token"):
        target.generate(prompt, assistant_model=drafter, **options)
    assert not our_hooks(target)
    assert configs(target, drafter) == before
    # Four tokens were emitted; the last of them has not been through the target, and no draft token stayed.
    check_cache(cache, prompt.shape[1] + 4 - 1)
    resumed = generate_turn(target, plain[:, : prompt.shape[1] + 4], num_right, cache=cache, max_new_tokens=8)
    assert torch.equal(resumed.sequences, plain)
    assert torch.equal(generate_turn(target, prompt, num_right).sequences, plain)


def test_an_exception_in_a_forward_leaves_no_hook():
    target = make_target("llama")
    drafter = make_drafter(target)
    before = configs(target, drafter)
    handle = target.model.layers[3].register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.generate(make_prompt(target), assistant_model=drafter, **OPTIONS)
    handle.remove()
    assert not our_hooks(target)
    assert configs(target, drafter) == before


def test_a_drafter_that_raises_leaves_the_cache_clean(monkeypatch):
    target = make_target("mistral")
    prompt = make_prompt(target)
    drafter = make_replay_for(target, prompt, num_right=2)
    draft = drafter.draft
    monkeypatch.setattr(drafter, "draft", lambda *args: 1 / 0 if len(drafter.pivots) == 2 else draft(*args))
    cache = DynamicCache(config=target.config)
    with pytest.raises(ZeroDivisionError):
        target.generate(prompt, assistant_model=drafter, cache=cache, **OPTIONS)
    check_cache(cache, prompt.shape[1] + 1 + 2 * 3 - 1)


class Rendezvous:
    """Holds the first forward of two threads until both have begun, and their ends until both have ended."""

    def __init__(self, target):
        self.barrier = threading.Barrier(2, timeout=60)
        self.seen = threading.local()
        self.handles = [
            target.register_forward_pre_hook(self.begin),
            target.register_forward_hook(self.end),
        ]

    def begin(self, *args):
        self.seen.forwards = getattr(self.seen, "forwards", 0) + 1
        if self.seen.forwards == 1:
            self.barrier.wait()

    def end(self, *args):
        if self.seen.forwards == 1:
            self.barrier.wait()

    def remove(self):
        for handle in self.handles:
            handle.remove()


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_two_threads_on_one_target(architecture):
    target = make_target(architecture)
    prompts = [make_prompt(target, 20), make_prompt(target, 13, seed=1)]
    drafters = [
        make_replay_for(target, prompts[0], 2),
        make_replay_for(target, prompts[1], 3, num_draft_tokens=7, target_layer_ids=[1, 2, 4], anchor_group_size=2),
    ]
    alone = []
    for prompt, drafter in zip(prompts, drafters, strict=True):
        output = target.generate(prompt, assistant_model=drafter, **OPTIONS)
        alone.append((output.sequences, list(drafter.pivots)))
    assert all(torch.equal(alone[i][0], generate_plain(target, prompts[i]).sequences) for i in range(2))
    num_calls = 4
    results: list[list] = [[], []]
    rendezvous = Rendezvous(target)

    def work(i):
        for _ in range(num_calls):
            drafters[i].pivots = []
            output = target.generate(prompts[i], assistant_model=drafters[i], **OPTIONS)
            results[i].append((output.sequences, drafters[i].pivots))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        rendezvous.remove()
    for i in range(2):
        assert len(results[i]) == num_calls
        for sequences, pivots in results[i]:
            assert torch.equal(sequences, alone[i][0])
            assert pivots == alone[i][1]
        assert max(drafters[i].errors) < 1e-3
    assert not our_hooks(target)


def count_objects():
    gc.collect()
    objects = gc.get_objects()
    return sum(issubclass(type(item), torch.Tensor) for item in objects), len(objects)


def test_memory_is_flat_over_fifty_calls():
    target = make_target("mistral")
    drafter, prompt = make_drafter(target), make_prompt(target)
    options = {"max_new_tokens": 4, "do_sample": False}
    for _ in range(3):
        target.generate(prompt, assistant_model=drafter, **options)
    num_tensors, num_objects = count_objects()
    for _ in range(50):
        target.generate(prompt, assistant_model=drafter, **options)
    num_tensors_after, num_objects_after = count_objects()
    assert num_tensors_after == num_tensors
    assert num_objects_after - num_objects < 50, "something stays of every call"
