# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The estimate against what PyTorch counts, and its arithmetic against numbers worked out by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from dlite_hf import DLiteConfig, DLiteForDrafting
from dlite_hf.estimate import DrafterFlops, TargetSize, Workload, activation_numbers, describe, num_parameters
from dlite_hf.history import DLiteHistory

from .targets import make_target


SIZES = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_target_layers": 8,
    "target_layer_ids": [0, 2, 5, 7],
    "sequential_rank": 24,
    "num_draft_tokens": 5,
    "mask_token_id": 3,
}


def make_drafter(**overrides):
    drafter = DLiteForDrafting(DLiteConfig(**{**SIZES, **overrides}))
    drafter.set_attn_implementation("eager")  # PyTorch does not count the products of sdpa's kernel for CPUs
    return drafter


def drafter_inputs(config, num_anchors, history=None):
    group, num_draft_tokens = config.anchor_group_size, config.num_draft_tokens
    return {
        "context_features": torch.randn(num_anchors, len(config.target_layer_ids), config.hidden_size),
        "inputs_embeds": torch.randn(num_anchors, group + num_draft_tokens, config.hidden_size),
        "previous_token_ids": torch.randint(config.vocab_size, (num_anchors, group)),
        "draft_token_ids": torch.randint(config.vocab_size, (num_anchors, num_draft_tokens)),
        "history": history,
    }


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "gemma3", "phi3", "qwen3_moe"])
def test_a_targets_forward(architecture):
    target = make_target(architecture)
    target.set_attn_implementation("eager")
    target.config._experts_implementation = "eager"
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        target(torch.arange(1, 21)[None], use_cache=False, logits_to_keep=7)
    size = TargetSize.of(target.config)
    assert size.forward_flops(20, 7) == counter.get_total_flops()
    assert size.num_parameters == target.num_parameters()


@pytest.mark.parametrize(
    "overrides", [{}, {"context_fusion": "feature"}, {"anchor_group_size": 2}, {"draft_vocab_size": 50}]
)
def test_a_drafters_forward_and_backward(overrides):
    drafter = make_drafter(**overrides)
    with FlopCounterMode(display=False) as counter:
        states = drafter(**drafter_inputs(drafter.config, 6)).head_states
        drafter.sequential_head.output_proj(states).sum().backward()
    flops = DrafterFlops.of(drafter.config, 6, 100)
    assert flops.history == 0
    unneeded = 2 * 6 * 4 * 48**2 if "context_fusion" in overrides else 0  # the target's states get no gradient
    assert 3 * (flops.backbone + flops.vocabulary) - unneeded == counter.get_total_flops()
    assert num_parameters(drafter.config) == drafter.num_parameters()


def test_a_teachers_history():
    drafter = make_drafter(history_window=10)
    config, num_tokens = drafter.config, 9
    history = DLiteHistory(
        torch.randn(1, num_tokens, len(config.history_layer_ids), config.hidden_size),
        torch.tensor([0]),
        torch.tensor([num_tokens + 1]),
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        drafter(**drafter_inputs(config, 1, history))
    flops = DrafterFlops.of(config, 1, num_tokens)
    assert flops.history > 0
    assert flops.backbone + flops.history == counter.get_total_flops()
    # Of a longer sequence an anchor sees no more, and every token is projected once.
    longer = DrafterFlops.of(config, 1, 2 * num_tokens).history - flops.history
    assert longer == 2 * num_tokens * 48 * (3 * 48 + 3 * 2 * 2 * 16)


@pytest.mark.parametrize(
    "overrides", [{}, {"num_attention_heads": 8, "intermediate_size": 384, "num_draft_tokens": 7}]
)
def test_what_the_backward_pass_keeps(overrides):
    drafter = make_drafter(hidden_size=96, num_hidden_layers=4, **overrides)
    drafter.set_attn_implementation("sdpa")
    weights = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}
    kept, num_anchors = {}, 64

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)  # held, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        outputs = drafter(**drafter_inputs(drafter.config, num_anchors))
    assert outputs.head_states.requires_grad
    casts = sum(2 * parameter.numel() for parameter in drafter.layers.parameters() if parameter.ndim == 2)
    measured = sum(size for size, _ in kept.values()) - casts
    assert 2 * num_anchors * activation_numbers(drafter.config) == pytest.approx(measured, rel=0.25)


def make_workload(**overrides):
    """100 conversations of 50 tokens, 11 of them supervised, on 2 devices of 3 x 5 conversations."""
    fields = {
        "target": TargetSize(num_parameters=1000, products=500, scores=2, head=300),
        "drafter": DLiteConfig(**SIZES),
        "teacher": DLiteConfig(**SIZES, history_window=16),
        "epochs": {"teacher": 2, "warmup": 1, "transition": 0, "stable": 1.5},
        "num_conversations": 100,
        "mean_tokens": 50,
        "mean_answer_tokens": 11,
        "max_length": 64,
        "max_anchors": 32,
        "batch_size": 3,
        "batches_per_step": 5,
        "num_devices": 2,
        "target_bytes": 2,
        "activation_bytes": 2,
        "checkpoints_kept": 4,
        "device": "a100",
        "utilization": 0.5,
    }
    return Workload(**{**fields, **overrides})


def test_stages_by_hand():
    teacher, warmup, stable = make_workload().stages
    assert [teacher.stage, warmup.stage, stable.stage] == ["teacher", "warmup", "stable"]
    assert (teacher.steps, warmup.steps, stable.steps) == (7, 4, 5)  # 200, 100 and 150 conversations, 30 a step
    assert (teacher.target_tokens, stable.target_tokens) == (10_000, 7_500)
    assert (teacher.anchors, stable.anchors) == (2_000, 1_500)  # 11 supervised tokens have 10 that begin a block
    assert stable.target_flops == 150 * 2 * (50 * (500 + 50 * 2) + 11 * 300)
    # 10 anchors of 5 tokens, rank 24 x 211 tokens, forward and backward.
    assert stable.vocabulary_flops == 150 * 3 * 2 * 10 * 5 * 24 * 211
    assert teacher.history_flops > 0 and warmup.history_flops == stable.history_flops == 0
    assert warmup.teacher_flops > 0 and teacher.teacher_flops == stable.teacher_flops == 0
    assert stable.flops == stable.target_flops + stable.drafter_flops + stable.vocabulary_flops


def test_a_limit_on_anchors_and_hours_by_hand():
    workload = make_workload(max_anchors=4)
    assert workload.anchors_per_conversation == 4
    assert make_workload(mean_answer_tokens=0.5).anchors_per_conversation == 0
    assert workload.device_hours(3600 * 156e12) == pytest.approx(1)  # half of an A100's 312 TFLOP/s


def test_memory_and_disk_by_hand():
    workload = make_workload()
    memory, disk = workload.memory, workload.disk
    teacher = num_parameters(workload.teacher)  # the larger of both
    assert memory["target's weights"] == 2000
    assert memory["drafter in fp32, gradients, AdamW"] == 16 * teacher
    assert memory["teacher's weights"] == 2 * teacher
    assert memory["target's hidden states"] == 3 * 64 * 5 * 48 * 2  # the teacher reads layer 4 as well
    assert memory["target's logits"] == 3 * 64 * 211 * 2
    assert disk["4 checkpoints"] == 4 * 12 * teacher
    assert disk["not needed: hidden states, if stored"] == 100 * 50 * 4 * 48 * 2
    assert "teacher's weights" not in make_workload(teacher=None, epochs={"stable": 1}).memory


def test_the_papers_corpus_would_not_fit_on_a_disk():
    config = LlamaConfig(vocab_size=151936, hidden_size=2560, num_hidden_layers=36, num_attention_heads=32)
    drafter = DLiteConfig.from_target(config, mask_token_id=0, target_layer_ids=[1, 9, 17, 25, 33])
    workload = make_workload(drafter=drafter, teacher=None, num_conversations=1_300_000, mean_tokens=1142)
    # What a peer says that its cache of five layers of Qwen3-4B takes: 38 TB.
    assert workload.disk["not needed: hidden states, if stored"] == pytest.approx(38e12, rel=0.01)


def test_the_tables():
    text = describe(make_workload())
    lines = text.splitlines()
    table = lines[lines.index("") + 1 :][:4]
    assert [line.split()[0] for line in table] == ["stage", "teacher", "warmup", "stable"]
    assert len({len(line) for line in table}) == 1  # aligned
    assert table[3].split()[1:3] == ["1.5", "5"]
    assert "100 conversations of 50 tokens, 11 supervised; 10 anchors of each" in text
    assert "at 50% of 312 bfloat16 TFLOP/s" in text
    assert "FSDP" in text and "FSDP" not in describe(make_workload(num_devices=1))
