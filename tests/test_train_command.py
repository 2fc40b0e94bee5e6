# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""`dlite-hf train`: both runs of a recipe, going on after a kill, its data, and what it refuses."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dlite_hf import DLiteForDrafting, DLiteTrainer, cli
from dlite_hf.commands.train import _runs_of, newest_checkpoint
from dlite_hf.commands.train_data import read_conversations
from dlite_hf.training_args import DLiteTrainingArguments
from dlite_hf.training_record import TrainingRecord

from .test_training_record import make_run


TEMPLATE = (
    "{% macro turn(role) %}<s>{{ role }}\n{% if brief and role == 'assistant' %}brief\n{% endif %}{% endmacro %}"
    "{% for message in messages %}{{ turn(message['role']) }}{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ turn('assistant') }}{% endif %}"
)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """A tiny Llama, and a tokenizer of characters with two tokens around a turn."""
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", "\n", *map(chr, range(32, 126))])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=len(vocab) + 2,  # one row is left for the placeholder
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=1,
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_answers(file, number, **fields):
    with open(file, "w", encoding="utf-8") as stream:
        for i in range(number):
            messages = [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"abc {i:02d}"}]
            stream.write(json.dumps({"id": str(i), "license": "MIT", "messages": messages, **fields}) + "\n")
    return str(file)


@pytest.fixture
def train(target_folder, tmp_path):
    """`train("--field=value", ...)`: the exit status of a short run on 16 conversations."""
    answers = write_answers(tmp_path / "answers.jsonl", 16)

    def run(*options, output_dir="out"):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(
            f"target: {target_folder}\ntarget_dtype: float32\ntrain_files: [{answers}]\n"
            f"output_dir: {tmp_path / output_dir}\nnum_hidden_layers: 1\nsequential_rank: 8\nnum_draft_tokens: 3\n"
            "num_train_epochs: 2\nper_device_train_batch_size: 4\nsave_strategy: steps\nsave_steps: 2\n"
            "use_cpu: true\ndisable_tqdm: true\n",
            encoding="utf-8",
        )
        return cli.main(["train", str(recipe), *options])

    return run


STAGES = ("--teacher_epochs=1", "--teacher_history_window=8", "--warmup_epochs=1", "--transition_epochs=0.5")


def test_the_teachers_own_loss_and_steps(train, tmp_path):
    loss = ("--teacher_ce_weight=0.5", "--teacher_tv_weight=0.25", "--ce_weight=0.2")
    assert train(*STAGES, *loss, "--teacher_max_steps=2", "--max_steps=7") == 0
    of_teacher, of_drafter = TrainingRecord.load(tmp_path / "out" / "drafter").runs
    assert (of_teacher.ce_weight, of_teacher.tv_weight) == (0.5, 0.25)
    assert (of_drafter.ce_weight, of_drafter.tv_weight) == (0.2, 1.0)
    steps = [sum(stage.steps for stage in run.stages) for run in (of_teacher, of_drafter)]
    assert steps == [2, 7]


def test_all_stages(train, tmp_path, target_folder, capsys, transformers_log):
    evaluation = ("--num_eval_conversations=4", "--eval_strategy=steps", "--eval_steps=2", "--eval_num_prompts=2")
    assert train(*STAGES, *evaluation, "--eval_max_new_tokens=4", "--draft_vocab_size=40") == 0
    drafter = DLiteForDrafting.from_pretrained(tmp_path / "out" / "drafter")
    teacher = DLiteForDrafting.from_pretrained(tmp_path / "out" / "teacher" / "drafter")
    assert (drafter.config.history_window, teacher.config.history_window) == (0, 8)
    assert drafter.config.draft_vocab_size == teacher.config.draft_vocab_size == 40
    assert (drafter.config.num_hidden_layers, drafter.config.sequential_rank) == (1, 8)
    of_teacher, of_drafter = TrainingRecord.load(tmp_path / "out" / "drafter").runs
    assert [(each.stage, each.steps) for each in of_teacher.stages] == [("teacher", 3)]
    # 12 conversations are 3 steps an epoch; the transition's half epoch has those at 3 and 4 of 6.
    assert [(each.stage, each.steps) for each in of_drafter.stages] == [
        ("warmup", 3),
        ("transition", 2),
        ("stable", 1),
    ]
    assert (of_teacher.ce_weight, of_teacher.tv_weight) == (1.0, 0.0)
    assert (of_drafter.ce_weight, of_drafter.tv_weight) == (0.1, 1.0)
    # 4 of 16 are held out; 7 tokens of each of the others are the target's own.
    (data,) = of_drafter.data
    assert (data.file, data.conversations, data.licenses) == ("answers.jsonl", 12, {"MIT": 12})
    assert data.supervised_tokens == 12 * 7 and of_teacher.data == of_drafter.data
    assert not list((tmp_path / "out").glob("drafter.*"))
    output = capsys.readouterr().out
    assert "40 tokens to draft cover 100.00% of the answers" in output
    assert "eval_tau" in output
    assert "Only 4 conversations are held out" in transformers_log.text


def test_leaves_the_drafter_in_the_targets_dtype(train, tmp_path):
    assert train("--target_dtype=bfloat16", "--max_steps=1") == 0
    assert DLiteForDrafting.from_pretrained(tmp_path / "out" / "drafter").dtype == torch.bfloat16


def test_a_killed_run_goes_on_where_it_was(train, tmp_path, monkeypatch, capsys):
    assert train(*STAGES, output_dir="whole") == 0
    training_step, steps = DLiteTrainer.training_step, []

    def dying_step(self, *args, **kwargs):
        steps.append(self.stage)
        # The second step after a checkpoint: of the teacher, and of the drafter's transition.
        if len(steps) in (4, 12):
            raise KeyboardInterrupt
        return training_step(self, *args, **kwargs)

    monkeypatch.setattr(DLiteTrainer, "training_step", dying_step)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train(*STAGES)
    capsys.readouterr()
    assert train(*STAGES) == 0
    assert f"Going on from {tmp_path / 'out' / 'checkpoint-'}" in capsys.readouterr().out
    assert steps == ["teacher"] * 6 + ["warmup"] * 4 + ["transition"] * 4 + ["stable"] * 2
    for name in ("drafter", "teacher/drafter"):
        expected = DLiteForDrafting.from_pretrained(tmp_path / "whole" / name).state_dict()
        actual = DLiteForDrafting.from_pretrained(tmp_path / "out" / name).state_dict()
        assert all(torch.equal(actual[key], value) for key, value in expected.items())
    expected, actual = (
        [(stage.stage, stage.steps, stage.anchors) for run in TrainingRecord.load(folder).runs for stage in run.stages]
        for folder in (tmp_path / "whole" / "drafter", tmp_path / "out" / "drafter")
    )
    assert actual == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mask_token_id=7"], "checkpoint-2 was trained with `mask_token_id` 97, but this training has 7; choose"),
        (["--target_layer_ids", "0", "1", "2"], "`target_layer_ids` ["),
        (["--max_length=50"], "`max_length` 4096, but this training has 50"),
        (["--target_dtype=bfloat16"], "`target` "),
        ([], "`data` [('answers.jsonl', 16, 112)], but this training has [('answers.jsonl', 17, "),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(train, tmp_path, monkeypatch, capsys, options, message):
    """Their shapes are the same, so each would load."""
    training_step, steps = DLiteTrainer.training_step, []

    def dying_step(self, *args, **kwargs):
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return training_step(self, *args, **kwargs)

    monkeypatch.setattr(DLiteTrainer, "training_step", dying_step)
    with pytest.raises(KeyboardInterrupt):
        train("--num_context_layers=3")
    if not options:
        write_answers(tmp_path / "answers.jsonl", 17)
    if "--target_layer_ids" not in options:
        options = ["--num_context_layers=3", *options]
    assert train(*options) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert len(steps) == 3


def test_a_finished_teacher_of_another_training_is_refused(train, monkeypatch, capsys):
    training_step = DLiteTrainer.training_step

    def dying_step(self, *args, **kwargs):
        if self.stage != "teacher":
            raise KeyboardInterrupt
        return training_step(self, *args, **kwargs)

    monkeypatch.setattr(DLiteTrainer, "training_step", dying_step)
    with pytest.raises(KeyboardInterrupt):
        train(*STAGES, "--teacher_max_steps=1")
    assert train(*STAGES, "--teacher_max_steps=1", "--teacher_history_window=6") == 2
    assert (
        "drafter was trained with `history_window` 8, but this training has 6"
        in (capsys.readouterr().err.splitlines()[-1])
    )


def test_a_drafter_of_the_hub_brings_its_record(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert _runs_of("owner/name") == []
    record = TrainingRecord([make_run()])
    record.save(snapshot)
    assert _runs_of("owner/name") == record.runs


def readme_options():
    """What README's short command gives beside its files."""
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    command = re.search(r"^dlite-hf train ((?:.*\\\n)*.*)", text, flags=re.MULTILINE)[1].replace("\\\n", " ")
    words = shlex.split(command)
    assert words[:6:2] == ["--target", "--train_files", "--output_dir"]
    return words[6:]


def test_readmes_command_goes_on_when_it_was_killed_in_its_second_epoch(target_folder, tmp_path, monkeypatch, capsys):
    answers = write_answers(tmp_path / "answers.jsonl", 48)  # 32 of which are held out: 2 steps an epoch
    training_step, steps = DLiteTrainer.training_step, []

    def dying_step(self, *args, **kwargs):
        steps.append(self.state.global_step)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return training_step(self, *args, **kwargs)

    monkeypatch.setattr(DLiteTrainer, "training_step", dying_step)
    where = ["--target", str(target_folder), "--train_files", answers, "--output_dir", str(tmp_path / "out")]
    smaller = ["--num_hidden_layers=1", "--sequential_rank=8", "--eval_num_prompts=1", "--eval_max_new_tokens=3"]
    command = ["train", *where, *readme_options(), *smaller, "--use_cpu", "--disable_tqdm=true"]
    with pytest.raises(KeyboardInterrupt):
        cli.main(command)
    capsys.readouterr()
    assert cli.main(command) == 0
    assert f"Going on from {tmp_path / 'out' / 'checkpoint-2'}" in capsys.readouterr().out
    assert steps == [0, 1, 2, 3, 2, 3, 4, 5]
    assert TrainingRecord.load(tmp_path / "out" / "drafter").runs[0].best_step in (2, 4, 6)


LOCKING = "import sys, filelock\nlock = filelock.FileLock(sys.argv[1]).acquire()\nprint(flush=True)\nsys.stdin.read()"


@pytest.fixture
def locked(tmp_path):
    """Another process that holds the lock of a run."""
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", LOCKING, str(tmp_path / "out" / "training.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process


def test_two_runs_in_one_folder(train, locked, tmp_path, capsys):
    """The second is refused, until the first has ended, if only by a kill."""
    assert train("--max_steps=1") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"dlite-hf: error: Another run is training in `output_dir` {tmp_path / 'out'}; let")
    assert train("--max_steps=1", "--estimate") == 0
    locked.kill()
    locked.wait()
    assert train("--max_steps=1") == 0
    assert (tmp_path / "out" / "drafter").exists()


def test_another_rank_of_the_same_run_is_let_in(train, locked, monkeypatch, capsys):
    monkeypatch.setattr(DLiteTrainingArguments, "process_index", 1)
    monkeypatch.setattr("dlite_hf.commands.train._train", lambda *arguments: print("trains"))
    assert train() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "trains"


def test_the_lock_is_held_for_all_of_a_run(train, monkeypatch):
    statuses = []
    monkeypatch.setattr("dlite_hf.commands.train._train", lambda *arguments: statuses.append(train()))
    assert train() == 0
    assert statuses == [2]


def test_a_missing_placeholder_is_told_before_anything_large_is_read(
    train, target_folder, tmp_path, monkeypatch, capsys
):
    folder = shutil.copytree(target_folder, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] - 2}))
    for name in ("AutoModelForCausalLM", "read_data"):
        monkeypatch.setattr(f"dlite_hf.commands.train.{name}", None)
    assert train(f"--target={folder}") == 2
    assert "The tokenizer uses all 97 rows of the target's vocabulary" in capsys.readouterr().err.splitlines()[-1]


def test_a_finished_run_is_not_done_again(train, tmp_path, monkeypatch, capsys):
    assert train("--max_steps=1") == 0
    monkeypatch.setattr(DLiteTrainer, "train", lambda *args, **kwargs: pytest.fail("trained again"))
    assert train("--max_steps=1") == 0
    assert f"{tmp_path / 'out' / 'drafter'} is finished; to train anew, remove `output_dir` {tmp_path / 'out'}" in (
        capsys.readouterr().out
    )


def test_takes_a_finished_teacher(train, tmp_path):
    assert train("--history_window=8", "--ce_weight=1", "--tv_weight=0", "--max_steps=1", output_dir="teacher") == 0
    teacher = str(tmp_path / "teacher" / "drafter")
    assert train(f"--teacher={teacher}", "--warmup_epochs=1", "--attn_implementation=eager") == 0
    assert not (tmp_path / "out" / "teacher").exists()
    stages = [[each.stage for each in run.stages] for run in TrainingRecord.load(tmp_path / "out" / "drafter").runs]
    assert stages == [["teacher"], ["warmup", "stable"]]


def test_goes_on_from_another_drafter(target_folder, tmp_path, train):
    assert train("--max_steps=1") == 0
    recipe = tmp_path / "more.yaml"
    first = tmp_path / "out" / "drafter"
    recipe.write_text(
        f"target: {target_folder}\ntarget_dtype: float32\ntrain_files: [{tmp_path / 'answers.jsonl'}]\n"
        f"drafter: {first}\noutput_dir: {tmp_path / 'more'}\nmax_steps: 1\nlearning_rate: 0\nuse_cpu: true\n"
    )
    assert cli.main(["train", str(recipe)]) == 0
    before = DLiteForDrafting.from_pretrained(first).state_dict()
    after = DLiteForDrafting.from_pretrained(tmp_path / "more" / "drafter").state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert len(TrainingRecord.load(tmp_path / "more" / "drafter").runs) == 2


class Stop(Exception):
    pass


@pytest.fixture
def seen(monkeypatch):
    """What the trainer is made with; it is not made."""
    seen = {}

    def make(model, target, args, **kwargs):
        seen.update(kwargs, model=model, trainer=SimpleNamespace(train=stop))
        return seen["trainer"]

    def stop(**kwargs):
        raise Stop

    monkeypatch.setattr("dlite_hf.commands.train.DLiteTrainer", make)
    return seen


def test_data_is_tokenised_as_it_is_served(train, tmp_path, seen):
    heldout = write_answers(tmp_path / "heldout.jsonl", 3)
    options = (f"--eval_files={heldout}", "--eval_strategy=epoch", '--chat_template_kwargs={"brief": true}')
    with pytest.raises(Stop):
        train(*options, "--num_context_layers=3")
    assert (len(seen["train_dataset"]), len(seen["eval_dataset"])) == (16, 3)
    text = seen["processing_class"].decode(seen["eval_dataset"][1]["input_ids"]).replace(" ", "")
    assert text == "<s>user\nSay1</s>\n<s>assistant\nbrief\nabc01</s>"
    assert seen["model"].config.target_layer_ids == [0, 1, 3]
    assert seen["model"].config.mask_token_id == 97
    assert seen["model"].dtype == torch.float32


def test_what_is_held_out_is_not_in_the_records(train, tmp_path, seen):
    """Of two files, the second of which may be held out whole."""
    answers = tmp_path / "answers.jsonl"
    more = write_answers(tmp_path / "more.jsonl", 1, license="BSD", source="a set")
    options = [f"--num_eval_conversations={number}" for number in (8, 16)]
    counts = []
    for option in options:
        with pytest.raises(Stop):
            train("--train_files", str(answers), more, option, "--eval_strategy=epoch")
        records = seen["trainer"].training_data
        trained, held_out = seen["train_dataset"], seen["eval_dataset"]
        assert (len(trained), len(held_out)) == (17 - int(option.split("=")[1]), int(option.split("=")[1]))
        assert sum(each.conversations for each in records) == len(trained)
        assert sum(each.supervised_tokens for each in records) == sum(map(sum, trained["supervised"]))
        texts = [tuple(each) for each in [*trained["input_ids"], *held_out["input_ids"]]]
        assert len(set(texts)) == 16  # "abc 00" is in both files
        counts.append([(each.file, each.licenses) for each in records])
    assert counts[1] in ([("answers.jsonl", {"MIT": 1})], [("more.jsonl", {"BSD": 1})])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--teacher_epochs=1"], "`warmup_epochs` is 0.0, `teacher_epochs` 1.0"),
        (["--warmup_epochs=1"], "give both or neither"),
        (["--teacher_epochs=1", "--warmup_epochs=3"], "are 3 epochs, but `num_train_epochs` is 2"),
        (["--teacher_epochs=1", "--teacher=x"], "`teacher` is 'x' and `teacher_epochs` 1.0"),
        (["--drafter=x"], "leave out num_hidden_layers, sequential_rank, num_draft_tokens"),
        ([*STAGES, "--max_steps=1"], "`max_steps` is 1, but would leave the teacher its `teacher_epochs` 1; give"),
        (["--teacher_max_steps=1"], "`teacher_max_steps` is 1, but `teacher_epochs` 0"),
        ([*STAGES, "--teacher_ce_weight=0"], "`teacher_ce_weight` is 0.0 and `teacher_tv_weight` 0.0"),
        (["--push_to_hub"], "`dlite-hf card --push`"),
        (["--save_only_model"], "`save_only_model` leaves the optimizer"),
        (["--label_smoothing_factor=0.1"], "`label_smoothing_factor` is 0.1"),
        (["--train_files"], "`train_files` is empty"),
        (["--resume_from_checkpoint=true"], "goes on by itself"),
        (["--eval_strategy=epoch"], "to evaluate, set `eval_strategy`"),
        (["--num_eval_conversations=4"], "`eval_strategy` is 'no'"),
        (["--num_eval_conversations=4", "--eval_files=x"], "give one of them"),
        (["--num_eval_conversations=16", "--eval_strategy=epoch"], "there are 16 conversations"),
        (["--num_context_layers=2", "--target_layer_ids", "0", "3"], "`num_context_layers` is 2"),
        (["--chat_template_kwargs={x"], "is not JSON"),
        (["--chat_template_kwargs=[1]"], "must be a JSON object"),
        (["--draft_vocab_size=1000"], "A draft vocabulary of size 1000"),
        (["--train_files=nowhere.jsonl"], "nowhere.jsonl"),
        (["--assumed_num_devices=0"], "must be at least 1"),
        (["--assumed_utilization=2"], "above 0, at most 1"),
        (["--estimate", "--train_files=nowhere.jsonl"], "say `num_conversations`"),
    ],
)
def test_refuses(train, tmp_path, capsys, options, message):
    assert train(*options) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("dlite-hf: error: ") and message in error
    assert not (tmp_path / "out" / "drafter").exists()


EVALUATING = ("--num_eval_conversations=4",)
GUESSES = ("--num_conversations=100", "--mean_tokens=9000", "--mean_answer_tokens=8")


@pytest.mark.parametrize("command", [[], ["--estimate"]])
def test_steps_that_end_inside_the_warmup_are_refused(train, tmp_path, capsys, command):
    """Before the teacher is trained."""
    assert train(*STAGES, "--teacher_max_steps=1", "--max_steps=5", *command) == 2
    message = "`max_steps` 5 are 1.25 epochs, but `warmup_epochs` and `transition_epochs` are 1.5"
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out" / "teacher").exists()


@pytest.mark.parametrize("declared", [True, False])
def test_an_estimate_ends_turns_as_the_target_does(train, target_folder, tmp_path, capsys, declared):
    """A target whose turns end otherwise than its tokenizer's texts; without a declaration the tokenizer's."""
    folder = shutil.copytree(target_folder, tmp_path / "target")
    if declared:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.eos_token = "<s>"
        tokenizer.save_pretrained(folder)
    else:
        (folder / "generation_config.json").unlink()
    assert train(f"--target={folder}", "--estimate") == 0
    assert "16 conversations of 31 tokens, 7 supervised" in capsys.readouterr().out


def test_an_estimate_in_a_recipe(train, tmp_path, capsys):
    """Where there is no accelerator, an estimate of bfloat16 needs none."""
    recipe = tmp_path / "estimate.yaml"
    recipe.write_text(
        f"target: Qwen/Qwen3-4B\ntrain_files: [nowhere.jsonl]\noutput_dir: {tmp_path / 'out'}\nbf16: true\n"
        "eval_files: []\nestimate: true\nnum_conversations: 10\nmean_tokens: 9\nmean_answer_tokens: 5\n"
    )
    assert cli.main(["train", str(recipe)]) == 0
    assert "10 conversations" in capsys.readouterr().out


def test_an_estimate_counts_the_files_and_trains_nothing(train, tmp_path, capsys):
    assert train(*STAGES, "--estimate", "--assumed_device=cpu") == 0
    output = capsys.readouterr().out
    # "abc 00" and the end of turn are 7 tokens, 6 of them with one behind them; the prompt has 24 or 25.
    assert output.startswith("16 conversations of 31 tokens, 7 supervised; 6 anchors of each\n")
    rows = {line.split()[0]: line.split()[1:3] for line in output.splitlines() if line[:7].strip()}
    assert [rows[stage] for stage in ("teacher", "warmup", "transition", "stable")] == [
        ["1", "4"],
        ["1", "4"],
        ["0.5", "2"],
        ["0.5", "2"],
    ]
    assert "6 checkpoints" in output  # 2 of the teacher, 4 of the drafter
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--max_steps=10"], ["stable 2.5 10", "5 checkpoints"]),
        (["--save_strategy=no"], ["stable 2 8", "0 checkpoints"]),
        (["--save_strategy=epoch"], ["2 checkpoints"]),
        (["--save_total_limit=1"], ["1 checkpoints"]),
        (["--max_steps=9", "--save_steps=0.3"], ["stable 2.25 9", "3 checkpoints"]),
        (["--assumed_device=cpu"], ["at 60% of 0.2 bfloat16 TFLOP/s, threads of this machine: 1"]),
        (["--assumed_device=cpu", "--assumed_utilization=0.5"], ["at 50% of 0.2"]),
        ([*EVALUATING, "--eval_strategy=epoch", "--max_steps=5"], ["stable 1.667 5"]),
        ([*EVALUATING, "--eval_strategy=epoch"], ["; 2 evaluations,", "up to 4 x 128 tokens of `generate`: 51.2 s"]),
        (
            [*EVALUATING, "--eval_strategy=steps", "--eval_steps=4", "--eval_num_prompts=2"],
            ["; 2 evaluations,", "2 x 128"],
        ),
        ([*EVALUATING, "--eval_strategy=steps", "--eval_steps=2", *STAGES], ["; 5 evaluations,"]),
        # Guesses until the files are there, which count more than a recipe's.
        ([*GUESSES, "--train_files=nowhere.jsonl"], ["100 conversations of 4,096 tokens, 8 supervised"]),
        (GUESSES, ["16 conversations of 31 tokens"]),
        ([*STAGES, "--teacher_max_steps=2", "--max_steps=7"], ["teacher 0.5 2", "stable 0.25 1", "5 checkpoints"]),
    ],
)
def test_an_estimate_follows_the_arguments(train, capsys, options, expected):
    assert train("--estimate", *options) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert all(each in output for each in expected)


def test_an_estimate_of_drafters_that_exist(train, tmp_path, target_folder, capsys):
    assert train("--max_steps=1", "--history_window=8", output_dir="teacher") == 0
    teacher = tmp_path / "teacher" / "drafter"
    capsys.readouterr()
    assert train(f"--teacher={teacher}", "--warmup_epochs=1", "--estimate") == 0
    assert "teacher's weights" in capsys.readouterr().out
    arguments = ["train", f"--target={target_folder}", f"--drafter={teacher}", "--train_files=x", "--estimate"]
    counts = ["--num_conversations=8", "--mean_tokens=50", "--mean_answer_tokens=9"]
    assert cli.main([*arguments, *counts]) == 0
    assert (
        f"drafter {DLiteForDrafting.from_pretrained(teacher).num_parameters() / 1000:.1f} k" in capsys.readouterr().out
    )


def test_files_of_different_shape_are_read_together(tmp_path):
    plain = write_answers(tmp_path / "plain.jsonl", 2, generation={"model": "x"}, turns=["a"])
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    record = {
        "id": "t",
        "messages": [{"role": "user", "content": "x"}, call],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}],
        "finish_reasons": ["length"],
    }
    agent = tmp_path / "agent.jsonl"
    agent.write_text(json.dumps(record) + "\n")
    both = datasets.concatenate_datasets([read_conversations(plain), read_conversations(agent)])
    fields = ["id", "messages", "tools", "finish_reasons", "finish_reason", "generation", "source", "license"]
    assert both.column_names == fields
    assert {key: both[2][key] for key in record} == record
    assert both[0]["tools"] is None and both[0]["license"] == "MIT"
    assert both["generation"][:] == [{"model": "x"}] * 2 + [None]


def test_a_file_that_changed_is_read_anew(tmp_path):
    file = write_answers(tmp_path / "answers.jsonl", 2)
    assert read_conversations(file)["license"][:] == ["MIT", "MIT"]
    write_answers(file, 3)
    assert read_conversations(file)["license"][:] == ["MIT"] * 3
    text = (tmp_path / "answers.jsonl").read_text(encoding="utf-8")
    (tmp_path / "answers.jsonl").write_text(text.replace("MIT", "BSD"), encoding="utf-8")  # of the same size
    assert read_conversations(file)["license"][:] == ["BSD"] * 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "1", "mess', "line 3, is not JSON"),
        ('{"id": "1"}', "line 3, has no list `messages`"),
        ("[]", "line 3, is a list"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    file = write_answers(tmp_path / "answers.jsonl", 2)
    with open(file, "a") as stream:
        stream.write(line)
    with pytest.raises(ValueError, match=f"answers.jsonl, {message}"):
        read_conversations(file)


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(tmp_path):
    assert newest_checkpoint(tmp_path / "nowhere") is None
    for step, state in ((9, '{"global_step": 9}'), (10, '{"global_step": 10}'), (11, '{"glob'), (12, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
