# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The two wrappers: what they count on in Transformers, what they change, and what goes on as before."""

import functools
import inspect
import subprocess
import sys

import pytest
import torch
from transformers import GenerationMixin

from dlite_hf import DLiteCandidateGenerator
from dlite_hf.generation import integration

from ..replay import make_replay_drafter
from ..targets import make_drafter, make_inputs, make_target


WRAPPED = ("_validate_generation_mode", "_assisted_decoding")


def originals():
    """The wrapped methods as Transformers has them."""
    methods = {}
    for name in WRAPPED:
        method = getattr(GenerationMixin, name)
        while hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        methods[name] = method
    return methods


@pytest.fixture(autouse=True)
def installed_once():
    """Leaves the wrappers as they were, whatever a test installs."""
    methods = {name: getattr(GenerationMixin, name) for name in WRAPPED}
    yield
    for name, method in methods.items():
        setattr(GenerationMixin, name, method)


@pytest.fixture
def target():
    return make_target("llama")


@pytest.mark.parametrize("name", integration.PRIVATE_METHODS)
def test_private_methods_have_exactly_these_parameters(name):
    signature = inspect.signature(getattr(GenerationMixin, name))
    assert tuple(signature.parameters) == integration.PRIVATE_METHODS[name]


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_show_the_originals_signature(name):
    original = originals()[name]
    method = getattr(GenerationMixin, name)
    assert method is not original
    assert inspect.signature(method) == inspect.signature(original)
    assert (method.__name__, method.__doc__) == (original.__name__, original.__doc__)


def test_inputs_tensor_is_visible_to_generate():
    # `generate` looks for it to hand an encoder-decoder's inputs to its assistant.
    assert "inputs_tensor" in inspect.signature(GenerationMixin._assisted_decoding).parameters


@pytest.mark.parametrize("way", ["small_model", "prompt_lookup"])
def test_other_ways_to_draft_go_on_as_before(target, monkeypatch, way):
    small_model = make_target("llama", seed=1)
    options = {"assistant_model": small_model} if way == "small_model" else {"prompt_lookup_num_tokens": 3}
    options |= make_inputs(target, 9) | {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_scores": True}
    calls = []
    with monkeypatch.context() as patch:
        for name, original in originals().items():
            patch.setattr(GenerationMixin, name, original)
        before = target.generate(**options)
        for name, original in originals().items():

            def spy(self, *args, _original=original, **kwargs):
                if self is target:  # a small model generates too
                    calls.append((_original.__name__, kwargs))
                return _original(self, *args, **kwargs)

            patch.setattr(GenerationMixin, name, functools.wraps(original)(spy))
        integration.install()
        after = target.generate(**options)
    assert torch.equal(after.sequences, before.sequences)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(after.scores, before.scores, strict=True))
    assert [name for name, _ in calls] == list(WRAPPED)
    assert calls[1][1]["assistant_model"] is options.get("assistant_model")


def test_plain_generation_never_enters_our_loop(target, monkeypatch):
    monkeypatch.setattr(integration, "_check_call", None)
    monkeypatch.setattr(integration, "_decode_with_drafter", None)
    assert target.generate(**make_inputs(target, 4), max_new_tokens=3).shape == (1, 7)


def test_a_dlite_drafter_never_enters_the_stock_loop(target, monkeypatch):
    inputs = make_inputs(target, 6)
    plain = target.generate(**inputs, max_new_tokens=12)
    drafter = make_replay_drafter(make_drafter(target), num_right=2)
    drafter.replay(target, plain)
    original = originals()["_assisted_decoding"]

    @functools.wraps(original)
    def refuse(*args, **kwargs):
        raise AssertionError("the stock loop ran")

    monkeypatch.setattr(GenerationMixin, "_validate_generation_mode", originals()["_validate_generation_mode"])
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", refuse)
    integration.install()
    assert torch.equal(target.generate(**inputs, max_new_tokens=12, assistant_model=drafter), plain)


@pytest.mark.parametrize("name", integration.PRIVATE_METHODS)
@pytest.mark.parametrize("change", ["missing", "lacks_a_parameter"])
def test_an_unknown_transformers_is_refused_at_import(monkeypatch, name, change):
    if change == "missing":
        monkeypatch.delattr(GenerationMixin, name)
    else:
        monkeypatch.setattr(GenerationMixin, name, lambda: None)
    before = dict(vars(GenerationMixin))
    with pytest.raises(ImportError, match=rf"dlite-hf needs transformers>=5\.24, but `GenerationMixin\.{name}`"):
        integration.install()
    assert dict(vars(GenerationMixin)) == before


def test_import_changes_two_attributes():
    code = """
import transformers
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import candidate_generator, utils
classes = (GenerationMixin, PreTrainedModel)
modules = (utils, candidate_generator)
before = [dict(vars(owner)) for owner in classes + modules]
import dlite_hf
missing = object()
for owner, old in zip(classes + modules, before):
    new = dict(vars(owner))
    for name in sorted(set(old) | set(new)):
        if old.get(name, missing) is not new.get(name, missing):
            print(owner.__name__, name)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    changed = ["GenerationMixin _assisted_decoding", "GenerationMixin _validate_generation_mode"]
    assert result.stdout.splitlines() == changed


def test_a_prefill_keeps_one_row_for_drafting(target, monkeypatch):
    get_candidates = DLiteCandidateGenerator.get_candidates
    kept = []

    def spy(self, input_ids, model_outputs, **kwargs):
        kept.append([states for states in model_outputs.hidden_states if states is not None])
        return get_candidates(self, input_ids, model_outputs=model_outputs, **kwargs)

    monkeypatch.setattr(DLiteCandidateGenerator, "get_candidates", spy)
    target.generate(**make_inputs(target, 40), assistant_model=make_drafter(target), max_new_tokens=4)
    assert [states.shape for states in kept[0]] == [(1, 1, 32)] * 3
    assert [states.untyped_storage().nbytes() for states in kept[0]] == [32 * 4] * 3
