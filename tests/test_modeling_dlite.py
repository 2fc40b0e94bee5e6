# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from dlite_hf import DLiteForDrafting
from dlite_hf.target import embed_tokens


def make_inputs(target, drafter, batch_size=6, num_tokens=None):
    config = drafter.config
    num_tokens = config.anchor_group_size if num_tokens is None else num_tokens
    generator = torch.Generator().manual_seed(0)
    previous_token_ids = torch.randint(config.vocab_size, (batch_size, num_tokens), generator=generator)
    placeholders = torch.full((batch_size, config.num_draft_tokens), config.mask_token_id)
    shape = (batch_size, len(config.target_layer_ids), config.hidden_size)
    return {
        "context_features": torch.randn(shape, generator=generator).to(drafter.dtype),
        "inputs_embeds": embed_tokens(target, torch.cat([previous_token_ids, placeholders], dim=1)).to(drafter.dtype),
        "previous_token_ids": previous_token_ids,
    }


def untied_and_tied(tiny_llama):
    config = type(tiny_llama.config).from_dict({**tiny_llama.config.to_dict(), "tie_word_embeddings": True})
    tied = LlamaForCausalLM(config)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    return {"untied": tiny_llama, "tied": tied}


def gradients(drafter, inputs, draft_token_ids):
    drafter.zero_grad()
    output = drafter(**inputs, draft_token_ids=draft_token_ids)
    drafter.sequential_head.output_proj(output.head_states).logsumexp(-1).sum().backward()
    return {name: parameter.grad for name, parameter in drafter.named_parameters()}


RELOAD = """
import sys
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel
import dlite_hf

torch.set_num_threads(1)
for folder in sys.argv[1:]:
    assert type(AutoConfig.from_pretrained(folder)) is dlite_hf.DLiteConfig
    drafter, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert type(drafter) is dlite_hf.DLiteForDrafting and not drafter.training
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    drafted, logits = drafter.draft(**load_file(f"{folder}/inputs.safetensors"))
    tensors = {**drafter.state_dict(), **dict(drafter.named_buffers()), "drafted": drafted, "logits": logits}
    save_file(tensors, f"{folder}/reloaded.safetensors")
"""


def test_reload_in_a_fresh_process(tiny_llama, make_drafter, tmp_path):
    make_drafter(tiny_llama, anchor_group_size=2).save_pretrained(tmp_path)
    expected = {}
    for dtype in (torch.float32, torch.bfloat16):
        drafter = DLiteForDrafting.from_pretrained(tmp_path, dtype=dtype)
        inputs = make_inputs(tiny_llama, drafter)
        folder = tmp_path / str(dtype)
        drafter.save_pretrained(folder)
        save_file(inputs, folder / "inputs.safetensors")
        drafted, logits = drafter.draft(**inputs)
        assert len(set(drafted.flatten().tolist())) >= 5 and drafter.dtype == dtype
        buffers = dict(drafter.named_buffers())
        assert "target_layer_ids" in buffers and all(buffer.isfinite().all() for buffer in buffers.values())
        expected[folder] = {**drafter.state_dict(), **buffers, "drafted": drafted, "logits": logits}

    # No Hub, and fresh memory filled with something that is not zero.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "MALLOC_PERTURB_": "165"}
    subprocess.run([sys.executable, "-c", RELOAD, *map(str, expected)], env=environment, check=True)
    for folder, tensors in expected.items():
        reloaded = load_file(folder / "reloaded.safetensors")
        assert reloaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == reloaded[name].dtype and torch.equal(tensor, reloaded[name]), name


@pytest.mark.parametrize("embeddings", ["untied", "tied"])
def test_checkpoint_holds_nothing_of_the_target(embeddings, tiny_llama, make_drafter, tmp_path):
    target = untied_and_tied(tiny_llama)[embeddings]
    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as checkpoint:
        names = set(checkpoint.keys())
    assert names == set(dict(drafter.named_parameters()))
    assert not [name for name in names if "embed_tokens" in name or "lm_head" in name]
    target_storages = {parameter.data_ptr() for parameter in target.parameters()}
    assert not target_storages & {parameter.data_ptr() for parameter in drafter.parameters()}

    inputs = make_inputs(target, drafter)
    drafted, logits = DLiteForDrafting.from_pretrained(tmp_path).draft(**inputs)
    assert torch.equal(drafted, drafter.draft(**inputs)[0]) and torch.equal(logits, drafter.draft(**inputs)[1])


def test_generate_explains_itself(tiny_llama, make_drafter):
    drafter = make_drafter(tiny_llama, target_name_or_path="someone/tiny-llama")
    with pytest.raises(
        TypeError, match=r"target\.generate\(\*\*inputs, assistant_model=drafter\).*someone/tiny-llama"
    ):
        drafter.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4)


def test_gradient_checkpointing(tiny_llama, make_drafter):
    drafter = make_drafter(tiny_llama, anchor_group_size=2).train()
    inputs = make_inputs(tiny_llama, drafter)
    draft_token_ids = torch.randint(97, (6, 5))
    expected = gradients(drafter, inputs, draft_token_ids)

    calls = []
    drafter.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    drafter.activation_checkpointing_enable()
    actual = gradients(drafter, inputs, draft_token_ids)
    assert len(calls) == 2, "the layer was not run again in the backward pass"
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(actual[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def test_attention_implementations_agree(tiny_llama, make_drafter, tmp_path):
    make_drafter(tiny_llama).save_pretrained(tmp_path)
    logits = {}
    for name in ("eager", "sdpa"):
        drafter = DLiteForDrafting.from_pretrained(tmp_path, attn_implementation=name)
        assert drafter.config._attn_implementation == name
        logits[name] = drafter.draft(**make_inputs(tiny_llama, drafter))[1]
    torch.testing.assert_close(logits["eager"], logits["sdpa"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_device_map_and_dtype(dtype, tiny_llama, make_drafter, tmp_path):
    make_drafter(tiny_llama).save_pretrained(tmp_path)
    drafter = DLiteForDrafting.from_pretrained(tmp_path, device_map="cpu", dtype=dtype)
    assert {(parameter.dtype, parameter.device.type) for parameter in drafter.parameters()} == {(dtype, "cpu")}
    drafted, logits = drafter.draft(**make_inputs(tiny_llama, drafter))
    assert logits.dtype == dtype and logits.isfinite().all() and drafted.shape == (6, 5)


def test_sampler(tiny_llama, make_drafter):
    drafter = make_drafter(tiny_llama)
    inputs = make_inputs(tiny_llama, drafter)
    greedy, _ = drafter.draft(**inputs)
    seen, returned = [], []

    def second_best(logits, ids_so_far):
        seen.append((logits, ids_so_far))
        returned.append((logits.topk(2).indices[:, 1], logits / 0.7))
        return returned[-1]

    drafted, logits = drafter.draft(**inputs, sampler=second_best)
    assert torch.equal(drafted, torch.stack([ids for ids, _ in returned], dim=1))
    assert torch.equal(logits, torch.stack([step_logits for _, step_logits in returned], dim=1))
    assert [ids_so_far.shape for _, ids_so_far in seen] == [(6, k) for k in range(5)]
    for k, (_, ids_so_far) in enumerate(seen):
        assert torch.equal(ids_so_far, drafted[:, :k])
    # What was sampled, not the argmax, is what the head reads next.
    forced = drafter(**inputs, draft_token_ids=drafted).head_states
    torch.testing.assert_close(
        torch.stack([step for step, _ in seen], dim=1), drafter.sequential_head.output_proj(forced)
    )
    assert not torch.equal(drafted, greedy)


@pytest.mark.parametrize(("group_size", "num_tokens"), [(1, 1), (2, 2), (2, 1)])
def test_greedy_draft(group_size, num_tokens, tiny_llama, make_drafter):
    drafter = make_drafter(tiny_llama, anchor_group_size=group_size)
    inputs = make_inputs(tiny_llama, drafter, num_tokens=num_tokens)
    drafted, logits = drafter.draft(**inputs)
    assert drafted.shape == (6, 5) and logits.shape == (6, 5, 97)
    assert torch.equal(logits.argmax(dim=-1), drafted)

    sampled, sampled_logits = drafter.draft(**inputs, sampler=lambda logits, _: (logits.argmax(dim=-1), logits))
    assert torch.equal(sampled, drafted) and torch.equal(sampled_logits, logits)

    forced = drafter.sequential_head.output_proj(drafter(**inputs, draft_token_ids=drafted).head_states)
    torch.testing.assert_close(forced, logits)
    assert torch.equal(forced.argmax(dim=-1), drafted)

    for n in range(1, 6):
        first, first_logits = drafter.draft(**inputs, num_draft_tokens=n)
        assert torch.equal(first, drafted[:, :n])
        torch.testing.assert_close(first_logits, logits[:, :n])


def test_rows_are_independent(tiny_llama, make_drafter):
    drafter = make_drafter(tiny_llama, anchor_group_size=2)
    inputs = make_inputs(tiny_llama, drafter)
    drafted, logits = drafter.draft(**inputs)
    for n in range(6):
        row, row_logits = drafter.draft(**{name: tensor[n : n + 1] for name, tensor in inputs.items()})
        assert torch.equal(row[0], drafted[n])
        torch.testing.assert_close(row_logits[0], logits[n])


VARIANTS = {
    "history": {"history_window": 6},
    "feature": {"context_fusion": "feature"},
    "reduced": {"draft_vocab_ids": [3, 90, 17, 5]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_comes_back(variant, dtype, tiny_llama, make_drafter, tmp_path):
    make_drafter(tiny_llama, **VARIANTS[variant]).to(dtype).save_pretrained(tmp_path)
    code = (
        "import sys, torch; from dlite_hf import DLiteForDrafting; folder = sys.argv[1]\n"
        "drafter, info = DLiteForDrafting.from_pretrained(folder, output_loading_info=True)\n"
        "assert not any(info[kind] for kind in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), info\n"
        "torch.save(drafter.state_dict(), folder + '/reloaded.pt')"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "MALLOC_PERTURB_": "165"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    expected = make_drafter(tiny_llama, **VARIANTS[variant]).to(dtype)
    reloaded = torch.load(tmp_path / "reloaded.pt")
    for name, value in expected.state_dict().items():
        assert value.dtype == reloaded[name].dtype and torch.equal(value, reloaded[name]), name


def test_a_reduced_vocabulary_keeps_the_logits_of_its_tokens(tiny_llama, make_drafter):
    whole, reduced = make_drafter(tiny_llama), make_drafter(tiny_llama, draft_vocab_ids=[50, 3, 90, 17])
    states = torch.randn(2, 5, whole.config.sequential_rank)
    logits, expected = reduced.sequential_head.logits(states), whole.sequential_head.logits(states)
    ids = [3, 17, 50, 90]
    torch.testing.assert_close(logits[..., ids], expected[..., ids])
    outside = [token for token in range(97) if token not in ids]
    assert (logits[..., outside] == -torch.inf).all()
    assert reduced.sequential_head.draft_rows(torch.tensor([3, 4, 50, 90, 96, 0])).tolist() == [0, -1, 2, 3, -1, -1]
    features, embeds = torch.randn(40, 3, 32), torch.randn(40, 1 + reduced.config.num_draft_tokens, 32)
    drafted, logits = reduced.draft(features, embeds, torch.randint(90, (40, 1)))
    assert torch.equal(drafted, logits.argmax(dim=-1)) and set(drafted.unique().tolist()) == {3, 17, 50, 90}
    with pytest.raises(ValueError, match="cannot be the draft vocabulary"):
        reduced.reduce_draft_vocabulary([3, 4])
    reduced.reduce_draft_vocabulary([90, 3])
    torch.testing.assert_close(reduced.sequential_head.logits(states)[..., [3, 90]], expected[..., [3, 90]])
