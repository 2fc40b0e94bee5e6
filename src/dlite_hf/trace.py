# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""One generation with a drafter, token by token: where each came from, and how likely both models found it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .generation.statistics import SpeculationStatistics, speculation_statistics
from .modeling_dlite import drafter_in
from .trace_page import render_page
from .training_record import versions, without_folders


# How many of a model's likeliest tokens are kept of every position.
_NUM_TOP = 5
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_UNRELATED = ("transformers_version", "use_cache", "bos_token_id", "pad_token_id", "output_attentions")


@dataclass(frozen=True)
class TokenProbability:
    """A token that a model could emit.

    Args:
        token_id: its id.
        text: the token alone, decoded; bytes as `<0xE2>` where it is only a part of a character.
        probability: by the model, after the call's logits processors.
    """

    token_id: int
    text: str
    probability: float


@dataclass(frozen=True)
class TracedToken:
    """An emitted token.

    Args:
        token_id: its id.
        text: its share of the decoded text, empty where its character is only complete with a later token; the shares
            of all tokens, joined, are the decoded text.
        name: the token alone, as in [`TokenProbability`].
        round: the round that emitted it, from 1; 0 for the prefill, which emits the first token.
        position: its position in the round's draft, from 1, where it was drafted and accepted; 0 for the target's own.
        proposed: what the drafter proposed in this place; `None` where it proposed nothing.
        target_probability: the target's, after the call's logits processors.
        drafter_probability: the drafter's, likewise; `None` where it proposed nothing.
        target_top: the target's likeliest tokens, in order.
        drafter_top: the drafter's, none where it proposed nothing.
    """

    token_id: int
    text: str
    name: str
    round: int
    position: int
    proposed: TokenProbability | None
    target_probability: float
    drafter_probability: float | None
    target_top: list[TokenProbability]
    drafter_top: list[TokenProbability]

    @property
    def origin(self) -> Literal["accepted", "corrected", "own"]:
        """A draft token that was accepted, the target's in the place of one that was not, or the target's alone."""
        if self.position:
            return "accepted"
        return "own" if self.proposed is None else "corrected"


@dataclass(frozen=True)
class Trace:
    """One generation with a drafter.

    Args:
        tokens: what was generated, in order.
        drafts: what was proposed in every round, what was never verified included.
        statistics: of the call. Its times include that the target's distributions were kept.
        prompt: the prompt, decoded; `None` where it was no token ids.
        target: the target's name, without the folder where it is a local one.
        drafter: the drafter's name, likewise.
        settings: of the call and of the target's generation config, as far as they are set.
        versions: of Python and of the packages.
    """

    tokens: list[TracedToken]
    drafts: list[list[TokenProbability]]
    statistics: SpeculationStatistics
    prompt: str | None
    target: str
    drafter: str
    settings: dict[str, Any]
    versions: dict[str, str]

    @property
    def text(self) -> str:
        """What was generated, decoded, special tokens included."""
        return "".join(token.text for token in self.tokens)

    @property
    def accepted_shares(self) -> list[float]:
        """For draft position 1, 2, ...: accepted tokens over rounds that proposed a token there."""
        accepted = self.statistics.accepted_per_position
        longest = max(map(len, self.drafts), default=0)
        accepted = accepted + [0] * (longest - len(accepted))
        return [accepted[j] / sum(len(draft) > j for draft in self.drafts) for j in range(longest)]

    def to_html(self) -> str:
        """The trace as one page that loads nothing."""
        return render_page(self)

    def save(self, file: str | os.PathLike) -> None:
        """Writes the page; an existing file is replaced."""
        Path(file).write_text(self.to_html(), encoding="utf-8", newline="")


def trace_generation(
    target: PreTrainedModel,
    drafter: Any,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Mapping[str, Any],
    **generate_kwargs: Any,
) -> Trace:
    """Runs `target.generate(**inputs, assistant_model=drafter, **generate_kwargs)` and keeps how each token came.

    The output is that of the same call outside a trace, random numbers included. The target's scores are kept until
    the end: tokens times vocabulary times 4 bytes.

    Args:
        target: the target.
        drafter: its [`DLiteForDrafting`], or a PEFT model of one.
        tokenizer: the target's tokenizer.
        inputs: what `generate` gets as the prompt, such as `input_ids` `[1, T]` and `attention_mask` `[1, T]`.
        generate_kwargs: further arguments; not `return_dict_in_generate` and `output_scores`, which are set here.

    Raises:
        ValueError: if `drafter` is no DLite drafter, or tokens were not generated with it, or as `generate` does.
        TypeError: if an argument is given twice.
    """
    model = drafter_in(drafter)
    if model is None:
        raise ValueError(
            f"`drafter` is a {type(drafter).__name__}, whose proposals cannot be traced; pass a DLiteForDrafting."
        )
    names = _TokenNames(tokenizer)
    rounds: list[_Round] = []
    with speculation_statistics(on_round=lambda *round: rounds.append(_Round(names, *round))) as statistics:
        output = target.generate(
            **inputs, assistant_model=drafter, return_dict_in_generate=True, output_scores=True, **generate_kwargs
        )
    if len(output.scores) != 1 + statistics.num_emitted_tokens:
        raise ValueError(
            f"Of {len(output.scores)} tokens the drafter's rounds emitted {statistics.num_emitted_tokens}, but it "
            "should be all but the first; drop `custom_generate`."
        )
    token_ids = output.sequences[0, -len(output.scores) :].tolist()
    texts = _split_text(tokenizer, token_ids)
    # The prefill's token comes before all rounds, and nothing was proposed in its place.
    places = [(0, 0)] + [(i, row) for i, each in enumerate(rounds, start=1) for row in range(each.num_emitted)]
    tokens = []
    for i, (token_id, (round_index, row)) in enumerate(zip(token_ids, places, strict=True)):
        target_probs = output.scores[i][0].softmax(dim=-1)
        proposed = rounds[round_index - 1].proposed_at(row) if round_index else None
        tokens.append(
            TracedToken(
                token_id=token_id,
                text=texts[i],
                name=names[token_id],
                round=round_index,
                position=statistics.token_origins[i - 1] if i else 0,
                proposed=proposed.token if proposed else None,
                target_probability=target_probs[token_id].item(),
                drafter_probability=proposed.emitted_probability if proposed else None,
                target_top=names.top(target_probs),
                drafter_top=proposed.top if proposed else [],
            )
        )
    input_ids = inputs.get("input_ids")
    return Trace(
        tokens=tokens,
        drafts=[each.draft for each in rounds],
        statistics=statistics,
        prompt=None if input_ids is None else _decode(tokenizer, input_ids[0].tolist()),
        target=without_folders(target.name_or_path),
        drafter=without_folders(model.name_or_path),
        settings=_settings(target, generate_kwargs),
        versions=versions(),
    )


@dataclass(frozen=True)
class _Proposal:
    """What the drafter proposed in the place of an emitted token, and how likely it found that one."""

    token: TokenProbability
    emitted_probability: float
    top: list[TokenProbability]


class _Round:
    """What is kept of a round, by the arguments of a round's observer; the logits of a whole block are not."""

    def __init__(
        self,
        names: "_TokenNames",
        draft_ids: torch.Tensor,
        draft_logits: torch.Tensor | None,
        emitted_ids: torch.Tensor,
    ):
        self.num_emitted = emitted_ids.shape[1]
        self.draft: list[TokenProbability] = []
        self._places: list[tuple[float, list[TokenProbability]]] = []
        if draft_logits is None:
            return
        probs = draft_logits[0].float().softmax(dim=-1)
        for token_id, row in zip(draft_ids[0].tolist(), probs, strict=True):
            self.draft.append(TokenProbability(token_id, names[token_id], row[token_id].item()))
        for token_id, row in zip(emitted_ids[0].tolist(), probs, strict=False):  # the bonus token has no row
            self._places.append((row[token_id].item(), names.top(row)))

    def proposed_at(self, row: int) -> _Proposal | None:
        """The proposal in the place of the round's emitted token `row`, from 0; `None` behind the whole draft."""
        return _Proposal(self.draft[row], *self._places[row]) if row < len(self.draft) else None


class _TokenNames(dict[int, str]):
    """The texts of single tokens, by id."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = _decode(self.tokenizer, [token_id])
        if not text or "\ufffd" in text:
            # A part of a character has no text of its own; a row beyond the tokenizer's vocabulary has no name either.
            token = self.tokenizer.convert_ids_to_tokens(token_id)
            text = token or f"<id {token_id}>"
            if token and all(character in _BYTES for character in token):
                text = "".join(f"<0x{_BYTES[character]:02X}>" for character in token)
        self[token_id] = text
        return text

    def top(self, probs: torch.Tensor) -> list[TokenProbability]:
        """The likeliest tokens of a distribution `[V]`, as far as they are possible at all."""
        values, token_ids = probs.topk(min(_NUM_TOP, probs.shape[-1]))
        pairs = zip(values.tolist(), token_ids.tolist(), strict=True)
        return [TokenProbability(token_id, self[token_id], value) for value, token_id in pairs if value > 0]


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _split_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """The decoded text, divided among its tokens; a character of several tokens falls to the last of them."""
    text = _decode(tokenizer, token_ids)
    shares, end = [], 0
    for i in range(len(token_ids)):
        # Until a character is complete, its bytes are decoded as a replacement, which the text does not begin with.
        prefix = _decode(tokenizer, token_ids[: i + 1])
        start, end = end, max(end, len(prefix)) if text.startswith(prefix) else end
        shares.append(text[start:end])
    return shares


def _settings(target: PreTrainedModel, generate_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What is set of a generation's configuration, as JSON values: in the call, or by the target."""
    config = generate_kwargs.get("generation_config") or GenerationConfig()
    set_values = {**target.generation_config.to_diff_dict(), **config.to_diff_dict(), **generate_kwargs}
    do_sample = bool(set_values.get("do_sample"))
    unrelated = {*_UNRELATED, "output_hidden_states", "generation_config", *(() if do_sample else _SAMPLING)}
    settings = {
        name: value if type(value) in (str, bool, int, float, list) else type(value).__name__
        for name, value in set_values.items()
        if value is not None and name not in unrelated and not name.startswith("_")
    }
    return {**settings, "do_sample": do_sample}


__all__ = ["TokenProbability", "Trace", "TracedToken", "trace_generation"]
