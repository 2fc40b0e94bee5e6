# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""A target in this process answers, with Transformers' `generate` or its continuous batching."""

import copy
import json
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from ..conversations import end_of_turn_ids
from ..training_record import without_folders
from .base import Answer, PromptTooLongError, Request, RequestT


# Where a config sets none of them: `generate` by itself would keep the 50 most likely tokens alone.
_UNCUT_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


class LocalBackend:
    """The target in this process, with Transformers' `generate`.

    The text is kept as it was generated, special tokens and tool calls included, up to the end of the turn: a chat
    template that leaves `content` as it is renders the tokens that the target generated.

    Args:
        target: the causal LM that the drafter will serve; it is set to evaluate.
        tokenizer: its tokenizer, with a chat template.
        batch_size: conversations answered at once; a batch that fails is tried again in halves.
        max_prompt_tokens: longer prompts are not answered.
        chat_template_kwargs: passed to the chat template, such as `{"enable_thinking": False}`.
        seed: of sampling, set where answering begins; by default random numbers go on from where they are.
        continuous_batching_config: where given, Transformers' continuous batching answers, which lets a new
            conversation in when one is finished. Meant for CUDA; on a CPU set its `num_blocks`, or its cache takes all
            memory.
        generate_kwargs: settings of a [`~transformers.GenerationConfig`] (`max_new_tokens`, `do_sample`, ...), or one
            as `generation_config`. What is not set is the target's own; sampling where that sets no `top_k` either
            cuts nothing off.

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
        seed: int | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        **generate_kwargs: Any,
    ) -> None:
        self.target = target.eval()
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.max_prompt_tokens = max_prompt_tokens
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.seed = seed
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
        if config.do_sample:
            config.update(**_UNCUT_SAMPLING, defaults_only=True)
        self.generation = {
            "model": without_folders(target.name_or_path),
            "revision": getattr(target.config, "_commit_hash", None),
            "backend": "transformers",
            "dtype": str(target.dtype).removeprefix("torch."),
            **({"seed": seed} if config.do_sample else {}),
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
        """See [`~dlite_hf.regeneration_backends.Backend`]."""
        if self.seed is not None:
            set_seed(self.seed)
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
