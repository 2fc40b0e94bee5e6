# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Trains a drafter against a frozen target that runs beside it."""

import inspect
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback

from .data import drafting_data_collator, sample_blocks, tokenize_conversations
from .losses import drafting_loss
from .modeling_dlite import DLiteForDrafting
from .target import capture_hidden_states, check_compatible, embed_tokens, gather_features
from .training_args import DLiteTrainingArguments


class DLiteTrainer(Trainer):
    r"""
    [`~transformers.Trainer`] for a DLite drafter. The target runs online, in its own dtype and without gradients; it
    is neither changed nor saved.

        loss = sum w_k (ce_weight CE + tv_weight TV) / sum w_k      (the paper's equation 7)

    with both sums over the whole optimizer step: all anchors of all accumulated batches of all processes. Beside the
    loss it logs `accuracy` (how often drafter and target agree on the most likely token), `acceptance_k` (the mean of
    1 - TV / 2, the probability that sampling accepts the k-th draft token after a correct prefix) and `expected_tau` =
    1 + sum_k prod_{j <= k} acceptance_j, the tokens per verification that follow if positions were independent.

    Args:
        model: the drafter.
        target: the causal LM that it is trained for.
        args: the arguments of the training.
        train_dataset: conversations (`messages` whose last one is the target's answer, see
            [`~dlite_hf.data.tokenize_conversation`]) or samples (`input_ids`, `supervised`).
        eval_dataset: the same, or a dictionary of such sets.
        processing_class: the target's tokenizer; not needed for samples.
        data_collator: pads samples, [`~dlite_hf.data.drafting_data_collator`] by default.
        callbacks: as in [`~transformers.Trainer`].
        optimizers: as in [`~transformers.Trainer`].

    Raises:
        TypeError: if `model` is not a drafter.
        ValueError: if the target does not fit the drafter, or conversations come without a tokenizer.
    """

    loss_is_scaled_for_ga = True  # it is divided by the weights of all accumulated batches

    def __init__(
        self,
        model: DLiteForDrafting,
        target: PreTrainedModel,
        args: DLiteTrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        data_collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ):
        if not isinstance(model, DLiteForDrafting):
            raise TypeError(
                f"`model` is a {type(model).__name__}, but must be a drafter; make one with "
                "`DLiteForDrafting.from_target(target)`."
            )
        check_compatible(target, model.config)
        if getattr(target, "hf_device_map", None) is None:
            target.to(args.device)
        self.target = target.eval()
        if isinstance(eval_dataset, dict):
            eval_dataset = {name: self._samples(each, processing_class, args) for name, each in eval_dataset.items()}
        else:
            eval_dataset = self._samples(eval_dataset, processing_class, args)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or drafting_data_collator,
            train_dataset=self._samples(train_dataset, processing_class, args),
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        # Rows, correct ones and acceptance [3, K] since the last log, apart for evaluation and training.
        self._statistics = torch.zeros(2, 3, model.config.num_draft_tokens, device=args.device)

    def _samples(self, dataset: Any, tokenizer: PreTrainedTokenizerBase | None, args: DLiteTrainingArguments) -> Any:
        """Conversations tokenised; samples as they are."""
        if dataset is None or "messages" not in next(iter(dataset), ()):
            return dataset
        if tokenizer is None:
            raise ValueError("Conversations need the target's tokenizer; pass it as `processing_class`.")
        eos_token_id = self.target.generation_config.eos_token_id
        eos_token_ids = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or []
        return tokenize_conversations(dataset, tokenizer, eos_token_ids, args.max_length)

    def _sample_blocks(self, batch: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
        return sample_blocks(
            batch,
            max_anchors=self.args.max_anchors,
            num_draft_tokens=self.model.config.num_draft_tokens,
            anchor_group_size=self.model.config.anchor_group_size,
            loss_decay=self.args.loss_decay,
            generator=generator,
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        # Seeded by the step: a resumed run draws the same, while the process's stream depends on what was read ahead.
        seed = random.Random(f"{self.args.seed} {self.state.global_step} {self.args.process_index}").getrandbits(63)
        blocks = map(partial(self._sample_blocks, generator=torch.Generator().manual_seed(seed)), epoch_iterator)
        return super().get_batch_samples(blocks, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        """The sum of the weights of a whole optimizer step."""
        if not batch_samples:
            return None
        total = torch.stack([batch["weights"].sum() for batch in batch_samples]).sum().to(device)
        if self.args.average_tokens_across_devices:
            total = self.accelerator.gather(total).sum()
        return total

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        weights = inputs["weights"]
        features, target_logits, target_rows = self._run_target(
            inputs["input_ids"], inputs["attention_mask"], inputs["anchors"]
        )
        mask_token_ids = torch.full_like(inputs["draft_token_ids"], self.model.config.mask_token_id)
        embeddings = embed_tokens(self.target, torch.cat([inputs["previous_token_ids"], mask_token_ids], dim=1))
        outputs = model(
            context_features=features.to(weights.device, self.model.dtype),
            inputs_embeds=embeddings.to(weights.device, self.model.dtype),
            previous_token_ids=inputs["previous_token_ids"],
            draft_token_ids=inputs["draft_token_ids"],
        )
        # The Trainer's autocast covers only the model's own forward.
        with self.accelerator.autocast():
            result = drafting_loss(
                outputs.head_states,
                self.model.sequential_head.output_proj.weight,
                target_logits,
                target_rows,
                weights,
                inputs["draft_token_ids"] if self.args.ce_labels == "token" else None,
                ce_weight=self.args.ce_weight,
                tv_weight=self.args.tv_weight,
            )
        self._statistics[int(model.training)] += torch.stack(result[1:])
        total = weights.sum() if num_items_in_batch is None else num_items_in_batch
        loss = result.loss / total.clamp_min(torch.finfo(torch.float32).tiny)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes, the sum is over all
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def _run_target(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One forward of the target: features `[N, S, H]`, logits `[P, V]`, and the row of them `[N, K]` that predicts
        the k-th token behind an anchor."""
        config = self.model.config
        length = input_ids.shape[1]
        rows, positions = anchors[:, 0], anchors[:, 1]
        # The logits at a + k - 1 predict token a + k; beyond the batch the weights are zero.
        predicting = positions[:, None] + torch.arange(config.num_draft_tokens, device=anchors.device)
        needed, index = predicting.clamp_max(length - 1).unique(return_inverse=True)

        kwargs = {}
        if "logits_to_keep" in inspect.signature(self.target.forward).parameters:
            kwargs["logits_to_keep"] = needed
        with (
            torch.autocast(input_ids.device.type, enabled=False),
            capture_hidden_states(self.target, config.target_layer_ids, None) as capture,
        ):
            logits = self.target(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **kwargs).logits
        if not kwargs:
            logits = logits[:, needed]
        # One sequence of all rows, so that an anchor's pivot is one index.
        states = [each if each is None else each.flatten(0, 1)[None] for each in capture.hidden_states]
        features = gather_features(states, config.target_layer_ids, rows * length + positions - 1)
        if features is None:
            raise ValueError(
                f"A forward of {type(self.target).__name__} ran without the hooks that read its layers "
                f"{config.target_layer_ids}, as a compiled one does; pass the target uncompiled."
            )
        return features[0], logits.flatten(0, 1), rows[:, None] * len(needed) + index

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        # The same anchors in every evaluation, so that two of them compare.
        generator = torch.Generator().manual_seed(self.args.seed)
        inputs = self._sample_blocks(self._prepare_inputs(inputs), generator)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs), None, None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        prefix = next((key.removesuffix("loss") for key in logs if key.endswith("loss")), None)
        statistics = self._statistics[int(self.model.training)]
        num_rows, num_correct, acceptance = self.accelerator.reduce(statistics)
        if prefix is not None and num_rows.any():
            acceptance = acceptance / num_rows.clamp_min(1)
            logs[f"{prefix}accuracy"] = (num_correct.sum() / num_rows.sum()).item()
            logs |= {f"{prefix}acceptance_{k}": value for k, value in enumerate(acceptance.tolist(), start=1)}
            logs[f"{prefix}expected_tau"] = 1 + acceptance.cumprod(dim=0).sum().item()
            statistics.zero_()
        super().log(logs, start_time)


__all__ = ["DLiteTrainer"]
