# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The script that measures rivals with a loop of their own beside all others."""

import json
import sys

import evaluate_baselines
import pytest
import torch
from dspark import make_dspark
from eagle3 import make_eagle3
from transformers import LlamaConfig, LlamaForCausalLM

from dlite_hf.evaluation.report import Report

from ..targets import SIZES, make_chatml_tokenizer, make_drafter, make_target
from .support import NUM_DRAFT_TOKENS, make_shape


@pytest.fixture
def folder(tmp_path):
    target = make_target("llama")
    target.save_pretrained(tmp_path / "target")
    make_chatml_tokenizer().save_pretrained(tmp_path / "target")
    make_drafter(target).save_pretrained(tmp_path / "dlite")
    torch.manual_seed(0)
    make_dspark(make_shape(target), 4).save_pretrained(tmp_path / "dspark")
    make_eagle3(make_shape(target), target, None).save_pretrained(tmp_path / "eagle3")
    turns = [{"id": str(i), "turns": [text, "two"]} for i, text in enumerate(("one one", "three"))]
    (tmp_path / "short.jsonl").write_text("".join(json.dumps(record) + "\n" for record in turns))
    return tmp_path


def test_a_rival_of_another_target_is_refused(folder):
    target = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 3}))
    rivals = evaluate_baselines.RivalArguments(eagle3=str(folder / "eagle3"))
    with pytest.raises(ValueError, match=r"'EAGLE-3' reads the layers \[0, 2, 4\], but LlamaForCausalLM has 3; load"):
        evaluate_baselines.rival_methods(rivals, target)


@pytest.mark.parametrize("rivals", [["dspark", "eagle3"], ["eagle3"], []])
def test_rivals_are_measured_beside_the_others(folder, monkeypatch, rivals):
    options = [text for name in rivals for text in (f"--{name}", str(folder / name))]
    command = ["--target", str(folder / "target"), "--tasks", str(folder / "short.jsonl"), "--output_dir"]
    command += [str(folder / "out"), "--drafters", f"DLite={folder}/dlite", "--max_new_tokens", "8", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["evaluate_baselines.py", *command, *options])
    evaluate_baselines.main()
    report = Report.load(folder / "out" / "report.json")
    names = [{"dspark": "DSpark", "eagle3": "EAGLE-3"}[name] for name in rivals]
    assert report.names == ["plain", "prompt_lookup", "DLite", *names]
    assert len(report.rows) == 4
    methods = {method["name"]: method for method in report.methods}
    for row in report.rows:
        for name in names:
            assert row["identical"][name]
            assert 8 > row["measurements"][name]["rounds"] > 0
            assert methods[name]["num_draft_tokens"] == NUM_DRAFT_TOKENS
            assert len(methods[name]["sha256"]) == 64
            assert methods[name]["parameters"] > 0
