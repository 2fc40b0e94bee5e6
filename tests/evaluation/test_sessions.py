# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Which turns a record has, what their prompts are, and what of the target's cache serves the next turn."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from dlite_hf.evaluation.sessions import PrefixCache, make_sessions, render_prompt
from dlite_hf.evaluation.tasks import Task

from ..replay import generate_with_statistics, make_replay_drafter
from ..targets import make_chatml_tokenizer, make_drafter, make_inputs, make_target


SYSTEM = {"role": "system", "content": "Be brief."}
OPTIONS = {"do_sample": False, "return_dict_in_generate": True}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def session_of(**record):
    (session,) = make_sessions(Task("mine", "agent", [{"id": 3, **record}]))
    return session


def contexts_of(messages):
    turns = session_of(messages=messages).turns
    assert [turn.index for turn in turns] == list(range(len(turns)))
    return [turn.context(["generated"] * turn.index) for turn in turns]


def test_a_session_says_where_it_is_from():
    session = session_of(turns=["Hi"])
    assert (session.task, session.id, session.tools) == ("mine", "3", None)
    assert session_of(messages=[user("Hi")], tools=[{"name": "f"}]).tools == [{"name": "f"}]


def test_a_recorded_session_is_replayed():
    messages = [SYSTEM, user("a"), assistant("b"), tool("c"), assistant("d"), user("e")]
    assert contexts_of(messages) == [messages[:2], messages[:4]]


@pytest.mark.parametrize("messages", [[user("a")], [SYSTEM, user("a"), tool("b")]])
def test_without_an_answer_there_is_one_turn_at_the_end(messages):
    assert contexts_of(messages) == [messages]


def test_a_greeting_answers_nothing():
    messages = [assistant("Hello, how can I help?"), user("a"), assistant("b")]
    assert contexts_of(messages) == [messages[:2]]
    with pytest.raises(ValueError, match=r"Record 3 of mine says nothing to be answered: its roles are \['system'\]"):
        session_of(messages=[SYSTEM])


def test_a_live_session_goes_on_from_the_answers():
    first, second, third = session_of(turns=["a", "b", "c"]).turns
    assert first.context([]) == [user("a")]
    assert second.context(["x"]) == second.context(["x", "y"]) == [user("a"), assistant("x"), user("b")]
    expected = [user("a"), assistant("x"), user("b"), assistant("y"), user("c")]
    assert third.context(["x", "y"]) == third.context(["x", "y", "z"]) == expected
    with pytest.raises(ValueError, match="Turn 2 follows 2 answers, but 1 are given"):
        third.context(["x"])


def test_a_prompt_is_what_the_template_renders():
    tokenizer = make_chatml_tokenizer()
    prompt_ids = render_prompt(tokenizer, [user("ab"), {"role": "assistant", "content": None}])
    text = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_ids.shape == (1, len(prompt_ids[0])) and prompt_ids.dtype == torch.long
    assert "".join(tokenizer.convert_ids_to_tokens(prompt_ids[0])) == text


def test_a_prompt_has_tools_and_the_templates_options(transformers_log):
    tokenizer = make_chatml_tokenizer()
    tokenizer.chat_template = "{{ tools[0].function.name }} {{ mood }} {{ messages[0].content }}"
    prompt_ids = render_prompt(tokenizer, [user("ab")], [{"name": "call"}], {"mood": "kind"})
    assert "".join(tokenizer.convert_ids_to_tokens(prompt_ids[0])) == "call kind ab"
    assert "renders no tools" not in transformers_log.text
    render_prompt(make_chatml_tokenizer(), [user("ab")], [{"name": "call"}])
    assert "renders no tools" in transformers_log.text


def generate(target, prompt_ids, method, cache, num_new_tokens):
    """A turn on `cache`; with the drafter, two tokens of each draft are right."""
    options = {"max_new_tokens": num_new_tokens, "attention_mask": torch.ones_like(prompt_ids), **OPTIONS}
    fresh = target.generate(prompt_ids, **options)
    if method == "plain":
        output = target.generate(prompt_ids, cache=cache, **options)
    else:
        drafter = make_replay_drafter(make_drafter(target, num_draft_tokens=5), num_right=2)
        drafter.replay(target, fresh.sequences)
        output, statistics = generate_with_statistics(target, drafter, input_ids=prompt_ids, cache=cache, **options)
        assert 0 < sum(statistics.accepted_per_position) < statistics.num_drafted_tokens
        assert max(drafter.errors) < 1e-3
    assert cache is None or output.cache is cache
    assert torch.equal(output.sequences, fresh.sequences)
    return output


def replayed_prompts(target, lengths=(20, 9, 13)):
    """Prompts that each begin with the one before it, and go on otherwise than the target's answer."""
    prompts = [make_inputs(target, lengths[0])["input_ids"]]
    for seed, length in enumerate(lengths[1:], start=1):
        answer = target.generate(prompts[-1], max_new_tokens=1, do_sample=False)[:, -1:]
        rest = make_inputs(target, length - 1, seed)["input_ids"]
        prompts.append(torch.cat([prompts[-1], (answer + 1) % target.config.vocab_size, rest], dim=1))
    return prompts


@pytest.mark.parametrize("method", ["plain", "drafted"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_replayed_turn_reuses_the_prompt_before_it(architecture, method):
    target = make_target(architecture)
    prefix_cache, reused = PrefixCache(), []
    for prompt_ids in replayed_prompts(target):
        cache, num_cached = prefix_cache.prepare(prompt_ids, 12)
        assert (cache is None) == (num_cached == 0)
        assert cache is None or cache.get_seq_length() == num_cached
        output = generate(target, prompt_ids, method, cache, num_new_tokens=12)
        prefix_cache.keep(output.sequences, output.cache)
        reused.append(num_cached)
    # The recorded answers took the place of the generated ones.
    assert reused == [0, 20, 29]


@pytest.mark.parametrize("method", ["plain", "drafted"])
def test_a_live_turn_reuses_the_answer_too(method):
    target = make_target("mistral")  # a window of 8: nothing need be dropped, so it serves
    prefix_cache = PrefixCache()
    first = generate(target, make_inputs(target, 20)["input_ids"], method, None, num_new_tokens=12)
    prefix_cache.keep(first.sequences, first.cache)
    prompt_ids = torch.cat([first.sequences, make_inputs(target, 5, seed=1)["input_ids"]], dim=1)
    cache, num_cached = prefix_cache.prepare(prompt_ids, 12)
    assert cache is first.cache and num_cached == 31  # the last token has not been through the target
    generate(target, prompt_ids, method, cache, num_new_tokens=12)


@pytest.mark.parametrize("method", ["plain", "drafted"])
@pytest.mark.parametrize("architecture", ["mistral", "gemma3"])
@pytest.mark.parametrize("length, num_new_tokens, expected", [(3, 5, 3), (3, 6, 0), (20, 12, 0)])
def test_a_window_that_is_full_is_not_reused(architecture, method, length, num_new_tokens, expected):
    target = make_target(architecture)
    first, second = replayed_prompts(target, (length, 9))
    prefix_cache = PrefixCache()
    output = generate(target, first, method, None, num_new_tokens)
    prefix_cache.keep(output.sequences, output.cache)
    cache, num_cached = prefix_cache.prepare(second, 12)
    assert num_cached == expected and (cache is None) == (expected == 0)
    generate(target, second, method, cache, num_new_tokens=12)


def test_the_last_token_of_a_prompt_is_always_fed():
    target = make_target("llama")
    prompt_ids = make_inputs(target, 10)["input_ids"]
    prefix_cache = PrefixCache()
    for expected in (0, 9):  # the same prompt again
        cache, num_cached = prefix_cache.prepare(prompt_ids, 12)
        assert num_cached == expected
        output = generate(target, prompt_ids, "plain", cache, num_new_tokens=4)
        prefix_cache.keep(output.sequences, output.cache)
    assert prefix_cache.prepare(prompt_ids[:, :6], 12)[1] == 5


def test_nothing_in_common_is_nothing_to_reuse():
    target = make_target("llama")
    prompt_ids = make_inputs(target, 10)["input_ids"]
    output = generate(target, prompt_ids, "plain", None, num_new_tokens=4)
    prefix_cache = PrefixCache()
    prefix_cache.keep(output.sequences, output.cache)
    # Only the beginning counts: the rest is the same.
    other = prompt_ids.clone()
    other[0, 0] += 1
    assert prefix_cache.prepare(other, 12) == (None, 0)


def test_a_cache_that_was_given_away_is_not_reused():
    target = make_target("llama")
    prompt_ids = make_inputs(target, 10)["input_ids"]
    output = generate(target, prompt_ids, "plain", None, num_new_tokens=4)
    prefix_cache = PrefixCache()
    prefix_cache.keep(output.sequences, output.cache)
    assert prefix_cache.prepare(output.sequences, 12)[1] == 13
    assert prefix_cache.prepare(output.sequences, 12) == (None, 0)  # as after a call that failed


class UncroppableCache(DynamicCache):
    """As one that is quantised, which no package of the tests offers."""

    is_croppable = False


def test_a_cache_that_cannot_be_cropped_is_not_reused():
    target = make_target("llama")
    prompt_ids = make_inputs(target, 10)["input_ids"]
    output = generate(target, prompt_ids, "plain", UncroppableCache(config=target.config), num_new_tokens=4)
    prefix_cache = PrefixCache()
    prefix_cache.keep(output.sequences, output.cache)
    assert prefix_cache.prepare(output.sequences, 12) == (None, 0)


@pytest.mark.parametrize(("max_new_tokens", "is_reused"), [(6, True), (7, False)])
def test_a_cache_of_fixed_size_is_reused_while_it_holds_the_answer(max_new_tokens, is_reused):
    target = make_target("llama")
    prompt_ids = make_inputs(target, 10)["input_ids"]
    cache = StaticCache(config=target.config, max_cache_len=20)
    output = generate(target, prompt_ids, "plain", cache, num_new_tokens=4)
    prefix_cache = PrefixCache()
    prefix_cache.keep(output.sequences, output.cache)
    cache, num_cached = prefix_cache.prepare(output.sequences, max_new_tokens)  # of 14 tokens
    assert num_cached == (13 if is_reused else 0)
    if is_reused:
        generate(target, output.sequences, "plain", cache, num_new_tokens=max_new_tokens)  # as without the cache


def test_a_cache_of_another_call_is_refused():
    target = make_target("llama")
    cache = DynamicCache(config=target.config)
    target(make_inputs(target, 10)["input_ids"], cache=cache)
    with pytest.raises(ValueError, match="The cache holds 10 tokens, but the sequence has 6"):
        PrefixCache().keep(torch.ones(1, 6, dtype=torch.long), cache)
