# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Two processes train as one: the gradients of every stage, a rank with nothing to learn, sharded parameters."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dlite_hf.data import drafting_data_collator
from dlite_hf.live_evaluation import live_tau
from dlite_hf.trainer import DLiteTrainer

from .test_stages import STAGES, W
from .test_trainer import gradient_of_one_step, make_args, make_samples, take_batch


TWO_BY_TWO = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "ddp_backend": "gloo"}


def stage_gradient(stage, folder, models, **overrides):
    """The gradient and the logged loss of one step in a stage; the transition is caught in its middle."""
    target, drafter, teacher, history_drafter = models
    share = {"transition": 0.3}.get(stage)
    trainer_class = DLiteTrainer
    with pytest.MonkeyPatch.context() as patch:
        if share is not None:
            patch.setattr(trainer_class, "stable_share", share)
            patch.setattr(trainer_class, "stage", stage)
        return gradient_of_one_step(
            folder,
            target,
            history_drafter if stage == "teacher" else drafter,
            make_samples(),
            teacher=teacher if "warmup_epochs" in STAGES[stage] else None,
            **STAGES[stage],
            **overrides,
        )


def all_stages(folder, models):
    return {stage: stage_gradient(stage, folder, models, **TWO_BY_TWO) for stage in STAGES}


def rank_with_nothing_to_learn(folder, models):
    target, drafter, *_ = models
    rank = torch.distributed.get_rank()

    def collate(features):
        batch = drafting_data_collator(features)
        batch["supervised"] &= rank == 0
        return batch

    args = make_args(folder, max_steps=3, learning_rate=1e-2, **TWO_BY_TWO)
    drafter = copy.deepcopy(drafter)
    trainer = DLiteTrainer(drafter, target, args, make_samples(16), data_collator=collate)
    trainer.train()
    weights = torch.cat([parameter.detach().flatten() for parameter in drafter.parameters()])
    everywhere = [torch.empty_like(weights) for _ in range(2)]
    torch.distributed.all_gather(everywhere, weights)
    return everywhere, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def sharded_parameters(folder, models):
    """The gradients of a drafter that FSDP2 shards, root parameters gathered for the forward alone, and its tau."""
    target, drafter, *_ = models
    drafter = copy.deepcopy(drafter)
    trainer = DLiteTrainer(drafter, target, make_args(folder, ddp_backend="gloo"), make_samples())
    batch, samples = take_batch(trainer), make_samples(3, seed=1)
    trainer.compute_loss(drafter, batch).backward()
    expected = {}
    for name, parameter in drafter.named_parameters():
        torch.distributed.all_reduce(parameter.grad)
        expected[name] = parameter.grad / 2
        parameter.grad = None
    expected_tau = live_tau(target, drafter, samples, trainer.args, trainer.accelerator)

    mesh = init_device_mesh("cpu", (2,))
    for module in (*drafter.layers, drafter):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    trainer.compute_loss(drafter, batch).backward()
    actual = {name: parameter.grad.full_tensor() for name, parameter in drafter.named_parameters()}
    tau = live_tau(target, drafter, samples, trainer.args, trainer.accelerator)
    return (actual, tau), (expected, expected_tau)


def run_in_both(folder):
    """What the two processes run."""
    models = torch.load(f"{folder}/in.pt", weights_only=False)
    parts = (all_stages, rank_with_nothing_to_learn, sharded_parameters)
    results = {part.__name__: part(folder, models) for part in parts}
    if torch.distributed.get_rank() == 0:
        torch.save(results, f"{folder}/out.pt")
    torch.distributed.barrier()
    # An ordinary exit aborts now and then, about once in six, as a thread of torch's meets the interpreter's end.
    os._exit(0)


@pytest.fixture(scope="module")
def models():
    from .targets import make_drafter, make_target

    target = make_target("llama")
    drafter, history_drafter, teacher = (make_drafter(target, history_window=window) for window in (0, W, W))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return target, drafter, teacher, history_drafter


@pytest.fixture(scope="module")
def results(tmp_path_factory, models):
    folder = tmp_path_factory.mktemp("distributed")
    torch.save(models, folder / "in.pt")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    code = "import sys; from tests.test_distributed import run_in_both; run_in_both(sys.argv[1])"
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    subprocess.run([*launcher, sys.executable, "-c", code, str(folder)], check=True, timeout=300, env=environment)
    return torch.load(folder / "out.pt", weights_only=False)


@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_do_not_change_the_gradient_of_any_stage(tmp_path, models, results, stage):
    whole, whole_loss = stage_gradient(stage, tmp_path, models, per_device_train_batch_size=8)
    parts, parts_loss = results["all_stages"][stage]
    assert parts_loss == pytest.approx(whole_loss, rel=1e-5)
    assert sum(gradient.abs().max() > 1e-3 for gradient in whole.values()) > len(whole) / 2
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-5, rtol=1e-5)


def test_a_rank_with_nothing_to_learn_neither_stops_nor_parts_from_the_other(models, results):
    (first, second), losses = results["rank_with_nothing_to_learn"]
    assert torch.equal(first, second)
    before = torch.cat([parameter.detach().flatten() for parameter in models[1].parameters()])
    assert (first - before).abs().max() > 1e-3
    assert len(losses) == 3 and all(loss > 0 for loss in losses)


def test_sharded_parameters_get_the_gradients_of_whole_ones(results):
    (actual, tau), (expected, expected_tau) = results["sharded_parameters"]
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-6, rtol=1e-5)
    assert tau == expected_tau
