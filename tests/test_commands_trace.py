# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer, HfArgumentParser, LlamaForCausalLM

from dlite_hf import cli
from dlite_hf.commands.trace import TraceArguments, main

from .test_regeneration import make_tokenizer
from .test_trace import Page


TOOL = {"name": "w80", "parameters": {"type": "object", "properties": {}}}
RECORDS = [
    {"id": 1, "turns": ["w9 w10", "w11"]},
    {
        "id": "talk",
        "messages": [{"role": "user", "content": "w12"}, {"role": "assistant", "content": "w13"}],
        "tools": [TOOL],
    },
    {"id": "open", "messages": [{"role": "user", "content": "w14"}]},
    {"id": "empty"},
    {"id": "image", "messages": [{"role": "user", "content": [{"type": "image"}]}]},
    {"id": "answer", "messages": [{"role": "assistant", "content": "w15"}]},
]


@pytest.fixture
def models(tiny_llama, make_drafter, tmp_path):
    """Folders of a target, with a chat template, and of its drafter."""
    tiny_llama.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    make_drafter(tiny_llama).save_pretrained(tmp_path / "drafter")
    return ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS), encoding="utf-8")
    return str(file)


@pytest.fixture
def trace(models, tmp_path):
    """Runs the command and reads the page."""

    def run(*arguments):
        output = tmp_path / "trace.html"
        arguments = [*models, "--output", output, *arguments]
        main(HfArgumentParser(TraceArguments).parse_args_into_dataclasses(list(map(str, arguments)))[0])
        return Page(output.read_text(encoding="utf-8"))

    return run


def test_a_prompt(trace, models, capsys):
    page = trace("--prompt", "w9 w10", "--max_new_tokens", 20)
    assert page.prompt.split() == "<|im_start|> user w9 w10 <|im_end|> <|im_start|> assistant".split()
    target, tokenizer = LlamaForCausalLM.from_pretrained(models[1]), AutoTokenizer.from_pretrained(models[1])
    inputs = tokenizer("<|im_start|> user w9 w10 <|im_end|> <|im_start|> assistant", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    plain = target.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert page.output == tokenizer.decode(plain)
    assert "do_sampleFalse" in page.other and "dtypefloat32" in page.other and "seed" not in page.other
    printed = re.fullmatch(
        r"Wrote .*trace.html: 20 tokens in (\d+) rounds, tau (\d\.\d\d)\.\n", capsys.readouterr().out
    )
    assert float(printed[2]) == round(19 / int(printed[1]), 2)
    assert f"tau{printed[2]}" in page.other.replace("\n", "")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("1", "<|im_start|> user w9 w10 <|im_end|> <|im_start|> assistant"),
        ("talk", "tools w80 <|im_start|> user w12 <|im_end|> <|im_start|> assistant"),
        ("open", "<|im_start|> user w14 <|im_end|> <|im_start|> assistant"),
    ],
)
def test_a_record(trace, prompts, name, expected):
    page = trace("--prompts", prompts, "--id", name, "--max_new_tokens", 2)
    assert page.prompt.split() == expected.split()


def test_sampling_repeats_itself_by_its_seed(trace):
    sampling = ["--prompt", "w9", "--max_new_tokens", 20, "--temperature", 1.5]
    pages = [trace(*sampling, "--seed", seed) for seed in (1, 1, 2)]
    assert pages[0].output == pages[1].output != pages[2].output
    for setting in ("do_sampleTrue", "temperature1.5", "top_k0", "seed1"):
        assert setting in pages[0].other


def test_the_target_s_own_top_k_stays(trace, models, tiny_llama):
    tiny_llama.generation_config.update(do_sample=True, top_k=3)
    tiny_llama.save_pretrained(models[1])
    assert "top_k3" in trace("--prompt", "w9", "--max_new_tokens", 2, "--temperature", 1).other


def test_options_of_the_template_and_dtype(trace):
    options = ["--chat_template_kwargs", '{"quiet": true}', "--dtype", "bfloat16"]
    page = trace("--prompt", "w9", "--max_new_tokens", 2, *options)
    assert page.prompt.split()[-1] == "w90" and "dtypebfloat16" in page.other


def test_without_a_chat_template(trace, models, prompts):
    Path(models[1], "chat_template.jinja").unlink()
    assert trace("--prompt", "w9 w10", "--max_new_tokens", 2).prompt.split() == ["w9", "w10"]
    with pytest.raises(ValueError, match="has no chat template to render messages with"):
        trace("--prompts", prompts, "--id", "open")
    with pytest.raises(ValueError, match="and no `chat_template_kwargs`"):
        trace("--prompt", "a", "--chat_template_kwargs", "{}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "`prompt` None and `prompts` None do not say what is asked"),
        (["--prompt", "a", "--prompts", "b", "--id", "c"], "do not say what is asked; pass one of them"),
        (["--prompts", "b"], "`id` None and `prompts` 'b' belong together"),
        (["--prompt", "a", "--id", "c"], "`id` 'c' and `prompts` None belong together"),
        (["--prompt", "a", "--max_new_tokens", "0"], "`max_new_tokens` is 0, but must be at least 1"),
        (["--prompt", "a", "--temperature=-1"], "`temperature` is -1.0, but must be at least 0"),
        (["--prompt", "a", "--temperature=nan"], "`temperature` is nan, but must be at least 0"),
        (["--prompt", "a", "--output=."], "`output` is '.'; name a file in a folder that exists"),
        (["--prompt", "a", "--output=no/where.html"], "`output` is 'no/where.html'; name a file"),
        (["--prompt", "a", "--chat_template_kwargs", "[1]"], "must be a JSON object"),
    ],
)
def test_refused_arguments(arguments, message, capsys):
    assert cli.main(["trace", "--target=t", "--drafter=d", "--output=o", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_prompt_without_room_is_refused(trace, tiny_llama):
    context = tiny_llama.config.max_position_embeddings
    with pytest.raises(ValueError, match=rf"`max_new_tokens` {context - 3} exceed the target's context of {context};"):
        trace("--prompt", "w9 w10 w11", "--max_new_tokens", context - 3)


def test_refused_records(trace, prompts):
    with pytest.raises(ValueError, match="has no record with the `id` 'none'"):
        trace("--prompts", prompts, "--id", "none")
    with pytest.raises(ValueError, match="'empty' of .* has the fields \\['id'\\]; give an `id` and either"):
        trace("--prompts", prompts, "--id", "empty")
    for name, message in (("image", "only text can be given"), ("answer", "'answer' of .* is an answer alone")):
        with pytest.raises(ValueError, match=message):
            trace("--prompts", prompts, "--id", name)
