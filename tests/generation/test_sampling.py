# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Sampling with a drafter follows the target's own distribution, counted on a vocabulary of seven."""

import copy
import itertools

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.modeling_outputs import BaseModelOutput

from dlite_hf import DLiteForDrafting, speculation_statistics
from dlite_hf.generation import sampling
from dlite_hf.generation.candidate_generator import DLiteCandidateGenerator
from dlite_hf.generation.sampling import speculative_sample

from ..replay import generate_with_statistics
from ..targets import SIZES, make_drafter


V = 7
K = 3  # tokens that are drafted, and counted together
PROMPT = torch.tensor([[1, 4, 2, 5]])
NUM_DRAWS = 20_000
SAMPLING_OPTIONS = {
    "no_processor": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "temperature_top_k_top_p": {"temperature": 1.2, "top_k": 5, "top_p": 0.9},
}
PROCESSORS = {
    "no_processor": LogitsProcessorList(),
    "temperature_top_k_top_p": LogitsProcessorList(
        [TemperatureLogitsWarper(1.2), TopKLogitsWarper(5), TopPLogitsWarper(0.9)]
    ),
}


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "vocab_size": V, "num_hidden_layers": 4, "initializer_range": 0.25})
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def logits(target):
    """The target's logits after 0, 1 and 2 tokens beside the prompt: `[V]`, `[V, V]`, `[V, V, V]`."""
    prefixes = torch.tensor(list(itertools.product(range(V), repeat=K - 1)))
    with torch.no_grad():
        logits = target(torch.cat([PROMPT.expand(len(prefixes), -1), prefixes], dim=1)).logits[:, -K:]
    logits = logits.view(V, V, K, V)
    return [logits[0, 0, 0], logits[:, 0, 1], logits[:, :, 2]]


def process(logits, logits_processor):
    """What the processors make of them; ours look at no prefix."""
    return [logits_processor(None, step.reshape(-1, V)).view_as(step) for step in logits]


def joint_distribution(scores):
    """The probability of every three tokens, `[V, V, V]`."""
    first, second, third = (step.double().softmax(dim=-1) for step in scores)
    return first[:, None, None] * second[:, :, None] * third


def count(tokens):
    """How often every combination occurs among the rows of `tokens` `[N, 3]`."""
    places = (tokens * torch.tensor([V * V, V, 1])).sum(dim=1)
    return torch.bincount(places, minlength=V**3).view(V, V, V)


def chi_square_p_value(counts, probs):
    """The probability of counts that are further from `probs` than these; cells that expect less than 5 are one."""
    counts, expected = counts.flatten().double(), probs.flatten() * counts.sum()
    assert not counts[expected == 0].any(), "something impossible was drawn"
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    possible = expected > 0  # there may be no rare ones
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    degrees_of_freedom = possible.sum() - 1
    return float(torch.special.gammaincc(degrees_of_freedom / 2, statistic / 2))


def prompt_outputs(target):
    """What drafting is shown: the target's hidden states at the last token that has been through it."""
    with torch.no_grad():
        outputs = target(PROMPT[:, :-1], output_hidden_states=True)
    return BaseModelOutput(hidden_states=tuple(states[:, -1:] for states in outputs.hidden_states))


@pytest.fixture(scope="module")
def drafters(target, logits):
    """One drafter with random weights, and one that has learnt a little of what the target says after the prompt."""

    def make(**overrides):
        return make_drafter(target, num_draft_tokens=K, mask_token_id=V - 1, num_hidden_layers=1, **overrides)

    torch.manual_seed(1)
    bad, trained = make(), make()
    torch.nn.init.normal_(bad.sequential_head.output_proj.weight, std=0.5)

    placeholders = torch.full((1, K), V - 1)
    with torch.no_grad():
        inputs_embeds = target.get_input_embeddings()(torch.cat([PROMPT[:, -1:], placeholders], dim=1))
    hidden_states = prompt_outputs(target).hidden_states
    features = torch.cat([hidden_states[i + 1] for i in trained.config.target_layer_ids], dim=1)
    sequences = torch.tensor(list(itertools.product(range(V), repeat=K)))
    probs = joint_distribution(logits).flatten()
    optimizer = torch.optim.Adam(trained.parameters(), lr=3e-3)
    for _ in range(15):
        head_states = trained(
            features.expand(len(sequences), -1, -1),
            inputs_embeds.expand(len(sequences), -1, -1),
            PROMPT[:, -1:].expand(len(sequences), -1),
            draft_token_ids=sequences,
        ).head_states
        log_probs = trained.sequential_head.output_proj(head_states).log_softmax(dim=-1)
        loss = -(probs * log_probs.gather(-1, sequences[..., None]).sum(dim=(1, 2))).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    reduced = copy.deepcopy(trained)
    reduced.reduce_draft_vocabulary([0, 2, 5])
    return {"trained": trained, "bad": bad, "reduced": reduced}


def draw(target, drafter, scores, logits_processor, is_sampled=True, rule=speculative_sample):
    """`NUM_DRAWS` times three tokens `[N, 3]`, drafted in one batch and verified by `rule`, and the acceptance rate.

    Rows are independent: one whose draft was rejected goes on with the target's own tokens.
    """
    config = GenerationConfig(do_sample=is_sampled, max_length=100)
    candidate_generator = DLiteCandidateGenerator(drafter, target, config, logits_processor)
    hidden_states = tuple(states.expand(NUM_DRAWS, -1, -1) for states in prompt_outputs(target).hidden_states)
    candidate_ids, draft_logits = candidate_generator.get_candidates(
        PROMPT.expand(NUM_DRAWS, -1), model_outputs=BaseModelOutput(hidden_states=hidden_states)
    )
    draft_ids = candidate_ids[:, PROMPT.shape[1] :]
    assert draft_ids.shape == (NUM_DRAWS, K)

    tokens = draft_ids[:, :0]
    follows_draft = torch.ones(NUM_DRAWS, dtype=torch.bool)
    num_accepted = num_verified = 0
    for i in range(K):
        step_scores = scores[i][tuple(tokens.unbind(dim=1))].expand(NUM_DRAWS, V)
        verified, accepted = rule(step_scores, draft_ids[:, i], draft_logits[:, i] if is_sampled else None)
        own = torch.multinomial(step_scores.softmax(dim=-1), num_samples=1).squeeze(1)
        tokens = torch.cat([tokens, torch.where(follows_draft, verified, own)[:, None]], dim=1)
        num_verified += int(follows_draft.sum())
        follows_draft = follows_draft & accepted
        num_accepted += int(follows_draft.sum())
    return tokens, num_accepted / num_verified


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("kind", ["trained", "bad", "reduced", "argmax"])
def test_joint_distribution(target, logits, drafters, kind, processors):
    torch.manual_seed(0)
    logits_processor = PROCESSORS[processors]
    scores = process(logits, logits_processor)
    probs = joint_distribution(scores)
    assert bool((probs == 0).any()) == bool(logits_processor), "the processors cut nothing"
    is_sampled = kind != "argmax"
    drafter = drafters["trained" if kind == "argmax" else kind]
    tokens, acceptance = draw(target, drafter, scores, logits_processor, is_sampled)
    assert 0.1 < acceptance < 0.9
    assert chi_square_p_value(count(tokens), probs) > 0.001


def replaces_from_the_target(scores, draft_ids, draft_logits):
    _, accepted = speculative_sample(scores, draft_ids, draft_logits)
    own = torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
    return torch.where(accepted, draft_ids, own), accepted


def ignores_the_draft_probability(scores, draft_ids, draft_logits):
    tokens, _ = speculative_sample(scores, draft_ids, draft_logits)
    probs = scores.softmax(dim=-1).gather(-1, draft_ids[:, None]).squeeze(1)
    accepted = torch.rand_like(probs) < probs
    return torch.where(accepted, draft_ids, tokens), accepted


def misreads_the_draft_probability(scores, draft_ids, draft_logits):
    return speculative_sample(scores, draft_ids, draft_logits / 1.2)


def accepts_all(scores, draft_ids, draft_logits):
    return draft_ids, torch.ones_like(draft_ids, dtype=torch.bool)


WRONG_RULES = [replaces_from_the_target, ignores_the_draft_probability, misreads_the_draft_probability, accepts_all]


@pytest.mark.parametrize("rule", WRONG_RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("kind", ["trained", "bad"])
def test_a_wrong_rule_is_found_out(target, logits, drafters, kind, rule):
    torch.manual_seed(0)
    tokens, _ = draw(target, drafters[kind], logits, LogitsProcessorList(), rule=rule)
    assert chi_square_p_value(count(tokens), joint_distribution(logits)) < 0.001


class PartialDrafter(DLiteForDrafting):
    """Favours another token at every position of a block, so that no position's distribution passes for another's."""

    def draft(
        self, context_features, inputs_embeds, previous_token_ids, num_draft_tokens=None, sampler=None, *options
    ):
        def partial_sampler(logits, drafted):
            favoured = torch.tensor([2 * drafted.shape[1] + 1])
            return sampler(logits + 2 * torch.nn.functional.one_hot(favoured, V), drafted)

        return super().draft(
            context_features, inputs_embeds, previous_token_ids, num_draft_tokens, partial_sampler, *options
        )


@pytest.mark.parametrize("threshold", [0.0, 0.15])
def test_end_to_end(target, logits, drafters, threshold):
    torch.manual_seed(0)
    drafter = PartialDrafter(drafters["trained"].config).eval()
    drafter.load_state_dict(drafters["trained"].state_dict())
    name = "temperature_top_k_top_p"
    probs = joint_distribution(process(logits, PROCESSORS[name]))
    tokens = []
    with speculation_statistics() as statistics:
        for _ in range(2_000):
            # One token more than is counted, since the last is never drafted, nor is the first.
            output = target.generate(
                PROMPT,
                attention_mask=torch.ones_like(PROMPT),
                max_new_tokens=K + 1,
                do_sample=True,
                assistant_model=drafter,
                assistant_confidence_threshold=threshold,
                **SAMPLING_OPTIONS[name],
            )
            tokens.append(output[:, PROMPT.shape[1] :][:, :K])
    assert 0.1 < sum(statistics.accepted_per_position) / statistics.num_drafted_tokens < 0.9
    assert statistics.accepted_per_position[1] > 100
    assert chi_square_p_value(count(torch.cat(tokens)), probs) > 0.001


@pytest.mark.parametrize("name", SAMPLING_OPTIONS)
def test_a_seed_repeats_itself(target, drafters, name):
    def generate(seed):
        torch.manual_seed(seed)
        return generate_with_statistics(
            target,
            drafters["trained"],
            inputs=PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            max_new_tokens=60,
            do_sample=True,
            **SAMPLING_OPTIONS[name],
        )

    output, statistics = generate(0)
    assert torch.equal(generate(0)[0], output)
    assert not torch.equal(generate(1)[0], output)
    assert 0 < sum(statistics.accepted_per_position) < statistics.num_drafted_tokens


def random_logits(num_rows, seed):
    return 3 * torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed))


def draw_from(logits):
    return torch.multinomial(logits.softmax(dim=-1), num_samples=1).squeeze(1)


def test_draws_follow_the_weights():
    torch.manual_seed(0)
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.5, 0.0, 0.0])
    counts = sampling.draw(weights.expand(NUM_DRAWS, -1)).bincount(minlength=V)
    expected = NUM_DRAWS * weights / weights.sum()
    assert counts[weights == 0].sum() == 0
    assert ((counts - expected).abs() <= 4 * expected.sqrt()).all()
    for useless in (torch.zeros(1, V), torch.full((1, V), float("nan")), torch.full((1, V), float("inf"))):
        with pytest.raises(RuntimeError):
            sampling.draw(useless)


def test_rule_accepts_what_follows_the_target():
    torch.manual_seed(0)
    logits = random_logits(NUM_DRAWS, seed=0)
    draft_ids = draw_from(logits)
    tokens, accepted = speculative_sample(logits, draft_ids, logits)
    assert accepted.all()
    assert torch.equal(tokens, draft_ids)


def test_rule_rejects_what_the_target_would_never_say():
    torch.manual_seed(0)
    logits = random_logits(NUM_DRAWS, seed=0)
    scores = logits.masked_fill(torch.arange(V) < 3, float("-inf"))
    draft_logits = logits.masked_fill(torch.arange(V) >= 3, float("-inf"))
    draft_ids = draw_from(draft_logits)
    for known_logits in (draft_logits, None):
        tokens, accepted = speculative_sample(scores, draft_ids, known_logits)
        assert not accepted.any()
        assert tokens.unique().tolist() == [3, 4, 5, 6]


def test_rule_accepts_and_rejects_in_one_batch():
    torch.manual_seed(0)
    scores = random_logits(NUM_DRAWS, seed=0)
    is_same = torch.arange(NUM_DRAWS) % 2 == 0  # nothing is left of the target's probabilities in these rows
    draft_logits = torch.where(is_same[:, None], scores, random_logits(NUM_DRAWS, seed=1))
    draft_ids = draw_from(draft_logits)
    tokens, accepted = speculative_sample(scores, draft_ids, draft_logits)
    assert accepted[is_same].all()
    assert 0 < accepted[~is_same].sum() < NUM_DRAWS / 2
    assert torch.equal(tokens[accepted], draft_ids[accepted])
    assert not (tokens == draft_ids)[~accepted].any()


@pytest.mark.parametrize("draft", ["same", "near", "far", "argmax"])
def test_rule_never_emits_what_the_target_never_says(draft, monkeypatch):
    torch.manual_seed(0)
    is_impossible = torch.rand(NUM_DRAWS, V) < 0.5
    is_impossible[:, -1] = False
    scores = random_logits(NUM_DRAWS, seed=0).masked_fill(is_impossible, float("-inf"))
    draft_logits = random_logits(NUM_DRAWS, seed=1)
    if draft in ("same", "near"):
        draft_logits = scores + (1e-6 if draft == "near" else 0.0) * draft_logits
        # The unluckiest draw; what is left of the target's probabilities is nothing, or rounding.
        monkeypatch.setattr(torch, "rand_like", torch.ones_like)
    draft_ids = draft_logits.argmax(dim=-1) if draft == "argmax" else draw_from(draft_logits)
    tokens, accepted = speculative_sample(scores, draft_ids, None if draft == "argmax" else draft_logits)
    assert not accepted.all() and (accepted.any() or draft == "same")
    assert not is_impossible.gather(1, tokens[:, None]).any()


def test_rule_takes_an_unknown_draft_for_a_point_mass():
    scores, draft_ids = random_logits(NUM_DRAWS, seed=0), random_logits(NUM_DRAWS, seed=1).argmax(dim=-1)
    point_mass = torch.full((NUM_DRAWS, V), float("-inf")).scatter_(1, draft_ids[:, None], 0.0)
    torch.manual_seed(0)
    tokens, accepted = speculative_sample(scores, draft_ids, None)
    torch.manual_seed(0)
    same_tokens, same_accepted = speculative_sample(scores, draft_ids, point_mass)
    assert torch.equal(accepted, same_accepted)
    assert torch.equal(tokens, same_tokens)
    assert not (tokens == draft_ids)[~accepted].any()
