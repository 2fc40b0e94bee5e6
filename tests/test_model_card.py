# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""A card states what the folder and the reports hold, invents nothing, and its snippet runs."""

import re

import pytest
from huggingface_hub import ModelCard, ModelCardData

from dlite_hf import DLiteConfig, DLiteForDrafting
from dlite_hf.evaluation.report import Report
from dlite_hf.model_card import create_model_card
from dlite_hf.training_record import TrainingRecord

from .evaluation.reports import measurement, report, row
from .targets import make_drafter, make_target
from .test_model_cards import make_stand_in, run_snippet
from .test_training_record import make_run


TARGET = "owner/target"


def save_drafter(folder, **overrides):
    """A tiny drafter as `save_pretrained` writes it."""
    drafter = make_drafter(make_target("llama"), target_name_or_path=TARGET, **overrides)
    drafter.save_pretrained(folder)
    return drafter


def table_row(card, first_cell):
    """The cells behind `first_cell`, several cells perhaps, in the only table line that begins with it."""
    (line,) = re.findall(rf"^\| {re.escape(first_cell)} \| (.*) \|$", card.text, re.MULTILINE)
    return line.split(" | ")


@pytest.fixture
def folder(tmp_path):
    save_drafter(tmp_path / "tiny-DLite")
    return tmp_path / "tiny-DLite"


def test_metadata_survives_a_round_trip(folder, tmp_path):
    card = create_model_card(folder, license="mit", language="en", datasets=["owner/set"], repo_id="me/tiny")
    card.save(tmp_path / "README.md")
    loaded = ModelCard.load(tmp_path / "README.md")
    assert ModelCardData(**loaded.data.to_dict()).to_dict() == card.data.to_dict()
    assert loaded.data.to_dict() == {
        "license": "mit",
        "language": "en",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": TARGET,
        "base_model_relation": "adapter",
        "datasets": ["owner/set"],
        "tags": ["dlite", "speculative-decoding", "draft-model"],
    }


def test_unknown_metadata_are_left_out(folder):
    card = create_model_card(folder)
    assert not {"license", "language", "datasets"} & card.data.to_dict().keys()
    assert "No licence was stated for the drafter itself." in card.text


def test_states_the_architecture(folder):
    drafter = DLiteForDrafting.from_pretrained(folder)
    card = create_model_card(folder)
    last = drafter.config.num_target_layers - 1
    assert table_row(card, "target layers read, S") == [f"3 of {last + 1}: 0, 2, {last}"]
    assert table_row(card, "tokens proposed a round, K") == [str(drafter.config.num_draft_tokens)]
    assert table_row(card, "draft vocabulary") == ["all 97 tokens"]
    assert table_row(card, "parameters") == [f"{sum(p.numel() for p in drafter.parameters()) / 1e6:.1f}M"]
    assert table_row(card, "target's revision") == ["not recorded"]
    assert "keeps no history" in card.text and "quantised (" not in card.text


def test_states_what_is_special(tmp_path):
    drafter = save_drafter(tmp_path, history_window=16, target_quantization="gguf", target_revision="abc123")
    drafter.reduce_draft_vocabulary(range(1, 41))
    drafter.save_pretrained(tmp_path)
    card = create_model_card(tmp_path)
    assert "keeps no history" not in card.text and "reads the last 16 verified tokens" in card.text
    assert table_row(card, "target's revision") == ["abc123"] and table_row(card, "target's quantisation") == ["gguf"]
    assert table_row(card, "draft vocabulary") == ["40 of 97 tokens"]
    assert re.fullmatch(
        r"F32, [\d.]+ MB", table_row(card, "weights")[0]
    )  # the ids of the draft vocabulary are integers
    assert "Its target was quantised (gguf) in training." in card.text


def test_states_the_training(folder):
    TrainingRecord([make_run(max_length=512, hardware="8 x GPU", versions={"torch": "2.0"})]).save(folder)
    card = create_model_card(folder)
    assert table_row(card, "warmup") == ["500", "64,000", "0.50"]
    assert table_row(card, "stable") == ["2,000", "256,000", "1.50"]
    assert table_row(card, "target as it ran") == [
        "owner/target, revision abc123, dtype bfloat16, quantisation none recorded"
    ]
    assert table_row(card, "learning rate") == ["0.0004, cosine"]
    assert table_row(card, "samples a step") == ["24 (2 a device, 4 accumulated, 3 processes)"]
    assert table_row(card, "loss") == ["0.1 CE (argmax labels) + 1 TV, forward KL in the warm-up; gamma 4"]
    assert table_row(card, "hardware") == ["8 x GPU"] and table_row(card, "versions") == ["torch 2.0"]
    assert table_row(card, "answers.jsonl") == [
        "1,500", "90,000", r"MIT: 1,200<br>CC-BY\|4.0: 300", "owner/set: 1,500"
    ]  # fmt: skip
    assert "at most 512 tokens of a conversation" in card.text and "### Run" not in card.text


@pytest.mark.parametrize("best_step", [None, 1500])
def test_states_whose_weights_they_are(folder, best_step):
    TrainingRecord([make_run(best_step=best_step)]).save(folder)  # 500 steps of the warm-up, and 2000
    sentence = "The weights are those of step 1,500 of 2,500, the best of its evaluations."
    assert (sentence in create_model_card(folder).text) is (best_step is not None)


def test_states_every_run(folder):
    TrainingRecord([make_run(finished_at="2026-01-02", data=[]), make_run(finished_at="2026-01-03")]).save(folder)
    text = create_model_card(folder).text
    assert "### Run 1 of 2, 2026-01-02" in text and "### Run 2 of 2, 2026-01-03" in text
    assert text.count("The data were not recorded.") == 1


def test_states_what_is_missing(folder):
    text = create_model_card(folder).text
    assert "How it was trained was not recorded." in text
    assert "No evaluation was given when this card was made." in text
    assert "tau: not measured. Speed: not measured." in text


def save_report(file, rows, **options):
    report(rows, ("plain", "prompt_lookup", "dlite"), **options).save(file)
    return file


def test_figures_of_a_report(folder, tmp_path):
    """Plain needs 11 s for 11 tokens; drafted 5.5 and 22 s. What needs no drafter stands beside it."""
    counters = {"rounds": 4, "emitted": 10, "accepted_per_position": [4, 2]}
    rows = [
        row(dlite=measurement(seconds=5.5, **counters), prompt_lookup=measurement(seconds=5.0)),
        row(task="bfcl", dlite=measurement(seconds=22.0, **counters), prompt_lookup=measurement()),
    ]
    conditions = {"thinking": False, "max_new_tokens": 30, "threads": 2, "dtype": "bfloat16", "machine": "a machine"}
    made = Report.load(save_report(tmp_path / "report.json", rows, **conditions))
    made.methods[-1]["settings"] = {"assistant_confidence_threshold": 0.2}
    made.save(tmp_path / "report.json")
    text = create_model_card(folder, [tmp_path / "report.json"]).text
    assert (
        "### bfloat16: gsm8k, bfcl\n\nMeasured with thinking mode: off; new tokens, at most: 30; attention: not "
        "recorded; machine: a machine; threads: 2; torch: not recorded; transformers: not recorded; K of "
        "prompt_lookup: not set; K of dlite: 7; settings of dlite: assistant_confidence_threshold 0.2."
    ) in text
    card = ModelCard(text)
    assert table_row(card, "gsm8k | dlite")[:5] == ["1", "2.50", "1.50", "2.00x", "2.22x"]
    assert table_row(card, "gsm8k | plain")[:2] == ["1", "1.00"]
    assert "* dlite on bfcl, temperature 0: end to end 0.50x, decoding 0.48x" in text
    assert "100%, 50%" in text and "* dlite: 2 of 2 outputs are plain generation's." in text
    assert table_row(card, "gsm8k | prompt_lookup")[3] == "2.20x"


def test_a_drafter_is_known_by_its_folder_or_by_its_repository(folder, tmp_path):
    file = save_report(tmp_path / "report.json", [row(dlite=measurement())], checkpoint="published")
    assert "gsm8k | dlite" in create_model_card(folder, [file], repo_id="owner/published").text
    with pytest.raises(ValueError, match=r"no drafter 'tiny-DLite', but \['published'\]"):
        create_model_card(folder, [file])


def test_what_is_no_report_is_refused(folder, tmp_path):
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(ValueError, match="^report.json is no report of `dlite-hf evaluate`"):
        create_model_card(folder, [tmp_path / "report.json"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"license": "Apache 2.0"}, "`license` is 'Apache 2.0'"),
        ({"repo_id": "a/b/c"}, "`repo_id` is 'c'"),
        ({"base_model": "/home/jane/target"}, "`base_model` is 'target'"),
        ({"datasets": ["yizhongw/self instruct"]}, "`datasets` is 'self instruct'"),
    ],
)
def test_what_the_hub_would_refuse_is_refused(folder, arguments, message):
    with pytest.raises(ValueError, match=message) as raised:
        create_model_card(folder, **arguments)
    assert "jane" not in str(raised.value)


def test_a_target_known_by_its_folder_needs_a_name(tmp_path):
    save_drafter(tmp_path / "drafter")
    config = DLiteConfig.from_pretrained(tmp_path / "drafter", target_name_or_path=str(tmp_path))
    config.save_pretrained(tmp_path / "drafter")
    with pytest.raises(ValueError, match=f"names the target {tmp_path.name!r}.*pass `base_model`"):
        create_model_card(tmp_path / "drafter")
    assert create_model_card(tmp_path / "drafter", base_model="owner/named").data.base_model == "owner/named"


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="'tiny-DLite' holds no model.safetensors"):
        create_model_card(folder)


def test_snippet_runs_offline(folder, tmp_path):
    (snippet,) = re.findall(r"```python\n(.*?)```", create_model_card(folder, repo_id="me/tiny").text, re.DOTALL)
    assert set(re.findall(r'from_pretrained\("([^"]+)"', snippet)) == {TARGET, "me/tiny"}
    make_stand_in(DLiteConfig.from_pretrained(folder), tmp_path / "target")
    run_snippet(snippet, {TARGET: tmp_path / "target", "me/tiny": folder})
