# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The command line: what a recipe and its overrides become, and what a user's mistake looks like."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from types import ModuleType

import pytest

import dlite_hf
from dlite_hf import cli
from dlite_hf.configuration_dlite import evenly_spaced_layer_ids


@dataclass
class ToyArguments:
    name: str = field(metadata={"help": "Given, or the recipe's."})
    files: list[str] = field(default_factory=list)
    layer_ids: list[int] | None = None
    rate: float = 0.1
    steps: int = 10
    fast: bool = True
    frugal: bool = False
    save_strategy: str = "steps"
    options: dict | str | None = None
    report_to: None | str | list[str] = "none"


@pytest.fixture
def toy(monkeypatch):
    """A command `toy`: its module, whose `ran` is what its `main` was called with."""
    module = ModuleType("dlite_hf.commands.toy")
    module.ToyArguments, module.ran = ToyArguments, []
    module.main = module.ran.append
    monkeypatch.setitem(sys.modules, module.__name__, module)
    command = cli.Command("does nothing", ("ToyArguments",), implies={"fast": "frugal"})
    monkeypatch.setitem(cli.COMMANDS, "toy", command)
    return module


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        file = tmp_path / "recipe.yaml"
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write


def test_a_recipe_alone(toy, recipe):
    text = (
        "# a comment\nname: from the recipe\nfiles: [a b, c]\nlayer_ids: [0, 3]\nrate: 5e-4\nsteps:\nfast: false\n"
        "save_strategy: no\noptions: {thinking: false, depth: [1]}\n"
    )
    assert cli.main(["toy", recipe(text)]) == 0
    (args,) = toy.ran
    assert (args.name, args.files, args.layer_ids) == ("from the recipe", ["a b", "c"], [0, 3])
    assert (args.rate, args.steps, args.fast, args.save_strategy) == (0.0005, 10, False, "no")
    assert json.loads(args.options) == {"thinking": False, "depth": [1]}


def test_the_command_line_overrides_the_recipe(toy, recipe):
    file = recipe("name: a\nfiles: [a, b]\nrate: 1.0\nfast: false\n")
    assert cli.main(["toy", file, "--name", "b", "--files", "c", "--fast", "--steps=3"]) == 0
    (args,) = toy.ran
    assert args == ToyArguments("b", ["c"], None, 1.0, 3, True, frugal=True)


def test_without_a_recipe(toy):
    assert cli.main(["toy", "--name", "a", "--no_fast"]) == 0
    assert toy.ran == [ToyArguments("a", fast=False)]


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ("report_to: [tensorboard, trackio]\n", [], ["tensorboard", "trackio"]),
        ("report_to: tensorboard\n", [], "tensorboard"),
        ("report_to: [tensorboard, trackio]\n", ["--report_to", "all"], "all"),
        ("report_to: []\n", [], []),
        ("", ["--report_to", "a", "b"], ["a", "b"]),
        ("", [], "none"),
    ],
)
def test_a_field_of_a_text_or_a_list(toy, recipe, text, arguments, expected):
    assert cli.main(["toy", recipe("name: a\n" + text), *arguments]) == 0
    assert toy.ran[0].report_to == expected


def test_a_list_may_be_empty(toy, recipe):
    file = recipe("name: a\nfiles: []\nlayer_ids: []\n")
    assert cli.main(["toy", file]) == cli.main(["toy", file, "--files", "b"]) == 0
    assert [(args.files, args.layer_ids) for args in toy.ran] == [([], []), (["b"], [])]


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [("fast: true\n", [], True), ("fast: true\n", ["--fast", "false"], False), ("fast: false\n", ["--fast"], True)],
)
def test_what_a_field_implies_is_decided_at_the_end(toy, recipe, text, arguments, expected):
    assert cli.main(["toy", recipe("name: a\n" + text), *arguments]) == 0
    assert toy.ran[0].frugal is expected


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ("name: a\nstep: 3\n", [], "step in .*recipe.yaml: no such field; did you mean steps"),
        ("name: a\n", ["--ratte=1"], "--ratte=1 in the command line: no such field; did you mean --rate"),
        ("name: a\nqqq: 3\n", [], "qqq in .*recipe.yaml: no such field; see --help"),
        ("steps: 3\n", [], "required: --name"),
        ("name: a\nsteps: many\n", [], "--steps: invalid int value: 'many'"),
        ("name: a\nlayer_ids: [0, x]\n", [], "--layer_ids.*invalid int value: 'x'"),
        ("name: a\n", ["stray"], r"\['stray'\] belong to no field"),
        ("- name\n", [], "holds a list, but a recipe is"),
        ("name: [a\n", [], "is not YAML"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(toy, recipe, capsys, text, arguments, expected):
    assert cli.main(["toy", recipe(text), *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("dlite-hf: error: ")
    assert re.search(expected, output.err)
    assert toy.ran == []


def test_a_missing_recipe_and_an_unknown_command(toy, capsys):
    assert cli.main(["toy", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err
    assert cli.main(["trian"]) == 2
    assert re.search("'trian' .choose from '?regenerate'?, '?train", capsys.readouterr().err)
    assert cli.main([]) == 2
    assert "COMMAND" in capsys.readouterr().err


def test_what_our_code_refuses_is_told_in_one_line(toy, capsys):
    toy.main = lambda args: evenly_spaced_layer_ids(4, 9)
    assert cli.main(["toy", "--name", "a"]) == 2
    assert capsys.readouterr().err == ("dlite-hf: error: Cannot tap 9 layers of a target with 4; take from 2 to 4.\n")


def test_a_missing_file_is_told_in_one_line(toy, tmp_path, capsys):
    toy.main = lambda args: open(tmp_path / "answers.jsonl")
    assert cli.main(["toy", "--name", "a"]) == 2
    assert "answers.jsonl" in capsys.readouterr().err


def of_the_package(body):
    """A `main` of this body, in a module of the package."""
    namespace = {"__name__": "dlite_hf.commands.toy"}
    exec(f"def main(args):\n    {body}\n", namespace)
    return namespace["main"]


@pytest.mark.parametrize(
    "defect",
    [
        lambda args: int("x"),
        lambda args: {}["x"],
        of_the_package("int('x')"),
        of_the_package("len(3)"),
        of_the_package("raise ValueError(1 + 'x')"),
        of_the_package("import dlite_hf.nowhere"),
        of_the_package("from json import nothing"),
    ],
)
def test_a_defect_keeps_its_traceback(toy, defect):
    toy.main = defect
    with pytest.raises((ValueError, TypeError, KeyError, ImportError)):
        cli.main(["toy", "--name", "a"])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise ValueError(\n'no')", "no"),
        ("raise TypeError('no')", "no"),
        ("raise RuntimeError('no')", "no"),
        ("raise ImportError('pip install it')", "pip install it"),
        ("try: int('x')\n    except ValueError as error: raise ValueError('no') from error", "no"),
        ("import not_installed", "No module named 'not_installed'; pip install .dlite-hf"),
    ],
)
def test_what_the_package_raises_is_told_in_one_line(toy, capsys, body, expected):
    toy.main = of_the_package(body)
    assert cli.main(["toy", "--name", "a"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(f"^dlite-hf: error: {expected}", error)


def test_version_and_help(capsys):
    for option, expected in (("--version", f"dlite-hf {dlite_hf.__version__}\n"), ("--help", "regenerate  ")):
        with pytest.raises(SystemExit) as stopped:
            cli.main([option])
        assert stopped.value.code == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("regenerate", ["--prompts"]),
        ("train", ["--teacher_epochs", "--learning_rate", "--warmup_epochs", "--estimate"]),
        ("evaluate", ["--tasks", "--batch_sizes"]),
        ("trace", ["--prompt"]),
        ("card", ["--repo_id"]),
    ],
)
def test_every_command_lists_its_fields(capsys, command, fields):
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    output = capsys.readouterr().out
    assert all(f"{name} " in output for name in fields)


def test_what_training_inherits_is_listed_last(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    help_text = capsys.readouterr().out
    groups = {text.partition(":\n")[0]: text for text in re.split(r"\n\n(?=\S)", help_text)}
    *_, ours, estimate, inherited, _ = groups
    assert (ours, inherited) == ("the training: what only a drafter's knows", "transformers.TrainingArguments")
    assert "the drafter, its target and its data" in groups and "--estimate " in groups[estimate]
    fields = {name: re.findall(r"^  --(\w+)", text, flags=re.MULTILINE) for name, text in groups.items()}
    assert "max_anchors" in fields[ours] and not {"learning_rate", "output_dir"} & {*fields[ours]}
    assert {"output_dir", "learning_rate", "no_dataloader_pin_memory"} <= {*fields[inherited]}
    assert len(fields[ours]) < 12 < len(fields[inherited])


def test_commands_are_imported_when_they_run():
    code = (
        "import runpy, sys\n"
        "sys.argv = ['dlite-hf', '--version']\n"
        "try: runpy.run_module('dlite_hf.cli', run_name='__main__')\n"
        "finally: print(*sys.modules, sep='\\n')"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *loaded = finished.stdout.splitlines()
    assert first == f"dlite-hf {dlite_hf.__version__}"
    assert "dlite_hf.modeling_dlite" in loaded
    assert not {"transformers.trainer", "datasets", "openai", "dlite_hf.commands"} & set(loaded)
