# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from datasets import load_dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from dlite_hf.regeneration import NothingAnsweredError, regenerate
from dlite_hf.regeneration_backends import Answer, LocalBackend, PromptTooLongError


CHAT_TEMPLATE = """\
{%- for tool in tools or [] %}tools {{ tool.function.name }} {% endfor %}\
{%- for message in messages %}<|im_start|> {{ message.role }} {{ message.content }} \
{%- for call in message.tool_calls or [] %} {{ call.function.name }} {{ call.function.arguments.x }}{% endfor %} \
<|im_end|> {% endfor %}\
{%- if add_generation_prompt %}<|im_start|> assistant{% if quiet %} w90{% endif %}{% endif %}"""


def make_tokenizer(special_tokens=(), **words):
    """One word a token, `w<id>` but for the first ones and `words`, such as `w10="."`."""
    first = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "system", "user", "assistant", "tool", "tools"]
    names = [words.get(f"w{i}", f"w{i}") for i in range(len(first), 97)]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(first + names)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=list(special_tokens),
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def make_conversation(name, *contents):
    messages = [(user, assistant)[i % 2](content) for i, content in enumerate(contents)]
    return {"id": name, "source": "a test", "messages": messages}


CONVERSATIONS = [
    make_conversation("one", "w9 w10"),
    make_conversation("two", "w10"),
    make_conversation("three", "w11 w12", "w13 w14 w15", "w16 w17 w18 w19 w20 w21 w22"),
    make_conversation("four", "w23 w24 w25 w26 w27 w28 w29 w30 w31 w32 w33 w34"),
    make_conversation("five", "w35 w36"),
]
MAX_NEW_TOKENS = 12
GREEDY = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False}


def read(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def answer_ids(target, tokenizer, messages, tools=None, **template):
    """Greedy, by itself: no batch, no padding."""
    text = tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True, **template)
    prompt = torch.tensor([tokenizer(text)["input_ids"]])
    return target.generate(prompt, **GREEDY)[0, prompt.shape[1] :].tolist()


def answer_text(target, tokenizer, messages, tools=None):
    return tokenizer.decode(answer_ids(target, tokenizer, messages, tools))


class Echo:
    """Answers with the last message's text, or with what `outcomes` has for it."""

    def __init__(self, outcomes=None, **generation):
        self.outcomes = outcomes or {}
        self.generation = {"model": "echo", "revision": None, "backend": "test", **generation}
        self.asked = []

    def answer(self, waiting):
        while waiting:
            request = waiting.popleft()
            self.asked.append([message["content"] for message in request.messages])
            text = request.messages[-1]["content"]
            yield request, self.outcomes.get(text) or Answer(assistant(text.upper()), "stop")


# --- the target in this process


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("declared", ["generation_config", "argument", "argument_config"])
def test_answers_are_the_targets(declared, as_list, tiny_llama, tokenizer, tmp_path):
    # Two tokens that end some of the answers, but not the second.
    uncut = [answer_ids(tiny_llama, tokenizer, conversation["messages"]) for conversation in CONVERSATIONS]
    first = next(token for token in uncut[0][3:] if token not in uncut[1])
    second = next(token for token in uncut[2][3:] if token not in [first, *uncut[1]])
    eos_token_id = [first, second] if as_list else first
    kwargs = dict(GREEDY)
    if declared == "generation_config":
        tiny_llama.generation_config.eos_token_id = eos_token_id
    elif declared == "argument":
        kwargs["eos_token_id"] = eos_token_id
    else:
        kwargs = {"generation_config": GenerationConfig(**kwargs, eos_token_id=eos_token_id)}

    file = tmp_path / "answers.jsonl"
    backend = LocalBackend(tiny_llama, tokenizer, batch_size=3, **kwargs)
    assert str(regenerate(backend, CONVERSATIONS, file)).startswith("5 succeeded (0 of them")
    records = {record["id"]: record for record in read(file)}
    assert len(records) == 5

    reasons = []
    stop_ids = {first, second} if as_list else {first}
    for conversation, ids in zip(CONVERSATIONS, uncut, strict=True):
        end = next((i for i, token in enumerate(ids) if token in stop_ids), None)
        reasons.append("length" if end is None else "stop")
        record = records[conversation["id"]]
        assert record["messages"] == [*conversation["messages"], assistant(tokenizer.decode(ids[:end]))]
        earlier = [None] if conversation["id"] == "three" else []
        assert record["finish_reasons"] == [*earlier, reasons[-1]] and record["source"] == "a test"
        assert record["generation"]["eos_token_id"] == eos_token_id
    assert set(reasons) == {"stop", "length"}


def test_continuous_batching_gives_the_same_answers(tiny_llama, tokenizer, tmp_path):
    eos_token_id = answer_ids(tiny_llama, tokenizer, CONVERSATIONS[0]["messages"])[4]
    # With two at once, the third waits for a place.
    kwargs = {**GREEDY, "eos_token_id": eos_token_id, "batch_size": 2, "max_prompt_tokens": 20}
    too_long = make_conversation("six", "w9 " * 20)
    config = ContinuousBatchingConfig(num_blocks=4, page_size=32)
    records = []
    for name, extra in (("batches", {}), ("continuous", {"continuous_batching_config": config})):
        file = tmp_path / f"{name}.jsonl"
        backend = LocalBackend(tiny_llama, tokenizer, **kwargs, **extra)
        counts = regenerate(backend, [too_long, *CONVERSATIONS], file, turns="all")
        assert (counts.succeeded, counts.skipped) == (5, 1)
        records.append(sorted(read(file), key=lambda record: record["id"]))
    assert records[0] == records[1]
    assert {reason for record in records[0] for reason in record["finish_reasons"]} == {"stop", "length"}


def test_continuous_batching_has_a_batch_in_flight(tiny_llama, tokenizer, tmp_path, monkeypatch):
    in_flight, seen = [], []

    class Manager:
        def add_request(self, prompt):
            in_flight.append(str(prompt))
            return str(prompt)

        def get_result(self, timeout):
            seen.append(len(in_flight))
            return SimpleNamespace(request_id=in_flight.pop(), generated_tokens=[9], error=None)

    monkeypatch.setattr(tiny_llama, "continuous_batching_context_manager", lambda **kwargs: nullcontext(Manager()))
    config = ContinuousBatchingConfig()
    backend = LocalBackend(tiny_llama, tokenizer, batch_size=3, continuous_batching_config=config, **GREEDY)
    assert regenerate(backend, CONVERSATIONS, tmp_path / "answers.jsonl").succeeded == 5
    assert seen == [3, 3, 3, 2, 1]


def test_continuous_batching_that_stops(tiny_llama, tokenizer, tmp_path, transformers_log):
    # One block of 16 tokens holds no conversation with its answer.
    config = ContinuousBatchingConfig(num_blocks=1, page_size=16)
    backend = LocalBackend(tiny_llama, tokenizer, batch_size=1, continuous_batching_config=config, **GREEDY)
    with pytest.raises(RuntimeError, match="Continuous batching stopped by itself"):
        regenerate(backend, CONVERSATIONS[:2], tmp_path / "answers.jsonl")
    assert "Conversation 'one' failed: RuntimeError: No requests can be scheduled" in transformers_log.text


def test_the_template_renders_the_tokens_that_were_generated(tiny_llama, tmp_path):
    messages = CONVERSATIONS[0]["messages"]
    ids = answer_ids(tiny_llama, make_tokenizer(), messages)
    # A space before a full stop would be cleaned up, and a tool call's tokens are often special ones.
    start = next(i for i in range(len(ids)) if len({token for token in ids[i : i + 3] if token >= 9}) == 3)
    call = ["<tool_call>", ".", "</tool_call>"]
    words = {f"w{token}": word for token, word in zip(ids[start : start + 3], call, strict=True)}
    tokenizer = make_tokenizer(["<tool_call>", "</tool_call>"], **words)
    tokenizer.clean_up_tokenization_spaces = True
    file = tmp_path / "answers.jsonl"
    regenerate(LocalBackend(tiny_llama, tokenizer, **GREEDY), CONVERSATIONS[:1], file)

    answered = read(file)[0]["messages"]
    assert "<tool_call> . </tool_call>" in answered[-1]["content"]
    prompt_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    rendered = tokenizer.apply_chat_template(answered, return_dict=False)
    assert rendered[: len(prompt_ids) + MAX_NEW_TOKENS] == prompt_ids + ids


def test_every_turn_is_the_targets_own(tiny_llama, tokenizer, tmp_path):
    conversation = {
        "id": "tools",
        "messages": [
            user("w9"),
            assistant(
                None, tool_calls=[{"type": "function", "function": {"name": "w40", "arguments": '{"x": "w41"}'}}]
            ),
            {"role": "tool", "content": "w42 w43", "tool_call_id": None},
            assistant("w44"),
            user("w45"),
        ],
        "tools": [{"name": "w40", "description": "bare"}],
    }
    file = tmp_path / "answers.jsonl"
    regenerate(LocalBackend(tiny_llama, tokenizer, batch_size=2, **GREEDY), [conversation], file, turns="all")
    record = read(file)[0]

    tools = [{"type": "function", "function": conversation["tools"][0]}]
    expected = [user("w9")]
    for said in ([{"role": "tool", "content": "w42 w43"}], [user("w45")], []):
        expected += [assistant(answer_text(tiny_llama, tokenizer, expected, tools)), *said]
    assert record["messages"] == expected and record["tools"] == tools
    assert record["finish_reasons"] == ["length"] * 3
    # The tools are seen: without them the first answer is another one.
    assert expected[1]["content"] != answer_text(tiny_llama, tokenizer, expected[:1])


def test_tool_calls_of_the_context_are_rendered(tiny_llama, tokenizer, tmp_path):
    call = {"type": "function", "function": {"name": "w40", "arguments": '{"x": "w41"}'}}
    messages = [user("w9"), assistant(None, tool_calls=[call]), {"role": "tool", "content": "w42"}]
    file = tmp_path / "answers.jsonl"
    regenerate(LocalBackend(tiny_llama, tokenizer, **GREEDY), [{"id": "call", "messages": messages}], file)
    parsed = {"type": "function", "function": {"name": "w40", "arguments": {"x": "w41"}}}
    context = [user("w9"), assistant("", tool_calls=[parsed]), {"role": "tool", "content": "w42"}]
    assert read(file)[0]["messages"] == [*context, assistant(answer_text(tiny_llama, tokenizer, context))]
    assert read(file)[0]["finish_reasons"] == [None, "length"]


def test_chat_template_kwargs(tiny_llama, tokenizer, tmp_path):
    file = tmp_path / "answers.jsonl"
    backend = LocalBackend(tiny_llama, tokenizer, chat_template_kwargs={"quiet": True}, **GREEDY)
    regenerate(backend, CONVERSATIONS[:1], file)
    messages = CONVERSATIONS[0]["messages"]
    ids = answer_ids(tiny_llama, tokenizer, messages, quiet=True)
    assert ids != answer_ids(tiny_llama, tokenizer, messages)
    assert read(file)[0]["messages"][-1]["content"] == tokenizer.decode(ids)
    assert read(file)[0]["generation"]["chat_template_kwargs"] == {"quiet": True}


def test_a_cut_inside_a_character_leaves_no_replacement_character(tiny_llama, tokenizer, tmp_path):
    ids = answer_ids(tiny_llama, tokenizer, CONVERSATIONS[0]["messages"])
    assert ids[1] >= 9 and ids[1] != ids[0]
    half = make_tokenizer(**{f"w{ids[1]}": "\ufffd"})
    for eos_token_id, expected in ((None, f"w{ids[0]} "), (ids[2], f"w{ids[0]} \ufffd")):
        file = tmp_path / f"{eos_token_id}.jsonl"
        kwargs = {"max_new_tokens": 2 if eos_token_id is None else 3, "eos_token_id": eos_token_id}
        regenerate(LocalBackend(tiny_llama, half, do_sample=False, **kwargs), CONVERSATIONS[:1], file)
        assert read(file)[0]["messages"][-1]["content"] == expected


def test_generation_is_recorded(tiny_llama, tokenizer):
    tiny_llama.generation_config.update(temperature=0.7, top_k=20, repetition_penalty=1.1)
    tiny_llama.config._commit_hash = "abc"
    greedy = LocalBackend(tiny_llama, tokenizer, seed=3, **GREEDY).generation
    assert greedy == {
        "model": tiny_llama.name_or_path,
        "revision": "abc",
        "backend": "transformers",
        "dtype": "float32",
        "do_sample": False,
        "max_new_tokens": MAX_NEW_TOKENS,
        "repetition_penalty": 1.1,
    }
    sampling = {"do_sample": True, "max_new_tokens": MAX_NEW_TOKENS}
    sampled = LocalBackend(tiny_llama, tokenizer, seed=3, top_k=5, **sampling).generation
    assert sampled == {**greedy, "do_sample": True, "seed": 3, "temperature": 0.7, "top_k": 5, "top_p": 1.0}


@pytest.mark.parametrize("folder", ["/home/jane/", "C:\\Users\\jane\\", "./jane/"])
def test_the_targets_folder_is_not_recorded(tiny_llama, tokenizer, folder):
    tiny_llama.name_or_path = folder + "target"
    assert LocalBackend(tiny_llama, tokenizer, **GREEDY).generation["model"] == "target"


def test_sampling_cuts_nothing_off_that_nobody_asked_for(tiny_llama, tokenizer, tmp_path):
    # Nearly uniform over 97 tokens, of which `generate`'s own default keeps 50.
    tiny_llama.lm_head.weight.data.mul_(1e-4)
    tiny_llama.train()
    file = tmp_path / "answers.jsonl"
    backend = LocalBackend(tiny_llama, tokenizer, do_sample=True, max_new_tokens=100, seed=0)
    assert not tiny_llama.training
    regenerate(backend, CONVERSATIONS, file)
    words = {word for record in read(file) for word in record["messages"][-1]["content"].split()}
    assert len(words) > 90
    assert {"temperature": 1.0, "top_k": 0, "top_p": 1.0}.items() <= read(file)[0]["generation"].items()


def test_a_seed_repeats_its_answers(tiny_llama, tokenizer, tmp_path):
    answers = []
    for number, seed in enumerate((1, 1, 2)):
        file = tmp_path / f"{number}.jsonl"
        backend = LocalBackend(tiny_llama, tokenizer, do_sample=True, max_new_tokens=8, seed=seed)
        regenerate(backend, CONVERSATIONS[:2], file)
        answers.append([record["messages"] for record in read(file)])
    assert answers[0] == answers[1] != answers[2]


def test_settings_of_the_local_backend_are_checked(tiny_llama, tokenizer):
    with pytest.raises(ValueError, match=r"\['logits_processor'\] are no settings of a GenerationConfig"):
        LocalBackend(tiny_llama, tokenizer, logits_processor=[])
    with pytest.raises(ValueError, match="one answer, not 2"):
        LocalBackend(tiny_llama, tokenizer, do_sample=True, num_return_sequences=2)


def test_a_batch_that_fails_is_answered_in_halves(tiny_llama, tokenizer, tmp_path, monkeypatch, transformers_log):
    generate = tiny_llama.generate

    def out_of_memory(input_ids, attention_mask, **kwargs):
        if len(input_ids) > 2 or 23 in input_ids:
            raise torch.OutOfMemoryError("out of memory")
        return generate(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(tiny_llama, "generate", out_of_memory)
    file = tmp_path / "answers.jsonl"
    backend = LocalBackend(tiny_llama, tokenizer, **GREEDY)
    counts = regenerate(backend, CONVERSATIONS, file)
    assert (counts.succeeded, counts.failed) == (4, 1)
    assert "Conversation 'four' failed: OutOfMemoryError: out of memory" in transformers_log.text
    monkeypatch.undo()
    counts = regenerate(backend, CONVERSATIONS, file)
    assert (counts.succeeded, counts.resumed, counts.failed) == (5, 4, 0)
    expected = answer_text(tiny_llama, tokenizer, CONVERSATIONS[3]["messages"])
    assert read(file)[-1]["messages"][-1]["content"] == expected


def test_what_the_template_refuses_fails_alone(tiny_llama, tokenizer, tmp_path):
    tokenizer.chat_template = "{% if messages[0].content == 'w10' %}{{ raise_exception('no') }}{% endif %}w9"
    backend = LocalBackend(tiny_llama, tokenizer, **GREEDY)
    counts = regenerate(backend, CONVERSATIONS, tmp_path / "answers.jsonl")
    assert (counts.succeeded, counts.failed) == (4, 1)


def test_long_prompts_are_counted(tiny_llama, tokenizer, tmp_path):
    # Two tokens before the text, three after it.
    length = len(CONVERSATIONS[3]["messages"][0]["content"].split()) + 5
    for limit, skipped in ((length, 0), (length - 1, 1)):
        file = tmp_path / f"{limit}.jsonl"
        conversations = [CONVERSATIONS[0], CONVERSATIONS[3]]
        for resumed in (0, 2 - skipped):  # the second call finds the first one's answers
            backend = LocalBackend(tiny_llama, tokenizer, max_prompt_tokens=limit, **GREEDY)
            counts = regenerate(backend, conversations, file)
            assert (counts.succeeded, counts.skipped, counts.resumed) == (2 - skipped, skipped, resumed)
        assert [record["id"] for record in read(file)] == ["one", "four"][: 2 - skipped]


# --- what is asked, and what is written


def test_resume_after_a_kill_at_any_byte(tmp_path):
    # The last lines hold characters of several bytes, which a kill may cut too.
    conversations = [*CONVERSATIONS[:2], make_conversation("zwölf 十二", "\u2028 w8 é")]
    file = tmp_path / "answers.jsonl"
    regenerate(Echo(), conversations, file)
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 3 and "十".encode() in lines[-1]

    for length in range(len(whole) + 1):
        file.write_bytes(whole[:length])
        backend = Echo()
        counts = regenerate(backend, conversations, file)
        # Where only the newline is lost, the line is there.
        there = sum(len(b"".join(lines[: i + 1])) - 1 <= length for i in range(3))
        assert (counts.succeeded, counts.resumed, len(backend.asked)) == (3, there, 3 - there)
        assert file.read_bytes() == whole


def test_only_own_files_are_continued(tmp_path):
    file = tmp_path / "answers.jsonl"
    for content in (b"a text", b'{"learning_rate": 0.1}', b"3", b'{"id": 1}\nnonsense\n', b"[\n"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="answers.jsonl (is no conversation|holds answers made with None)"):
            regenerate(Echo(), CONVERSATIONS, file)
        assert file.read_bytes() == content


def test_other_settings_do_not_continue_a_file(tmp_path):
    file = tmp_path / "answers.jsonl"
    regenerate(Echo(revision="abc"), CONVERSATIONS[:2], file)
    content = file.read_bytes()
    for backend, turns in ((Echo(revision="def"), "last"), (Echo(revision="abc", top_k=2), "last"), (Echo(), "all")):
        with pytest.raises(ValueError, match=r"made with \{.*'abc'.*would be made with \{"):
            regenerate(backend, CONVERSATIONS, file, turns=turns)
        assert backend.asked == [] and file.read_bytes() == content


def test_last_and_all_turns(tmp_path):
    conversations = [
        {"id": "answered", "messages": [user("a"), assistant("old"), user("b"), assistant("older")]},
        {"id": "greeted", "messages": [assistant("hello"), user("a"), assistant("old"), assistant("older")]},
        {"id": "open", "finish_reason": "stop", "messages": [user("a"), assistant("old"), user("b")]},
    ]
    last, every = Echo(), Echo()
    regenerate(last, conversations, tmp_path / "last.jsonl")
    assert last.asked == [["a", "old", "b"], ["hello", "a", "old"], ["a", "old", "b"]]
    assert [r["finish_reasons"] for r in read(tmp_path / "last.jsonl")] == [[None, "stop"]] + [
        [None, None, "stop"],
        [None, "stop"],
    ]
    regenerate(every, conversations, tmp_path / "all.jsonl", turns="all")
    contents = [[message["content"] for message in r["messages"]] for r in read(tmp_path / "all.jsonl")]
    assert contents == [["a", "A", "b", "B"], ["hello", "a", "A", "A"], ["a", "A", "b", "B"]]
    records = read(tmp_path / "all.jsonl")
    assert [r["finish_reasons"] for r in records] == [["stop"] * 2, [None, "stop", "stop"], ["stop"] * 2]
    assert all("finish_reason" not in r and r["generation"]["turns"] == "all" for r in records)


def test_a_conversation_that_becomes_too_long_is_kept_up_to_there(tmp_path):
    file = tmp_path / "answers.jsonl"
    backend = Echo({"c": PromptTooLongError("c"), "d": PromptTooLongError("d")})
    conversations = [make_conversation("long", "a", "x", "b", "x", "c"), make_conversation("longer", "d", "x", "a")]
    counts = regenerate(backend, conversations, file, turns="all")
    assert str(counts) == (
        "1 succeeded (0 of them in an earlier call, 1 shortened) + 0 failed + 1 skipped = 2 conversations; "
        "0 of 2 answers were cut at their largest length"
    )
    assert read(file)[0]["messages"] == [user("a"), assistant("A"), user("b"), assistant("B")]
    assert read(file)[0]["finish_reasons"] == ["stop", "stop"]


def test_answers_that_were_cut_are_counted(tmp_path):
    file = tmp_path / "answers.jsonl"
    backend = Echo({"b": Answer(assistant("B"), "length"), "c": Answer(assistant("C"), "length")})
    # Of a failed conversation nothing counts, nor does an assistant's message that is not the target's own.
    greeted = {"id": "greeted", "messages": [assistant("hello"), user("a"), assistant("x"), user("b")]}
    conversations = [greeted, make_conversation("cut", "c"), make_conversation("gone", "b", "x", "d")]
    counts = regenerate(backend, conversations[:1], file, turns="all")
    assert (counts.answers, counts.cut) == (2, 1)
    backend.outcomes["d"] = OSError("gone")
    counts = regenerate(backend, conversations, file, turns="all")
    assert (counts.resumed, counts.failed, counts.answers, counts.cut) == (1, 1, 3, 2)
    assert str(counts).endswith("= 3 conversations; 2 of 3 answers were cut at their largest length")


def test_a_later_turn_that_fails_leaves_nothing(tmp_path, transformers_log):
    file = tmp_path / "answers.jsonl"
    conversations = [make_conversation("one", "a", "x", "b"), make_conversation("two", "c")]
    counts = regenerate(Echo({"b": OSError("gone")}), conversations, file, turns="all")
    assert (counts.succeeded, counts.failed) == (1, 1) and [record["id"] for record in read(file)] == ["two"]
    assert "Conversation 'one' failed: OSError: gone" in transformers_log.text


def test_nothing_but_failures(tmp_path, transformers_log):
    file = tmp_path / "answers.jsonl"
    down = {conversation["messages"][-1]["content"]: OSError("server down") for conversation in CONVERSATIONS}
    message = "None of 5 conversations was answered; the first, 'one', .* server down"
    with pytest.raises(NothingAnsweredError, match=message) as raised:
        regenerate(Echo(down), CONVERSATIONS, file)
    assert (raised.value.counts.failed, raised.value.counts.succeeded) == (5, 0)
    regenerate(Echo(), CONVERSATIONS[:1], file)
    counts = regenerate(Echo(down), CONVERSATIONS, file)
    assert (counts.succeeded, counts.failed, counts.resumed) == (1, 4, 1)
    assert "None of 4 conversations was answered" in transformers_log.text


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        (make_conversation("one", "w7"), "1 ids are not unique, 'one' for one"),
        ({"messages": [user("w7")]}, r"needs `id` and `messages`.*\['messages'\]"),
        ({"id": "two"}, r"needs `id` and `messages`.*\['id'\]"),
        ({"id": "two", "messages": []}, "needs `id` and `messages`"),
        ({"id": "two", "messages": [{"role": "system", "content": "w7"}, assistant("w8")]}, "nothing to be answered"),
    ],
)
@pytest.mark.parametrize("turns", ["last", "all"])
def test_refused_conversations(turns, conversation, message, tmp_path):
    backend = Echo()
    with pytest.raises(ValueError, match=message):
        regenerate(backend, [CONVERSATIONS[0], conversation], tmp_path / "answers.jsonl", turns=turns)
    assert backend.asked == [] and not (tmp_path / "answers.jsonl").exists()


def test_arguments_of_a_call_that_are_no_json_stay(tmp_path):
    file = tmp_path / "answers.jsonl"
    calls = [{"type": "function", "function": {"name": "f", "arguments": "x = 1"}}]
    messages = [user("a"), assistant("", tool_calls=calls), user("b")]
    regenerate(Echo(), [{"id": "one", "messages": messages}], file)
    assert read(file)[0]["messages"] == [*messages, assistant("B")]


def test_unknown_turns(tmp_path):
    with pytest.raises(ValueError, match='must be "last" or "all", but is \'first\''):
        regenerate(Echo(), CONVERSATIONS, tmp_path / "answers.jsonl", turns="first")


def test_half_a_surrogate_pair_does_not_end_the_run(tmp_path):
    file = tmp_path / "answers.jsonl"
    counts = regenerate(Echo(), [make_conversation("one", "a\ud83d"), make_conversation("two", "b")], file)
    assert counts.succeeded == 2 and read(file)[0]["messages"][-1]["content"] == "A?"


def test_progress_bar_can_be_turned_off(tmp_path, capsys):
    regenerate(Echo(), CONVERSATIONS[:2], tmp_path / "shown.jsonl")
    assert "Regenerating: 100%" in capsys.readouterr().err
    transformers_logging.disable_progress_bar()
    try:
        regenerate(Echo(), CONVERSATIONS[:2], tmp_path / "hidden.jsonl")
    finally:
        transformers_logging.enable_progress_bar()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("backwards", [False, True])
def test_datasets_reads_the_output(backwards, tmp_path):
    def call(name, **arguments):
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    def tool(name, **properties):
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    conversations = [
        make_conversation("plain", "a"),
        {
            "id": "f",
            "messages": [user("b"), assistant("", tool_calls=[call("f", x=1)]), {"role": "tool", "content": "1"}],
        },
        {"id": "g", "messages": [user("c"), assistant("hm", reasoning_content="why"), user("d")]},
    ]
    conversations[1]["tools"] = [tool("f", x={"type": "integer"})]
    conversations[2]["tools"] = [tool("g", x={"type": "string", "enum": ["s"]}, y={"type": "array"})]
    calls = assistant("C", tool_calls=[call("g", x="s", y=[1, 2])])
    file = tmp_path / "answers.jsonl"
    regenerate(Echo({"d": Answer(calls, "stop")}), conversations[:: -1 if backwards else 1], file)

    loaded = list(load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache")))
    assert len(loaded) == 3
    for row, record in zip(loaded, read(file), strict=True):
        messages = [{key: value for key, value in message.items() if value is not None} for message in row["messages"]]
        assert messages == record["messages"]
        assert row["tools"] == record.get("tools") and row["id"] == record["id"]
        assert row["finish_reasons"] == record["finish_reasons"] and row["generation"] == record["generation"]
    # What was loaded is input again.
    counts = regenerate(Echo(), loaded, tmp_path / "again.jsonl")
    assert counts.succeeded == 3
