# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""A tiny target whose answers a rival has learned by heart, and what its drafts are compared with."""

from typing import Any, NamedTuple

import torch
from common import BaselineTrainer
from train_stored import StoredAnchors, write_store
from transformers import PreTrainedModel, TrainerCallback

from dlite_hf import DLiteConfig, DLiteTrainingArguments, speculation_statistics

from ..targets import make_target


NUM_DRAFT_TOKENS = 4
# No multiple of K + 1 behind the first token: a block reaches over its end, and is accepted in part.
ANSWER_LENGTH = 18
LAYER_IDS = [0, 2, 4]  # the last one is read after the final norm


def make_shape(target: PreTrainedModel) -> DLiteConfig:
    return DLiteConfig.from_target(
        target.config,
        mask_token_id=96,
        target_layer_ids=LAYER_IDS,
        num_hidden_layers=2,
        num_draft_tokens=NUM_DRAFT_TOKENS,
    )


def generate_plainly(target: PreTrainedModel, prompt: torch.Tensor, max_new_tokens: int) -> torch.Tensor:
    output = target.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, do_sample=False
    )
    assert len(set(output[0, prompt.shape[1] :].tolist())) >= 9
    return output


def make_store(target: PreTrainedModel, answers: list[tuple[torch.Tensor, int]], file: Any) -> dict[str, torch.Tensor]:
    """A store of sequences `[1, T]`, each with the length of its prompt."""
    samples = [
        {"input_ids": ids[0].tolist(), "supervised": [False] * start + [True] * (ids.shape[1] - start)}
        for ids, start in answers
    ]
    write_store(target, samples, make_shape(target), 1000, file)
    return torch.load(file)


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict, **kwargs: Any) -> None:
        self.logs.append(logs)


class Learned(NamedTuple):
    target: PreTrainedModel
    prompts: list[torch.Tensor]
    trainer: BaselineTrainer
    accuracy: float


def make_args(folder: Any, **overrides: Any) -> DLiteTrainingArguments:
    fields = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 20}
    return DLiteTrainingArguments(str(folder), **{**fields, **overrides})


def learn_by_heart(trainer_class: type[BaselineTrainer], make_drafter: Any, folder: Any, **args: Any) -> Learned:
    """Trains a drafter on the anchors of two answers, all of them in every step."""
    target = make_target("llama")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 90, (1, length), generator=generator) for length in (5, 12)]
    answers = [(generate_plainly(target, each, ANSWER_LENGTH), each.shape[1]) for each in prompts]
    store = make_store(target, answers, folder / "store.pt")
    torch.manual_seed(0)
    drafter, losses = make_drafter(make_shape(target)), Losses()
    arguments = make_args(folder, per_device_train_batch_size=34, adam_beta2=0.95, **args)
    trainer = trainer_class(drafter, target, arguments, store, StoredAnchors(store), [losses])
    trainer.train()
    drafter.eval()
    return Learned(target, prompts, trainer, losses.logs[-2]["accuracy"])


def anchors_of_rounds(prompt: torch.Tensor, emitted: list[int]) -> torch.Tensor:
    """Where the anchors of the rounds of a call stand, from the numbers of tokens that they emitted."""
    return torch.tensor([0, *emitted[:-1]]).cumsum(dim=0) + prompt.shape[1]


def watch_rounds(
    learned: Learned, projection: torch.nn.Module, do_sample: bool
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]], torch.Tensor]:
    """A call of `generate` over the second prompt.

    Returns its sequence, its rounds (draft, logits, emitted tokens) but for a last one with less room, and what
    `projection` read in them, joined.
    """
    rounds, features = [], []
    hook = projection.register_forward_pre_hook(lambda module, args: features.append(args[0]))
    torch.manual_seed(0)
    prompt = learned.prompts[1]
    with speculation_statistics(on_round=lambda *values: rounds.append(values)):
        sequence = learned.target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=24,
            do_sample=do_sample,
            **({"top_k": 0} if do_sample else {}),
            custom_generate=learned.trainer.drafter.custom_generate,
        )
    hook.remove()
    rounds = [each for each in rounds if each[0].shape[1] == NUM_DRAFT_TOKENS]
    assert any(1 < emitted.shape[1] <= NUM_DRAFT_TOKENS for _, _, emitted in rounds)  # accepted in part
    return sequence, rounds, torch.cat(features[: len(rounds)], dim=1)


def training_inputs(sequence: torch.Tensor, anchors: torch.Tensor, drafts: torch.Tensor) -> dict[str, torch.Tensor]:
    """A batch over a store of this one sequence, whose blocks hold what was drafted `[N, K]`."""
    return {
        "anchors": torch.stack([torch.zeros_like(anchors), anchors - 1], dim=1),
        "previous_token_ids": sequence[0, anchors][:, None],
        "draft_token_ids": drafts,
        "weights": torch.ones(drafts.shape),
    }
