# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What the rivals share: the layers read, the context, the order of anchors, and what is refused."""

from functools import partial

import pytest
import torch
from common import dflash_layer_ids, eagle3_layer_ids, stored_layer_ids
from dflash import DFlashTrainer, make_dflash
from dspark import make_dspark
from train_stored import StoredAnchors, StoredTrainer
from transformers import DynamicCache, set_seed

from ..targets import make_drafter, make_inputs, make_target
from .support import LAYER_IDS, generate_plainly, make_args, make_shape, make_store


@pytest.fixture(scope="module")
def target():
    return make_target("llama")


@pytest.fixture(scope="module")
def store(target, tmp_path_factory):
    prompts = [make_inputs(target, length, seed=length)["input_ids"] for length in (4, 9, 17)]
    answers = [(generate_plainly(target, each, 12), each.shape[1]) for each in prompts]
    return make_store(target, answers, tmp_path_factory.mktemp("store") / "store.pt")


@pytest.fixture
def make_trainer(target, store, tmp_path):
    def make(values=store, **args):
        return DFlashTrainer(
            make_dflash(make_shape(target)), target, make_args(tmp_path, **args), values, StoredAnchors(values)
        )

    return make


def test_layers_are_those_of_the_releases():
    assert dflash_layer_ids(36) == [1, 9, 17, 25, 33]
    assert eagle3_layer_ids(36) == [1, 17, 32]  # what goes into 2, 18 and 33
    assert stored_layer_ids(36) == [1, 9, 17, 25, 32, 33, 35]


def test_context_is_all_before_the_anchor(target, store, make_trainer):
    anchors = StoredAnchors(store)
    inputs = anchors.collate([anchors[index] for index in (0, 15, len(anchors) - 1)])
    context = make_trainer().context(inputs)
    for i, (start, pivot) in enumerate(inputs["anchors"].tolist()):
        length = pivot - start + 1
        tokens = store["token_ids"][start : pivot + 2]
        hidden_states = target(tokens[None], output_hidden_states=True).hidden_states
        expected = torch.cat([hidden_states[layer + 1][0, :-1] for layer in LAYER_IDS], dim=-1)
        assert context.mask[i].tolist() == [False] * (context.mask.shape[1] - length) + [True] * length
        torch.testing.assert_close(context.features[i, -length:], expected, rtol=1e-4, atol=1e-4)
        assert context.positions[i, -length:].tolist() == list(range(length))
        assert context.next_token_ids[i, -length:].tolist() == tokens[1:].tolist()
        assert tokens[-1] == inputs["previous_token_ids"][i, -1]


def make_dlite_trainer(target, store, folder, args, **overrides):
    anchors = StoredAnchors(store)
    drafter = make_drafter(target, **{"num_draft_tokens": 4, "target_layer_ids": LAYER_IDS, **overrides})
    data = {"train_dataset": anchors, "data_collator": anchors.collate}
    return StoredTrainer(drafter, target, make_args(folder, **args), **data, store=store)


def test_a_store_without_the_layers_of_a_drafter_is_refused(target, store, tmp_path):
    with pytest.raises(ValueError, match=r"reads the layers \[1\], but the store holds \[0, 2, 4\]; write another"):
        make_dlite_trainer(target, store, tmp_path, {}, target_layer_ids=[0, 1, 4])


def test_a_store_without_the_history_of_a_drafter_is_refused(target, store, tmp_path):
    layer_ids = {"history_layer_ids": [0, 4], "history_window": 1002}  # the store has a window of 1,000
    with pytest.raises(ValueError, match="`history_window` is 1002, but the store holds 1000 tokens before an answer"):
        make_dlite_trainer(target, store, tmp_path, {}, **layer_ids)


def test_every_step_has_the_anchors_of_a_dlite_run(target, store, make_trainer, tmp_path):
    args = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 9}
    dlite = make_dlite_trainer(target, store, tmp_path, args)
    rival = make_trainer(**args)
    seen = {}
    for trainer in (dlite, rival):
        loss = trainer.compute_loss

        def spy(model, inputs, loss=loss, trainer=trainer, **kwargs):
            seen.setdefault((trainer, trainer.state.global_step), []).append(inputs["anchors"])
            return loss(model, inputs, **kwargs)

        trainer.compute_loss = spy
        set_seed(trainer.args.seed)  # as making the one that trains next does
        trainer.train()
    for step in range(args["max_steps"]):
        of_dlite, of_rival = (torch.cat(seen[trainer, step])[:, 1] for trainer in (dlite, rival))
        assert of_dlite.sort().values.tolist() == of_rival.sort().values.tolist()
        lengths = [(anchors[:, 1] - anchors[:, 0]).tolist() for anchors in seen[rival, step]]
        assert sum(lengths, []) == sorted(sum(lengths, []))  # dealt by the length of their contexts
    assert max(step for _, step in seen) == 8 and any(len(seen[rival, step]) == 2 for step in range(9))


def test_accumulated_batches_have_the_loss_of_one(store, make_trainer):
    losses = {}
    for size, number in ((8, 1), (4, 2)):
        trainer = make_trainer(
            per_device_train_batch_size=size, gradient_accumulation_steps=number, max_steps=2, logging_steps=1, seed=1
        )
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in trainer.drafter.parameters():
                parameter.copy_(torch.full_like(parameter, 0.05))
        trainer.train()
        losses[number] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[1] == pytest.approx(losses[2], rel=1e-4)


@pytest.mark.parametrize(
    ("args", "message"),
    [({"tv_weight": 0.5}, "tv_weight"), ({"max_anchors": 3, "loss_decay": 2.0}, "loss_decay.*max_anchors")],
)
def test_arguments_without_a_meaning_are_refused(make_trainer, args, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(**args)


def test_several_processes_are_refused(make_trainer, monkeypatch):
    monkeypatch.setattr("dlite_hf.DLiteTrainingArguments.world_size", 2)
    with pytest.raises(ValueError, match="there are 2"):
        make_trainer()


def test_stores_that_lack_something_are_refused(target, store, make_trainer):
    with pytest.raises(ValueError, match=r"holds the layers \[0, 2\]"):
        make_trainer({**store, "layer_ids": torch.tensor([0, 2])})
    with pytest.raises(ValueError, match="in the middle"):
        make_trainer({**store, "positions": store["positions"] + 3})
    with pytest.raises(ValueError, match="in the middle"):
        make_trainer({name: values for name, values in store.items() if name != "positions"})


def test_a_biased_head_is_refused(store, tmp_path):
    target = make_target("llama")
    target.lm_head.bias = torch.nn.Parameter(torch.zeros(97))
    with pytest.raises(ValueError, match="bias"):
        DFlashTrainer(make_dflash(make_shape(target)), target, make_args(tmp_path), store)


@pytest.mark.parametrize("kind", ["batch", "padding", "cache"])
def test_calls_without_the_whole_prompt_are_refused(target, kind):
    drafter = make_dspark(make_shape(target), markov_rank=4).eval()
    inputs = make_inputs(target, 6)
    if kind == "batch":
        inputs = {name: values.repeat(2, 1) for name, values in inputs.items()}
    if kind == "padding":
        inputs["attention_mask"][0, 0] = 0
    if kind == "cache":
        cache = DynamicCache(config=target.config)
        target(inputs["input_ids"][:, :3], cache=cache)
        inputs["cache"] = cache
    with pytest.raises(ValueError, match="one, unpadded and from its beginning"):
        target.generate(**inputs, max_new_tokens=4, custom_generate=drafter.custom_generate)


def test_a_target_that_shows_no_hidden_states_is_refused(target, monkeypatch):
    drafter = make_dspark(make_shape(target), markov_rank=4).eval()
    monkeypatch.setattr("common.gather_features", lambda *args: None)
    with pytest.raises(ValueError, match="without the hooks"):
        target.generate(**make_inputs(target, 6), max_new_tokens=4, custom_generate=drafter.custom_generate)


def test_tokens_are_streamed_as_they_come(target):
    drafter = make_dspark(make_shape(target), markov_rank=4).eval()
    inputs, put = make_inputs(target, 6), []
    streamer = type(
        "Streamer", (), {"put": lambda self, value: put.append(value), "end": lambda self: put.append(None)}
    )
    generate = partial(target.generate, **inputs, max_new_tokens=8, do_sample=False)
    output = generate(custom_generate=drafter.custom_generate, token_streamer=streamer())
    assert put.pop() is None
    assert torch.equal(put[0], inputs["input_ids"])
    assert torch.cat(put[1:]).tolist() == output[0, 6:].tolist() == generate()[0, 6:].tolist()
