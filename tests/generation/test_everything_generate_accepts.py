# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Whatever else `generate` accepts is right, or one ValueError before the first token."""

import peft
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CompileConfig,
    DynamicCache,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)
from transformers.utils.logging import warning_once

from dlite_hf.generation import integration

from ..replay import generate_with_statistics, make_replay_drafter
from ..targets import SIZES, make_drafter, make_inputs, make_target


NUM_NEW_TOKENS = 24
OPTIONS = {"max_new_tokens": NUM_NEW_TOKENS, "do_sample": False}


@pytest.fixture
def target():
    return make_target("llama")


@pytest.fixture
def drafter(target):
    return make_drafter(target)


@pytest.fixture
def forwards(monkeypatch):
    """`forwards(target)`: a list that grows with every forward of one of its modules."""

    def watch(target):
        seen = []
        for module in target.modules():
            module.register_forward_pre_hook(lambda module, args: seen.append(type(module).__name__))
        return seen

    return watch


def make_replay_for(target, sequence, num_right=2, model_inputs=None, **overrides):
    """A drafter that is right `num_right` times a round on the way along `sequence`."""
    drafter = make_replay_drafter(make_drafter(target, **{"num_draft_tokens": 5, **overrides}), num_right)
    drafter.replay(target, sequence, **(model_inputs or {}))
    return drafter


def check_drafts(drafter, statistics, tolerance=1e-3):
    """Some tokens were accepted and some were not, and every feature was the right one."""
    assert 0 < sum(statistics.accepted_per_position) < statistics.num_drafted_tokens
    assert max(drafter.errors) < tolerance


# What is refused.


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_return_sequences": 2, "do_sample": True}, "`num_return_sequences` is 2"),
        ({"num_beams": 2}, "`num_beams=2`"),
        ({"num_beams": 2, "do_sample": True}, "`num_beams=2`"),
        ({"use_cache": False}, "`use_cache=False` leaves no cache"),
        ({"synced_gpus": True}, "`synced_gpus=True`"),
        ({"num_assistant_tokens": 0}, "`num_assistant_tokens` is 0"),
        ({"prompt_lookup_num_tokens": 3}, "`prompt_lookup_num_tokens=3`"),
        ({"use_mtp": True}, "`use_mtp=True`"),
        ({"assistant_early_exit": 2}, "`assistant_early_exit=2`"),
        ({"speculation_type": "dflash"}, "`speculation_type='dflash'`"),
        ({"assistant_ensemble_weight": 0.5}, "`assistant_ensemble_weight=0.5`"),
        ({"assistant_tokenizer": object()}, "drop `assistant_tokenizer`"),
        ({"assistant_tokenizer": object(), "tokenizer": object()}, "drop `assistant_tokenizer`"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_one_error_before_any_forward(target, drafter, forwards, options, message):
    seen = forwards(target)
    with pytest.raises(ValueError, match=message):
        target.generate(**make_inputs(target, 5), assistant_model=drafter, max_new_tokens=4, **options)
    assert not seen


@pytest.mark.parametrize("name", integration._RIVAL_OPTIONS)
def test_a_rival_option_on_the_targets_own_config_is_refused(target, drafter, name):
    value = {"speculation_type": "dflash", "assistant_ensemble_weight": 0.5, "use_mtp": True}.get(name, 2)
    setattr(target.generation_config, name, value)
    with pytest.raises(ValueError, match=f"`{name}={value!r}` asks for another way to draft"):
        target.generate(**make_inputs(target, 5), assistant_model=drafter, max_new_tokens=4)


def test_a_batch_is_refused(target, drafter, forwards):
    seen = forwards(target)
    input_ids = make_inputs(target, 5)["input_ids"].repeat(2, 1)
    with pytest.raises(ValueError, match="The batch has 2 sequences"):
        target.generate(input_ids, assistant_model=drafter, max_new_tokens=4)
    assert not seen


def test_an_encoder_decoder_is_refused(drafter, forwards):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 5, "num_heads": 4}
    target = T5ForConditionalGeneration(T5Config(vocab_size=97, decoder_start_token_id=0, **sizes)).eval()
    seen = forwards(target.decoder)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        target.generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, max_new_tokens=4)
    assert not seen


@pytest.mark.parametrize("field", ["cross_attention_layers", "cross_layer_interval"])  # of Mllama, of Idefics
def test_layers_for_images_are_refused(target, drafter, forwards, field):
    seen = forwards(target)
    setattr(target.config, field, 2)
    with pytest.raises(ValueError, match="LlamaForCausalLM attends to images in layers of their own"):
        target.generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, max_new_tokens=4)
    assert not seen


def make_mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=5))


def make_qwen3_next():
    sizes = {
        **SIZES,
        "layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(**sizes))


@pytest.mark.parametrize(
    "make, message",
    [
        (make_mamba, r"MambaForCausalLM keeps .* \['linear_attention'\]"),
        (make_qwen3_next, r"Qwen3NextForCausalLM keeps .* \['full_attention', 'linear_attention'\]"),
    ],
    ids=["mamba", "qwen3_next"],
)
def test_a_recurrent_target_is_refused_before_any_forward(drafter, forwards, make, message):
    target = make().eval()
    seen = forwards(target)
    with pytest.raises(ValueError, match=message):
        target.generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, max_new_tokens=4)
    assert not seen


def test_a_cache_that_cannot_roll_back_is_refused_before_the_first_token():
    target = make_target("mistral")  # a static layer overwrites what leaves its window of 8
    processed = []

    def processor(input_ids, scores):
        processed.append(input_ids)
        return scores

    options = {"cache_implementation": "static", "max_new_tokens": 20, "logits_processor": [processor]}
    with pytest.raises(ValueError, match=r"layers \['StaticSlidingWindowLayer'\]"):
        target.generate(**make_inputs(target, 5), assistant_model=make_drafter(target), **options)
    assert not processed


def test_a_users_cache_that_cannot_roll_back_is_refused(target, drafter):
    cache = DynamicCache(config=target.config)

    class NoWayBack(type(cache.layers[2])):
        is_croppable = False

    cache.layers[2] = NoWayBack()
    with pytest.raises(ValueError, match=r"dropped from the layers \['NoWayBack'\]"):
        target.generate(**make_inputs(target, 5), assistant_model=drafter, cache=cache, max_new_tokens=4)
    assert cache.get_seq_length() == 0  # it still serves plain generation


KNOBS = {
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
}


@pytest.mark.parametrize("name", integration._IGNORED_OPTIONS)
def test_an_ignored_knob_warns_once_and_changes_nothing(target, caplog, name):
    warning_once.cache_clear()
    value = KNOBS[name]
    inputs = make_inputs(target, 8)
    plain = target.generate(**inputs, **OPTIONS)
    origins = []
    for options in ({}, {name: value}, {name: value}):
        drafter = make_replay_for(target, plain)
        output, statistics = generate_with_statistics(target, drafter, **inputs, **OPTIONS, **options)
        assert torch.equal(output, plain)
        check_drafts(drafter, statistics)
        origins.append(statistics.token_origins)
    assert origins[1] == origins[0]
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("dlite_hf")]
    assert warnings == [f"`{name}={value!r}` has no effect on a DLite drafter."]


@pytest.mark.parametrize(
    "asked, num_drafted, warns",
    [(1, 1, False), (3, 3, False), (5, 5, False), (6, 5, True), (20, 5, False)],  # 20 is Transformers' own default
)
def test_num_assistant_tokens_lowers_the_draft_for_a_call(target, caplog, asked, num_drafted, warns):
    warning_once.cache_clear()
    inputs = make_inputs(target, 8)
    plain = target.generate(**inputs, **OPTIONS)
    drafter = make_replay_for(target, plain, num_right=None)
    for _ in range(2):
        drafter.pivots.clear()
        output, statistics = generate_with_statistics(target, drafter, **inputs, **OPTIONS, num_assistant_tokens=asked)
        assert torch.equal(output, plain)
        assert statistics.token_origins[: num_drafted + 1] == [*range(1, num_drafted + 1), 0]
    warnings = [record for record in caplog.records if record.name.startswith("dlite_hf")]
    assert len(warnings) == warns


# What works.


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_prompt_of_embeddings(architecture, group_size):
    target = make_target(architecture)
    input_ids = make_inputs(target, 12)["input_ids"]
    inputs_embeds = target.get_input_embeddings()(input_ids).detach()
    plain = target.generate(inputs_embeds=inputs_embeds, **OPTIONS)
    assert plain.shape == (1, NUM_NEW_TOKENS)
    drafter = make_replay_for(target, torch.cat([input_ids, plain], dim=1), anchor_group_size=group_size)
    output, statistics = generate_with_statistics(target, drafter, inputs_embeds=inputs_embeds, **OPTIONS)
    assert torch.equal(output, plain)
    check_drafts(drafter, statistics)
    assert drafter.pivots[0] == 11
    # A real drafter, whose group of two is one short in the first round.
    real = make_drafter(target, anchor_group_size=group_size)
    assert torch.equal(target.generate(inputs_embeds=inputs_embeds, assistant_model=real, **OPTIONS), plain)


@pytest.mark.parametrize("length", [2, 12])  # fewer and more than a draft has
def test_token_types(length):
    """Plain generation gives every new token the type of the prompt's last."""
    target = make_target("gpt2")
    inputs = make_inputs(target, length)
    types = torch.full_like(inputs["input_ids"], 3)
    types[:, -1] = 90
    plain = target.generate(**inputs, token_type_ids=types, **OPTIONS)
    assert not torch.equal(plain, target.generate(**inputs, **OPTIONS))
    all_types = torch.cat([types, types.new_full((1, NUM_NEW_TOKENS), 90)], dim=1)
    drafter = make_replay_for(target, plain, model_inputs={"token_type_ids": all_types})
    output, statistics = generate_with_statistics(target, drafter, **inputs, token_type_ids=types, **OPTIONS)
    assert torch.equal(output, plain)
    check_drafts(drafter, statistics)


def test_a_prompt_of_embeddings_beside_ids(target):
    input_ids = make_inputs(target, 12)["input_ids"]
    inputs = {"input_ids": input_ids, "inputs_embeds": target.get_input_embeddings()(input_ids).detach()}
    plain = target.generate(**inputs, **OPTIONS)
    drafter = make_replay_for(target, plain)
    output, statistics = generate_with_statistics(target, drafter, **inputs, **OPTIONS)
    assert torch.equal(output, plain)
    check_drafts(drafter, statistics)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_a_left_padded_prompt(architecture):
    target = make_target(architecture)
    input_ids = make_inputs(target, 14)["input_ids"]
    input_ids[:, :5] = 0
    attention_mask = (torch.arange(14) >= 5).long()[None]
    plain = target.generate(input_ids, attention_mask=attention_mask, **OPTIONS)
    full_mask = torch.cat([attention_mask, attention_mask.new_ones(1, NUM_NEW_TOKENS)], dim=1)
    position_ids = (full_mask.cumsum(dim=1) - 1).clamp(min=0)
    model_inputs = {"attention_mask": full_mask, "position_ids": position_ids}
    drafter = make_replay_for(target, plain, model_inputs=model_inputs)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    output, statistics = generate_with_statistics(target, drafter, **inputs, **OPTIONS)
    assert torch.equal(output, plain)
    check_drafts(drafter, statistics)
    assert drafter.pivots[0] == 13
    unpadded = target.generate(input_ids[:, 5:], assistant_model=drafter, **OPTIONS)
    assert torch.equal(unpadded[0, 9:], plain[0, 14:]), "padding changes nothing"


def test_a_peft_target(target):
    inputs = make_inputs(target, 10)
    base = target.generate(**inputs, **OPTIONS)
    adapted = peft.get_peft_model(target, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).eval()
    torch.manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1.0)
    plain = adapted.generate(**inputs, **OPTIONS)
    assert not torch.equal(plain, base), "the adapter does something"
    drafter = make_replay_drafter(make_drafter(target, num_draft_tokens=5), num_right=2)
    drafter.replay(adapted, plain)
    output, statistics = generate_with_statistics(adapted, drafter, **inputs, **OPTIONS)
    assert torch.equal(output, plain)
    check_drafts(drafter, statistics)


@pytest.mark.parametrize("group_size", [1, 2])
def test_an_fp32_target_with_a_bf16_drafter(target, group_size):
    inputs = make_inputs(target, 10)
    plain = target.generate(**inputs, **OPTIONS)
    drafter = make_drafter(target, anchor_group_size=group_size).to(torch.bfloat16)
    output, statistics = generate_with_statistics(target, drafter, **inputs, **OPTIONS)
    assert torch.equal(output, plain)
    assert statistics.num_drafted_tokens > 0
    replay_drafter = make_replay_for(target, plain).to(torch.bfloat16)
    output, statistics = generate_with_statistics(target, replay_drafter, **inputs, **OPTIONS)
    assert torch.equal(output, plain)
    check_drafts(replay_drafter, statistics, tolerance=1e-2)  # the features arrive in bf16


@pytest.mark.parametrize("drafter_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_bf16_target(target, drafter_dtype, do_sample):
    target.to(torch.bfloat16)
    drafter = make_drafter(target).to(drafter_dtype)
    options = {"max_new_tokens": NUM_NEW_TOKENS, "do_sample": do_sample}
    output, statistics = generate_with_statistics(target, drafter, **make_inputs(target, 10), **options)
    assert output.shape == (1, 10 + NUM_NEW_TOKENS)
    assert statistics.num_emitted_tokens == NUM_NEW_TOKENS - 1
    assert statistics.num_drafted_tokens > 0
    assert drafter.dtype == drafter_dtype and target.dtype == torch.bfloat16


def test_a_prompt_of_many_times_the_drafters_positions():
    target = make_target("qwen3")
    inputs = make_inputs(target, 200)
    plain = target.generate(**inputs, **OPTIONS)
    drafter = make_replay_for(target, plain, max_position_embeddings=48)  # it only ever sees local positions
    output, statistics = generate_with_statistics(target, drafter, **inputs, **OPTIONS)
    assert torch.equal(output, plain)
    check_drafts(drafter, statistics)
    real = make_drafter(target, max_position_embeddings=48)
    assert torch.equal(target.generate(**inputs, assistant_model=real, **OPTIONS), plain)


def test_a_pipeline(target):
    vocabulary = {f"w{i}": i for i in range(97)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0")
    prompt = "w5 w17 w33 w60"
    plain = target.generate(**tokenizer(prompt, return_tensors="pt", return_token_type_ids=False), **OPTIONS)
    drafter = make_replay_for(target, plain)
    generator = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    (result,) = generator(prompt, **OPTIONS, return_full_text=False)
    assert result["generated_text"] == tokenizer.decode(plain[0, 4:])
    assert drafter.pivots[0] == 3 and max(drafter.errors) < 1e-3


def test_a_static_cache(target):
    inputs = make_inputs(target, 10)
    plain = target.generate(**inputs, **OPTIONS)
    drafter = make_replay_for(target, plain)
    options = {**OPTIONS, "cache_implementation": "static"}
    output, statistics = generate_with_statistics(target, drafter, **inputs, **options)
    assert torch.equal(output, plain)
    check_drafts(drafter, statistics)


@pytest.mark.parametrize("prefill_chunk_size", [None, 6])
def test_a_static_cache_and_a_compiled_target(target, prefill_chunk_size):
    """The slow ones: some seconds for a graph each of K + 1 tokens and of a chunk, without a compiler's back end."""
    inputs = make_inputs(target, 12)
    plain = target.generate(**inputs, **OPTIONS)
    eos_token_id = int(plain[0, -6])
    assert eos_token_id not in plain[0, 12:-6]
    plain = plain[:, :-5]
    drafter = make_replay_for(target, plain)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_config = CompileConfig(backend="eager", mode=None, fullgraph=True)
    compile_config._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": compile_config, "eos_token_id": eos_token_id}
    options |= {**OPTIONS, "prefill_chunk_size": prefill_chunk_size}
    output, statistics = generate_with_statistics(target, drafter, **inputs, **options)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert torch.equal(output, plain)
    check_drafts(drafter, statistics)
