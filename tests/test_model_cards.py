# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Every published folder is complete: it loads offline, its snippet runs as written, its metadata is right."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dlite_hf import DLiteConfig, DLiteForDrafting


FOLDERS = sorted(path.parent for path in (Path(__file__).parents[1] / "model_cards").glob("*/config.json"))
each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def make_stand_in(config: DLiteConfig, folder: Path) -> None:
    """A random target of the shapes that the drafter serves, with a word-level tokenizer."""
    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=64,
            num_hidden_layers=config.num_target_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            tie_word_embeddings=True,
        )
    )
    target.to(torch.bfloat16).save_pretrained(folder)
    words = {word: i for i, word in enumerate(["<unk>", "<eos>", "A", "pencil", "costs", "How", "much", "?"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", chat_template=template
    ).save_pretrained(folder)


def run_snippet(snippet: str, local_folders: dict[str, Path]) -> subprocess.CompletedProcess:
    """Runs a card's snippet offline in a process of its own, the ids replaced by folders."""
    for repo_id, folder in local_folders.items():
        snippet = snippet.replace(f'"{repo_id}"', repr(str(folder)))
    process = subprocess.run(
        [sys.executable, "-c", snippet + "\nprint('emitted', output.shape[1] - inputs['input_ids'].shape[1])"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert re.search(r"emitted [1-9]", process.stdout)
    assert "trust_remote_code" not in snippet
    return process


@each_folder
def test_snippet_runs_offline(folder, tmp_path):
    config = DLiteConfig.from_pretrained(folder)
    assert config.target_model_type == "llama"  # what the stand-in is
    target_folder = tmp_path / config.target_name_or_path.split("/")[-1]
    make_stand_in(config, target_folder)
    (snippet,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    repo_ids = set(re.findall(r'from_pretrained\("([^"]+)"', snippet))
    assert len(repo_ids) == 2 and config.target_name_or_path in repo_ids
    local_folders = {each: target_folder if each == config.target_name_or_path else folder for each in repo_ids}
    process = run_snippet(snippet, local_folders)
    assert "The drafter was trained for" not in process.stderr  # the folder's name is the target's


@each_folder
def test_metadata(folder):
    card = ModelCard.load(folder / "README.md")
    config = DLiteConfig.from_pretrained(folder)
    assert card.data.base_model == config.target_name_or_path
    assert card.data.license == "apache-2.0"
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.base_model_relation in {"adapter", "finetune", "merge", "quantized"}
    assert {"dlite", "speculative-decoding"} <= set(card.data.tags)
    assert config.target_quantization in card.text


@each_folder
def test_weights(folder):
    file = folder / "model.safetensors"
    assert file.stat().st_size <= 50_000_000
    with safe_open(file, "pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.bfloat16}
    _, info = DLiteForDrafting.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
