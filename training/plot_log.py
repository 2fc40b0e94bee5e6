# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Draws training logs, JSON lines of what `DLiteTrainer` logs, one curve a file; needs matplotlib.

python training/plot_log.py --output curves.png training/smollm2-135m/teacher.jsonl ...
"""

import argparse
from pathlib import Path

from matplotlib import pyplot

from dlite_hf.json_lines import read_json_lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    figure, panels = pyplot.subplots(1, 3, figsize=(15, 4))
    for file in args.logs:
        entries = list(read_json_lines(file))
        for panel, name in zip(panels, ("loss", "accuracy", "expected_tau"), strict=True):
            panel.plot([each["step"] for each in entries], [each[name] for each in entries], label=file.stem)
            panel.set(title=name, xlabel="step")
            panel.grid(alpha=0.3)
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(args.output, dpi=100)


if __name__ == "__main__":
    main()
