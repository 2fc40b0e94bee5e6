# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
import json

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    BitsAndBytesConfig,
    BloomConfig,
    Gemma3Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MptConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from dlite_hf import DLiteConfig
from dlite_hf.configuration_dlite import evenly_spaced_layer_ids


def make_tokenizer(ids, **kwargs):
    vocab = {f"w{i}": i for i in ids}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocab, unk_token="w0")), **kwargs)


@pytest.mark.parametrize(
    ("num_layers", "num_tapped", "expected"),
    [
        (36, 12, [0, 1, 5, 8, 12, 16, 19, 23, 27, 30, 34, 35]),
        (28, 9, [0, 1, 5, 9, 13, 18, 22, 26, 27]),
        (36, 3, [0, 17, 35]),  # 1 + round(16.5), to the even neighbour
        (36, 2, [0, 35]),
        (48, 13, [0, 1, 5, 10, 15, 19, 23, 28, 32, 37, 41, 46, 47]),  # 7 / 10 * 45 is just below 31.5
    ],
)
def test_evenly_spaced_layer_ids(num_layers, num_tapped, expected):
    assert evenly_spaced_layer_ids(num_layers, num_tapped) == expected


def test_evenly_spaced_layer_ids_of_qwen3_8b():
    layer_ids = evenly_spaced_layer_ids(36, 14)
    assert len(layer_ids) == 14 and layer_ids[:4] == [0, 1, 4, 7] and layer_ids[-3:] == [31, 34, 35]


def test_evenly_spaced_layer_ids_are_distinct():
    for num_layers in range(2, 81):
        for num_tapped in range(2, num_layers + 1):
            layer_ids = evenly_spaced_layer_ids(num_layers, num_tapped)
            assert len(layer_ids) == num_tapped and layer_ids == sorted(set(layer_ids))
            assert layer_ids[0] == 0 and layer_ids[-1] == num_layers - 1


@pytest.mark.parametrize("num_tapped", [1, 5])
def test_evenly_spaced_layer_ids_refuses(num_tapped):
    with pytest.raises(ValueError, match=f"Cannot tap {num_tapped} layers of a target with 4"):
        evenly_spaced_layer_ids(4, num_tapped)


@pytest.mark.parametrize(
    ("sizes", "num_tapped", "rank"),
    [
        ({"hidden_size": 2560, "intermediate_size": 9728}, 12, 320),
        ({"hidden_size": 4096, "intermediate_size": 12288}, 14, 512),
    ],
    ids=["Qwen3-4B", "Qwen3-8B"],
)
def test_presets(sizes, num_tapped, rank):
    target_config = Qwen3Config(
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **sizes,
    )
    config = DLiteConfig.from_target(target_config)
    assert (config.hidden_size, config.intermediate_size) == (sizes["hidden_size"], sizes["intermediate_size"])
    assert config.target_layer_ids == evenly_spaced_layer_ids(36, num_tapped)
    assert (config.sequential_rank, config.num_draft_tokens, config.num_hidden_layers) == (rank, 7, 5)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    assert (config.mask_token_id, config.anchor_group_size, config.num_target_layers) == (151669, 1, 36)
    assert config.rope_parameters["rope_theta"] == 1e6


@pytest.mark.parametrize(
    ("target_config", "expected"),
    [
        (
            LlamaConfig(
                vocab_size=1000,
                hidden_size=192,
                intermediate_size=500,
                num_hidden_layers=9,
                num_attention_heads=6,
                num_key_value_heads=3,
                rms_norm_eps=1e-5,
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 2048,
                },
                eos_token_id=[5, 6],
            ),
            {
                "vocab_size": 1000,
                "hidden_size": 192,
                "intermediate_size": 500,
                "num_target_layers": 9,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "head_dim": 32,
                "rms_norm_eps": 1e-5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                "target_layer_ids": [0, 4, 8],
                "sequential_rank": 24,
                "eos_token_id": [5, 6],
            },
        ),
        (
            GPT2Config(vocab_size=1000, n_embd=96, n_layer=6, n_head=4, n_positions=256),
            {
                "vocab_size": 1000,
                "hidden_size": 96,
                "intermediate_size": 384,
                "num_target_layers": 6,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 24,
                "max_position_embeddings": 256,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "target_layer_ids": [0, 5],
            },
        ),
        (
            GPTNeoXConfig(
                vocab_size=1000,
                hidden_size=64,
                intermediate_size=200,
                num_hidden_layers=4,
                num_attention_heads=4,
                rope_parameters={"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.25},
            ),
            {
                "hidden_size": 64,
                "intermediate_size": 200,
                "num_key_value_heads": 4,
                "head_dim": 16,
                "rope_parameters": {"rope_type": "default", "rope_theta": 2e4},
                "target_layer_ids": [0, 3],
                "sequential_rank": 8,
            },
        ),
        (
            Gemma3Config(
                text_config={
                    "vocab_size": 1000,
                    "hidden_size": 64,
                    "intermediate_size": 200,
                    "num_hidden_layers": 12,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 1,
                    "head_dim": 32,
                    "rope_parameters": {
                        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    },
                }
            ),
            {
                "vocab_size": 1000,
                "hidden_size": 64,
                "num_target_layers": 12,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "target_layer_ids": [0, 1, 10, 11],
                "target_model_type": "gemma3_text",
            },
        ),
        (
            Qwen3MoeConfig(
                vocab_size=1000,
                hidden_size=64,
                intermediate_size=200,
                moe_intermediate_size=24,
                num_hidden_layers=4,
                num_attention_heads=8,
                num_key_value_heads=2,
                head_dim=16,
            ),
            {"intermediate_size": 200, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
        ),
    ],
    ids=["llama", "gpt2", "gpt_neox", "gemma3", "qwen3_moe"],
)
def test_from_target(target_config, expected):
    before = target_config.to_dict()
    config = DLiteConfig.from_target(target_config, mask_token_id=999)
    assert {name: getattr(config, name) for name in expected} == expected
    text_config = target_config.get_text_config(decoder=True)
    assert config.target_model_type == text_config.model_type and config.mask_token_id == 999
    assert (config.num_draft_tokens, config.num_hidden_layers, config.hidden_act) == (7, 5, "silu")
    assert target_config.to_dict() == before


def test_from_target_names_the_target(tmp_path):
    LlamaConfig(quantization_config=BitsAndBytesConfig(load_in_4bit=True)).save_pretrained(tmp_path)
    target_config = AutoConfig.from_pretrained(tmp_path)
    target_config._commit_hash = "0123abc"
    config = DLiteConfig.from_target(target_config, mask_token_id=0)
    assert config.target_name_or_path == str(tmp_path) and config.target_revision == "0123abc"
    assert config.target_quantization == "bitsandbytes"

    config = DLiteConfig.from_target(LlamaConfig(), mask_token_id=0)
    assert (config.target_name_or_path, config.target_revision, config.target_quantization) == (None, None, None)


def test_from_target_overrides():
    overrides = {"num_draft_tokens": 3, "target_layer_ids": [2, 3], "head_dim": 20, "rope_parameters": None}
    target_config = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 3e4})
    config = DLiteConfig.from_target(target_config, mask_token_id=7, **overrides)
    assert (config.num_draft_tokens, config.target_layer_ids, config.head_dim) == (3, [2, 3], 20)
    assert config.rope_parameters["rope_theta"] == 3e4  # None leaves the default
    with pytest.raises(TypeError, match="'num_draft_token'"):
        DLiteConfig.from_target(target_config, mask_token_id=7, num_draft_token=3)


def test_from_target_refuses_one_layer():
    with pytest.raises(ValueError, match="2 layers of a target with 1"):
        DLiteConfig.from_target(LlamaConfig(num_hidden_layers=1), mask_token_id=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({name: 0}, f"`{name}` is 0, but must be at least 1")
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "num_draft_tokens",
                "sequential_rank",
            )
        ),
        ({"num_target_layers": 0, "target_layer_ids": [0]}, "`num_target_layers` is 0, but must be at least 1"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, r"\(6\).*multiple of.*\(4\)"),
        ({"head_dim": 7}, "`head_dim` is 7.*even"),
        ({"anchor_group_size": 0}, "`anchor_group_size` is 0, but must be 1 or 2"),
        ({"anchor_group_size": 3}, "`anchor_group_size` is 3, but must be 1 or 2"),
        ({"mask_token_id": 97, "vocab_size": 97}, "`mask_token_id` is 97,.* 97"),
        ({"mask_token_id": -1, "vocab_size": 97}, "`mask_token_id` is -1,.* 97"),
        ({"target_layer_ids": [3, 1]}, r"`target_layer_ids` is \[3, 1\].*increasing"),
        ({"target_layer_ids": [1, 1]}, r"`target_layer_ids` is \[1, 1\].*increasing"),
        ({"target_layer_ids": [-1, 3]}, r"`target_layer_ids` is \[-1, 3\].*from 0 to 35"),
        ({"target_layer_ids": [3, 36]}, r"`target_layer_ids` is \[3, 36\].*from 0 to 35"),
    ],
)
def test_validation(fields, message):
    with pytest.raises(ValueError, match=message):
        DLiteConfig(**fields)


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(36, [0, 1, 5, 8, 12, 16, 19, 23, 27, 30, 34, 35]), (28, [0, 1, 5, 9, 13, 18, 22, 26, 27]), (2, [0, 1])],
)
def test_default_layers(num_layers, expected):
    assert DLiteConfig(num_target_layers=num_layers).target_layer_ids == expected
    target_config = LlamaConfig(num_hidden_layers=num_layers)
    assert DLiteConfig.from_target(target_config, mask_token_id=0).target_layer_ids == expected


def test_validation_of_types():
    with pytest.raises(StrictDataclassFieldValidationError, match="num_draft_tokens"):
        DLiteConfig(num_draft_tokens="7")


def test_mask_token_id():
    llama = LlamaConfig(vocab_size=10)
    with_mask = make_tokenizer([0, 1, 2, 4], mask_token="w4")
    with_gap, full = make_tokenizer([0, 1, 2, 4]), make_tokenizer(range(10))
    assert DLiteConfig.from_target(llama, with_mask, mask_token_id=6).mask_token_id == 6
    assert DLiteConfig.from_target(llama, with_mask, mask_token_id=0).mask_token_id == 0
    assert DLiteConfig.from_target(llama, with_mask).mask_token_id == 4
    assert DLiteConfig.from_target(llama, with_gap).mask_token_id == 3
    with pytest.raises(ValueError, match="all 10 rows.*`mask_token_id`"):
        DLiteConfig.from_target(llama, full)
    with pytest.raises(ValueError, match="'llama'; pass its `tokenizer`, or `mask_token_id`"):
        DLiteConfig.from_target(llama)
    assert DLiteConfig.from_target(Qwen3Config()).mask_token_id == 151669
    assert DLiteConfig.from_target(Qwen3Config(), with_gap).mask_token_id == 3


def test_placeholders_are_proposed():
    """Where all rows are used: a reserved token, else special ones that turns and texts do without."""
    texts = ["<s>", "</s>", "<|turn|>", "<repo>", "<tool>", "word", "reserved", "<cell>", "<end>"]

    def refused(texts):
        backend = Tokenizer(WordLevel({text: i for i, text in enumerate(texts)}, unk_token="word"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", pad_token="</s>")
        tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>", "<repo>", "<cell>", "<end>"]})
        tokenizer.add_tokens(["<tool>"])
        tokenizer.chat_template = "{{ '<|turn|>' + messages[0]['content'] }}"
        with pytest.raises(ValueError, match="all .* rows") as raised:
            DLiteConfig.from_target(LlamaConfig(vocab_size=len(texts), eos_token_id=[1, 8]), tokenizer)
        return str(raised.value)

    assert refused(texts).endswith("a token that never occurs in answers, such as 3 (<repo>) or 7 (<cell>).")
    more = [*texts, "<unused0>", "[PAD10]", "<|reserved_special_token_3|>"]
    assert refused(more).endswith("such as 11 (<|reserved_special_token_3|>) or 10 ([PAD10]) or 9 (<unused0>).")


def test_round_trip(tmp_path):
    config = DLiteConfig.from_target(
        LlamaConfig(vocab_size=97, eos_token_id=[5, 6]), mask_token_id=96, anchor_group_size=2, num_draft_tokens=4
    )
    config.save_pretrained(tmp_path)
    for reloaded in (DLiteConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        reloaded.name_or_path = config.name_or_path
        assert type(reloaded) is DLiteConfig and reloaded.to_dict() == config.to_dict()
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "dlite" and saved["target_layer_ids"] == config.target_layer_ids
    assert saved["num_draft_tokens"] == 4 and saved["anchor_group_size"] == 2 and saved["mask_token_id"] == 96


@pytest.mark.parametrize(
    "config", [BloomConfig(hidden_size=64, n_layer=4, n_head=4), MptConfig(d_model=64, n_layers=4, n_heads=4)]
)
def test_from_a_target_that_lacks_fields(config):
    drafter_config = DLiteConfig.from_target(config, mask_token_id=0)
    assert drafter_config.hidden_size == 64 and drafter_config.num_target_layers == 4
    assert drafter_config.num_attention_heads * drafter_config.head_dim == 64


def test_from_a_target_with_one_value_a_layer():
    config = LlamaConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=4)
    object.__setattr__(config, "intermediate_size", [96, 96, 128, 128])  # Llama itself takes none
    assert DLiteConfig.from_target(config, mask_token_id=0).intermediate_size == 256
