# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""EAGLE-3 as a chain: one decoder layer that drafts from its own hidden state, with a head over its own vocabulary."""

from collections.abc import Sequence
from typing import Any

import torch
from common import BaselineCandidateGenerator, BaselineDrafterMixin, BaselineTrainer, Context, backbone_fields
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from dlite_hf import DLiteConfig, DLiteTrainingArguments
from dlite_hf.losses import DraftingLoss, LossWeights, TargetDistribution, drafting_loss
from dlite_hf.modeling_dlite import Sampler
from dlite_hf.target import embed_tokens


_LOSS_DECAY = 0.8  # weight of each unrolled step against the one before

# Keys and values `[N, heads, n, head_dim]` of all slots so far.
Slots = tuple[torch.Tensor, torch.Tensor]


@strict
class Eagle3Config(LlamaConfig):
    """A Llama's, with the target's layers read, K, and the number of tokens that the head can propose."""

    model_type = "eagle3_baseline"

    target_layer_ids: list[int] | None = None
    num_draft_tokens: int = 7
    draft_vocab_size: int = 32000


class Eagle3CandidateGenerator(BaselineCandidateGenerator):
    """K steps of the one layer a round, each over the state of the step before."""

    _slots: Slots | None = None

    def draft(
        self, features: torch.Tensor, input_ids: torch.Tensor, num_draft_tokens: int, sampler: Sampler
    ) -> tuple[torch.Tensor, torch.Tensor]:
        drafter, num_new = self.drafter, features.shape[1]
        positions = torch.arange(num_new, device=features.device)[None] + self.num_context
        embeds = embed_tokens(self.target, input_ids[:, -num_new:]).to(features.dtype)
        # Slots of verified tokens stay; those of drafted ones are made anew from the target's features.
        state, slots = drafter.step(drafter.fc(features), embeds, positions, self._slots)
        self._slots = slots
        drafted, logits = input_ids[:, :0], []
        while True:
            token_ids, scores = sampler(drafter.logits(state)[:, 0], drafted)
            drafted = torch.cat([drafted, token_ids[:, None]], dim=1)
            logits.append(scores)
            if len(logits) == num_draft_tokens:
                return drafted, torch.stack(logits, dim=1)
            positions = positions[:, -1:] + 1
            embeds = embed_tokens(self.target, token_ids[:, None]).to(features.dtype)
            state, slots = drafter.step(state, embeds, positions, slots)


class Eagle3ForDrafting(BaselineDrafterMixin, PreTrainedModel):
    """Slot t joins a hidden state of position t and the embedding of token t + 1, and predicts token t + 2.

    The state is the target's, fused from its layers, wherever it is known, and else what the slot before put out.
    """

    config_class = Eagle3Config
    candidate_generator_class = Eagle3CandidateGenerator
    draft_vocab_ids: torch.Tensor

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        key_value_size = config.num_key_value_heads * config.head_dim
        self.fc = nn.Linear(len(config.target_layer_ids or ()) * size, size, bias=False)
        self.input_layernorm, self.hidden_norm = LlamaRMSNorm(size, eps), LlamaRMSNorm(size, eps)
        self.q_proj = nn.Linear(2 * size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size, key_value_size, bias=False)
        self.v_proj = nn.Linear(2 * size, key_value_size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, size, bias=False)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.mlp = LlamaMLP(config)
        self.norm = LlamaRMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.register_buffer("draft_vocab_ids", torch.arange(config.draft_vocab_size))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            init.copy_(self.draft_vocab_ids, torch.arange(self.config.draft_vocab_size))

    def step(
        self,
        hidden_states: torch.Tensor,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        slots: Slots | None = None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Slots]:
        """Adds m slots, and runs the layer at the last of them alone: all the others only serve as keys.

        Args:
            hidden_states, embeds: `[N, m, H]`.
            position_ids: `[N, m]`.
            slots: those before them.
            mask: which of all slots may be seen `[N, n + m]`; all by default.

        Returns:
            The layer's output at the last slot `[N, 1, H]`, and all slots.
        """
        states = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden_states)], dim=-1)
        cos, sin = (table[:, None] for table in self.rotary_emb(states, position_ids))

        def heads_of(projected: torch.Tensor) -> torch.Tensor:
            return projected.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

        query, key, value = (
            heads_of(self.q_proj(states[:, -1:])),
            heads_of(self.k_proj(states)),
            heads_of(self.v_proj(states)),
        )
        query = query * cos[..., -1:, :] + rotate_half(query) * sin[..., -1:, :]
        key = key * cos + rotate_half(key) * sin
        if slots is not None:
            key, value = torch.cat([slots[0], key], dim=2), torch.cat([slots[1], value], dim=2)
        attention = nn.functional.scaled_dot_product_attention(
            query,
            key.to(query.dtype),
            value.to(query.dtype),
            None if mask is None else mask[:, None, None],
            enable_gqa=True,
        )
        state = hidden_states[:, -1:] + self.o_proj(attention.transpose(1, 2).flatten(2))
        return state + self.mlp(self.post_attention_layernorm(state)), (key, value)

    def forward(self, context: Context, context_embeds: torch.Tensor, draft_embeds: torch.Tensor) -> torch.Tensor:
        """Unrolls K steps behind each anchor: the normed states `[N, K, H]`.

        Args:
            context: what lies before the anchors.
            context_embeds: embeddings of the tokens behind the context's, the anchor last `[N, n, H]`.
            draft_embeds: embeddings of the K - 1 tokens forced on the steps after the first.
        """
        mask, positions = context.mask, context.positions
        state, slots = self.step(self.fc(context.features), context_embeds, positions, mask=mask)
        states = [state]
        for embeds in draft_embeds.split(1, dim=1):
            positions, mask = positions[:, -1:] + 1, nn.functional.pad(mask, (0, 1), value=True)
            state, slots = self.step(state, embeds, positions, slots, mask)
            states.append(state)
        return self.norm(torch.cat(states, dim=1))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits `[..., V]` of the layer's outputs `[..., H]`; what the draft vocabulary lacks has minus infinity."""
        logits = self.lm_head(self.norm(states))
        everywhere = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return everywhere.index_copy_(-1, self.draft_vocab_ids, logits)


@torch.no_grad()
def make_eagle3(
    shape: DLiteConfig, target: PreTrainedModel, draft_vocab_ids: Sequence[int] | None = None
) -> Eagle3ForDrafting:
    """A new drafter over these tokens, or all; its head begins as those rows of the target's `lm_head`."""
    ids = torch.arange(shape.vocab_size) if draft_vocab_ids is None else torch.tensor(sorted(draft_vocab_ids))
    fields: dict[str, Any] = {**backbone_fields(shape), "num_hidden_layers": 1, "vocab_size": shape.vocab_size}
    config = Eagle3Config(**fields, num_draft_tokens=shape.num_draft_tokens, draft_vocab_size=len(ids))
    drafter = Eagle3ForDrafting(config)
    drafter.draft_vocab_ids.copy_(ids)
    drafter.lm_head.weight.copy_(target.get_output_embeddings().weight[ids])
    return drafter


class Eagle3Trainer(BaselineTrainer):
    """Soft cross entropy of the unrolled steps, towards the target's distribution over the draft vocabulary.

    As in its release, a step learns nothing where the target's most likely token is outside that vocabulary. In the
    metrics such a step is a miss: `accuracy` is exact, `acceptance` and `expected_tau` are lower bounds.
    """

    def __init__(self, model: Eagle3ForDrafting, target: PreTrainedModel, args: DLiteTrainingArguments, *rest: Any):
        if args.ce_labels != "argmax":
            raise ValueError(
                f"EAGLE-3 learns from distributions and has no labels; drop ce_labels={args.ce_labels!r}."
            )
        super().__init__(model, target, args, *rest)
        self._draft_rows = torch.full((model.config.vocab_size,), -1)
        self._draft_rows[model.draft_vocab_ids.cpu()] = torch.arange(model.config.draft_vocab_size)
        self.draft_lm_head = self.lm_head[model.draft_vocab_ids.to(self.lm_head.device)]

    @property
    def num_draft_tokens(self) -> int:
        return self.drafter.config.num_draft_tokens

    def _sample_blocks(self, batch: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
        steps = torch.arange(self.num_draft_tokens, device=batch["weights"].device)
        return {**batch, "weights": (batch["weights"] > 0) * _LOSS_DECAY**steps}

    def drafting_loss(self, model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> DraftingLoss:
        context, weights, device = self.context(inputs), inputs["weights"], self.args.device
        dtype = context.features.dtype
        states = model(
            context,
            embed_tokens(self.target, context.next_token_ids).to(dtype),
            embed_tokens(self.target, inputs["draft_token_ids"][:, :-1]).to(dtype),
        )
        needed, index = self.target_rows(inputs)
        target_states = self.store["features"][needed, -1].to(device)
        top = self._draft_rows[self.store["top"][needed]].to(device)
        log_normalizer = self.store["log_normalizer"][needed].to(device)
        # KL from the target's own softmax over these tokens: soft cross entropy, but for a constant.
        result = drafting_loss(
            states,
            self.drafter.lm_head.weight,
            TargetDistribution(target_states @ self.draft_lm_head.T, log_normalizer, top),
            index,
            weights * (top[index] >= 0),
            loss_weights=LossWeights(ce=0.0, tv=0.0, kl=1.0),
            teacher_states=target_states[index],
            teacher_output_weight=self.draft_lm_head,
        )
        return result._replace(num_rows=(weights > 0).sum(dim=0).to(result.num_rows.dtype))
