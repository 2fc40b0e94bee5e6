# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""A trace shows what `generate` did, and its page shows the text as it is."""

import json
from html.parser import HTMLParser

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LogitsProcessorList, PreTrainedTokenizerFast, TextStreamer

from dlite_hf import DLiteForDrafting, speculation_statistics
from dlite_hf.trace import _split_text, _TokenNames, trace_generation
from dlite_hf.trace_page import visible

from .generation.test_statistics import NUM_NEW_TOKENS, ORIGINS, PROMPT_LENGTH, SCRIPT, Scripted
from .targets import VOCAB_SIZE, make_drafter, make_inputs, make_target


BYTES = {"E2": "â", "9C": "ľ", "93": "ĵ"}  # of ✓, as byte-level BPE writes them
ODD = ["</script>", "<b>", *BYTES.values(), "Ċ", "č", "ĉ", "Ā", "&amp;", '"', "Ø§", "Ù", "Ī", "Ġ", "ĠâĢ®", "$x{}"]


def make_tokenizer(first_ids=()):
    """Byte-level: the tokens of `ODD` have the ids `first_ids` and those after them, and the last id has no token."""
    ids = list(dict.fromkeys([*first_ids, *range(VOCAB_SIZE - 1)]))
    names = ODD + [f"w{i}" for i in range(VOCAB_SIZE - 1 - len(ODD))]
    vocab = dict(zip(names, ids, strict=True))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


class RecordingDrafter(DLiteForDrafting):
    """Keeps what it returns from every round."""

    def draft(self, *args):
        drafted = super().draft(*args)
        self.__dict__.setdefault("rounds", []).append(drafted)
        return drafted


class Page(HTMLParser):
    """The text of the element `output`, the prompt, what the page shows outside of the output, and its data."""

    def __init__(self, html):
        super().__init__()
        self.stack, self.output, self.prompt, self.other, self.data, self.tags = [], "", "", "", "", []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.stack.append(dict(attrs).get("id") or tag)

    def handle_endtag(self, tag):
        self.stack.pop()

    def handle_data(self, data):
        if "output" in self.stack:
            self.output += data
        elif self.stack and self.stack[-1] == "data":
            self.data += data
        elif not {"script", "style"} & set(self.stack):
            self.other += data
            if "details" in self.stack and not {"summary", "dl"} & set(self.stack):
                self.prompt += data

    def tokens(self):
        return [attrs for tag, attrs in self.tags if tag == "span" and "data-i" in attrs]


@pytest.fixture(scope="module")
def scripted():
    scripted = Scripted(SCRIPT)
    scripted.drafter.script = SCRIPT
    return scripted


@pytest.fixture(scope="module")
def trace(scripted):
    """Rounds that accept 3, 0, 5, 1 and 2 tokens, of odd texts."""
    scripted.drafter.replay(scripted.target, scripted.plain)
    tokenizer = make_tokenizer(dict.fromkeys(scripted.new_tokens))
    options = {"max_new_tokens": NUM_NEW_TOKENS, "do_sample": False}
    return trace_generation(scripted.target, scripted.drafter, tokenizer, scripted.inputs, **options)


def test_how_every_token_came(scripted, trace):
    assert [token.token_id for token in trace.tokens] == scripted.new_tokens[:NUM_NEW_TOKENS]
    assert [token.position for token in trace.tokens] == [0, *ORIGINS]
    assert [token.round for token in trace.tokens] == [0] + [1] * 4 + [2] + [3] * 6 + [4] * 2 + [5] * 3
    own = [i for i, token in enumerate(trace.tokens) if token.origin == "own"]
    assert own == [0, 11, 16], "before all drafts, behind a whole one, and behind one that the limit cut"
    assert [i for i, token in enumerate(trace.tokens) if token.origin == "corrected"] == [4, 5, 13]


def test_what_had_been_proposed(scripted, trace):
    for token in trace.tokens:
        if token.origin == "corrected":
            assert token.proposed.token_id == (token.token_id + 1) % VOCAB_SIZE
            assert (token.proposed.probability, token.drafter_probability) == (1, 0)
        elif token.origin == "accepted":
            assert token.proposed.token_id == token.token_id and token.drafter_probability == 1
        else:
            assert token.proposed is None and token.drafter_probability is None and not token.drafter_top
    assert list(map(len, trace.drafts)) == [5, 5, 5, 4, 2]
    first = [each.token_id for each in trace.drafts[0]]
    wrong = [(token_id + 1) % VOCAB_SIZE for token_id in scripted.new_tokens[4:6]]
    assert first == scripted.new_tokens[1:4] + wrong, "what was never verified is kept, too"
    assert trace.accepted_shares == [4 / 5, 3 / 5, 2 / 4, 1 / 4, 1 / 3]


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 1.5, "top_k": 0}])
def test_probabilities_are_the_models_own(sampling):
    target, temperature = make_target("llama"), sampling.get("temperature", 1)
    torch.manual_seed(0)
    drafter = RecordingDrafter(make_drafter(target).config).eval()
    trace = trace_generation(
        target, drafter, make_tokenizer(), make_inputs(target, PROMPT_LENGTH), max_new_tokens=40, **sampling
    )
    ids = torch.tensor([token.token_id for token in trace.tokens])
    with torch.no_grad():
        logits = target(torch.cat([make_inputs(target, PROMPT_LENGTH)["input_ids"], ids[None]], dim=1)).logits[0]
    expected = (logits[PROMPT_LENGTH - 1 : -1] / temperature).softmax(dim=-1)
    row, last = 0, None
    for token, probs in zip(trace.tokens, expected, strict=True):
        assert token.target_probability == pytest.approx(probs[token.token_id].item(), abs=1e-4)
        assert [each.probability for each in token.target_top] == pytest.approx(probs.topk(5).values, abs=1e-4)
        row, last = (row + 1 if token.round == last else 0), token.round
        if token.proposed is not None:
            draft_ids, draft_logits = drafter.rounds[token.round - 1]
            draft_probs = draft_logits[0, row].softmax(dim=-1)
            assert token.proposed.token_id == draft_ids[0, row]
            assert token.drafter_probability == pytest.approx(draft_probs[token.token_id].item())
            assert token.proposed.probability == pytest.approx(draft_probs[token.proposed.token_id].item())
            assert [each.token_id for each in token.drafter_top] == draft_probs.topk(5).indices.tolist()
    origins = {token.origin for token in trace.tokens}
    assert "corrected" in origins and ("accepted" in origins or not sampling["do_sample"])


@pytest.mark.parametrize("do_sample", [False, True])
def test_tracing_changes_no_output(do_sample):
    target = make_target("llama")
    drafter, inputs = make_drafter(target), make_inputs(target, PROMPT_LENGTH)
    options = {"max_new_tokens": 40, "do_sample": do_sample}
    torch.manual_seed(3)
    expected = target.generate(**inputs, assistant_model=drafter, **options)[0, PROMPT_LENGTH:]
    random_number = torch.rand(1)
    torch.manual_seed(3)
    trace = trace_generation(target, drafter, make_tokenizer(), inputs, **options)
    assert [token.token_id for token in trace.tokens] == expected.tolist()
    assert torch.rand(1) == random_number


def test_rounds_are_observed_by_their_own_block(scripted):
    seen = []
    with speculation_statistics(on_round=lambda *arguments: seen.append(arguments)) as statistics:
        with speculation_statistics():
            scripted.generate(max_new_tokens=5)
        assert not seen and statistics.num_rounds == 1
        scripted.generate(max_new_tokens=6)  # the last token leaves no room for a draft
    assert [draft_ids.shape for draft_ids, _, _ in seen] == [(1, 4), (1, 0)]
    assert seen[0][1].shape == (1, 4, VOCAB_SIZE) and seen[1][1] is None
    assert torch.cat([emitted for _, _, emitted in seen], dim=1)[0].tolist() == scripted.new_tokens[1:6]


def test_the_page_shows_the_text_as_it_is(scripted, trace):
    tokenizer = make_tokenizer(dict.fromkeys(scripted.new_tokens))
    text = tokenizer.decode(scripted.new_tokens[:NUM_NEW_TOKENS])
    assert trace.text == text
    assert all(odd in text for odd in ("</script>", "<b>", "&amp;", "\0", "\r", "\n", "\t", "✓"))
    html = trace.to_html()
    assert "\r" not in html and "\0" not in html, "a browser would change them"
    page = Page(html)
    assert page.output == text.replace("\0", "␀")
    assert not page.stack, "every element ends"
    assert trace.prompt == tokenizer.decode(scripted.inputs["input_ids"][0])
    assert page.prompt == trace.prompt.replace("\0", "␀")


def test_the_page_tells_how_tokens_came(trace):
    page = Page(trace.to_html())
    tokens = page.tokens()
    assert [attrs["class"].split()[1] for attrs in tokens] == [token.origin for token in trace.tokens]
    assert [int(attrs.get("data-position", 0)) for attrs in tokens] == [0, *ORIGINS]
    assert [attrs["tabindex"] for attrs in tokens] == ["0"] + ["-1"] * 16, "one stop for the tab key, arrows within"
    rounds = [attrs["data-round"] for tag, attrs in page.tags if attrs.get("class") == "round"]
    assert rounds == list("012345")
    proposed = [attrs["data-text"] for tag, attrs in page.tags if tag == "s"]
    assert proposed == [visible(trace.tokens[i].proposed.text) for i in (4, 5, 13)]
    data = json.loads(page.data)
    assert [each["position"] for each in data["tokens"]] == [0, *ORIGINS]
    assert [(each["accepted"], each["emitted"]) for each in data["rounds"]] == [(3, 4), (0, 1), (5, 6), (1, 2), (2, 3)]
    corrected = data["tokens"][4]
    assert corrected["drafterTop"] == [[visible(trace.tokens[4].proposed.text), 1.0, "100%"]]
    assert corrected["drafter"] == "0%" and corrected["target"].endswith("%")
    assert data["tokens"][0]["drafter"] is None


def test_the_page_s_header(trace):
    page = Page(trace.to_html())
    for figure in ("tau3.20", "tokens17", "rounds5", "drafts accepted52.4% 11 of 21", "80.0%1", "33.3%5"):
        assert figure in page.other.replace("\n", ""), figure
    for name, value in {**trace.settings, **trace.versions}.items():
        assert f"{name}{value}" in page.other
    assert trace.settings == {"max_new_tokens": NUM_NEW_TOKENS, "do_sample": False}


def test_the_page_loads_nothing(trace):
    html = trace.to_html()
    page = Page(html)
    assert not {"src", "href"} & {name for _, attrs in page.tags for name in attrs}
    assert not {tag for tag, _ in page.tags} & {"link", "iframe", "img", "object"}
    assert "url(" not in html and "@import" not in html and "fetch(" not in html
    policy = next(attrs["content"] for tag, attrs in page.tags if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none'")


def test_names_are_escaped_and_folders_left_out(scripted, trace, tmp_path):
    scripted.target.name_or_path, scripted.drafter.name_or_path = "/home/me/<target>", "owner/a&b"
    scripted.drafter.replay(scripted.target, scripted.plain)
    trace = trace_generation(scripted.target, scripted.drafter, make_tokenizer(), scripted.inputs, max_new_tokens=2)
    trace.save(tmp_path / "trace.html")
    html = (tmp_path / "trace.html").read_text(encoding="utf-8")
    assert "&lt;target&gt;" in html and "<target>" not in html and "/home" not in html
    assert "owner/a&b" in Page(html).other


@pytest.mark.parametrize(("max_new_tokens", "tau"), [(1, "–"), (2, "1.00")])
def test_a_generation_without_a_draft(max_new_tokens, tau):
    target = make_target("llama")
    inputs = {"inputs_embeds": target.get_input_embeddings()(make_inputs(target, 4)["input_ids"])}
    trace = trace_generation(target, make_drafter(target), make_tokenizer(), inputs, max_new_tokens=max_new_tokens)
    assert [token.origin for token in trace.tokens] == ["own"] * max_new_tokens
    assert trace.prompt is None and trace.accepted_shares == []
    page = Page(trace.to_html())
    assert f"tau{tau}" in page.other.replace("\n", "") and "drafts accepted– " in page.other.replace("\n", "")
    assert page.prompt == "" and "Prompt" not in page.other


def test_a_character_of_several_tokens_falls_to_the_last():
    tokenizer = make_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(name) for name in ("w1", *BYTES.values(), "w2", "â", "w1", "Ù", "Ī", "â")]
    texts = _split_text(tokenizer, ids)
    assert texts == ["w1", "", "", "✓", "w2", "\ufffd", "w1", "", "و", "\ufffd"], "broken characters stay so"
    assert "".join(texts) == tokenizer.decode(ids)
    names = _TokenNames(tokenizer)
    assert [names[token_id] for token_id in ids[:3]] == ["w1", "<0xE2>", "<0x9C>"]
    assert names[VOCAB_SIZE - 1] == f"<id {VOCAB_SIZE - 1}>"


def test_one_line_for_a_token():
    assert visible(" a\n\tb\r") == "␣a↵⇥b␍"
    assert visible("\u202e\0é✓ل") == "\\u202e\\x00é✓ل"


def test_settings_are_those_in_force():
    target = make_target("llama")
    target.generation_config.update(do_sample=True, top_k=20, temperature=0.5)
    tokenizer, inputs = make_tokenizer(), make_inputs(target, 4)
    arguments = (target, make_drafter(target), tokenizer, inputs)
    trace = trace_generation(*arguments, max_new_tokens=3, temperature=0.7, logits_processor=LogitsProcessorList())
    assert trace.settings == {
        "do_sample": True,
        "top_k": 20,
        "temperature": 0.7,
        "max_new_tokens": 3,
        "logits_processor": "LogitsProcessorList",
    }
    trace = trace_generation(*arguments, max_new_tokens=3, do_sample=False, streamer=TextStreamer(tokenizer))
    assert trace.settings == {"do_sample": False, "max_new_tokens": 3, "streamer": "TextStreamer"}


def test_what_cannot_be_traced():
    target = make_target("llama")
    drafter, tokenizer, inputs = make_drafter(target), make_tokenizer(), make_inputs(target, 4)
    with pytest.raises(ValueError, match="`drafter` is a LlamaForCausalLM, whose proposals cannot be traced"):
        trace_generation(target, target, tokenizer, inputs)
    with pytest.raises(TypeError, match="output_scores"):
        trace_generation(target, drafter, tokenizer, inputs, output_scores=False)

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        return model._sample(input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)

    with pytest.raises(ValueError, match="Of 3 tokens the drafter's rounds emitted 0"):
        trace_generation(target, drafter, tokenizer, inputs, custom_generate=loop, max_new_tokens=3)
