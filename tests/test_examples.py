# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What a newcomer runs first: README's snippet, and the demo without a Hub; the target is a random stand-in."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlite_hf import DLiteConfig

from .test_model_cards import make_stand_in, run_snippet


ROOT = Path(__file__).parents[1]
TARGET, DRAFTER = "HuggingFaceTB/SmolLM2-135M-Instruct", "model_cards/SmolLM2-135M-Instruct-DLite"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """`DLITE_HF_CACHE` after a first demo."""
    folder = tmp_path_factory.mktemp("cache")
    make_stand_in(DLiteConfig.from_pretrained(ROOT / DRAFTER), folder / "SmolLM2-135M-Instruct-Q4_1-dequantised")
    return folder


@pytest.mark.parametrize("more", [None, "sdpa_packed"])
def test_snippets_of_readme(cache, more):
    """The first one, and one that goes on from it."""
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    snippet = snippets[0]
    if more is not None:
        (following,) = [each for each in snippets if more in each]
        snippet += following
    (target,) = cache.iterdir()
    process = run_snippet(snippet, {TARGET: target, DRAFTER: ROOT / DRAFTER})
    assert re.fullmatch(r"emitted [1-9]\d*\n", process.stdout)  # which the test prints, and the snippet nothing


def test_demo_without_a_hub(cache, tmp_path):
    process = subprocess.run(
        [sys.executable, "-c", "import quickstart\nquickstart.MAX_NEW_TOKENS = 8\nquickstart.main()"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "DLITE_HF_CACHE": str(cache)},
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    output = process.stdout
    assert f"Target: {TARGET}, Q4_1 dequantised weights, bfloat16" in output
    assert output.count("--- without drafter") == output.count("--- with drafter") == 5
    # The random target emits 8 tokens a prompt, each of which the drafter did not foresee.
    assert re.search(r"^all +\d of 5 identical +\d\.\d\d( +\d+\.\d){2} +\d+\.\d\dx$", output, re.MULTILINE)
