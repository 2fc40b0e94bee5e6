# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""`DLiteCandidateGenerator`: drafts by the contract of Transformers' candidate generators."""

import copy
import gc
import weakref
from collections.abc import Sequence
from types import BuiltinMethodType, FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import ModelOutput, logging

from ..history import DLiteHistory
from ..modeling_dlite import DLiteForDrafting, Sampler
from ..target import embed_tokens, gather_features
from .sampling import draw


logger = logging.get_logger(__name__)

# A deep copy of more objects would cost milliseconds in every round.
_MOST_OBJECTS_COPIED = 5000


class DLiteCandidateGenerator(CandidateGenerator):
    """
    Proposes up to K tokens a round from the target's hidden states at the last verified token. It keeps nothing from
    one round to the next, except for a drafter with a `history_window`: the hidden states of the window's tokens.

    Args:
        drafter ([`DLiteForDrafting`]): the drafter.
        target ([`PreTrainedModel`]): its target, for the input embeddings.
        generation_config ([`GenerationConfig`]): of the running call: `do_sample` and `max_length` are read.
        logits_processor ([`LogitsProcessorList`], *optional*): the call's processors. Drafting applies a copy of them,
            made anew every round, so that theirs never see a token that may be rejected.
        num_draft_tokens (`int`, *optional*): how many to propose, at most the drafter's K, which is the default.
        confidence_threshold (`float`, *optional*, defaults to 0): where a draft ends early, see
            [`DLiteForDrafting.draft`]; with 0 nowhere.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: DLiteForDrafting,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
        num_draft_tokens: int | None = None,
        confidence_threshold: float = 0.0,
    ):
        self.drafter = drafter
        self.target = target
        self.do_sample = generation_config.do_sample
        self.max_length = generation_config.max_length
        self.num_draft_tokens = num_draft_tokens or drafter.config.num_draft_tokens
        self.confidence_threshold = confidence_threshold
        self.logits_processor = _copyable(logits_processor or LogitsProcessorList())
        # The target's forward keeps these and no other hidden states; entry i + 1 is the output of layer i.
        self.model_kwargs_overrides = {"output_hidden_states": [i + 1 for i in drafter.config.captured_layer_ids]}
        placeholders = torch.full((1, drafter.config.num_draft_tokens), drafter.config.mask_token_id)
        self._placeholder_embeds = embed_tokens(target, placeholders)
        self._num_last_candidates = 0
        # Hidden states `[N, T, M, H]` of the window's verified tokens, the pivot last.
        self._history_features: torch.Tensor | None = None

    def get_candidates(
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: ModelOutput | None = None,
        is_first_iteration: bool | None = None,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `[N, T]`):
                The sequences so far. Their last token, the anchor, has not been through the target yet.
            model_outputs ([`ModelOutput`], *optional*):
                What the target returned last, with `hidden_states`. Its rows are the last candidates' positions, the
                anchor before them included; of a prefill, the prompt or the end of it.
            n_last_matches (`int`):
                How many of the last candidates were accepted: the pivot is their last.

        Returns:
            The sequences with up to K candidates `[N, T + k]` and the logits `[N, k, V]` that they were drawn from.
            Without hidden states, as before a prefill, with no room for a candidate, or where the drafter is not
            confident of any: `input_ids` and `None`.
        """
        num_draft_tokens = min(self.num_draft_tokens, self.max_length - input_ids.shape[1] - 1)
        pivot = -1 - self._num_last_candidates + n_last_matches
        self._num_last_candidates = 0
        if model_outputs is None or num_draft_tokens < 1:
            return input_ids, None
        hidden_states, end = model_outputs.get("hidden_states"), pivot + 1 or None
        features = gather_features(hidden_states, self.drafter.config.target_layer_ids, slice(pivot, end))
        if features is None:
            return input_ids, None
        history = None
        if self.drafter.config.history_window:
            history = self._extended_history(hidden_states, slice(None, end))
        previous_token_ids = input_ids[:, -self.drafter.config.anchor_group_size :]
        placeholder_embeds = self._placeholder_embeds.expand(input_ids.shape[0], -1, -1)
        inputs_embeds = torch.cat([embed_tokens(self.target, previous_token_ids), placeholder_embeds], dim=1)
        draft_ids, draft_logits = self.drafter.draft(
            features[:, 0].to(self.drafter.device, self.drafter.dtype),
            inputs_embeds.to(self.drafter.device, self.drafter.dtype),
            previous_token_ids.to(self.drafter.device),
            num_draft_tokens,
            self._sampler(input_ids.to(self.drafter.device)),
            history,
            self.confidence_threshold,
        )
        self._num_last_candidates = draft_ids.shape[1]
        if not self._num_last_candidates:
            return input_ids, None
        return torch.cat([input_ids, draft_ids.to(input_ids.device)], dim=1), draft_logits.to(input_ids.device)

    def _extended_history(self, hidden_states: Sequence[torch.Tensor | None], verified: slice) -> DLiteHistory:
        """The history of a drafter with a window, which ends with the rows `verified` since the last round."""
        # The layers are among those captured, whose features were there.
        rows = cast(torch.Tensor, gather_features(hidden_states, self.drafter.config.history_layer_ids, verified))
        features = rows.to(self.drafter.device, self.drafter.dtype)
        if self._history_features is not None:
            features = torch.cat([self._history_features, features], dim=1)
        self._history_features = features[:, -self.drafter.config.history_window :].clone()
        num_sequences, num_tokens = self._history_features.shape[:2]
        sequence_ids = torch.arange(num_sequences, device=features.device)
        return DLiteHistory(self._history_features, sequence_ids, torch.full_like(sequence_ids, num_tokens))

    def _sampler(self, input_ids: torch.Tensor) -> Sampler | None:
        if not self.do_sample and not self.logits_processor:
            return None
        logits_processor = copy.deepcopy(self.logits_processor)

        def sampler(logits: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            try:
                scores = logits_processor(torch.cat([input_ids, drafted], dim=1), logits.to(torch.float32, copy=True))
            except Exception as error:  # a processor may refuse a prefix that the target would never write
                logger.warning_once(
                    f"A logits processor refuses a draft ({type(error).__name__}), so drafting goes without any; the "
                    "output is the same, though fewer tokens may be accepted."
                )
                self.logits_processor = LogitsProcessorList()
                logits_processor.clear()
                scores = logits.float()
            if self.do_sample:
                # Where a processor allows nothing behind a draft, or a narrow dtype overflows, any draw is as good.
                scores = scores.masked_fill(scores.softmax(dim=-1).isnan().any(dim=-1, keepdim=True), 0.0)
                return draw(scores.softmax(dim=-1)), scores
            return scores.argmax(dim=-1), scores

        return sampler


def _copyable(logits_processor: LogitsProcessorList) -> LogitsProcessorList:
    """The processors that drafting can copy; the others stay for verification alone."""
    copyable = LogitsProcessorList()
    for processor in logits_processor:
        if _can_be_copied(processor):
            copyable.append(processor)
        else:
            name = getattr(processor, "__name__", type(processor).__name__)  # a plain function serves, too
            logger.warning_once(
                f"{name} cannot be copied, so drafting goes without it; the output is the same, though fewer tokens "
                "may be accepted."
            )
    return copyable


def _can_be_copied(processor: LogitsProcessor) -> bool:
    """Whether a deep copy is cheap enough for every round and shares no state with the original.

    `deepcopy` returns functions, weak references and methods of built-in objects as they are, at whatever depth they
    are held, so what these refer to would be shared. State outside the object, such as a global, cannot be seen.
    """
    pending: list[Any] = [processor]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, type | ModuleType):
            continue
        seen.add(id(value))
        if len(seen) > _MOST_OBJECTS_COPIED or isinstance(value, nn.Module | weakref.ref):
            return False
        if isinstance(value, FunctionType):
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            if value.__closure__ or vars(value) or any(isinstance(each, list | dict | set) for each in defaults):
                return False
        elif isinstance(value, BuiltinMethodType):
            if not (value.__self__ is None or isinstance(value.__self__, ModuleType)):
                return False
        else:
            pending.extend(gc.get_referents(value))
    try:
        copied = copy.deepcopy(processor)
    except Exception:  # whatever a user's class raises, it means the same
        return False
    return copied is not processor or isinstance(processor, FunctionType)
