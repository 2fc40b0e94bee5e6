# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""A model card from what was really trained and measured. What was not recorded is said to be missing."""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from safetensors import safe_open

from .configuration_dlite import DLiteConfig
from .evaluation.markdown import NOT_MEASURED, NOT_RECORDED, make_table
from .evaluation.report import Report
from .evaluation.views import card
from .training_record import TrainingRecord, TrainingRun, is_local_path, without_folders


MARKER = "<!-- Made by dlite-hf from what was trained and measured; it is overwritten when it is made again. -->"
# The nearest of the Hub's four (adapter, merge, quantized, finetune): added weights, nothing without their target.
BASE_MODEL_RELATION = "adapter"
LIBRARY_NAME = "transformers"
PIPELINE_TAG = "text-generation"
TAGS = ("dlite", "speculative-decoding", "draft-model")
_SNIPPET = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from dlite_hf import DLiteForDrafting

target = AutoModelForCausalLM.from_pretrained("{base_model}")
tokenizer = AutoTokenizer.from_pretrained("{base_model}")
drafter = DLiteForDrafting.from_pretrained("{repo_id}", dtype=target.dtype)

chat = [{{"role": "user", "content": "A pencil costs 30 cents. How much do 12 pencils cost?"}}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=64)
print(tokenizer.decode(output[0], skip_special_tokens=True))
```

Where the drafter is not on the Hub, give the folder that holds this file."""


def create_model_card(
    folder: str | os.PathLike,
    evaluations: Sequence[str | os.PathLike] = (),
    *,
    repo_id: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    language: str | None = None,
    datasets: Sequence[str] = (),
) -> ModelCard:
    """The card of the drafter in `folder`, from its `config.json`, `model.safetensors` and `training_record.json`.

    Args:
        folder: a drafter as `save_pretrained` writes it; a training record beside it is read where there is one.
        evaluations: JSON reports of `dlite-hf evaluate` that measured this drafter, known by the last part of its
            folder or of its id on the Hub.
        repo_id: the drafter's id on the Hub; the folder's name by default.
        base_model: the target's id on the Hub; by default what the configuration names.
        license: the drafter's licence as the Hub spells it, such as `apache-2.0`; the card states none by default.
        language: a language code such as `en`; the card states none by default.
        datasets: ids on the Hub of the data sets trained on. Sources are listed in the card in any case.

    Raises:
        ValueError: if an id is none that the Hub allows, if the target is known only by a folder, or if a file has
            another shape, or if a report measures other drafters.
        FileNotFoundError: if the folder holds no weights, or a report does not exist.
    """
    folder = Path(folder)
    config = DLiteConfig.from_pretrained(folder)
    repo_id = repo_id or folder.resolve().name
    if base_model is None:
        base_model = config.target_name_or_path or ""
        if not base_model or is_local_path(base_model):
            raise ValueError(
                f"The configuration names the target {without_folders(base_model)!r}, which is no id on the Hub; pass "
                "`base_model`, the id of the target."
            )
    for argument, hub_id in (("repo_id", repo_id), ("base_model", base_model), *(("datasets", id) for id in datasets)):
        check_hub_id(argument, hub_id)
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license):
        raise ValueError(f"`license` is {license!r}, but must be an identifier of the Hub, such as 'apache-2.0'.")

    runs = TrainingRecord.load(folder).runs if TrainingRecord.exists(folder) else []
    reports = [_of_drafter(Report.load(file), folder, repo_id) for file in evaluations]
    data = ModelCardData(
        license=license,
        library_name=LIBRARY_NAME,
        pipeline_tag=PIPELINE_TAG,
        base_model=base_model,
        base_model_relation=BASE_MODEL_RELATION,
        language=language,
        tags=list(TAGS),
        datasets=list(datasets) or None,
    )
    sections = [
        MARKER,
        f"# {repo_id.split('/')[-1]}\n\n{_introduction(config, base_model)}",
        "## Use\n\n" + _SNIPPET.format(base_model=base_model, repo_id=repo_id),
        f"## The drafter\n\n{_architecture(folder, config, base_model)}",
        f"## What it was trained on\n\n{_training(runs)}",
        f"## How well it drafts\n\n{_evaluation(reports)}",
        f"## What it is not\n\n{_limits(config, base_model, runs, license)}",
    ]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n")


def check_hub_id(argument: str, hub_id: str) -> None:
    """Raises a ValueError unless the Hub allows `hub_id` as the name of a repository."""
    try:
        validate_repo_id(hub_id)
    except HFValidationError as error:
        # A folder's parents may name a user: only its last part is repeated.
        raise ValueError(
            f"`{argument}` is {Path(hub_id).name!r}, but must be an id on the Hub, such as 'owner/name'."
        ) from error


def _introduction(config: DLiteConfig, base_model: str) -> str:
    history = "keeps no history"
    if config.history_window:
        history = f"reads the last {config.history_window} verified tokens of its history"
    return (
        "A [DLite](https://arxiv.org/abs/2610.23787) drafter for "
        f"[{base_model}](https://huggingface.co/{base_model}). It is no language model of its own: it proposes "
        f"{config.num_draft_tokens} tokens a round from the target's hidden states, {history}, and the target "
        "verifies them, so that what `generate` returns is the target's own output."
    )


def _architecture(folder: Path, config: DLiteConfig, base_model: str) -> str:
    file = folder / "model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder.name!r} holds no model.safetensors; save the drafter there with `save_pretrained`."
        )
    with safe_open(file, "pt") as weights:
        slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118
    slices = [
        each for each in slices if "F" in each.get_dtype()
    ]  # floats; the ids of a draft vocabulary are no weights
    num_parameters = sum(math.prod(each.get_shape()) for each in slices)
    dtypes = ", ".join(sorted({each.get_dtype() for each in slices}))
    layer_ids = ", ".join(map(str, config.target_layer_ids))
    draft_vocabulary = f"all {config.vocab_size:,} tokens"
    if config.draft_vocab_size is not None:
        draft_vocabulary = f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"
    return make_table(
        ["", ""],
        [
            ("target", base_model),
            ("target's revision", config.target_revision or NOT_RECORDED),
            ("target's quantisation", config.target_quantization or "none recorded"),
            ("target layers read, S", f"{len(config.target_layer_ids)} of {config.num_target_layers}: {layer_ids}"),
            ("how they are joined", config.context_fusion),
            ("history window", config.history_window or "none"),
            ("decoder layers", config.num_hidden_layers),
            ("rank of the sequential head, r", config.sequential_rank),
            ("tokens proposed a round, K", config.num_draft_tokens),
            ("real tokens read a round, G", config.anchor_group_size),
            ("draft vocabulary", draft_vocabulary),
            ("parameters", f"{num_parameters / 1e6:,.1f}M"),
            ("weights", f"{dtypes}, {file.stat().st_size / 1e6:,.1f} MB"),
        ],
    )


def _training(runs: list[TrainingRun]) -> str:
    if not runs:
        return "How it was trained was not recorded."
    parts = []
    for number, run in enumerate(runs, start=1):
        title = [f"### Run {number} of {len(runs)}, {run.finished_at}"] if len(runs) > 1 else []
        parts += [*title, _stages(run), _run_settings(run), _run_data(run)]
    return "\n\n".join(parts)


def _stages(run: TrainingRun) -> str:
    rows = [(each.stage, f"{each.steps:,}", f"{each.anchors:,}", f"{each.seconds / 3600:.2f}") for each in run.stages]
    table = make_table(["stage", "steps", "anchors seen", "hours"], rows)
    if run.best_step is None:
        return table
    steps = sum(each.steps for each in run.stages)
    return f"{table}\n\nThe weights are those of step {run.best_step:,} of {steps:,}, the best of its evaluations."


def _run_settings(run: TrainingRun) -> str:
    target = run.target
    loss = f"{run.ce_weight:g} CE ({run.ce_labels} labels) + {run.tv_weight:g} TV"
    warmup = ", forward KL in the warm-up" if any(each.stage == "warmup" for each in run.stages) else ""
    batch = run.per_device_train_batch_size * run.gradient_accumulation_steps * run.num_processes
    return make_table(
        ["", ""],
        [
            (
                "target as it ran",
                f"{target.name_or_path}, revision {target.revision or NOT_RECORDED}, "
                f"dtype {target.dtype or NOT_RECORDED}, quantisation {target.quantization or 'none recorded'}",
            ),
            ("learning rate", f"{run.learning_rate:g}, {run.lr_scheduler_type}"),
            (
                "samples a step",
                f"{batch} ({run.per_device_train_batch_size} a device, {run.gradient_accumulation_steps} accumulated, "
                f"{run.num_processes} processes)",
            ),
            ("tokens of a sample, at most", run.max_length or NOT_RECORDED),
            ("loss", f"{loss}{warmup}; gamma {run.loss_decay:g}"),
            ("history window", run.history_window or "none"),
            ("seed", run.seed),
            ("hardware", run.hardware),
            ("versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())),
            ("finished", run.finished_at),
        ],
    )


def _run_data(run: TrainingRun) -> str:
    if not run.data:
        return "The data were not recorded."

    def counts(each: dict[str, int]) -> str:
        return "<br>".join(f"{name}: {n:,}" for name, n in sorted(each.items(), key=lambda item: -item[1]))

    rows = [
        (
            each.file,
            f"{each.conversations:,}",
            NOT_RECORDED if each.supervised_tokens is None else f"{each.supervised_tokens:,}",
            counts(each.licenses),
            counts(each.sources),
        )
        for each in run.data
    ]
    return make_table(["data", "conversations", "supervised tokens", "licences", "sources"], rows)


def _of_drafter(report: Report, folder: Path, repo_id: str) -> Report:
    """What a report has of the drafter, by the name of its folder or else by that of its repository."""
    name, published = folder.resolve().name, repo_id.split("/")[-1]
    return report.of_drafter(name if name in report.drafters else published)


def _evaluation(reports: list[Report]) -> str:
    if not reports:
        return f"No evaluation was given when this card was made. tau: {NOT_MEASURED}. Speed: {NOT_MEASURED}."
    return "\n\n".join(["One sequence a call.", *map(card, reports)])


def _limits(config: DLiteConfig, base_model: str, runs: list[TrainingRun], license: str | None) -> str:
    points = [
        "It is not standalone: without its target it says nothing, and `drafter.generate()` raises.",
        f"It serves {base_model} alone. Targets of other sizes are refused; another model of the same sizes gets "
        "fewer tokens accepted.",
        "It neither improves nor filters the output, which is the target's own: so are its biases and errors, and the "
        f"licence terms of {base_model} apply to it.",
        "In bfloat16 and float16 a forward over several tokens rounds otherwise than one over a single token: where "
        "the target's two best tokens nearly tie, the text can part from plain generation's.",
        "On texts unlike those that it was trained on, in topic, language or length, fewer tokens are accepted, and "
        "where a draft costs much of a target's forward it can be slower than no drafter.",
    ]
    lengths = [run.max_length for run in runs if run.max_length is not None]
    if lengths:
        points.append(f"It was trained on at most {max(lengths):,} tokens of a conversation.")
    if config.target_quantization:
        points.append(
            f"Its target was quantised ({config.target_quantization}) in training. With other weights of the same "
            "model the output is still the target's own, but fewer tokens may be accepted."
        )
    if license is None:
        points.append("No licence was stated for the drafter itself.")
    return "\n".join(f"* {point}" for point in points)


__all__ = ["create_model_card"]
