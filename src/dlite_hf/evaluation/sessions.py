# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Records as sessions: the turns to generate, their prompts, and the target's cache kept between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.utils import logging

from ..conversations import template_inputs
from .tasks import Task


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Turn:
    """One answer to generate.

    Args:
        index: its place among the session's turns, from 0.
        messages: what comes before it: of a replayed turn the recorded conversation, recorded answers included; of a
            live one the user's messages alone.
        is_live: whether earlier answers are yet to be put between the messages.
    """

    index: int
    messages: list[dict[str, Any]]
    is_live: bool

    def context(self, answers: Sequence[str]) -> list[dict[str, Any]]:
        """The conversation before the answer.

        Args:
            answers: the answers to the session's earlier turns, at least `index` of them if the turn is live. A
                replayed turn has the recorded ones instead, so that all methods see the same prompt.

        Raises:
            ValueError: if a live turn lacks an answer.
        """
        if not self.is_live:
            return self.messages
        if len(answers) < self.index:
            raise ValueError(f"Turn {self.index} follows {self.index} answers, but {len(answers)} are given.")
        context = [self.messages[0]]
        for answer, message in zip(answers, self.messages[1:], strict=False):
            context += [{"role": "assistant", "content": answer}, message]
        return context


@dataclass(frozen=True)
class Session:
    """A record of a task as turns to generate.

    Args:
        task: the task's name.
        id: the record's.
        tools: what the chat template is given.
        turns: the turns, in order. Of a record with `messages` every assistant message after the first user or tool
            message, or the conversation's end if there is none; of one with `turns` each of them.
    """

    task: str
    id: str
    tools: list[dict[str, Any]] | None
    turns: list[Turn]


def make_sessions(task: Task) -> list[Session]:
    """The sessions of a task, one for every record, in order.

    Raises:
        ValueError: if a record says nothing to be answered.
    """
    return [
        Session(
            task=task.name,
            id=str(record["id"]),
            tools=record.get("tools") or None,
            turns=_live_turns(record["turns"]) if record.get("turns") else _replayed_turns(record, task.name),
        )
        for record in task.records
    ]


def _live_turns(texts: list[str]) -> list[Turn]:
    messages = [{"role": "user", "content": text} for text in texts]
    return [Turn(index, messages[: index + 1], is_live=True) for index in range(len(messages))]


def _replayed_turns(record: dict[str, Any], task: str) -> list[Turn]:
    messages = record["messages"]
    asked = next((place for place, message in enumerate(messages) if message["role"] in ("user", "tool")), None)
    if asked is None:
        raise ValueError(
            f"Record {record['id']!r} of {task} says nothing to be answered: its roles are "
            f"{[message['role'] for message in messages]}; give it a user message."
        )
    # What comes after the last recorded answer, such as a goodbye, was not answered, and is not generated either.
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant" and place > asked]
    return [Turn(index, messages[:place], is_live=False) for index, place in enumerate(places or [len(messages)])]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    context: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> torch.Tensor:
    """The prompt `[1, T]` of a turn, as the chat template renders its context.

    Args:
        tokenizer: the target's, with a chat template. One that renders no tools brings a warning.
        context: the messages before the answer.
        tools: the session's tools.
        chat_template_kwargs: for the chat template, such as `{"enable_thinking": False}`.

    Raises:
        ValueError: if it renders nothing.
    """
    messages, tools = template_inputs({"messages": context, "tools": tools})
    if tools and "tools" not in tokenizer.get_chat_template(tools=tools):
        logger.warning_once("The chat template renders no tools: the target does not see those of the sessions.")
    inputs = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        **(chat_template_kwargs or {}),
    )
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("The chat template renders no token; give one that renders the messages.")
    return inputs["input_ids"]


class PrefixCache:
    """The target's cache of one method in one session, kept from turn to turn as agents keep it.

    ```python
    cache, num_cached = prefix_cache.prepare(prompt_ids, max_new_tokens)
    output = target.generate(prompt_ids, cache=cache, return_dict_in_generate=True)
    prefix_cache.keep(output.sequences, output.cache)
    ```
    """

    def __init__(self) -> None:
        self._cache: Cache | None = None
        self._token_ids = torch.empty(0, dtype=torch.long)

    def prepare(self, prompt_ids: torch.Tensor, max_new_tokens: int) -> tuple[Cache | None, int]:
        """The cache to generate with, and how many tokens of the prompt it holds.

        It is cropped to the longest common prefix of its tokens and the prompt, of which at least the last token is
        left to feed. There is none, `(None, 0)`, where nothing is in common, and where it cannot be cropped: a
        quantised cache, a recurrent state, a sliding window that has let go of earlier tokens; and where its size is
        fixed and cannot hold the answer. The cache is given away: until [`keep`] there is nothing to reuse, so that a
        call that fails leaves no half-filled one.

        Args:
            prompt_ids (`torch.LongTensor` of shape `[1, T]`): the whole prompt.
            max_new_tokens: how long the answer may be.
        """
        cache, self._cache = self._cache, None
        length = min(len(self._token_ids), prompt_ids.shape[1] - 1)
        is_common = prompt_ids[0, :length].cpu() == self._token_ids[:length]
        num_common = int(is_common.cumprod(dim=0).sum())
        num_dropped = len(self._token_ids) - num_common
        if (
            cache is None
            or num_common == 0
            or not _can_continue(cache, num_dropped, prompt_ids.shape[1] + max_new_tokens)
        ):
            return None, 0
        if num_dropped:
            cache.crop(-num_dropped)
        return cache, num_common

    def keep(self, sequences: torch.Tensor, cache: Cache) -> None:
        """Takes the cache back after a call.

        Args:
            sequences (`torch.LongTensor` of shape `[1, T]`): prompt and answer.
            cache: the call's cache; it holds the first of these tokens, all but the last after `generate`.

        Raises:
            ValueError: if it holds more tokens than there are.
        """
        length = int(cache.get_seq_length())
        if length > sequences.shape[1]:
            raise ValueError(
                f"The cache holds {length} tokens, but the sequence has {sequences.shape[1]}; give the cache and the "
                "sequences of one call."
            )
        self._cache, self._token_ids = cache, sequences[0, :length].cpu()


def _can_continue(cache: Cache, num_dropped: int, length: int) -> bool:
    """Whether a cache can lose its last tokens and grow on, to `length` tokens."""
    if not cache.is_croppable:
        return False
    if cache.is_compileable and cache.get_max_length() < length:  # a static one overflows without an error
        return False
    # Layers that do not record their past have only their window of it, which no longer reaches back once it is full.
    forgetful = [layer for layer in cache.layers if getattr(layer, "record_past", True) is False]
    return num_dropped == 0 or all(
        isinstance(layer, DynamicSlidingWindowLayer) and layer.get_seq_length() < layer.sliding_window
        for layer in forgetful
    )


__all__ = ["PrefixCache", "Session", "Turn", "make_sessions", "render_prompt"]
