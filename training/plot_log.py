# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Draws training logs, JSON lines of what `DLiteTrainer` logs, one curve a file.

python training/plot_log.py --output curves.png training/smollm2-135m/teacher.jsonl ...
"""

import argparse
from pathlib import Path

from dlite_hf.evaluation.plots import plot_training
from dlite_hf.json_lines import read_json_lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    plot_training({file.stem: list(read_json_lines(file)) for file in args.logs}).savefig(args.output, dpi=100)


if __name__ == "__main__":
    main()
