# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Who answers when conversations are regenerated: a target in this process, or a server that runs it."""

import copy
import inspect
import json
import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypeVar

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from .conversations import end_of_turn_ids


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
    """What [`regenerate`] asks of a backend.

    Attributes:
        generation: how it answers, as JSON values: `model`, `revision`, `backend` and the sampling settings.
    """

    generation: dict[str, Any]

    def answer(self, waiting: deque[RequestT]) -> Iterator[tuple[RequestT, Answer | Exception]]:
        """Takes requests from the left of `waiting`, which may grow meanwhile, until it is empty.

        Yields every request once, as soon as its answer is there, with the answer or with why there is none.
        """


class LocalBackend:
    """The target in this process, with Transformers' `generate`.

    The text is kept as it was generated, special tokens and tool calls included, up to the end of the turn: a chat
    template that leaves `content` as it is renders the tokens that the target generated.

    Args:
        target: the causal LM that the drafter will serve.
        tokenizer: its tokenizer, with a chat template.
        batch_size: conversations answered at once; a batch that fails is tried again in halves.
        max_prompt_tokens: longer prompts are not answered.
        chat_template_kwargs: passed to the chat template, such as `{"enable_thinking": False}`.
        continuous_batching_config: where given, Transformers' continuous batching answers, which lets a new
            conversation in when one is finished. Meant for CUDA; on a CPU set its `num_blocks`, or its cache takes all
            memory.
        generate_kwargs: settings of a [`~transformers.GenerationConfig`] (`max_new_tokens`, `do_sample`, ...), or one
            as `generation_config`. What is not set is the target's own.

    Raises:
        ValueError: if `generate_kwargs` are no settings of a generation config, or ask for several answers.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = 32,
        max_prompt_tokens: int = 4096,
        chat_template_kwargs: dict[str, Any] | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        **generate_kwargs: Any,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.max_prompt_tokens = max_prompt_tokens
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.continuous_batching_config = continuous_batching_config

        # As `generate` itself completes it: the arguments, the configuration passed, the target's own.
        config = copy.deepcopy(generate_kwargs.pop("generation_config", None)) or GenerationConfig()
        config.update(**target.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
        unknown = config.update(**generate_kwargs)
        if unknown:
            raise ValueError(
                f"{sorted(unknown)} are no settings of a GenerationConfig, so the answers could not say how they were "
                "made; pass only such settings."
            )
        if (config.num_return_sequences or 1) > 1:
            raise ValueError(
                f"A conversation gets one answer, not {config.num_return_sequences}; drop `num_return_sequences`."
            )
        self.generation = {
            "model": target.name_or_path,
            "revision": getattr(target.config, "_commit_hash", None),
            "backend": "transformers",
            **_sampling_settings(config),
        }
        if chat_template_kwargs:
            self.generation["chat_template_kwargs"] = chat_template_kwargs

        self._stop_ids = set(end_of_turn_ids(config))
        if config.pad_token_id is None:  # padding is masked, so any token will do
            config.pad_token_id = min(self._stop_ids, default=0)
        config.return_dict_in_generate = False
        self.generation_config = config

    def answer(self, waiting: deque[RequestT]) -> Iterator[tuple[RequestT, Answer | Exception]]:
        """See [`Backend`]."""
        if self.continuous_batching_config is not None:
            yield from self._answer_continuously(waiting)
            return
        while waiting:
            # Batches of similar length, without reordering the corpus further than 16 batches.
            window = []
            for _ in range(min(len(waiting), 16 * self.batch_size)):
                request = waiting.popleft()
                prompt = self._prompt_ids(request)
                if isinstance(prompt, Exception):
                    yield request, prompt
                else:
                    window.append((request, prompt))
            window.sort(key=lambda item: len(item[1]))
            for start in range(0, len(window), self.batch_size):
                yield from self._answer_batch(window[start : start + self.batch_size])

    def _prompt_ids(self, request: Request) -> list[int] | Exception:
        try:
            prompt_ids = self.tokenizer.apply_chat_template(
                request.messages,
                tools=request.tools,
                add_generation_prompt=True,
                return_dict=False,
                **self.chat_template_kwargs,
            )
        except Exception as error:  # a template refuses what it cannot render with errors of many kinds
            return error
        if len(prompt_ids) > self.max_prompt_tokens:
            return PromptTooLongError(
                f"The prompt has {len(prompt_ids)} tokens, more than `max_prompt_tokens` {self.max_prompt_tokens}."
            )
        return prompt_ids

    def _answer_batch(self, batch: list[tuple[RequestT, list[int]]]) -> Iterator[tuple[RequestT, Answer | Exception]]:
        try:
            answers = self._generate([prompt_ids for _, prompt_ids in batch])
        except Exception as error:
            # Its traceback holds the tensors of the failed call.
            failure = error.with_traceback(None)
        else:
            for (request, _), answer_ids in zip(batch, answers, strict=True):
                yield request, self._read(answer_ids)
            return
        if len(batch) == 1:
            yield batch[0][0], failure
        else:
            yield from self._answer_batch(batch[: len(batch) // 2])
            yield from self._answer_batch(batch[len(batch) // 2 :])

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]]) -> list[list[int]]:
        length = max(map(len, prompts))
        pad_token_id = self.generation_config.pad_token_id
        padded = [[pad_token_id] * (length - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        sequences = self.target.generate(
            input_ids=torch.tensor(padded, device=self.target.device),
            attention_mask=torch.tensor(mask, device=self.target.device),
            generation_config=self.generation_config,
        )
        return sequences[:, length:].tolist()

    def _read(self, answer_ids: list[int]) -> Answer:
        end = next((i for i, token in enumerate(answer_ids) if token in self._stop_ids), None)
        # The cleaning up would change the text, and with it the tokens.
        text = self.tokenizer.decode(answer_ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if end is None:
            text = text.rstrip("\ufffd")  # the cut may have split a character
        return Answer({"role": "assistant", "content": text}, "length" if end is None else "stop")

    def _answer_continuously(self, waiting: deque[RequestT]) -> Iterator[tuple[RequestT, Answer | Exception]]:
        running: dict[str, RequestT] = {}
        with ExitStack() as stack:
            with torch.inference_mode():  # its thread runs in the mode in which it was started
                manager = stack.enter_context(
                    self.target.continuous_batching_context_manager(
                        # Copies, since it fills in both.
                        generation_config=copy.deepcopy(self.generation_config),
                        continuous_batching_config=copy.deepcopy(self.continuous_batching_config),
                    )
                )
            while waiting or running:
                while waiting and len(running) < self.batch_size:
                    request = waiting.popleft()
                    prompt = self._prompt_ids(request)
                    if isinstance(prompt, Exception):
                        yield request, prompt
                    else:
                        running[manager.add_request(prompt)] = request
                result = manager.get_result(timeout=1)
                if result is not None:
                    error = result.error
                    answer = self._read(result.generated_tokens) if error is None else RuntimeError(error)
                    yield running.pop(result.request_id), answer
                elif running and not manager.is_running():
                    raise RuntimeError("Continuous batching stopped by itself; its log says why.")


def _sampling_settings(config: GenerationConfig) -> dict[str, Any]:
    """What distinguishes the config's answers from another's, as JSON values."""
    settings = {key: value for key, value in config.to_diff_dict().items() if not key.startswith("_")}
    unrelated = ["transformers_version", "use_cache", "pad_token_id", "bos_token_id", "return_dict_in_generate"]
    unrelated += [key for key in settings if key.startswith("output_")]
    settings["do_sample"] = bool(config.do_sample)
    if not config.do_sample:
        unrelated += ["temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"]
    for key in unrelated:
        settings.pop(key, None)
    return json.loads(json.dumps(settings))


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
        """See [`Backend`].

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
