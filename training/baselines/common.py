# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What the rivals share: training on a store of whole conversations, and drafting that remembers the whole prompt."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, Trainer, TrainerCallback
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from dlite_hf import DLiteConfig, DLiteTrainer, DLiteTrainingArguments
from dlite_hf.generation.candidate_generator import DLiteCandidateGenerator, _copyable
from dlite_hf.generation.decoding import speculative_decoding
from dlite_hf.generation.integration import TargetSteps
from dlite_hf.losses import DraftingLoss, TargetDistribution
from dlite_hf.modeling_dlite import Sampler
from dlite_hf.target import gather_features
from dlite_hf.training_progress import TrainingProgress


# Arguments of DLite's losses and of its stages; the store holds all anchors, and their weights.
_UNUSED_ARGUMENTS = ("ce_weight", "tv_weight", "loss_decay", "max_anchors", "warmup_epochs", "transition_epochs")


def dflash_layer_ids(num_layers: int, num_tapped: int = 5) -> list[int]:
    """The layers that DFlash and DSpark read: evenly spaced in [1, L - 3], fewer where two would be the same."""
    return sorted({round(1 + i * (num_layers - 4) / (num_tapped - 1)) for i in range(num_tapped)})


def eagle3_layer_ids(num_layers: int) -> list[int]:
    """The layers that EAGLE-3 reads: what goes into the layers 2, L // 2 and L - 3 is put out by those before them."""
    return sorted({1, num_layers // 2 - 1, num_layers - 4})


def stored_layer_ids(num_layers: int) -> list[int]:
    """The layers of a store that serves all three, and the last one, which gives the target's logits."""
    return sorted({*dflash_layer_ids(num_layers), *eagle3_layer_ids(num_layers), num_layers - 1})


def backbone_fields(shape: DLiteConfig) -> dict[str, Any]:
    """The sizes that any drafter of this target takes over from a DLite drafter of it."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act")
    ends = shape.eos_token_id
    return {
        **{name: getattr(shape, name) for name in names},
        "target_layer_ids": shape.target_layer_ids,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": ends[0] if isinstance(ends, list) else ends,
        "pad_token_id": shape.pad_token_id,
    }


class Context(NamedTuple):
    """
    What is known of the tokens before N anchors, aligned on the right: the last of the n columns are the pivots.

    Args:
        features: the target's hidden states, its S layers side by side `[N, n, S * H]`.
        mask: which columns are tokens of the anchor's own conversation `[N, n]`.
        positions: where they stand in it `[N, n]`.
        next_token_ids: the token behind each `[N, n]`; the last is the anchor.
    """

    features: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    next_token_ids: torch.Tensor


class BaselineTrainer(DLiteTrainer):
    """[`DLiteTrainer`] for a rival, on a store: the same anchors in the same order, steps, schedule and metrics.

    A subclass says what a step learns, in `drafting_loss`. The anchors of an optimizer step are dealt to its batches
    by the length of their context, which saves padding and leaves the step's loss as it is.

    Args:
        model: the rival's drafter, whose config names `target_layer_ids`.
        target: the target, for its embeddings and `lm_head`.
        args: the arguments of the training.
        store: what `write_store` of `training/train_stored.py` wrote, of whole conversations.
        train_dataset: `StoredAnchors` of it.
        callbacks: as in [`~transformers.Trainer`].

    Raises:
        ValueError: if the store lacks what the rival reads, an argument is set that has no meaning here, there are
            several processes, or the target's `lm_head` has a bias.
    """

    num_draft_tokens: int  # K, which a subclass knows

    def __init__(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel,
        args: DLiteTrainingArguments,
        store: dict[str, torch.Tensor],
        train_dataset: Dataset | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ):
        num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        _check_store(store, model.config.target_layer_ids, num_layers)
        defaults = {each.name: each.default for each in fields(args)}
        changed = [name for name in _UNUSED_ARGUMENTS if getattr(args, name) != defaults[name]]
        if changed:
            raise ValueError(
                f"A rival has losses of its own over all anchors of the store, so {changed} cannot be honoured; leave "
                "them at their defaults."
            )
        if args.world_size > 1:
            raise ValueError(f"A rival trains in one process, but there are {args.world_size}; start one.")
        lm_head = target.to(args.device).get_output_embeddings()
        if getattr(lm_head, "bias", None) is not None:
            raise ValueError(f"The `lm_head` of {type(target).__name__} has a bias, which the stored logits lack.")
        self.drafter, self.target, self.teacher = model, target.eval(), None
        self.store, self.lm_head = store, lm_head.weight.detach()
        layer_ids = store["layer_ids"].tolist()
        self._columns = torch.tensor([layer_ids.index(i) for i in model.config.target_layer_ids])
        # DLiteTrainer's own wants a DLite drafter.
        Trainer.__init__(
            self,
            model=model,
            args=args,
            data_collator=getattr(train_dataset, "collate", None),
            train_dataset=train_dataset,
            callbacks=[TrainingProgress(), *(callbacks or [])],
        )
        self._statistics = torch.zeros(2, 3, self.num_draft_tokens, device=args.device)
        self._trained_share = 1.0

    stage = "stable"
    evaluation_loop = Trainer.evaluation_loop  # anchors are no prompts to generate for
    _save = Trainer._save  # a training record is a DLite drafter's

    def drafting_loss(self, model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> DraftingLoss:
        """The summed loss of the blocks of a batch."""
        raise NotImplementedError

    def _sample_blocks(self, batch: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
        return batch  # every item is a block already

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if len(batches) < 2:
            return batches, num_items
        step = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        order = (step["anchors"][:, 1] - step["anchors"][:, 0]).argsort()
        parts = order.split(len(batches[0]["anchors"]))
        return [{name: values[part] for name, values in step.items()} for part in parts], num_items

    def compute_loss(
        self,
        model: PreTrainedModel,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        with self.accelerator.autocast():
            result = self.drafting_loss(model, inputs)
        self._statistics[int(model.training)] += torch.stack(result[1:])
        total = inputs["weights"].sum() if num_items_in_batch is None else num_items_in_batch
        loss = result.loss / total.clamp_min(torch.finfo(torch.float32).tiny)
        return (loss, None) if return_outputs else loss

    def context(self, inputs: dict[str, torch.Tensor]) -> Context:
        """Everything before the anchors of a batch, as drafting sees it: from the first token to the pivot."""
        starts, pivots = inputs["anchors"].cpu()[..., None].unbind(dim=1)
        longest = int((pivots - starts).max()) + 1
        rows = pivots + torch.arange(1 - longest, 1)
        mask, rows = rows >= starts, torch.maximum(rows, starts)
        features = self.store["features"][rows[..., None], self._columns].flatten(2)
        context = Context(features, mask, self.store["positions"][rows], self.store["token_ids"][rows + 1])
        context = Context(*(each.to(self.args.device) for each in context))
        return context._replace(features=context.features.to(self.drafter.dtype))

    def target_rows(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of the store that predict the tokens of the blocks `[P]`, and which of them does `[N, K]`."""
        predicting = inputs["anchors"][:, 1:].cpu() + torch.arange(1, self.num_draft_tokens + 1)
        # What lies behind a block's end has no weight.
        needed, index = predicting.clamp_max(len(self.store["features"]) - 1).unique(return_inverse=True)
        return needed, index.to(self.args.device)

    def target_distribution(self, inputs: dict[str, torch.Tensor]) -> tuple[TargetDistribution, torch.Tensor]:
        """What the target predicts over its whole vocabulary, and which row belongs to which draft position."""
        needed, index = self.target_rows(inputs)
        # The last layer stored is the decoder's output.
        logits = self.store["features"][needed, -1].to(self.args.device) @ self.lm_head.T
        return TargetDistribution(logits), index


def _check_store(store: dict[str, torch.Tensor], layer_ids: list[int], num_layers: int) -> None:
    stored = store["layer_ids"].tolist()
    if not {*layer_ids, num_layers - 1} <= set(stored):
        raise ValueError(
            f"The store holds the layers {stored}, but the drafter reads {layer_ids} and the last one, "
            f"{num_layers - 1}; let `train_baseline.py` write one."
        )
    if "positions" not in store or store["positions"][store["starts"]].any():
        raise ValueError(
            "The store begins in the middle of its conversations or does not say where, but this drafter reads all of "
            "each; let `train_baseline.py` write one."
        )


class BaselineCandidateGenerator(DLiteCandidateGenerator):
    """Drafts with a memory of the whole prompt; how is up to a subclass's `draft`.

    Args: those of [`~dlite_hf.generation.candidate_generator.DLiteCandidateGenerator`].
    """

    def __init__(
        self,
        drafter: PreTrainedModel,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
    ):
        self.drafter = drafter
        self.target = target
        self.do_sample = generation_config.do_sample
        self.max_length = generation_config.max_length
        self.num_draft_tokens = drafter.config.num_draft_tokens
        self.logits_processor = _copyable(logits_processor)
        self.num_context = 0  # tokens remembered from earlier rounds
        self._num_last_candidates = 0

    def draft(
        self, features: torch.Tensor, input_ids: torch.Tensor, num_draft_tokens: int, sampler: Sampler
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids `[1, k]` and logits `[1, k, V]`, from the features `[1, n, S * H]` of the newly verified tokens."""
        raise NotImplementedError

    @torch.no_grad()
    def get_candidates(
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: ModelOutput | None = None,
        is_first_iteration: bool | None = None,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        num_draft_tokens = min(self.num_draft_tokens, self.max_length - input_ids.shape[1] - 1)
        if num_draft_tokens < 1:
            return input_ids, None  # one token is left to generate: there is no other round
        end = n_last_matches - self._num_last_candidates or None
        features = gather_features(model_outputs.hidden_states, self.drafter.config.target_layer_ids, slice(None, end))
        if features is None:
            raise ValueError("The target ran without the hooks that read its layers, as a compiled one does.")
        self._num_last_candidates = num_draft_tokens
        features = features.flatten(2).to(self.drafter.device, self.drafter.dtype)
        sampler = self._sampler(input_ids) or (lambda logits, drafted: (logits.argmax(dim=-1), logits))
        draft_ids, draft_logits = self.draft(features, input_ids, num_draft_tokens, sampler)
        self.num_context += features.shape[1]
        return torch.cat([input_ids, draft_ids], dim=1), draft_logits


class BaselineDrafterMixin:
    """Lets a drafter into `generate`: `target.generate(**inputs, custom_generate=drafter.custom_generate)`.

    The loop is DLite's own: the same verification, exact when greedy and when sampling, the same counters, seen in
    `speculation_statistics()`.
    """

    candidate_generator_class: type[BaselineCandidateGenerator]

    def custom_generate(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        token_streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """The callable that `generate` takes as `custom_generate`.

        Args:
            target, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: from `generate`.
            token_streamer: gets the prompt and then every token. `generate` does not hand on its own `streamer`, so
                pass this one to it, by this name.

        Raises:
            ValueError: for a batch, padding, or a cache that holds tokens already: the memory begins with the call.
        """
        cache, mask = model_kwargs.get("cache"), model_kwargs.get("attention_mask")
        cached = cache.get_seq_length() if isinstance(cache, Cache) else None
        padding = 0 if mask is None else int((mask == 0).sum())
        if input_ids.shape[0] != 1 or cached != 0 or padding:
            raise ValueError(
                f"{type(self).__name__} reads all of one sequence, but got {input_ids.shape[0]}, with a cache of "
                f"{cached} tokens and {padding} of padding; pass one, unpadded and from its beginning."
            )
        if token_streamer is not None:
            token_streamer.put(input_ids.cpu())
        layer_ids = self.config.target_layer_ids
        steps = TargetSteps(target, generation_config, model_kwargs, layer_ids, num_rows=input_ids.shape[1])
        generator = self.candidate_generator_class(self, target, generation_config, logits_processor)
        return speculative_decoding(
            steps, generator, input_ids, logits_processor, stopping_criteria, generation_config, token_streamer
        )
