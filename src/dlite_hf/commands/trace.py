# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""`dlite-hf trace`: shows one generation with a drafter as a web page."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed

from ..evaluation.sessions import render_prompt
from ..evaluation.tasks import check_record
from ..json_lines import read_json_lines
from ..modeling_dlite import DLiteForDrafting
from ..trace import trace_generation
from .template_kwargs import TEMPLATE_KWARGS_HELP, read_template_kwargs


@dataclass
class TraceArguments:
    """What is generated, by whom, and where the page goes."""

    target: str = field(metadata={"help": "Folder or id on the Hub of the target."})
    drafter: str = field(metadata={"help": "Folder or id on the Hub of its drafter."})
    output: str = field(metadata={"help": "The HTML file to write; an existing one is replaced."})
    prompt: str | None = field(
        default=None,
        metadata={"help": "What the user says; without a chat template, the text that the target continues."},
    )
    prompts: str | None = field(
        default=None,
        metadata={
            "help": "A JSON lines file with the prompt: a line has an `id` and `messages`, optionally `tools`, or "
            "`turns`, of which the first is asked. A last message of the assistant is generated anew."
        },
    )
    id: str | None = field(default=None, metadata={"help": "The prompt's `id` in that file."})
    max_new_tokens: int = field(default=128, metadata={"help": "Where the generation is cut."})
    temperature: float = field(default=0.0, metadata={"help": "Temperature of the sampling; 0 is greedy."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling."})
    chat_template_kwargs: str | None = field(default=None, metadata={"help": TEMPLATE_KWARGS_HELP})
    dtype: str | None = field(
        default=None, metadata={"help": "The models' dtype; the target checkpoint's by default."}
    )

    def __post_init__(self) -> None:
        read_template_kwargs(self.chat_template_kwargs)
        if (self.prompt is None) == (self.prompts is None):
            raise ValueError(
                f"`prompt` {self.prompt!r} and `prompts` {self.prompts!r} do not say what is asked; pass one of them."
            )
        if (self.prompts is None) != (self.id is None):
            raise ValueError(f"`id` {self.id!r} and `prompts` {self.prompts!r} belong together; pass both or none.")
        if self.max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` is {self.max_new_tokens}, but must be at least 1.")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"`temperature` is {self.temperature}, but must be at least 0, which is greedy.")


def main(args: TraceArguments) -> None:
    """Generates, and writes the page.

    Raises:
        ValueError: if the prompt cannot be found or rendered, or does not fit into the target's context, or as
            [`~dlite_hf.trace.trace_generation`] does.
    """
    if Path(args.output).is_dir() or not Path(args.output).parent.is_dir():
        raise ValueError(f"`output` is {args.output!r}; name a file in a folder that exists.")
    conversation = _conversation(args)  # before the models are loaded, which takes longer
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    input_ids = _input_ids(args, conversation, tokenizer)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype or "auto").to(device)
    context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and input_ids.shape[1] + args.max_new_tokens > context:
        raise ValueError(
            f"The prompt's {input_ids.shape[1]} tokens and `max_new_tokens` {args.max_new_tokens} exceed the target's "
            f"context of {context}; pass a shorter prompt, or lower `max_new_tokens`."
        )
    drafter = DLiteForDrafting.from_pretrained(args.drafter, dtype=target.dtype).to(device)
    options: dict[str, Any] = {"do_sample": args.temperature > 0, "max_new_tokens": args.max_new_tokens}
    if args.temperature > 0:
        options["temperature"] = args.temperature
        if target.generation_config.top_k is None:
            options["top_k"] = 0  # by itself `generate` would keep the 50 most likely tokens alone
    set_seed(args.seed)
    inputs = {"input_ids": input_ids.to(device), "attention_mask": torch.ones_like(input_ids, device=device)}
    trace = trace_generation(target, drafter, tokenizer, inputs, **options)
    if args.temperature > 0:
        trace.settings["seed"] = args.seed
    trace.settings["dtype"] = str(target.dtype).removeprefix("torch.")
    trace.save(args.output)
    rounds = trace.statistics.num_rounds
    tau = f"{rounds} rounds, tau {trace.statistics.tau:.2f}" if rounds else "no round"
    print(f"Wrote {args.output}: {len(trace.tokens)} tokens in {tau}.")


def _conversation(args: TraceArguments) -> dict[str, Any]:
    """The conversation before the answer: `messages` and, where the file has them, `tools`."""
    if args.prompts is None:
        return {"messages": [{"role": "user", "content": args.prompt}]}
    record = next((each for each in read_json_lines(args.prompts) if str(each.get("id")) == args.id), None)
    if record is None:
        raise ValueError(f"{args.prompts} has no record with the `id` {args.id!r}; pass one that it has.")
    check_record(record, f"The record {args.id!r} of {args.prompts}")
    if record.get("turns"):
        return {**record, "messages": [{"role": "user", "content": record["turns"][0]}]}
    messages = record["messages"][: len(record["messages"]) - (record["messages"][-1]["role"] == "assistant")]
    if not messages:
        raise ValueError(f"The record {args.id!r} of {args.prompts} is an answer alone; add the user's message.")
    return {**record, "messages": messages}


def _input_ids(args: TraceArguments, conversation: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The prompt `[1, T]`."""
    if tokenizer.chat_template is not None:
        options = read_template_kwargs(args.chat_template_kwargs)
        return render_prompt(tokenizer, conversation["messages"], conversation.get("tools"), options)
    if args.prompt is None or args.chat_template_kwargs is not None:
        raise ValueError(
            f"The tokenizer of {args.target} has no chat template to render messages with; pass `prompt`, which is "
            "then continued as it is, and no `chat_template_kwargs`."
        )
    return tokenizer(args.prompt, return_tensors="pt")["input_ids"]


__all__ = ["TraceArguments", "main"]
