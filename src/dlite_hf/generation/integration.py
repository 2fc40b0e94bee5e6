# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""How a drafter gets into `generate`: two delegating wrappers, and every private name of Transformers that we use."""

import functools
import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput, logging

from ..modeling_dlite import DLiteForDrafting, drafter_in
from ..target import capture_hidden_states, check_compatible, text_decoder
from .candidate_generator import DLiteCandidateGenerator
from .decoding import speculative_decoding


logger = logging.get_logger(__name__)

SUPPORTED_TRANSFORMERS = "transformers>=5.24"
# Methods of `GenerationMixin` outside its public interface, and the parameters that we count on.
PRIVATE_METHODS = {
    "_validate_generation_mode": ("self", "generation_mode", "generation_config", "generation_mode_kwargs"),
    "_assisted_decoding": (
        *("self", "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus"),
        *("streamer", "inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer", "model_kwargs"),
    ),
    "_prefill": ("self", "input_ids", "generation_config", "model_kwargs", "is_first_iteration"),
    "_update_model_kwargs_for_generation": (
        *("self", "outputs", "model_kwargs", "is_encoder_decoder", "num_new_tokens"),
    ),
    "_valid_auto_compile_criteria": ("self", "model_kwargs", "generation_config"),
    "_optimize_model_for_decode": ("self",),
}

# Other ways to draft: a call that asks for one of them and for a DLite drafter contradicts itself.
_RIVAL_OPTIONS = (
    "prompt_lookup_num_tokens",
    "use_mtp",
    "assistant_early_exit",
    "speculation_type",
    "assistant_ensemble_weight",
    "dola_layers",
)
_CROSS_ATTENTION_FIELDS = ("cross_attention_layers", "cross_layer_interval")  # of Mllama, and of Idefics
_IGNORED_OPTIONS = (
    "num_assistant_tokens_schedule",
    "assistant_lookbehind",
    "target_lookbehind",
)


class TargetSteps:
    """The target's forwards in one call of `generate`, with the cache and arguments that grow along.

    Args:
        model: the target.
        generation_config: of the running call.
        model_kwargs: what `generate` prepared for the forwards, the cache included.
        layer_ids: the layers that drafting reads.
        num_rows: at how many of the prompt's last positions it reads them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        layer_ids: list[int],
        num_rows: int,
    ):
        self.model = model
        self.num_rows = num_rows
        self.generation_config = generation_config
        self.model_kwargs = model_kwargs
        self.layer_ids = layer_ids
        requested = model_kwargs.get("output_hidden_states")
        # The call may want hidden states itself: all of them, or some beside ours.
        self._output_hidden_states: bool | list[int] = True
        if requested is not True:
            own = [i + 1 for i in layer_ids]
            self._output_hidden_states = own + ([requested] if isinstance(requested, int) else list(requested or ()))
        self._forward = model.__call__
        if model._valid_auto_compile_criteria(model_kwargs, generation_config):
            self._forward = model.get_compiled_call(generation_config.compile_config)

    @property
    def cache(self) -> Cache:
        return self.model_kwargs["cache"]

    def prefill(self, input_ids: torch.Tensor) -> tuple[ModelOutput, BaseModelOutput]:
        """Runs the prompt as plain generation does: what that returned, and the hidden states of its last rows."""
        with capture_hidden_states(self.model, self.layer_ids, self.num_rows) as capture:
            outputs = self.model._prefill(
                input_ids,
                self.generation_config,
                self.model_kwargs,
                is_first_iteration=not self.generation_config.is_assistant,
            )
        self.advance(outputs, 1)
        return outputs, BaseModelOutput(hidden_states=capture.hidden_states)

    def verify(self, sequence_ids: torch.Tensor, num_candidates: int) -> ModelOutput:
        """Runs the last `num_candidates + 1` of `sequence_ids` `[N, T + k]`: logits and hidden states of them all."""
        model_kwargs = dict(self.model_kwargs)
        if num_candidates:
            model_kwargs = self._grown(BaseModelOutput(), model_kwargs, num_candidates)
        model_inputs = self.model.prepare_inputs_for_generation(
            sequence_ids, next_sequence_length=num_candidates + 1, **model_kwargs
        )
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = num_candidates + 1
        model_inputs["output_hidden_states"] = self._output_hidden_states
        return self._forward(**model_inputs, return_dict=True)

    def advance(self, outputs: ModelOutput, num_new_tokens: int) -> None:
        """Makes masks and positions of the next forward cover `num_new_tokens` more."""
        self.model_kwargs = self._grown(outputs, self.model_kwargs, num_new_tokens)

    def _grown(self, outputs: ModelOutput, model_kwargs: dict[str, Any], num_new_tokens: int) -> dict[str, Any]:
        has_types = model_kwargs.get("token_type_ids") is not None
        # For several tokens at once Transformers repeats as many types; plain generation repeats the last one.
        for step in [1] * num_new_tokens if has_types else [num_new_tokens]:
            model_kwargs = self.model._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=step)
        return model_kwargs

    def optimized_for_decoding(self) -> AbstractContextManager[None]:
        return self.model._optimize_model_for_decode()


def _check_call(
    model: PreTrainedModel,
    drafter: DLiteForDrafting,
    generation_mode: GenerationMode,
    generation_config: GenerationConfig,
    generation_mode_kwargs: dict[str, Any],
) -> None:
    """Refuses, before anything is allocated, a call that could not be exact, or whose options we cannot honour."""
    for name in _RIVAL_OPTIONS:
        if getattr(generation_config, name) not in (None, False):
            raise ValueError(
                f"`{name}={getattr(generation_config, name)!r}` asks for another way to draft than the DLite drafter "
                "given as `assistant_model`; drop one of the two."
            )
    if generation_mode_kwargs.get("assistant_tokenizer") is not None:
        raise ValueError("A DLite drafter shares its target's tokens; drop `assistant_tokenizer`.")
    if generation_mode_kwargs.get("synced_gpus"):
        raise ValueError(
            "A DLite drafter cannot draft while `synced_gpus=True` keeps several processes in step, since each would "
            "need its own number of forwards; generate without `assistant_model` there."
        )
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder, but a DLite drafter serves decoders only.")
    text_config = model.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) for config in (model.config, text_config) for name in _CROSS_ATTENTION_FIELDS):
        raise ValueError(
            f"{type(model).__name__} attends to images in layers of their own, whose masks and keys do not follow a "
            "draft; generate without `assistant_model`."
        )
    if model._is_stateful:
        layer_types = sorted(set(getattr(text_config, "layer_types", None) or ()))
        raise ValueError(
            f"{type(model).__name__} keeps a recurrent state (layer types {layer_types or [text_config.model_type]}), "
            "which cannot drop rejected tokens; generate without `assistant_model`."
        )
    if generation_config.num_return_sequences > 1:
        raise ValueError(
            f"`num_return_sequences` is {generation_config.num_return_sequences}, but a DLite drafter serves one "
            "sequence a call; call `generate` once for each."
        )
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"A DLite drafter works with greedy search and sampling, but these options ask for "
            f"{generation_mode.value} (`num_beams={generation_config.num_beams}`); drop them or `assistant_model`."
        )
    if generation_config.use_cache is False:
        raise ValueError("`use_cache=False` leaves no cache to verify a draft on; drop it or `assistant_model`.")
    check_compatible(model, drafter.config)
    text_decoder(model)
    _num_draft_tokens(drafter, generation_config)
    _confidence_threshold(generation_config)

    defaults = GenerationConfig._get_default_generation_params()
    for name in _IGNORED_OPTIONS:
        if getattr(generation_config, name) not in (None, defaults[name]):
            logger.warning_once(f"`{name}={getattr(generation_config, name)!r}` has no effect on a DLite drafter.")


def _num_draft_tokens(drafter: DLiteForDrafting, generation_config: GenerationConfig) -> int:
    """K, or fewer where the call says so; Transformers fills in its own default of `num_assistant_tokens`."""
    num_draft_tokens = drafter.config.num_draft_tokens
    requested = generation_config.num_assistant_tokens
    if requested in (None, GenerationConfig._get_default_generation_params()["num_assistant_tokens"]):
        return num_draft_tokens
    if requested < 1:
        raise ValueError(f"`num_assistant_tokens` is {requested}, but must be at least 1.")
    if requested > num_draft_tokens:
        logger.warning_once(
            f"`num_assistant_tokens={requested}` is more than the {num_draft_tokens} that this drafter proposes."
        )
    return min(requested, num_draft_tokens)


def _confidence_threshold(generation_config: GenerationConfig) -> float:
    """Where a draft ends early; 0, nowhere, unless the call says so, as Transformers fills in its own default."""
    threshold = generation_config.assistant_confidence_threshold
    if threshold in (None, GenerationConfig._get_default_generation_params()["assistant_confidence_threshold"]):
        return 0.0
    if not 0 <= threshold < 1:
        raise ValueError(
            f"`assistant_confidence_threshold` is {threshold}, but must be at least 0 and less than 1: with 1 nothing "
            "would be drafted."
        )
    return threshold


def _decode_with_drafter(
    model: PreTrainedModel,
    drafter: DLiteForDrafting,
    input_ids: torch.Tensor,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    streamer: Any = None,
    synced_gpus: bool | None = None,
    inputs_tensor: torch.Tensor | None = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"The batch has {input_ids.shape[0]} sequences, but a DLite drafter serves one a call; call "
            "`generate` for each."
        )
    if model_kwargs.get("cache") is None:
        raise ValueError(
            f"{type(model).__name__} keeps no cache that can drop rejected tokens; drop `assistant_model`."
        )
    num_rows, attention_mask = max(drafter.config.history_window, 1), model_kwargs.get("attention_mask")
    if num_rows > 1 and isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        num_rows = min(num_rows, max(int(attention_mask.sum()), 1))  # no history of padding on the left
    steps = TargetSteps(model, generation_config, model_kwargs, drafter.config.captured_layer_ids, num_rows)
    candidate_generator = DLiteCandidateGenerator(
        drafter,
        model,
        generation_config,
        logits_processor,
        _num_draft_tokens(drafter, generation_config),
        _confidence_threshold(generation_config),
    )
    return speculative_decoding(
        steps, candidate_generator, input_ids, logits_processor, stopping_criteria, generation_config, streamer
    )


def install() -> None:
    """Lets `generate` know DLite drafters; calls with any other assistant, or none, go on as before.

    Raises:
        ImportError: if the installed Transformers lacks what this integration calls.
    """
    for name, parameters in PRIVATE_METHODS.items():
        method = getattr(GenerationMixin, name, None)
        if method is None or not set(parameters) <= set(inspect.signature(method).parameters):
            raise ImportError(
                f"dlite-hf needs {SUPPORTED_TRANSFORMERS}, but `GenerationMixin.{name}` of transformers "
                f"{transformers.__version__} is not the one that it knows; install a supported version."
            )
    validate, decode = GenerationMixin._validate_generation_mode, GenerationMixin._assisted_decoding

    @functools.wraps(validate)
    def _validate_generation_mode(
        self: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any
    ) -> None:
        drafter = drafter_in(generation_mode_kwargs.get("assistant_model"))
        if drafter is not None:
            _check_call(self, drafter, generation_mode, generation_config, generation_mode_kwargs)
        return validate(self, generation_mode, generation_config, generation_mode_kwargs)

    @functools.wraps(decode)
    def _assisted_decoding(self: Any, input_ids: Any, *args: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
        drafter = drafter_in(assistant_model)
        if drafter is None:
            return decode(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
        return _decode_with_drafter(self, drafter, input_ids, *args, **kwargs)

    GenerationMixin._validate_generation_mode = _validate_generation_mode
    GenerationMixin._assisted_decoding = _assisted_decoding
