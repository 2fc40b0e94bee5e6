# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Prompts in, conversations out whose answers are the target's own: what a drafter is trained on."""

import json
import os
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers.utils import logging

from .conversations import template_inputs
from .regeneration_backends import Answer, Backend, PromptTooLongError, Request


logger = logging.get_logger(__name__)


@dataclass
class RegenerationCounts:
    """What became of the input: `succeeded + failed + skipped` is its length.

    Args:
        succeeded: conversations that the output holds, `resumed` and `shortened` included.
        failed: conversations that the backend could not answer; the next call tries them again.
        skipped: conversations whose prompt is too long.
        resumed: conversations that an earlier call had answered.
        shortened: conversations that end before an answer whose prompt had become too long.
        answers: the target's answers in the conversations that succeeded.
        cut: those of them that were cut at their largest length, with the finish reason `"length"`.
    """

    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    resumed: int = 0
    shortened: int = 0
    answers: int = 0
    cut: int = 0

    def __str__(self) -> str:
        total = self.succeeded + self.failed + self.skipped
        cut = f"; {self.cut} of {self.answers} answers were cut at their largest length" if self.answers else ""
        return (
            f"{self.succeeded} succeeded ({self.resumed} of them in an earlier call, {self.shortened} shortened) + "
            f"{self.failed} failed + {self.skipped} skipped = {total} conversations{cut}"
        )

    def count_answers(self, finish_reasons: Iterable[str | None]) -> None:
        """Counts the answers of one conversation."""
        own = [reason for reason in finish_reasons if reason is not None]
        self.answers += len(own)
        self.cut += own.count("length")


class NothingAnsweredError(RuntimeError):
    """Every conversation failed; `counts` says what became of the input."""

    def __init__(self, message: str, counts: RegenerationCounts):
        super().__init__(message)
        self.counts = counts


def regenerate(
    backend: Backend,
    conversations: Iterable[dict[str, Any]],
    output_file: str | os.PathLike,
    *,
    turns: Literal["last", "all"] = "last",
) -> RegenerationCounts:
    """Lets a target answer every conversation and appends the results to a JSON lines file.

    Each line repeats the conversation's own fields, with the answers in `messages`, and adds two: `finish_reasons`,
    one for each assistant message in order, `"stop"` where the target ended its turn, `"length"` where it was cut,
    `None` where the message is not the target's own; and `generation`, how the answers were made. Null keys of
    messages are dropped, arguments of tool calls become dictionaries, and tools get the form
    `{"type": "function", "function": ...}`, so that a chat template renders the line as it was answered.

    A call that was killed is taken up where it stopped: a torn last line is dropped, and what is there is not redone.

    Args:
        backend: a [`~dlite_hf.regeneration_backends.LocalBackend`] or
            [`~dlite_hf.regeneration_backends.OpenAIBackend`].
        conversations: dictionaries with a unique `id` and `messages`, optionally `tools`.
        output_file: the JSON lines file.
        turns: `"last"` to answer once at the end, in the place of the last message if that is an assistant's; `"all"`
            to answer in the place of every assistant message after the first user or tool message, in order, each on
            top of the target's own earlier answers and of the user texts and tool results as they came, and at the
            end too where that is no assistant's.

    Raises:
        ValueError: before anything is answered, if a conversation lacks `id` or `messages`, shares its `id` with
            another, or says nothing to be answered, or if `output_file` holds answers made in another way.
        NothingAnsweredError: if every conversation failed, and none was answered earlier.
    """
    generation = {**backend.generation, "turns": turns}
    dialogues = [_Dialogue.start(conversation, turns) for conversation in conversations]
    repeated = [name for name, count in Counter(dialogue.id for dialogue in dialogues).items() if count > 1]
    if repeated:
        raise ValueError(
            f"{len(repeated)} ids are not unique, {repeated[0]!r} for one; give every conversation its own."
        )
    output_file = Path(output_file)
    done = _answered(output_file, generation)
    waiting = deque(dialogue for dialogue in dialogues if dialogue.id not in done)
    resumed = len(dialogues) - len(waiting)
    counts = RegenerationCounts(succeeded=resumed, resumed=resumed)
    for dialogue in dialogues:
        counts.count_answers(done.get(dialogue.id, []))
    first_failure: tuple[Any, Exception] | None = None

    with (
        # Half a surrogate pair, which JSON can spell and UTF-8 cannot, must not end the run.
        output_file.open("a", encoding="utf-8", errors="replace") as lines,
        logging.tqdm(total=len(dialogues), initial=resumed, desc="Regenerating", unit="conversation") as progress,
    ):
        for dialogue, answer in backend.answer(waiting):
            if isinstance(answer, Answer):
                if dialogue.take(answer):
                    waiting.appendleft(dialogue)
                    continue
            elif not isinstance(answer, PromptTooLongError):
                logger.warning(f"Conversation {dialogue.id!r} failed: {type(answer).__name__}: {answer}")
                first_failure = first_failure or (dialogue.id, answer)
                counts.failed += 1
            elif dialogue.shorten():
                counts.shortened += 1
            else:
                counts.skipped += 1
            if dialogue.complete:
                lines.write(json.dumps(dialogue.record(generation), ensure_ascii=False) + "\n")
                lines.flush()
                counts.succeeded += 1
                counts.count_answers(dialogue.finish_reasons)
            progress.update()

    if first_failure is not None and counts.succeeded == counts.resumed:
        name, error = first_failure
        message = f"None of {counts.failed} conversations was answered; the first, {name!r}, failed with: {error}"
        if not resumed:
            raise NothingAnsweredError(message, counts) from error
        logger.error(message)
    return counts


@dataclass
class _Dialogue(Request):
    """A conversation on its way: `messages` up to the next answer, and `remaining`, what was said after it."""

    fields: dict[str, Any]
    finish_reasons: list[str | None]
    remaining: deque[dict[str, Any]] = field(default_factory=deque)
    complete: bool = False

    @classmethod
    def start(cls, conversation: dict[str, Any], turns: str) -> "_Dialogue":
        if "id" not in conversation or not conversation.get("messages"):
            raise ValueError(
                f"A conversation needs `id` and `messages`, but one has the fields {sorted(conversation)}."
            )
        messages, tools = template_inputs(conversation)
        if turns == "last":
            start = len(messages) - (messages[-1]["role"] == "assistant")
        elif turns == "all":
            start = next((i for i, message in enumerate(messages) if message["role"] in ("user", "tool")), 0) + 1
        else:
            raise ValueError(f'`turns` must be "last" or "all", but is {turns!r}.')
        if not any(message["role"] in ("user", "tool") for message in messages[:start]):
            raise ValueError(
                f"Conversation {conversation['id']!r} says nothing to be answered: its roles are "
                f"{[message['role'] for message in messages]}; give it a user message."
            )
        added = ("finish_reason", "finish_reasons", "generation")
        fields = {key: value for key, value in conversation.items() if key not in added}
        if tools:
            fields["tools"] = tools
        dialogue = cls(
            id=conversation["id"],
            messages=messages[:start],
            tools=tools,
            fields=fields,
            finish_reasons=[None for message in messages[:start] if message["role"] == "assistant"],
            remaining=deque(messages[start:] if turns == "all" else []),
        )
        dialogue._proceed()
        return dialogue

    def take(self, answer: Answer) -> bool:
        """Adds an answer; returns whether another one is needed."""
        self.messages.append(answer.message)
        self.finish_reasons.append(answer.finish_reason)
        self.complete = not self._proceed()
        return not self.complete

    def _proceed(self) -> bool:
        while self.remaining:
            message = self.remaining.popleft()
            if message["role"] == "assistant":  # the target's own takes its place
                return True
            self.messages.append(message)
        return self.messages[-1]["role"] != "assistant"

    def shorten(self) -> bool:
        """Ends the conversation with the last answer that it got, if there is one."""
        if any(self.finish_reasons):
            while self.messages[-1]["role"] != "assistant":
                self.messages.pop()
            self.complete = True
        return self.complete

    def record(self, generation: dict[str, Any]) -> dict[str, Any]:
        answers = {"messages": self.messages, "finish_reasons": self.finish_reasons, "generation": generation}
        return {**self.fields, **answers}


def _answered(output_file: Path, generation: dict[str, Any]) -> dict[Any, list[str | None]]:
    """The finish reasons of what the file holds, by id; a last line that a kill has torn is cut off.

    Raises:
        ValueError: if another line is no record, or one was made in another way than `generation`.
    """
    answered: dict[Any, list[str | None]] = {}
    if not output_file.exists():
        return answered
    with output_file.open("r+b") as lines:
        whole, ending = 0, b""
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError:
                if line.startswith(b"{") and not line.endswith(b"\n"):
                    break
                record = None
            if not isinstance(record, dict) or "id" not in record:
                raise ValueError(f"Line {number} of {output_file} is no conversation; name another output file.")
            if record.get("generation") != generation:
                raise ValueError(
                    f"{output_file} holds answers made with {record.get('generation')}, but these would be made with "
                    f"{generation}; name another output file, or the same settings."
                )
            answered[record["id"]] = record["finish_reasons"]
            whole, ending = whole + len(line), line[-1:]
        lines.truncate(whole)
        if ending not in (b"", b"\n"):  # only the newline was lost
            lines.seek(whole)
            lines.write(b"\n")
    return answered
