# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""A server with an OpenAI-compatible API answers."""

import inspect
import json
import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from importlib import import_module
from typing import Any

from .base import Answer, PromptTooLongError, Request, RequestT


class OpenAIBackend:
    """A server with an OpenAI-compatible API, such as vLLM or SGLang, through the `openai` client library.

    A reply's tool calls are kept in the form that chat templates read, with `arguments` as a dictionary, and its
    reasoning as `reasoning_content`. A server that does not parse tool calls leaves them in the text, as they were
    generated.

    Args:
        model: the target's name on the server.
        base_url: the API's address, such as `"http://localhost:8000/v1"`.
        api_key: its key; by default the environment variable `OPENAI_API_KEY`, and for a server without keys none.
        revision: the revision that the server runs, which it does not tell; recorded with the answers.
        concurrency: requests in flight at once.
        max_retries: how often the client repeats a request that did not get through, or to which the server answered
            that it is busy or broken (408, 409, 429, 5xx).
        sampling: passed to `client.chat.completions.create` (`temperature`, `max_tokens`, ...); what the client does
            not know, such as vLLM's `top_k`, goes into `extra_body`.

    Raises:
        ImportError: if the `openai` client library is not installed.
        TypeError: if `sampling` has an argument that the client does not know.
        ValueError: if `sampling` asks for several answers, a stream, or texts that end an answer.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str,
        api_key: str | None = None,
        revision: str | None = None,
        concurrency: int = 64,
        max_retries: int = 5,
        **sampling: Any,
    ) -> None:
        try:
            self._openai: Any = import_module("openai")
        except ImportError as error:
            raise ImportError(
                'OpenAIBackend needs the `openai` client library: pip install "dlite-hf[regenerate]".'
            ) from error
        refused = sorted({"n", "stream", "stop"} & sampling.keys())
        if refused:
            raise ValueError(f"A conversation gets one whole answer that the target ends itself; drop {refused}.")
        self.model = model
        self.base_url = base_url
        self.concurrency = concurrency
        self.sampling = sampling
        # The client insists on a key; a server that has none ignores it.
        api_key = api_key or os.environ.get("OPENAI_API_KEY") or "EMPTY"
        self.client = self._openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=max_retries)
        unknown = sorted(sampling.keys() - inspect.signature(self.client.chat.completions.create).parameters.keys())
        if unknown:
            raise TypeError(f"{unknown} are no arguments of the client's; pass what the server knows in `extra_body`.")

        # Headers may hold secrets.
        unrelated = ("extra_body", "extra_headers", "extra_query", "timeout")
        settings = {key: value for key, value in sampling.items() if key not in unrelated}
        self.generation = {
            "model": model,
            "revision": revision,
            "backend": "openai",
            **json.loads(json.dumps({**settings, **sampling.get("extra_body", {})})),
        }

    def answer(self, waiting: deque[RequestT]) -> Iterator[tuple[RequestT, Answer | Exception]]:
        """See [`~dlite_hf.regeneration_backends.Backend`].

        Raises:
            ConnectionError: if the server refuses the key or does not know the model, or if it cannot be reached with
                more requests in a row than `concurrency`.
        """
        running: dict[Future[Answer | Exception], RequestT] = {}
        unreached = 0
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            while waiting or running:
                while waiting and len(running) < self.concurrency:
                    request = waiting.popleft()
                    running[pool.submit(self._ask, request)] = request
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    answer = future.result()
                    lost = isinstance(answer, self._openai.APIConnectionError)
                    unreached = unreached + 1 if lost else 0
                    if unreached > self.concurrency:
                        raise ConnectionError(
                            f"The server at {self.base_url} could not be reached {unreached} times in a row; call "
                            "again when it is back, what has been answered is kept."
                        )
                    yield running.pop(future), answer
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, request: Request) -> Answer | Exception:
        openai = self._openai
        try:
            completion = self.client.chat.completions.create(
                model=self.model,
                messages=[_to_api(message) for message in request.messages],
                tools=request.tools or openai.NOT_GIVEN,
                **self.sampling,
            )
            return _read_choice(completion.choices[0])
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise ConnectionError(f"The server at {self.base_url} refuses every request: {error}") from error
        except openai.BadRequestError as error:
            # Servers have no common code for it, but their words agree.
            if re.search(r"context[ _](length|size|window)", str(error).lower()):
                return PromptTooLongError(str(error))
            return error
        except Exception as error:  # whatever it is, it concerns this conversation
            return error


def _to_api(message: dict[str, Any]) -> dict[str, Any]:
    """Chat templates read a call's arguments as a dictionary, the API as JSON."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _read_choice(choice: Any) -> Answer:
    reply = choice.message
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or ""}
    # vLLM and SGLang call it differently, and each has changed it.
    reasoning = getattr(reply, "reasoning_content", None) or getattr(reply, "reasoning", None)
    if reasoning:
        message["reasoning_content"] = reasoning
    if reply.tool_calls:
        message["tool_calls"] = [_read_tool_call(call) for call in reply.tool_calls]
    if choice.finish_reason not in ("stop", "tool_calls", "length"):
        raise ValueError(f"The answer ended with finish_reason {choice.finish_reason!r}.")
    return Answer(message, "length" if choice.finish_reason == "length" else "stop")


def _read_tool_call(call: Any) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except json.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(
            f"The arguments of a call of {call.function.name!r} are no JSON object: {call.function.arguments!r}."
        )
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
