# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The estimate against what PyTorch counts, and its arithmetic against numbers worked out by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, Qwen2Config

from dlite_hf import DLiteConfig, DLiteForDrafting
from dlite_hf.estimate import (
    UTILIZATION,
    DrafterFlops,
    TargetSize,
    Workload,
    activation_numbers,
    describe,
    history_numbers,
    num_parameters,
)
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
    flops = DrafterFlops.of(drafter.config, 6, 100, "eager")
    assert flops.history == 0
    unneeded = 2 * 6 * 4 * 48**2 if "context_fusion" in overrides else 0  # the target's states get no gradient
    assert 3 * (flops.backbone + flops.vocabulary) - unneeded == counter.get_total_flops()
    assert num_parameters(drafter.config) == drafter.num_parameters()


def make_history(config, num_anchors, num_tokens):
    """Of one sequence, with as many anchors spread over it."""
    return DLiteHistory(
        torch.randn(1, num_tokens, len(config.history_layer_ids), config.hidden_size),
        torch.zeros(num_anchors, dtype=torch.long),
        torch.linspace(2, num_tokens + 1, num_anchors).long(),
    )


# An anchor by itself, two in a row, and rows of 16 that see more tokens than the window has.
@pytest.mark.parametrize(("num_anchors", "num_tokens"), [(1, 9), (2, 30), (32, 30)])
def test_a_teachers_history(num_anchors, num_tokens):
    drafter = make_drafter(history_window=10)
    config = drafter.config
    history = make_history(config, num_anchors, num_tokens)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        drafter(**drafter_inputs(config, num_anchors, history))
    flops = DrafterFlops.of(config, num_anchors, num_tokens, "eager")
    assert flops.history > 0
    assert flops.backbone + flops.history == counter.get_total_flops()


def test_a_teachers_history_under_a_sparse_mask():
    config = make_drafter(history_window=10).config
    sparse, longer = (DrafterFlops.of(config, 20, num_tokens, "flex_attention").history for num_tokens in (30, 60))
    # Of a longer sequence an anchor sees no more, and every token is projected once.
    assert longer - sparse == 2 * 30 * 48 * (3 * 48 + 3 * 2 * 2 * 16)
    # Under a dense mask an anchor's 6 queries also meet 21 tokens outside its window, and 15 blocks of 4 + 6 keys.
    dense = DrafterFlops.of(config, 20, 30, "sdpa").history
    assert dense - sparse == 2 * 20 * 3 * 2 * 6 * (21 + 15 * 10) * 64


def kept_bytes(drafter, inputs):
    """What autograd keeps of a forward in bfloat16 autocast, but for the drafter's own weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)  # held, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        outputs = drafter(**inputs)
    assert outputs.head_states.requires_grad
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize(
    "overrides", [{}, {"num_attention_heads": 8, "intermediate_size": 384, "num_draft_tokens": 7}]
)
def test_what_the_backward_pass_keeps(overrides):
    drafter = make_drafter(hidden_size=96, num_hidden_layers=4, **overrides)
    drafter.set_attn_implementation("sdpa")
    measured = kept_bytes(drafter, drafter_inputs(drafter.config, 64))
    casts = sum(2 * parameter.numel() for parameter in drafter.layers.parameters() if parameter.ndim == 2)
    assert 2 * 64 * activation_numbers(drafter.config) == pytest.approx(measured - casts, rel=0.25)


@pytest.mark.parametrize("num_anchors", [5, 40])
@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_what_the_backward_pass_keeps_of_a_history(attn_implementation, num_anchors):
    drafter = make_drafter(history_window=64)
    drafter.set_attn_implementation(attn_implementation)
    config = drafter.config
    shorter, longer = (
        kept_bytes(drafter, drafter_inputs(config, num_anchors, make_history(config, num_anchors, num_tokens)))
        for num_tokens in (128, 384)
    )
    expected = 2 * history_numbers(config, num_anchors, 256, attn_implementation)
    assert expected == pytest.approx(longer - shorter, rel=0.25)


def test_a_sparse_mask_copies_no_history():
    config = make_drafter(history_window=64).config
    sparse, dense = ([history_numbers(config, n, 100, name) for n in (16, 160)] for name in ("flex_attention", "sdpa"))
    assert sparse[0] == sparse[1] < dense[0]
    assert dense[1] - dense[0] == 9 * 100 * 3 * (1.5 * 64 + 2 * 64 + 16 * 6)  # nine more rows, in three layers
    assert history_numbers(DLiteConfig(**SIZES), 16, 100, "sdpa") == 0


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
        "attn_implementation": "sdpa",
        "target_bytes": 2,
        "activation_bytes": 2,
        "checkpoints_kept": 4,
        "device": "a100",
        "utilization": 0.5,
        "num_evaluations": 0,
        "eval_prompts": 8,
        "eval_new_tokens": 75,
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


def test_a_cpu_has_a_core_for_every_thread(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    workload = make_workload(device="cpu", utilization=0.6)
    assert workload.peak_flops == pytest.approx(0.6e12)
    assert "at 60% of 0.6 bfloat16 TFLOP/s, threads of this machine: 3" in describe(workload)
    assert "threads" not in describe(make_workload())


def test_a_measured_step_on_a_cpu(monkeypatch):
    """Of Qwen2.5-Coder-0.5B on one core: 3.3 s, with 145 tokens of a conversation, 80 of them supervised."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    sizes = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    config = Qwen2Config(**sizes, num_attention_heads=14, num_key_value_heads=2)
    workload = make_workload(
        target=TargetSize.of(config),
        drafter=DLiteConfig.from_target(
            config, mask_token_id=0, num_hidden_layers=2, sequential_rank=64, draft_vocab_size=4096
        ),
        teacher=None,
        epochs={"stable": 1},
        num_conversations=2,
        mean_tokens=145,
        mean_answer_tokens=80,
        max_anchors=64,
        device="cpu",
        utilization=UTILIZATION["cpu"],
    )
    assert 3600 * workload.device_hours(workload.stages[0].flops) == pytest.approx(3.3, rel=0.15)


def test_memory_and_disk_by_hand():
    workload = make_workload()
    memory, disk = workload.memory, workload.disk
    teacher = num_parameters(workload.teacher)  # the larger of both
    assert memory["target's weights"] == 2000
    assert memory["drafter in fp32, gradients, AdamW"] == 16 * teacher
    assert memory["teacher's weights"] == 2 * teacher
    assert memory["target's hidden states"] == 3 * 64 * 5 * 48 * 2  # the teacher reads layer 4 as well
    assert memory["target's logits"] == 3 * 64 * 211 * 2
    # 2 rows of 16 anchors for each of 3 sequences.
    assert memory["history (rough)"] == 2 * 3 * history_numbers(workload.teacher, 32, 64, "sdpa")
    assert disk["tokenised corpus"] == 100 * 50 * 5
    assert disk["4 checkpoints"] == 4 * 12 * teacher
    assert disk["not needed: hidden states, if stored"] == 100 * 50 * 4 * 48 * 2
    alone = make_workload(teacher=None, epochs={"stable": 1}).memory
    assert not {"teacher's weights", "history (rough)"} & alone.keys()
    # A finished teacher runs forward alone, one of its three layers at a time.
    finished = make_workload(epochs={"warmup": 1, "stable": 1}).memory
    assert finished["history (rough)"] == memory["history (rough)"] / 3


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
    assert "at 50% of 312 bfloat16 TFLOP/s\nnot counted: regeneration\n" in text
    assert "FSDP" in text and "FSDP" not in describe(make_workload(num_devices=1))


@pytest.mark.parametrize(
    ("hours", "expected"),
    [(5000, ("5,000.0 h", "2,500.0 h")), (1.5, ("1.5 h", "45.0 min")), (0.02, ("1.2 min", "36.0 s"))],
)
def test_a_time_has_the_unit_that_fits(hours, expected):
    products = hours * 3600 * 156e12 / (100 * 2 * 50)  # of half of an A100; the drafter's share is lost beside it
    target = TargetSize(num_parameters=1000, products=products, scores=0, head=0)
    text = describe(make_workload(target=target, teacher=None, epochs={"stable": 1}))
    assert "{} of one a100, {} on 2, at 50%".format(*expected) in text
    assert text.splitlines()[4].endswith(f"  {expected[0]}")


def test_evaluations_are_named_with_what_they_generate():
    text = describe(make_workload(num_evaluations=12))
    assert (
        "12 evaluations, each a forward over what is held out and up to 8 x 75 tokens of `generate`: 1.0 min" in text
    )
