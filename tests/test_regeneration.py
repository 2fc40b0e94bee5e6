# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GenerationConfig, PreTrainedTokenizerFast

from dlite_hf.regeneration import regenerate


CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|> {{ message.role }} {{ message.content }} <|im_end|> {% endfor %}\
{%- if add_generation_prompt %}<|im_start|> assistant{% endif %}"""


@pytest.fixture
def tokenizer():
    words = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "system", "user", "assistant"]
    vocab = {word: i for i, word in enumerate(words + [f"w{i}" for i in range(len(words), 97)])}
    backend = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )


def make_conversation(name, *contents):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"id": name, "source": "a test", "messages": messages}


CONVERSATIONS = [
    make_conversation("one", "w7 w8 w9"),
    make_conversation("two", "w10"),
    make_conversation("three", "w11 w12", "w13 w14 w15", "w16 w17 w18 w19 w20 w21 w22"),
    make_conversation("four", "w23 w24 w25 w26 w27 w28 w29 w30 w31 w32 w33 w34"),
    make_conversation("five", "w35 w36"),
]
MAX_NEW_TOKENS = 12


def read(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def answer_ids(target, tokenizer, conversation, **kwargs):
    """Greedy, by itself: no batch, no padding."""
    text = tokenizer.apply_chat_template(conversation["messages"], tokenize=False, add_generation_prompt=True)
    prompt = torch.tensor([tokenizer(text)["input_ids"]])
    return target.generate(prompt, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, **kwargs)[
        0, prompt.shape[1] :
    ].tolist()


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("declared", ["generation_config", "argument", "argument_config"])
def test_answers_are_the_targets(declared, as_list, tiny_llama, tokenizer, tmp_path):
    # Two tokens that end some of the answers, but not the second.
    uncut = [answer_ids(tiny_llama, tokenizer, conversation) for conversation in CONVERSATIONS]
    first = next(token for token in uncut[0][3:] if token not in uncut[1])
    second = next(token for token in uncut[2][3:] if token not in [first, *uncut[1]])
    eos_token_id = [first, second] if as_list else first
    kwargs = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False}
    tiny_llama.generation_config.pad_token_id = 0
    if declared == "generation_config":
        tiny_llama.generation_config.eos_token_id = eos_token_id
    elif declared == "argument":
        kwargs["eos_token_id"] = eos_token_id
    else:
        kwargs = {"generation_config": GenerationConfig(**kwargs, eos_token_id=eos_token_id)}

    file = tmp_path / "answers.jsonl"
    counts = regenerate(tiny_llama, tokenizer, CONVERSATIONS, file, batch_size=3, **kwargs)
    assert (counts.answered, counts.skipped, counts.already_done) == (5, 0, 0)
    records = {record["id"]: record for record in read(file)}
    assert len(records) == 5

    reasons = []
    stop_ids = {first, second} if as_list else {first}
    for conversation, ids in zip(CONVERSATIONS, uncut, strict=True):
        end = next((i for i, token in enumerate(ids) if token in stop_ids), None)
        reasons.append("length" if end is None else "stop")
        answer = {"role": "assistant", "content": tokenizer.decode(ids[:end])}
        expected = {**conversation, "messages": [*conversation["messages"], answer], "finish_reason": reasons[-1]}
        assert records[conversation["id"]] == expected
    assert set(reasons) == {"stop", "length"}


def test_resume_after_a_kill(tiny_llama, tokenizer, tmp_path):
    # The last line holds characters of several bytes, which a kill may cut too.
    conversations = [*CONVERSATIONS[:2], make_conversation("zwölf 十二", "w10 w11 w12 w13 w14 é")]
    file = tmp_path / "answers.jsonl"
    kwargs = {"batch_size": 2, "max_new_tokens": 1, "do_sample": False}
    regenerate(tiny_llama, tokenizer, conversations, file, **kwargs)
    whole = file.read_bytes()
    expected = {record["id"]: record for record in read(file)}
    last_line = whole.rstrip(b"\n").rfind(b"\n") + 1
    assert read(file)[-1]["id"] == "zwölf 十二" and "十".encode() in whole[last_line:]

    for length in range(last_line, len(whole) + 1):
        file.write_bytes(whole[:length])
        counts = regenerate(tiny_llama, tokenizer, conversations, file, **kwargs)
        torn = int(length < len(whole))
        assert (counts.answered, counts.already_done) == (torn, 3 - torn)
        assert len(read(file)) == 3 and {record["id"]: record for record in read(file)} == expected


def test_long_prompts_are_counted(tiny_llama, tokenizer, tmp_path):
    # Two tokens before the text, three after it.
    length = len(CONVERSATIONS[3]["messages"][0]["content"].split()) + 5
    for limit, skipped in ((length, 0), (length - 1, 1)):
        file = tmp_path / f"{limit}.jsonl"
        conversations = [CONVERSATIONS[0], CONVERSATIONS[3]]
        for _ in range(2):  # the second call finds the first one's answers
            counts = regenerate(
                tiny_llama, tokenizer, conversations, file, max_prompt_tokens=limit, max_new_tokens=1, do_sample=False
            )
            assert counts.skipped == skipped
            assert counts.answered + counts.skipped + counts.already_done == 2
        assert [record["id"] for record in read(file)] == ["one", "four"][: 2 - skipped]


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        (make_conversation("one", "w7", "w8"), "'one' ends with an assistant message"),
        ({"messages": [{"role": "user", "content": "w7"}]}, r"needs `id` and `messages`.*\['messages'\]"),
        ({"id": "one"}, r"needs `id` and `messages`.*\['id'\]"),
        ({"id": "one", "messages": []}, "needs `id` and `messages`"),
    ],
)
def test_refused_conversations(conversation, message, tiny_llama, tokenizer, tmp_path):
    file = tmp_path / "answers.jsonl"
    with pytest.raises(ValueError, match=message):
        regenerate(tiny_llama, tokenizer, [CONVERSATIONS[0], conversation], file, max_new_tokens=1)
    assert not file.exists()
