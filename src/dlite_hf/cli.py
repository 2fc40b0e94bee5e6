# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The command line: `dlite-hf COMMAND [recipe.yaml] [--field value ...]`."""

import argparse
import difflib
import dis
import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

import yaml
from transformers import HfArgumentParser

from . import __version__


class Command(NamedTuple):
    """
    A module of `dlite_hf.commands`, named as in [`COMMANDS`]; its `main` takes one of each of its dataclasses.

    Args:
        help: what it does.
        argument_classes: the names of its dataclasses.
        implies: fields that are true where another one is.
    """

    help: str
    argument_classes: tuple[str, ...]
    implies: dict[str, str] = {}


COMMANDS = {
    "regenerate": Command("lets a target answer prompts: what a drafter is trained on", ("RegenerateArguments",)),
    "train": Command(
        "trains a drafter, with its teacher before it where one is asked for, or says what that would cost",
        ("TrainArguments", "DLiteTrainingArguments", "EstimateArguments"),
        implies={"estimate": "use_cpu"},  # an estimate of bfloat16 on an accelerator needs none
    ),
    "trace": Command("shows one generation with a drafter as a web page", ("TraceArguments",)),
    "evaluate": Command(
        "measures what drafters gain over plain generation and other ways to draft", ("EvaluateArguments",)
    ),
    "card": Command("writes the model card of a finished run", ("CardArguments",)),
}


class _Parser(HfArgumentParser):
    """Raises what is wrong, rather than printing two hundred options with it, and lets every list have any length."""

    def __init__(self, argument_classes: Iterable[type] = (), **kwargs: Any):
        super().__init__(argument_classes, **kwargs)
        hints = {name: hint for each in argument_classes for name, hint in get_type_hints(each).items()}
        choices = {name: (hint,) if get_origin(hint) is list else get_args(hint) for name, hint in hints.items()}
        lists = {name for name, choice in choices.items() if any(get_origin(each) is list for each in choice)}
        self.texts_or_lists = {name for name in lists if str in choices[name]}
        for action in self._actions:
            if action.dest in lists:
                action.nargs = "*"  # of `str | list[str]` it would take one value, and of a list not none
        for base in {base: None for each in argument_classes for base in each.__mro__[1:] if is_dataclass(base)}:
            self._list_last(
                f"{base.__module__.partition('.')[0]}.{base.__name__}", {each.name for each in fields(base)}
            )

    def _list_last(self, title: str, names: Collection[str]) -> None:
        """What a command's arguments inherit from elsewhere, under a heading of its own."""
        inherited = self.add_argument_group(title)
        for group in self._action_groups:
            actions = group._group_actions
            if group is not inherited:
                inherited._group_actions += [each for each in actions if each.dest in names]
                actions[:] = [each for each in actions if each.dest not in names]

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the process's exit status, 2 after a mistake of the user, told in one line."""
    parsed = False
    try:
        run, arguments = _parse(sys.argv[1:] if argv is None else argv)
        parsed = True
        run(*arguments)
    except OSError as error:
        return _report(error)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(f"{__package__}."):
            raise
        return _report(f'{error}; pip install "dlite-hf[regenerate,evaluate]" installs what the commands need.')
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        module = _raised_in(error) or ""
        told = module.startswith(f"{__package__}.") or (bool(module) and isinstance(error, ImportError))
        # While arguments are read, what Transformers refuses of them is the user's mistake too.
        if not told and (parsed or not isinstance(error, ValueError)):
            raise
        return _report(error)
    return 0


def _raised_in(error: Exception) -> str | None:
    """The module with the `raise` that made the error; None for what a call or an operation failed with, which is a
    defect, whose traceback is needed."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    if step is None or step.tb_frame.f_code.co_code[step.tb_lasti] != dis.opmap["RAISE_VARARGS"]:
        return None
    return step.tb_frame.f_globals["__name__"]


def _report(error: Exception | str) -> int:
    print(f"dlite-hf: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def _parse(argv: Sequence[str]) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The command's `main` and its arguments.

    Raises:
        ValueError: if a command, a field or a value is unknown or missing.
    """
    commands = "\n".join(f"  {name:12s}{command.help}" for name, command in COMMANDS.items())
    parser = _Parser(
        prog="dlite-hf",
        usage="dlite-hf COMMAND [recipe.yaml] [--field value ...]",
        epilog=f"commands:\n{commands}\n\n`dlite-hf COMMAND --help` lists a command's fields.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dlite-hf {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="what to do, see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its recipe and fields")
    namespace = parser.parse_args(argv)

    module = import_module(f".commands.{namespace.command}", __package__)
    command = COMMANDS[namespace.command]
    parser = _Parser(
        [getattr(module, name) for name in command.argument_classes],
        prog=f"dlite-hf {namespace.command}",
        usage=f"dlite-hf {namespace.command} [recipe.yaml] [--field value ...]",
        description=f"{command.help[0].upper()}{command.help[1:]}.",
        epilog="A recipe gives fields by their names; those on the command line override it.",
        allow_abbrev=False,
    )
    return module.main, _read_arguments(parser, namespace.arguments, command.implies)


def _read_arguments(parser: _Parser, arguments: Sequence[str], implies: dict[str, str]) -> tuple[Any, ...]:
    """The parser's dataclasses, from a recipe if the first argument is one, and from `--field value` after it.

    Raises:
        ValueError: if a field is unknown, or a value cannot be read or is missing.
    """
    names = [field.name for each in parser.dataclass_types for field in fields(each) if field.init]
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        arguments = [*_read_recipe(arguments[0], names), *arguments[1:]]
    namespace, remaining = parser.parse_known_args(arguments)
    unknown = [each for each in remaining if each.startswith("--")]
    if unknown:
        _refuse_unknown(unknown, [f"--{name}" for name in names], "the command line")
    if remaining:
        raise ValueError(f"{remaining} belong to no field; write `--field value`, and a recipe first of all.")
    values = vars(namespace)
    for name in parser.texts_or_lists:
        if isinstance(values[name], list) and len(values[name]) == 1:
            values[name] = values[name][0]
    values.update({implied: True for given, implied in implies.items() if values[given]})
    return parser.parse_dict(values)


def _read_recipe(file: str, names: Collection[str]) -> list[str]:
    """The recipe as a command line: so its values are read and checked as those of a command line are."""
    with open(file, encoding="utf-8") as stream:
        try:
            recipe = yaml.safe_load(stream)
        except yaml.YAMLError as error:
            raise ValueError(f"{file} is not YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{file} holds a {type(recipe).__name__}, but a recipe is `field: value` lines.")
    unknown = [str(name) for name in recipe if name not in names]
    if unknown:
        _refuse_unknown(unknown, names, file)
    arguments = []
    for name, value in recipe.items():
        if isinstance(value, list):
            arguments += [f"--{name}", *map(_as_argument, value)]
        elif value is not None:  # a field without a value keeps its default
            arguments.append(f"--{name}={_as_argument(value)}")
    return arguments


def _as_argument(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"  # what `save_strategy: no` meant before YAML read it as a boolean
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _refuse_unknown(unknown: Collection[str], known: Collection[str], where: str) -> NoReturn:
    near = {match: None for name in unknown for match in difflib.get_close_matches(name.split("=")[0], known)}
    hint = f"did you mean {', '.join(near)}?" if near else "see --help for those that are."
    raise ValueError(f"{', '.join(unknown)} in {where}: no such field; {hint}")


if __name__ == "__main__":
    sys.exit(main())
