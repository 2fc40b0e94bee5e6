# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The script: from conversations to a drafter, stopped and resumed."""

import json
import sys
from pathlib import Path

import pytest
import torch
import train_baseline
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from ..targets import SIZES, make_chatml_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target of eight layers, so that each method has layers of its own to read, and conversations."""
    folder = tmp_path_factory.mktemp("script")
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 8, "eos_token_id": 1}))
    target.save_pretrained(folder / "target")
    make_chatml_tokenizer().save_pretrained(folder / "target")
    talks = [
        {"messages": [{"role": "user", "content": f"Say {word}"}, {"role": "assistant", "content": f"{word}, it is"}]}
        for word in ("yes", "no", "perhaps")
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(each) + "\n" for each in talks))
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    """The script; it raises the verbosity of Transformers' logging, which is put back."""
    verbosity = logging.get_verbosity()

    def run(method: str, output: str, *more: str) -> Path:
        arguments = {
            "method": method,
            "target": folder / "target",
            "train_files": folder / "answers.jsonl",
            "store": folder / "store.pt",
            "output_dir": folder / output,
            "mask_token_id": 96,
            "target_dtype": "float32",
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "save_steps": 2,
            "disable_tqdm": "true",
        }
        command = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
        monkeypatch.setattr(sys, "argv", ["train_baseline.py", *command, "--use_cpu", *more])
        train_baseline.main()
        return folder / output / "drafter"

    yield run
    logging.set_verbosity(verbosity)


@pytest.mark.parametrize(
    ("method", "options", "layer_ids"),
    [
        ("dflash", ["--num_hidden_layers", "2"], [1, 2, 3, 4, 5]),
        ("dspark", ["--num_hidden_layers", "1", "--markov_rank", "4"], [1, 2, 3, 4, 5]),
        ("eagle3", ["--draft_vocab_size", "20"], [1, 3, 4]),
    ],
)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(run, folder, method, options, layer_ids):
    whole = run(method, f"{method}_whole", *options)
    config = json.loads((whole / "config.json").read_text())
    assert config["target_layer_ids"] == layer_ids
    weights = load_file(whole / "model.safetensors")
    checkpoint = folder / f"{method}_whole" / "checkpoint-2"
    halfway = load_file(checkpoint / "model.safetensors")
    assert any(not torch.equal(weights[name], halfway[name]) for name in weights)
    resumed = run(method, f"{method}_resumed", *options, "--resume_from_checkpoint", str(checkpoint))
    for name, values in load_file(resumed / "model.safetensors").items():
        torch.testing.assert_close(values, weights[name], rtol=0, atol=0)
    assert torch.load(folder / "store.pt")["layer_ids"].tolist() == [1, 2, 3, 4, 5, 7]


def test_a_store_of_other_conversations_is_refused(run, folder, tmp_path):
    run("eagle3", "first", "--max_steps", "1")
    other = tmp_path / "answers.jsonl"
    other.write_text((folder / "answers.jsonl").read_text().replace("perhaps", "never"))
    with pytest.raises(ValueError, match="was written with `train_files` {'answers.jsonl': '.*name another `store`"):
        run("eagle3", "second", "--train_files", str(other))
    with pytest.raises(ValueError, match="was written with `window` 4096, but this run has 100; name"):
        run("eagle3", "second", "--max_length", "100")


def test_options_of_another_method_are_refused(run):
    with pytest.raises(ValueError, match="`draft_vocab_size` is set, but dflash has none"):
        run("dflash", "refused", "--draft_vocab_size", "20")
