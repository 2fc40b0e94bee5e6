# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""DFlash: a block of placeholders over the fused features of all earlier positions. The model is Transformers' own."""

import torch
from common import BaselineTrainer, Context, backbone_fields
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, PreTrainedModel

from dlite_hf import DLiteConfig
from dlite_hf.losses import DraftingLoss, LossWeights, drafting_loss
from dlite_hf.target import embed_tokens


def dflash_fields(shape: DLiteConfig, block_size: int) -> dict:
    """Fields of the configuration: a DLite drafter's sizes, attention without a window, absolute positions."""
    return {
        **backbone_fields(shape),
        "layer_types": ["full_attention"] * shape.num_hidden_layers,
        "block_size": block_size,
        "mask_token_id": shape.mask_token_id,
    }


def make_dflash(shape: DLiteConfig) -> MuseGlimmerAssistantModel:
    """A new drafter of K = `shape.num_draft_tokens` behind the anchor: `block_size` is K + 1."""
    fields = dflash_fields(shape, block_size=shape.num_draft_tokens + 1)
    return MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**fields))


def block_states(
    drafter: MuseGlimmerAssistantModel, target: PreTrainedModel, context: Context, anchor_ids: torch.Tensor
) -> torch.Tensor:
    """The states `[N, block_size, H]` of blocks in training, each behind a context of its own.

    Args:
        drafter: the drafter, or what a trainer wraps around it.
        target: for the embeddings.
        context: what lies before the anchors.
        anchor_ids: `[N]`.
    """
    config = drafter.config
    placeholders = anchor_ids.new_full((len(anchor_ids), config.block_size - 1), config.mask_token_id)
    embeds = embed_tokens(target, torch.cat([anchor_ids[:, None], placeholders], dim=1)).to(context.features.dtype)
    offsets = torch.arange(1, config.block_size + 1, device=anchor_ids.device)
    position_ids = torch.cat([context.positions, context.positions[:, -1:] + offsets], dim=1)
    # Added to the scores of every query: what is before the anchor, and the whole block.
    visible = torch.nn.functional.pad(context.mask, (0, config.block_size), value=True)
    mask = torch.zeros_like(visible, dtype=embeds.dtype).masked_fill(~visible, torch.finfo(embeds.dtype).min)
    return drafter(
        noise_embeds=embeds,
        context_hidden_states=context.features,
        position_ids=position_ids,
        attention_mask={"full_attention": mask[:, None, None]},
    ).last_hidden_state


class DFlashTrainer(BaselineTrainer):
    """Cross entropy at the placeholders, through the target's `lm_head`, decayed as DLite's losses are."""

    @property
    def num_draft_tokens(self) -> int:
        return self.drafter.config.block_size - 1

    def drafting_loss(self, model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> DraftingLoss:
        states = block_states(model, self.target, self.context(inputs), inputs["previous_token_ids"][:, -1])
        return drafting_loss(
            states[:, 1:],
            self.lm_head,
            *self.target_distribution(inputs),
            inputs["weights"],
            inputs["draft_token_ids"] if self.args.ce_labels == "token" else None,
            LossWeights(ce=1.0, tv=0.0),
        )
