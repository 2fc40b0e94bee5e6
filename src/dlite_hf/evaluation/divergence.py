# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Where two greedy outputs part: was it a near tie, which a longer forward's rounding decides?"""

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .sessions import PrefixCache


@dataclass(frozen=True)
class Divergence:
    """Where an output parts from plain generation's.

    Args:
        first_difference: the first token, from 0, in which they differ; where one is the beginning of the other, the
            length of the shorter.
        gap: by how much the target's best logit there exceeds that of the other output's token; `None` where one of
            them has ended, or where they are not finite.
        largest_rounding: by how much the best token's logit moves, at most, when the target sees plain generation's
            tokens several a forward rather than one, from two such forwards before that place to two behind it;
            `None` where one is not finite.
    """

    first_difference: int
    gap: float | None
    largest_rounding: float | None


@torch.no_grad()
def answer_logits(
    target: PreTrainedModel,
    prompt_ids: torch.Tensor,
    answer: Sequence[int],
    steps: Sequence[int],
    prefix: PrefixCache | None = None,
) -> list[torch.Tensor]:
    """The logits `[tokens, V]` that each token of an answer was chosen from, in float32, for each of `steps`.

    Args:
        target: the target.
        prompt_ids (`torch.LongTensor` of shape `[1, T]`): the prompt, fed once and at once, but for what is cached.
        answer: the tokens behind it.
        steps: how many of them are fed a forward.
        prefix: a cache kept from an earlier call, whose copy spares feeding a long prompt again.
    """
    cache, length = (copy.deepcopy(prefix) or PrefixCache()).prepare(prompt_ids, len(answer))
    output = target(prompt_ids[:, length:].to(target.device), cache=cache, logits_to_keep=1, use_cache=True)
    tokens = torch.tensor([answer[:-1]], dtype=torch.long, device=target.device)
    results = []
    for step in steps:
        logits, cache = [output.logits[0]], copy.deepcopy(output.cache)  # not every cache can be cropped
        for start in range(0, tokens.shape[1], step):
            logits.append(target(tokens[:, start : start + step], cache=cache, use_cache=True).logits[0])
        results.append(torch.cat(logits).float())
    return results


def compare(
    target: PreTrainedModel,
    prompt_ids: torch.Tensor,
    plain: Sequence[int],
    other: Sequence[int],
    step: int,
    prefix: PrefixCache | None = None,
) -> dict[str, Any]:
    """A [`Divergence`] as JSON.

    Args:
        target: the target.
        prompt_ids (`torch.LongTensor` of shape `[1, T]`): the prompt.
        plain: plain generation's answer.
        other: another one.
        step: how many tokens its method verifies a forward.
        prefix: the cache kept after plain generation; it stays as it is.
    """
    pairs = enumerate(zip(plain, other, strict=False))
    place = next((i for i, (one, two) in pairs if one != two), min(len(plain), len(other)))
    single, several = answer_logits(target, prompt_ids, plain[: place + 2 * step], (1, step), prefix)
    best = single.max(dim=-1)
    rounding = (several.gather(1, best.indices[:, None])[:, 0] - best.values).abs()
    rounding = rounding[max(0, place - 2 * step) :].max()  # over few: the most of a long answer would excuse anything
    gap = math.nan
    if place < min(len(plain), len(other)):
        gap = float(best.values[place] - single[place, other[place]])
    finite = [each if math.isfinite(each) else None for each in (gap, float(rounding))]  # JSON has no others
    return asdict(Divergence(place, *finite))


__all__ = ["Divergence", "answer_logits", "compare"]
