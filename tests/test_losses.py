# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The chunked loss against the same formula written plainly."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlite_hf import losses
from dlite_hf.losses import (
    STABLE,
    LossWeights,
    TargetDistribution,
    drafting_loss,
    position_weights,
    target_distribution,
)


N, K, R, V, P = 9, 5, 8, 41, 12


def make_rows(dtype=torch.float64, num_target_logits=V, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "head_states": torch.randn(N, K, R, dtype=dtype, generator=generator).requires_grad_(),
        "output_weight": torch.randn(V, R, dtype=dtype, generator=generator).requires_grad_(),
        "target": TargetDistribution(3 * torch.randn(P, num_target_logits, dtype=dtype, generator=generator)),
        "target_rows": torch.randint(P, (N, K), generator=generator),
        "weights": torch.rand(N, K, generator=generator) * (torch.rand(N, K, generator=generator) > 0.3),
    }


def make_teacher(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        "teacher_states": torch.randn(N, K, R + 2, dtype=torch.float64, generator=generator),
        "teacher_output_weight": torch.randn(V, R + 2, dtype=torch.float64, generator=generator),
    }


def naive_loss(
    head_states,
    output_weight,
    target,
    target_rows,
    weights,
    token_labels=None,
    loss_weights=STABLE,
    teacher_states=None,
    teacher_output_weight=None,
):
    log_q = (head_states @ output_weight.T).log_softmax(dim=-1)
    p = torch.zeros(P, V, dtype=log_q.dtype)
    p[:, : target.logits.shape[1]] = target.logits.to(log_q.dtype).softmax(dim=-1)
    p = p[target_rows]
    labels = p.argmax(dim=-1) if token_labels is None else token_labels
    cross_entropy = -log_q.gather(-1, labels[..., None])[..., 0]
    total_variation = (log_q.exp() - p).abs().sum(dim=-1)
    losses = loss_weights.ce * cross_entropy + loss_weights.tv * total_variation
    if teacher_states is not None:
        log_t = (teacher_states @ teacher_output_weight.T).log_softmax(dim=-1)
        losses = losses + loss_weights.kl * (log_t.exp() * (log_t - log_q)).sum(dim=-1)
    return (weights * losses).sum(), total_variation, log_q.argmax(dim=-1) == p.argmax(dim=-1)


def gradients(loss, rows):
    return torch.autograd.grad(loss, [rows["head_states"], rows["output_weight"]])


@pytest.mark.parametrize("ce_labels", ["argmax", "token"])
@pytest.mark.parametrize("num_target_logits", [V, V - 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_naive_loss_in_value_and_gradients(dtype, num_target_logits, ce_labels):
    rows = make_rows(dtype, num_target_logits)
    labels = torch.randint(V, (N, K)) if ce_labels == "token" else None
    result = drafting_loss(**rows, token_labels=labels, loss_weights=LossWeights(0.3, 0.7))
    expected, total_variation, correct = naive_loss(**rows, token_labels=labels, loss_weights=LossWeights(0.3, 0.7))
    torch.testing.assert_close(result.loss, expected, rtol=1e-6, atol=1e-6)
    # A factor stands for the caller's normalisation.
    for actual, naive in zip(gradients(result.loss / 7, rows), gradients(expected / 7, rows), strict=True):
        torch.testing.assert_close(actual, naive, rtol=1e-6, atol=1e-6)

    counted = rows["weights"] > 0
    assert result.num_rows.tolist() == counted.sum(dim=0).tolist()
    assert result.num_correct.tolist() == (correct & counted).sum(dim=0).tolist()
    acceptance = ((1 - total_variation / 2) * counted).sum(dim=0)
    torch.testing.assert_close(result.acceptance, acceptance.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss_weights", [LossWeights(0.0, 0.0, 1.0), LossWeights(0.03, 0.3, 0.7)])
def test_the_divergence_from_a_teacher_equals_the_naive_one(loss_weights):
    rows = {**make_rows(), **make_teacher(), "loss_weights": loss_weights}
    result, (expected, *_) = drafting_loss(**rows), naive_loss(**rows)
    torch.testing.assert_close(result.loss, expected, rtol=1e-6, atol=1e-6)
    for actual, naive in zip(gradients(result.loss, rows), gradients(expected, rows), strict=True):
        torch.testing.assert_close(actual, naive, rtol=1e-6, atol=1e-6)


def test_a_student_that_equals_its_teacher_has_no_divergence():
    rows = {**make_rows(), "loss_weights": LossWeights(0.0, 0.0, 1.0)}
    rows["teacher_states"] = rows["head_states"].detach()
    rows["teacher_output_weight"] = rows["output_weight"].detach()
    result = drafting_loss(**rows)
    assert result.loss.item() == pytest.approx(0, abs=1e-9)
    assert all(gradient.abs().max() < 1e-9 for gradient in gradients(result.loss, rows))


@pytest.mark.parametrize("ce_labels", ["argmax", "token"])
def test_a_reduced_vocabulary_equals_a_head_that_gives_the_rest_nothing(ce_labels):
    rows, ids = make_rows(), torch.arange(0, V, 3)
    logits = rows["target"].logits
    logits[0, 4] = 20.0  # a most likely token that the draft vocabulary leaves out
    column_of = torch.full((V,), -1).scatter_(0, ids, torch.arange(len(ids)))
    labels = torch.randint(V, (N, K)) if ce_labels == "token" else logits.argmax(dim=-1)[rows["target_rows"]]
    rows["output_weight"] = rows["output_weight"].detach()[ids].requires_grad_()
    loss_weights = LossWeights(0.3, 0.7)
    reduced = {**rows, "target": target_distribution(logits, ids), "loss_weights": loss_weights}
    result = drafting_loss(**reduced, token_labels=column_of[labels] if ce_labels == "token" else None)

    q = torch.zeros(N, K, V, dtype=torch.float64)
    q[..., ids] = (rows["head_states"] @ rows["output_weight"].T).softmax(dim=-1)
    p = logits.softmax(dim=-1)[rows["target_rows"]]
    q_label = q.gather(-1, labels[..., None])[..., 0]
    cross_entropy = torch.where(column_of[labels] >= 0, -q_label.clamp_min(1e-30).log(), 0.0)
    total_variation = (q - p).abs().sum(dim=-1)
    expected = (rows["weights"] * (0.3 * cross_entropy + 0.7 * total_variation)).sum()
    torch.testing.assert_close(result.loss, expected, rtol=1e-6, atol=1e-6)
    for actual, naive in zip(gradients(result.loss, rows), gradients(expected, rows), strict=True):
        torch.testing.assert_close(actual, naive, rtol=1e-6, atol=1e-6)
    correct = (q.argmax(dim=-1) == p.argmax(dim=-1)) & (rows["weights"] > 0)
    assert result.num_correct.tolist() == correct.sum(dim=0).tolist()


def test_refuses_a_divergence_without_a_fitting_teacher():
    rows = {**make_rows(), "loss_weights": LossWeights(kl=1.0)}
    with pytest.raises(ValueError, match="needs a teacher"):
        drafting_loss(**rows)
    teacher = make_teacher()
    teacher["teacher_output_weight"] = teacher["teacher_output_weight"][1:]
    with pytest.raises(ValueError, match=f"{V} tokens, but it has {V - 1}"):
        drafting_loss(**rows, **teacher)


def test_the_most_likely_token_counts_as_correct():
    rows = make_rows()
    # The target is a sharpened copy of the drafter: the argmax agree everywhere, at any number of correct ones.
    logits = (rows["head_states"] @ rows["output_weight"].T).detach()
    rows["target"] = TargetDistribution(5 * logits.flatten(0, 1))
    rows["target_rows"] = torch.arange(N * K).view(N, K)
    rows["weights"] = torch.ones(N, K)
    assert drafting_loss(**rows).num_correct.tolist() == [N] * K
    rows["target"] = TargetDistribution(logits.flatten(0, 1))
    assert drafting_loss(**rows).acceptance.tolist() == pytest.approx([N] * K)


@pytest.mark.parametrize("rows_per_matmul, rows_per_chunk", [(1, 1), (7, 3), (8, 4), (1000, 1000)])
def test_does_not_depend_on_the_chunks(monkeypatch, rows_per_matmul, rows_per_chunk):
    rows = {**make_rows(), **make_teacher(), "loss_weights": LossWeights(0.1, 1.0, 0.5)}
    expected = drafting_loss(**rows)
    expected_gradients = gradients(expected.loss, rows)
    monkeypatch.setattr(losses, "ROWS_PER_MATMUL", rows_per_matmul)
    monkeypatch.setattr(losses, "_ROWS_PER_CHUNK", rows_per_chunk)
    result = drafting_loss(**rows)
    torch.testing.assert_close(tuple(result), tuple(expected))
    torch.testing.assert_close(gradients(result.loss, rows), expected_gradients)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return result


def test_never_holds_the_logits_of_all_rows(monkeypatch):
    monkeypatch.setattr(losses, "ROWS_PER_MATMUL", 10)
    monkeypatch.setattr(losses, "_ROWS_PER_CHUNK", 2)
    rows = {**make_rows(), "weights": torch.ones(N, K)}
    with LargestTensor() as largest:
        gradients(drafting_loss(**rows).loss, rows)
    assert largest.numel == 10 * V < N * K * V / 3


def test_all_masked_gives_zero_and_zero_gradients():
    rows = {**make_rows(), "weights": torch.zeros(N, K)}
    result = drafting_loss(**rows)
    assert result.loss.item() == 0
    assert all((gradient == 0).all() for gradient in gradients(result.loss, rows))
    assert result.num_rows.tolist() == [0] * K and result.acceptance.tolist() == [0] * K


def test_rows_of_zero_weight_are_not_looked_at():
    rows = make_rows()
    expected = gradients(drafting_loss(**rows).loss, rows)
    with torch.no_grad():
        rows["head_states"][rows["weights"] == 0] = math.nan
    torch.testing.assert_close(gradients(drafting_loss(**rows).loss, rows), expected)


def test_bf16_autocast_stays_finite_and_close():
    rows = make_rows(torch.float32)
    rows["target"] = TargetDistribution(rows["target"].logits.bfloat16())
    expected = naive_loss(**rows)[0]
    with torch.autocast("cpu", torch.bfloat16):
        result = drafting_loss(**rows)
    assert result.loss.dtype == torch.float32
    torch.testing.assert_close(result.loss, expected, rtol=2e-2, atol=0)
    for actual, naive in zip(gradients(result.loss, rows), gradients(expected, rows), strict=True):
        assert actual.dtype == torch.float32
        # A sign of q - p may turn in bf16 where the two nearly meet, so the directions are compared.
        assert torch.cosine_similarity(actual.flatten(), naive.flatten(), dim=0) > 0.99


def test_no_gradients_where_none_are_wanted():
    rows = make_rows()
    with torch.no_grad():
        result = drafting_loss(**rows)
    assert not result.loss.requires_grad
    torch.testing.assert_close(result.loss, naive_loss(**rows)[0].detach())


def test_refuses_more_target_logits_than_rows():
    with pytest.raises(ValueError, match=f"{V + 1} logits.*{V}"):
        drafting_loss(**make_rows(num_target_logits=V + 1))


def test_position_weights():
    assert position_weights(3, 4.0).tolist() == pytest.approx([1, math.exp(-1 / 4), math.exp(-2 / 4)])
    with pytest.raises(ValueError, match="0"):
        position_weights(3, 0)


def test_a_draft_vocabulary_beyond_the_targets_rows():
    rows, ids = make_rows(num_target_logits=V - 6), torch.arange(0, V, 3)
    logits = rows["target"].logits
    rows["output_weight"] = rows["output_weight"].detach()[ids].requires_grad_()
    result = drafting_loss(**{**rows, "target": target_distribution(logits, ids)}, loss_weights=LossWeights(0.0, 1.0))
    q = torch.zeros(N, K, V, dtype=torch.float64)
    q[..., ids] = (rows["head_states"] @ rows["output_weight"].T).softmax(dim=-1)
    p = torch.nn.functional.pad(logits.softmax(dim=-1), (0, 6))[rows["target_rows"]]
    expected = (rows["weights"] * (q - p).abs().sum(dim=-1)).sum()
    torch.testing.assert_close(result.loss, expected, rtol=1e-6, atol=1e-6)
