# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Tiny models that the tests share."""

import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dlite_hf import DLiteForDrafting


torch.set_num_threads(1)  # one worker, one thread: `pytest -n` shares the cores


@pytest.fixture
def tiny_llama():
    """A random Llama whose greedy output does not repeat itself at once."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def make_drafter():
    """`make_drafter(target, **overrides)`: a small drafter that taps three layers of the target, the last included."""

    def make(target, **overrides):
        last = target.config.get_text_config(decoder=True).num_hidden_layers - 1
        defaults = {
            "target_layer_ids": [0, 1, last],
            "mask_token_id": 96,
            "num_hidden_layers": 2,
            "num_draft_tokens": 5,
            "sequential_rank": 16,
            "initializer_range": 0.3,
        }
        torch.manual_seed(1)
        return DLiteForDrafting.from_target(target, **{**defaults, **overrides}).eval()

    return make


@pytest.fixture
def transformers_log(caplog):
    """`caplog`, for the warnings of Transformers too, whose loggers do not propagate by themselves."""
    logger = logging.getLogger("transformers")
    propagate, logger.propagate = logger.propagate, True
    yield caplog
    logger.propagate = propagate
