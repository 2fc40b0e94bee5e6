# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The chunked loss against the same formula written plainly."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlite_hf import losses
from dlite_hf.losses import drafting_loss, position_weights


N, K, R, V, P = 9, 5, 8, 41, 12


def make_rows(dtype=torch.float64, num_target_logits=V, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "head_states": torch.randn(N, K, R, dtype=dtype, generator=generator).requires_grad_(),
        "output_weight": torch.randn(V, R, dtype=dtype, generator=generator).requires_grad_(),
        "target_logits": 3 * torch.randn(P, num_target_logits, dtype=dtype, generator=generator),
        "target_rows": torch.randint(P, (N, K), generator=generator),
        "weights": torch.rand(N, K, generator=generator) * (torch.rand(N, K, generator=generator) > 0.3),
    }


def naive_loss(
    head_states, output_weight, target_logits, target_rows, weights, token_labels=None, ce_weight=0.1, tv_weight=1.0
):
    log_q = (head_states @ output_weight.T).log_softmax(dim=-1)
    p = torch.zeros(P, V, dtype=log_q.dtype)
    p[:, : target_logits.shape[1]] = target_logits.to(log_q.dtype).softmax(dim=-1)
    p = p[target_rows]
    labels = p.argmax(dim=-1) if token_labels is None else token_labels
    cross_entropy = -log_q.gather(-1, labels[..., None])[..., 0]
    total_variation = (log_q.exp() - p).abs().sum(dim=-1)
    loss = (weights * (ce_weight * cross_entropy + tv_weight * total_variation)).sum()
    return loss, total_variation, log_q.argmax(dim=-1) == p.argmax(dim=-1)


def gradients(loss, rows):
    return torch.autograd.grad(loss, [rows["head_states"], rows["output_weight"]])


@pytest.mark.parametrize("ce_labels", ["argmax", "token"])
@pytest.mark.parametrize("num_target_logits", [V, V - 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_naive_loss_in_value_and_gradients(dtype, num_target_logits, ce_labels):
    rows = make_rows(dtype, num_target_logits)
    labels = torch.randint(V, (N, K)) if ce_labels == "token" else None
    result = drafting_loss(**rows, token_labels=labels, ce_weight=0.3, tv_weight=0.7)
    expected, total_variation, correct = naive_loss(**rows, token_labels=labels, ce_weight=0.3, tv_weight=0.7)
    torch.testing.assert_close(result.loss, expected, rtol=1e-6, atol=1e-6)
    # A factor stands for the caller's normalisation.
    for actual, naive in zip(gradients(result.loss / 7, rows), gradients(expected / 7, rows), strict=True):
        torch.testing.assert_close(actual, naive, rtol=1e-6, atol=1e-6)

    counted = rows["weights"] > 0
    assert result.num_rows.tolist() == counted.sum(dim=0).tolist()
    assert result.num_correct.tolist() == (correct & counted).sum(dim=0).tolist()
    acceptance = ((1 - total_variation / 2) * counted).sum(dim=0)
    torch.testing.assert_close(result.acceptance, acceptance.detach(), rtol=1e-6, atol=1e-6)


def test_the_most_likely_token_counts_as_correct():
    rows = make_rows()
    # The target is a sharpened copy of the drafter: the argmax agree everywhere, at any number of correct ones.
    logits = (rows["head_states"] @ rows["output_weight"].T).detach()
    rows["target_logits"] = 5 * logits.flatten(0, 1)
    rows["target_rows"] = torch.arange(N * K).view(N, K)
    rows["weights"] = torch.ones(N, K)
    assert drafting_loss(**rows).num_correct.tolist() == [N] * K
    rows["target_logits"] = logits.flatten(0, 1)
    assert drafting_loss(**rows).acceptance.tolist() == pytest.approx([N] * K)


@pytest.mark.parametrize("rows_per_matmul, rows_per_chunk", [(1, 1), (7, 3), (8, 4), (1000, 1000)])
def test_does_not_depend_on_the_chunks(monkeypatch, rows_per_matmul, rows_per_chunk):
    rows = make_rows()
    expected = drafting_loss(**rows)
    expected_gradients = gradients(expected.loss, rows)
    monkeypatch.setattr(losses, "_ROWS_PER_MATMUL", rows_per_matmul)
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
    monkeypatch.setattr(losses, "_ROWS_PER_MATMUL", 10)
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
    rows["target_logits"] = rows["target_logits"].bfloat16()
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
