# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The stages of a training: teacher, warm-up, transition, stable; what each changes, and what a resumption keeps."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, TrainerState

from dlite_hf import trainer as trainer_module
from dlite_hf import training_progress
from dlite_hf.generation.candidate_generator import DLiteCandidateGenerator
from dlite_hf.live_evaluation import live_tau
from dlite_hf.target import capture_hidden_states
from dlite_hf.trainer import DLiteTrainer
from dlite_hf.training_args import DLiteTrainingArguments
from dlite_hf.training_progress import TrainingProgress
from dlite_hf.training_record import TrainingRecord

from .test_trainer import gradient_of_one_step, make_args, make_samples, take_batch


W = 6
STAGES = {
    "teacher": {"ce_weight": 1.0, "tv_weight": 0.0},
    "warmup": {"warmup_epochs": 0.9},
    "transition": {"warmup_epochs": 0.2, "transition_epochs": 0.6},
    "stable": {},
}


@pytest.fixture
def teacher(tiny_llama, make_drafter):
    torch.manual_seed(5)
    teacher = make_drafter(tiny_llama, history_window=W)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return teacher


def make_trainer(folder, target, drafter, teacher=None, samples=None, **overrides):
    samples = make_samples() if samples is None else samples
    return DLiteTrainer(drafter, target, make_args(folder, **overrides), samples, teacher=teacher)


def at(trainer, epoch):
    trainer.state.epoch = epoch
    return trainer


def test_the_stages_follow_one_another(tmp_path, tiny_llama, make_drafter, teacher):
    trainer = make_trainer(
        tmp_path, tiny_llama, make_drafter(tiny_llama), teacher, warmup_epochs=2.0, transition_epochs=1.0
    )
    expected = {0.0: 0.0, 1.99: 0.0, 2.0: 0.0, 2.25: (1 - math.sqrt(0.5)) / 2, 2.5: 0.5, 3.0: 1.0, 7.0: 1.0}
    assert {epoch: at(trainer, epoch).stable_share for epoch in expected} == pytest.approx(expected)
    stages = ["warmup", "warmup", "transition", "transition", "transition", "stable", "stable"]
    assert [at(trainer, epoch).stage for epoch in expected] == stages
    assert make_trainer(tmp_path, tiny_llama, make_drafter(tiny_llama)).stage == "stable"
    assert make_trainer(tmp_path, tiny_llama, teacher, **STAGES["teacher"]).stage == "teacher"


def naive_losses(trainer, batch):
    """KL from the teacher, and the stable loss, of the batch as the definition has them."""
    weights = batch["weights"]
    target = trainer._run_target(batch)
    with torch.no_grad():
        log_q, log_t = (
            drafter.sequential_head.logits(
                drafter(**trainer._drafter_inputs(drafter, batch, target)).head_states
            ).log_softmax(dim=-1)
            for drafter in (trainer.drafter, trainer.teacher)
        )
    p = target.distribution.logits.softmax(dim=-1)[target.rows]
    divergence = (log_t.exp() * (log_t - log_q)).sum(dim=-1)
    cross_entropy = -log_q.gather(-1, p.argmax(dim=-1)[..., None])[..., 0]
    stable = 0.1 * cross_entropy + (log_q.exp() - p).abs().sum(dim=-1)
    return [((weights * each).sum() / weights.sum()).item() for each in (divergence, stable)]


@pytest.mark.parametrize("epoch, share", [(0.0, 0.0), (1.5, 0.5), (2.0, 1.0)])
def test_the_loss_blends_the_divergence_into_the_stable_loss(
    tmp_path, tiny_llama, make_drafter, teacher, epoch, share
):
    trainer = make_trainer(
        tmp_path, tiny_llama, make_drafter(tiny_llama), teacher, warmup_epochs=1.0, transition_epochs=1.0
    )
    batch = take_batch(trainer)
    divergence, stable = naive_losses(trainer, batch)
    assert divergence > 0.1
    loss = at(trainer, epoch).compute_loss(trainer.model, batch).item()
    assert loss == pytest.approx((1 - share) * divergence + share * stable, rel=1e-5)


def test_the_head_is_the_teachers_until_the_warmup_ends(tmp_path, tiny_llama, make_drafter, teacher):
    def train(steps):
        # Two steps an epoch.
        trainer = make_trainer(
            tmp_path,
            tiny_llama,
            make_drafter(tiny_llama),
            teacher,
            warmup_epochs=1.0,
            max_steps=steps,
            weight_decay=0.1,
        )
        before = copy.deepcopy(trainer.drafter.state_dict())
        trainer.train()
        return {name for name, value in trainer.drafter.state_dict().items() if not torch.equal(value, before[name])}

    drafter = make_drafter(tiny_llama)
    make_trainer(tmp_path, tiny_llama, drafter, teacher, warmup_epochs=1.0)
    for name, value in drafter.sequential_head.state_dict().items():
        assert torch.equal(value, teacher.sequential_head.state_dict()[name])
    names = {name for name, _ in make_drafter(tiny_llama).named_parameters()}
    head = {name for name in names if name.startswith("sequential_head.")}
    assert train(2) == names - head
    assert train(4) == names


def test_teacher_and_target_stay_as_they_were(tmp_path, tiny_llama, make_drafter, teacher):
    before = [copy.deepcopy(each.state_dict()) for each in (teacher, tiny_llama)]
    make_trainer(
        tmp_path,
        tiny_llama,
        make_drafter(tiny_llama),
        teacher,
        warmup_epochs=0.5,
        transition_epochs=0.5,
        max_steps=3,
    ).train()
    for model, state in zip((teacher, tiny_llama), before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_does_not_change_the_gradient_of_any_stage(
    tmp_path, tiny_llama, make_drafter, teacher, stage, monkeypatch
):
    drafter = make_drafter(tiny_llama, history_window=W if stage == "teacher" else 0)
    taught_by = teacher if stage in ("warmup", "transition") else None
    if stage == "transition":  # the step is the first; put it into the middle of the blend
        monkeypatch.setattr(DLiteTrainer, "stable_share", 0.3)
        monkeypatch.setattr(DLiteTrainer, "stage", "transition")
    arguments = {**STAGES[stage], "teacher": taught_by}
    whole, whole_loss = gradient_of_one_step(
        tmp_path, tiny_llama, drafter, make_samples(), per_device_train_batch_size=8, **arguments
    )
    parts, parts_loss = gradient_of_one_step(
        tmp_path,
        tiny_llama,
        drafter,
        make_samples(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        **arguments,
    )
    assert parts_loss == pytest.approx(whole_loss, rel=1e-5)
    assert sum(gradient.abs().max() > 1e-3 for gradient in whole.values()) > len(whole) / 2
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-5, rtol=1e-5)


def test_a_run_resumes_across_the_end_of_the_warmup(tmp_path, tiny_llama, make_drafter, teacher):
    def train(folder, resume=None):
        # Four steps an epoch: warm-up for 3, transition for 1, stable from 5 on.
        trainer = make_trainer(
            folder,
            tiny_llama,
            make_drafter(tiny_llama),
            teacher,
            make_samples(16),
            warmup_epochs=0.75,
            transition_epochs=0.25,
            max_steps=6,
            max_anchors=3,
            learning_rate=1e-2,
            save_strategy="steps",
            save_steps=2,
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole, resumed = train(tmp_path / "whole"), train(tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-2"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    states = [trainer.optimizer.state_dict()["state"] for trainer in (whole, resumed)]
    assert states[0].keys() == states[1].keys()
    for index, state in states[0].items():
        assert all(torch.equal(torch.as_tensor(value), states[1][index][key]) for key, value in state.items())
    assert whole.lr_scheduler.get_last_lr() == resumed.lr_scheduler.get_last_lr()
    counts = [
        {
            stage: {key: each[key] for key in ("steps", "anchors", "tokens")}
            for stage, each in t.progress.stages.items()
        }
        for t in (whole, resumed)
    ]
    assert counts[0] == counts[1]
    assert {stage: each["steps"] for stage, each in counts[0].items()} == {"warmup": 3, "transition": 1, "stable": 2}
    shares = [[entry["stable_share"] for entry in t.state.log_history if "loss" in entry] for t in (whole, resumed)]
    assert shares[0] == shares[1]


def test_progress_counts_what_was_trained_on(tmp_path, tiny_llama, make_drafter):
    samples = make_samples()
    trainer = make_trainer(tmp_path, tiny_llama, make_drafter(tiny_llama), samples=samples, max_steps=4)
    trainer.train()
    # Two epochs over all samples, every valid anchor of them.
    progress = trainer.progress.stages["stable"]
    assert progress["tokens"] == 2 * sum(len(sample["input_ids"]) for sample in samples)
    assert progress["anchors"] == 2 * sum(sum(sample["supervised"]) - 1 for sample in samples)
    assert progress["steps"] == 4 and progress["seconds"] > 0
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["tokens_per_second"] > 0 for entry in logs)
    assert [entry["remaining_hours"] > 0 for entry in logs] == [True, True, True, False]


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("window", [0, W])
def test_the_training_forward_says_what_generation_drafts(tmp_path, tiny_llama, make_drafter, window, group_size):
    drafter = make_drafter(tiny_llama, history_window=window, anchor_group_size=group_size)
    trainer = make_trainer(tmp_path, tiny_llama, drafter)
    batch = take_batch(trainer)
    drafted = []
    for row, anchor in batch["anchors"].tolist():
        prefix = batch["input_ids"][row : row + 1, : anchor + 1]
        generator = DLiteCandidateGenerator(drafter, tiny_llama, GenerationConfig(max_length=1000, do_sample=False))
        with (
            torch.no_grad(),
            capture_hidden_states(tiny_llama, drafter.config.captured_layer_ids, max(window, 1)) as capture,
        ):
            tiny_llama(prefix[:, :-1])
        outputs = {"hidden_states": capture.hidden_states}
        drafted.append(generator.get_candidates(prefix, model_outputs=outputs)[0][0, anchor + 1 :])
    batch["draft_token_ids"] = torch.stack(drafted)
    assert batch["draft_token_ids"].unique().numel() > 10
    with torch.no_grad():
        target = trainer._run_target(batch)
        states = drafter(**trainer._drafter_inputs(drafter, batch, target)).head_states
        logits = drafter.sequential_head.logits(states)
    assert torch.equal(logits.argmax(dim=-1), batch["draft_token_ids"])


def test_nothing_leaks_from_the_future_or_another_row(tmp_path, tiny_llama, make_drafter):
    drafter = make_drafter(tiny_llama, history_window=W)
    trainer = make_trainer(tmp_path, tiny_llama, drafter)
    batch = take_batch(trainer)
    rows, anchors = batch["anchors"].unbind(dim=1)
    predicted = anchors[:, None] + torch.arange(1, drafter.config.num_draft_tokens + 1)

    @torch.no_grad()
    def states(input_ids):
        changed = {**batch, "input_ids": input_ids}
        drafted = predicted.clamp_max(input_ids.shape[1] - 1)
        changed["draft_token_ids"] = input_ids[rows[:, None], drafted]
        changed["previous_token_ids"] = input_ids[rows[:, None], anchors[:, None]]
        inputs = trainer._drafter_inputs(drafter, changed, trainer._run_target(changed))
        return drafter(**inputs).head_states

    before, some_changed = states(batch["input_ids"]), False
    for row in range(batch["input_ids"].shape[0]):
        for t in range(2, int(batch["attention_mask"][row].sum()), 3):
            input_ids = batch["input_ids"].clone()
            input_ids[row, t] = (input_ids[row, t] + 1) % 90
            changed = (states(input_ids) - before).abs().amax(dim=-1) > 1e-5
            some_changed |= bool(changed.any())
            assert not changed[(rows != row)[:, None] | (predicted <= t)].any(), (row, t)
    assert some_changed


CHOOSING = {
    "max_steps": 3,
    "learning_rate": 1e-2,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
}


def test_the_best_checkpoint_is_the_one_with_the_best_tau(tmp_path, tiny_llama, make_drafter, monkeypatch):
    taus = iter([1.5, 2.5, 2.0])
    monkeypatch.setattr(trainer_module, "live_tau", lambda *args: next(taus))
    args = make_args(tmp_path, **CHOOSING)
    trainer = DLiteTrainer(make_drafter(tiny_llama), tiny_llama, args, make_samples(), make_samples(4, seed=1))
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[2] < losses[1]  # the loss alone would have chosen the last
    # What a checkpoint holds is its own step; what the trainer holds in the end is the best one.
    steps = [TrainingRecord.load(tmp_path / f"checkpoint-{step}").runs[-1].best_step for step in (2, 3)]
    assert (steps, trainer.training_record().runs[-1].best_step) == ([None, None], 2)
    assert trainer.state.best_metric == 2.5
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")


@pytest.mark.parametrize(("acceptances", "best"), [((0.1, 0.3, 0.2), 2), ((0.3, 0.1, 0.2), 1), ((0.1, 0.1, 0.2), 3)])
def test_a_tie_in_tau_goes_to_the_larger_expected_tau(
    tmp_path, tiny_llama, make_drafter, monkeypatch, acceptances, best
):
    args, accepted = make_args(tmp_path, **CHOOSING), iter(acceptances)
    trainer = DLiteTrainer(make_drafter(tiny_llama), tiny_llama, args, make_samples(), make_samples(4, seed=1))

    def live_tau(*args):
        trainer._statistics[0] = torch.tensor([1.0, 0.0, next(accepted)])[:, None]  # one row, accepted so often
        return 1.5

    monkeypatch.setattr(trainer_module, "live_tau", live_tau)
    trainer.train()
    assert trainer.state.best_metric == 1.5
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")


def test_evaluation_generates_for_held_out_prompts(tmp_path, tiny_llama, make_drafter, monkeypatch):
    samples = make_samples(5, seed=1)
    samples[0]["supervised"] = [t in (4, 5, 8, 9) for t in range(len(samples[0]["input_ids"]))]
    prompts, generate = [], type(tiny_llama).generate

    def spy(self, *args, **kwargs):
        prompts.append(kwargs["input_ids"][0].tolist())
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(tiny_llama), "generate", spy)
    args = make_args(tmp_path, eval_num_prompts=4, eval_max_new_tokens=12)
    drafter = make_drafter(tiny_llama)
    metrics = DLiteTrainer(drafter, tiny_llama, args, eval_dataset=samples).evaluate()
    ids = [sample["input_ids"] for sample in samples]
    starts = [8, *[sample["supervised"].index(True) for sample in samples[1:]]]
    assert prompts == [each[:start] for each, start in zip(ids, starts, strict=True)][:4]
    assert 1 <= metrics["eval_tau"] <= 6


def test_refuses_a_run_that_ends_in_its_warmup(tmp_path, tiny_llama, make_drafter, teacher):
    # Two steps an epoch; the Trainer rounds the 1.5 epochs of 3 steps up to 2.
    trainer = make_trainer(tmp_path, tiny_llama, make_drafter(tiny_llama), teacher, warmup_epochs=1.75, max_steps=3)
    with pytest.raises(ValueError, match="`warmup_epochs` 1.75 .* more than the 1.5 epochs of this run"):
        trainer.train()


def test_refuses_a_teacher_that_does_not_fit(tmp_path, tiny_llama, make_drafter, teacher):
    drafter = make_drafter(tiny_llama)
    with pytest.raises(ValueError, match="given.*0.0.*both or neither"):
        make_trainer(tmp_path, tiny_llama, drafter, teacher)
    with pytest.raises(ValueError, match="missing.*1.0.*both or neither"):
        make_trainer(tmp_path, tiny_llama, drafter, warmup_epochs=1.0)
    with pytest.raises(ValueError, match="`history_window` 0"):
        make_trainer(tmp_path, tiny_llama, drafter, make_drafter(tiny_llama), warmup_epochs=1.0)
    with pytest.raises(TypeError, match="LlamaForCausalLM"):
        make_trainer(tmp_path, tiny_llama, drafter, tiny_llama, warmup_epochs=1.0)
    other = make_drafter(tiny_llama, sequential_rank=24)
    with pytest.raises(ValueError, match=f"`sequential_rank` is {teacher.config.sequential_rank}.*24"):
        make_trainer(tmp_path, tiny_llama, other, teacher, warmup_epochs=1.0)
    for overrides in ({"warmup_epochs": -1.0}, {"transition_epochs": 1.0}):
        with pytest.raises(ValueError, match="transition follows a warm-up"):
            make_args(tmp_path, **overrides)
    with pytest.raises(ValueError, match="`eval_num_prompts` is 0"):
        make_args(tmp_path, eval_num_prompts=0)


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_a_reduced_vocabulary_trains_as_the_definition_says(tmp_path, tiny_llama, make_drafter, draft_vocab_size):
    ids = None if draft_vocab_size is None else range(5, 5 + draft_vocab_size)
    drafter = make_drafter(tiny_llama, draft_vocab_ids=ids)
    trainer = make_trainer(tmp_path, tiny_llama, drafter)
    batch = take_batch(trainer)
    with torch.no_grad():
        states = drafter(**trainer._drafter_inputs(drafter, batch, trainer._run_target(batch))).head_states
        q = drafter.sequential_head.logits(states).softmax(dim=-1)
        logits = tiny_llama(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    rows, anchors = batch["anchors"].unbind(dim=1)
    predicting = (anchors[:, None] + torch.arange(drafter.config.num_draft_tokens)).clamp_max(logits.shape[1] - 1)
    p = logits[rows[:, None], predicting].softmax(dim=-1)
    top = p.argmax(dim=-1)
    q_top = q.gather(-1, top[..., None])[..., 0]
    cross_entropy = torch.where(q_top > 0, -q_top.log(), torch.zeros(()))
    losses = 0.1 * cross_entropy + (q - p).abs().sum(dim=-1)
    expected = (batch["weights"] * losses).sum() / batch["weights"].sum()
    assert trainer.compute_loss(drafter, batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_head_thaws_where_the_transition_begins(tmp_path, tiny_llama, make_drafter, teacher):
    # Two steps an epoch: one of warm-up, then one of transition, whose loss is still the divergence alone.
    trainer = make_trainer(
        tmp_path, tiny_llama, make_drafter(tiny_llama), teacher,
        warmup_epochs=0.5, transition_epochs=0.5, max_steps=2, warmup_steps=0, learning_rate=1e-2,
    )  # fmt: skip
    before = copy.deepcopy(trainer.drafter.sequential_head.state_dict())
    trainer.train()
    assert {stage: each["steps"] for stage, each in trainer.progress.stages.items()} == {"warmup": 1, "transition": 1}
    assert not any(
        torch.equal(value, before[name]) for name, value in trainer.drafter.sequential_head.state_dict().items()
    )


@pytest.mark.parametrize(
    "name, value", [("num_draft_tokens", 4), ("anchor_group_size", 2), ("draft_vocab_ids", range(40))]
)
def test_refuses_a_teacher_of_another_shape(tmp_path, tiny_llama, make_drafter, name, value):
    other = make_drafter(tiny_llama, history_window=W, **{name: value})
    with pytest.raises(ValueError, match=f"`{name.replace('_ids', '_size')}`"):
        make_trainer(tmp_path, tiny_llama, make_drafter(tiny_llama), other, warmup_epochs=1.0)


def test_the_divergence_over_a_reduced_vocabulary(tmp_path, tiny_llama, make_drafter):
    ids = torch.arange(1, 96, 3)
    torch.manual_seed(5)
    teacher = make_drafter(tiny_llama, history_window=W, draft_vocab_ids=ids.tolist())
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    drafter = make_drafter(tiny_llama, draft_vocab_ids=ids.tolist())
    trainer = make_trainer(tmp_path, tiny_llama, drafter, teacher, warmup_epochs=1.0)
    batch = take_batch(trainer)
    target = trainer._run_target(batch)
    with torch.no_grad():
        log_q, log_t = (
            each.sequential_head.logits(each(**trainer._drafter_inputs(each, batch, target)).head_states)[..., ids]
            .log_softmax(dim=-1)
            for each in (drafter, teacher)
        )  # fmt: skip
    divergence = (log_t.exp() * (log_t - log_q)).sum(dim=-1)
    expected = (batch["weights"] * divergence).sum() / batch["weights"].sum()
    assert expected > 0.1
    assert trainer.compute_loss(drafter, batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_token_labels_outside_the_draft_vocabulary_have_no_cross_entropy(tmp_path, tiny_llama, make_drafter):
    ids = torch.arange(1, 96, 3)
    drafter = make_drafter(tiny_llama, draft_vocab_ids=ids.tolist())
    trainer = make_trainer(tmp_path, tiny_llama, drafter, ce_labels="token", ce_weight=1.0, tv_weight=0.0)
    batch = take_batch(trainer)
    with torch.no_grad():
        states = drafter(**trainer._drafter_inputs(drafter, batch, trainer._run_target(batch))).head_states
        log_q = drafter.sequential_head.logits(states).log_softmax(dim=-1)
    labels = batch["draft_token_ids"]
    inside = torch.isin(labels, ids)
    assert inside.any() and not inside.all()
    cross_entropy = torch.where(inside, -log_q.gather(-1, labels[..., None])[..., 0], 0.0)
    expected = (batch["weights"] * cross_entropy).sum() / batch["weights"].sum()
    assert trainer.compute_loss(drafter, batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_every_step_and_process_draws_its_own_anchors(tmp_path, tiny_llama, make_drafter):
    samples = [{"input_ids": list(range(40)), "supervised": [False] * 5 + [True] * 35}] * 4
    trainer = make_trainer(tmp_path, tiny_llama, make_drafter(tiny_llama), samples=samples, max_anchors=3)
    first = take_batch(trainer)["anchors"]
    assert torch.equal(take_batch(trainer)["anchors"], first)
    trainer.state.global_step = 1
    assert not torch.equal(take_batch(trainer)["anchors"], first)
    trainer.state.global_step = 0
    type(trainer.args).process_index, own = 1, type(trainer.args).process_index
    try:
        assert not torch.equal(take_batch(trainer)["anchors"], first)
    finally:
        type(trainer.args).process_index = own


@pytest.mark.parametrize("across_devices", [True, False])
def test_a_step_counts_all_processes(tmp_path, tiny_llama, make_drafter, monkeypatch, across_devices):
    trainer = make_trainer(
        tmp_path, tiny_llama, make_drafter(tiny_llama), average_tokens_across_devices=across_devices
    )
    monkeypatch.setattr(trainer.accelerator, "gather", lambda totals: torch.cat([totals, 2 * totals]))
    [batch], total = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
    own = batch["weights"].sum().item()
    assert total.item() == pytest.approx(3 * own if across_devices else own)
    counts = trainer.progress.counts()["stable"]
    assert counts["tokens"] == 3 * batch["attention_mask"].sum() and counts["anchors"] == 3 * len(batch["anchors"])


def test_seconds_and_speed_by_the_clock(monkeypatch):
    clock = iter([0.0, 100.0, 110.0, 114.0])
    monkeypatch.setattr(training_progress.time, "perf_counter", lambda: next(clock))
    progress, state = TrainingProgress(), TrainerState(max_steps=12, num_train_epochs=1)
    progress.on_train_begin(DLiteTrainingArguments("unused", use_cpu=True), state, None)
    for _ in range(2):
        progress.count("warmup", torch.tensor([1.0, 5.0, 40.0]))
    state.global_step = 2
    # 80 tokens in 10 s; 10 steps remain, at 5 s each.
    assert progress.speed(state) == pytest.approx({"tokens_per_second": 8.0, "remaining_hours": 50 / 3600})
    progress.count("stable", torch.tensor([1.0, 5.0, 40.0]))
    state.global_step = 3
    assert progress.speed(state) == pytest.approx({"tokens_per_second": 10.0, "remaining_hours": 36 / 3600})
    assert {stage: each["seconds"] for stage, each in progress.stages.items()} == {"warmup": 10.0, "stable": 4.0}


def test_every_evaluation_set_has_its_own_tau(tmp_path, tiny_llama, make_drafter, monkeypatch):
    taus = iter([1.5, 2.5])
    monkeypatch.setattr(trainer_module, "live_tau", lambda *args: next(taus))
    sets = {"a": make_samples(2, seed=1), "b": make_samples(2, seed=2)}
    metrics = DLiteTrainer(make_drafter(tiny_llama), tiny_llama, make_args(tmp_path), eval_dataset=sets).evaluate()
    assert (metrics["eval_a_tau"], metrics["eval_b_tau"]) == (1.5, 2.5) and "eval_tau" not in metrics


def test_tau_is_greedy_and_without_dropout(tmp_path, tiny_llama, make_drafter, monkeypatch):
    tiny_llama.generation_config.do_sample = True
    drafter, seen, generate = make_drafter(tiny_llama, attention_dropout=0.5), [], type(tiny_llama).generate

    def spy(self, *args, **kwargs):
        seen.append((kwargs["do_sample"], drafter.training))
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(tiny_llama), "generate", spy)
    trainer = DLiteTrainer(drafter.train(), tiny_llama, make_args(tmp_path))
    live_tau(tiny_llama, drafter, make_samples(2), trainer.args, trainer.accelerator)
    assert seen == [(False, False)] * 2 and drafter.training


def test_processes_share_the_prompts_of_an_evaluation(tmp_path, tiny_llama, make_drafter, monkeypatch):
    prompts = []
    monkeypatch.setattr(
        type(tiny_llama), "generate", lambda self, input_ids, **kwargs: prompts.append(input_ids[0].tolist())
    )
    args, samples = make_args(tmp_path, eval_num_prompts=5), make_samples(7)
    for rank in range(2):
        accelerator = SimpleNamespace(process_index=rank, num_processes=2, device="cpu", gather=lambda counts: counts)
        live_tau(tiny_llama, make_drafter(tiny_llama), samples, args, accelerator)
    starts = [sample["supervised"].index(True) for sample in samples]
    expected = [sample["input_ids"][:start] for sample, start in zip(samples, starts, strict=True)]
    assert prompts == [expected[i] for i in (0, 2, 4, 1, 3)]
