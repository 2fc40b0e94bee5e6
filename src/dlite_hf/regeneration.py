# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Prompts in, conversations out whose last answer is the target's own: what a drafter is trained on."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging


logger = logging.get_logger(__name__)


@dataclass
class RegenerationCounts:
    """What became of the input: `answered + skipped + already_done` is its length.

    Args:
        answered: conversations that got an answer in this call.
        skipped: conversations whose prompt is longer than `max_prompt_tokens`.
        already_done: conversations that an earlier, interrupted call had answered.
    """

    answered: int = 0
    skipped: int = 0
    already_done: int = 0


def regenerate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterable[dict[str, Any]],
    output_file: str | os.PathLike,
    *,
    batch_size: int = 32,
    max_prompt_tokens: int = 1024,
    **generate_kwargs: Any,
) -> RegenerationCounts:
    """Lets `target` answer every conversation and appends the results to a JSON lines file.

    Each line repeats the conversation's own fields, with the answer as one more message and `finish_reason`: `"stop"`
    where the target ended its turn, `"length"` where `max_new_tokens` cut it (its end of turn is then not supervised).
    A call that was killed is taken up where it stopped: a torn last line is dropped, and what is there is not redone.

    Args:
        target: the causal LM that the drafter will serve.
        tokenizer: its tokenizer, with a chat template.
        conversations: dictionaries with a unique `id` and `messages` that end with a user or tool message.
        output_file: the JSON lines file.
        batch_size: conversations answered at once.
        max_prompt_tokens: longer prompts are skipped, and counted.
        generate_kwargs: passed to `target.generate` (`max_new_tokens`, `do_sample`, `temperature`, ...).

    Raises:
        ValueError: if a conversation lacks `id` or `messages`, or already ends with an assistant message.
    """
    output_file = Path(output_file)
    done = _finished_ids(output_file)
    counts = RegenerationCounts()
    pending: list[tuple[dict[str, Any], list[int]]] = []
    for conversation in conversations:
        _check_conversation(conversation)
        if conversation["id"] in done:
            counts.already_done += 1
            continue
        prompt_ids = tokenizer.apply_chat_template(
            conversation["messages"],
            tools=conversation.get("tools"),
            add_generation_prompt=True,
            return_dict=False,
        )
        if len(prompt_ids) > max_prompt_tokens:
            counts.skipped += 1
            continue
        pending.append((conversation, prompt_ids))

    with output_file.open("a", encoding="utf-8") as lines:
        for batch in _batches(pending, batch_size):
            for conversation, answer, finish_reason in _answer(target, tokenizer, batch, generate_kwargs):
                messages = [*conversation["messages"], {"role": "assistant", "content": answer}]
                record = {**conversation, "messages": messages, "finish_reason": finish_reason}
                lines.write(json.dumps(record, ensure_ascii=False) + "\n")
            lines.flush()
            counts.answered += len(batch)
            logger.info(f"{counts.answered} of {len(pending)} conversations answered")
    return counts


def _check_conversation(conversation: dict[str, Any]) -> None:
    if "id" not in conversation or not conversation.get("messages"):
        raise ValueError(f"A conversation needs `id` and `messages`, but one has the fields {sorted(conversation)}.")
    if conversation["messages"][-1]["role"] == "assistant":
        raise ValueError(
            f"Conversation {conversation['id']!r} ends with an assistant message; drop it, so that the target answers."
        )


def _finished_ids(output_file: Path) -> set[str]:
    """Ids that the file holds; cuts a last line that a kill left without its newline."""
    if not output_file.exists():
        return set()
    content = output_file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(output_file, len(whole))
    return {json.loads(line)["id"] for line in whole.splitlines()}


def _batches(
    pending: list[tuple[dict[str, Any], list[int]]], batch_size: int, window: int = 16
) -> Iterator[list[tuple[dict[str, Any], list[int]]]]:
    """Batches of similar length, without reordering the corpus further than `window` batches."""
    for start in range(0, len(pending), batch_size * window):
        part = sorted(pending[start : start + batch_size * window], key=lambda item: len(item[1]))
        for offset in range(0, len(part), batch_size):
            yield part[offset : offset + batch_size]


@torch.inference_mode()
def _answer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: list[tuple[dict[str, Any], list[int]]],
    generate_kwargs: dict[str, Any],
) -> Iterator[tuple[dict[str, Any], str, str]]:
    inputs = tokenizer.pad(
        {"input_ids": [prompt_ids for _, prompt_ids in batch]}, padding_side="left", return_tensors="pt"
    ).to(target.device)
    sequences = target.generate(**inputs, **generate_kwargs)
    # As `generate` itself looks for it: the argument, the configuration passed, the target's own.
    configs = (generate_kwargs.get("generation_config"), target.generation_config)
    declared = (generate_kwargs.get("eos_token_id"), *(getattr(config, "eos_token_id", None) for config in configs))
    eos_token_id = next((ids for ids in declared if ids is not None), ())
    stop_ids = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id)
    answers = sequences[:, inputs["input_ids"].shape[1] :].tolist()
    for (conversation, _), answer_ids in zip(batch, answers, strict=True):
        end = next((i for i, token in enumerate(answer_ids) if token in stop_ids), None)
        text = tokenizer.decode(answer_ids[:end], skip_special_tokens=False)
        yield conversation, text, "length" if end is None else "stop"
