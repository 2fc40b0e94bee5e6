# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""From conversations answered by the target to the blocks that a drafter learns: tokens, anchors, weights."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .losses import position_weights


logger = logging.get_logger(__name__)


def tokenize_conversation(
    conversation: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Collection[int],
    max_length: int,
) -> dict[str, list]:
    """A sample `{"input_ids": [...], "supervised": [...]}`, both of the sample's length T.

    Supervised are the tokens of the last message and the end-of-turn token behind it. What the chat template appends
    after that is cut off; so is the end of turn where `finish_reason` is `"length"`, since the target did not end its
    turn there.

    Args:
        conversation: `messages` whose last one is the target's answer; optionally `tools`, `finish_reason` and `id`.
        tokenizer: the target's tokenizer, with a chat template.
        eos_token_ids: the ids that end the target's turn.
        max_length: the sample is cut to so many tokens, on the right.

    Raises:
        ValueError: if the conversation does not end with an answer, if its prompt is not how it begins, or if the
            template does not end the turn with one of `eos_token_ids`.
    """
    messages, tools = conversation["messages"], conversation.get("tools")
    name = f"Conversation {conversation['id']!r}" if "id" in conversation else "A conversation"
    if not messages or messages[-1]["role"] != "assistant":
        role = messages[-1]["role"] if messages else None
        raise ValueError(
            f"{name} ends with role {role!r}, but its last message must be the target's answer, role 'assistant'; let "
            "the target answer it with `dlite_hf.regeneration.regenerate`."
        )
    prompt_ids = tokenizer.apply_chat_template(
        messages[:-1], tools=tools, add_generation_prompt=True, return_dict=False
    )
    input_ids = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
    if input_ids[: len(prompt_ids)] != prompt_ids:
        raise ValueError(
            f"{name}: its {len(input_ids)} tokens do not begin with the {len(prompt_ids)} of its prompt, so what the "
            "target answered is unknown; use a chat template that renders earlier turns as it did for the prompt."
        )
    end = next((i for i in range(len(prompt_ids), len(input_ids)) if input_ids[i] in eos_token_ids), None)
    if end is None:
        raise ValueError(
            f"{name}: the chat template ends the answer with none of the target's end-of-turn ids "
            f"{sorted(eos_token_ids)}; add the template's to `target.generation_config.eos_token_id`."
        )
    if conversation.get("finish_reason") != "length":
        end += 1
    supervised = [False] * len(prompt_ids) + [True] * (end - len(prompt_ids))
    return {"input_ids": input_ids[:end][:max_length], "supervised": supervised[:max_length]}


def tokenize_conversations(
    conversations: Iterable[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Collection[int],
    max_length: int,
) -> list[dict[str, list]]:
    """[`tokenize_conversation`] of a corpus, a list of dictionaries or a `datasets.Dataset`.

    Samples with fewer than two supervised tokens have no anchor; they are skipped, and their number is logged.

    Raises:
        ValueError: if no sample is left.
    """
    samples = [tokenize_conversation(each, tokenizer, eos_token_ids, max_length) for each in conversations]
    kept = [sample for sample in samples if sum(sample["supervised"]) >= 2]
    if not kept:
        raise ValueError(
            f"None of {len(samples)} conversations has two supervised tokens within `max_length` {max_length}; raise "
            "it, or give conversations with longer answers."
        )
    if len(kept) < len(samples):
        logger.warning(
            f"Skipped {len(samples) - len(kept)} of {len(samples)} conversations: fewer than two supervised tokens "
            f"within `max_length` {max_length}."
        )
    return kept


def drafting_data_collator(features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads samples on the right: `input_ids`, `attention_mask` and `supervised`, each `[B, T]`.

    The anchors are drawn later, by [`sample_blocks`]: a data loader fetches ahead of the step, and what it drew at
    random would differ after a resumption.
    """
    input_ids = [torch.as_tensor(feature["input_ids"], dtype=torch.long) for feature in features]
    supervised = [torch.as_tensor(feature["supervised"], dtype=torch.bool) for feature in features]
    return {
        "input_ids": pad_sequence(input_ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(ids) for ids in input_ids], batch_first=True),
        "supervised": pad_sequence(supervised, batch_first=True),
    }


def sample_anchors(
    supervised: torch.Tensor, max_anchors: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Anchors `[N, 2]` (row, position) of a batch, sorted: up to `max_anchors` a row, uniform without replacement.

    Position a is valid where tokens a and a + 1 are supervised and a >= 1, since features are read at a - 1.

    Args:
        supervised: `[B, T]`, false in the padding.
        max_anchors: the most anchors that a row gets.
        generator: a source of randomness on the CPU; the global one by default.
    """
    valid = supervised[:, :-1] & supervised[:, 1:]
    valid[:, :1] = False
    anchors = []
    for row, row_valid in enumerate(valid.cpu()):
        positions = row_valid.nonzero()[:, 0]
        if len(positions) > max_anchors:
            chosen = torch.randperm(len(positions), generator=generator)[:max_anchors]
            positions = positions[chosen.sort().values]
        anchors.append(torch.stack([torch.full_like(positions, row), positions], dim=1))
    return torch.cat(anchors).to(supervised.device)


def sample_blocks(
    batch: dict[str, torch.Tensor],
    *,
    max_anchors: int,
    num_draft_tokens: int,
    anchor_group_size: int,
    loss_decay: float,
    generator: torch.Generator | None = None,
) -> dict[str, torch.Tensor]:
    """Draws the anchors of a padded batch, and lays out the block of K tokens behind each of them.

    Args:
        batch: `input_ids`, `attention_mask` and `supervised`, each `[B, T]`.
        max_anchors: as in [`sample_anchors`].
        num_draft_tokens: K.
        anchor_group_size: G.
        loss_decay: gamma of the weights, see [`~dlite_hf.losses.position_weights`].
        generator: as in [`sample_anchors`].

    Returns:
        `input_ids` and `attention_mask` as they are, `anchors` `[N, 2]`, `draft_token_ids` `[N, K]`,
        `previous_token_ids` `[N, G]` with the anchor last, and `weights` `[N, K]`, zero from the first unsupervised
        position of a block on. A batch without a valid anchor has one whose weights are all zero.
    """
    input_ids, supervised = batch["input_ids"], batch["supervised"]
    anchors = sample_anchors(supervised, max_anchors, generator)
    if len(anchors) == 0:
        anchors = anchors.new_tensor([[0, 1]])
    rows, positions = anchors[:, :1], anchors[:, 1:]
    length = input_ids.shape[1]
    drafted = positions + torch.arange(1, num_draft_tokens + 1, device=anchors.device)
    previous = positions + torch.arange(1 - anchor_group_size, 1, device=anchors.device)
    inside = drafted < length
    drafted = drafted.clamp_max(length - 1)
    # What comes after a hole cannot be drafted: the product drops to zero and stays there.
    reached = (supervised[rows, drafted] & inside).cumprod(dim=1)
    return {
        "input_ids": input_ids,
        "attention_mask": batch["attention_mask"],
        "anchors": anchors,
        "draft_token_ids": input_ids[rows, drafted],
        "previous_token_ids": input_ids[rows, previous],
        "weights": position_weights(num_draft_tokens, loss_decay, anchors.device) * reached,
    }
