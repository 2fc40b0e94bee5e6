# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Writes the figures in our documents and model cards from the reports in `training/results`.

    python training/write_results.py          # writes what differs
    python training/write_results.py --check  # says what differs, and fails if anything does

In a document, what stands between `<!-- results: report.json tables -->` and `<!-- end -->` is that view of that
report; `dlite_hf.evaluation.views` lists the views, and `concurrency` and `roofline` are the tables of files whose
`rows` are what `measure_concurrency` and `simulate` returned, `ablations` that of the files of
`compare_ablations.py`. A document that shows `training/results/<report>/*.png` gets that report's pictures, drawn
anew when `<report>.json`, or what draws them, is another than `report.sha256` beside them says. A card is made from
the recipe `training/results/<name>.yaml`, the arguments of `dlite-hf card` with paths from the repository's root.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from dlite_hf.commands.card import CardArguments, make_card
from dlite_hf.evaluation import plots
from dlite_hf.evaluation.concurrency import concurrency_table
from dlite_hf.evaluation.markdown import make_table
from dlite_hf.evaluation.report import Report
from dlite_hf.evaluation.roofline import roofline_table
from dlite_hf.evaluation.views import VIEWS


ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("training", "results")
DOCUMENTS = ("README.md", "RESULTS.md", "training/README.md")
HASH = "report.sha256"
BEGIN, END = "<!-- results:", "<!-- end -->"
_PICTURE = re.compile(rf"\]\(({RESULTS.as_posix()}/[^/)]+)/[^/)]+\.png\)")
_SECTION = re.compile(rf"({BEGIN} (\S+) (\S+) -->\n)((?:(?!{BEGIN}).)*?)({END})", re.DOTALL)


def ablation_table(arms: dict[str, dict[str, float]]) -> str:
    """A row for each arm of `compare_ablations.py`."""
    keys = ("expected_tau", "accuracy", "tau")
    lines = [
        [arm, f"{each['parameters'] / 1e6:.1f}M", *(f"{each[key]:.3f}" for key in keys)] for arm, each in arms.items()
    ]
    return make_table(["arm", "parameters", "expected tau", "accuracy", "tau"], lines)


# How each kind of table is made from its file.
TABLES: dict[str, Callable[[Any], str]] = {
    "concurrency": lambda content: concurrency_table(content["rows"]),
    "roofline": lambda content: roofline_table(content["rows"]),
    "ablations": ablation_table,
}


def fill(document: str, results: Path) -> str:
    """The document with every section written anew.

    Args:
        document: its text.
        results: the folder of the reports.

    Raises:
        FileNotFoundError: if a report does not exist.
        ValueError: if a section does not end, or names no view.
    """
    if document.count(BEGIN) != len(_SECTION.findall(document)):
        raise ValueError(f"A section is not written `{BEGIN} file.json view -->`, or lacks its `{END}`; repair it.")

    def section(match: re.Match[str]) -> str:
        begin, file, view, _, end = match.groups()
        if view in VIEWS:
            text = VIEWS[view].render(Report.load(results / file))
        elif view in TABLES:
            text = TABLES[view](json.loads((results / file).read_text(encoding="utf-8")))
        else:
            raise ValueError(f"{begin.strip()} names no view; there are {', '.join([*VIEWS, *TABLES])}.")
        return f"{begin}\n{text}\n\n{end}"

    return _SECTION.sub(section, document)


def card_recipes(root: Path) -> dict[str, CardArguments]:
    """The arguments of every card's recipe, by the drafter's folder."""
    parser = HfArgumentParser(CardArguments)
    recipes = [parser.parse_yaml_file(str(file))[0] for file in sorted((root / RESULTS).glob("*.yaml"))]
    return {recipe.drafter: recipe for recipe in recipes}


def outdated(root: Path) -> dict[str, str]:
    """The documents, cards and hashes of pictures that differ from the reports, and what each should be."""
    expected = {}
    for name in DOCUMENTS:
        if (root / name).exists():
            expected[name] = fill((root / name).read_text(encoding="utf-8"), root / RESULTS)
            for folder in _PICTURE.findall(expected[name]):
                sources = (root / f"{folder}.json").read_bytes() + Path(plots.__file__).read_bytes()
                expected[f"{folder}/{HASH}"] = hashlib.sha256(sources).hexdigest() + "\n"
    with chdir(root):
        for folder, recipe in card_recipes(root).items():
            expected[f"{folder}/README.md"] = str(make_card(recipe))
    return {
        name: text
        for name, text in expected.items()
        if not (root / name).exists() or (root / name).read_text(encoding="utf-8") != text
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="say what differs and write nothing")
    args = parser.parse_args()
    different = outdated(ROOT)
    for name, text in different.items():
        if args.check:
            print(f"{name} differs from its reports; run `python training/write_results.py`.")
            continue
        if Path(name).name == HASH:
            folder = (ROOT / name).parent
            plots.save_plots(Report.load(folder.with_name(f"{folder.name}.json")), folder)
        (ROOT / name).write_text(text, encoding="utf-8")
        print(f"Wrote {name}.")
    return 1 if args.check and different else 0


if __name__ == "__main__":
    sys.exit(main())
