# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""DSpark: DFlash's backbone whose anchor slot predicts too, and a rank-r bias that sees the token before."""

from typing import Any

import torch
from common import BaselineCandidateGenerator, BaselineDrafterMixin, BaselineTrainer
from dflash import block_states, dflash_fields
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, PreTrainedModel
from transformers.cache_utils import DFlashCache

from dlite_hf import DLiteConfig
from dlite_hf.losses import DraftingLoss, LossWeights, drafting_loss
from dlite_hf.modeling_dlite import Sampler
from dlite_hf.target import embed_tokens


@strict
class DSparkConfig(MuseGlimmerAssistantConfig):
    """DFlash's, with the vocabulary size V and the rank r of the bias."""

    model_type = "dspark_baseline"

    vocab_size: int = 151936
    markov_rank: int = 256

    @property
    def num_draft_tokens(self) -> int:
        return self.block_size


class DSparkCandidateGenerator(BaselineCandidateGenerator):
    """One forward of the backbone a round, then tokens from left to right."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.cache = DFlashCache(config=self.drafter.config)
        placeholders = torch.full((1, self.drafter.config.block_size - 1), self.drafter.config.mask_token_id)
        self._placeholder_embeds = embed_tokens(self.target, placeholders)

    def draft(
        self, features: torch.Tensor, input_ids: torch.Tensor, num_draft_tokens: int, sampler: Sampler
    ) -> tuple[torch.Tensor, torch.Tensor]:
        drafter, block_size = self.drafter, self.drafter.config.block_size
        if self.num_context:
            self.cache.crop(-block_size)  # the last block
        self.cache.set_previous_accepted_tokens(features.shape[1])
        positions = torch.arange(features.shape[1] + block_size, device=features.device) + self.num_context
        states = drafter(
            noise_embeds=torch.cat([embed_tokens(self.target, input_ids[:, -1:]), self._placeholder_embeds], dim=1),
            context_hidden_states=features,
            position_ids=positions[None],
            cache=self.cache,
        ).last_hidden_state
        base_logits = self.target.get_output_embeddings()(states[:, :num_draft_tokens])
        token_ids, drafted, logits = input_ids[:, -1], input_ids[:, :0], []
        for step in base_logits.unbind(dim=1):
            token_ids, scores = sampler(step + drafter.markov_bias(token_ids), drafted)
            drafted = torch.cat([drafted, token_ids[:, None]], dim=1)
            logits.append(scores)
        return drafted, torch.stack(logits, dim=1)


class DSparkForDrafting(BaselineDrafterMixin, MuseGlimmerAssistantModel):
    """logits_k = lm_head(h_k) + W_2 W_1[x_{k-1}], where h_1 is the state of the anchor's slot and x_0 the anchor."""

    config_class = DSparkConfig
    candidate_generator_class = DSparkCandidateGenerator

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.markov_embedding = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_proj = nn.Linear(config.markov_rank, config.vocab_size, bias=False)
        self.post_init()

    def markov_bias(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What the token before adds to the logits, `[N, V]` for ids `[N]`."""
        return self.markov_proj(self.markov_embedding(token_ids))


def make_dspark(shape: DLiteConfig, markov_rank: int = 256) -> DSparkForDrafting:
    """A new drafter; its block holds the anchor and K - 1 placeholders, all of which predict."""
    fields = dflash_fields(shape, block_size=shape.num_draft_tokens)
    return DSparkForDrafting(DSparkConfig(**fields, vocab_size=shape.vocab_size, markov_rank=markov_rank))


class DSparkTrainer(BaselineTrainer):
    """0.1 CE + 0.9 L1 over the whole vocabulary, teacher-forced. The paper's confidence head is left out."""

    @property
    def num_draft_tokens(self) -> int:
        return self.drafter.config.block_size

    def drafting_loss(self, model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> DraftingLoss:
        anchor_ids = inputs["previous_token_ids"][:, -1]
        states = block_states(model, self.target, self.context(inputs), anchor_ids)
        before = torch.cat([anchor_ids[:, None], inputs["draft_token_ids"][:, :-1]], dim=1)
        # Both projections in one: [lm_head, W_2] [h; W_1[x]].
        states = torch.cat([states, self.drafter.markov_embedding(before)], dim=-1)
        weight = self.drafter.markov_proj.weight
        return drafting_loss(
            states,
            torch.cat([self.lm_head.to(weight.dtype), weight], dim=1),
            *self.target_distribution(inputs),
            inputs["weights"],
            inputs["draft_token_ids"] if self.args.ce_labels == "token" else None,
            LossWeights(ce=0.1, tv=0.9),
        )
