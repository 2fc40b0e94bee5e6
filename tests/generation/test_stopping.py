# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""A drafted call ends where a plain one ends, and nothing is looked at after the end."""

import itertools
import math
import string
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria, TextStreamer
from transformers.utils.logging import warning_once

from ..replay import generate_with_statistics, make_replay_drafter
from ..targets import VOCAB_SIZE, make_drafter, make_inputs, make_target


K = 5
PROMPT_LENGTH = 12
NUM_TOKENS = 16

DRAFTERS = pytest.mark.parametrize("num_right", [None, 3, "random"], ids=["oracle", "3_right", "random"])


@pytest.fixture(scope="module")
def target():
    return make_target("llama")


@pytest.fixture(scope="module")
def inputs(target):
    return make_inputs(target, PROMPT_LENGTH, seed=61)  # 16 different tokens follow


@pytest.fixture(scope="module")
def unstopped(target, inputs):
    """What the target says where nothing stops it."""
    return target.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)


@pytest.fixture(scope="module")
def tokenizer():
    """Tokens of two characters, so that a stop string can end within one."""
    texts = [letter + other for letter in string.ascii_lowercase for other in "012 "][:VOCAB_SIZE]
    texts[-6:] = "abcdef"  # `StopStringCriteria` needs to spell this word to learn how tokens are joined
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class RecordingStreamer(TextStreamer):
    """Keeps the tokens that it is given and the text that it makes of them."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.puts, self.text, self.num_ends = [], "", 0

    def put(self, value):
        assert self.num_ends == 0
        self.puts.append(value.tolist())
        super().put(value)

    def end(self):
        self.num_ends += 1
        super().end()

    def on_finalized_text(self, text, stream_end=False):
        self.text += text


class RecordingCriteria(StoppingCriteria):
    """Keeps the sequences that it sees, and stops at the `num_tokens`-th."""

    def __init__(self, num_tokens=None):
        self.num_tokens = num_tokens
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids[0].tolist())
        return torch.full((input_ids.shape[0],), len(self.seen) == self.num_tokens)


class RecordingProcessor(LogitsProcessor):
    """Keeps the sequences that it sees."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        return scores


def make_drafter_of(target, num_right, sequence, num_draft_tokens=K):
    """A drafter that proposes `sequence`, `num_right` tokens a block, also past a stop; or one with random weights."""
    drafter = make_drafter(target, num_draft_tokens=num_draft_tokens)
    if num_right == "random":
        return drafter
    drafter = make_replay_drafter(drafter, num_right)
    drafter.replay(target, sequence)
    return drafter


def generate(target, drafter, **kwargs):
    """A drafted call, and what the drafter did in it; a drafter of many calls finds its place anew."""
    getattr(drafter, "pivots", []).clear()
    return generate_with_statistics(target, drafter, **kwargs, do_sample=False)


def check_acceptance(statistics, num_right, num_draft_tokens=K):
    """Over several calls: an oracle was never rejected, the others were; those that know something were accepted."""
    num_rounds = sum(call.num_rounds for call in statistics)
    num_rounds_at_least = sum(math.ceil(call.num_emitted_tokens / (num_draft_tokens + 1)) for call in statistics)
    if num_right is None:
        assert num_rounds == num_rounds_at_least
    else:
        assert num_rounds > num_rounds_at_least
    if num_right != "random":
        assert sum(sum(call.accepted_per_position) for call in statistics) > 0


@DRAFTERS
def test_every_token_as_eos(target, inputs, unstopped, num_right):
    drafter = make_drafter_of(target, num_right, unstopped)
    options = {"max_new_tokens": NUM_TOKENS, "return_dict_in_generate": True}
    tokens = unstopped[0, PROMPT_LENGTH:].tolist()
    lengths, all_statistics = set(), []
    for i, token in enumerate(tokens):
        for eos_token_id in (token, [tokens[i - 3], token]):
            plain = target.generate(**inputs, **options, eos_token_id=eos_token_id, do_sample=False)
            output, statistics = generate(target, drafter, **inputs, **options, eos_token_id=eos_token_id)
            assert torch.equal(output.sequences, plain.sequences)
            is_eos = torch.isin(output.sequences[0, PROMPT_LENGTH:], torch.tensor(eos_token_id)).tolist()
            assert is_eos == [False] * (len(is_eos) - 1) + [True]
            assert output.cache.get_seq_length() == output.sequences.shape[1] - 1
            lengths.add(len(is_eos))
            all_statistics.append(statistics)
    assert lengths == set(range(1, NUM_TOKENS + 1))  # an end at every place of two blocks
    check_acceptance(all_statistics, num_right)


@DRAFTERS
def test_stop_strings_and_streamer(target, inputs, unstopped, tokenizer, num_right):
    drafter = make_drafter_of(target, num_right, unstopped)
    texts = tokenizer.convert_ids_to_tokens(unstopped[0].tolist())
    lengths, all_statistics = set(), []
    for place in range(PROMPT_LENGTH, PROMPT_LENGTH + NUM_TOKENS):
        options = {
            "max_new_tokens": NUM_TOKENS,
            "stop_strings": texts[place - 1] + texts[place][0],  # ends within the token
            "tokenizer": tokenizer,
        }
        plain_streamer, streamer = RecordingStreamer(tokenizer), RecordingStreamer(tokenizer)
        plain = target.generate(**inputs, **options, streamer=plain_streamer, do_sample=False)
        output, statistics = generate(target, drafter, **inputs, **options, streamer=streamer)
        assert torch.equal(output, plain)
        assert streamer.puts == plain_streamer.puts
        assert streamer.puts == [inputs["input_ids"].tolist(), *output[0, PROMPT_LENGTH:, None].tolist()]
        assert streamer.text == tokenizer.decode(output[0])
        assert streamer.num_ends == 1
        lengths.add(output.shape[1] - PROMPT_LENGTH)
        all_statistics.append(statistics)
    assert lengths == set(range(1, NUM_TOKENS + 1))
    check_acceptance(all_statistics, num_right)


@DRAFTERS
def test_criteria_and_processors_run_once_a_token(target, inputs, unstopped, num_right):
    drafter = make_drafter_of(target, num_right, unstopped)
    all_statistics = []
    for num_tokens in range(1, NUM_TOKENS + 1):
        criteria, processor = RecordingCriteria(num_tokens), RecordingProcessor()
        output, statistics = generate(
            target,
            drafter,
            **inputs,
            max_new_tokens=NUM_TOKENS + 1,
            stopping_criteria=[criteria],
            logits_processor=[processor],
        )
        sequence = unstopped[0, : PROMPT_LENGTH + num_tokens].tolist()
        assert output.tolist() == [sequence]
        # In order, on true prefixes, and not once more after the stop.
        assert criteria.seen == [sequence[:end] for end in range(PROMPT_LENGTH + 1, len(sequence) + 1)]
        assert processor.seen == [sequence[:end] for end in range(PROMPT_LENGTH, len(sequence))]
        all_statistics.append(statistics)
    check_acceptance(all_statistics, num_right)


@pytest.mark.parametrize("num_right", [None, 2], ids=["oracle", "2_right"])
@pytest.mark.parametrize(
    "limit",
    [{"max_new_tokens": n} for n in (1, 2, 3, K, K + 1, K + 2)] + [{"max_length": PROMPT_LENGTH + 1}],
    ids=lambda limit: "_".join(map(str, *limit.items())),
)
def test_length_limits(target, inputs, unstopped, limit, num_right):
    drafter = make_drafter_of(target, num_right, unstopped)
    plain = target.generate(**inputs, **limit, return_dict_in_generate=True, do_sample=False)
    output, statistics = generate(target, drafter, **inputs, **limit, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain.sequences)
    num_tokens = plain.sequences.shape[1] - PROMPT_LENGTH
    assert num_tokens == limit.get("max_new_tokens", 1)
    assert output.cache.get_seq_length() == plain.cache.get_seq_length() == plain.sequences.shape[1] - 1
    assert statistics.num_emitted_tokens == num_tokens - 1
    # The last token that fits is the target's own: a draft up to it would be verified for nothing.
    if num_right is None:
        assert sum(statistics.accepted_per_position) == statistics.num_drafted_tokens
        assert statistics.num_drafted_tokens == max(0, num_tokens - 1 - statistics.num_rounds)
    elif num_tokens > num_right + 2:
        assert 0 < sum(statistics.accepted_per_position) < statistics.num_drafted_tokens


@pytest.mark.parametrize("num_right", [None, 3], ids=["oracle", "3_right"])
def test_min_new_tokens_with_an_early_eos(target, inputs, unstopped, num_right):
    eos_token_id = int(unstopped[0, PROMPT_LENGTH + 2])
    options = {"max_new_tokens": 2 * NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "eos_token_id": eos_token_id}
    plain = target.generate(**inputs, **options, do_sample=False)
    assert plain.shape[1] > PROMPT_LENGTH + NUM_TOKENS
    drafter = make_drafter_of(target, num_right, plain)
    output, statistics = generate(target, drafter, **inputs, **options)
    assert torch.equal(output, plain)
    check_acceptance([statistics], num_right)


@DRAFTERS
def test_max_time(target, inputs, unstopped, num_right, monkeypatch):
    drafter = make_drafter_of(target, num_right, unstopped)
    lengths, all_statistics = set(), []

    def restart_clock():
        ticks = itertools.count()  # a clock that goes on whenever a criterion looks at it
        monkeypatch.setattr(
            "transformers.generation.stopping_criteria.time", SimpleNamespace(time=lambda: next(ticks))
        )

    for seconds in range(2 * (K + 1)):
        options = {"max_new_tokens": NUM_TOKENS, "max_time": seconds + 0.5}
        restart_clock()
        plain = target.generate(**inputs, **options, do_sample=False)
        restart_clock()
        output, statistics = generate(target, drafter, **inputs, **options)
        assert torch.equal(output, plain)
        lengths.add(output.shape[1] - PROMPT_LENGTH)
        all_statistics.append(statistics)
    assert len(lengths) == 2 * (K + 1)  # an end at every place of two blocks
    check_acceptance(all_statistics, num_right)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5, 7, 15])
def test_forwards_of_an_oracle(target, inputs, num_draft_tokens):
    plain = target.generate(**inputs, max_new_tokens=64, do_sample=False)
    drafter = make_drafter_of(target, None, plain, num_draft_tokens)
    lengths = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    output, statistics = generate(target, drafter, **inputs, max_new_tokens=64)
    handle.remove()
    assert torch.equal(output, plain)
    assert len(lengths) == 1 + math.ceil(63 / (num_draft_tokens + 1))
    assert lengths[0] == PROMPT_LENGTH
    assert set(lengths[1:-1]) == {num_draft_tokens + 1}
    check_acceptance([statistics], None, num_draft_tokens)


@pytest.mark.parametrize("num_right", [None, 2, "random"], ids=["oracle", "2_right", "random"])
@pytest.mark.parametrize("num_assistant_tokens", [1, 3, K, K + 1])
def test_num_assistant_tokens(target, inputs, unstopped, num_assistant_tokens, num_right, caplog):
    warning_once.cache_clear()
    drafter = make_drafter_of(target, num_right, unstopped)
    lengths = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for _ in range(2):
        output, statistics = generate(
            target,
            drafter,
            **inputs,
            max_new_tokens=NUM_TOKENS,
            num_assistant_tokens=num_assistant_tokens,
        )
        assert torch.equal(output, unstopped)
    handle.remove()
    num_draft_tokens = min(num_assistant_tokens, K)
    assert max(length for length in lengths if length != PROMPT_LENGTH) == num_draft_tokens + 1
    check_acceptance([statistics], None if num_right == 2 and num_draft_tokens == 1 else num_right, num_draft_tokens)
    warnings = [record.getMessage() for record in caplog.records if "num_assistant_tokens" in record.getMessage()]
    assert len(warnings) == (num_assistant_tokens > K)
