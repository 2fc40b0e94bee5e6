# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""A training record comes back as it was saved, names no folder, and refuses files of another shape."""

import importlib.metadata
import json
import re

import pytest
import torch

import dlite_hf
from dlite_hf.training_record import (
    FILE_NAME,
    DataRecord,
    StageRecord,
    TargetRecord,
    TrainingRecord,
    TrainingRun,
    describe_data,
    hardware,
    versions,
)


def make_run(**overrides):
    fields = {
        "stages": [StageRecord("warmup", 500, 64_000, 1800), StageRecord("stable", 2000, 256_000, 5400.5)],
        "target": TargetRecord("owner/target", revision="abc123", dtype="bfloat16"),
        "learning_rate": 4e-4,
        "lr_scheduler_type": "cosine",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_processes": 3,
        "seed": 7,
        "ce_weight": 0.1,
        "tv_weight": 1.0,
        "ce_labels": "argmax",
        "loss_decay": 4.0,
        "data": [DataRecord("answers.jsonl", 1_500, 90_000, {"MIT": 1_200, "CC-BY|4.0": 300}, {"owner/set": 1_500})],
    }
    return TrainingRun(**{**fields, **overrides})


def test_comes_back_as_saved(tmp_path):
    record = TrainingRecord([make_run(), make_run(seed=8)])
    assert not TrainingRecord.exists(tmp_path)
    record.save(tmp_path)
    assert TrainingRecord.exists(tmp_path)
    loaded = TrainingRecord.load(tmp_path)
    assert loaded == record and isinstance(loaded.runs[0].stages[1], StageRecord)


def test_a_later_run_is_appended(tmp_path):
    TrainingRecord([make_run()]).save(tmp_path)
    record = TrainingRecord.load(tmp_path)
    record.runs.append(make_run(seed=8))
    record.save(tmp_path)
    assert [run.seed for run in TrainingRecord.load(tmp_path).runs] == [7, 8]


@pytest.mark.parametrize("folder", ["/home/jane/", "C:\\Users\\jane\\", "~/jane/", "../jane/", "./jane/"])
def test_folders_are_left_out(tmp_path, folder):
    data = describe_data(folder + "answers.jsonl", [{"source": folder + "prompts.jsonl"}, {"source": "prompts.jsonl"}])
    TrainingRecord([make_run(data=[data], target=TargetRecord(folder + "target"))]).save(tmp_path)
    assert "jane" not in (tmp_path / FILE_NAME).read_text()
    assert TrainingRecord.load(tmp_path).runs[0].target.name_or_path == "target"
    assert data.file == "answers.jsonl" and data.sources == {"prompts.jsonl": 2}


def test_a_relative_folder_is_told_from_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jane" / "target").mkdir(parents=True)
    assert TargetRecord("jane/target").name_or_path == "target"
    assert TargetRecord("owner/target").name_or_path == "owner/target"


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["runs"],
        lambda record: {**record, "extra": 1},
        lambda record: {"runs": [{**record["runs"][0], "extra": 1}]},
        lambda record: {"runs": [{k: v for k, v in record["runs"][0].items() if k != "seed"}]},
        lambda record: {"runs": [{**record["runs"][0], "seed": "seven"}]},
        lambda record: {"runs": [{**record["runs"][0], "stages": [{"stage": "stable"}]}]},
        lambda record: {"runs": [{**record["runs"][0], "target": "owner/target"}]},
        lambda record: {
            "runs": [{**record["runs"][0], "stages": [{"stage": "last", "steps": 1, "anchors": 1, "seconds": 1}]}]
        },
        lambda record: {"log_history": []},
    ],
)
def test_another_shape_is_refused(tmp_path, change):
    TrainingRecord([make_run()]).save(tmp_path)
    file = tmp_path / FILE_NAME
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(ValueError, match="training_record.json in .* is no training record"):
        TrainingRecord.load(tmp_path)


def test_text_that_is_no_json_is_refused(tmp_path):
    (tmp_path / FILE_NAME).write_text("runs: []")
    with pytest.raises(ValueError, match="is no training record"):
        TrainingRecord.load(tmp_path)


def test_describe_data_counts():
    conversations = [
        {"license": "MIT", "source": "a"},
        {"license": "MIT", "source": "b"},
        {"license": None, "source": "b"},
        {"messages": []},
    ]
    data = describe_data("answers.jsonl", conversations, supervised_tokens=40)
    assert data == DataRecord("answers.jsonl", 4, 40, {"MIT": 2, "not stated": 2}, {"a": 1, "b": 2, "not stated": 1})


def test_versions_leave_out_what_is_not_installed(monkeypatch):
    def version(package):
        if package == "peft":
            raise importlib.metadata.PackageNotFoundError(package)
        return f"{package}-1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = versions()
    assert found["dlite_hf"] == dlite_hf.__version__ and found["torch"] == "torch-1" and "peft" not in found


def test_hardware_of_a_cpu():
    text = hardware("cpu")
    assert re.fullmatch(rf".+ \(.+\), \d+ CPUs, threads: {torch.get_num_threads()}", text)
    assert hardware("cpu", num_devices=2) == text + ", processes: 2"


def test_hardware_of_accelerators(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    assert hardware(torch.device("cuda", 1), num_devices=8) == "8 x GPU of cuda:1"
    assert hardware("mps") == "1 x mps"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    assert hardware() == "1 x xpu"


def test_a_run_notes_versions_hardware_and_date():
    run = make_run()
    assert run.versions == versions() and run.hardware == hardware()
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", run.finished_at)
