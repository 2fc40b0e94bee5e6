# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The ways to generate that are compared, all of them through `target.generate`."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..configuration_dlite import DLiteConfig
from ..modeling_dlite import DLiteForDrafting
from ..target import check_compatible, text_decoder
from ..training_record import without_folders


PLAIN = "plain"
_PROMPT_LOOKUP_TOKENS = 10  # as the documentation of Transformers shows it
READS_THE_PROMPT = "The drafter reads the whole prompt after the first token: that is in the time of decoding."
_DFLASH_FIELDS = {"block_size", "mask_token_id", "target_layer_ids"}
# What a small model's own configuration decides when it assists; its sampling options would leak into the drafts.
_ASSISTANT_FIELDS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True)
class Method:
    """One way to generate.

    Args:
        name: what rows and reports call it.
        kind: `"plain"`, `"prompt_lookup"`, `"assistant"`, `"early_exit"`, `"mtp"`, `"dflash"`, `"dlite"`, or
            `"custom"`.
        settings: arguments of `generate`, JSON values.
        assistant: passed as `assistant_model`.
        checkpoint: where `assistant` is from: an id on the Hub, or a folder's last name.
        sha256: of the assistant's weights, since folders of different drafters often have one name.
        parameters: what the method adds to the target's; `None` where that is unknown.
        num_draft_tokens: how many tokens it drafts a round, at most; for an assistant with a schedule, at first.
        note: what a reader should know of it.
        custom_generate: of the kind `"custom"`, the decoding loop, passed as `custom_generate`. It is also given
            `token_streamer`, since `generate` keeps its own `streamer` from such a loop, and counts its rounds in
            [`~dlite_hf.generation.statistics.running_statistics`].
    """

    name: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    assistant: PreTrainedModel | None = None
    checkpoint: str | None = None
    sha256: str | None = None
    parameters: int | None = 0
    num_draft_tokens: int | None = None
    note: str | None = None
    custom_generate: Callable[..., Any] | None = None

    @property
    def keeps_cache(self) -> bool:
        """Whether it continues a cache that it is given; assisted decoding of Transformers feeds the prompt again."""
        return self.kind in (PLAIN, "dlite")

    def generate_kwargs(self) -> dict[str, Any]:
        """What `generate` gets besides the prompt, lengths and sampling."""
        passed = {"assistant_model": self.assistant, "custom_generate": self.custom_generate}
        return {**self.settings, **{name: value for name, value in passed.items() if value is not None}}

    def describe(self) -> dict[str, Any]:
        """The method as JSON, for a report."""
        names = ("name", "kind", "checkpoint", "sha256", "parameters", "settings", "num_draft_tokens", "note")
        return {name: getattr(self, name) for name in names}


def make_methods(
    target: PreTrainedModel,
    stock: Iterable[str] = (PLAIN, "prompt_lookup"),
    drafters: Iterable[str] = (),
    confidence_thresholds: Iterable[float] = (),
) -> list[Method]:
    """The methods of an evaluation.

    Args:
        target: what they generate with.
        stock: those of Transformers that need no checkpoint: `"plain"`, with which all are compared,
            `"prompt_lookup"`, `"prompt_lookup=TOKENS"` (10 tokens by default), `"early_exit=LAYER"`, `"mtp"`.
        drafters: `name=folder`, or a folder or an id on the Hub, whose last part is then the name. Its `config.json`
            says what it is: a DLite drafter, a DFlash drafter of Transformers, or any causal language model.
        confidence_thresholds: each DLite drafter is a method of its own, too, with each of them as its
            `assistant_confidence_threshold`.

    Raises:
        OSError: if a drafter cannot be found.
        ValueError: if `"plain"` is missing, a name repeats, a method does not exist, one does not fit the target, or a
            threshold repeats, would change nothing or leave nothing to draft, or has no DLite drafter to serve.
    """
    stock, drafters, confidence_thresholds = list(stock), list(drafters), list(confidence_thresholds)
    unset = GenerationConfig._get_default_generation_params()["assistant_confidence_threshold"]
    for threshold in confidence_thresholds:
        if not 0 < threshold < 1 or threshold == unset:
            raise ValueError(
                f"A confidence threshold is {threshold}, but must lie between 0 and 1, and not be {unset}, which "
                "Transformers fills in where a call names none."
            )
    if len({*confidence_thresholds}) < len(confidence_thresholds):
        raise ValueError(f"The confidence thresholds {confidence_thresholds} repeat one; give each once.")
    if PLAIN not in stock:
        raise ValueError(f"The methods are {stock}, but all are compared with 'plain'; add it.")
    names = stock + [_split_drafter(each)[0] for each in drafters]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"More than one method is called {repeated[0]!r}; give drafters as name=folder.")
    stock.sort(key=lambda each: each != PLAIN)
    methods = [_stock_method(each, target) for each in stock]
    methods += [_drafter_method(*_split_drafter(each), target) for each in drafters]
    dlite_methods = [method for method in methods if method.kind == "dlite"]
    if confidence_thresholds and not dlite_methods:
        raise ValueError(
            f"The confidence thresholds {confidence_thresholds} are for DLite drafters, but there is none; give one."
        )
    return methods + [
        replace(
            method,
            name=f"{method.name}, confidence {threshold}",
            settings={**method.settings, "assistant_confidence_threshold": threshold},
        )
        for method in dlite_methods
        for threshold in confidence_thresholds
    ]


def neutral_generation_config(config: GenerationConfig, kept: Iterable[str] = _TOKEN_FIELDS) -> GenerationConfig:
    """A configuration with the special tokens of `config` and Transformers' defaults for all else."""
    neutral = GenerationConfig(**{name: getattr(config, name) for name in kept})
    ids = neutral.eos_token_id
    if neutral.pad_token_id is None and ids not in (None, []):
        neutral.pad_token_id = ids if isinstance(ids, int) else ids[0]  # as `generate` does, with a warning a call
    return neutral


def ignored_settings(config: GenerationConfig) -> dict[str, Any]:
    """What [`neutral_generation_config`] leaves out of `config`, where that says something of the tokens."""
    kept = {*_TOKEN_FIELDS, "transformers_version", "_from_model_config"}
    defaults = GenerationConfig._get_default_generation_params()
    values = json.loads(config.to_json_string())  # some are objects
    return {
        name: value
        for name, value in values.items()
        if not (name in kept or name.startswith("output_") or (name in defaults and value == defaults[name]))
    }


def _stock_method(spec: str, target: PreTrainedModel) -> Method:
    name, _, value = spec.partition("=")
    if name == "early_exit":
        return _early_exit(value, target)
    if name == "prompt_lookup":
        num_tokens = _PROMPT_LOOKUP_TOKENS if name == spec else int(value) if value.isdecimal() else 0
        if num_tokens < 1:
            raise ValueError(f"{spec!r} gives 'prompt_lookup' no number of tokens; write prompt_lookup=TOKENS.")
        return Method(spec, name, {"prompt_lookup_num_tokens": num_tokens}, num_draft_tokens=num_tokens)
    if name in (PLAIN, "mtp") and name != spec:
        raise ValueError(f"{spec!r} gives {name!r} a value, which it does not take; drop it.")
    if name == PLAIN:
        return Method(PLAIN, PLAIN)
    if name == "mtp":
        num_layers = getattr(target.config.get_text_config(decoder=True), "num_mtp_layers", None)
        if not num_layers:
            raise ValueError(f"{type(target).__name__} has no layers for 'mtp' (`num_mtp_layers`); drop it.")
        note = "Transformers reads the MTP layers from the target's checkpoint within every call."
        return Method(name, name, {"use_mtp": True}, parameters=None, num_draft_tokens=num_layers, note=note)
    raise ValueError(
        f"There is no method {spec!r}; choose from plain, prompt_lookup, prompt_lookup=TOKENS, early_exit=LAYER and "
        "mtp."
    )


def _early_exit(value: str, target: PreTrainedModel) -> Method:
    decoder, layers = text_decoder(target)
    if not value.isdecimal() or not 0 < int(value) < len(layers):
        raise ValueError(
            f"'early_exit' needs a layer from 1 to {len(layers) - 1}, as early_exit=LAYER; got {value!r}."
        )
    config: Any = decoder.config
    exit_layer, ran = int(value), []
    hooks = [layer.register_forward_hook(lambda *args: ran.append(1)) for layer in layers]
    try:
        config.num_hidden_layers = exit_layer
        with torch.no_grad():
            target(torch.zeros(1, 1, dtype=torch.long, device=target.device), use_cache=False)
    finally:
        config.num_hidden_layers = len(layers)
        for hook in hooks:
            hook.remove()
    if len(ran) != exit_layer:
        raise ValueError(
            f"{type(target).__name__} cannot exit early: told to run {exit_layer} layers, it ran {len(ran)}; drop "
            "'early_exit'."
        )
    num_tokens, note = _describe_assistant(neutral_generation_config(target.generation_config))
    note = f"For targets trained to exit early. {note}"
    name, settings = f"early_exit={exit_layer}", {"assistant_early_exit": exit_layer}
    return Method(name, "early_exit", settings, num_draft_tokens=num_tokens, note=note)


def _split_drafter(spec: str) -> tuple[str, str]:
    """The name and the checkpoint."""
    name, separator, checkpoint = spec.partition("=")
    if not separator or set("/\\") & set(name):  # a folder's name may have the sign too
        name, checkpoint = Path(spec.replace("\\", "/")).name, spec
    if not name or not checkpoint:
        raise ValueError(f"{spec!r} is no drafter; write name=folder.")
    return name, checkpoint


def _drafter_method(name: str, checkpoint: str, target: PreTrainedModel) -> Method:
    config, _ = PreTrainedConfig.get_config_dict(checkpoint)
    settings: dict[str, Any] = {}
    note = None
    if "dlite_config" in config or config.get("model_type") == DLiteConfig.model_type:
        kind, loader = "dlite", DLiteForDrafting
    elif config.keys() >= _DFLASH_FIELDS:
        kind, loader, settings = "dflash", AutoModel, {"speculation_type": "dflash"}
        check_layers(name, config, target)
    elif config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        kind, loader = "assistant", AutoModelForCausalLM
    else:
        raise ValueError(
            f"The drafter {name!r} has the `model_type` {config.get('model_type')!r}, which is neither DLite, nor "
            f"DFlash (a config with {sorted(_DFLASH_FIELDS)}), nor a causal language model; drop it."
        )
    assistant = loader.from_pretrained(checkpoint, dtype=target.dtype).to(target.device).eval()
    if kind == "dlite":
        check_compatible(target, assistant.config)
        num_draft_tokens = assistant.config.num_draft_tokens
    elif kind == "dflash":
        num_draft_tokens, note = assistant.config.block_size - 1, READS_THE_PROMPT
    else:
        _check_assistant(name, assistant, target)
        fields = (*_TOKEN_FIELDS, *_ASSISTANT_FIELDS)
        assistant.generation_config = neutral_generation_config(assistant.generation_config, fields)
        num_draft_tokens, note = _describe_assistant(assistant.generation_config)
    return Method(
        name,
        kind,
        settings,
        assistant,
        checkpoint=without_folders(checkpoint.rstrip("/\\")),
        sha256=weights_sha256(assistant),
        parameters=sum(parameter.numel() for parameter in assistant.parameters()),
        num_draft_tokens=num_draft_tokens,
        note=note,
    )


def check_layers(name: str, config: dict[str, Any], target: PreTrainedModel) -> None:
    """Refuses a drafter whose `hidden_size` or `target_layer_ids` are not of this target.

    Raises:
        ValueError: if it is one.
    """
    text_config = target.config.get_text_config(decoder=True)
    if config.get("hidden_size") != text_config.hidden_size:
        raise ValueError(
            f"The drafter {name!r} has the hidden size {config.get('hidden_size')}, but {type(target).__name__} has "
            f"{text_config.hidden_size}; load the drafter of this target."
        )
    if max(config["target_layer_ids"]) >= text_config.num_hidden_layers:
        raise ValueError(
            f"The drafter {name!r} reads the layers {config['target_layer_ids']}, but {type(target).__name__} has "
            f"{text_config.num_hidden_layers}; load the drafter of this target."
        )


def _check_assistant(name: str, assistant: PreTrainedModel, target: PreTrainedModel) -> None:
    sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (assistant, target)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The assistant {name!r} has a vocabulary of {sizes[0]} tokens, but {type(target).__name__} one of "
            f"{sizes[1]}; give a model with the target's tokenizer."
        )


def _describe_assistant(config: GenerationConfig) -> tuple[int, str]:
    """How many tokens an assistant with this configuration drafts, and what else it does, as a note."""
    defaults = GenerationConfig._get_default_generation_params()
    num_tokens, schedule, threshold = (
        defaults[name] if getattr(config, name) is None else getattr(config, name) for name in _ASSISTANT_FIELDS
    )
    return num_tokens, (
        f"Drafts {num_tokens} tokens at first (schedule {schedule}), and stops below a confidence of {threshold}."
    )


def weights_sha256(model: PreTrainedModel) -> str:
    """The SHA-256 of a model's parameters, names and values, but for values that are offloaded."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        if parameter.is_meta:
            continue
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


__all__ = [
    "PLAIN",
    "READS_THE_PROMPT",
    "Method",
    "check_layers",
    "ignored_settings",
    "make_methods",
    "neutral_generation_config",
    "weights_sha256",
]
