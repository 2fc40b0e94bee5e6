# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""`dlite-hf evaluate`: what drafters gain over plain generation and over Transformers' own ways to draft."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..evaluation.checks import prompt_room
from ..evaluation.concurrency import concurrency_table, measure_concurrency
from ..evaluation.methods import Method, make_methods
from ..evaluation.report import Report
from ..evaluation.runner import evaluate
from ..evaluation.sessions import make_sessions, render_prompt
from ..evaluation.tasks import Task, load_task
from .template_kwargs import TEMPLATE_KWARGS_HELP, read_template_kwargs


# Conditions of the prompts one by one: batches are greedy, on one task, and come later.
_OF_THE_ROWS_ALONE = {"temperatures", "generation", "seed", "skipped_turns", "started_at", "finished_at"}


@dataclass
class EvaluateArguments:
    """What is compared, on what, and where the report goes."""

    target: str = field(metadata={"help": "Folder or id on the Hub of the target."})
    tasks: list[str] = field(
        metadata={
            "help": "Names of tasks, such as gsm8k, which are loaded from the Hub, or JSON lines files with `turns` "
            "or `messages`: file.jsonl, or name=file."
        }
    )
    output_dir: str = field(
        metadata={"help": "A folder for this evaluation alone; one that was killed there goes on where it stopped."}
    )
    drafters: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Folders or ids on the Hub, each as name=folder or alone: of DLite drafters, of Transformers' "
            "DFlash drafters, or of small models with the target's tokenizer."
        },
    )
    methods: list[str] = field(
        default_factory=lambda: ["plain", "prompt_lookup"],
        metadata={
            "help": "Methods without a drafter: plain, prompt_lookup, prompt_lookup=TOKENS, early_exit=LAYER, mtp."
        },
    )
    confidence_thresholds: list[float] = field(
        default_factory=list,
        metadata={
            "help": "Measures each DLite drafter also with each of these as `assistant_confidence_threshold`, below "
            "which a draft ends early."
        },
    )
    num_prompts: int | None = field(
        default=None,
        metadata={
            "help": "The first so many records of each task; by default as many as the paper took of a task of the "
            "Hub, and all of a file."
        },
    )
    max_new_tokens: int = field(default=512, metadata={"help": "Where an answer is cut."})
    max_prompt_tokens: int | None = field(
        default=None, metadata={"help": "Longer prompts are counted and not run; what the target's context holds."}
    )
    min_prompt_tokens: int = field(default=1, metadata={"help": "Shorter prompts are counted and not run."})
    temperatures: list[float] = field(
        default_factory=lambda: [0.0], metadata={"help": "Temperatures of the sampling; 0 is greedy."}
    )
    batch_sizes: list[int] = field(
        default_factory=list,
        metadata={
            "help": "Also measures the tokens a second of so many sequences at once, such as 1 2 4 8, on the first "
            "turns of the first task."
        },
    )
    dtype: str | None = field(default=None, metadata={"help": "The target's dtype; the checkpoint's by default."})
    attn_implementation: str | None = field(
        default=None,
        metadata={
            "help": "The target's, for all methods: such as sdpa_packed, which does not copy the cache for grouped "
            "queries; Transformers' choice by default."
        },
    )
    device: str | None = field(default=None, metadata={"help": "Where it runs; the machine's accelerator by default."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling."})
    chat_template_kwargs: str | None = field(default=None, metadata={"help": TEMPLATE_KWARGS_HELP})
    target_name: str | None = field(
        default=None, metadata={"help": "What the report calls the target; its id or folder's name by default."}
    )
    target_quantization: str | None = field(
        default=None, metadata={"help": "How the target's weights were quantised, where its folder does not say."}
    )

    def __post_init__(self) -> None:
        read_template_kwargs(self.chat_template_kwargs)
        if min(self.batch_sizes, default=1) < 1:
            raise ValueError(f"`batch_sizes` is {self.batch_sizes}, but every batch has at least one sequence.")
        if not self.tasks:
            raise ValueError("`tasks` is empty; name a task, such as gsm8k, or a JSON lines file.")

    @property
    def template_options(self) -> dict[str, Any] | None:
        """`chat_template_kwargs`, read."""
        return read_template_kwargs(self.chat_template_kwargs)


def main(args: EvaluateArguments, make_more_methods: Callable[[PreTrainedModel], list[Method]] | None = None) -> None:
    """Evaluates, and writes `report.json`, `report.md` and plots into `output_dir`; and `concurrency.json`, if asked.

    Args:
        args: what is compared, on what, and where the report goes.
        make_more_methods: takes the target and returns methods that no folder describes, to be compared, too.

    Raises:
        ImportError: if matplotlib is missing, before anything is loaded.
        OSError: if a folder or a file is missing.
        ValueError: if a task or a method is unknown, or as [`~dlite_hf.evaluation.evaluate`] does.
    """
    import matplotlib  # noqa: F401  # rather now than after hours

    from ..evaluation.plots import save_plots

    tasks = [load_task(task, args.num_prompts) for task in args.tasks]
    device = args.device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    # Given as None, it would undo what a checkpoint says.
    attention = {} if args.attn_implementation is None else {"attn_implementation": args.attn_implementation}
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype or "auto", **attention)
    target = target.to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    batched = _prompts_to_batch(args, target, tokenizer, tasks[0]) if args.batch_sizes else []
    methods = make_methods(target, args.methods, args.drafters, args.confidence_thresholds)
    if make_more_methods is not None:
        methods += make_more_methods(target)
    result = evaluate(
        target,
        tokenizer,
        methods,
        tasks,
        args.output_dir,
        num_prompts=args.num_prompts,
        max_new_tokens=args.max_new_tokens,
        max_prompt_tokens=args.max_prompt_tokens,
        min_prompt_tokens=args.min_prompt_tokens,
        temperatures=args.temperatures,
        seed=args.seed,
        chat_template_kwargs=args.template_options,
        target_name=args.target_name,
        target_quantization=args.target_quantization,
    )
    report, folder = Report(**result), Path(args.output_dir)
    report.save(folder / "report.json")
    text = report.to_markdown()
    (folder / "report.md").write_text(text + "\n", encoding="utf-8")
    plots = save_plots(report, folder)
    if args.batch_sizes:
        # Plain generation as it was found to be fastest.
        chosen = {each["name"]: {"settings": each["settings"], "note": each["note"]} for each in result["methods"]}
        methods = [replace(method, **chosen[method.name]) for method in methods]
        rows = measure_concurrency(
            target, batched, methods, batch_sizes=args.batch_sizes, max_new_tokens=args.max_new_tokens
        )
        conditions = {name: each for name, each in result["conditions"].items() if name not in _OF_THE_ROWS_ALONE}
        conditions["tasks"] = conditions["tasks"][:1]
        content = {"conditions": conditions, "methods": result["methods"], "rows": rows}
        (folder / "concurrency.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        text += f"\n\n## Many sequences at once\n\n{concurrency_table(rows)}"
        (folder / "report.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    print(f"\nWrote report.json, report.md and {len(plots)} plots to {folder}.")


def _prompts_to_batch(
    args: EvaluateArguments, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task
) -> list[list[int]]:
    """The first turns of a task that are as long as they may be, as token ids."""
    prompts = [
        render_prompt(tokenizer, session.turns[0].context([]), session.tools, args.template_options)[0].tolist()
        for session in make_sessions(task)
    ]
    room = prompt_room(target, args.max_new_tokens, args.max_prompt_tokens)
    prompts = [prompt for prompt in prompts if args.min_prompt_tokens <= len(prompt) <= room]
    if not prompts:
        raise ValueError(
            f"No first turn of {task.name} has from {args.min_prompt_tokens} to {room} tokens, so there is nothing to "
            "batch; name a task with such prompts first, or drop `batch_sizes`."
        )
    return prompts


__all__ = ["EvaluateArguments", "main"]
