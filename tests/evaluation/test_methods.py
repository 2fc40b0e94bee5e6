# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What a name or a folder becomes, and what is refused before anything runs."""

import json

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MuseGlimmerAssistantConfig,
    WatermarkingConfig,
)
from transformers import MuseGlimmerAssistantModel as DFlashModel

from dlite_hf.evaluation.methods import ignored_settings, make_methods, neutral_generation_config

from ..targets import SIZES, make_drafter, make_target


@pytest.fixture(scope="module")
def target():
    return make_target("llama")


def make_dflash(**overrides):
    """A random DFlash drafter of Transformers, for a target of the sizes in `tests/targets.py`."""
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")} | {
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "block_size": 5,
        "mask_token_id": 96,
    }
    torch.manual_seed(3)
    return DFlashModel(MuseGlimmerAssistantConfig(**{**sizes, "target_layer_ids": [0, 2, 3], **overrides})).eval()


def make_assistant(**overrides):
    torch.manual_seed(4)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 1, **overrides})).eval()


def test_stock_methods_with_plain_first(target):
    methods = make_methods(target, ["prompt_lookup", "prompt_lookup=3", "early_exit=2", "plain"])
    assert [method.name for method in methods] == ["plain", "prompt_lookup", "prompt_lookup=3", "early_exit=2"]
    assert [method.generate_kwargs() for method in methods] == [
        {},
        {"prompt_lookup_num_tokens": 10},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 2},
    ]
    assert [method.num_draft_tokens for method in methods] == [None, 10, 3, 20]
    assert [method.keeps_cache for method in methods] == [True, False, False, False]
    assert target.config.num_hidden_layers == SIZES["num_hidden_layers"]
    assert not any(layer._forward_hooks for layer in target.model.layers)


def test_a_dlite_drafter(target, tmp_path):
    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path / "drafter")
    method = make_methods(target, ["plain"], [f"{tmp_path}/drafter/"])[1]
    assert (method.name, method.kind, method.checkpoint, method.keeps_cache) == ("drafter", "dlite", "drafter", True)
    assert method.parameters == sum(each.numel() for each in drafter.parameters())
    assert method.num_draft_tokens == drafter.config.num_draft_tokens
    assert method.generate_kwargs() == {"assistant_model": method.assistant}
    json.dumps(method.describe())
    # Another drafter in a folder of the same name is not the same method.
    with torch.no_grad():
        drafter.norm.weight[0] += 1
    drafter.save_pretrained(tmp_path / "other" / "drafter")
    other = make_methods(target, ["plain"], [f"drafter={tmp_path}/other/drafter"])[1]
    assert {**other.describe(), "sha256": method.sha256} == method.describe() != other.describe()


def test_confidence_thresholds_are_methods_of_dlite_drafters(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path / "dlite")
    make_assistant().save_pretrained(tmp_path / "small")
    folders = [f"{tmp_path}/dlite", f"{tmp_path}/small"]
    methods = make_methods(target, ["plain"], folders, confidence_thresholds=[0.1, 0.3])
    names = ["plain", "dlite", "small", "dlite, confidence 0.1", "dlite, confidence 0.3"]
    assert [method.name for method in methods] == names
    assert [method.settings for method in methods[1:]] == [
        {},
        {},
        {"assistant_confidence_threshold": 0.1},
        {"assistant_confidence_threshold": 0.3},
    ]
    assert methods[3].assistant is methods[4].assistant is methods[1].assistant


@pytest.mark.parametrize("threshold", [0.0, 0.4, 1.0, -1.0])
def test_refused_thresholds(target, threshold):
    with pytest.raises(ValueError, match=f"A confidence threshold is {threshold}, but must lie between 0 and 1"):
        make_methods(target, ["plain"], confidence_thresholds=[threshold])


def test_thresholds_that_serve_nothing(target, tmp_path):
    with pytest.raises(ValueError, match=r"\[0.1, 0.2, 0.1\] repeat one"):
        make_methods(target, ["plain"], confidence_thresholds=[0.1, 0.2, 0.1])
    make_assistant().save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match=r"\[0.1\] are for DLite drafters, but there is none"):
        make_methods(target, ["plain"], [f"{tmp_path}/small"], confidence_thresholds=[0.1])


def test_a_dflash_drafter_and_an_assistant(target, tmp_path):
    make_dflash().save_pretrained(tmp_path / "dflash")
    assistant = make_assistant()
    assistant.generation_config.update(num_assistant_tokens=3, repetition_penalty=2.0, do_sample=True)
    assistant.save_pretrained(tmp_path / "small")
    _, dflash, small = make_methods(target, ["plain"], [f"d={tmp_path}/dflash", f"{tmp_path}/small"])
    assert (dflash.kind, dflash.settings, dflash.num_draft_tokens) == ("dflash", {"speculation_type": "dflash"}, 4)
    assert (small.kind, small.settings, small.num_draft_tokens) == ("assistant", {}, 3)
    assert "Drafts 3 tokens at first (schedule constant)" in small.note
    # How many tokens it drafts is its own; how it samples is the call's.
    config = small.assistant.generation_config
    assert (config.num_assistant_tokens, config.repetition_penalty, config.do_sample) == (3, None, None)
    for method in (dflash, small):
        assert method.assistant.dtype == target.dtype and not method.assistant.training and not method.keeps_cache


def test_mtp_where_the_target_has_it(target):
    with pytest.raises(ValueError, match="LlamaForCausalLM has no layers for 'mtp'"):
        make_methods(target, ["plain", "mtp"])
    other = make_target("llama")
    other.config.num_mtp_layers = 2
    method = make_methods(other, ["plain", "mtp"])[1]
    assert (method.settings, method.num_draft_tokens, method.parameters) == ({"use_mtp": True}, 2, None)


def test_a_target_that_cannot_exit_early():
    target = make_target("gpt2")
    with pytest.raises(ValueError, match="GPT2LMHeadModel cannot exit early: told to run 2 layers, it ran 5"):
        make_methods(target, ["plain", "early_exit=2"])
    assert target.config.num_hidden_layers == 5 and not any(block._forward_hooks for block in target.transformer.h)


@pytest.mark.parametrize(
    ("stock", "drafters", "message"),
    [
        (["prompt_lookup"], [], "compared with 'plain'"),
        (["plain", "plain"], [], "More than one method is called 'plain'"),
        (["plain"], ["a=x", "y/a"], "More than one method is called 'a'"),
        (["plain", "lookahead"], [], "no method 'lookahead'; choose from plain, prompt_lookup"),
        (["plain", "prompt_lookup=0"], [], "gives 'prompt_lookup' no number of tokens"),
        (["plain", "prompt_lookup="], [], "gives 'prompt_lookup' no number of tokens"),
        (["plain", "mtp=2"], [], "gives 'mtp' a value, which it does not take"),
        (["plain", "lookahead=2"], [], "no method 'lookahead=2'"),
        (["plain", "early_exit"], [], "needs a layer from 1 to 4, as early_exit=LAYER; got ''"),
        (["plain", "early_exit=5"], [], "needs a layer from 1 to 4"),
        (["plain"], ["name="], "'name=' is no drafter; write name=folder"),
    ],
)
def test_refused_names(target, stock, drafters, message):
    with pytest.raises(ValueError, match=message):
        make_methods(target, stock, drafters)


def test_refused_checkpoints(target, tmp_path):
    def refuse(message):
        with pytest.raises(ValueError, match=message):
            make_methods(target, ["plain"], [f"x={tmp_path}"])

    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    refuse("'x' has the `model_type` 'vit', which is neither DLite")
    make_assistant(vocab_size=98).save_pretrained(tmp_path)
    refuse("'x' has a vocabulary of 98 tokens, but LlamaForCausalLM one of 97")
    make_dflash(hidden_size=64).save_pretrained(tmp_path)
    refuse("'x' has the hidden size 64, but LlamaForCausalLM has 32")
    make_dflash(target_layer_ids=[0, 5]).save_pretrained(tmp_path)
    refuse(r"'x' reads the layers \[0, 5\], but LlamaForCausalLM has 5")
    make_drafter(make_target("gpt2"), num_target_layers=6).save_pretrained(tmp_path)
    refuse("made for a target with layers 6")


def test_a_missing_folder(target, tmp_path):
    with pytest.raises(OSError, match="nothing"):
        make_methods(target, ["plain"], [f"x={tmp_path}/nothing"])


def test_neutral_generation_config():
    config = GenerationConfig(
        eos_token_id=[3, 4], repetition_penalty=1.1, top_k=20, speculation_type="dflash", use_cache=True
    )
    neutral = neutral_generation_config(config)
    assert neutral.to_diff_dict().keys() - {"transformers_version"} == {"eos_token_id", "pad_token_id"}
    assert (neutral.eos_token_id, neutral.pad_token_id) == ([3, 4], 3)
    assert ignored_settings(config) == {"repetition_penalty": 1.1, "top_k": 20, "speculation_type": "dflash"}
    assert neutral_generation_config(GenerationConfig(eos_token_id=3, pad_token_id=0)).pad_token_id == 0


def test_a_folder_may_have_an_equals_sign(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path / "lr=3e-4" / "drafter")
    method = make_methods(target, ["plain"], [f"{tmp_path}/lr=3e-4/drafter"])[1]
    assert (method.name, method.checkpoint) == ("drafter", "drafter")
    assert make_methods(target, ["plain"], [f"mine={tmp_path}/lr=3e-4/drafter"])[1].name == "mine"


def test_objects_of_a_generation_config_are_told_as_json():
    ignored = ignored_settings(GenerationConfig(watermarking_config=WatermarkingConfig(bias=3.0)))
    assert json.loads(json.dumps(ignored)) == ignored and ignored["watermarking_config"]["bias"] == 3.0


def test_no_end_of_sequence():
    assert neutral_generation_config(GenerationConfig(eos_token_id=[])).pad_token_id is None
