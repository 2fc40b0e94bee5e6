# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What `return_dict_in_generate` returns: one entry a token, as if each had had a forward of its own."""

import torch
from transformers import Cache, GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput


class TokenRecords:
    """Scores, logits, hidden states and attentions of the tokens emitted, where the call asks for them.

    Args:
        generation_config: of the running call.
    """

    def __init__(self, generation_config: GenerationConfig):
        self.generation_config = generation_config
        returned = generation_config.return_dict_in_generate
        self.scores: tuple | None = () if returned and generation_config.output_scores else None
        self.logits: tuple | None = () if returned and generation_config.output_logits else None
        self.attentions: tuple | None = () if returned and generation_config.output_attentions else None
        self.hidden_states: tuple | None = () if returned and generation_config.output_hidden_states else None

    def add_prefill(self, outputs: ModelOutput) -> None:
        """Keeps the prompt's attentions and hidden states, which stand for the first token."""
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)

    def add_scores(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Keeps the processed and raw logits `[N, V]` of a token."""
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)

    def add_row(self, outputs: ModelOutput, row: int, cache: Cache) -> None:
        """Keeps position `row` of a verification forward's attentions and hidden states."""
        if self.attentions is not None:
            self.attentions += (
                tuple(
                    _attention_of_row(attention, row, cache, layer_idx)
                    for layer_idx, attention in enumerate(outputs.attentions)
                ),
            )
        if self.hidden_states is not None:
            # Where the call selects some layers, drafting may have asked the forward for others.
            selected = self.hidden_states[0]
            self.hidden_states += (
                tuple(
                    None if prompt_states is None else states[:, row : row + 1].clone()
                    for prompt_states, states in zip(selected, outputs.hidden_states, strict=True)
                ),
            )

    def output(self, sequences: torch.Tensor, cache: Cache) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """What `generate` returns."""
        if not self.generation_config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self.scores,
            logits=self.logits,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
            cache=cache,
        )


def _attention_of_row(attention: torch.Tensor | None, row: int, cache: Cache, layer_idx: int) -> torch.Tensor | None:
    """Row `row` of a verification's attentions `[N, heads, k + 1, keys]`, over the keys of a forward of its own."""
    if attention is None:  # some models never return them
        return None
    end = attention.shape[-1]
    start = 0
    if not cache.is_compileable:  # a static cache always shows all its slots
        num_later = attention.shape[-2] - 1 - row
        end -= num_later
        if cache.is_sliding[layer_idx]:
            start = max(end - cache.layers[layer_idx].sliding_window, 0)
    return attention[:, :, row : row + 1, start:end].clone()
