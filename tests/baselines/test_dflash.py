# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""DFlash: what is trained here is what Transformers drafts with."""

import pytest
import torch
from dflash import DFlashTrainer, block_states, make_dflash
from transformers import AutoModel, MuseGlimmerAssistantModel

from dlite_hf.evaluation.measuring import measure
from dlite_hf.evaluation.methods import make_methods

from .support import NUM_DRAFT_TOKENS, anchors_of_rounds, generate_plainly, learn_by_heart, make_store, training_inputs


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    return learn_by_heart(
        DFlashTrainer, make_dflash, tmp_path_factory.mktemp("dflash"), max_steps=100, learning_rate=1e-2
    )


def test_it_learns_a_handful_of_anchors(learned):
    assert learned.accuracy > 0.97


def test_the_saved_drafter_drafts_in_generate_and_changes_nothing(learned, tmp_path):
    learned.trainer.drafter.save_pretrained(tmp_path)
    assert type(AutoModel.from_pretrained(tmp_path)) is MuseGlimmerAssistantModel
    _, dflash = make_methods(learned.target, ["plain"], [f"dflash={tmp_path}"])
    assert dflash.kind == "dflash" and dflash.num_draft_tokens == NUM_DRAFT_TOKENS
    rounds = emitted = 0
    accepted = []
    for prompt in learned.prompts:
        measurement, output = measure(learned.target, dflash, prompt, max_new_tokens=24)
        assert torch.equal(output.sequences, generate_plainly(learned.target, prompt, 24))
        rounds, emitted = rounds + measurement.rounds, emitted + measurement.emitted
        accepted += measurement.accepted_per_position
    assert emitted / rounds > 1.5
    assert sum(accepted) < rounds * NUM_DRAFT_TOKENS  # beyond what it learned, drafts are rejected


def test_training_shows_what_inference_does(learned, tmp_path):
    """The features, the positions and the states of every round, partly accepted ones included."""
    drafter, target, prompt = learned.trainer.drafter, learned.target, learned.prompts[1]
    calls = []
    hook = drafter.register_forward_hook(
        lambda module, args, kwargs, output: calls.append((kwargs, output)), with_kwargs=True
    )
    sequence = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=24,
        do_sample=False,
        assistant_model=drafter,
        speculation_type="dflash",
    )
    hook.remove()
    read = [kwargs["context_hidden_states"].shape[1] for kwargs, _ in calls]
    assert any(1 < number <= NUM_DRAFT_TOKENS for number in read[1:])  # accepted in part
    anchors = anchors_of_rounds(prompt, read[1:] + [0])

    trainer = learned.trainer
    trainer.store = make_store(target, [(sequence, prompt.shape[1])], tmp_path / "store.pt")
    context = trainer.context(training_inputs(sequence, anchors, torch.zeros(len(anchors), NUM_DRAFT_TOKENS)))
    seen = torch.cat([kwargs["context_hidden_states"] for kwargs, _ in calls], dim=1)
    torch.testing.assert_close(context.features[-1], seen[0], rtol=1e-4, atol=1e-4)
    positions = calls[-1][0]["position_ids"][0]
    assert positions[-NUM_DRAFT_TOKENS - 2] == context.positions[-1, -1] == anchors[-1] - 1
    with torch.no_grad():
        states = block_states(drafter, target, context, sequence[0, anchors])
    expected = torch.cat([output.last_hidden_state for _, output in calls])
    torch.testing.assert_close(states, expected, rtol=1e-3, atol=1e-3)
