# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""PyTorch DLite model: a parallel backbone and a low-rank sequential head. Tensors in, tensors out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs

from .configuration_dlite import DLiteConfig
from .history import DLiteHistory, HistoryLayout
from .initialization import copy_from_target


# (logits [N, V], ids drafted so far [N, j]) -> (ids [N], the logits that they were drawn from [N, V])
Sampler = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class DLiteOutput(ModelOutput):
    """
    Args:
        last_hidden_state (`torch.FloatTensor` of shape `[N, K, H]`):
            h_1..h_K, the backbone's states at the placeholders.
        head_states (`torch.FloatTensor` of shape `[N, K, r]`, *optional*, with `draft_token_ids`):
            u_1..u_K; `drafter.sequential_head.logits(head_states)` are the logits `[N, K, V]`, left to the caller, who
            can take them a few rows at a time.
    """

    last_hidden_state: torch.Tensor | None = None
    head_states: torch.Tensor | None = None


class DLiteRMSNorm(Qwen3RMSNorm):
    pass


class DLiteRotaryEmbedding(Qwen3RotaryEmbedding):
    pass


class DLiteAttention(Qwen3Attention):
    """Bidirectional attention of the real tokens and placeholders, over S context slots and over themselves."""

    def __init__(self, config: DLiteConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = False

    def forward(
        self,
        hidden_states: torch.Tensor,
        context_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any = None,
        history_states: torch.Tensor | None = None,
        sequence_of_row: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        query_shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        key_value_states = torch.cat([context_states, hidden_states], dim=1)

        query = self.q_norm(self.q_proj(hidden_states).view(query_shape)).transpose(1, 2)
        key, value = self.k_proj(key_value_states), self.v_proj(key_value_states)
        if history_states is not None:  # projected once a sequence, then repeated for its rows of anchors
            key = torch.cat([self.k_proj(history_states)[sequence_of_row], key], dim=1)
            value = torch.cat([self.v_proj(history_states)[sequence_of_row], value], dim=1)
        key = self.k_norm(key.unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        value = value.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        num_queries = query.shape[-2]  # the queries are the last of the keys
        query = query * cos[..., -num_queries:, :] + rotate_half(query) * sin[..., -num_queries:, :]
        key = key * cos + rotate_half(key) * sin

        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attention, _ = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(attention.reshape(*hidden_states.shape[:-1], -1).contiguous())


class DLiteDecoderLayer(Qwen3DecoderLayer):
    def __init__(self, config: DLiteConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = DLiteAttention(config, layer_idx)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any = None,
        history_states: torch.Tensor | None = None,
        sequence_of_row: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        residual = hidden_states
        hidden_states = residual + self.self_attn(
            self.input_layernorm(hidden_states),
            context_states,
            position_embeddings,
            attention_mask,
            history_states,
            sequence_of_row,
            **kwargs,
        )
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DLiteSequentialHead(nn.Module):
    """The low-rank recurrence that gives a placeholder the draft tokens before it (the paper's equation 5).

    s_0 = 0;  [g; c] = W_s [s_{k-1}; E_r[x_{k-1}]] + b_s;  s_k = sigmoid(g) s_{k-1} + (1 - sigmoid(g)) tanh(c)
    u_k = W_m [s_k; h_k] + b_m;  logits_k = W_v u_k
    """

    draft_vocab_ids: torch.Tensor | None

    def __init__(self, config: DLiteConfig):
        super().__init__()
        rank = config.sequential_rank
        self.prev_token_embedding = nn.Embedding(config.vocab_size, rank)
        self.state_proj = nn.Linear(2 * rank, 2 * rank)
        self.state_hidden_mlp = nn.Linear(rank + config.hidden_size, rank)
        self.output_proj = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        draft_vocab_ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_vocab_ids", draft_vocab_ids)

    def logits(self, head_states: torch.Tensor) -> torch.Tensor:
        """Logits `[..., V]` of u `[..., r]`; what the draft vocabulary leaves out has minus infinity."""
        return self.spread(self.output_proj(head_states))

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[..., V_d]` of the draft vocabulary as `[..., V]`."""
        if self.draft_vocab_ids is None:
            return logits
        vocab_size = self.prev_token_embedding.num_embeddings
        everywhere = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
        return everywhere.index_copy_(-1, self.draft_vocab_ids, logits)

    def draft_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Which row of `output_proj` proposes a token, in the shape of `token_ids`; -1 for one that none does."""
        if self.draft_vocab_ids is None:
            return token_ids
        rows = torch.searchsorted(self.draft_vocab_ids, token_ids).clamp_max(len(self.draft_vocab_ids) - 1)
        return torch.where(self.draft_vocab_ids[rows] == token_ids, rows, -1)

    def next_state(self, state: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """s_k `[N, r]` from s_{k-1} `[N, r]` and x_{k-1} `[N]`."""
        inputs = torch.cat([state, self.prev_token_embedding(token_ids)], dim=-1)
        gate, candidate = self.state_proj(inputs).chunk(2, dim=-1)
        gate = gate.sigmoid()
        return gate * state + (1 - gate) * candidate.tanh()

    def first_state(self, previous_token_ids: torch.Tensor) -> torch.Tensor:
        """s_0 `[N, r]`: zero, or one step from zero on the token before the anchor where the group holds one."""
        state = self.output_proj.weight.new_zeros(previous_token_ids.shape[0], self.output_proj.in_features)
        if previous_token_ids.shape[1] > 1:
            state = self.next_state(state, previous_token_ids[:, -2])
        return state

    def merge(self, state: torch.Tensor, hidden_state: torch.Tensor) -> torch.Tensor:
        """u_k from s_k and h_k."""
        return self.state_hidden_mlp(torch.cat([state, hidden_state], dim=-1))

    def forward(
        self, hidden_states: torch.Tensor, previous_token_ids: torch.Tensor, draft_token_ids: torch.Tensor
    ) -> torch.Tensor:
        """u_1..u_K `[N, K, r]`, where x_0 is the anchor and x_1..x_{K-1} are the tokens of `draft_token_ids`."""
        inputs = torch.cat([previous_token_ids[:, -1:], draft_token_ids[:, :-1]], dim=1)
        state = self.first_state(previous_token_ids)
        states = []
        for token_ids in inputs.unbind(dim=1):
            state = self.next_state(state, token_ids)
            states.append(state)
        return self.merge(torch.stack(states, dim=1), hidden_states)


class DLiteForDrafting(PreTrainedModel):
    r"""
    A history-free drafter: from the target's hidden states at the last verified token and the newest token, it
    proposes K tokens. It neither holds nor saves the target's embedding or `lm_head`; embeddings are an argument.

    Use it as `target.generate(**inputs, assistant_model=drafter)`.
    """

    config_class = DLiteConfig
    config: DLiteConfig
    main_input_name = "context_features"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DLiteDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True

    def __init__(self, config: DLiteConfig):
        super().__init__(config)
        self.layers = nn.ModuleList([DLiteDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = DLiteRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.context_fusion == "sequence":
            self.layer_depth_embedding = nn.Embedding(config.num_target_layers, config.hidden_size)
        else:
            num_features = len(config.target_layer_ids) * config.hidden_size
            self.context_fuse = nn.Linear(num_features, config.hidden_size, bias=False)
        self.context_norm = DLiteRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.history_window:
            num_features = len(config.history_layer_ids) * config.hidden_size
            self.history_fuse = nn.Linear(num_features, config.hidden_size, bias=False)
            self.history_norm = DLiteRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.sequential_head = DLiteSequentialHead(config)
        self.rotary_emb = DLiteRotaryEmbedding(config)
        self.target_layer_ids = nn.Buffer(torch.tensor(config.target_layer_ids), persistent=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            # A non-persistent buffer is not in the checkpoint: `from_pretrained` leaves it to us to fill it again.
            init.copy_(self.target_layer_ids, torch.tensor(self.config.target_layer_ids))

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        draft_vocab_ids: Sequence[int] | None = None,
        **overrides: Any,
    ) -> "DLiteForDrafting":
        """A new drafter for `target`, in fp32, with weights from the target where it knows better than chance.

        Args:
            target: the causal LM that the drafter will serve.
            tokenizer: its tokenizer, to find a placeholder where `mask_token_id` is not given.
            draft_vocab_ids: the only tokens that the head can propose, see [`reduce_draft_vocabulary`].
            overrides: fields of [`DLiteConfig`].

        Raises:
            ValueError: if no configuration fits the target, see [`DLiteConfig.from_target`].
        """
        drafter = cls(DLiteConfig.from_target(target.config, tokenizer, **overrides))
        copy_from_target(drafter, target)
        if draft_vocab_ids is not None:
            drafter.reduce_draft_vocabulary(draft_vocab_ids)
        return drafter

    @torch.no_grad()
    def reduce_draft_vocabulary(self, token_ids: Sequence[int]) -> None:
        """Leaves the head these tokens to propose: drafting and training get cheaper, and the output stays exact.

        Args:
            token_ids: ids of the target's vocabulary, such as the most frequent ones of its answers.

        Raises:
            ValueError: if there are none, one is no row of the vocabulary, or the head cannot propose it already.
        """
        head, ids = self.sequential_head, torch.tensor(sorted(set(token_ids)), dtype=torch.long)
        rows = (
            head.draft_rows(ids.to(self.device))
            if len(ids) and 0 <= ids[0] <= ids[-1] < self.config.vocab_size
            else None
        )
        if rows is None or (rows < 0).any():
            raise ValueError(
                f"{len(ids)} token ids cannot be the draft vocabulary; give at least one, and only ids that the "
                f"drafter can propose now, from the target's {self.config.vocab_size}."
            )
        output_proj = nn.Linear(head.output_proj.in_features, len(ids), bias=False).to(head.output_proj.weight)
        output_proj.weight.copy_(head.output_proj.weight[rows])
        head.output_proj, head.draft_vocab_ids = output_proj, ids.to(self.device)
        self.config.draft_vocab_size = len(ids)

    def forward(
        self,
        context_features: torch.Tensor,
        inputs_embeds: torch.Tensor,
        previous_token_ids: torch.Tensor,
        draft_token_ids: torch.Tensor | None = None,
        history: DLiteHistory | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> DLiteOutput:
        r"""
        The backbone (the paper's equation 2), and the head where the tokens that it reads are given.

            z_l = RMSNorm_ctx(h_p^(l) + e_depth[l]);  x = [E(real tokens), E(mask) x K];  h = RMSNorm(layers(x, z))

        Args:
            context_features (`torch.FloatTensor` of shape `[N, S, H]`):
                The target's hidden states of its layers `config.target_layer_ids` at the pivot, the last token that
                has been through the target.
            inputs_embeds (`torch.FloatTensor` of shape `[N, G + K, H]`):
                The target's embeddings of the last G real tokens, the anchor last, and of K placeholders. Where fewer
                than G tokens exist, the group is shorter.
            previous_token_ids (`torch.LongTensor` of shape `[N, G]`):
                The ids of those real tokens, for the head.
            draft_token_ids (`torch.LongTensor` of shape `[N, K]`, *optional*):
                Tokens to force on the head: the k-th prediction reads the anchor and the first k - 1 of them.
            history ([`DLiteHistory`], *optional*):
                The tokens before the pivots, for a drafter with a `history_window`. Each becomes one slot,
                `RMSNorm(W_f [h_0; h_{L // 2}; h_{L - 1}])`, and all positions are absolute.

        Raises:
            ValueError: if `history` is given to a drafter without a window, or missing for one that has it.
        """
        if (history is not None) != (self.config.history_window > 0):
            given = "given" if history is not None else "missing"
            raise ValueError(
                f"`history` is {given}, but the drafter's `history_window` is {self.config.history_window}; pass "
                "`history` exactly where the window is not 0."
            )
        group_size, num_queries = previous_token_ids.shape[1], inputs_embeds.shape[1]
        context_states = self._context_states(context_features)
        hidden_states = inputs_embeds
        layout, mask, history_states, sequence_of_row = None, None, None, None
        if history is None:
            # Local positions, anew in every round: tokens count from 0, all context slots share one position.
            positions = torch.arange(num_queries, device=inputs_embeds.device)
            context_positions = positions.new_full((context_states.shape[1],), max(group_size - 2, 0))
            position_ids = torch.cat([context_positions, positions]).unsqueeze(0)
        else:
            layout = HistoryLayout(
                history, self.config, context_states.shape[1], group_size, num_queries, inputs_embeds.dtype
            )
            position_ids = layout.position_ids
            hidden_states, context_states = layout.pack(hidden_states), layout.pack(context_states)
            mask, sequence_of_row = layout.mask, layout.sequence_of_row
            history_states = self.history_norm(self.history_fuse(history.features.flatten(2)))
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids)

        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                context_states,
                position_embeddings,
                mask,
                history_states,
                sequence_of_row,
                **kwargs,
            )
        if layout is not None:
            hidden_states = layout.unpack(hidden_states)
        hidden_states = self.norm(hidden_states[:, group_size:])

        head_states = None
        if draft_token_ids is not None:
            head_states = self.sequential_head(hidden_states, previous_token_ids, draft_token_ids)
        return DLiteOutput(last_hidden_state=hidden_states, head_states=head_states)

    def _context_states(self, context_features: torch.Tensor) -> torch.Tensor:
        """Context slots z: `[N, S, H]`, or `[N, 1, H]` where the layers are fused."""
        if self.config.context_fusion == "feature":
            return self.context_norm(self.context_fuse(context_features.flatten(1)).unsqueeze(1))
        depth = self.layer_depth_embedding(self.target_layer_ids).to(context_features.dtype)
        return self.context_norm(depth + context_features)

    @torch.no_grad()
    def draft(
        self,
        context_features: torch.Tensor,
        inputs_embeds: torch.Tensor,
        previous_token_ids: torch.Tensor,
        num_draft_tokens: int | None = None,
        sampler: Sampler | None = None,
        history: DLiteHistory | None = None,
        confidence_threshold: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Proposes tokens from left to right, each seeing those drafted before it.

        Args:
            context_features: as in `forward`, `[N, S, H]`.
            inputs_embeds: as in `forward`, `[N, G + K, H]`.
            previous_token_ids: as in `forward`, `[N, G]`.
            num_draft_tokens: how many to propose, at most the number of placeholders, which is the default.
            sampler: maps `(logits [N, V], ids so far [N, j])` to the next ids `[N]` and the logits `[N, V]` that they
                were drawn from. The largest logit by default.
            history: as in `forward`.
            confidence_threshold: ends the drafts of all sequences where, for each of them, the probability of what is
                drafted so far times the largest of the next token's is below it. The next token's draw must have no
                part in that, or verification would not be exact under sampling.

        Returns:
            The drafted ids `[N, k]` and the logits `[N, k, V]` that they were drawn from; k is `num_draft_tokens`, or
            less for a threshold, down to 0.
        """
        head = self.sequential_head
        hidden_states = self(context_features, inputs_embeds, previous_token_ids, history=history).last_hidden_state
        hidden_states = hidden_states.to(self.dtype)  # mixed-precision training leaves a forward that returns fp32
        state, token_ids = head.first_state(previous_token_ids), previous_token_ids[:, -1]
        drafted = previous_token_ids[:, :0]
        logits = []
        confidence: torch.Tensor | float = 1.0
        for hidden_state in hidden_states[:, :num_draft_tokens].unbind(dim=1):
            state = head.next_state(state, token_ids)
            step_logits = head.output_proj(head.merge(state, hidden_state))
            if sampler is not None:
                token_ids, step_logits = sampler(head.spread(step_logits), drafted)
                places = token_ids
            else:
                places = step_logits.argmax(dim=-1)  # among the tokens of the draft vocabulary
                token_ids = places if head.draft_vocab_ids is None else head.draft_vocab_ids[places]
            if confidence_threshold:
                probs = step_logits.float().softmax(dim=-1)
                if not bool((confidence * probs.amax(dim=-1) >= confidence_threshold).any()):
                    break
                confidence = confidence * probs.gather(-1, places[:, None]).squeeze(1)
            drafted = torch.cat([drafted, token_ids[:, None]], dim=1)
            logits.append(step_logits)
        if not logits:
            return drafted, hidden_states.new_empty(len(drafted), 0, self.config.vocab_size)
        block = torch.stack(logits, dim=1)
        return drafted, block if sampler is not None else head.spread(block)

    def generate(self, *args: Any, **kwargs: Any) -> None:
        """Always raises: a drafter only proposes, its target generates."""
        raise TypeError(
            "A DLite drafter does not generate by itself; call `target.generate(**inputs, assistant_model=drafter)` "
            f"on its target, {self.config.target_name_or_path or 'the model that it was trained for'}."
        )


def drafter_in(model: Any) -> DLiteForDrafting | None:
    """The drafter that `model` is, or has inside where it is a PEFT model, whose adapters are then part of it."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model if isinstance(model, DLiteForDrafting) else None


__all__ = ["DLiteForDrafting", "DLiteOutput"]
