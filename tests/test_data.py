# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What is supervised, which positions are anchors, and how blocks are laid out."""

import math

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dlite_hf.data import (
    drafting_data_collator,
    sample_anchors,
    sample_blocks,
    tokenize_conversation,
    tokenize_conversations,
)


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = 1


def make_chatml_tokenizer():
    """Characters as tokens, and two special tokens that begin and end a turn: ids 0 and 1."""
    vocab = {token: i for i, token in enumerate(["<|im_start|>", "<|im_end|>", "\n", *map(chr, range(32, 126))])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture
def tokenizer():
    return make_chatml_tokenizer()


def conversation(answer="Hello there", **fields):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **fields}


def supervised_text(tokenizer, sample):
    ids = [token for token, kept in zip(sample["input_ids"], sample["supervised"], strict=True) if kept]
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def test_supervises_the_reply_and_its_end_of_turn(tokenizer):
    sample = tokenize_conversation(conversation(), tokenizer, [EOS], 4096)
    assert supervised_text(tokenizer, sample) == "Hello there<|im_end|>"
    # The template's newline behind the turn is gone: the target never writes it.
    text = "".join(tokenizer.convert_ids_to_tokens(sample["input_ids"]))
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello there<|im_end|>"


def test_only_the_last_turn_is_supervised(tokenizer):
    messages = [*conversation("First")["messages"], *conversation("Second")["messages"]]
    sample = tokenize_conversation({"messages": messages}, tokenizer, [EOS], 4096)
    assert supervised_text(tokenizer, sample) == "Second<|im_end|>"


def test_an_answer_that_was_cut_has_no_end_of_turn(tokenizer):
    sample = tokenize_conversation(conversation(finish_reason="length"), tokenizer, [EOS], 4096)
    assert supervised_text(tokenizer, sample) == "Hello there"
    assert sample["input_ids"][-1] != EOS
    sample = tokenize_conversation(conversation(finish_reason="stop"), tokenizer, [EOS], 4096)
    assert supervised_text(tokenizer, sample) == "Hello there<|im_end|>"


def test_cuts_at_the_training_length(tokenizer):
    whole = tokenize_conversation(conversation(), tokenizer, [EOS], 4096)
    length = len(whole["input_ids"]) - 5
    cut = tokenize_conversation(conversation(), tokenizer, [EOS], length)
    assert cut == {name: values[:length] for name, values in whole.items()}


def test_tools_reach_the_template(tokenizer):
    tokenizer.chat_template = "{% if tools %}tools {% endif %}" + CHATML
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    sample = tokenize_conversation(conversation(tools=tools), tokenizer, [EOS], 4096)
    assert "".join(tokenizer.convert_ids_to_tokens(sample["input_ids"])).startswith("tools <|im_start|>")
    assert supervised_text(tokenizer, sample) == "Hello there<|im_end|>"


def test_refuses_what_has_no_answer(tokenizer):
    with pytest.raises(ValueError, match="'c7' ends with role 'user'"):
        tokenize_conversation({"id": "c7", "messages": [{"role": "user", "content": "Hi"}]}, tokenizer, [EOS], 4096)


def test_refuses_a_prompt_that_is_not_how_the_conversation_begins(tokenizer):
    tokenizer.chat_template = "{{ messages | length }}" + CHATML
    with pytest.raises(ValueError, match="'c7'.*do not begin with"):
        tokenize_conversation(conversation(id="c7"), tokenizer, [EOS], 4096)


def test_refuses_a_template_that_does_not_end_the_turn(tokenizer):
    with pytest.raises(ValueError, match=r"'c7'.*\[77\]"):
        tokenize_conversation(conversation(id="c7"), tokenizer, [77], 4096)


@pytest.mark.parametrize("as_dataset", [False, True])
def test_counts_what_it_skips(tokenizer, transformers_log, as_dataset):
    # With the end of turn, an empty answer has one supervised token, and a cut one of one character as well.
    corpus = [conversation(answer, finish_reason="stop") for answer in ("Hello", "", "a")]
    corpus.append(conversation("a", finish_reason="length"))
    samples = tokenize_conversations(Dataset.from_list(corpus) if as_dataset else corpus, tokenizer, [EOS], 4096)
    assert [supervised_text(tokenizer, sample) for sample in samples] == ["Hello<|im_end|>", "a<|im_end|>"]
    assert "Skipped 2 of 4" in transformers_log.text


def test_refuses_a_corpus_with_nothing_supervised(tokenizer):
    with pytest.raises(ValueError, match="None of 2 .* 10"):
        tokenize_conversations([conversation(), conversation("Other")], tokenizer, [EOS], max_length=10)


def brute_force_anchors(supervised):
    """Per row, all a with tokens a and a + 1 supervised, 1 <= a <= T - 2."""
    return [[a for a in range(1, len(row) - 1) if row[a] and row[a + 1]] for row in supervised.tolist()]


def test_anchors_are_exactly_the_valid_positions():
    supervised = torch.rand(50, 30, generator=torch.Generator().manual_seed(0)) > 0.4
    supervised[:5] = True
    supervised[5:10] = False
    anchors = sample_anchors(supervised, max_anchors=512).tolist()
    assert anchors == [[row, a] for row, each in enumerate(brute_force_anchors(supervised)) for a in each]


def test_anchors_are_drawn_uniformly_without_replacement_and_sorted():
    supervised = torch.tensor([[False] * 3 + [True] * 11, [False] * 9 + [True] * 3 + [False] * 2])
    valid = brute_force_anchors(supervised)
    counts = torch.zeros(14)
    for seed in range(600):
        anchors = sample_anchors(supervised, 4, torch.Generator().manual_seed(seed))
        first = anchors[anchors[:, 0] == 0, 1].tolist()
        assert len(first) == 4 and first == sorted(set(first)) and set(first) <= set(valid[0])
        assert anchors[anchors[:, 0] == 1, 1].tolist() == valid[1]
        counts[first] += 1
    # 600 * 4 / 10 draws of each are expected, with a standard deviation of 12.
    assert ((counts[valid[0]] - 240).abs() < 60).all()


def test_the_collator_pads_on_the_right():
    batch = drafting_data_collator(
        [{"input_ids": [5, 6, 7], "supervised": [False, True, True]}, {"input_ids": [8], "supervised": [True]}]
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["supervised"].tolist() == [[False, True, True], [True, False, False]]


def make_blocks(features, **overrides):
    options = {"max_anchors": 512, "num_draft_tokens": 3, "anchor_group_size": 2, "loss_decay": 4.0}
    return sample_blocks(drafting_data_collator(features), **{**options, **overrides})


def test_blocks_hold_the_tokens_around_their_anchor():
    ids = list(range(10, 20))
    blocks = make_blocks([{"input_ids": ids, "supervised": [False] * 4 + [True] * 6}])
    assert blocks["anchors"].tolist() == [[0, a] for a in range(4, 9)]
    for (_, a), previous, drafted, weights in zip(
        *(blocks[name].tolist() for name in ("anchors", "previous_token_ids", "draft_token_ids", "weights")),
        strict=True,
    ):
        inside = min(3, len(ids) - 1 - a)
        assert previous == [ids[a - 1], ids[a]]
        assert drafted[:inside] == ids[a + 1 : a + 1 + inside]
        assert weights == pytest.approx([math.exp(-k / 4) for k in range(inside)] + [0] * (3 - inside))
    assert (
        make_blocks([{"input_ids": ids, "supervised": [True] * 10}], anchor_group_size=1)["previous_token_ids"].shape[
            1
        ]
        == 1
    )


def test_weights_are_zero_behind_a_hole_and_in_the_padding():
    features = [
        {"input_ids": list(range(9)), "supervised": [True, True, True, False, True, True, True, True, True]},
        {"input_ids": list(range(4)), "supervised": [True] * 4},
    ]
    blocks = make_blocks(features, num_draft_tokens=4)
    reached = {
        tuple(anchor): (row > 0).sum().item()
        for anchor, row in zip(blocks["anchors"].tolist(), blocks["weights"], strict=True)
    }
    # Row 0 has its hole at 3: from anchor 1 only token 2 counts. Row 1 ends at 3, the batch at 8.
    assert reached == {(0, 1): 1, (0, 4): 4, (0, 5): 3, (0, 6): 2, (0, 7): 1, (1, 1): 2, (1, 2): 1}
    for row in (blocks["weights"] > 0).tolist():
        assert row == sorted(row, reverse=True)


def test_a_batch_without_anchors_has_one_of_no_weight():
    blocks = make_blocks([{"input_ids": [1, 2, 3, 4], "supervised": [False, True, False, True]}])
    assert blocks["weights"].tolist() == [[0, 0, 0]]
