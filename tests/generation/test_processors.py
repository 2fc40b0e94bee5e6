# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Processors act on a drafted call as on a plain one, and never see a token that may be rejected."""

import functools
import math
import threading

import pytest
import torch
from torch import nn
from transformers import LogitsProcessor
from transformers.utils.logging import warning_once

from ..replay import ReplayDrafter, generate_with_statistics, make_replay_drafter
from ..targets import VOCAB_SIZE, make_drafter, make_inputs, make_target


K = 5
PROMPT_LENGTH = 12
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def target():
    return make_target("llama")


@pytest.fixture(scope="module")
def inputs(target):
    return make_inputs(target, PROMPT_LENGTH, seed=1)


class LogitsReplayDrafter(ReplayDrafter):
    """Drafts from the target's own raw logits, so that only the right processors lead to the right tokens.

    From position `num_right` of a block on, it drafts from those of another token.
    """

    def replay(self, target, sequence):
        super().replay(target, sequence)
        with torch.no_grad():
            self.logits = target(sequence).logits[0]

    def draft(
        self, context_features, inputs_embeds, previous_token_ids, num_draft_tokens=None, sampler=None, *options
    ):
        super().draft(context_features, inputs_embeds, previous_token_ids, num_draft_tokens)
        drafted, logits = previous_token_ids[:, :0], []
        for i in range(num_draft_tokens):
            step_logits = self.logits[None, min(self.pivots[-1] + 1 + i, len(self.logits) - 1)]
            if self.num_right is not None and i >= self.num_right:
                step_logits = step_logits.roll(1, dims=-1)
            token_ids = step_logits.argmax(dim=-1)
            if sampler is not None:
                token_ids, step_logits = sampler(step_logits, drafted)
            drafted = torch.cat([drafted, token_ids[:, None]], dim=1)
            logits.append(step_logits)
        return drafted, torch.stack(logits, dim=1)


def make_drafter_of(target, num_right):
    """A drafter that knows the target's logits, `num_right` times a block; or one with random weights."""
    drafter = make_drafter(target, num_draft_tokens=K)
    if num_right != "random":
        drafter = LogitsReplayDrafter(drafter.config).eval()
        drafter.num_right = num_right
    return drafter


def check_lossless(target, inputs, drafter, make_options, is_always_right=False):
    """Generates with and without `drafter`, each with options of its own, since processors may keep state."""
    limit = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    unprocessed = target.generate(**inputs, **limit)
    plain = target.generate(**inputs, **limit, **make_options())
    assert not torch.equal(plain, unprocessed), "the options change nothing"
    is_replaying = isinstance(drafter, ReplayDrafter)
    if is_replaying:
        drafter.replay(target, plain)
    output, statistics = generate_with_statistics(target, drafter, **inputs, **limit, **make_options())
    assert torch.equal(output, plain)
    assert sum(statistics.accepted_per_position) > 0 or not is_replaying
    num_rounds_at_least = math.ceil(statistics.num_emitted_tokens / (K + 1))
    assert (statistics.num_rounds == num_rounds_at_least) == is_always_right
    return output


class GrammarProcessor(LogitsProcessor):
    """Lets a state, which advances at every call, decide which tokens may follow."""

    def __init__(self):
        self.states = [3]

    def __call__(self, input_ids, scores):
        self.states.append((5 * self.states[-1] + int(input_ids[0, -1]) + 1) % 7)
        return scores.masked_fill(torch.arange(VOCAB_SIZE) % 7 == self.states[-1], float("-inf"))


class BanProcessor(LogitsProcessor):
    """Forbids tokens of one remainder at every second position; records what it is given."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        assert scores.shape == (1, VOCAB_SIZE) and input_ids.shape[0] == 1
        self.seen.append(input_ids[0].tolist())
        return scores.masked_fill(torch.arange(VOCAB_SIZE) % 3 == input_ids.shape[1] % 2, float("-inf"))


def allow_by_position(batch_id, sent):
    return list(range(len(sent) % 2, VOCAB_SIZE, 2))


OPTIONS = {
    "repetition_penalty": lambda: {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": lambda: {"no_repeat_ngram_size": 1},
    "bad_words_ids": lambda: {"bad_words_ids": [[22], [6], [28, 31]]},
    "prefix_allowed_tokens_fn": lambda: {"prefix_allowed_tokens_fn": allow_by_position},
    "min_new_tokens": lambda: {"min_new_tokens": 20, "eos_token_id": [22, 6]},
    "grammar": lambda: {"logits_processor": [GrammarProcessor()]},
    "several": lambda: {"repetition_penalty": 1.3, "logits_processor": [GrammarProcessor(), BanProcessor()]},
}


@pytest.mark.parametrize("num_right", [None, 3, "random"], ids=["oracle", "3_right", "random"])
@pytest.mark.parametrize("name", OPTIONS)
def test_processors(target, inputs, name, num_right):
    # The oracle is never rejected only if drafting applies the processors too, in their true state.
    check_lossless(target, inputs, make_drafter_of(target, num_right), OPTIONS[name], num_right is None)


@pytest.mark.parametrize("num_right", [None, 3], ids=["oracle", "3_right"])
def test_users_processors_see_the_true_prefixes_alone(target, inputs, num_right):
    processors = []

    def make_options():
        processors.append([BanProcessor(), GrammarProcessor()])
        return {"logits_processor": processors[-1]}

    output = check_lossless(target, inputs, make_drafter_of(target, num_right), make_options, num_right is None)
    (plain_ban, plain_grammar), (ban, grammar) = processors
    assert ban.seen == [output[0, :end].tolist() for end in range(PROMPT_LENGTH, output.shape[1])]
    assert ban.seen == plain_ban.seen
    assert grammar.states == plain_grammar.states


def forbid_half(scores, num_calls):
    """The tokens that a processor forbids at its `num_calls`-th call."""
    return scores.masked_fill(torch.arange(VOCAB_SIZE) % 2 == num_calls % 2, float("-inf"))


class LockingProcessor(LogitsProcessor):
    def __init__(self):
        self.lock, self.num_calls = threading.Lock(), 0

    def __call__(self, input_ids, scores):
        with self.lock:
            self.num_calls += 1
        return forbid_half(scores, self.num_calls)


def make_counter():
    num_calls = 0

    def count():
        nonlocal num_calls
        num_calls += 1
        return num_calls

    return count


class ClosureProcessor(LogitsProcessor):
    def __init__(self):
        self.count = make_counter()

    def __call__(self, input_ids, scores):
        return forbid_half(scores, self.count())


class NestedClosureProcessor(LogitsProcessor):
    def __init__(self):
        self.counters = {"calls": [functools.partial(make_counter())]}

    def __call__(self, input_ids, scores):
        return forbid_half(scores, self.counters["calls"][0]())


class ModuleProcessor(LogitsProcessor):
    def __init__(self):
        self.module = nn.Linear(1, 1)
        self.module.num_calls = 0

    def __call__(self, input_ids, scores):
        self.module.num_calls += 1
        return forbid_half(scores, self.module.num_calls)


def make_processing_function():
    count = make_counter()

    def processing_function(input_ids, scores):
        return forbid_half(scores, count())

    return processing_function


class FunctionAttributeProcessor(LogitsProcessor):
    def __init__(self):
        self.function = lambda scores: scores
        self.function.num_calls = 0

    def __call__(self, input_ids, scores):
        self.function.num_calls += 1
        return forbid_half(scores, self.function.num_calls)


class BuiltinMethodProcessor(LogitsProcessor):
    def __init__(self):
        self.log = [].append

    def __call__(self, input_ids, scores):
        self.log(None)
        return forbid_half(scores, len(self.log.__self__))


class DefaultArgumentProcessor(LogitsProcessor):
    def __init__(self):
        def count(calls=[]):  # noqa: B006
            calls.append(None)
            return len(calls)

        self.count = count

    def __call__(self, input_ids, scores):
        return forbid_half(scores, self.count())


class LargeProcessor(LogitsProcessor):
    def __init__(self):
        self.rules = [[i] for i in range(6000)]

    def __call__(self, input_ids, scores):
        return forbid_half(scores, len(self.rules) + input_ids.shape[1])


@pytest.mark.parametrize(
    ("make_processor", "name"),
    [
        (BuiltinMethodProcessor, "BuiltinMethodProcessor"),
        (DefaultArgumentProcessor, "DefaultArgumentProcessor"),
        (LargeProcessor, "LargeProcessor"),
        (LockingProcessor, "LockingProcessor"),
        (ClosureProcessor, "ClosureProcessor"),
        (NestedClosureProcessor, "NestedClosureProcessor"),
        (FunctionAttributeProcessor, "FunctionAttributeProcessor"),
        (ModuleProcessor, "ModuleProcessor"),
        (make_processing_function, "processing_function"),
    ],
)
def test_what_cannot_be_copied_stays_out_of_drafting(target, inputs, make_processor, name, caplog):
    warning_once.cache_clear()

    def make_options():
        return {"logits_processor": [make_processor()]}

    for _ in range(2):
        # It is not always right, since it drafts what the processor forbids.
        check_lossless(target, inputs, make_drafter_of(target, None), make_options)
    warnings = [record.getMessage() for record in caplog.records if "cannot be copied" in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{name} cannot be copied")


@pytest.mark.parametrize("num_right", [None, 3], ids=["oracle", "3_right"])
def test_classifier_free_guidance(target, inputs, num_right, caplog):
    warning_once.cache_clear()
    drafter = make_replay_drafter(make_drafter(target, num_draft_tokens=K), num_right)
    check_lossless(target, inputs, drafter, lambda: {"guidance_scale": 1.5}, num_right is None)
    warnings = [record.getMessage() for record in caplog.records if "cannot be copied" in record.getMessage()]
    assert len(warnings) == 1
    assert "ClassifierFreeGuidance" in warnings[0]


class StrictProcessor(LogitsProcessor):
    """Refuses every prefix but those of one sequence."""

    def __init__(self, sequence):
        self.sequence = sequence

    def __call__(self, input_ids, scores):
        if not torch.equal(input_ids, self.sequence[:, : input_ids.shape[1]]):
            raise RuntimeError("not a prefix")
        return scores


def test_a_processor_may_refuse_drafts(target, inputs, caplog):
    warning_once.cache_clear()
    limit = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    plain = target.generate(**inputs, **limit)
    drafter = make_drafter_of(target, 3)
    drafter.replay(target, plain)
    output, statistics = generate_with_statistics(
        target, drafter, **inputs, **limit, logits_processor=[StrictProcessor(plain)]
    )
    assert torch.equal(output, plain)
    assert 0 < sum(statistics.accepted_per_position) < statistics.num_drafted_tokens
    assert sum("refuses a draft" in record.getMessage() for record in caplog.records) == 1


class ClosedGrammar(LogitsProcessor):
    """Allows nothing behind the end of the sequence, which it makes likely."""

    def __init__(self, eos_token_id, prompt_length):
        self.eos_token_id, self.prompt_length = eos_token_id, prompt_length

    def __call__(self, input_ids, scores):
        if (input_ids[:, self.prompt_length :] == self.eos_token_id).any():
            return torch.full_like(scores, float("-inf"))
        scores = scores.clone()
        scores[:, self.eos_token_id] += 8
        return scores


def test_sampling_survives_a_grammar_that_ends(target, inputs):
    drafter = make_drafter(target, num_draft_tokens=K)
    num_drafted = 0
    for seed in range(6):
        torch.manual_seed(seed)
        output, statistics = generate_with_statistics(
            target,
            drafter,
            **inputs,
            do_sample=True,
            temperature=3.0,
            eos_token_id=7,
            max_new_tokens=30,
            logits_processor=[ClosedGrammar(7, PROMPT_LENGTH)],
        )
        generated = output[0, PROMPT_LENGTH:].tolist()
        assert 7 not in generated[:-1]
        num_drafted += statistics.num_drafted_tokens
    assert num_drafted > 0
