# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Conversations answered by the target become token ids and a mask of what the target wrote of them."""

import inspect
import json
import sys
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from datasets import Dataset, Features, Sequence, Value
from datasets.fingerprint import Hasher
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging


logger = logging.get_logger(__name__)

# The fields of a message that Transformers hands to a template as `reasoning_content`.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

_COLUMNS = Features(
    {
        "input_ids": Sequence(Value("int32")),
        "supervised": Sequence(Value("bool")),
        "num_supervised": Value("int32"),
        "is_cut": Value("bool"),
    }
)


def template_inputs(conversation: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages and the tools of a conversation as servers hand them to the chat template.

    A null key of a message counts as missing, and no content as an empty one. Arguments of tool calls that are JSON
    text, as in the OpenAI format, become dictionaries: templates write JSON themselves. A bare tool gets the form
    `{"type": "function", "function": ...}`. What it returns it leaves as it is, so that a conversation is rendered in
    training as it was when it was answered.
    """
    messages = []
    for message in conversation["messages"]:
        message = {key: value for key, value in message.items() if value is not None}
        message.setdefault("content", "")
        if "tool_calls" in message:
            message["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
        messages.append(message)
    tools = [
        tool if "function" in tool else {"type": "function", "function": tool}
        for tool in conversation.get("tools") or []
    ]
    return messages, tools or None


def end_of_turn_ids(config: GenerationConfig) -> list[int]:
    """The ids that end a turn of a target with this `generation_config`."""
    ids = config.eos_token_id
    return [ids] if isinstance(ids, int) else list(ids or [])


def tokenize_conversation(
    conversation: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Collection[int],
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[dict[str, list]]:
    """Samples `{"input_ids": [...], "supervised": [...]}`, both of the sample's length T, of one conversation.

    Supervised are the turns that the target wrote: what the chat template renders behind their prompt, up to and
    including the first end-of-turn token; without it where `max_new_tokens` cut the turn. What a template appends
    after that is not. A turn joins the sample before it where its prompt begins with exactly that sample's tokens;
    where the template renders earlier turns differently by then, as Qwen3's drops their thinking, it begins a new one.

    Args:
        conversation: `messages`; optionally `tools`, `id`, and `finish_reasons` with one entry for each assistant
            message: `"stop"`, `"length"` (it was cut), or `None` where the message is not the target's own. Without
            them the last message alone is the target's, and it ended its turn. `generation["chat_template_kwargs"]`
            is what the template was given when it was answered.
        tokenizer: the target's tokenizer, with a chat template.
        eos_token_ids: the ids that end the target's turn.
        chat_template_kwargs: passed to the chat template, such as `{"enable_thinking": False}`; by default what the
            conversation was answered with.

    Raises:
        ValueError: if the target's own turns cannot be told, if a turn's prompt is not how its rendering begins, if
            the template does not end the turn with one of `eos_token_ids`, or if the conversation was answered with
            other `chat_template_kwargs`.
    """
    messages, tools = template_inputs(conversation)
    kwargs = {**_template_kwargs(conversation, chat_template_kwargs), "tools": tools, "tokenize": False}
    samples: list[dict[str, list]] = []
    for turn, finish_reason in _own_turns(conversation, messages):
        prompt = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True, **kwargs)
        rendered = tokenizer.apply_chat_template(messages[: turn + 1], **kwargs)
        if not rendered.startswith(prompt):
            raise ValueError(
                f"{_name(conversation)}: up to its message {turn} it does not begin with that message's prompt, which "
                f"ends with {prompt[-40:]!r}, so what the target answered is unknown; use a chat template that "
                "renders an answer behind its generation prompt."
            )
        answer = rendered[len(prompt) :]
        if finish_reason == "length":
            answer = _cut_answer(messages[turn], answer)
        prompt_ids = _encode(tokenizer, prompt)
        answer_ids = _answer_ids(tokenizer, prompt, prompt_ids, answer)
        end = next((i for i, token in enumerate(answer_ids) if token in eos_token_ids), None)
        if finish_reason == "stop":
            if end is None:
                raise ValueError(
                    f"{_name(conversation)}: the chat template ends the answer with none of the target's end-of-turn "
                    f"ids {sorted(eos_token_ids)}; add the template's to `target.generation_config.eos_token_id`."
                )
            end += 1
        answer_ids = answer_ids[:end]

        if not samples or prompt_ids[: len(samples[-1]["input_ids"])] != samples[-1]["input_ids"]:
            samples.append({"input_ids": [], "supervised": []})
        sample = samples[-1]
        sample["supervised"] += [False] * (len(prompt_ids) - len(sample["input_ids"])) + [True] * len(answer_ids)
        sample["input_ids"] = prompt_ids + answer_ids
    return samples


def tokenize_conversations(
    conversations: Dataset | Iterable[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Collection[int],
    max_length: int,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Dataset:
    """[`tokenize_conversation`] of a corpus: a dataset of `input_ids` and `supervised`, in the corpus's order.

    Of a `datasets.Dataset` the result is cached beside it on disk, and memory-mapped; of any other iterable it is held
    in memory, with 5 bytes a token at most. Samples with fewer than two supervised tokens have no anchor; their
    number, and that of samples that were cut, is logged.

    Args:
        conversations: as in [`tokenize_conversation`].
        tokenizer: the target's tokenizer, with a chat template.
        eos_token_ids: the ids that end the target's turn.
        max_length: samples are cut to so many tokens, on the right.
        chat_template_kwargs: as in [`tokenize_conversation`].

    Raises:
        ValueError: if no sample is left, or a conversation is one that [`tokenize_conversation`] refuses.
    """
    options = {
        "tokenizer": tokenizer,
        "eos_token_ids": sorted(eos_token_ids),
        "max_length": max_length,
        "chat_template_kwargs": chat_template_kwargs,
    }
    if isinstance(conversations, Dataset):
        # Columns of tables, not of JSON: their dictionaries all have the same keys, and null was added.
        options["padded"] = [
            name
            for name, feature in conversations.features.items()
            if isinstance(getattr(feature, "feature", feature), dict)
        ]
        # By itself `datasets` knows a function by its name: without its text, an update would read the old cache.
        source = inspect.getsource(sys.modules[__name__])
        samples = conversations.map(
            _tokenize_batch,
            batched=True,
            batch_size=100,
            remove_columns=conversations.column_names,
            features=_COLUMNS,
            fn_kwargs=options,
            new_fingerprint=Hasher.hash((conversations._fingerprint, source, options)),
            desc="Tokenizing conversations",
        )
    else:
        samples = Dataset.from_dict(_tokenize_all(conversations, **options), features=_COLUMNS)

    statistics = samples.with_format("numpy")
    is_kept = statistics["num_supervised"][:] >= 2
    num_kept, num_cut = int(is_kept.sum()), int(statistics["is_cut"][:][is_kept].sum())
    if num_kept == 0:
        raise ValueError(
            f"None of {len(samples)} samples has two supervised tokens within `max_length` {max_length}; raise it, or "
            "give conversations with longer answers."
        )
    if num_kept < len(samples):
        logger.warning(
            f"Skipped {len(samples) - num_kept} of {len(samples)} samples: fewer than two supervised tokens within "
            f"`max_length` {max_length}."
        )
    if num_cut:
        logger.warning(f"Cut {num_cut} of {num_kept} samples to `max_length` {max_length}.")
    return samples.select(np.flatnonzero(is_kept)).select_columns(["input_ids", "supervised"])


def _tokenize_batch(batch: dict[str, list], padded: list[str], **options: Any) -> dict[str, list]:
    columns = {name: _without_nulls(values) if name in padded else values for name, values in batch.items()}
    rows = zip(*columns.values(), strict=True)
    return _tokenize_all((dict(zip(columns, row, strict=True)) for row in rows), **options)


def _tokenize_all(
    conversations: Iterable[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: list[int],
    max_length: int,
    chat_template_kwargs: dict[str, Any] | None,
) -> dict[str, list]:
    columns: dict[str, list] = {name: [] for name in _COLUMNS}
    for conversation in conversations:
        samples = tokenize_conversation(conversation, tokenizer, eos_token_ids, chat_template_kwargs)
        # Without a turn of the target's own it counts as a sample with nothing supervised.
        for sample in samples or [{"input_ids": [], "supervised": []}]:
            supervised = np.asarray(sample["supervised"][:max_length], dtype=np.bool_)
            columns["input_ids"].append(np.asarray(sample["input_ids"][:max_length], dtype=np.int32))
            columns["supervised"].append(supervised)
            columns["num_supervised"].append(int(supervised.sum()))
            columns["is_cut"].append(len(sample["input_ids"]) > max_length)
    return columns


def _template_kwargs(conversation: dict[str, Any], given: dict[str, Any] | None) -> dict[str, Any]:
    recorded = (conversation.get("generation") or {}).get("chat_template_kwargs")
    if given and recorded and given != recorded:
        raise ValueError(
            f"{_name(conversation)} was answered with `chat_template_kwargs` {recorded}, but {given} are given; leave "
            "them out, or let the target answer again with them."
        )
    return given or recorded or {}


def _own_turns(conversation: dict[str, Any], messages: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """The messages that the target wrote: their index and finish reason."""
    if conversation.get("finish_reason") is not None:
        raise ValueError(
            f"{_name(conversation)} has `finish_reason` {conversation['finish_reason']!r}, which is no longer read; "
            "replace it by `finish_reasons`, a list with one entry for each assistant message, null for those that "
            "are not the target's own."
        )
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    reasons = conversation.get("finish_reasons")
    if reasons is None:
        if not turns or turns[-1] != len(messages) - 1:
            raise ValueError(
                f"{_name(conversation)} ends with role {messages[-1]['role'] if messages else None!r}, but without "
                "`finish_reasons` its last message must be the target's answer, role 'assistant'; let the target "
                "answer it with `dlite_hf.regenerate`."
            )
        reasons = [None] * (len(turns) - 1) + ["stop"]
    if len(reasons) != len(turns) or not set(reasons) <= {"stop", "length", None}:
        raise ValueError(
            f"{_name(conversation)} has {len(turns)} assistant messages and `finish_reasons` {reasons}; give one of "
            "'stop', 'length' and None for each of them."
        )
    own_turns = [(turn, reason) for turn, reason in zip(turns, reasons, strict=True) if reason is not None]
    if own_turns and own_turns[0][0] == 0:
        raise ValueError(
            f"{_name(conversation)} begins with an answer of the target; put its prompt before it, or give None as "
            "the first of its `finish_reasons`."
        )
    return own_turns


def _cut_answer(message: dict[str, Any], rendered: str) -> str:
    """What the target wrote of an answer that was cut. A template may close its thinking for it, or empty it."""
    content = message.get("content")
    reasoning = next((message[field] for field in _REASONING_FIELDS if message.get(field)), None)
    if message.get("tool_calls"):
        return rendered
    if reasoning is None:
        return content if isinstance(content, str) else rendered
    if not content and reasoning.strip() in rendered:
        return rendered[: rendered.index(reasoning.strip()) + len(reasoning.strip())]
    return rendered


def _answer_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, prompt_ids: list[int], answer: str) -> list[int]:
    ids = _encode(tokenizer, prompt + answer)
    if ids[: len(prompt_ids)] == prompt_ids:
        return ids[len(prompt_ids) :]
    # A token spans the boundary. Serving feeds the prompt's own tokens and the target adds to them, so none can. (Not
    # always apart: a SentencePiece tokenizer puts a space before any text that it gets.)
    return _encode(tokenizer, answer)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # As `apply_chat_template` does it: the template writes the special tokens.
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, json.JSONDecodeError):
        arguments = None
    if not isinstance(arguments, dict):
        return call  # no text, or no JSON object: that is what the model wrote, and it stays
    return {**call, "function": {**function, "arguments": arguments}}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def _name(conversation: dict[str, Any]) -> str:
    return f"Conversation {conversation['id']!r}" if conversation.get("id") is not None else "A conversation"
