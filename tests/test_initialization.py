# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from dlite_hf import DLiteForDrafting


SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.5,
}


def make_target(name, tiny_llama):
    if name == "llama":
        return tiny_llama
    if name == "llama-tied":
        return LlamaForCausalLM(type(tiny_llama.config)(**SIZES, tie_word_embeddings=True))
    if name == "gemma":
        return GemmaForCausalLM(GemmaConfig(**SIZES))
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=4, n_head=4, initializer_range=0.5))


def untrained_logits(drafter, states):
    """The head's logits behind the drafter's final norm, before any token has moved its recurrent state."""
    head = drafter.sequential_head
    return head.output_proj(
        head.merge(states.new_zeros(len(states), drafter.config.sequential_rank), drafter.norm(states))
    )


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma", "gpt2"])
def test_full_rank_head_is_the_targets(name, tiny_llama):
    target = make_target(name, tiny_llama)
    torch.manual_seed(3)
    norm = target.get_decoder().ln_f if name == "gpt2" else target.model.norm
    norm.weight.normal_(1.0, 0.5)
    if name == "gpt2":
        norm.bias.normal_()
    before = {key: tensor.clone() for key, tensor in target.state_dict().items()}

    drafter = DLiteForDrafting.from_target(target, mask_token_id=96, sequential_rank=32)
    assert drafter.dtype == torch.float32
    assert all(torch.equal(tensor, before[key]) for key, tensor in target.state_dict().items())

    states = torch.randn(50, 32)
    if name == "gpt2":
        # A LayerNorm without its bias is an RMSNorm where the mean is zero.
        states -= states.mean(-1, keepdim=True)
        expected = target.lm_head(norm(states) - norm.bias)
    else:
        expected = target.lm_head(norm(states))
    torch.testing.assert_close(untrained_logits(drafter, states), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_low_rank_head_is_the_best_of_its_rank(name, tiny_llama):
    target = make_target(name, tiny_llama)
    lm_head = target.lm_head.weight
    u, s, vh = torch.linalg.svd(lm_head, full_matrices=False)
    for rank in (4, 16):
        drafter = DLiteForDrafting.from_target(target, mask_token_id=96, sequential_rank=rank)
        head = drafter.sequential_head
        product = head.output_proj.weight @ head.state_hidden_mlp.weight[:, rank:]
        torch.testing.assert_close(product, u[:, :rank] * s[:rank] @ vh[:rank], rtol=1e-3, atol=1e-3)
        error, best = (product - lm_head).norm(), s[rank:].square().sum().sqrt()
        assert best > 1 and abs(error - best) < 1e-3 * best
        # The square roots of the singular values on each side.
        torch.testing.assert_close(head.output_proj.weight.norm(dim=0), s[:rank].sqrt())
        torch.testing.assert_close(head.state_hidden_mlp.weight[:, rank:].norm(dim=1), s[:rank].sqrt())
        assert torch.equal(head.prev_token_embedding.weight, head.output_proj.weight)


@torch.no_grad()
@pytest.mark.parametrize(("vocab_size", "rank"), [(97, 48), (8, 32)])
def test_rank_above_the_target_heads_own(vocab_size, rank, tiny_llama):
    tiny_llama.resize_token_embeddings(vocab_size)
    drafter = DLiteForDrafting.from_target(tiny_llama, mask_token_id=7, sequential_rank=rank)
    head, own_rank = drafter.sequential_head, min(vocab_size, 32)
    product = head.output_proj.weight[:, :own_rank] @ head.state_hidden_mlp.weight[:own_rank, rank:]
    torch.testing.assert_close(product, tiny_llama.lm_head.weight, rtol=1e-4, atol=1e-4)
    for weight in (head.output_proj.weight, head.prev_token_embedding.weight):  # what is left stays random
        assert weight.shape == (vocab_size, rank) and 0.015 < weight[:, own_rank:].std() < 0.025


def test_target_without_a_head_of_the_hidden_size():
    config = OPTConfig(vocab_size=97, hidden_size=32, word_embed_proj_dim=16, ffn_dim=64, num_attention_heads=4)
    drafter = DLiteForDrafting.from_target(OPTForCausalLM(config), mask_token_id=96, sequential_rank=8)
    for module in (drafter.sequential_head.output_proj, drafter.sequential_head.state_hidden_mlp):
        assert 0.015 < module.weight.std() < 0.025


@torch.no_grad()
def test_the_rest_is_random(tiny_llama):
    drafter = DLiteForDrafting.from_target(tiny_llama, mask_token_id=96, sequential_rank=16, attention_bias=True)
    for name, parameter in drafter.named_parameters():
        if name.endswith("norm.weight") or "layernorm" in name:
            torch.testing.assert_close(parameter, torch.ones_like(parameter))
        elif name.endswith("bias"):
            assert not parameter.any(), name
        elif name.startswith(("layers.", "layer_depth_embedding", "sequential_head.state_proj")):
            assert 0.017 < parameter.std() < 0.023 and abs(parameter.mean()) < 0.005, name
