# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""`dlite-hf regenerate`: lets a target answer prompts, in this process or on a server."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig
from transformers.utils import logging

from ..json_lines import read_json_lines
from ..regeneration import NothingAnsweredError, regenerate
from ..regeneration_backends import Backend, LocalBackend, OpenAIBackend
from .template_kwargs import TEMPLATE_KWARGS_HELP, read_template_kwargs


logger = logging.get_logger(__name__)


@dataclass
class RegenerateArguments:
    """Who answers what, and how."""

    prompts: list[str] = field(
        metadata={
            "help": "JSON lines files. A line has an `id` and `messages`, optionally `tools`, or `turns`: user texts, "
            "in order, of which only the first is asked unless every turn is answered."
        }
    )
    output: str = field(metadata={"help": "The JSON lines file that the answered conversations are appended to."})
    target: str | None = field(
        default=None, metadata={"help": "Folder or id on the Hub of the target that answers in this process."}
    )
    model: str | None = field(
        default=None, metadata={"help": "The target's name on the server that answers in place of this process."}
    )
    base_url: str | None = field(
        default=None,
        metadata={
            "help": "Address of that server's OpenAI-compatible API, such as http://localhost:8000/v1. Its key, if it "
            "has one, is read from the environment variable OPENAI_API_KEY."
        },
    )
    revision: str | None = field(
        default=None,
        metadata={
            "help": "The target's revision on the Hub; of a server's model, which does not tell, for the record."
        },
    )
    turns: Literal["last", "all"] = field(
        default="last",
        metadata={"help": "What is answered: the end of a conversation, or every assistant turn."},
    )
    num_prompts: int | None = field(
        default=None, metadata={"help": "How many conversations to answer, drawn at random; all by default."}
    )
    seed: int = field(
        default=0, metadata={"help": "Seed of that draw, of the order of the conversations, and of sampling here."}
    )
    max_new_tokens: int = field(default=1024, metadata={"help": "Where an answer is cut."})
    temperature: float = field(default=0.0, metadata={"help": "Temperature of the sampling; 0 is greedy."})
    top_p: float | None = field(
        default=None, metadata={"help": "Nucleus sampling; the target's own, or none, by default."}
    )
    top_k: int | None = field(
        default=None, metadata={"help": "Top-k sampling; the target's own, or none, by default."}
    )
    chat_template_kwargs: str | None = field(default=None, metadata={"help": TEMPLATE_KWARGS_HELP})
    batch_size: int | None = field(
        default=None, metadata={"help": "Conversations answered at once in this process; 32 by default."}
    )
    max_prompt_tokens: int | None = field(
        default=None, metadata={"help": "Longer prompts are skipped in this process; 4096 by default."}
    )
    dtype: str | None = field(
        default=None, metadata={"help": "The target's dtype in this process; the checkpoint's by default."}
    )
    continuous_batching: bool = field(
        default=False, metadata={"help": "Let Transformers' continuous batching answer in this process; for CUDA."}
    )
    concurrency: int | None = field(
        default=None, metadata={"help": "Requests that a server gets at once; 64 by default."}
    )

    def __post_init__(self) -> None:
        read_template_kwargs(self.chat_template_kwargs)
        if not self.prompts:
            raise ValueError("`prompts` is empty; name a JSON lines file of prompts.")
        local, remote = self.target is not None, self.model is not None and self.base_url is not None
        if local == remote or (local and (self.model is not None or self.base_url is not None)):
            raise ValueError(
                f"`target` {self.target!r}, `model` {self.model!r} and `base_url` {self.base_url!r} do not say who "
                "answers; pass `target`, or both others."
            )
        other = ("concurrency",) if local else ("batch_size", "max_prompt_tokens", "dtype", "continuous_batching")
        unused = [name for name in other if getattr(self, name) not in (None, False)]
        if unused:
            place = "in this process" if local else "on a server"
            raise ValueError(f"{unused} mean nothing to a target {place}; drop them.")
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise ValueError("`top_p` and `top_k` mean nothing at temperature 0; pass a `temperature`, or drop them.")

    @property
    def template_options(self) -> dict[str, Any] | None:
        """`chat_template_kwargs`, read."""
        return read_template_kwargs(self.chat_template_kwargs)


def main(args: RegenerateArguments) -> None:
    """Answers the prompts and prints what became of them.

    Raises:
        ValueError: if the prompts cannot be read, or as [`~dlite_hf.regeneration.regenerate`] does.
        NothingAnsweredError: as that function does.
    """
    conversations = [conversation for file in args.prompts for conversation in _read_conversations(file, args.turns)]
    if args.num_prompts is not None and args.num_prompts > len(conversations):
        raise ValueError(f"`num_prompts` is {args.num_prompts}, but there are {len(conversations)}; lower it.")
    random.Random(args.seed).shuffle(conversations)
    backend = _local_backend(args) if args.target is not None else _remote_backend(args)
    try:
        counts = regenerate(backend, conversations[: args.num_prompts], args.output, turns=args.turns)
    except NothingAnsweredError as error:
        print(error.counts)
        raise
    print(counts)
    if 2 * counts.cut > counts.answers:
        logger.warning(
            f"{counts.cut} of {counts.answers} answers were cut at `--max_new_tokens` {args.max_new_tokens}: the "
            "drafter would hardly learn how answers end; raise it, and name another `--output`."
        )


def _read_conversations(file: str, turns: str) -> Iterator[dict[str, Any]]:
    for record in read_json_lines(file):
        if "messages" not in record and record.get("turns"):
            # Only where every turn is answered are there answers to go on from: in the place of the empty ones.
            texts = record.pop("turns")[: 1 if turns == "last" else None]
            empty = {"role": "assistant", "content": ""}
            record["messages"] = [each for text in texts for each in ({"role": "user", "content": text}, empty)]
        yield record


def _local_backend(args: RegenerateArguments) -> Backend:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    dtype = args.dtype or "auto"
    target = AutoModelForCausalLM.from_pretrained(args.target, revision=args.revision, dtype=dtype).to(device)
    options: dict[str, Any] = {
        "batch_size": args.batch_size,
        "max_prompt_tokens": args.max_prompt_tokens,
        "chat_template_kwargs": args.template_options,
    }
    if args.temperature > 0:
        options |= {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    if args.continuous_batching:
        options["continuous_batching_config"] = ContinuousBatchingConfig(drop_unsupported_processors=False)
    return LocalBackend(
        target,
        AutoTokenizer.from_pretrained(args.target, revision=args.revision),
        max_new_tokens=args.max_new_tokens,
        do_sample=args.temperature > 0,
        seed=args.seed,
        **{name: value for name, value in options.items() if value is not None},
    )


def _remote_backend(args: RegenerateArguments) -> Backend:
    options: dict[str, Any] = {"concurrency": args.concurrency, "top_p": args.top_p}
    body: dict[str, Any] = {}
    if args.top_k is not None:
        body["top_k"] = args.top_k
    if args.template_options is not None:
        body["chat_template_kwargs"] = args.template_options
    return OpenAIBackend(
        str(args.model),
        base_url=str(args.base_url),
        revision=args.revision,
        max_tokens=args.max_new_tokens,
        temperature=args.temperature,
        extra_body=body,
        **{name: value for name, value in options.items() if value is not None},
    )


__all__ = ["RegenerateArguments", "main"]
