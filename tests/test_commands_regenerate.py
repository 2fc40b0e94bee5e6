# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
import json

import pytest
from transformers import HfArgumentParser

from dlite_hf import cli
from dlite_hf.commands.regenerate import RegenerateArguments, main
from dlite_hf.regeneration import RegenerationCounts

from .test_regeneration import CONVERSATIONS, answer_text, assistant, make_tokenizer, user
from .test_regeneration_remote import server  # noqa: F401


@pytest.fixture
def prompts(tmp_path):
    """Two files: conversations, and texts of a user in order."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text("".join(json.dumps(conversation) + "\n" for conversation in CONVERSATIONS[:2]))
    second.write_text(json.dumps({"id": "turns", "turns": ["w9", "w10 w11"], "category": "a test"}) + "\n")
    return [str(first), str(second)]


@pytest.fixture
def target(tiny_llama, tmp_path):
    folder = tmp_path / "target"
    tiny_llama.generation_config.update(do_sample=True, top_k=20, pad_token_id=0)
    tiny_llama.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def parse(*arguments):
    return HfArgumentParser(RegenerateArguments).parse_args_into_dataclasses(list(map(str, arguments)))[0]


def read(file):
    return {record["id"]: record for record in map(json.loads, file.read_text(encoding="utf-8").splitlines())}


def test_in_this_process(prompts, target, tiny_llama, tmp_path, capsys):
    file = tmp_path / "answers.jsonl"
    command = ["--prompts", *prompts, "--output", file, "--target", target, "--max_new_tokens", 12]
    main(parse(*command))
    assert capsys.readouterr().out.startswith("3 succeeded (0 of them in an earlier call, 0 shortened) + 0 failed")
    records = read(file)
    assert records["turns"]["category"] == "a test" and "turns" not in records["turns"]
    for name, context in (("one", CONVERSATIONS[0]["messages"]), ("turns", [user("w9")])):
        answer = answer_text(tiny_llama, make_tokenizer(), context)
        assert records[name]["messages"] == [*context, assistant(answer)]
    assert records["one"]["generation"] == {
        "model": "target",  # without its folder
        "revision": None,
        "backend": "transformers",
        "dtype": "float32",
        "do_sample": False,
        "max_new_tokens": 12,
        "turns": "last",
    }
    main(parse(*command))
    assert capsys.readouterr().out.startswith("3 succeeded (3 of them in an earlier call")


@pytest.mark.parametrize(("cut", "warned"), [(2, False), (3, True)])
def test_answers_that_are_cut_are_told(prompts, tmp_path, monkeypatch, capsys, transformers_log, cut, warned):
    counts = RegenerationCounts(succeeded=4, answers=4, cut=cut)
    monkeypatch.setattr("dlite_hf.commands.regenerate.regenerate", lambda *arguments, **keywords: counts)
    where = ["--prompts", *prompts, "--output", tmp_path / "a", "--model", "m", "--base_url", "http://localhost/v1"]
    main(parse(*where, "--max_new_tokens", 7))
    assert f"; {cut} of 4 answers were cut at their largest length\n" in capsys.readouterr().out
    assert (f"{cut} of 4 answers were cut at `--max_new_tokens` 7" in transformers_log.text) == warned


def test_every_turn_sampled_with_limits(prompts, target, tmp_path, capsys):
    file = tmp_path / "answers.jsonl"
    limits = ["--max_prompt_tokens", 20, "--batch_size", 2, "--dtype", "float32"]
    sampling = ["--temperature", 0.5, "--top_p", 0.9, "--max_new_tokens", 4]
    template = ["--chat_template_kwargs", '{"quiet": true}', "--seed", 3]
    where = ["--prompts", prompts[1], "--output", file, "--target", target]
    main(parse(*where, "--turns", "all", *limits, *sampling, *template))
    assert capsys.readouterr().out.startswith("1 succeeded")
    record = read(file)["turns"]
    assert [message["content"] for message in record["messages"][::2]] == ["w9", "w10 w11"]
    assert record["finish_reasons"] == ["length", "length"] and record["messages"][1]["content"]
    expected = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "max_new_tokens": 4, "seed": 3}
    assert expected.items() <= record["generation"].items()
    assert record["generation"]["chat_template_kwargs"] == {"quiet": True}


@pytest.fixture
def calls(monkeypatch):
    """What `regenerate` is called with."""
    calls = []

    def regenerate(*arguments, **keywords):
        calls.append(arguments)
        return RegenerationCounts()

    monkeypatch.setattr("dlite_hf.commands.regenerate.regenerate", regenerate)
    return calls


def test_continuous_batching_is_handed_over(prompts, target, tmp_path, calls):
    main(parse("--prompts", *prompts, "--output", tmp_path / "a", "--target", target, "--continuous_batching"))
    # A setting that it cannot honour must not be dropped.
    assert calls[0][0].continuous_batching_config.drop_unsupported_processors is False


def test_prompts_are_drawn_at_random(prompts, tmp_path, calls):
    command = ["--prompts", *prompts, "--output", tmp_path / "a", "--model", "m", "--base_url", "http://localhost/v1"]
    for seed in [*range(10), 0]:
        main(parse(*command, "--num_prompts", 2, "--seed", seed))
    drawn = [tuple(conversation["id"] for conversation in conversations) for _, conversations, _ in calls]
    assert all(len(set(names)) == 2 for names in drawn)
    assert drawn[0] == drawn[-1] and {name for names in drawn for name in names} == {"one", "two", "turns"}


def test_on_a_server(prompts, server, tmp_path, capsys):  # noqa: F811
    file = tmp_path / "answers.jsonl"
    sampling = ["--temperature", 0.5, "--top_p", 0.9, "--top_k", 20]
    sampling += ["--chat_template_kwargs", '{"enable_thinking": false}']
    where = ["--model", "tiny", "--base_url", server.base_url, "--revision", "abc", "--concurrency", 2]
    main(parse("--prompts", *prompts, "--output", file, "--max_new_tokens", 4, *where, *sampling))
    assert capsys.readouterr().out.startswith("3 succeeded")
    assert read(file)["two"]["messages"] == [user("w10"), assistant("W10")]
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "max_tokens": 4}
    settings["chat_template_kwargs"] = {"enable_thinking": False}
    assert all(settings.items() <= body.items() for body in server.bodies)
    assert {**settings, "revision": "abc"}.items() <= read(file)["two"]["generation"].items()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "`target` None, `model` None and `base_url` None do not say who answers"),
        (["--target", "t", "--base_url", "u"], "do not say who answers"),
        (["--model", "m"], "do not say who answers"),
        (["--target", "t", "--concurrency", "2"], r"\['concurrency'\] mean nothing to a target in this process"),
        (
            ["--model", "m", "--base_url", "u", "--dtype", "bfloat16"],
            r"\['dtype'\] mean nothing to a target on a server",
        ),
        (["--model", "m", "--base_url", "u", "--continuous_batching"], r"\['continuous_batching'\] mean nothing"),
        (["--target", "t", "--top_k", "2"], "mean nothing at temperature 0"),
        (["--target", "t", "--chat_template_kwargs", "[1]"], "must be a JSON object"),
    ],
)
def test_refused_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse("--prompts", "p", "--output", "o", *arguments)


def test_nothing_but_failures_is_counted_and_told_in_one_line(prompts, target, tmp_path, capsys):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    tokenizer.save_pretrained(target)
    where = ["--prompts", *prompts, "--output", str(tmp_path / "answers.jsonl"), "--target", target]
    assert cli.main(["regenerate", *where]) == 2
    output = capsys.readouterr()
    assert output.out.endswith("0 shortened) + 3 failed + 0 skipped = 3 conversations\n")
    error = output.err.splitlines()[-1]
    assert error.startswith("dlite-hf: error: None of 3 conversations was answered; the first,")
    assert "Traceback" not in output.err


def test_no_prompts(capsys):
    assert cli.main(["regenerate", "--output=o", "--target=t", "--prompts"]) == 2
    assert "`prompts` is empty" in capsys.readouterr().err


def test_refused_prompts(prompts, target, tmp_path):
    command = ["--output", tmp_path / "answers.jsonl", "--target", target, "--prompts"]
    with pytest.raises(ValueError, match="`num_prompts` is 4, but there are 3"):
        main(parse(*command, *prompts, "--num_prompts", 4))
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"id": 1, "turns": ["w9"]}\n\n')
    with pytest.raises(ValueError, match="broken.jsonl, line 2, is not JSON"):
        main(parse(*command, broken))
