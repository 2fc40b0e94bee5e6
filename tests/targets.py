# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Tiny targets of many architectures, with random weights that make their greedy output lively."""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dlite_hf import DLiteForDrafting


VOCAB_SIZE = 97
IMAGE_TOKEN_ID = 90
IMAGE_SIZE, PATCH_SIZE = 16, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.5,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GPT2_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 5,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _make_llava() -> LlavaForConditionalGeneration:
    vision_config = {
        "model_type": "clip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
        "projection_dim": 16,
    }
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision_config,
            text_config=LlamaConfig(**SIZES),
            image_token_id=IMAGE_TOKEN_ID,
            vision_feature_layer=-1,
            vision_feature_select_strategy="default",
        )
    )


def _make_qwen3_moe() -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1)
    )


def _make_gemma3() -> Gemma3ForCausalLM:
    layer_types = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    # Untied: scaled by sqrt(H), a tied embedding would let the target repeat its last token for ever.
    config = Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=layer_types, tie_word_embeddings=False)
    return Gemma3ForCausalLM(config)


def _make_gpt_neox() -> GPTNeoXForCausalLM:
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**{**sizes, "initializer_range": 1.0}, tie_word_embeddings=True))


_MAKERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)),
    "gemma3": _make_gemma3,
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES)),
    "gpt_neox": _make_gpt_neox,
    "qwen3_moe": _make_qwen3_moe,
    "llava": _make_llava,
}
ARCHITECTURES = sorted(_MAKERS)


def make_target(architecture: str, seed: int = 0) -> PreTrainedModel:
    """A tiny target with random weights, in fp32."""
    torch.manual_seed(seed)
    return _MAKERS[architecture]().eval()


def make_drafter(target: PreTrainedModel, **overrides: Any) -> DLiteForDrafting:
    """A small drafter for `target`: three layers tapped, the last included, unless told otherwise."""
    num_layers = target.config.get_text_config().num_hidden_layers
    fields: dict[str, Any] = {
        "mask_token_id": VOCAB_SIZE - 1,
        "num_hidden_layers": 2,
        "target_layer_ids": [0, 2, num_layers - 1],
    }
    return DLiteForDrafting.from_target(target, **{**fields, **overrides}).eval()


def make_inputs(target: PreTrainedModel, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A random prompt of `length` tokens; for a vision-language target with an image in it."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(1, IMAGE_TOKEN_ID, (1, length), generator=generator)
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if isinstance(target, LlavaForConditionalGeneration):
        image = torch.full((1, (IMAGE_SIZE // PATCH_SIZE) ** 2), IMAGE_TOKEN_ID)
        inputs["input_ids"] = torch.cat([input_ids[:, :1], image, input_ids[:, 1:]], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["pixel_values"] = torch.randn(1, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    return inputs


def make_chatml_tokenizer() -> PreTrainedTokenizerFast:
    """Characters as tokens, and two special tokens that begin and end a turn: ids 0 and 1."""
    vocab = {token: i for i, token in enumerate(["<|im_start|>", "<|im_end|>", "\n", *map(chr, range(32, 126))])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer
