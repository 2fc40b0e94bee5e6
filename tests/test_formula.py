# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The drafter against its formulas in NumPy, with its own checkpoints and with those of the method's authors."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dlite_hf import DLiteConfig, DLiteForDrafting

from .reference import reference


# No two sizes that could be confused are equal; the heads together are wider than the hidden size.
V, H, S, K, R, L, DEPTH, HEADS, KV_HEADS, HEAD_DIM, MLP = 37, 20, 4, 5, 10, 9, 3, 6, 2, 8, 28
LAYER_IDS = [1, 4, 5, 8]
BATCH = 7
ROPE_PARAMETERS = {"rope_type": "default", "rope_theta": 50.0}
# What the reference reads; never a configuration that the code under test has parsed.
SIZES = {
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-3,
    "rope_parameters": ROPE_PARAMETERS,
    "target_layer_ids": LAYER_IDS,
}


def make_config(group_size, attn_implementation="eager"):
    return DLiteConfig(
        **copy.deepcopy(SIZES),
        vocab_size=V,
        hidden_size=H,
        intermediate_size=MLP,
        attention_bias=True,
        num_draft_tokens=K,
        anchor_group_size=group_size,
        sequential_rank=R,
        mask_token_id=V - 1,
        num_target_layers=L,
        attn_implementation=attn_implementation,
    )


def make_drafter(group_size, attn_implementation="eager"):
    drafter = DLiteForDrafting(make_config(group_size, attn_implementation)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.normal_(std=0.3)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    return drafter


def make_inputs(num_tokens):
    """Every sample has features, tokens and forced tokens of its own; placeholders share one embedding."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(V, H, generator=generator)
    previous_token_ids = torch.randint(V - 1, (BATCH, num_tokens), generator=generator)
    placeholders = torch.full((BATCH, K), V - 1)
    return {
        "context_features": torch.randn(BATCH, S, H, generator=generator),
        "inputs_embeds": table[torch.cat([previous_token_ids, placeholders], dim=1)],
        "previous_token_ids": previous_token_ids,
        "draft_token_ids": torch.randint(V - 1, (BATCH, K), generator=generator),
    }


def to_numpy(tensors):
    return {k: v.double().numpy() if v.is_floating_point() else v.numpy() for k, v in tensors.items()}


def assert_matches_reference(drafter, weights, inputs):
    free_inputs = {k: v for k, v in inputs.items() if k != "draft_token_ids"}
    weights = to_numpy(weights)
    hidden_states, head_states, logits, _ = reference(weights, SimpleNamespace(**SIZES), **to_numpy(inputs))
    with torch.no_grad():
        output = drafter(**inputs)
        output_logits = drafter.sequential_head.output_proj(output.head_states)
    np.testing.assert_allclose(output.last_hidden_state, hidden_states, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(output.head_states, head_states, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(output_logits, logits, rtol=1e-5, atol=1e-5)

    _, _, logits, drafted = reference(weights, SimpleNamespace(**SIZES), **to_numpy(free_inputs))
    output_ids, output_logits = drafter.draft(**free_inputs)
    np.testing.assert_array_equal(output_ids, drafted)
    np.testing.assert_allclose(output_logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("group_size", "num_tokens"), [(1, 1), (2, 2), pytest.param(2, 1, id="2-shorter")])
def test_model_matches_reference(group_size, num_tokens, attn_implementation):
    drafter = make_drafter(group_size, attn_implementation)
    assert_matches_reference(drafter, drafter.state_dict(), make_inputs(num_tokens))


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_every_parameter_matters(num_tokens):
    drafter, inputs = make_drafter(num_tokens), make_inputs(num_tokens)

    @torch.no_grad()
    def logits():
        return drafter.sequential_head.output_proj(drafter(**inputs).head_states)

    before = logits()
    for name, parameter in drafter.named_parameters():
        original = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn_like(parameter))
        assert (logits() - before).abs().max() > 1e-3, f"{name} is dead"
        with torch.no_grad():
            parameter.copy_(original)

    # Of the two embeddings, exactly the rows of tapped layers and of tokens that the head reads.
    read_tokens = {
        *inputs["previous_token_ids"].flatten().tolist(),
        *inputs["draft_token_ids"][:, :-1].flatten().tolist(),
    }
    for weight, used in (
        (drafter.layer_depth_embedding.weight, set(LAYER_IDS)),
        (drafter.sequential_head.prev_token_embedding.weight, read_tokens),
    ):
        for row in range(len(weight)):
            original = weight.detach().clone()
            with torch.no_grad():
                weight[row] += 1.0
            assert (not torch.equal(logits(), before)) == (row in used)
            with torch.no_grad():
                weight.copy_(original)


def authors_config(version, rope="rope_theta", **dlite):
    older = {"rope_theta": ROPE_PARAMETERS["rope_theta"], "rope_scaling": None}
    return {
        "architectures": ["DLiteDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": K + 1,
        "bos_token_id": 3,
        "eos_token_id": 4,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": H,
        "initializer_range": 0.02,
        "intermediate_size": MLP,
        "layer_types": ["full_attention"] * DEPTH,
        "max_position_embeddings": 40960,
        "max_window_layers": L,
        "num_attention_heads": HEADS,
        "num_hidden_layers": DEPTH,
        "num_key_value_heads": KV_HEADS,
        "num_target_layers": L,
        "rms_norm_eps": 1e-3,
        **(older if rope == "rope_theta" else {"rope_parameters": ROPE_PARAMETERS}),
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "transformers_version": "4.55.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": V,
        "dlite_config": {
            "architecture_version": version,
            "model_role": "pivot_q_student",
            "chs_num_layers": S,
            "target_layer_ids": LAYER_IDS,
            "sequential_head": "rnn",
            "sequential_rank": R,
            "mask_token_id": V - 1,
            **dlite,
        },
    }


def authors_weights():
    shapes = {
        "norm": [H],
        "layer_depth_embedding": [L, H],
        "context_norm": [H],
        "sequential_head.prev_token_embedding": [V, R],
        "sequential_head.output_proj": [V, R],
        "sequential_head.state_proj": [2 * R, 2 * R],
        "sequential_head.state_hidden_mlp": [R, R + H],
    }
    for i in range(DEPTH):
        shapes |= {
            f"layers.{i}.self_attn.q_proj": [HEADS * HEAD_DIM, H],
            f"layers.{i}.self_attn.k_proj": [KV_HEADS * HEAD_DIM, H],
            f"layers.{i}.self_attn.v_proj": [KV_HEADS * HEAD_DIM, H],
            f"layers.{i}.self_attn.o_proj": [H, HEADS * HEAD_DIM],
            f"layers.{i}.self_attn.q_norm": [HEAD_DIM],
            f"layers.{i}.self_attn.k_norm": [HEAD_DIM],
            f"layers.{i}.mlp.gate_proj": [MLP, H],
            f"layers.{i}.mlp.up_proj": [MLP, H],
            f"layers.{i}.mlp.down_proj": [H, MLP],
            f"layers.{i}.input_layernorm": [H],
            f"layers.{i}.post_attention_layernorm": [H],
        }
    generator = torch.Generator().manual_seed(2)
    weights = {}
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = 0.3 * torch.randn(shape, generator=generator) + (1.0 if len(shape) == 1 else 0.0)
    weights["sequential_head.state_proj.bias"] = 0.3 * torch.randn(2 * R, generator=generator)
    weights["sequential_head.state_hidden_mlp.bias"] = 0.3 * torch.randn(R, generator=generator)
    return weights


@pytest.mark.parametrize("rope", ["rope_theta", "rope_parameters"])
@pytest.mark.parametrize(
    ("version", "dlite", "group_size"),
    [
        ("dlite_v1", {}, 1),
        ("dlite_v2", {}, 2),
        ("dlite_v2", {"anchor_group_size": 1}, 1),
        ("dlite_v2", {"anchor_group_size": 2}, 2),
    ],
)
def test_authors_checkpoint(version, dlite, group_size, rope, tmp_path, transformers_log):
    weights = authors_weights()
    (tmp_path / "config.json").write_text(json.dumps(authors_config(version, rope, **dlite)))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    drafter, info = DLiteForDrafting.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert not [record.getMessage() for record in transformers_log.records]

    config = drafter.config
    assert config.model_type == "dlite" and config.target_model_type == "qwen3"
    assert (config.num_draft_tokens, config.anchor_group_size, config.num_target_layers) == (K, group_size, L)
    assert config.target_layer_ids == LAYER_IDS and config.mask_token_id == V - 1 and config.eos_token_id == 4
    assert drafter.dtype == torch.float32
    assert_matches_reference(drafter, weights, make_inputs(group_size))

    drafter.save_pretrained(tmp_path / "ours")
    ours = DLiteForDrafting.from_pretrained(tmp_path / "ours")
    assert ours.config.anchor_group_size == group_size and ours.config.architectures == ["DLiteForDrafting"]
    assert_matches_reference(ours, weights, make_inputs(group_size))


@pytest.mark.parametrize("dtype_name", ["torch_dtype", "dtype"])
def test_authors_checkpoint_keeps_its_dtype(dtype_name, tmp_path):
    config = authors_config("dlite_v2")
    del config["torch_dtype"]
    (tmp_path / "config.json").write_text(json.dumps({**config, dtype_name: "bfloat16"}))
    assert DLiteConfig.from_pretrained(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("version", "dlite", "message"),
    [
        ("dlite_v2", {"model_role": "eagle"}, "'eagle'.*'pivot_q_student'.*'swa_teacher'"),
        ("dlite_v3", {}, "'dlite_v3'.*'dlite_v1' and 'dlite_v2'"),
        ("dlite_v1", {"sequential_head": "gru"}, "'gru'.*'rnn'"),
    ],
)
def test_authors_checkpoint_refused(version, dlite, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(authors_config(version, **dlite)))
    with pytest.raises(ValueError, match=message):
        DLiteForDrafting.from_pretrained(tmp_path)
