# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""`attn_implementation="sdpa_packed"` is `sdpa`, without a copy of keys and values for every query head."""

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dlite_hf.generation.attention import sdpa_packed_attention_forward

from ..replay import generate_with_statistics, make_replay_drafter
from ..targets import ARCHITECTURES, make_drafter, make_inputs, make_target


@pytest.fixture
def heads_of_keys(monkeypatch):
    """A list of `(queries, heads of the keys, enable_gqa)` of every call of torch's kernel."""
    kernel, seen = torch.nn.functional.scaled_dot_product_attention, []

    def spy(query, key, value, *args, enable_gqa=False, **kwargs):
        seen.append((query.shape[2], key.shape[1], enable_gqa))
        return kernel(query, key, value, *args, enable_gqa=enable_gqa, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return seen


def make_cache(target, kind):
    if kind == "static":
        return StaticCache(target.config, max_cache_len=64)
    return DynamicCache(config=target.config)


def logits_behind_a_prompt(target, implementation, kind, num_tokens, attention_mask=None):
    target.set_attn_implementation(implementation)
    torch.manual_seed(0)
    num_sequences = 1 if attention_mask is None else len(attention_mask)
    token_ids = torch.randint(1, 80, (num_sequences, 20 + num_tokens))
    prompt_mask = None if attention_mask is None else attention_mask[:, :20]
    cache = make_cache(target, kind)
    with torch.no_grad():
        target(token_ids[:, :20], attention_mask=prompt_mask, cache=cache)
        return target(token_ids[:, 20:], attention_mask=attention_mask, cache=cache).logits


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 16, 17])
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "llava"])
def test_the_logits_are_those_of_sdpa(architecture, num_tokens, kind):
    target = make_target(architecture).double()
    if architecture == "qwen3_moe":
        target.set_experts_implementation("eager")  # the others have no double
    expected = logits_behind_a_prompt(target, "sdpa", kind, num_tokens)
    logits = logits_behind_a_prompt(target, "sdpa_packed", kind, num_tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_padding_on_the_left(num_tokens):
    target = make_target("llama").double()
    attention_mask = torch.ones(3, 20 + num_tokens, dtype=torch.long)
    attention_mask[0, :7] = attention_mask[2, :3] = 0
    expected = logits_behind_a_prompt(target, "sdpa", "dynamic", num_tokens, attention_mask)
    logits = logits_behind_a_prompt(target, "sdpa_packed", "dynamic", num_tokens, attention_mask)
    torch.testing.assert_close(logits, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("num_tokens, is_packed", [(1, True), (8, True), (16, True), (17, False)])
def test_the_keys_are_not_copied_for_every_head(heads_of_keys, num_tokens, is_packed, kind):
    target = make_target("llama")
    logits_behind_a_prompt(target, "sdpa_packed", kind, num_tokens)
    calls = heads_of_keys[target.config.num_hidden_layers :]  # after those of the prompt
    expected = (2 * num_tokens, 2, False) if is_packed else (num_tokens, 4, False)
    assert calls == [expected] * target.config.num_hidden_layers


def test_what_has_no_groups_is_left_to_sdpa(heads_of_keys):
    target = make_target("gpt2")
    logits_behind_a_prompt(target, "sdpa_packed", "dynamic", 4)
    assert set(heads_of_keys) == {(20, 4, False), (4, 4, False)}


@pytest.mark.parametrize("extra", ["mask_of_each_head", "mask_of_one_row", "position_bias", "no_mask"])
def test_what_heads_do_not_share_is_left_to_sdpa(extra):
    torch.manual_seed(0)
    module = make_target("llama").model.layers[0].self_attn
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask, options = torch.randn(2, 1, 3, 9), {}
    if extra == "mask_of_each_head":
        mask = torch.randn(2, 4, 3, 9)
    elif extra == "mask_of_one_row":
        mask = torch.randn(2, 1, 1, 9)
    elif extra == "position_bias":
        options["position_bias"] = torch.randn(2, 4, 3, 9)
    else:
        mask = None
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
    output, _ = sdpa_packed_attention_forward(module, query, key, value, mask, **options)
    torch.testing.assert_close(output, expected)


def test_values_may_be_wider_than_keys():
    torch.manual_seed(0)
    module = make_target("llama").model.layers[0].self_attn
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 5)
    mask = torch.ones(2, 1, 3, 9, dtype=torch.bool).tril(6)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    output, _ = sdpa_packed_attention_forward(module, query, key, value, mask, scaling=0.3)
    assert output.shape == (2, 3, 4, 5)
    torch.testing.assert_close(output, expected)


def test_queries_may_be_the_same_for_all_sequences():
    torch.manual_seed(0)
    module = make_target("llama").model.layers[0].self_attn
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.randn(2, 1, 3, 9)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask)
    output, _ = sdpa_packed_attention_forward(module, query, key, value, mask)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("name", ["s_aux", "indices", "block_indices", "num_kv_shared_layers"])
def test_attention_that_it_does_not_know_is_refused(name):
    module = make_target("llama").model.layers[0].self_attn
    query, key, options = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 9, 8), {}
    if name == "num_kv_shared_layers":
        module.config.num_kv_shared_layers = 2
    else:
        options[name] = torch.zeros(4)
    with pytest.raises(ValueError, match=rf"`sdpa_packed` does not serve LlamaAttention with \['{name}'\]"):
        sdpa_packed_attention_forward(module, query, key, key, None, **options)


@pytest.mark.parametrize(
    "architecture, kind",
    [("llama", "dynamic"), ("llama", "static"), ("qwen3", "static"), ("mistral", "dynamic"), ("gemma3", "dynamic")],
)
def test_drafted_generation_is_exact(heads_of_keys, architecture, kind):
    target = make_target(architecture)
    target.set_attn_implementation("sdpa_packed")
    inputs = make_inputs(target, 20)
    options = {"max_new_tokens": 40, "do_sample": False, "cache_implementation": kind}
    plain = target.generate(**inputs, **options)
    drafter = make_replay_drafter(make_drafter(target, num_draft_tokens=7), 3)
    drafter.replay(target, plain)
    heads_of_keys.clear()
    output, statistics = generate_with_statistics(target, drafter, **inputs, **options)
    assert torch.equal(output, plain)
    assert statistics.accepted_per_position[:3] > [0, 0, 0]
    assert max(drafter.errors) < 1e-3
    groups = target.config.num_attention_heads // target.config.num_key_value_heads
    assert (8 * groups, target.config.num_key_value_heads, False) in heads_of_keys


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_it_compiles_as_a_whole(num_tokens):
    target = make_target("llama")
    target.set_attn_implementation("sdpa_packed")
    token_ids = make_inputs(target, 20 + num_tokens)["input_ids"]
    forward = torch.compile(target.forward, fullgraph=True, backend="eager")
    logits = []
    for call in (target.forward, forward):
        cache = make_cache(target, "static")
        with torch.no_grad():
            target(token_ids[:, :20], cache=cache)
            logits.append(call(input_ids=token_ids[:, 20:], cache=cache).logits)
    torch.testing.assert_close(*logits)
