# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""DSpark: training and drafting agree, and the output is the target's."""

from functools import partial

import pytest
import torch
from dflash import block_states
from dspark import DSparkForDrafting, DSparkTrainer, make_dspark

from dlite_hf import speculation_statistics
from dlite_hf.evaluation.measuring import measure
from dlite_hf.evaluation.methods import Method

from .support import (
    NUM_DRAFT_TOKENS,
    anchors_of_rounds,
    generate_plainly,
    learn_by_heart,
    make_store,
    training_inputs,
    watch_rounds,
)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    make, folder = partial(make_dspark, markov_rank=8), tmp_path_factory.mktemp("dspark")
    return learn_by_heart(DSparkTrainer, make, folder, max_steps=200, learning_rate=2e-2)


def test_it_learns_a_handful_of_anchors(learned):
    assert learned.accuracy > 0.97


def test_the_saved_drafter_drafts_in_generate_and_changes_nothing(learned, tmp_path):
    learned.trainer.drafter.save_pretrained(tmp_path)
    drafter = DSparkForDrafting.from_pretrained(tmp_path)
    with speculation_statistics() as statistics:
        for prompt in learned.prompts:
            output = learned.target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=24,
                do_sample=False,
                custom_generate=drafter.custom_generate,
            )
            assert torch.equal(output, generate_plainly(learned.target, prompt, 24))
    assert statistics.tau > 1.5
    assert sum(statistics.accepted_per_position) < statistics.num_drafted_tokens


def test_an_evaluation_counts_its_rounds(learned):
    method = Method("dspark", "custom", custom_generate=learned.trainer.drafter.custom_generate)
    target, prompt, forwards = learned.target, learned.prompts[0], []
    hook = target.register_forward_hook(lambda *args: forwards.append(1))
    measurement, output = measure(target, method, prompt, max_new_tokens=24)
    hook.remove()
    assert torch.equal(output.sequences, generate_plainly(target, prompt, 24))
    assert (measurement.prefill_tokens, measurement.emitted) == (1, measurement.tokens - 1)
    assert measurement.rounds == len(forwards) - 1 < measurement.emitted


@pytest.mark.parametrize("do_sample", [False, True])
def test_training_shows_what_inference_does(learned, tmp_path, do_sample):
    drafter, target, prompt = learned.trainer.drafter, learned.target, learned.prompts[1]
    sequence, rounds, seen = watch_rounds(learned, drafter.encoder.fc, do_sample)
    anchors = anchors_of_rounds(prompt, [emitted.shape[1] for _, _, emitted in rounds])

    trainer, drafts = learned.trainer, torch.cat([draft for draft, _, _ in rounds])
    trainer.store = make_store(target, [(sequence, prompt.shape[1])], tmp_path / "store.pt")
    context = trainer.context(training_inputs(sequence, anchors, drafts))
    torch.testing.assert_close(context.features[-1], seen[0], rtol=1e-4, atol=1e-4)
    before = torch.cat([sequence[0, anchors][:, None], drafts[:, :-1]], dim=1)
    with torch.no_grad():
        states = block_states(drafter, target, context, sequence[0, anchors])
        logits = target.lm_head(states) + drafter.markov_bias(before)
    torch.testing.assert_close(logits, torch.cat([logits for _, logits, _ in rounds]), rtol=1e-3, atol=1e-3)


def test_the_loss_is_that_of_both_projections_joined(learned, tmp_path):
    """0.1 CE + 0.9 L1 written out over whole logits."""
    trainer, target, drafter = learned.trainer, learned.target, learned.trainer.drafter
    sequence = generate_plainly(target, learned.prompts[0], 12)
    trainer.store = make_store(target, [(sequence, 5)], tmp_path / "store.pt")
    anchors = torch.tensor([6, 9])
    drafts = sequence[0][anchors[:, None] + torch.arange(1, NUM_DRAFT_TOKENS + 1)]
    inputs = training_inputs(sequence, anchors, drafts)
    with torch.no_grad():
        loss = trainer.drafting_loss(drafter, inputs).loss
        p = target(sequence).logits[0][anchors[:, None] + torch.arange(NUM_DRAFT_TOKENS)].softmax(dim=-1)
        states = block_states(drafter, target, trainer.context(inputs), sequence[0, anchors])
        before = sequence[0][anchors[:, None] + torch.arange(NUM_DRAFT_TOKENS)]
        log_q = (target.lm_head(states) + drafter.markov_bias(before)).log_softmax(dim=-1)
    ce = -log_q.gather(-1, p.argmax(dim=-1, keepdim=True)).sum()
    expected = 0.1 * ce + 0.9 * (p - log_q.exp()).abs().sum()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-4)
