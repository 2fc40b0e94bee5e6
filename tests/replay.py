# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""A drafter that knows what the target will say, and checks what it is shown."""

from typing import Any

import torch
from transformers import PreTrainedModel

from dlite_hf import DLiteForDrafting, SpeculationStatistics, speculation_statistics


class ReplayDrafter(DLiteForDrafting):
    """Proposes the next tokens of a known sequence, from position `num_right` of the block on wrong ones.

    It finds its place by the features alone: they are looked up among those of a from-scratch forward over the whole
    sequence. `pivots` records the place found in every round, `errors` how far the features were from it.
    """

    num_right: int | None = None

    def replay(self, target: PreTrainedModel, sequence: torch.LongTensor, **model_inputs: Any) -> None:
        """Takes `sequence` `[1, T]` as what the target will say; `model_inputs` are what a forward over it needs."""
        with torch.no_grad():
            hidden_states = target(input_ids=sequence, output_hidden_states=True, **model_inputs).hidden_states
        self.sequence = sequence[0]
        self.reference = torch.stack([hidden_states[i + 1][0] for i in self.config.target_layer_ids], dim=1)
        self.scale = self.reference.abs().amax(dim=(0, 2))[:, None]
        self.pivots: list[int] = []
        self.errors: list[float] = []

    def draft(
        self,
        context_features,
        inputs_embeds,
        previous_token_ids,
        num_draft_tokens=None,
        sampler=None,
        history=None,
        confidence_threshold=0.0,
    ):
        # Hidden states of these random targets reach hundreds: 1e-5 is meant of each layer's largest.
        distances = ((self.reference - context_features).abs() / self.scale).amax(dim=(1, 2))
        last = self.pivots[-1] if self.pivots else -1
        near = [place for place in (distances < 1e-3).nonzero().flatten().tolist() if place > last]
        pivot = near[0] if near else int(distances.argmin())
        self.pivots.append(pivot)
        self.errors.append(float(distances[pivot]))
        proposed = self.sequence[pivot + 2 : pivot + 2 + num_draft_tokens]
        draft_ids = torch.zeros(num_draft_tokens, dtype=torch.long)
        draft_ids[: len(proposed)] = proposed
        if self.num_right is not None:
            draft_ids[self.num_right :] = (draft_ids[self.num_right :] + 1) % self.config.vocab_size
        logits = torch.full((1, num_draft_tokens, self.config.vocab_size), float("-inf"))
        logits.scatter_(-1, draft_ids[None, :, None], 0.0)
        return draft_ids[None], logits


def make_replay_drafter(drafter: DLiteForDrafting, num_right: int | None = None) -> ReplayDrafter:
    """A replaying drafter with the configuration of `drafter`."""
    replay_drafter = ReplayDrafter(drafter.config).eval()
    replay_drafter.num_right = num_right
    return replay_drafter


def expected_pivots(statistics: SpeculationStatistics, prompt_length: int) -> list[int]:
    """Where the pivot was in every round of one call: the last token that had been through the target."""
    # The prefill yields one token; a round ends with a token of the target's own, unless it was cut short.
    starts = [0] + [i + 1 for i, origin in enumerate(statistics.token_origins) if origin == 0]
    return [prompt_length - 1 + start for start in starts if start < len(statistics.token_origins)]


def generate_with_statistics(
    target: PreTrainedModel, drafter: DLiteForDrafting, **kwargs: Any
) -> tuple[Any, SpeculationStatistics]:
    """What a drafted call returns, and what the drafter did in it."""
    with speculation_statistics() as statistics:
        output = target.generate(assistant_model=drafter, **kwargs)
    return output, statistics
