# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""`dlite-hf card`: writes a drafter's model card, and uploads the drafter when asked."""

from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import ModelCard

from ..model_card import MARKER, create_model_card
from ..publishing import name_target, push_drafter


@dataclass
class CardArguments:
    """What a card is made of, and where it goes."""

    drafter: str = field(metadata={"help": "Folder of the drafter, as `save_pretrained` writes it."})
    evaluations: list[str] = field(default_factory=list, metadata={"help": "JSON reports of `dlite-hf evaluate`."})
    repo_id: str | None = field(
        default=None, metadata={"help": "The drafter's id on the Hub, owner/name; the folder's name by default."}
    )
    base_model: str | None = field(
        default=None,
        metadata={
            "help": "The target's id on the Hub; what the drafter's config names by default. A config that names a "
            "local folder is corrected."
        },
    )
    license: str | None = field(
        default=None, metadata={"help": "The drafter's licence as the Hub spells it, such as apache-2.0."}
    )
    language: str | None = field(default=None, metadata={"help": "Language code, such as en."})
    datasets: list[str] = field(
        default_factory=list, metadata={"help": "Ids on the Hub of the data sets that the drafter was trained on."}
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace a README.md that was not made by this command."})
    push: bool = field(default=False, metadata={"help": "Upload the drafter to `repo_id`."})
    private: bool = field(default=False, metadata={"help": "Make a new repository private."})


def make_card(args: CardArguments) -> ModelCard:
    """The card that the command writes; see [`~dlite_hf.model_card.create_model_card`] for what it raises."""
    return create_model_card(
        args.drafter,
        args.evaluations,
        repo_id=args.repo_id,
        base_model=args.base_model,
        license=args.license,
        language=args.language,
        datasets=args.datasets,
    )


def main(args: CardArguments) -> None:
    """Writes `README.md` into the drafter's folder, and the target's id into its `config.json` where that has none.

    Raises:
        ValueError: if a README.md of another origin is there, or what the card or the upload needs is missing.
    """
    if args.push and args.repo_id is None:
        raise ValueError("`--push` needs to know where to; pass `--repo_id owner/name`.")
    if args.private and not args.push:
        raise ValueError("`--private` concerns the upload; pass `--push`, too.")
    file = Path(args.drafter, "README.md")
    if file.exists() and not args.overwrite and MARKER not in file.read_text(encoding="utf-8"):
        raise ValueError("README.md was not made by this command; pass `--overwrite` to replace it.")
    card = make_card(args)
    if args.base_model is not None:
        name_target(args.drafter, args.base_model)
    card.save(file)
    print(f"Wrote {file}.")
    if not args.evaluations:
        print("It says that neither tau nor speed was measured; `--evaluations report.json` adds what was.")
    if args.push and args.repo_id is not None:
        commit = push_drafter(args.drafter, args.repo_id, private=args.private or None)
        print(f"Uploaded to {commit.commit_url}.")


__all__ = ["CardArguments", "main", "make_card"]
