# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What `return_dict_in_generate` returns of a drafted call equals plain generation's in length, shape and value."""

import math

import pytest
import torch
from transformers import StaticCache

from ..replay import generate_with_statistics, make_replay_drafter
from ..targets import make_drafter, make_inputs, make_target


K = 5
PROMPT_LENGTH = 20
NUM_TOKENS = 24
OUTPUTS = {
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}

DRAFTERS = pytest.mark.parametrize("num_right", [None, 3], ids=["oracle", "3_right"])


@pytest.fixture(scope="module", params=["llama", "mistral", "gpt2"])
def target(request):
    """Returns its attentions, and computes in double, since these random targets amplify rounding."""
    target = make_target(request.param).double()
    target.set_attn_implementation("eager")
    return target


@pytest.fixture
def llama():
    target = make_target("llama").double()
    target.set_attn_implementation("eager")
    return target


def generate_both(target, num_right, **options):
    """Plain generation's output and a drafted call's, after a look at the tokens and at the drafter."""
    inputs = make_inputs(target, PROMPT_LENGTH)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "return_dict_in_generate": True, **options}
    plain = target.generate(**inputs, **options)
    drafter = make_replay_drafter(make_drafter(target, num_draft_tokens=K), num_right)
    drafter.replay(target, plain.sequences)
    output, statistics = generate_with_statistics(target, drafter, **inputs, **options)
    assert torch.equal(output.sequences, plain.sequences)
    num_rounds = math.ceil((NUM_TOKENS - 1) / (K + 1))
    assert sum(statistics.accepted_per_position) > 0
    assert statistics.num_rounds == num_rounds if num_right is None else statistics.num_rounds > num_rounds
    return plain, output


def flatten(output):
    """`{(name, token, layer): tensor}` of all that was recorded; the layer is `None` where there are none."""
    tensors = {}
    for name in ("scores", "logits", "hidden_states", "attentions"):
        for token, entry in enumerate(getattr(output, name) or ()):
            layers = enumerate(entry) if isinstance(entry, tuple) else [(None, entry)]
            tensors.update({(name, token, layer): tensor for layer, tensor in layers})
    return tensors


def check_same(output, plain):
    tensors, expected = flatten(output), flatten(plain)
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        if expected[key] is None:
            assert tensor is None, key
            continue
        assert tensor.shape == expected[key].shape, key
        assert tensor.dtype == expected[key].dtype, key
        finite = expected[key].isfinite()
        assert torch.equal(tensor.isfinite(), finite), key
        difference = (tensor - expected[key])[finite].abs().max()
        assert difference <= 1e-4 * expected[key][finite].abs().max(), key


@DRAFTERS
def test_all_outputs(target, num_right):
    plain, output = generate_both(target, num_right, **OUTPUTS, repetition_penalty=1.2)
    assert type(output) is type(plain)
    assert output.keys() == plain.keys()
    assert len(output.scores) == len(output.hidden_states) == len(output.attentions) == NUM_TOKENS
    check_same(output, plain)
    assert not torch.equal(output.scores[-1], output.logits[-1])  # the penalty is in one of them


@pytest.mark.parametrize("name", OUTPUTS)
def test_one_output_alone(llama, name):
    plain, output = generate_both(llama, 3, **{name: True})
    assert output.keys() == plain.keys()
    assert {key[0] for key in flatten(output)} == {name.removeprefix("output_")}
    check_same(output, plain)


def test_no_output_is_recorded_unless_asked_for(llama):
    plain, output = generate_both(llama, 3)
    assert output.keys() == plain.keys()
    assert not flatten(output)


@pytest.mark.parametrize("layers", [[1, 3], [2, 4], [0, 5], 2], ids=str)
def test_some_hidden_states(llama, layers):
    # The drafter reads entries 1, 3 and 5.
    plain, output = generate_both(llama, 3, output_hidden_states=layers)
    kept = {layer for (_, _, layer), tensor in flatten(plain).items() if tensor is not None}
    assert kept == ({layers} if isinstance(layers, int) else set(layers))
    check_same(output, plain)


@DRAFTERS
def test_static_cache(llama, num_right):
    plain, output = generate_both(llama, num_right, **OUTPUTS, cache_implementation="static")
    assert type(output.cache) is type(plain.cache) is StaticCache
    assert output.cache.get_seq_length() == plain.cache.get_seq_length() == output.sequences.shape[1] - 1
    check_same(output, plain)


def test_a_static_cache_with_a_window_is_refused():
    target = make_target("mistral")
    with pytest.raises(ValueError, match="StaticSlidingWindowLayer"):
        target.generate(
            **make_inputs(target, PROMPT_LENGTH),
            max_new_tokens=NUM_TOKENS,
            cache_implementation="static",
            assistant_model=make_drafter(target),
        )


@DRAFTERS
def test_prefill_in_chunks(target, num_right):
    # Of a prefill in chunks Transformers returns the last chunk's attentions and hidden states alone.
    lengths = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    plain, output = generate_both(target, num_right, **OUTPUTS, prefill_chunk_size=8)
    handle.remove()
    check_same(output, plain)
    plain_lengths, whole, drafted_lengths = (
        lengths[: NUM_TOKENS + 2],
        lengths[NUM_TOKENS + 2],
        lengths[NUM_TOKENS + 3 :],
    )
    assert plain_lengths == [8, 8, 4] + [1] * (NUM_TOKENS - 1)
    assert whole == PROMPT_LENGTH + NUM_TOKENS  # the replaying drafter's own
    assert drafted_lengths[:3] == [8, 8, 4]
    assert max(drafted_lengths[3:]) == K + 1


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_records_keep_no_forward_alive(architecture):
    target = make_target(architecture)  # in fp32, where no conversion makes a copy by chance
    target.set_attn_implementation("eager")
    _, output = generate_both(target, 3, **OUTPUTS)
    for (name, token, _), tensor in flatten(output).items():
        if token > 0 or name in ("scores", "logits"):  # the prompt's own are returned whole, as in plain generation
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), (name, token)
