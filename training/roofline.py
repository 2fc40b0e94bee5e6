# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""SIMULATED speedups of a history-free drafter and of two with a history, over the context length, on given GPUs.

    python training/roofline.py --target Qwen/Qwen3-8B --tau dlite=3.19 dspark=1.94 --gpus h800 --output roofline.json
    python training/roofline.py --tau 3                          # all drafters alike: what the history itself costs
    python training/roofline.py --target <id> --gpus h200 --report report.json        # measured tau, and a comparison

Where the report has several DLite methods, as with confidence thresholds, `--method` says which.

No GPU is needed, and none was at hand where this was written: the speeds are the data sheets' peaks, the bytes and
operations are counted from configurations (`dlite_hf.evaluation.roofline`). `--report` puts a report of
`dlite-hf evaluate` beside the simulation.
"""

import argparse
import json
from pathlib import Path

from dlite_hf import DLiteConfig
from dlite_hf.commands.train_cost import target_config
from dlite_hf.evaluation import Report, metrics
from dlite_hf.evaluation.costs import Drafter, Target
from dlite_hf.evaluation.roofline import (
    GPUS,
    LAUNCH_SECONDS,
    SIMULATED,
    compare_with_measurement,
    roofline_table,
    simulate,
)
from dlite_hf.training_record import without_folders


KINDS = ("dlite", "dflash", "dspark")


def parse_taus(values: list[str]) -> dict[str, float]:
    """`["3"]`, for all kinds alike, or `["dlite=3.19", "dspark=1.94"]`."""
    if len(values) == 1 and "=" not in values[0]:
        return dict.fromkeys(KINDS, float(values[0]))
    taus = {kind: float(tau) for kind, _, tau in (value.partition("=") for value in values)}
    if unknown := taus.keys() - set(KINDS):
        raise ValueError(f"`--tau` names {sorted(unknown)}; the kinds of drafters are {', '.join(KINDS)}.")
    return taus


def measured(report: Report, name: str | None) -> tuple[str, list[metrics.Row], float]:
    """A DLite method of a report, by default the only one; its greedy rows; and their tau."""
    names = [method["name"] for method in report.methods if method["kind"] == "dlite"]
    found = [each for each in names if name in (None, each)]
    rows = [row for row in report.rows if row["temperature"] == 0]
    tau = metrics.tau(rows, found[0]) if len(found) == 1 else None
    if tau is None:
        raise ValueError(f"The report must have greedy rows of the DLite method; pass as `--method` one of {names}.")
    return found[0], rows, tau.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="Qwen/Qwen3-8B", help="a folder, or an id on the Hub")
    parser.add_argument("--drafter", help="folder or id of a DLite drafter; by default the preset for the target")
    parser.add_argument("--gpus", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 4096, 16384, 32768, 65536])
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=[1])
    parser.add_argument("--launch_seconds", type=float, default=LAUNCH_SECONDS, help="of a kernel, assumed")
    parser.add_argument(
        "--weight_bytes", type=float, default=2.0, help="of a weight in the target's layers; 4 bits: 0.5"
    )
    parser.add_argument("--output", type=Path, help="a JSON file")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tau", nargs="+", help="tokens a verification: one figure, or kind=figure")
    source.add_argument("--report", type=Path, help="take DLite's from a report, and compare with it")
    parser.add_argument("--method", help="the DLite method of the report")
    args = parser.parse_args()
    if args.method and not args.report:
        parser.error("--method names one of a report's; give --report, too, or drop it.")

    config = target_config(args.target)
    target = Target.of(config, args.weight_bytes)
    dlite = DLiteConfig.from_pretrained(args.drafter) if args.drafter else None
    dlite = dlite or DLiteConfig.from_target(config, mask_token_id=0)  # any row costs the same
    drafters = {
        "dlite": Drafter.of(dlite),
        "dflash": Drafter.dflash(config, num_draft_tokens=dlite.num_draft_tokens),
        "dspark": Drafter.dspark(config, num_draft_tokens=dlite.num_draft_tokens),
    }
    report = Report.load(args.report) if args.report else None
    method, report_rows, tau = measured(report, args.method) if report else ("", [], 0.0)
    taus = {"dlite": tau} if report else parse_taus(args.tau)
    simulated = [
        simulate(
            target,
            drafters[kind],
            GPUS[gpu],
            tau=tau,
            context=context,
            batch_size=batch_size,
            launch_seconds=args.launch_seconds,
        )
        for gpu in args.gpus
        for batch_size in args.batch_sizes
        for context in args.contexts
        for kind, tau in taus.items()
    ]
    print(f"{args.target}\n\n{roofline_table(simulated)}")
    if report:
        context = round(sum(row["prompt_tokens"] for row in report_rows) / len(report_rows))
        for gpu in args.gpus:
            each = simulate(
                target, drafters["dlite"], GPUS[gpu], tau=tau, context=context, launch_seconds=args.launch_seconds
            )
            machine = report.conditions.get("machine")
            print(f"\nMeasured on {machine}:\n\n{compare_with_measurement(each, report_rows, method)}")
    if args.output:
        content = {
            "note": SIMULATED,
            "target": without_folders(args.target),
            "tau_from": args.report.name if args.report else "--tau",
            "rows": simulated,
        }
        args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
