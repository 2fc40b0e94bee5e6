# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""DLite model configuration."""

import re
from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, PreTrainedTokenizerBase


# (model type, layers, hidden size) of a target -> number of layers tapped, where the paper chose another than L / 3.
_PAPER_NUM_TAPPED = {("qwen3", 36, 4096): 14}
_QWEN3_MASK_TOKEN_ID = 151669  # the first row that Qwen3's tokenizer does not use


def evenly_spaced_layer_ids(num_target_layers: int, num_tapped: int) -> list[int]:
    """The ids of `num_tapped` layers: both ends, and evenly spaced ones between (design of the paper's section 4.1.1).

    Raises:
        ValueError: unless `2 <= num_tapped <= num_target_layers`.
    """
    if not 2 <= num_tapped <= num_target_layers:
        raise ValueError(
            f"Cannot tap {num_tapped} layers of a target with {num_target_layers}; take from 2 to {num_target_layers}."
        )
    num_inner = num_tapped - 2
    if num_inner == 1:
        inner = [1 + round(0.5 * (num_target_layers - 3))]
    else:
        inner = [1 + round(i / (num_inner - 1) * (num_target_layers - 3)) for i in range(num_inner)]
    return [0, *inner, num_target_layers - 1]


@strict
class DLiteConfig(PreTrainedConfig):
    r"""
    Everything that a DLite checkpoint must know: the sizes of the drafter, how it drafts, and which target it serves.
    `hidden_size` and `vocab_size` are the target's: the drafter reads the target's hidden states and embeddings as
    they are. Its `from_pretrained` also reads the `config.json` of the method's authors (`dlite_v1` and `dlite_v2`).

    Args:
        vocab_size (`int`): rows of the target's vocabulary, V.
        hidden_size (`int`): the target's hidden size, H.
        intermediate_size (`int`): width of the drafter's MLP.
        num_hidden_layers (`int`): depth of the drafter's backbone.
        num_attention_heads (`int`): query heads of the backbone.
        num_key_value_heads (`int`): key and value heads of the backbone.
        head_dim (`int`): size of a head, even.
        hidden_act (`str`): activation of the backbone's MLP.
        max_position_embeddings (`int`): only read by rotary types that scale; positions restart at 0 in every block,
            or, with a history, at its first token.
        initializer_range (`float`): standard deviation of the first weights.
        rms_norm_eps (`float`): epsilon of every norm.
        rope_parameters (`dict`): `rope_type` and `rope_theta`.
        attention_bias (`bool`): whether the attention projections have a bias.
        attention_dropout (`float`): dropout of the attention weights.
        num_draft_tokens (`int`): tokens proposed in a round, K.
        target_layer_ids (`list[int]`): the S target layers read, strictly increasing, both ends and evenly spaced ones
            by default; layer i is `hidden_states[i + 1]`.
        anchor_group_size (`int`): how many of the last real tokens are queries, G, 1 or 2.
        sequential_rank (`int`): rank of the sequential head, r.
        mask_token_id (`int`): the placeholder, a row of the target's input embedding.
        draft_vocab_size (`int`, *optional*): how many tokens the head can propose, V_d; all V by default. Which they
            are is a buffer of the head, `draft_vocab_ids`.
        context_fusion (`str`): `"sequence"` gives every layer read a context slot of its own; `"feature"`, the
            paper's ablation, projects all of them to one slot.
        history_window (`int`): W; 0 is DLite. A drafter with W >= 2 also reads the W - 1 tokens before the pivot: the
            teacher of the warm-up stage, or the paper's ablation. In `generate` the window holds what the call itself
            ran: with the cache of an earlier turn it begins anew.
        history_layer_ids (`list[int]`): the layers read of those tokens; the first, middle and last by default.
        num_target_layers (`int`): layers of the target, L.
        target_model_type (`str`, *optional*): `model_type` of the target's text model.
        target_name_or_path (`str`, *optional*): the target.
        target_revision (`str`, *optional*): its revision.
        target_quantization (`str`, *optional*): how its weights were quantised when the drafter was trained.

    Raises:
        ValueError: if two of these do not fit together.
    """

    model_type = "dlite"

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    num_draft_tokens: int = 7
    target_layer_ids: list[int] = field(default_factory=list)
    anchor_group_size: int = 1
    sequential_rank: int = 320
    mask_token_id: int = _QWEN3_MASK_TOKEN_ID
    draft_vocab_size: int | None = None
    context_fusion: str = "sequence"
    history_window: int = 0
    history_layer_ids: list[int] = field(default_factory=list)

    num_target_layers: int = 36
    target_model_type: str | None = None
    target_name_or_path: str | None = None
    target_revision: str | None = None
    target_quantization: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not self.target_layer_ids:
            num_tapped = max(2, round(self.num_target_layers / 3))
            self.target_layer_ids = evenly_spaced_layer_ids(self.num_target_layers, num_tapped)
        if self.history_window and not self.history_layer_ids:
            last = self.num_target_layers - 1
            self.history_layer_ids = sorted({0, self.num_target_layers // 2, last})
        super().__post_init__(**kwargs)
        self._check()

    def _check(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "num_draft_tokens",
            "sequential_rank",
            "num_target_layers",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be at least 1.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})."
            )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` is {self.head_dim}, but rotary positions need an even one.")
        if self.anchor_group_size not in (1, 2):
            raise ValueError(f"`anchor_group_size` is {self.anchor_group_size}, but must be 1 or 2.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` is {self.mask_token_id}, but must be a row of the target's vocabulary of "
                f"{self.vocab_size}."
            )
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` is {self.draft_vocab_size}, but must be from 1 to the target's vocabulary of "
                f"{self.vocab_size}."
            )
        if self.context_fusion not in ("sequence", "feature"):
            raise ValueError(f"`context_fusion` is {self.context_fusion!r}, but must be 'sequence' or 'feature'.")
        if self.history_window < 0 or self.history_window == 1:
            raise ValueError(
                f"`history_window` is {self.history_window}, but must be 0, for no history, or at least 2, since it "
                "counts the pivot."
            )
        if self.history_layer_ids and not self.history_window:
            raise ValueError(
                f"`history_layer_ids` is {self.history_layer_ids}, but `history_window` is 0; set it, too, or neither."
            )
        for name in ("target_layer_ids", "history_layer_ids"):
            ids = getattr(self, name)
            if ids and (ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= self.num_target_layers):
                raise ValueError(
                    f"`{name}` is {ids}, but must be strictly increasing ids from 0 to "
                    f"{self.num_target_layers - 1}, the last layer of the target."
                )

    @property
    def captured_layer_ids(self) -> list[int]:
        """All layers whose hidden states the drafter reads, of whichever tokens."""
        return sorted({*self.target_layer_ids, *self.history_layer_ids})

    @classmethod
    def from_target(
        cls, target_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None, **overrides: Any
    ) -> "DLiteConfig":
        """The configuration of a new drafter: the paper's presets for Qwen3-4B and 8B, sound defaults elsewhere.

        Args:
            target_config: the target's configuration; the text model inside a vision-language model is found.
            tokenizer: the target's tokenizer, to find a placeholder where `mask_token_id` is not given.
            overrides: fields of `DLiteConfig`.

        Raises:
            ValueError: if the target has fewer than two layers, or no placeholder can be found for it.
            TypeError: if an override is not a field of the configuration.
        """
        unknown = sorted(set(overrides) - set(cls.__dataclass_fields__))
        if unknown:
            raise TypeError(f"{unknown} are not fields of `DLiteConfig`; see its documentation for those that are.")
        text_config = target_config.get_text_config(decoder=True)
        num_layers, hidden_size = text_config.num_hidden_layers, text_config.hidden_size
        # A target may lack a field, or hold one value a layer: what follows from its sizes serves a drafter as well.
        num_heads = _size(text_config, "num_attention_heads", max(1, hidden_size // 64))
        num_tapped = _PAPER_NUM_TAPPED.get(
            (text_config.model_type, num_layers, hidden_size), max(2, round(num_layers / 3))
        )
        fields: dict[str, Any] = {
            "vocab_size": text_config.vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": _size(text_config, "intermediate_size", 4 * hidden_size),
            "num_attention_heads": num_heads,
            "num_key_value_heads": _size(text_config, "num_key_value_heads", num_heads),
            "head_dim": _size(text_config, "head_dim", hidden_size // num_heads),
            "rms_norm_eps": getattr(text_config, "rms_norm_eps", None) or cls.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": _rope_theta(text_config)},
            "max_position_embeddings": _size(text_config, "max_position_embeddings", cls.max_position_embeddings),
            "sequential_rank": max(8, 8 * round(hidden_size / 64)),
            "num_target_layers": num_layers,
            "target_model_type": text_config.model_type,
            "target_name_or_path": target_config.name_or_path or None,
            "target_revision": getattr(target_config, "_commit_hash", None),
            "target_quantization": _quantization(target_config),
        }
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            fields[name] = getattr(text_config, name, None)
        if overrides.get("target_layer_ids") is None:
            fields["target_layer_ids"] = evenly_spaced_layer_ids(num_layers, num_tapped)
        if overrides.get("mask_token_id") is None:
            fields["mask_token_id"] = _find_mask_token_id(text_config, tokenizer)
        return cls(**{**fields, **{name: value for name, value in overrides.items() if value is not None}})

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if "dlite_config" in config_dict:
            config_dict = _from_authors_config(config_dict)
        return config_dict, kwargs


def _size(text_config: PreTrainedConfig, name: str, default: int) -> int:
    try:
        value = getattr(text_config, name, None)
    except RuntimeError:  # a heterogeneous configuration does not name one value for all layers
        return default
    return value if isinstance(value, int) and value > 0 else default


def _rope_theta(text_config: PreTrainedConfig) -> float:
    """Rotary base of the target's full-attention layers; 10,000 for a target without rotary positions."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    return parameters.get("rope_theta", PreTrainedConfig.default_theta)


def _quantization(target_config: PreTrainedConfig) -> str | None:
    quantization_config = getattr(target_config, "quantization_config", None)
    if quantization_config is None:
        return None
    if isinstance(quantization_config, dict):
        return str(quantization_config.get("quant_method"))
    return str(getattr(quantization_config.quant_method, "value", quantization_config.quant_method))


def _find_mask_token_id(text_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """The tokenizer's mask token, else the first row of the vocabulary that the tokenizer does not use."""
    if tokenizer is not None:
        if tokenizer.mask_token_id is not None:
            return tokenizer.mask_token_id
        used = set(tokenizer.get_vocab().values())
        unused = next((row for row in range(text_config.vocab_size) if row not in used), None)
        if unused is not None:
            return unused
        candidates = [f"{token_id} ({text})" for token_id, text in _placeholder_candidates(text_config, tokenizer)]
        such_as = f", such as {' or '.join(candidates[:3])}" if candidates else ""
        raise ValueError(
            f"The tokenizer uses all {text_config.vocab_size} rows of the target's vocabulary and has no mask token; "
            f"pass `mask_token_id`, the id of a token that never occurs in answers{such_as}."
        )
    if text_config.model_type == "qwen3":
        return _QWEN3_MASK_TOKEN_ID
    raise ValueError(
        f"No placeholder is known for a target of type {text_config.model_type!r}; pass its `tokenizer`, or "
        "`mask_token_id`."
    )


# Of tokens that a vocabulary keeps free: `[PAD151935]`, `<unused7>`, `<|reserved_special_token_3|>`, `<extra_id_0>`.
_RESERVED = re.compile(r"[<\[]\S*(pad_?\d|unused|reserved|extra_id|dummy|placeholder)\S*[>\]]", re.IGNORECASE)


def _placeholder_candidates(
    text_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, str]]:
    """Ids and texts of tokens that answers hardly hold: reserved ones, then special ones that neither the chat
    template nor the ends of a text use."""
    taken = set()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        for value in (getattr(text_config, name, None), getattr(tokenizer, name, None)):
            taken |= {*value} if isinstance(value, list) else {value}
    template = str(tokenizer.chat_template)
    vocab = sorted((row, text) for text, row in tokenizer.get_vocab().items())
    free = [(row, text) for row, text in vocab if row not in taken and text not in template]
    reserved = [each for each in free if _RESERVED.fullmatch(each[1])]
    special = {row for row, token in tokenizer.added_tokens_decoder.items() if token.special}
    return reserved[::-1] + [each for each in free if each[0] in special and each not in reserved]


def _from_authors_config(config_dict: dict[str, Any]) -> dict[str, Any]:
    """Our fields from the `config.json` of the method's authors: a Qwen3 one with a `dlite_config` inside."""
    dlite = config_dict["dlite_config"]
    version, role = dlite["architecture_version"], dlite["model_role"]
    default_group_size = {"dlite_v1": 1, "dlite_v2": 2}.get(version)
    if default_group_size is None:
        raise ValueError(f"`architecture_version` is {version!r}, but 'dlite_v1' and 'dlite_v2' are the known ones.")
    if role not in ("pivot_q_student", "swa_teacher"):
        raise ValueError(f"`model_role` is {role!r}, but 'pivot_q_student' and 'swa_teacher' are the known ones.")
    if dlite["sequential_head"] != "rnn":
        raise ValueError(f"`sequential_head` is {dlite['sequential_head']!r}, but only 'rnn' is known.")
    fields = {name: config_dict[name] for name in DLiteConfig.__dataclass_fields__ if name in config_dict}
    # Written by older Transformers: `rope_theta` beside `rope_scaling`. Local positions never reach a scaled range.
    fields["rope_parameters"] = config_dict.get("rope_parameters") or {
        "rope_type": "default",
        "rope_theta": config_dict.get("rope_theta", PreTrainedConfig.default_theta),
    }
    if "torch_dtype" in config_dict:
        fields["dtype"] = config_dict["torch_dtype"]
    return {
        **fields,
        "model_type": DLiteConfig.model_type,
        "num_draft_tokens": config_dict["block_size"] - 1,
        "target_layer_ids": dlite["target_layer_ids"],
        "anchor_group_size": dlite.get("anchor_group_size", default_group_size),
        "sequential_rank": dlite["sequential_rank"],
        "mask_token_id": dlite["mask_token_id"],
        "history_window": dlite["swa_window_size"] if role == "swa_teacher" else 0,
        "history_layer_ids": dlite["history_layer_ids"] if role == "swa_teacher" else [],
        "target_model_type": config_dict.get("model_type"),
    }


__all__ = ["DLiteConfig"]
