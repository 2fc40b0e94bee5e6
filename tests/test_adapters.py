# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""PEFT on either side: an adapter on the drafter, a target with an adapter; and a compiled drafter."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from dlite_hf import DLiteForDrafting, speculation_statistics
from dlite_hf.trainer import DLiteTrainer

from .targets import make_inputs
from .test_trainer import make_args, make_samples


OPTIONS = {"max_new_tokens": 24, "do_sample": False}


def make_lora(model, **overrides):
    """An adapter that changes what the model says."""
    config = LoraConfig(r=4, **{"target_modules": ["q_proj", "v_proj"], **overrides})
    model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def train(folder, drafter, target, **overrides):
    args = make_args(folder, max_steps=2, learning_rate=1e-2, **overrides)
    trainer = DLiteTrainer(drafter, target, args, make_samples(), make_samples(2, seed=1))
    trainer.train()
    return trainer


def test_an_adapter_on_the_drafter_trains_alone_and_drafts(tmp_path, tiny_llama, make_drafter):
    drafter = make_drafter(tiny_llama)
    adapted = make_lora(drafter)
    before = {name: parameter.detach().clone() for name, parameter in adapted.named_parameters()}
    trainer = train(tmp_path, adapted, tiny_llama, save_strategy="steps", save_steps=2)
    changed = {name for name, parameter in adapted.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    assert trainer.evaluate()["eval_tau"] >= 1

    inputs = make_inputs(tiny_llama, 9)
    plain = tiny_llama.generate(**inputs, **OPTIONS)
    with speculation_statistics() as statistics:
        assert torch.equal(tiny_llama.generate(**inputs, **OPTIONS, assistant_model=adapted), plain)
    assert statistics.num_drafted_tokens > 0

    # The checkpoint holds the adapter alone, and fits on the drafter again.
    folder = tmp_path / "checkpoint-2"
    assert (folder / "adapter_model.safetensors").exists() and not (folder / "model.safetensors").exists()
    reloaded = PeftModel.from_pretrained(make_drafter(tiny_llama), folder).merge_and_unload()
    assert isinstance(reloaded, DLiteForDrafting)
    merged = adapted.merge_and_unload()
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(reloaded.state_dict()[name], value)


def test_an_adapter_changes_what_is_drafted(tiny_llama, make_drafter):
    """`assistant_model=` takes the PEFT model itself: what drafts has the adapter."""
    drafts, inputs = [], make_inputs(tiny_llama, 9)
    for with_adapter in (False, True):
        drafter = make_drafter(tiny_llama)
        model = make_lora(drafter, target_modules=["state_hidden_mlp", "o_proj"]) if with_adapter else drafter
        seen, draft = [], drafter.draft

        def spy(*args, _draft=draft, _seen=seen, **kwargs):
            ids, logits = _draft(*args, **kwargs)
            _seen.append(ids.tolist())
            return ids, logits

        drafter.draft = spy
        tiny_llama.generate(**inputs, **OPTIONS, assistant_model=model)
        drafts.append(seen[0])
    assert drafts[0] != drafts[1]


def test_the_vocabulary_projection_takes_no_adapter(tmp_path, tiny_llama, make_drafter):
    adapted = make_lora(make_drafter(tiny_llama), target_modules=["q_proj", "output_proj"])
    with pytest.raises(TypeError, match="`output_proj`.*`modules_to_save`"):
        train(tmp_path, adapted, tiny_llama)
    drafter = make_drafter(tiny_llama)
    whole = make_lora(drafter, target_modules=["q_proj"], modules_to_save=["output_proj"])
    before = drafter.sequential_head.output_proj.weight.detach().clone()
    train(tmp_path, whole, tiny_llama)
    assert not torch.equal(drafter.sequential_head.output_proj.weight, before)


def test_a_target_with_an_adapter_trains_and_generates(tmp_path, tiny_llama, make_drafter):
    drafter, inputs = make_drafter(tiny_llama), make_inputs(tiny_llama, 9)
    without = tiny_llama.generate(**inputs, **OPTIONS)
    target = make_lora(tiny_llama)
    plain = target.generate(**inputs, **OPTIONS)
    assert not torch.equal(plain, without)
    before = {name: parameter.detach().clone() for name, parameter in target.named_parameters()}
    requires_grad = [parameter.requires_grad for parameter in target.parameters()]
    assert train(tmp_path, drafter, target).evaluate()["eval_tau"] >= 1
    assert torch.equal(target.generate(**inputs, **OPTIONS, assistant_model=drafter), plain)
    assert all(torch.equal(parameter, before[name]) for name, parameter in target.named_parameters())
    assert [parameter.requires_grad for parameter in target.parameters()] == requires_grad


def test_a_compiled_drafter_trains_as_an_eager_one(tmp_path, tiny_llama, make_drafter):
    losses = []
    for overrides in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        trainer = train(tmp_path, make_drafter(tiny_llama), tiny_llama, **overrides)
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
