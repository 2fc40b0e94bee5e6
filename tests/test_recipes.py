# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Every recipe is one that its command takes, and every Accelerate configuration one that Accelerate takes."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from dlite_hf import cli
from dlite_hf.commands import regenerate, train
from dlite_hf.commands.train_arguments import EstimateArguments, TrainArguments, check_arguments
from dlite_hf.commands.train_cost import workload
from dlite_hf.modeling_dlite import DLiteDecoderLayer
from dlite_hf.training_args import DLiteTrainingArguments


FOLDER = Path(__file__).parent.parent / "training"
REGENERATION = FOLDER / "qwen3-regenerate.yaml"
RECIPES = sorted({*FOLDER.glob("*.yaml")} - {REGENERATION})


@pytest.fixture
def parse(monkeypatch):
    """The arguments that a recipe gives to the command."""

    def parse(name, *options):
        given = []
        monkeypatch.setattr(train, "main", lambda *arguments: given.extend(arguments))
        assert cli.main(["train", str(FOLDER / name), "--use_cpu", *options]) == 0
        return given

    return parse


def test_there_are_recipes():
    assert [each.name for each in RECIPES] == [
        "new-target.yaml",
        "qwen3-4b.yaml",
        "qwen3-8b.yaml",
        "smollm2-135m.yaml",
    ]


@pytest.mark.parametrize("recipe", [each.name for each in RECIPES])
def test_a_recipe_is_one(parse, recipe):
    train_args, training_args, _ = parse(recipe)
    check_arguments(train_args, training_args)
    assert training_args.load_best_model_at_end and training_args.metric_for_best_model == "tau"


def test_the_answers_are_made_as_they_are_trained_on(parse, monkeypatch):
    given = []
    monkeypatch.setattr(regenerate, "main", given.append)
    assert cli.main(["regenerate", str(REGENERATION)]) == 0
    train_args, *_ = parse("qwen3-4b.yaml")
    assert (given[0].target, [given[0].output]) == (train_args.target, train_args.train_files)
    assert given[0].template_options == train_args.template_options == {"enable_thinking": False}


@pytest.mark.parametrize("recipe", [each.name for each in RECIPES])
def test_an_unknown_field_is_refused(tmp_path, capsys, recipe):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((FOLDER / recipe).read_text(encoding="utf-8") + "\nwarm_up_epochs: 1\n", encoding="utf-8")
    assert cli.main(["train", str(wrong)]) == 2
    assert "warm_up_epochs in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "num_context_layers", "rank", "num_parameters"),
    [("qwen3-4b.yaml", 12, 320, 4_022_468_096), ("qwen3-8b.yaml", 14, 512, 8_190_735_360)],
)
def test_the_papers_recipes(parse, recipe, num_context_layers, rank, num_parameters):
    train_args, training_args, estimate_args = parse(recipe)
    run = workload(train_args, training_args, estimate_args)
    assert run.epochs == {"teacher": 8, "warmup": 2, "transition": 0, "stable": 6}
    assert (len(run.drafter.target_layer_ids), run.drafter.sequential_rank) == (num_context_layers, rank)
    assert (run.drafter.num_hidden_layers, run.drafter.num_draft_tokens, run.teacher.history_window) == (5, 7, 512)
    assert run.target.num_parameters == num_parameters  # of the released models
    assert run.batch_size * run.batches_per_step * run.num_devices == 512
    assert run.num_conversations == 1_900_000
    assert training_args.max_anchors == 512 and training_args.max_length == 4096
    assert train_args.template_options == {"enable_thinking": False}


def test_the_recipe_for_one_cpu(parse):
    run = workload(*parse("smollm2-135m.yaml"))
    assert run.target.num_parameters == 134_515_008  # of the released model
    assert (run.device, run.num_devices) == ("cpu", 1)


def test_the_template_names_every_choice():
    text = (FOLDER / "new-target.yaml").read_text(encoding="utf-8")
    named = set(re.findall(r"^(?:# )?(\w+): ", text, flags=re.MULTILINE))
    own = {each.name for each in fields(DLiteTrainingArguments)} - {
        each.name for each in fields(DLiteTrainingArguments.__mro__[1])
    }
    expected = {each.name for arguments in (TrainArguments, EstimateArguments) for each in fields(arguments)} | own
    assert expected - named == {"estimate"}  # which belongs on the command line


@pytest.mark.parametrize("recipe", [each.name for each in RECIPES])
def test_what_is_commented_out_exists(recipe):
    classes = (TrainArguments, EstimateArguments, DLiteTrainingArguments)
    commented = re.findall(r"^# (\w+): ", (FOLDER / recipe).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(commented) <= {each.name for arguments in classes for each in fields(arguments)}


@pytest.mark.parametrize(
    ("name", "distributed_type"),
    [("ddp", DistributedType.MULTI_GPU), ("fsdp2", DistributedType.FSDP), ("zero2", DistributedType.DEEPSPEED)],
)
def test_an_accelerate_configuration_is_one(name, distributed_type):
    config = load_config_from_file(str(FOLDER / "accelerate" / f"{name}.yaml"))
    assert config.distributed_type == distributed_type
    assert config.num_processes == 8
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] == DLiteDecoderLayer.__name__
        # Trainer writes a whole model into a checkpoint only so.
        assert config.fsdp_config["fsdp_state_dict_type"] == "FULL_STATE_DICT"
    if name == "zero2":
        assert config.deepspeed_config["zero_stage"] == 2
