# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What a training run costs, before it starts: steps, tokens, FLOPs, hours, memory and disk. Arithmetic alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from .configuration_dlite import DLiteConfig
from .history import ANCHORS_PER_DENSE_ROW
from .losses import ROWS_PER_MATMUL
from .modeling_dlite import DLiteForDrafting
from .target import text_decoder


# Dense bfloat16 products a second, from the makers' data sheets; of a CPU what a large matmul reaches on one core: 0.2
# TFLOP/s on an AMD EPYC with AVX-512's bfloat16 and no AMX. With AMX it is an assumption.
PEAK_FLOPS = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "h800": 989e12, "cpu": 0.2e12, "cpu-amx": 0.5e12}

# The fraction of it that training reaches. That of a CPU was measured on the same core, with drafters of two layers
# for Qwen2.5-Coder-0.5B and two conversations of up to 512 tokens a step: 0.57 with 32 anchors, 0.67 with 64.
UTILIZATION = {**dict.fromkeys(PEAK_FLOPS, 0.4), "cpu": 0.6}

_ADAMW_BYTES = 16  # a parameter in fp32, its gradient and two moments
_CHECKPOINT_BYTES = 12  # a parameter in fp32 and two moments
_TOKENIZED_BYTES = 5  # a token on disk: its id, and whether it is supervised


class TargetSize(NamedTuple):
    """
    Args:
        num_parameters: all of the target's parameters.
        products: multiplications of a token with the weights of the decoder.
        scores: multiplications of a token's attention with one token that it sees, in all layers.
        head: multiplications of `lm_head` at one position.
    """

    num_parameters: int
    products: float
    scores: int
    head: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "TargetSize":
        """Counted on a model without storage; of a mixture's experts only those that a token visits."""
        with torch.device("meta"):
            target = AutoModelForCausalLM.from_config(config)
        text_config = config.get_text_config(decoder=True)
        embeddings = {id(each.weight) for each in target.modules() if isinstance(each, nn.Embedding)}
        products = 0.0
        for parameter in text_decoder(target)[0].parameters():
            if parameter.ndim == 2 and id(parameter) not in embeddings:
                products += parameter.numel()
            elif parameter.ndim == 3:
                products += parameter.numel() * text_config.num_experts_per_tok / parameter.shape[0]
        sizes = DLiteConfig.from_target(config, mask_token_id=0)
        scores = 2 * sizes.num_target_layers * sizes.num_attention_heads * sizes.head_dim
        return cls(target.num_parameters(), products, scores, sizes.hidden_size * sizes.vocab_size)

    def forward_flops(self, num_tokens: float, num_logits: float) -> float:
        """Of one sequence; scores are counted for all pairs, as kernels without a causal shortcut compute them."""
        return 2 * (num_tokens * (self.products + num_tokens * self.scores) + num_logits * self.head)


class DrafterFlops(NamedTuple):
    """Of one sequence's forward; a backward pass costs twice as much again."""

    backbone: float
    history: float
    vocabulary: float

    @property
    def total(self) -> float:
        return self.backbone + self.history + self.vocabulary

    @classmethod
    def of(
        cls, config: DLiteConfig, num_anchors: float, num_tokens: float, attn_implementation: str
    ) -> "DrafterFlops":
        """
        Args:
            config: of the drafter.
            num_anchors: anchors drawn from the sequence.
            num_tokens: tokens of the sequence, which only a drafter with history reads.
            attn_implementation: of the drafter; all but `"flex_attention"` compute what the history's mask leaves out.
        """
        hidden, rank, num_layers = config.hidden_size, config.sequential_rank, config.num_hidden_layers
        num_queries = config.anchor_group_size + config.num_draft_tokens
        num_tapped = len(config.target_layer_ids)
        num_slots = num_tapped if config.context_fusion == "sequence" else 1
        num_keys = num_slots + num_queries
        query_size = config.num_attention_heads * config.head_dim
        key_value_size = 2 * config.num_key_value_heads * config.head_dim
        layer = (
            2 * num_queries * hidden * query_size
            + num_keys * hidden * key_value_size
            + 3 * num_queries * hidden * config.intermediate_size
            + 2 * num_queries * num_keys * query_size
        )
        num_states = config.num_draft_tokens + config.anchor_group_size - 1
        head = num_states * 4 * rank**2 + config.num_draft_tokens * (rank + hidden) * rank
        fuse = num_tapped * hidden**2 if config.context_fusion == "feature" else 0
        vocabulary = config.num_draft_tokens * rank * (config.draft_vocab_size or config.vocab_size)
        history = 0.0
        if config.history_window:
            slots = num_tokens * hidden * (len(config.history_layer_ids) * hidden + num_layers * key_value_size)
            num_seen = min(config.history_window - 1, num_tokens)
            if attn_implementation != "flex_attention":
                # All of the sequence, and the blocks that share the row.
                num_seen = num_tokens + (min(num_anchors, ANCHORS_PER_DENSE_ROW) - 1) * num_keys
            history = slots + num_anchors * num_layers * 2 * num_queries * max(num_seen, 0) * query_size
        return cls(2 * num_anchors * (num_layers * layer + head + fuse), 2 * history, 2 * num_anchors * vocabulary)


class StageCost(NamedTuple):
    """FLOPs are of the whole stage, forward and backward; the teacher's cost stands under `teacher_flops`."""

    stage: str
    epochs: float
    steps: int
    target_tokens: float
    anchors: float
    target_flops: float
    drafter_flops: float
    vocabulary_flops: float
    history_flops: float
    teacher_flops: float

    @property
    def flops_of(self) -> dict[str, float]:
        """FLOPs by what they are spent on."""
        return {
            "target": self.target_flops,
            "drafter": self.drafter_flops,
            "vocabulary": self.vocabulary_flops,
            "history": self.history_flops,
            "teacher": self.teacher_flops,
        }

    @property
    def flops(self) -> float:
        return sum(self.flops_of.values())


@dataclass(frozen=True)
class Workload:
    """A run in numbers. Bytes are decimal.

    Args:
        target: sizes of the target.
        drafter: the drafter to train.
        teacher: its teacher, if there is one.
        epochs: of each stage, in order, by its name: `"teacher"`, `"warmup"`, `"transition"`, `"stable"`.
        num_conversations: conversations of an epoch.
        mean_tokens: tokens of one, prompt included.
        mean_answer_tokens: supervised tokens of one.
        max_length: tokens of the longest.
        max_anchors: anchors of a conversation and step.
        batch_size: conversations of one forward on one device.
        batches_per_step: forwards of one device in an optimizer step.
        num_devices: devices that share a step.
        attn_implementation: of the drafter and its teacher.
        target_bytes: of one of the target's numbers.
        activation_bytes: of one of the drafter's activations, 2 in mixed precision.
        checkpoints_kept: checkpoints on disk at the end, those of the teacher included.
        device: a key of `PEAK_FLOPS`; a CPU has as many cores as PyTorch has threads here.
        utilization: the fraction of its peak that is reached.
        num_evaluations: evaluations during training, the teacher's included.
        eval_prompts: prompts that each of them generates for.
        eval_new_tokens: tokens of each.
    """

    target: TargetSize
    drafter: DLiteConfig
    teacher: DLiteConfig | None
    epochs: dict[str, float]
    num_conversations: int
    mean_tokens: float
    mean_answer_tokens: float
    max_length: int
    max_anchors: int
    batch_size: int
    batches_per_step: int
    num_devices: int
    attn_implementation: str
    target_bytes: int
    activation_bytes: int
    checkpoints_kept: int
    device: str
    utilization: float
    num_evaluations: int
    eval_prompts: int
    eval_new_tokens: int

    @property
    def peak_flops(self) -> float:
        """Of one device, a second."""
        return PEAK_FLOPS[self.device] * (torch.get_num_threads() if self.device.startswith("cpu") else 1)

    @property
    def anchors_per_conversation(self) -> float:
        return max(0.0, min(self.max_anchors, self.mean_answer_tokens - 1))

    def stage_cost(self, stage: str) -> StageCost:
        """What one stage costs. Anchors near the end of an answer count whole, so it is a little too much."""
        epochs, anchors = self.epochs[stage], self.anchors_per_conversation
        conversations = epochs * self.num_conversations
        trained = self.teacher if stage == "teacher" and self.teacher else self.drafter
        num_logits = min(self.mean_answer_tokens, anchors * self.drafter.num_draft_tokens)
        flops = DrafterFlops.of(trained, anchors, self.mean_tokens, self.attn_implementation)
        teacher = 0.0
        if stage in ("warmup", "transition") and self.teacher:
            teacher = DrafterFlops.of(self.teacher, anchors, self.mean_tokens, self.attn_implementation).total
        per_step = self.batch_size * self.batches_per_step * self.num_devices
        return StageCost(
            stage=stage,
            epochs=epochs,
            steps=math.ceil(round(conversations / per_step, 6)),  # 500 steps may be 500.0000001 of these
            target_tokens=conversations * self.mean_tokens,
            anchors=conversations * anchors,
            target_flops=conversations * self.target.forward_flops(self.mean_tokens, num_logits),
            drafter_flops=conversations * 3 * flops.backbone,
            vocabulary_flops=conversations * 3 * flops.vocabulary,
            history_flops=conversations * 3 * flops.history,
            teacher_flops=conversations * teacher,
        )

    @property
    def stages(self) -> list[StageCost]:
        return [self.stage_cost(stage) for stage, epochs in self.epochs.items() if epochs > 0]

    def device_hours(self, flops: float) -> float:
        return flops / (self.peak_flops * self.utilization) / 3600

    @property
    def memory(self) -> dict[str, float]:
        """Bytes on one device in the largest step: every sequence of `max_length`, with `max_anchors`."""
        models = [self.drafter, *([self.teacher] if self.teacher else [])]
        tokens = self.batch_size * self.max_length
        anchors = self.batch_size * min(self.max_anchors, self.max_length)
        num_logits = min(tokens, anchors * self.drafter.num_draft_tokens)
        vocab_size, rank = self.drafter.draft_vocab_size or self.drafter.vocab_size, self.drafter.sequential_rank
        layers_read = max(len(model.captured_layer_ids) for model in models)
        activations = anchors * max(activation_numbers(model) for model in models) * self.activation_bytes
        memory = {
            "target's weights": float(self.target.num_parameters * self.target_bytes),
            "drafter in fp32, gradients, AdamW": max(map(num_parameters, models)) * _ADAMW_BYTES,
            "target's hidden states": tokens * layers_read * self.drafter.hidden_size * self.target_bytes,
            "target's logits": num_logits * self.drafter.vocab_size * self.target_bytes,
            "drafter's activations (rough)": activations,
            "loss": vocab_size * (ROWS_PER_MATMUL * self.activation_bytes + rank * 4),
        }
        if any(model.history_window for model in models):
            numbers = self.batch_size * max(map(self._history_numbers, models))
            memory["history (rough)"] = numbers * self.activation_bytes
        if self.teacher:
            memory["teacher's weights"] = num_parameters(self.teacher) * self.target_bytes
        return memory

    def _history_numbers(self, model: DLiteConfig) -> float:
        """Of the longest sequence; a finished teacher runs without a backward pass, layer after layer."""
        numbers = history_numbers(
            model, min(self.max_anchors, self.max_length), self.max_length, self.attn_implementation
        )
        is_trained = model is self.drafter or self.epochs.get("teacher", 0) > 0
        return numbers if is_trained else numbers / model.num_hidden_layers

    @property
    def disk(self) -> dict[str, float]:
        """Bytes of what a run leaves, and of what it would have to store if the target did not run beside it."""
        models = [self.drafter, *([self.teacher] if self.teacher else [])]
        largest = max(map(num_parameters, models))
        states = len(self.drafter.captured_layer_ids) * self.drafter.hidden_size * self.target_bytes
        return {
            "tokenised corpus": self.num_conversations * self.mean_tokens * _TOKENIZED_BYTES,
            f"{self.checkpoints_kept} checkpoints": float(self.checkpoints_kept * largest * _CHECKPOINT_BYTES),
            "finished drafters": float(sum(map(num_parameters, models)) * self.target_bytes),
            "not needed: hidden states, if stored": self.num_conversations * self.mean_tokens * states,
        }


def num_parameters(config: DLiteConfig) -> int:
    """Parameters of a drafter."""
    with torch.device("meta"):
        return DLiteForDrafting(config).num_parameters()


def activation_numbers(config: DLiteConfig) -> float:
    """Numbers that one anchor leaves for the backward pass, roughly: factors fitted to what autograd keeps in bfloat16
    autocast with sdpa attention."""
    num_queries = config.anchor_group_size + config.num_draft_tokens
    num_slots = len(config.target_layer_ids) if config.context_fusion == "sequence" else 1
    query_size = config.num_attention_heads * config.head_dim
    key_value_size = 2 * config.num_key_value_heads * config.head_dim
    per_query = 9.5 * config.hidden_size + 5 * query_size + 4 * config.intermediate_size
    per_key = 5 * config.hidden_size + 2.5 * key_value_size
    return config.num_hidden_layers * (num_queries * per_query + (num_slots + num_queries) * per_key)


def history_numbers(config: DLiteConfig, num_anchors: int, num_tokens: int, attn_implementation: str) -> float:
    """Numbers that the history of one sequence leaves for the backward pass, as autograd keeps them in bfloat16
    autocast: under a dense mask every row of anchors has its own copy of the sequence's keys and values, with a value
    head for each query head, and under `"eager"` its scores."""
    if not config.history_window:
        return 0.0
    hidden, num_layers = config.hidden_size, config.num_hidden_layers
    query_size = config.num_attention_heads * config.head_dim
    key_value_size = 2 * config.num_key_value_heads * config.head_dim
    num_rows, per_layer = 1, 2.5 * key_value_size
    if attn_implementation != "flex_attention":
        group = min(num_anchors, ANCHORS_PER_DENSE_ROW)
        num_rows = math.ceil(num_anchors / group)
        num_queries = group * (config.anchor_group_size + config.num_draft_tokens)
        scores = 3 * config.num_attention_heads if attn_implementation == "eager" else 1
        per_layer = 1.5 * key_value_size + 2 * query_size + scores * num_queries
    once = hidden * (len(config.history_layer_ids) + 2 * num_layers)
    return num_tokens * (once + num_rows * num_layers * per_layer)


def describe(workload: Workload) -> str:
    """The estimate as tables for a terminal."""
    stages = workload.stages
    spent_on = list(stages[0].flops_of) if stages else []
    rows: list[Sequence[str]] = [
        ("stage", "epochs", "steps", "target tokens", "anchors", *spent_on, "in all", "time"),
    ]
    for cost in stages:
        sizes = [cost.target_tokens, cost.anchors, *cost.flops_of.values(), cost.flops]
        time = _duration(workload.device_hours(cost.flops))
        rows.append((cost.stage, f"{cost.epochs:.4g}", f"{cost.steps:,}", *map(_short, sizes), time))
    all_hours = workload.device_hours(sum(cost.flops for cost in stages))
    count, device = workload.num_devices, workload.device
    cores = f", threads of this machine: {torch.get_num_threads()}" if device.startswith("cpu") else ""
    on_all = f", {_duration(all_hours / count)} on {count}" if count > 1 else ""
    memory, disk = workload.memory, workload.disk
    shared = memory["drafter in fp32, gradients, AdamW"] / count
    lines = [
        f"{workload.num_conversations:,} conversations of {workload.mean_tokens:,.0f} tokens, "
        f"{workload.mean_answer_tokens:,.0f} supervised; {workload.anchors_per_conversation:,.0f} anchors of each",
        f"target {_short(workload.target.num_parameters)} parameters, drafter "
        f"{_short(num_parameters(workload.drafter))}, {workload.batch_size} x {workload.batches_per_step} x {count} "
        "conversations a step",
        "",
        *_align(rows),
        "target to teacher are FLOPs: target and teacher forward; drafter, vocabulary and history backward as well",
        "",
        f"{_duration(all_hours)} of one {device}{on_all}, at {workload.utilization:.0%} of "
        f"{workload.peak_flops / 1e12:g} bfloat16 TFLOP/s{cores}",
        f"not counted: regeneration{_evaluation(workload)}",
        "",
        f"memory of a device, sequences of {workload.max_length:,} tokens",
        *_align([(f"  {name}", f"{_short(size)}B") for name, size in memory.items()]),
        f"  in all {_short(sum(memory.values()))}B"
        + (f"; FSDP or ZeRO leave {_short(shared)}B of the drafter's share" if count > 1 else ""),
        "",
        "disk",
        *_align([(f"  {name}", f"{_short(size)}B") for name, size in disk.items()]),
    ]
    return "\n".join(lines)


def _evaluation(workload: Workload) -> str:
    """What an evaluation does; its tokens come one by one, which no peak speed tells the time of."""
    if not workload.num_evaluations:
        return ""
    tokens = workload.eval_prompts * workload.eval_new_tokens
    return (
        f"; {workload.num_evaluations:,} evaluations, each a forward over what is held out and up to "
        f"{workload.eval_prompts:,} x {workload.eval_new_tokens:,} tokens of `generate`: "
        f"{_duration(tokens / 10 / 3600)} at 10 tokens a second"
    )


def _duration(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} h"
    return f"{hours * 60:.1f} min" if hours >= 1 / 60 else f"{hours * 3600:.1f} s"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return lines


def _short(number: float) -> str:
    """Three digits and a decimal prefix: 38.1 T."""
    for prefix in ("", "k", "M", "G", "T", "P", "E", "Z"):
        if number < 999.5 or prefix == "Z":
            break
        number /= 1000
    return f"{number:.3g} {prefix}" if number < 1000 else f"{number:.0f} {prefix}"


__all__ = ["PEAK_FLOPS", "UTILIZATION", "DrafterFlops", "StageCost", "TargetSize", "Workload", "describe"]
