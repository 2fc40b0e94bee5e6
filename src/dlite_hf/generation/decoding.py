# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The loop behind `generate(assistant_model=drafter)`: prefill, draft, verify from left to right."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from .candidate_generator import DLiteCandidateGenerator
from .sampling import draw, speculative_sample
from .statistics import SpeculationStatistics, running_statistics, time_when_idle
from .token_records import TokenRecords


if TYPE_CHECKING:
    from .integration import TargetSteps


def speculative_decoding(
    steps: "TargetSteps",
    candidate_generator: DLiteCandidateGenerator,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None = None,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Generates as the target alone would, several tokens a forward.

    A round drafts k tokens, shows the target the newest token and the draft in one forward, and emits from left to
    right. Every emitted token has passed processors and stopping criteria exactly once, on its true prefix, in order;
    nothing after a rejection or a stop is evaluated.

    Args:
        steps: the target's forwards in this call, with its cache.
        candidate_generator: proposes the draft.
        input_ids (`torch.LongTensor` of shape `[1, T]`): the prompt.
        logits_processor: the call's processors.
        stopping_criteria: the call's criteria.
        generation_config: the call's configuration.
        streamer: gets every token as it is emitted.

    Raises:
        ValueError: if the target's cache cannot drop rejected tokens.
    """
    statistics = running_statistics()
    sequence = _Sequence(input_ids, logits_processor, stopping_criteria, generation_config, streamer)

    _check_croppable(steps.cache, is_prefilled=False)
    outputs, draft_inputs = steps.prefill(input_ids)
    _check_croppable(steps.cache)
    sequence.records.add_prefill(outputs)
    sequence.emit(outputs.logits[:, -1])
    del outputs  # a prompt's hidden states, if the call asked for them, live on in the records alone

    num_matches, device = 0, steps.model.device
    with steps.optimized_for_decoding(), _recording_past(steps.cache):
        while not sequence.is_finished:
            started = _clock(statistics, device)
            candidate_ids, draft_logits = candidate_generator.get_candidates(
                sequence.input_ids, model_outputs=draft_inputs, n_last_matches=num_matches
            )
            draft_ids = candidate_ids[:, sequence.input_ids.shape[1] :]
            drafted = _clock(statistics, device)
            draft_inputs = steps.verify(candidate_ids, num_candidates=draft_ids.shape[1])
            if statistics is not None:
                statistics.num_rounds += 1
                statistics.num_drafted_tokens += draft_ids.shape[1]
                statistics.drafting_seconds += drafted - started
                statistics.verifying_seconds += _clock(statistics, device) - drafted
            num_matches = _emit_verified(sequence, draft_inputs, draft_ids, draft_logits, steps.cache, statistics)
            if statistics is not None and statistics.on_round is not None:
                statistics.on_round(draft_ids, draft_logits, sequence.input_ids[:, -num_matches - 1 :])
            steps.advance(draft_inputs, num_matches + 1)

    if streamer is not None:
        streamer.end()
    return sequence.records.output(sequence.input_ids, steps.cache)


class _Sequence:
    """The tokens so far, and all that a further one must pass."""

    def __init__(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
    ):
        self.input_ids = input_ids
        self.logits_processor = logits_processor
        self.stopping_criteria = stopping_criteria
        self.do_sample = generation_config.do_sample
        self.streamer = streamer
        self.records = TokenRecords(generation_config)
        self.is_finished = False

    def emit(
        self,
        logits: torch.Tensor,
        draft_ids: torch.Tensor | None = None,
        draft_logits: torch.Tensor | None = None,
        statistics: SpeculationStatistics | None = None,
        position: int = 0,
    ) -> bool:
        """Appends one token and says whether it is the drafted one.

        Args:
            logits: the target's, `[N, V]`.
            draft_ids: the candidate `[N]`, if there is one.
            draft_logits: what it was drawn from, `[N, V]`.
            statistics: what the call's caller collects.
            position: the candidate's place in its block, from 1.
        """
        # A copy, so that what is returned does not hold the whole forward's logits.
        logits = logits.to(copy=True, dtype=torch.float32, device=self.input_ids.device)
        scores = self.logits_processor(self.input_ids, logits)
        self.records.add_scores(scores, logits)
        if not self.do_sample:
            token_ids = scores.argmax(dim=-1)
            is_draft = draft_ids is not None and bool((token_ids == draft_ids).all())
        elif draft_ids is None:
            token_ids, is_draft = draw(scores.softmax(dim=-1)), False
        else:
            token_ids, accepted = speculative_sample(scores, draft_ids, draft_logits)
            is_draft = bool(accepted.all())
        self.input_ids = torch.cat([self.input_ids, token_ids[:, None]], dim=1)
        self.is_finished = bool(self.stopping_criteria(self.input_ids, self.records.scores).all())
        if statistics is not None:
            statistics.token_origins.append(position if is_draft else 0)
            if draft_ids is not None:
                statistics.tested_positions.append(position)
        if self.streamer is not None:
            self.streamer.put(token_ids.cpu())
        return is_draft


def _emit_verified(
    sequence: _Sequence,
    outputs: ModelOutput,
    draft_ids: torch.Tensor,
    draft_logits: torch.Tensor | None,
    cache: Cache,
    statistics: SpeculationStatistics | None,
) -> int:
    """Emits what a verification forward allows, at least one token, and drops the rest from the cache.

    Returns how many of the draft stay in the cache. The last token emitted never does: it is the next anchor.
    """
    num_candidates, num_emitted = draft_ids.shape[1], 0
    logits = outputs.logits[:, -num_candidates - 1 :]
    try:
        for i in range(num_candidates + 1):
            sequence.records.add_row(outputs, i, cache)
            is_candidate = i < num_candidates
            is_draft = sequence.emit(
                logits[:, i],
                draft_ids[:, i] if is_candidate else None,
                draft_logits[:, i] if is_candidate and draft_logits is not None else None,
                statistics,
                position=i + 1,
            )
            num_emitted += 1
            if sequence.is_finished or not is_draft:
                break
    finally:
        # The forward wrote the anchor and the draft, k + 1 tokens; all that was emitted but its last is among them.
        # Cropping nothing still cuts sliding layers back to their window.
        cache.crop(num_emitted - num_candidates - 1)
    return num_emitted - 1


def _check_croppable(cache: Cache, is_prefilled: bool = True) -> None:
    """Refuses a cache that cannot be rolled back; layers that only know after a prefill are asked then."""
    layers = {
        type(layer).__name__
        for layer in cache.layers
        if not layer.is_croppable and (is_prefilled or not isinstance(layer, LinearAttentionCacheLayerMixin))
    }
    if layers:
        raise ValueError(
            f"Rejected tokens cannot be dropped from the layers {sorted(layers)} of this cache; generate without "
            "`assistant_model`, or with a cache that can be cropped, such as `DynamicCache`."
        )


@contextmanager
def _recording_past(cache: Cache) -> Iterator[None]:
    """Lets sliding layers keep what a rejection needs, and leaves them afterwards as they were."""
    changed = [layer for layer in cache.layers if getattr(layer, "record_past", None) is False]
    cache.activate_past_recording()
    try:
        yield
    finally:
        for layer in changed:
            layer.record_past = False


def _clock(statistics: SpeculationStatistics | None, device: torch.device) -> float:
    """Seconds, once the device is idle; nobody waits where nobody measures."""
    return 0.0 if statistics is None else time_when_idle(device)
