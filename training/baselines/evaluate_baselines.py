# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""`dlite-hf evaluate` with rivals that have a loop of their own: the same options, and a folder of each.

    python training/baselines/evaluate_baselines.py --target <folder or Hub id> --tasks gsm8k mbpp \\
        --drafters DLite=out/dlite/drafter DFlash=out/dflash/drafter --dspark out/dspark/drafter \\
        --eagle3 out/eagle3/drafter --output_dir comparison
"""

from dataclasses import dataclass, field
from functools import partial

from dspark import DSparkForDrafting
from eagle3 import Eagle3ForDrafting
from transformers import HfArgumentParser, PreTrainedModel

from dlite_hf.commands.evaluate import EvaluateArguments
from dlite_hf.commands.evaluate import main as evaluate
from dlite_hf.evaluation.methods import READS_THE_PROMPT, Method, check_layers, weights_sha256
from dlite_hf.training_record import without_folders


@dataclass
class RivalArguments:
    dspark: str | None = field(default=None, metadata={"help": "Folder of a DSpark drafter."})
    eagle3: str | None = field(default=None, metadata={"help": "Folder of an EAGLE-3 drafter."})


def rival_methods(rivals: RivalArguments, target: PreTrainedModel) -> list[Method]:
    """The methods that `generate` knows by `custom_generate` alone."""
    methods = []
    for name, folder, drafter_class in (
        ("DSpark", rivals.dspark, DSparkForDrafting),
        ("EAGLE-3", rivals.eagle3, Eagle3ForDrafting),
    ):
        if folder is not None:
            drafter = drafter_class.from_pretrained(folder, dtype=target.dtype).to(target.device).eval()
            check_layers(name, drafter.config.to_dict(), target)
            methods.append(
                Method(
                    name,
                    "custom",
                    checkpoint=without_folders(folder.rstrip("/\\")),
                    sha256=weights_sha256(drafter),
                    parameters=sum(parameter.numel() for parameter in drafter.parameters()),
                    num_draft_tokens=drafter.config.num_draft_tokens,
                    note=READS_THE_PROMPT,
                    custom_generate=drafter.custom_generate,
                )
            )
    return methods


def main() -> None:
    rivals, args = HfArgumentParser((RivalArguments, EvaluateArguments)).parse_args_into_dataclasses()
    evaluate(args, partial(rival_methods, rivals))


if __name__ == "__main__":
    main()
