# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Reading the target: the rows kept of its hidden states, whose they are, and whether a drafter fits (4, 7, 12)."""

import threading

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM
from transformers.utils.logging import warning_once

from dlite_hf import DLiteForDrafting
from dlite_hf.target import capture_hidden_states, check_compatible, embed_tokens, gather_features, text_decoder

from .targets import ARCHITECTURES, make_drafter, make_inputs, make_target


def num_hooks(target):
    """Forward hooks on all modules."""
    return sum(len(module._forward_hooks) for module in target.modules())


@pytest.fixture
def target():
    return make_target("llama")


@torch.no_grad()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_are_those_of_hidden_states(architecture):
    target = make_target(architecture)
    inputs = make_inputs(target, 9)
    num_layers = target.config.get_text_config().num_hidden_layers
    layer_ids = [0, 2, num_layers - 1]
    with capture_hidden_states(target, layer_ids, num_rows=3) as capture:
        target(**inputs)
    expected = target(**inputs, output_hidden_states=True).hidden_states
    assert [i for i, rows in enumerate(capture.hidden_states) if rows is not None] == [i + 1 for i in layer_ids]
    for i in layer_ids:
        torch.testing.assert_close(capture.hidden_states[i + 1], expected[i + 1][:, -3:], rtol=0, atol=0)


@torch.no_grad()
def test_last_layer_is_read_after_the_final_norm(target):
    inputs = make_inputs(target, 6)
    with capture_hidden_states(target, [3, 4], num_rows=1) as capture:
        logits = target(**inputs).logits
    torch.testing.assert_close(target.lm_head(capture.hidden_states[5]), logits[:, -1:])
    before_norm = target.model.layers[4](
        target(**inputs, output_hidden_states=True).hidden_states[4],
        position_embeddings=target.model.rotary_emb(capture.hidden_states[4], torch.arange(6)[None]),
    )
    assert (capture.hidden_states[5] - before_norm[:, -1:]).abs().max() > 0.1


@torch.no_grad()
def test_only_the_rows_stay_in_memory(target):
    inputs = make_inputs(target, 50)
    with capture_hidden_states(target, [0, 4], num_rows=2) as capture:
        target(**inputs)
    for rows in (capture.hidden_states[1], capture.hidden_states[5]):
        assert rows.shape == (1, 2, 32)
        assert rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()


@torch.no_grad()
def test_all_rows_are_kept_on_demand(target):
    inputs = make_inputs(target, 50)
    with capture_hidden_states(target, [0, 4], num_rows=None) as capture:
        target(**inputs)
    expected = target(**inputs, output_hidden_states=True).hidden_states
    assert torch.equal(capture.hidden_states[1], expected[1]) and torch.equal(capture.hidden_states[5], expected[5])


@torch.no_grad()
def test_the_last_chunk_stays(target):
    first, second = make_inputs(target, 7)["input_ids"], make_inputs(target, 4, seed=1)["input_ids"]
    with capture_hidden_states(target, [1, 4], num_rows=2) as capture:
        cache = target(input_ids=first).cache
        target(input_ids=second, cache=cache)
    expected = target(input_ids=torch.cat([first, second], dim=1), output_hidden_states=True).hidden_states
    for i in (1, 4):
        torch.testing.assert_close(capture.hidden_states[i + 1], expected[i + 1][:, -2:], rtol=1e-4, atol=1e-3)


def test_hooks_end_with_the_block(target):
    before = num_hooks(target)
    with capture_hidden_states(target, [0, 2, 4], num_rows=1):
        assert num_hooks(target) == before + 3
    assert num_hooks(target) == before


@torch.no_grad()
def test_hooks_end_with_an_exception(target):
    before = num_hooks(target)
    with pytest.raises(KeyError, match="ours"), capture_hidden_states(target, [0, 2, 4], num_rows=1):
        raise KeyError("ours")
    assert num_hooks(target) == before
    with capture_hidden_states(target, [4], num_rows=1) as capture:  # and the next capture is not shut out
        target(**make_inputs(target, 3))
    assert capture.hidden_states[5] is not None


def test_a_bad_layer_leaves_no_hook(target):
    before = num_hooks(target)
    with pytest.raises(IndexError), capture_hidden_states(target, [0, 9], num_rows=1):
        pass
    assert num_hooks(target) == before


@torch.no_grad()
def test_another_threads_forward_is_not_captured(target):
    with capture_hidden_states(target, [0, 4], num_rows=1) as capture:
        thread = threading.Thread(target=lambda: target(**make_inputs(target, 5)))
        thread.start()
        thread.join()
        assert capture.hidden_states == (None,) * 6
        target(**make_inputs(target, 5))
        assert capture.hidden_states[5] is not None


@torch.no_grad()
def test_an_inner_captures_forward_is_not_captured(target):
    with capture_hidden_states(target, [0, 4], num_rows=1) as outer:
        with capture_hidden_states(target, [2], num_rows=1) as inner:
            target(**make_inputs(target, 5))
        assert outer.hidden_states == (None,) * 6
        assert inner.hidden_states[3] is not None
        target(**make_inputs(target, 5))
    assert outer.hidden_states[5] is not None


def test_gather_features_stacks_the_layers_asked_for():
    states = tuple(torch.full((2, 3, 4), float(i)) + torch.arange(3)[:, None] / 10 for i in range(6))
    features = gather_features(states, [0, 3], slice(1, 3))
    assert features.shape == (2, 2, 2, 4)
    torch.testing.assert_close(features[0, :, :, 0], torch.tensor([[1.1, 4.1], [1.2, 4.2]]))
    rows = torch.tensor([2, 0])
    torch.testing.assert_close(gather_features(states, [4], rows)[1, :, 0, 3], torch.tensor([5.2, 5.0]))


@pytest.mark.parametrize("hidden_states", [None, (), (None, torch.zeros(1, 1, 4), None)])
def test_gather_features_of_a_missing_layer_is_none(hidden_states):
    assert gather_features(hidden_states, [0, 1], slice(-1, None)) is None


def test_embed_tokens_are_the_targets_rows(target):
    embeds = embed_tokens(target, torch.tensor([[3, 96]]))
    assert torch.equal(embeds, target.model.embed_tokens.weight[[3, 96]][None])
    assert not embeds.requires_grad


def test_a_decoder_without_a_list_of_layers_is_refused():
    target = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2))
    assert len(text_decoder(target)[1]) == 2
    target.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="MambaModel has 0 lists of 3 layers"):
        text_decoder(target)


def test_two_lists_of_layers_are_refused(target):
    target.model.twins = torch.nn.ModuleList(torch.nn.Identity() for _ in range(5))
    with pytest.raises(ValueError, match="LlamaModel has 2 lists of 5 layers"):
        text_decoder(target)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("num_target_layers", 6, "layers 6, but LlamaForCausalLM has 5"),
        ("hidden_size", 48, "hidden size 48, but LlamaForCausalLM has 32"),
        ("vocab_size", 98, "vocabulary size 98, but LlamaForCausalLM has 97"),
    ],
)
def test_a_drafter_of_another_target_is_refused_before_any_forward(target, name, value, message):
    config = make_drafter(target).config
    setattr(config, name, value)
    drafter = DLiteForDrafting(config)
    forwards = []
    target.register_forward_pre_hook(lambda *args: forwards.append(1))
    target.model.embed_tokens.register_forward_pre_hook(lambda *args: forwards.append(1))
    with pytest.raises(ValueError, match=message):
        target.generate(**make_inputs(target, 4), assistant_model=drafter, max_new_tokens=4)
    assert not forwards


def test_the_same_shapes_under_another_name_warn_once(target, caplog):
    warning_once.cache_clear()
    drafter = make_drafter(target)
    drafter.config.target_name_or_path, target.config.name_or_path = "maker/model-a", "other/model-b"
    for _ in range(2):
        target.generate(**make_inputs(target, 4), assistant_model=drafter, max_new_tokens=3)
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("dlite_hf")]
    assert len(warnings) == 1 and "maker/model-a" in warnings[0] and "other/model-b" in warnings[0]


@pytest.mark.parametrize("trained_for, name", [("maker/model-a", "folder/model-a"), (None, "x/y"), ("x/y", "")])
def test_a_copy_or_an_unnamed_target_does_not_warn(target, caplog, trained_for, name):
    warning_once.cache_clear()
    config = make_drafter(target).config
    config.target_name_or_path, target.config.name_or_path = trained_for, name
    check_compatible(target, config)
    assert not caplog.records


def test_a_decoder_inside_a_model_is_found(target):
    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = target.model

    around = Around()
    target.get_decoder = lambda: around
    decoder, layers = text_decoder(target)
    assert decoder is target.model and layers is target.model.layers


def test_layers_of_other_shapes_are_refused():
    states = (None, torch.zeros(1, 3, 4), torch.zeros(2, 1, 3, 4))
    with pytest.raises(ValueError, match=r"\(1, 3, 4\), \(2, 1, 3, 4\)"):
        gather_features(states, [0, 1], slice(-1, None))


@pytest.mark.parametrize(
    "name", ["org/made-for", "/folder/made-for", "/cache/models--org--made-for/snapshots/0123abcd", ".", ""]
)
def test_the_same_name_elsewhere_brings_no_warning(target, name, caplog):
    warning_once.cache_clear()
    drafter = make_drafter(target)
    drafter.config.target_name_or_path = "org/made-for"
    target.config.name_or_path = name
    check_compatible(target, drafter.config)
    assert not caplog.records
    target.config.name_or_path = "org/another"
    check_compatible(target, drafter.config)
    assert len(caplog.records) == 1
