# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""A drafter's folder to the Hub: nothing missing, nothing that does not belong there."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from huggingface_hub import CommitInfo, HfApi, ModelCard
from safetensors import safe_open

from . import __version__
from .configuration_dlite import DLiteConfig
from .model_card import BASE_MODEL_RELATION, LIBRARY_NAME, PIPELINE_TAG, TAGS, check_hub_id
from .modeling_dlite import DLiteForDrafting
from .training_record import FILE_NAME, TrainingRecord, is_local_path


REQUIRED_FILES = ("config.json", "model.safetensors", "README.md")
ALLOWED_FILES = (*REQUIRED_FILES, FILE_NAME, "LICENSE", "NOTICE", ".gitattributes")
_NEVER_UPLOADED = (".git", ".cache")  # huggingface_hub leaves them out, and makes the second in a download


def check_folder(folder: str | os.PathLike) -> None:
    """Whether `folder` is what a repository on the Hub should hold: complete offline, and a drafter only.

    Raises:
        ValueError: naming all that is missing, wrong or superfluous.
    """
    folder = Path(folder)
    paths = [file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file()]
    files = [path.as_posix() for path in paths if path.parts[0] not in _NEVER_UPLOADED]
    problems = [f"{name} is missing" for name in REQUIRED_FILES if name not in files]
    problems += [f"{name} does not belong to a drafter" for name in files if name not in ALLOWED_FILES]
    if not problems:
        config = DLiteConfig.from_pretrained(folder)
        problems = _weight_problems(folder, config) + _card_problems(folder, config)
        if TrainingRecord.exists(folder):
            TrainingRecord.load(folder)
    if problems:
        name = folder.resolve().name
        raise ValueError(
            f"The folder {name!r} cannot be published: {'; '.join(problems)}. Save the drafter with "
            f"`save_pretrained` in a folder of its own and write its card with `dlite-hf card --drafter {name}`."
        )


def _weight_problems(folder: Path, config: DLiteConfig) -> list[str]:
    """Tensors that the drafter lacks, or has beyond its own, such as a target's."""
    with torch.device("meta"):
        expected = {name: list(tensor.shape) for name, tensor in DLiteForDrafting(config).state_dict().items()}
    with safe_open(folder / "model.safetensors", "pt") as weights:
        found = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    both = sorted(expected.keys() & found.keys())
    wrong = [f"{name} ({found[name]} instead of {expected[name]})" for name in both if found[name] != expected[name]]
    return [
        f"model.safetensors {what} {_first(names)}"
        for what, names in (
            ("lacks", sorted(expected.keys() - found.keys())),
            ("holds what is no drafter's:", sorted(found.keys() - expected.keys())),
            ("holds tensors of other shapes:", wrong),
        )
        if names
    ]


def _first(names: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _card_problems(folder: Path, config: DLiteConfig) -> list[str]:
    try:
        data = ModelCard.load(folder / "README.md").data
        check_hub_id("base_model", data.get("base_model", ""))
        for dataset in data.get("datasets", ()):
            check_hub_id("datasets", dataset)
    except (ValueError, yaml.YAMLError) as error:
        return [f"the metadata of README.md are invalid ({error})"]
    problems = [
        f"README.md states {name} {data.get(name)!r} instead of {value!r}"
        for name, value in (
            ("library_name", LIBRARY_NAME),
            ("pipeline_tag", PIPELINE_TAG),
            ("base_model_relation", BASE_MODEL_RELATION),
        )
        if data.get(name) != value
    ]
    problems += [f"README.md lacks the tag {tag!r}" for tag in TAGS if tag not in (data.get("tags") or ())]
    if data.get("license") is None:
        problems.append("README.md states no license")
    if data.get("base_model") != config.target_name_or_path:
        problems.append(
            f"README.md states the target {data.get('base_model')!r}, but `target_name_or_path` in config.json ends "
            f"in {Path(config.target_name_or_path or '').name!r} (make it the target's id on the Hub)"
        )
    return problems


def name_target(folder: str | os.PathLike, base_model: str) -> None:
    """Names the target by its id on the Hub in the `config.json` of `folder`, where that names a local folder or none.

    A drafter keeps the path that its target was loaded from, which means nothing elsewhere and may name a user.
    """
    config = DLiteConfig.from_pretrained(folder)
    if not config.target_name_or_path or is_local_path(config.target_name_or_path):
        config.target_name_or_path = base_model
        config.save_pretrained(folder)


def push_drafter(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload DLite drafter",
) -> CommitInfo:
    """Uploads the drafter in `folder`, with its card and its training record, and makes the repository if need be.

    Args:
        folder: a drafter with its card, see [`~dlite_hf.model_card.create_model_card`].
        repo_id: the repository, `owner/name`.
        private: whether a new repository is private; by default as its owner's settings say.
        token: a token of the Hub, the stored one by default.
        revision: the branch to upload to, made if need be; `main` by default.
        commit_message: the commit's message.

    Raises:
        ValueError: if the folder is incomplete or holds what does not belong there, see `check_folder`. Nothing has
            been sent then.
    """
    check_folder(folder)
    api = HfApi(token=token, library_name="dlite_hf", library_version=__version__)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=Path(folder),
        allow_patterns=list(ALLOWED_FILES),
        revision=revision,
        commit_message=commit_message,
    )


__all__ = ["check_folder", "name_target", "push_drafter"]
