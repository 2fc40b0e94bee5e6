# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""EAGLE-3: training and drafting agree, and the output is the target's."""

import pytest
import torch
from eagle3 import Eagle3ForDrafting, Eagle3Trainer, make_eagle3

from dlite_hf import speculation_statistics
from dlite_hf.target import embed_tokens

from ..targets import VOCAB_SIZE, make_target
from .support import (
    NUM_DRAFT_TOKENS,
    anchors_of_rounds,
    generate_plainly,
    learn_by_heart,
    make_args,
    make_shape,
    make_store,
    training_inputs,
    watch_rounds,
)


MISSING = [1, 40]


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    ids = [token_id for token_id in range(VOCAB_SIZE) if token_id not in MISSING]
    folder = tmp_path_factory.mktemp("eagle3")

    def make(shape):
        return make_eagle3(shape, make_target("llama"), ids)

    return learn_by_heart(Eagle3Trainer, make, folder, max_steps=250, learning_rate=2e-2)


def test_it_learns_a_handful_of_anchors(learned):
    assert learned.accuracy > 0.97


def test_the_saved_drafter_drafts_in_generate_and_changes_nothing(learned, tmp_path):
    learned.trainer.drafter.save_pretrained(tmp_path)
    drafter = Eagle3ForDrafting.from_pretrained(tmp_path)
    assert torch.equal(drafter.draft_vocab_ids, learned.trainer.drafter.draft_vocab_ids)
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


@pytest.mark.parametrize("do_sample", [False, True])
def test_training_shows_what_inference_does(learned, tmp_path, do_sample):
    drafter, target, prompt = learned.trainer.drafter, learned.target, learned.prompts[1]
    sequence, rounds, seen = watch_rounds(learned, drafter.fc, do_sample)
    anchors = anchors_of_rounds(prompt, [emitted.shape[1] for _, _, emitted in rounds])

    trainer, drafts = learned.trainer, torch.cat([draft for draft, _, _ in rounds])
    trainer.store = make_store(target, [(sequence, prompt.shape[1])], tmp_path / "store.pt")
    context = trainer.context(training_inputs(sequence, anchors, drafts))
    torch.testing.assert_close(context.features[-1], seen[0], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        embeds = [embed_tokens(target, ids) for ids in (context.next_token_ids, drafts[:, :-1])]
        logits = drafter.lm_head(drafter(context, *embeds))
    expected = torch.cat([logits for _, logits, _ in rounds])
    torch.testing.assert_close(logits, expected[..., drafter.draft_vocab_ids], rtol=1e-3, atol=1e-3)
    assert expected[..., MISSING].isinf().all()


def test_the_loss_is_soft_cross_entropy_where_the_vocabulary_has_the_top(learned, tmp_path):
    trainer, target, drafter = learned.trainer, learned.target, learned.trainer.drafter
    sequence = generate_plainly(target, learned.prompts[0], 20)
    trainer.store = make_store(target, [(sequence, 5)], tmp_path / "store.pt")
    anchors = torch.arange(6, 14)
    at = anchors[:, None] + torch.arange(NUM_DRAFT_TOKENS)
    inputs = training_inputs(sequence, anchors, sequence[0][at + 1])
    with torch.no_grad():
        missing = int(target(sequence).logits[0].argmax(dim=-1)[at[0, 0]])
    kept = drafter.draft_vocab_ids[drafter.draft_vocab_ids != missing]
    drafter = make_eagle3(make_shape(target), target, kept.tolist()).eval()
    trainer = Eagle3Trainer(drafter, target, make_args(tmp_path), trainer.store)
    with torch.no_grad():
        result = trainer.drafting_loss(drafter, inputs)
        all_logits = target(sequence).logits[0][at]
        p = all_logits[..., kept].softmax(dim=-1)
        context = trainer.context(inputs)
        embeds = [embed_tokens(target, ids) for ids in (context.next_token_ids, sequence[0][at[:, 1:]])]
        log_q = drafter.lm_head(drafter(context, *embeds)).log_softmax(dim=-1)
    inside = torch.isin(all_logits.argmax(dim=-1), kept)
    assert not inside.all() and inside.any()
    # Less the entropy of p, which no gradient sees.
    expected = ((p * (p.log() - log_q)).sum(dim=-1) * inside).sum()
    torch.testing.assert_close(result.loss, expected, rtol=1e-3, atol=1e-3)
    assert result.num_rows.tolist() == [len(anchors)] * NUM_DRAFT_TOKENS


def test_labels_are_refused(tmp_path):
    target = make_target("llama")
    with pytest.raises(ValueError, match="ce_labels='token'"):
        Eagle3Trainer(make_eagle3(make_shape(target), target), target, make_args(tmp_path, ce_labels="token"), {})
