# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What regeneration asks of a backend."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar


@dataclass
class Request:
    """A conversation that waits for an answer.

    Args:
        id: its name in messages to the user.
        messages: what was said so far, in the form that chat templates read.
        tools: the tools that the answer may call.
    """

    id: Any
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


@dataclass
class Answer:
    """An assistant message, and `"stop"` where the target ended its turn or `"length"` where it was cut."""

    message: dict[str, Any]
    finish_reason: str


class PromptTooLongError(ValueError):
    """A conversation is longer than what the target is asked to answer."""


RequestT = TypeVar("RequestT", bound=Request)


class Backend(Protocol):
    """What [`~dlite_hf.regenerate`] asks of a backend.

    Attributes:
        generation: how it answers, as JSON values: `model`, `revision`, `backend` and the sampling settings.
    """

    generation: dict[str, Any]

    def answer(self, waiting: deque[RequestT]) -> Iterator[tuple[RequestT, Answer | Exception]]:
        """Takes requests from the left of `waiting`, which may grow meanwhile, until it is empty.

        Yields every request once, as soon as its answer is there, with the answer or with why there is none.
        """
