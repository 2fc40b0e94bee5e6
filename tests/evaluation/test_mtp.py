# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Transformers' own multi-token prediction as a method: a target whose MTP layer foresees every token."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from dlite_hf.evaluation.measuring import measure
from dlite_hf.evaluation.methods import make_methods

from ..targets import SIZES, make_inputs


NUM_LAYERS = 2
MTP_LAYER = rf"model\.layers\.{NUM_LAYERS}\..*"


@pytest.fixture
def target(tmp_path, monkeypatch):
    """No layer adds anything, so a token alone decides the next one, as it does in the MTP layer behind them."""
    monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [MTP_LAYER])
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes = {**SIZES, "num_hidden_layers": NUM_LAYERS + 1, "first_k_dense_replace": NUM_LAYERS, **experts}
    torch.manual_seed(0)
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, num_mtp_layers=1))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "down_proj" in name or "o_proj" in name:
                parameter.zero_()
    model.save_pretrained(tmp_path)
    weights, hidden_size = load_file(tmp_path / "model.safetensors"), SIZES["hidden_size"]
    mtp = {name: torch.ones(hidden_size) for name in ("enorm", "hnorm", "shared_head.norm")}
    mtp["eh_proj"] = torch.eye(hidden_size, 2 * hidden_size)  # of the newest token's embedding alone
    weights |= {f"model.layers.{NUM_LAYERS}.{name}.weight": each for name, each in mtp.items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.config.num_hidden_layers = NUM_LAYERS
    model.config.save_pretrained(tmp_path)
    return Glm4MoeForCausalLM.from_pretrained(tmp_path).eval()


def test_a_drafted_token_that_is_always_right(target):
    plain, mtp = make_methods(target, ["plain", "mtp"])
    prompt_ids = make_inputs(target, 10)["input_ids"]
    _, expected = measure(target, plain, prompt_ids, max_new_tokens=20)
    measurement, output = measure(target, mtp, prompt_ids, max_new_tokens=20)
    assert output.sequences.tolist() == expected.sequences.tolist()
    # The prefill's token, two from each of nine rounds, and the last one.
    assert (measurement.tokens, measurement.prefill_tokens) == (20, 1)
    assert (measurement.rounds, measurement.emitted, measurement.accepted_per_position) == (10, 19, [9])
