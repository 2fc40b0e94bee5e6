# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Trains a drafter against a frozen target that runs beside it, after a teacher with history where there is one."""

import inspect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, SchedulerType, Trainer, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from .conversations import end_of_turn_ids, tokenize_conversations
from .data import drafting_data_collator, sample_blocks
from .history import DLiteHistory
from .live_evaluation import live_tau
from .losses import LossWeights, TargetDistribution, drafting_loss, target_distribution
from .model_card import create_model_card
from .modeling_dlite import DLiteForDrafting
from .target import capture_hidden_states, embed_tokens, gather_features
from .training_args import DLiteTrainingArguments
from .training_checks import check_training
from .training_progress import TrainingProgress
from .training_record import DataRecord, StageRecord, TargetRecord, TrainingRecord, TrainingRun, hardware


class TargetOutputs(NamedTuple):
    """
    What the target said of a batch.

    Args:
        hidden_states: L + 1 entries `[B, T, H]`, as Transformers lays them out; those of layers not read are `None`.
        distribution: its predictions at the P positions that the blocks need.
        rows: which of them predicts the k-th token behind an anchor `[N, K]`.
    """

    hidden_states: Sequence[torch.Tensor | None]
    distribution: TargetDistribution
    rows: torch.Tensor


class DLiteTrainer(Trainer):
    r"""
    [`~transformers.Trainer`] for a DLite drafter. The target runs online, in its own dtype and without gradients; it
    is neither changed nor saved.

        loss = sum w_k ((1 - share) KL + share (ce_weight CE + tv_weight TV)) / sum w_k      (the paper's eq. 6 and 7)

    with a share of 0 in the warm-up and 1 in the stable stage, and both sums over the whole optimizer step: all
    anchors of all accumulated batches of all processes. The stages:

    * teacher: a drafter with a `history_window`, in a run of its own; the paper's has `ce_weight=1.0, tv_weight=0.0`.
    * warm-up, for `warmup_epochs`: KL divergence from the `teacher`, whose head is copied to the drafter and frozen.
    * transition, for `transition_epochs`: a cosine blend of the warm-up's loss into the stable one's.
    * stable: `ce_weight` and `tv_weight` alone. It is the only stage of a run without a teacher.

    `training_record.json` beside the saved weights says what was done, for the model card: this run, after
    `earlier_runs` such as the teacher's, over `training_data`; set these two attributes before training.

    One schedule spans the stages of a run; the head thaws where the warm-up ends.

    Beside the loss it logs `accuracy` (how often drafter and target agree on the most likely token, also by position),
    `acceptance_k` (the mean of 1 - TV / 2, the probability that sampling accepts the k-th draft token after a correct
    prefix), `expected_tau` = 1 + sum_k prod_{j <= k} acceptance_j, the tokens per verification that follow if
    positions were independent, `stable_share` (0 in the warm-up, 1 in the stable stage), `tokens_per_second` of the
    target, and `remaining_hours`. An evaluation also generates: `eval_tau` is the acceptance length of
    `target.generate(assistant_model=drafter)`, greedy, on held-out prompts, and what the best checkpoint is chosen by.
    (Of several evaluation sets each has its own; name the one that counts, `metric_for_best_model="<set>_tau"`.)

    Args:
        model: the drafter, or a PEFT model around one.
        target: the causal LM that it is trained for.
        args: the arguments of the training.
        train_dataset: conversations (see [`~dlite_hf.conversations.tokenize_conversations`]) or samples (`input_ids`,
            `supervised`).
        eval_dataset: the same, or a dictionary of such sets.
        processing_class: the target's tokenizer; not needed for samples.
        teacher: a drafter with history, already trained, for the warm-up.
        data_collator: pads samples, [`~dlite_hf.data.drafting_data_collator`] by default.
        callbacks: as in [`~transformers.Trainer`].
        optimizers: as in [`~transformers.Trainer`].

    Raises:
        TypeError: if `model` or `teacher` is not a drafter, or an adapter changes the head's vocabulary projection.
        ValueError: if target, teacher and drafter do not fit together, a teacher comes without `warmup_epochs` or the
            other way round, or conversations come without a tokenizer.
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
        teacher: DLiteForDrafting | None = None,
        data_collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ):
        self.drafter = check_training(model, target, teacher, args, train_dataset, eval_dataset)
        if getattr(target, "hf_device_map", None) is None:
            target.to(args.device)
        self.target = target.eval()
        self.teacher = None
        if teacher is not None:
            self.teacher = teacher.to(args.device).eval().requires_grad_(False)
            self.drafter.sequential_head.load_state_dict(teacher.sequential_head.state_dict())
        if isinstance(eval_dataset, dict):
            eval_dataset = {name: self._samples(each, processing_class, args) for name, each in eval_dataset.items()}
        else:
            eval_dataset = self._samples(eval_dataset, processing_class, args)
        self.training_data: list[DataRecord] = []
        self.earlier_runs: list[TrainingRun] = []
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or partial(drafting_data_collator, max_length=args.max_length),
            train_dataset=self._samples(train_dataset, processing_class, args),
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=[TrainingProgress(), *(callbacks or [])],
            optimizers=optimizers,
        )
        if self.teacher is not None and self.is_deepspeed_enabled:
            # Its optimizer takes gradients as they arise, before `training_step` can drop those of a frozen head.
            if args.weight_decay:
                raise ValueError(
                    f"`weight_decay` is {args.weight_decay}, which would shrink the frozen head of a warm-up under "
                    "DeepSpeed; set it to 0."
                )
            for parameter in self.drafter.sequential_head.parameters():
                parameter.register_hook(lambda grad: torch.zeros_like(grad) if self.stage == "warmup" else grad)
        num_draft_tokens = self.drafter.config.num_draft_tokens
        # Rows, correct ones and acceptance [3, K] since the last log, apart for evaluation and training.
        self._statistics = torch.zeros(2, 3, num_draft_tokens, device=args.device)
        self._eval_loss = torch.zeros(2, device=args.device)  # its sum, and that of the weights
        self._trained_share = self.stable_share

    @property
    def progress(self) -> TrainingProgress:
        """What was trained so far; a resumption may have put another callback in the first one's place."""
        return next(each for each in self.callback_handler.callbacks if isinstance(each, TrainingProgress))

    def _samples(self, dataset: Any, tokenizer: PreTrainedTokenizerBase | None, args: DLiteTrainingArguments) -> Any:
        """Conversations tokenised; samples as they are."""
        if dataset is None or "messages" not in next(iter(dataset), ()):
            return dataset
        if tokenizer is None:
            raise ValueError("Conversations need the target's tokenizer; pass it as `processing_class`.")
        end_ids = end_of_turn_ids(self.target.generation_config)
        with args.main_process_first(desc="tokenising the conversations"):
            return tokenize_conversations(dataset, tokenizer, end_ids, args.max_length)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        if not isinstance(eval_dataset, str):
            eval_dataset = self._samples(eval_dataset, self.processing_class, self.args)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return super().get_test_dataloader(self._samples(test_dataset, self.processing_class, self.args))

    def _sample_blocks(self, batch: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
        return sample_blocks(
            batch,
            max_anchors=self.args.max_anchors,
            num_draft_tokens=self.drafter.config.num_draft_tokens,
            anchor_group_size=self.drafter.config.anchor_group_size,
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
        # Beside it go the step's anchors and tokens, to be counted.
        totals = torch.stack(
            [
                torch.stack(
                    [batch["weights"].sum(), (batch["weights"][:, 0] > 0).sum(), batch["attention_mask"].sum()]
                )
                for batch in batch_samples
            ]
        ).sum(dim=0)
        everywhere = self.accelerator.gather(totals.to(device)[None]).sum(dim=0)
        self.progress.count(self.stage, everywhere)
        return everywhere[0] if self.args.average_tokens_across_devices else totals[0].to(device)

    @property
    def stable_share(self) -> float:
        """How much of the loss is the stable stage's: 0 in the warm-up, 1 in the stable stage, a cosine between."""
        if self.stage == "transition":
            return (1 - math.cos(math.pi * self._epochs_since_warmup / self.args.transition_epochs)) / 2
        return float(self.stage != "warmup")

    @property
    def stage(self) -> str:
        """Where the run is: `"warmup"`, `"transition"` or `"stable"`, or `"teacher"` for any drafter with history."""
        if self.drafter.config.history_window and self.teacher is None:
            return "teacher"
        passed = self._epochs_since_warmup
        if passed < 0:
            return "warmup"
        return "stable" if passed >= self.args.transition_epochs else "transition"

    @property
    def _epochs_since_warmup(self) -> float:
        # Epochs are sums of fractions: 1 + 9 / 25 is a little below 1.36.
        return round((self.state.epoch or 0.0) - self.args.warmup_epochs, 9)

    def training_step(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._trained_share = self.stable_share
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.stage == "warmup":
            # Without gradients the optimizer leaves the head as it is; the parameters stay known to it and to DDP.
            for parameter in self.drafter.sequential_head.parameters():
                parameter.grad = None
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        head, weights, share = self.drafter.sequential_head, inputs["weights"], self.stable_share
        target = self._run_target(inputs)
        outputs = model(**self._drafter_inputs(self.drafter, inputs, target))
        labels = head.draft_rows(inputs["draft_token_ids"]) if self.args.ce_labels == "token" else None
        teacher_states = teacher_weight = None
        # The Trainer's autocast covers only the model's own forward.
        with self.accelerator.autocast():
            if self.teacher is not None and share < 1:
                with torch.no_grad():
                    teacher_inputs = self._drafter_inputs(self.teacher, inputs, target)
                    teacher_states = self.teacher(**teacher_inputs).head_states
                teacher_weight = self.teacher.sequential_head.output_proj.weight
            result = drafting_loss(
                outputs.head_states,
                _whole(head.output_proj.weight),
                target.distribution,
                target.rows,
                weights,
                labels,
                LossWeights(share * self.args.ce_weight, share * self.args.tv_weight, 1 - share),
                teacher_states,
                teacher_weight,
            )
        self._statistics[int(model.training)] += torch.stack(result[1:])
        total = weights.sum() if num_items_in_batch is None else num_items_in_batch
        if not model.training:
            self._eval_loss += torch.stack([result.loss.detach(), total])
        loss = result.loss / total.clamp_min(torch.finfo(torch.float32).tiny)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes, the sum is over all
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def _run_target(self, inputs: dict[str, torch.Tensor]) -> TargetOutputs:
        """One forward of the target over a batch."""
        input_ids, anchors = inputs["input_ids"], inputs["anchors"]
        length, num_draft_tokens = input_ids.shape[1], inputs["draft_token_ids"].shape[1]
        # The logits at a + k - 1 predict token a + k; beyond the batch the weights are zero.
        predicting = anchors[:, 1:] + torch.arange(num_draft_tokens, device=anchors.device)
        needed, index = predicting.clamp_max(length - 1).unique(return_inverse=True)

        kwargs = {}
        if "logits_to_keep" in inspect.signature(self.target.forward).parameters:
            kwargs["logits_to_keep"] = needed
        layer_ids = {*self.drafter.config.captured_layer_ids}
        if self.teacher is not None:
            layer_ids |= {*self.teacher.config.captured_layer_ids}
        with (
            torch.autocast(input_ids.device.type, enabled=False),
            capture_hidden_states(self.target, sorted(layer_ids), None) as capture,
        ):
            logits = self.target(
                input_ids=input_ids, attention_mask=inputs["attention_mask"], use_cache=False, **kwargs
            ).logits
        if not kwargs:
            logits = logits[:, needed]
        distribution = target_distribution(logits.flatten(0, 1), self.drafter.sequential_head.draft_vocab_ids)
        return TargetOutputs(capture.hidden_states, distribution, anchors[:, :1] * len(needed) + index)

    def _features(
        self, drafter: DLiteForDrafting, inputs: dict[str, torch.Tensor], target: TargetOutputs
    ) -> tuple[torch.Tensor, DLiteHistory | None]:
        """What `drafter` reads of the target: context features `[N, S, H]`, and the history where it has a window."""
        rows, positions = inputs["anchors"].unbind(dim=1)
        # One sequence of all rows, so that an anchor's pivot is one index.
        flat = [each if each is None else each.flatten(0, 1)[None] for each in target.hidden_states]
        pivots = rows * inputs["input_ids"].shape[1] + positions - 1
        context = gather_features(flat, drafter.config.target_layer_ids, pivots)
        if context is None:
            raise ValueError(
                f"A forward of {type(self.target).__name__} ran without the hooks that read its layers "
                f"{drafter.config.target_layer_ids}, as a compiled one does; pass the target uncompiled."
            )
        history = None
        if drafter.config.history_window:
            features = gather_features(target.hidden_states, drafter.config.history_layer_ids, slice(None))
            history = DLiteHistory(cast(torch.Tensor, features), rows, positions)
        return context[0], history

    def _drafter_inputs(
        self, drafter: DLiteForDrafting, inputs: dict[str, torch.Tensor], target: TargetOutputs
    ) -> dict[str, Any]:
        """Arguments of the drafter's forward over a batch of blocks."""
        previous_token_ids, draft_token_ids = inputs["previous_token_ids"], inputs["draft_token_ids"]
        mask_token_ids = torch.full_like(draft_token_ids, drafter.config.mask_token_id)
        embeddings = embed_tokens(self.target, torch.cat([previous_token_ids, mask_token_ids], dim=1))
        context, history = self._features(drafter, inputs, target)
        device = previous_token_ids.device
        if history is not None:
            history = history._replace(features=history.features.to(device, drafter.dtype))
        return {
            "context_features": context.to(device, drafter.dtype),
            "inputs_embeds": embeddings.to(device, drafter.dtype),
            "previous_token_ids": previous_token_ids,
            "draft_token_ids": draft_token_ids,
            "history": history,
        }

    def training_record(self) -> TrainingRecord:
        """What led to the drafter: `earlier_runs`, and this trainer's own run so far over `training_data`."""
        args, config = self.args, self.drafter.config
        run = TrainingRun(
            stages=[
                StageRecord(stage, int(counts["steps"]), int(counts["anchors"]), float(counts["seconds"]))
                for stage, counts in self.progress.counts().items()
            ],
            target=TargetRecord(
                config.target_name_or_path or self.target.config.name_or_path,
                config.target_revision,
                str(self.target.dtype).removeprefix("torch."),
                config.target_quantization,
            ),
            learning_rate=args.learning_rate,
            lr_scheduler_type=SchedulerType(args.lr_scheduler_type).value,
            per_device_train_batch_size=args.per_device_train_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            num_processes=args.world_size,
            seed=args.seed,
            ce_weight=args.ce_weight,
            tv_weight=args.tv_weight,
            ce_labels=args.ce_labels,
            loss_decay=args.loss_decay,
            max_length=args.max_length,
            history_window=config.history_window,
            # Once the run has ended, the drafter is its best checkpoint, where that was asked for.
            best_step=None if self.is_in_train or not args.load_best_model_at_end else self.state.best_global_step,
            data=self.training_data,
            hardware=hardware(args.device, args.world_size),
        )
        return TrainingRecord([*self.earlier_runs, run])

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        self.training_record().save(output_dir or self.args.output_dir)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        dataset_tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
    ) -> None:
        """Writes the card of the drafter in `output_dir`, from its record.

        Args:
            language: code of the language, such as `"en"`.
            license: the drafter's licence as the Hub spells it.
            dataset_tags: ids on the Hub of the data sets that it was trained on.
            model_name: the drafter's id on the Hub.
            finetuned_from: the target's id on the Hub, where the drafter's config names a folder.
        """
        if not self.is_world_process_zero():
            return
        if self.drafter is not self.model:  # an adapter's folder is none of a drafter
            super().create_model_card(language, license, None, model_name, finetuned_from)
            return
        card = create_model_card(
            self.args.output_dir,
            repo_id=model_name or self.hub_model_id,
            base_model=finetuned_from,
            license=license,
            language=language,
            datasets=[dataset_tags] if isinstance(dataset_tags, str) else dataset_tags or (),
        )
        card.save(Path(self.args.output_dir, "README.md"))

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

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        self._statistics[0].zero_()  # of a prediction, which logs nothing
        self._eval_loss.zero_()
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        # The Trainer's own is a mean of the batches' means, and changes with the batch size.
        loss, weights = self.accelerator.reduce(self._eval_loss).tolist()
        output.metrics[f"{prefix}_loss"] = loss / weights if weights else float("nan")
        output.metrics[f"{prefix}_tau"] = live_tau(
            self.target, self.drafter, dataloader.dataset, self.args, self.accelerator
        )
        return output

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As in [`~transformers.Trainer`], but of two checkpoints that tie in tau, as they may over few prompts, the
        one with the larger `expected_tau` is the better, not the earlier one."""
        name = f"eval_{str(self.args.metric_for_best_model).removeprefix('eval_')}"
        finer = f"{name.removesuffix('tau')}expected_tau"
        if finer in metrics and metrics[name] == self.state.best_metric:
            of_best = [
                entry[finer]
                for entry in self.state.log_history
                if finer in entry and entry["step"] == self.state.best_global_step
            ]
            if of_best and metrics[finer] > of_best[-1]:
                self.state.best_metric = None  # whatever comes next is better
        return super()._determine_best_metric(metrics, trial)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        prefix = next((key.removesuffix("loss") for key in logs if key.endswith("loss")), None)
        statistics = self._statistics[int(prefix == "")]
        num_rows, num_correct, acceptance = self.accelerator.reduce(statistics)
        if prefix not in (None, "train_") and num_rows.any():  # the summary of a run has the loss of all its steps
            acceptance, accuracy = acceptance / num_rows.clamp_min(1), num_correct / num_rows.clamp_min(1)
            logs[f"{prefix}accuracy"] = (num_correct.sum() / num_rows.sum()).item()
            logs |= {f"{prefix}accuracy_{k}": value for k, value in enumerate(accuracy.tolist(), start=1)}
            logs |= {f"{prefix}acceptance_{k}": value for k, value in enumerate(acceptance.tolist(), start=1)}
            logs[f"{prefix}expected_tau"] = 1 + acceptance.cumprod(dim=0).sum().item()
            statistics.zero_()
        if "loss" in logs:
            logs["stable_share"] = self._trained_share
            logs |= self.progress.speed(self.state)
        super().log(logs, start_time)


def _whole(weight: torch.Tensor) -> torch.Tensor:
    """A parameter that FSDP2 may hold in shards; it is used outside the forward that would gather it."""
    if not isinstance(weight, DTensor):
        return weight
    # Every process has a gradient of its own, of which FSDP2 keeps the mean.
    whole = weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)
    if whole.requires_grad:
        whole.register_hook(lambda grad: grad / weight.device_mesh.size())
    return whole


__all__ = ["DLiteTrainer"]
