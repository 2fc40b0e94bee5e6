# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The trainer: what it reads from the target, how it normalises, what it saves, and that it trains."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from dlite_hf import DLiteForDrafting, speculation_statistics
from dlite_hf import trainer as trainer_module
from dlite_hf.target import capture_hidden_states, embed_tokens, gather_features
from dlite_hf.trainer import DLiteTrainer
from dlite_hf.training_args import DLiteTrainingArguments
from dlite_hf.training_record import TrainingRecord, describe_data

from .targets import make_chatml_tokenizer


TIMED = ("total_flos", "tokens_per_second", "remaining_hours")


def make_args(folder, **overrides):
    defaults = {
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "max_steps": 1,
    }
    return DLiteTrainingArguments(str(folder), **{**defaults, **overrides})


def make_samples(number=8, seed=0):
    """Random tokens: a prompt of 3 to 9, an answer of 4 to 19."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(number):
        prompt = int(torch.randint(3, 10, (), generator=generator))
        answer = int(torch.randint(4, 20, (), generator=generator))
        ids = torch.randint(95, (prompt + answer,), generator=generator).tolist()
        samples.append({"input_ids": ids, "supervised": [False] * prompt + [True] * answer})
    return samples


def take_batch(trainer):
    return next(iter(trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)[0]))


@pytest.fixture
def seen(monkeypatch):
    """The arguments of the drafter's last forward and of the last loss."""
    seen = SimpleNamespace(model=None, loss=None)
    loss, forward = trainer_module.drafting_loss, DLiteForDrafting.forward

    def seeing_loss(*args, **kwargs):
        seen.loss = args
        return loss(*args, **kwargs)

    def seeing_forward(self, *args, **kwargs):
        seen.model = kwargs
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(trainer_module, "drafting_loss", seeing_loss)
    monkeypatch.setattr(DLiteForDrafting, "forward", seeing_forward)
    return seen


@pytest.mark.parametrize("keeps_logits", [True, False])
def test_features_and_target_probabilities_equal_a_forward_from_scratch(
    tmp_path, tiny_llama, make_drafter, seen, keeps_logits
):
    drafter = make_drafter(tiny_llama, anchor_group_size=2)
    scratch = copy.deepcopy(tiny_llama)
    if not keeps_logits:
        forward = tiny_llama.forward
        tiny_llama.forward = lambda input_ids, attention_mask, use_cache: forward(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache
        )
    trainer = DLiteTrainer(drafter, tiny_llama, make_args(tmp_path), make_samples())
    batch = take_batch(trainer)
    trainer.compute_loss(drafter, batch)

    _, _, distribution, target_rows, weights, *_ = seen.loss
    num_compared = 0
    for n, (row, anchor) in enumerate(batch["anchors"].tolist()):
        ids = batch["input_ids"][row, : batch["attention_mask"][row].sum()]
        with torch.no_grad():
            outputs = scratch(ids[None], output_hidden_states=True)
        expected = torch.stack([outputs.hidden_states[i + 1][0, anchor - 1] for i in drafter.config.target_layer_ids])
        torch.testing.assert_close(seen.model["context_features"][n], expected, atol=1e-5, rtol=1e-5)
        assert seen.model["previous_token_ids"][n].tolist() == ids[anchor - 1 : anchor + 1].tolist()
        tokens = [*ids[anchor - 1 : anchor + 1].tolist(), *[drafter.config.mask_token_id] * 5]
        assert torch.equal(seen.model["inputs_embeds"][n], scratch.get_input_embeddings().weight[tokens])
        for k in range(1, 6):
            if weights[n, k - 1] > 0:
                # The distribution of token a + k is predicted at a + k - 1.
                p = outputs.logits[0, anchor + k - 1].softmax(dim=-1)
                torch.testing.assert_close(
                    distribution.logits[target_rows[n, k - 1]].softmax(-1), p, atol=1e-5, rtol=1e-5
                )
                assert seen.model["draft_token_ids"][n, k - 1] == ids[anchor + k]
                num_compared += 1
    assert num_compared > 50


def test_refuses_a_target_whose_layers_cannot_be_read(tmp_path, tiny_llama, make_drafter):
    trainer = DLiteTrainer(make_drafter(tiny_llama), tiny_llama, make_args(tmp_path), make_samples())
    batch = take_batch(trainer)
    length = batch["input_ids"].shape[1]
    tiny_llama.forward = lambda **kwargs: SimpleNamespace(logits=torch.zeros(4, length, 97))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*\[0, 1, 3\]"):
        trainer.compute_loss(trainer.model, batch)


def gradient_of_one_step(folder, target, drafter, samples, teacher=None, **overrides):
    """The gradient that the optimizer sees, and the loss that is logged."""
    drafter = copy.deepcopy(drafter)
    args = make_args(folder, optim="sgd", learning_rate=1.0, warmup_steps=0, max_grad_norm=0, **overrides)
    trainer = DLiteTrainer(drafter, target, args, samples, teacher=teacher)
    before = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
    trainer.train()
    gradient = {name: before[name] - parameter.detach() for name, parameter in drafter.named_parameters()}
    return gradient, trainer.state.log_history[0]["loss"]


@pytest.mark.parametrize("max_anchors", [512, 5])
def test_accumulation_does_not_change_the_gradient(tmp_path, tiny_llama, make_drafter, max_anchors):
    drafter, samples = make_drafter(tiny_llama), make_samples()
    whole, whole_loss = gradient_of_one_step(
        tmp_path, tiny_llama, drafter, samples, per_device_train_batch_size=8, max_anchors=max_anchors
    )
    parts, parts_loss = gradient_of_one_step(
        tmp_path,
        tiny_llama,
        drafter,
        samples,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_anchors=max_anchors,
    )
    assert parts_loss == pytest.approx(whole_loss, rel=1e-5)
    for name, gradient in whole.items():
        assert gradient.abs().max() > 1e-3, name
        torch.testing.assert_close(parts[name], gradient, atol=1e-5, rtol=1e-5)


def test_the_target_stays_as_it_was(tmp_path, tiny_llama, make_drafter):
    before = copy.deepcopy(tiny_llama.state_dict())
    requires_grad = [parameter.requires_grad for parameter in tiny_llama.parameters()]
    DLiteTrainer(make_drafter(tiny_llama), tiny_llama, make_args(tmp_path, max_steps=2), make_samples()).train()
    assert all(torch.equal(value, before[name]) for name, value in tiny_llama.state_dict().items())
    assert all(parameter.grad is None for parameter in tiny_llama.parameters())
    assert [parameter.requires_grad for parameter in tiny_llama.parameters()] == requires_grad
    assert not any(module._forward_hooks for module in tiny_llama.modules())


def test_a_checkpoint_is_the_drafter_alone(tmp_path, tiny_llama, make_drafter):
    drafter = make_drafter(tiny_llama)
    args = make_args(tmp_path, save_strategy="steps", save_steps=1)
    DLiteTrainer(drafter, tiny_llama, args, make_samples()).train()
    folder = tmp_path / "checkpoint-1"
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == drafter.state_dict().keys()
    assert sorted(path.name for path in folder.glob("*.safetensors")) == ["model.safetensors"]
    reloaded = DLiteForDrafting.from_pretrained(folder)
    assert all(torch.equal(value, saved[name]) for name, value in reloaded.state_dict().items())


def test_the_record_of_the_run_lies_beside_the_weights(tmp_path, tiny_llama, make_drafter):
    tiny_llama.config.name_or_path = "owner/tiny"
    samples = make_samples()
    earlier = DLiteTrainer(make_drafter(tiny_llama, history_window=4), tiny_llama, make_args(tmp_path / "a"), samples)
    earlier.train()
    trainer = DLiteTrainer(make_drafter(tiny_llama), tiny_llama, make_args(tmp_path / "b", max_steps=2), samples)
    trainer.earlier_runs = earlier.training_record().runs
    trainer.training_data = [describe_data("answers.jsonl", [{"license": "mit", "source": "here"}] * 8)]
    trainer.train()
    trainer.save_model()
    first, second = TrainingRecord.load(tmp_path / "b").runs
    assert [(stage.stage, stage.steps) for run in (first, second) for stage in run.stages] == [
        ("teacher", 1),
        ("stable", 2),
    ]
    assert second.stages[0].anchors == sum(sum(sample["supervised"]) - 1 for sample in samples)
    assert (first.history_window, second.history_window) == (4, 0)
    assert second.data == trainer.training_data and second.target.dtype == "float32"

    trainer.create_model_card(license="mit", model_name="owner/tiny-DLite")
    card = ModelCard.load(tmp_path / "b" / "README.md")
    assert card.data.base_model == "owner/tiny" and card.data.license == "mit"
    assert "stable" in card.text and "teacher" in card.text and "owner/tiny-DLite" in card.text


def test_a_resumed_run_equals_one_without_interruption(tmp_path, tiny_llama, make_drafter):
    def train(folder, resume=False):
        # Fewer anchors than there are, so that drawing them matters; 16 samples, so that step 3 begins no epoch.
        args = make_args(folder, max_steps=4, save_strategy="steps", save_steps=2, max_anchors=3, learning_rate=1e-2)
        drafter = make_drafter(tiny_llama)
        trainer = DLiteTrainer(drafter, tiny_llama, args, make_samples(16))
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
        return trainer

    whole = train(tmp_path)
    resumed = train(tmp_path, resume=True)
    assert resumed.state.global_step == whole.state.global_step == 4
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    untimed = [
        [{key: value for key, value in entry.items() if key not in TIMED} for entry in trainer.state.log_history[:4]]
        for trainer in (whole, resumed)
    ]
    assert untimed[0] == untimed[1]


def test_logs_acceptance_apart_for_training_and_evaluation(tmp_path, tiny_llama, make_drafter):
    args = make_args(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=2, logging_steps=3)
    trainer = DLiteTrainer(make_drafter(tiny_llama), tiny_llama, args, make_samples(), make_samples(4, seed=1))
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "expected_tau" in entry]
    eval_logs = [entry for entry in trainer.state.log_history if "eval_expected_tau" in entry]
    assert [entry["step"] for entry in logs] == [3] and [entry["step"] for entry in eval_logs] == [2, 3]
    for entry, prefix in ((logs[0], ""), (eval_logs[0], "eval_")):
        acceptance = [entry[f"{prefix}acceptance_{k}"] for k in range(1, 6)]
        assert all(0 <= each <= 1 for each in [*acceptance, entry[f"{prefix}accuracy"]])
        expected = 1 + sum(math.prod(acceptance[:k]) for k in range(1, 6))
        assert entry[f"{prefix}expected_tau"] == pytest.approx(expected, rel=1e-5)
        assert math.isfinite(entry[f"{prefix}loss"])


def test_evaluation_repeats_itself(tmp_path, tiny_llama, make_drafter):
    trainer = DLiteTrainer(
        make_drafter(tiny_llama), tiny_llama, make_args(tmp_path, max_anchors=3), eval_dataset={"held": make_samples()}
    )
    first, second = trainer.evaluate(), trainer.evaluate()
    for key in ("eval_held_loss", "eval_held_accuracy", "eval_held_expected_tau"):
        assert first[key] == second[key]


def test_bf16_trains_with_finite_losses(tmp_path, tiny_llama, make_drafter):
    drafter = make_drafter(tiny_llama)
    trainer = DLiteTrainer(drafter, tiny_llama.bfloat16(), make_args(tmp_path, bf16=True, max_steps=2), make_samples())
    trainer.train()
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    assert all(parameter.dtype == torch.float32 and parameter.isfinite().all() for parameter in drafter.parameters())


def test_a_batch_with_nothing_to_learn_changes_nothing(tmp_path, tiny_llama, make_drafter):
    samples = [{"input_ids": [5, 6, 7, 8], "supervised": [False, True, False, True]}] * 4
    gradient, loss = gradient_of_one_step(tmp_path, tiny_llama, make_drafter(tiny_llama), samples)
    assert loss == 0
    assert all((each == 0).all() for each in gradient.values())


def test_ce_labels_choose_the_label(tmp_path, tiny_llama, make_drafter):
    losses = {}
    for ce_labels in ("argmax", "token"):
        args = make_args(tmp_path, ce_labels=ce_labels, ce_weight=1.0, tv_weight=0.0)
        trainer = DLiteTrainer(make_drafter(tiny_llama), tiny_llama, args, make_samples())
        batch = take_batch(trainer)
        losses[ce_labels] = trainer.compute_loss(trainer.model, batch).item()
    with torch.no_grad():
        head_states = trainer.model(**forward_inputs(trainer, batch)).head_states
        log_q = trainer.model.sequential_head.output_proj(head_states).log_softmax(dim=-1)
    cross_entropy = -log_q.gather(-1, batch["draft_token_ids"][..., None])[..., 0]
    expected = (cross_entropy * batch["weights"]).sum() / batch["weights"].sum()
    assert losses["token"] == pytest.approx(expected.item(), rel=1e-5)
    assert losses["argmax"] != losses["token"]


def test_conversations_are_tokenised_on_the_way_in(tmp_path, tiny_llama, make_drafter):
    tiny_llama.generation_config.eos_token_id = 1
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    args = make_args(tmp_path, max_length=40)
    corpus = [{"messages": messages}, {"messages": [messages[0], {**messages[1], "content": "x" * 50}]}]
    trainer = DLiteTrainer(make_drafter(tiny_llama), tiny_llama, args, corpus, corpus, make_chatml_tokenizer())
    assert [sum(sample["supervised"]) for sample in trainer.train_dataset] == [12, 19]
    assert [len(sample["input_ids"]) for sample in trainer.eval_dataset] == [33, 40]
    trainer.train()
    with pytest.raises(ValueError, match="processing_class"):
        DLiteTrainer(make_drafter(tiny_llama), tiny_llama, args, corpus)


def test_refuses_what_does_not_fit(tmp_path, tiny_llama, make_drafter):
    with pytest.raises(TypeError, match="LlamaForCausalLM"):
        DLiteTrainer(tiny_llama, tiny_llama, make_args(tmp_path), make_samples())
    other = LlamaForCausalLM(LlamaConfig(**{**tiny_llama.config.to_dict(), "num_hidden_layers": 5}))
    with pytest.raises(ValueError, match="layers 4.*has 5"):
        DLiteTrainer(make_drafter(tiny_llama), other, make_args(tmp_path), make_samples())


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_length", 2),
        ("max_anchors", 0),
        ("loss_decay", 0.0),
        ("tv_weight", -1.0),
        ("ce_labels", "teacher"),
        ("eval_num_prompts", 0),
        ("eval_max_new_tokens", 2),
    ],
)
def test_arguments_are_validated(tmp_path, field, value):
    with pytest.raises(ValueError, match=f"`{field}` .*{value}"):
        make_args(tmp_path, **{field: value})


def test_samples_are_cut_where_conversations_are(tmp_path, tiny_llama, make_drafter):
    args = make_args(tmp_path, max_length=7)
    trainer = DLiteTrainer(make_drafter(tiny_llama), tiny_llama, args, make_samples(), make_samples(4, seed=1))
    assert take_batch(trainer)["input_ids"].shape[1] == 7
    assert next(iter(trainer.get_eval_dataloader()))["input_ids"].shape[1] == 7


def test_the_loss_of_an_evaluation_does_not_depend_on_the_batches(tmp_path, tiny_llama, make_drafter):
    samples, drafter = make_samples(5, seed=1), make_drafter(tiny_llama)
    losses = []
    for batch_size in (1, 2, 5):
        # All anchors, since which are drawn depends on the batches.
        args = make_args(tmp_path, per_device_eval_batch_size=batch_size, max_anchors=100, eval_num_prompts=1)
        trainer = DLiteTrainer(drafter, tiny_llama, args, eval_dataset=samples)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-4)


def forward_inputs(trainer, batch):
    """Arguments of the drafter's forward for the anchors of a batch, from prefixes alone, as generation has them."""
    config, target = trainer.model.config, trainer.target
    features = []
    for row, anchor in batch["anchors"].tolist():
        with torch.no_grad(), capture_hidden_states(target, config.target_layer_ids, num_rows=1) as capture:
            target(batch["input_ids"][row : row + 1, :anchor])  # the anchor itself has not been through the target
        features.append(gather_features(capture.hidden_states, config.target_layer_ids, slice(-1, None))[0, 0])
    placeholders = torch.full((len(features), config.num_draft_tokens), config.mask_token_id)
    return {
        "context_features": torch.stack(features),
        "inputs_embeds": embed_tokens(target, torch.cat([batch["previous_token_ids"], placeholders], dim=1)),
        "previous_token_ids": batch["previous_token_ids"],
        "draft_token_ids": batch["draft_token_ids"],
    }


@pytest.mark.parametrize("group_size", [1, 2])
def test_training_and_drafting_agree(tmp_path, tiny_llama, make_drafter, seen, group_size):
    drafter = make_drafter(tiny_llama, anchor_group_size=group_size)
    trainer = DLiteTrainer(drafter, tiny_llama, make_args(tmp_path), make_samples())
    batch = take_batch(trainer)
    inputs = forward_inputs(trainer, batch)
    drafted, _ = drafter.draft(*list(inputs.values())[:3])
    assert drafted.unique().numel() > 10
    # Teacher-forced with the drafter's own draft, the training forward must say the draft again.
    trainer.compute_loss(drafter, {**batch, "draft_token_ids": drafted})
    with torch.no_grad():
        logits = drafter.sequential_head.output_proj(drafter(**seen.model).head_states)
    assert torch.equal(logits.argmax(dim=-1), drafted)


@pytest.fixture(scope="session")
def overfitted(tmp_path_factory):
    """A target, a drafter that learned its greedy answers to two prompts by heart, the prompts, and the trainer.

    17 tokens were learned of each answer, 16 anchors.
    """
    torch.manual_seed(2)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.5,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    prompts = torch.randint(95, (2, 6))
    sequences = target.generate(prompts, max_new_tokens=17, do_sample=False, pad_token_id=0)
    samples = [{"input_ids": ids, "supervised": [False] * 6 + [True] * 17} for ids in sequences.tolist()]
    drafter = DLiteForDrafting.from_target(
        target,
        target_layer_ids=[0, 1, 3],
        mask_token_id=96,
        num_hidden_layers=2,
        num_draft_tokens=5,
        sequential_rank=16,
    )
    args = make_args(
        tmp_path_factory.mktemp("overfitted"),
        max_steps=300,
        learning_rate=5e-3,
        logging_steps=100,
        eval_max_new_tokens=17,
        seed=0,
    )
    trainer = DLiteTrainer(drafter, target, args, samples, samples)
    trainer.train()
    return SimpleNamespace(target=target, drafter=drafter.eval(), prompts=prompts, trainer=trainer)


def test_overfits_32_anchors(overfitted):
    assert len(take_batch(overfitted.trainer)["anchors"]) == 32
    metrics = overfitted.trainer.evaluate()
    assert metrics["eval_accuracy"] > 0.95
    assert metrics["eval_expected_tau"] > 4


def test_an_overfitted_drafter_proposes_what_it_learned(overfitted):
    batch = take_batch(overfitted.trainer)
    inputs = forward_inputs(overfitted.trainer, batch)
    drafted, _ = overfitted.drafter.draft(*list(inputs.values())[:3])
    whole = (batch["weights"] > 0).all(dim=1)
    assert (drafted == batch["draft_token_ids"])[whole].float().mean() > 0.95


def test_an_overfitted_drafter_gets_its_tokens_accepted(overfitted):
    options = {"max_new_tokens": 17, "do_sample": False, "pad_token_id": 0}
    with speculation_statistics() as statistics:
        for prompt in overfitted.prompts:
            plain = overfitted.target.generate(prompt[None], **options)
            drafted = overfitted.target.generate(prompt[None], assistant_model=overfitted.drafter, **options)
            assert torch.equal(drafted, plain)
    assert statistics.tau > overfitted.drafter.config.num_draft_tokens / 2
    assert overfitted.trainer.evaluate()["eval_tau"] == statistics.tau


def test_predict_leaves_no_trace_in_the_next_evaluation(tmp_path, tiny_llama, make_drafter):
    trainer = DLiteTrainer(
        make_drafter(tiny_llama), tiny_llama, make_args(tmp_path), eval_dataset=make_samples(4, seed=1)
    )
    before = trainer.evaluate()
    trainer.predict(make_samples(4, seed=2))
    after = trainer.evaluate()
    assert after["eval_accuracy"] == before["eval_accuracy"]
    assert after["eval_expected_tau"] == before["eval_expected_tau"]


def test_an_epochs_log_has_its_acceptance_after_an_evaluation(tmp_path, tiny_llama, make_drafter):
    # Two steps an epoch; the evaluation comes between the last of them and the epoch's log.
    args = make_args(tmp_path, max_steps=2, logging_strategy="epoch", eval_strategy="steps", eval_steps=2)
    trainer = DLiteTrainer(make_drafter(tiny_llama), tiny_llama, args, make_samples(), make_samples(2, seed=1))
    trainer.train()
    [entry] = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert "accuracy" in entry and "expected_tau" in entry


def test_counts_go_on_where_callbacks_are_restored(tmp_path, tiny_llama, make_drafter):
    def train(**overrides):
        args = make_args(tmp_path, max_steps=4, save_strategy="steps", save_steps=2, **overrides)
        trainer = DLiteTrainer(make_drafter(tiny_llama), tiny_llama, args, make_samples(16))
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if overrides else None)
        return trainer.progress.counts()["stable"]["steps"]

    assert train() == 4
    assert train(restore_callback_states_from_checkpoint=True) == 4
