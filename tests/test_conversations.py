# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What is supervised of a conversation, under chat templates that differ, and of a corpus."""

import json
from itertools import groupby

import pytest
from datasets import Dataset, Features, Json, List, Value, load_dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from dlite_hf import conversations as module
from dlite_hf.conversations import end_of_turn_ids, template_inputs, tokenize_conversation, tokenize_conversations

from .targets import CHATML


# As Qwen3's: thinking is dropped from turns before the last user message, and `enable_thinking=False` puts an empty
# block into the prompt.
QWEN3 = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content or '' %}
{%- if message.role == 'assistant' %}
{%- set reasoning = message.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}<|im_start|>assistant
{% if loop.index0 > ns.last_query and (loop.last or reasoning) %}<think>
{{ reasoning.strip('\\n') }}
</think>

{% endif %}{{ content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if content else '' }}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>{{ content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

LLAMA3 = (
    "<|begin_of_text|>{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "qwen3": QWEN3, "llama3": LLAMA3}

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CORPUS = ["Hello there, how are you?\n\n\nThe weather is fine.\n\nWhat is the weather in Paris?\n"] * 3
EMPTY_BLOCK = "<think>\n\n</think>\n\n"


def make_tokenizer(template):
    """Byte-level BPE, with the tokens of the templates; no token of it ends a text by default but `<|endoftext|>`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+| ?[^\s\p{L}]+|\s*\n+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", *SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    # As Llama's: it would begin any text, and the template does so already.
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 1 + SPECIAL.index("<|begin_of_text|>"))]
    )
    backend.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(params=TEMPLATES)
def any_tokenizer(request):
    return make_tokenizer(TEMPLATES[request.param])


@pytest.fixture
def chatml():
    return make_tokenizer(CHATML)


@pytest.fixture
def qwen3():
    return make_tokenizer(QWEN3)


def eos_ids(tokenizer):
    """What ends a turn in these templates; none of it is `tokenizer.eos_token`."""
    return tokenizer.convert_tokens_to_ids(["<|eot_id|>" if "eot_id" in tokenizer.chat_template else "<|im_end|>"])


def eos(tokenizer):
    return tokenizer.decode(eos_ids(tokenizer))


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def conversation(answer="Hello there", **fields):
    return {"messages": [user("Hi"), assistant(answer)], **fields}


def spans(tokenizer, sample):
    """The supervised spans of a sample: for each, the ids before it and its own text."""
    start, found = 0, []
    for is_supervised, group in groupby(sample["supervised"]):
        end = start + len(list(group))
        if is_supervised:
            found.append((sample["input_ids"][:start], tokenizer.decode(sample["input_ids"][start:end])))
        start = end
    assert start == len(sample["input_ids"])
    return found


def replies(conversation, tokenizer, **kwargs):
    """For each sample the texts supervised. Each comes behind exactly the tokens that serving feeds for its turn."""
    samples = tokenize_conversation(conversation, tokenizer, eos_ids(tokenizer), kwargs)
    messages, reasons = conversation["messages"], conversation.get("finish_reasons")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    own = [turn for i, turn in enumerate(turns) if (reasons[i] if reasons else turn == turns[-1])]
    prompts = [
        tokenizer.apply_chat_template(
            messages[:turn], tools=conversation.get("tools"), add_generation_prompt=True, return_dict=False, **kwargs
        )
        for turn in own
    ]
    found = [spans(tokenizer, sample) for sample in samples]
    assert [before for each in found for before, _ in each] == prompts
    return [[text for _, text in each] for each in found]


def test_two_turns_of_the_target(any_tokenizer):
    end = eos(any_tokenizer)
    messages = [user("Hi"), assistant("Hello there"), user("What is the weather?"), assistant("Fine.\nAnd yours?")]
    both = {"messages": messages, "finish_reasons": ["stop", "stop"]}
    expected = ["Hello there" + end, "Fine.\nAnd yours?" + end]
    if any_tokenizer.chat_template == QWEN3:  # its empty thinking block is there in the last turn alone
        assert replies(both, any_tokenizer) == [[EMPTY_BLOCK + expected[0]], [EMPTY_BLOCK + expected[1]]]
    else:
        assert replies(both, any_tokenizer) == [expected]
    # What the template appends to the last turn is gone: the target never writes it.
    sample = tokenize_conversation(both, any_tokenizer, eos_ids(any_tokenizer))[-1]
    assert sample["input_ids"][-1] == eos_ids(any_tokenizer)[0]


def test_context_is_not_supervised(chatml):
    messages = [user("Hi"), assistant("One"), user("And?"), assistant("Two"), user("And?"), assistant("Three")]
    assert replies({"messages": messages}, chatml) == [["Three<|im_end|>"]]
    for reasons, expected in [
        ([None, "stop", None], [["Two<|im_end|>"]]),
        (["stop", None, "stop"], [["One<|im_end|>", "Three<|im_end|>"]]),
        ([None, None, None], []),
    ]:
        assert replies({"messages": messages, "finish_reasons": reasons}, chatml) == expected
    # What follows the target's last turn is not read.
    assert replies({"messages": messages[:3], "finish_reasons": ["stop"]}, chatml) == [["One<|im_end|>"]]


def test_an_answer_that_was_cut_has_no_end_of_turn(any_tokenizer):
    messages = [user("Hi"), assistant("Hello th"), user("Go on"), assistant("Hello there")]
    cut = {"messages": messages, "finish_reasons": ["length", "stop"]}
    (first, *_), *_ = replies(cut, any_tokenizer)
    assert first == "Hello th"
    assert replies({"messages": messages[:2], "finish_reasons": ["length"]}, any_tokenizer) == [["Hello th"]]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (assistant("<think>\nThe weather"), "<think>\nThe weather"),
        (assistant(None, reasoning_content="The weather"), "<think>\nThe weather"),
        (assistant("", reasoning="The weather\n"), "<think>\nThe weather"),
        (assistant("Fi", reasoning="The weather"), "<think>\nThe weather\n</think>\n\nFi"),
        (assistant("<think>\nThe weather\n</think>\n\nFi"), "<think>\nThe weather\n</think>\n\nFi"),
        (assistant("Fi", tool_calls=[{"function": {"name": "f", "arguments": {}}}]), None),
        (assistant(None), ""),
    ],
)
def test_an_answer_that_was_cut_while_thinking(qwen3, message, expected):
    """The template would close the block, or put an empty one before it; the target wrote neither."""
    found = tokenize_conversation(
        {"messages": [user("Hi"), message], "finish_reasons": ["length"]}, qwen3, eos_ids(qwen3)
    )
    if expected is None:  # what the template makes of it, but for the end of turn
        rendered = qwen3.apply_chat_template([user("Hi"), message], tokenize=False)
        expected = rendered.split("<|im_start|>assistant\n")[-1].removesuffix("<|im_end|>\n")
    assert "".join(text for _, text in spans(qwen3, found[0])) == expected


def test_content_in_parts_that_was_cut(chatml):
    chatml.chat_template = CHATML.replace("message['content']", "message['content'][0].text")
    messages = [{"role": role, "content": [{"type": "text", "text": "Hi"}]} for role in ("user", "assistant")]
    assert replies({"messages": messages, "finish_reasons": ["length"]}, chatml) == [["Hi"]]


def test_thinking_that_later_turns_no_longer_show_begins_a_new_sample(qwen3):
    messages = [
        user("Hi"),
        assistant("Hello there", reasoning_content="A greeting."),
        user("What is the weather?"),
        assistant("<think>\nParis?\n</think>\n\nFine."),
    ]
    both = {"messages": messages, "finish_reasons": ["stop", "stop"]}
    assert replies(both, qwen3) == [
        ["<think>\nA greeting.\n</think>\n\nHello there<|im_end|>"],
        ["<think>\nParis?\n</think>\n\nFine.<|im_end|>"],
    ]
    samples = tokenize_conversation(both, qwen3, eos_ids(qwen3))
    assert "A greeting." in qwen3.decode(samples[0]["input_ids"])
    assert "A greeting." not in qwen3.decode(samples[1]["input_ids"])


def test_an_empty_thinking_block_of_the_prompt_is_not_supervised(qwen3):
    assert replies(conversation(), qwen3, enable_thinking=False) == [["Hello there<|im_end|>"]]
    assert replies(conversation(), qwen3) == [[EMPTY_BLOCK + "Hello there<|im_end|>"]]


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def tool_conversation(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        user("What is the weather?"),
        assistant(None, tool_calls=[call], reasoning_content="I call it."),
        {"role": "tool", "tool_call_id": "1", "content": "fine"},
        assistant("It is fine."),
    ]
    return {"messages": messages, "tools": TOOLS, "finish_reasons": ["stop", "stop"]}


def test_tool_calls_are_supervised_and_results_are_not(qwen3):
    """Thinking stays while the target calls tools: one sample."""
    call = '<tool_call>weather {"city": "Paris"}</tool_call><|im_end|>'
    assert replies(tool_conversation({"city": "Paris"}), qwen3) == [
        ["<think>\nI call it.\n</think>\n\n" + call, EMPTY_BLOCK + "It is fine.<|im_end|>"]
    ]


def test_arguments_that_are_text_change_nothing(qwen3):
    expected = tokenize_conversation(tool_conversation({"city": "Paris"}), qwen3, eos_ids(qwen3))
    assert '"weather"' in qwen3.decode(expected[0]["input_ids"])  # the tools are there
    assert tokenize_conversation(tool_conversation('{"city": "Paris"}'), qwen3, eos_ids(qwen3)) == expected
    broken = tokenize_conversation(tool_conversation('{"city": "Pa'), qwen3, eos_ids(qwen3))
    assert '{\\"city\\": \\"Pa' in spans(qwen3, broken[0])[0][1]


def test_bare_tools_are_wrapped(qwen3):
    call = tool_conversation({"city": "Paris"})
    bare = {**call, "tools": [tool["function"] for tool in TOOLS]}
    assert tokenize_conversation(bare, qwen3, eos_ids(qwen3)) == tokenize_conversation(call, qwen3, eos_ids(qwen3))


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', '{"city": "Pa', '"1"', "[1]", {"city": None}])
def test_what_a_template_gets_is_stable(arguments):
    """A regenerated conversation holds it, and is read again to be trained on."""
    conversation = tool_conversation(arguments)
    messages, tools = template_inputs({**conversation, "tools": [TOOLS[0]["function"]]})
    assert tools == TOOLS
    assert template_inputs({"messages": messages, "tools": tools}) == (messages, tools)
    parsed = {"city": "Paris"} if arguments == '{"city": "Paris"}' else arguments
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == parsed


def test_the_template_is_given_what_the_answer_was_made_with(qwen3):
    recorded = conversation(generation={"model": "m", "chat_template_kwargs": {"enable_thinking": False}})
    expected = tokenize_conversation(conversation(), qwen3, eos_ids(qwen3), {"enable_thinking": False})
    assert expected != tokenize_conversation(conversation(), qwen3, eos_ids(qwen3))
    for given in (None, {}, {"enable_thinking": False}):
        assert tokenize_conversation(recorded, qwen3, eos_ids(qwen3), given) == expected
    assert tokenize_conversations([recorded], qwen3, eos_ids(qwen3), 4096).to_list() == expected
    # A record need not tell, as one from elsewhere.
    for generation in (None, {"model": "m"}, {"chat_template_kwargs": None}):
        silent = conversation(generation=generation)
        assert tokenize_conversation(silent, qwen3, eos_ids(qwen3), {"enable_thinking": False}) == expected


def test_refuses_to_render_an_answer_in_another_way(qwen3):
    recorded = conversation(id="c7", generation={"chat_template_kwargs": {"enable_thinking": False}})
    message = r"'c7' was answered with .*\{'enable_thinking': False\}, but \{'enable_thinking': True\} are given"
    with pytest.raises(ValueError, match=message):
        tokenize_conversation(recorded, qwen3, eos_ids(qwen3), {"enable_thinking": True})


@pytest.mark.parametrize(("eos_token_id", "expected"), [(None, []), (3, [3]), ([3, 5], [3, 5])])
def test_end_of_turn_ids(eos_token_id, expected):
    assert end_of_turn_ids(GenerationConfig(eos_token_id=eos_token_id)) == expected


def test_null_keys_of_messages_count_as_missing(chatml):
    chatml.chat_template = "{% if messages[0].name is defined %}name {% endif %}" + CHATML
    plain = {"messages": [user("Hi"), assistant("")]}
    padded = {"messages": [user("Hi") | {"name": None}, assistant(None, tool_calls=None)], "tools": None}
    expected = tokenize_conversation(plain, chatml, eos_ids(chatml))
    assert tokenize_conversation(padded, chatml, eos_ids(chatml)) == expected
    assert padded["messages"][1] == assistant(None, tool_calls=None)


def test_only_the_nulls_that_a_table_has_added_are_dropped(qwen3):
    """In a table, all dictionaries have the same keys; in JSON, a null is what the model wrote."""
    corpus = [tool_conversation({"city": "Paris"}), tool_conversation({"day": 1})]
    expected = [sample for each in corpus for sample in tokenize_conversation(each, qwen3, eos_ids(qwen3))]
    table = Dataset.from_list(corpus)
    assert table[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris", "day": None}
    assert tokenize_conversations(table, qwen3, eos_ids(qwen3), 4096).to_list() == expected

    corpus = [tool_conversation({"city": None})]
    features = Features({"messages": List(Json()), "tools": List(Json()), "finish_reasons": List(Value("string"))})
    for each in (corpus, Dataset.from_list(corpus, features=features)):
        (sample,) = tokenize_conversations(each, qwen3, eos_ids(qwen3), 4096)
        assert 'weather {"city": null}' in spans(qwen3, sample)[0][1]


def test_no_token_spans_the_boundary_of_prompt_and_answer(chatml):
    """The prompt ends with a newline; one that begins the answer must not merge with it."""
    messages = conversation("\n\nHello")["messages"]
    rendered = chatml.apply_chat_template(messages, return_dict=False)
    prompt = chatml.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert rendered[: len(prompt)] != prompt  # the tokenizer would merge them
    assert replies(conversation("\n\nHello"), chatml) == [["\n\nHello<|im_end|>"]]
    # Serving feeds merged tokens for the next turn.
    messages += [user("And?"), assistant("Fine")]
    expected = [["\n\nHello<|im_end|>"], ["Fine<|im_end|>"]]
    assert replies({"messages": messages, "finish_reasons": ["stop", "stop"]}, chatml) == expected


def test_an_end_of_turn_inside_an_answer_ends_it(chatml):
    messages = [*conversation("Hello<|im_end|> there")["messages"], user("And?"), assistant("Fine")]
    both = {"messages": messages, "finish_reasons": ["stop", "stop"]}
    assert replies(both, chatml) == [["Hello<|im_end|>", "Fine<|im_end|>"]]


def test_any_of_several_ends_of_turn_ends_it(chatml):
    ids = chatml.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    (sample,) = tokenize_conversation(conversation(), chatml, ids)
    assert spans(chatml, sample)[0][1] == "Hello there<|im_end|>"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"finish_reason": "stop"}, "'c7' has `finish_reason` 'stop'.*`finish_reasons`"),
        ({"messages": [user("Hi")]}, "'c7' ends with role 'user'.*regenerate"),
        ({"messages": []}, "'c7' ends with role None"),
        ({"finish_reasons": []}, r"'c7' has 1 assistant messages and `finish_reasons` \[\]"),
        ({"finish_reasons": ["tool_calls"]}, r"'c7' has 1 .*\['tool_calls'\]"),
        ({"messages": [assistant("Hi")]}, "'c7' begins with an answer"),
    ],
)
def test_refuses_what_does_not_tell_the_targets_turns(chatml, fields, message):
    refused = {**conversation(id="c7"), **fields}
    with pytest.raises(ValueError, match=message):
        tokenize_conversation(refused, chatml, eos_ids(chatml))


def test_refuses_a_prompt_that_is_not_how_the_turn_begins(chatml):
    chatml.chat_template = "{{ messages | length }}" + CHATML
    with pytest.raises(ValueError, match=r"'c7': up to its message 1 .*assistant\\n'"):
        tokenize_conversation(conversation(id="c7"), chatml, eos_ids(chatml))


def test_refuses_a_template_that_does_not_end_the_turn(chatml):
    with pytest.raises(ValueError, match=r"A conversation: .*\[0\]"):
        tokenize_conversation(conversation(), chatml, [chatml.eos_token_id])


def as_dataset(corpus, folder):
    """The corpus as a file that `datasets` has read, with its cache in `folder`."""
    file = folder / "corpus.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in corpus))
    return load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "cache"))


def test_a_dataset_gives_what_a_list_gives(qwen3, tmp_path):
    two = [*conversation("One", tools=None)["messages"], user("And?"), assistant("Two", reasoning_content="Hm.")]
    corpus = [
        conversation("Hello " * 900, id="a"),
        tool_conversation('{"city": "Paris"}'),
        {"messages": two, "finish_reasons": ["length", "stop"]},
    ]
    options = {"tokenizer": qwen3, "eos_token_ids": set(eos_ids(qwen3)), "max_length": 8192}
    options["chat_template_kwargs"] = {"enable_thinking": True}
    expected = [s for each in corpus for s in tokenize_conversation(each, qwen3, eos_ids(qwen3))]
    assert len(expected) == 3 and len(expected[0]["input_ids"]) > 900
    assert tokenize_conversations(iter(corpus), **options).to_list() == expected
    assert tokenize_conversations(as_dataset(corpus, tmp_path), **options).to_list() == expected


def test_samples_reach_the_training_length(chatml):
    answer = "?!" * 4000
    (whole,) = tokenize_conversation(conversation(answer), chatml, eos_ids(chatml))
    assert len(whole["input_ids"]) > 8000
    for length in (4096, 7000):
        (cut,) = tokenize_conversations([conversation(answer)], chatml, eos_ids(chatml), length).to_list()
        assert cut == {name: values[:length] for name, values in whole.items()}


@pytest.mark.parametrize("from_file", [False, True])
def test_counts_what_it_skips_and_what_it_cuts(chatml, transformers_log, from_file, tmp_path):
    # With the end of turn an empty answer has one supervised token, and a cut one of one character as well.
    corpus = [conversation(answer, finish_reasons=["stop"]) for answer in ("Hello", "", "a", "!?" * 50)]
    corpus.append(conversation("a", finish_reasons=["length"]))
    corpus.append(conversation("of another model", finish_reasons=[None]))
    corpus.append({"messages": [user("?!" * 50), assistant("beyond the length")]})
    if from_file:
        corpus = as_dataset(corpus, tmp_path)
    for _ in range(2):  # from the cache as well
        transformers_log.clear()
        samples = tokenize_conversations(corpus, chatml, eos_ids(chatml), 60)
        texts = [spans(chatml, sample)[0][1] for sample in samples]
        assert texts[:2] == ["Hello<|im_end|>", "a<|im_end|>"] and len(texts) == 3
        assert "Skipped 4 of 7" in transformers_log.text
        assert "Cut 1 of 3 samples to `max_length` 60" in transformers_log.text


def test_says_nothing_where_nothing_is_lost(chatml, transformers_log):
    tokenize_conversations([conversation()], chatml, eos_ids(chatml), 4096)
    assert "Skipped" not in transformers_log.text and "Cut" not in transformers_log.text


@pytest.mark.parametrize(
    "corpus", [[conversation(), conversation("Other")], [conversation(finish_reasons=[None])], []]
)
def test_refuses_a_corpus_with_nothing_supervised(chatml, corpus):
    with pytest.raises(ValueError, match=f"None of {len(corpus)} samples .* 10"):
        tokenize_conversations(corpus, chatml, eos_ids(chatml), max_length=10)


def test_a_dataset_is_tokenised_once(chatml, tmp_path, monkeypatch):
    """And again where the tokenizer, its template or this module is another."""
    calls = []

    def counted(conversation, *args):
        calls.append(conversation["id"])
        return tokenize_conversation(conversation, *args)

    monkeypatch.setattr(module, "tokenize_conversation", counted)
    corpus = as_dataset([conversation(id=str(i)) for i in range(3)], tmp_path)
    for tokenizer, is_new in [(chatml, True), (make_tokenizer(CHATML), False), (make_tokenizer(QWEN3), True)]:
        calls.clear()
        tokenize_conversations(corpus, tokenizer, eos_ids(tokenizer), 4096)
        assert calls == (["0", "1", "2"] if is_new else [])
    monkeypatch.setattr(module.inspect, "getsource", lambda _: "another release")
    calls.clear()
    tokenize_conversations(corpus, chatml, eos_ids(chatml), 4096)
    assert len(calls) == 3
