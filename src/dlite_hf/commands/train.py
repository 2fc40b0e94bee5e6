# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""`dlite-hf train`: from answered conversations to a drafter, through its teacher where the recipe has one.

A run may be killed at any time: the same command goes on from the newest checkpoint of whichever stage it was in.
"""

import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerState, set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import cached_file

from ..configuration_dlite import DLiteConfig
from ..conversations import end_of_turn_ids
from ..data import most_frequent_tokens
from ..estimate import describe
from ..folder_lock import alone_in
from ..modeling_dlite import DLiteForDrafting
from ..trainer import DLiteTrainer
from ..training_args import DLiteTrainingArguments
from ..training_record import FILE_NAME, TrainingRecord, TrainingRun
from .train_arguments import (
    EstimateArguments,
    TrainArguments,
    check_arguments,
    drafter_overrides,
    stage_epochs,
    teacher_arguments,
)
from .train_cost import workload
from .train_data import read_data


def main(
    train_args: TrainArguments,
    training_args: DLiteTrainingArguments,
    estimate_args: EstimateArguments | None = None,
) -> None:
    """Trains as the arguments say and leaves the drafter, in the target's dtype, in `<output_dir>/drafter`.

    Raises:
        ValueError: if the arguments contradict each other, the data cannot be read, or another run trains in
            `output_dir`.
        OSError: if a file, the target or a drafter is missing.
    """
    check_arguments(train_args, training_args)
    if estimate_args is not None and estimate_args.estimate:
        print(describe(workload(train_args, training_args, estimate_args)))
        return
    student_folder = Path(training_args.output_dir, "drafter")
    if student_folder.exists():
        _say(
            training_args,
            f"{student_folder} is finished; to train anew, remove `output_dir` {training_args.output_dir}, or choose "
            "another.",
        )
        return
    # The main process holds the folder for all of a run.
    with nullcontext() if training_args.process_index else alone_in(training_args.output_dir, "training"):
        _train(train_args, training_args)
    _say(training_args, f"The drafter is in {student_folder}")


def _train(train_args: TrainArguments, training_args: DLiteTrainingArguments) -> None:
    tokenizer = AutoTokenizer.from_pretrained(train_args.target, revision=train_args.target_revision)
    if train_args.drafter is None:
        # What is wrong with the new drafter's configuration is told before anything large is read.
        config = AutoConfig.from_pretrained(train_args.target, revision=train_args.target_revision)
        overrides = drafter_overrides(train_args, config)
        DLiteConfig.from_target(config, tokenizer, **overrides, history_window=train_args.history_window)
    target = AutoModelForCausalLM.from_pretrained(
        train_args.target, revision=train_args.target_revision, dtype=train_args.target_dtype
    )
    end_ids = end_of_turn_ids(target.generation_config)
    with training_args.main_process_first(desc="reading the conversations"):
        train, held_out, records = read_data(train_args, training_args, tokenizer, end_ids)
    stage_epochs(training_args, len(train), training_args.world_size)  # before the teacher is trained in vain

    draft_vocab_ids = None
    if train_args.draft_vocab_size is not None:
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        vocabulary = most_frequent_tokens(train, train_args.draft_vocab_size, end_ids, vocab_size)
        draft_vocab_ids = vocabulary.token_ids
        _say(training_args, f"{len(draft_vocab_ids)} tokens to draft cover {vocabulary.coverage:.2%} of the answers")

    def run(args: DLiteTrainingArguments, history_window: int | None, teacher: str | Path | None = None) -> None:
        set_seed(args.seed)  # the same new weights, whether or not another stage ran in this process before
        if train_args.drafter is not None:
            drafter = DLiteForDrafting.from_pretrained(train_args.drafter, dtype="float32")
        else:
            overrides = drafter_overrides(train_args, target.config)
            drafter = DLiteForDrafting.from_target(
                target, tokenizer, draft_vocab_ids=draft_vocab_ids, **overrides, history_window=history_window
            )
        taught_by = None if teacher is None else DLiteForDrafting.from_pretrained(teacher, dtype=target.dtype)
        if train_args.attn_implementation is not None:
            for model in (drafter, taught_by):
                if model is not None:
                    model.set_attn_implementation(train_args.attn_implementation)
        trainer = DLiteTrainer(
            drafter,
            target,
            args,
            teacher=taught_by,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
        )
        trainer.training_data = records
        earlier = [each for each in (train_args.drafter, teacher) if each is not None]
        trainer.earlier_runs = [past for each in earlier for past in _runs_of(each)]
        finished = Path(args.output_dir, "drafter")
        if finished.exists():
            _check_same_training(trainer, finished)
            _say(args, f"The teacher is finished: {finished}")
            return
        checkpoint = newest_checkpoint(args.output_dir)
        if checkpoint is not None:
            _check_same_training(trainer, checkpoint)
            _say(args, f"Going on from {checkpoint}")
        trainer.train(resume_from_checkpoint=checkpoint)
        _save(trainer)

    teacher: str | Path | None = train_args.teacher
    if train_args.teacher_epochs:
        args = teacher_arguments(train_args, training_args)
        teacher = Path(args.output_dir, "drafter")
        if not teacher.exists():
            _say(args, f"Training the teacher, {args.num_train_epochs:g} epochs, in {args.output_dir}")
        run(args, train_args.teacher_history_window)
    _say(training_args, f"Training the drafter in {training_args.output_dir}")
    run(training_args, train_args.history_window, teacher)


def newest_checkpoint(folder: str | os.PathLike) -> str | None:
    """The newest checkpoint in `folder` that was written to its end."""
    checkpoints = {
        int(path.name.rpartition("-")[2]): path
        for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if path.name.rpartition("-")[2].isdecimal()
    }
    for _, path in sorted(checkpoints.items(), reverse=True):
        try:
            TrainerState.load_from_json(str(path / "trainer_state.json"))  # the last file that a checkpoint gets
        except (OSError, ValueError, TypeError):
            continue
        return str(path)
    return None


def _runs_of(drafter: str | Path) -> list[TrainingRun]:
    """What led to a drafter, in a folder or on the Hub, where it was recorded."""
    try:
        file = cached_file(str(drafter), FILE_NAME)
    except OSError:
        return []
    return TrainingRecord.load(Path(file).parent).runs


def _check_same_training(trainer: DLiteTrainer, folder: str | Path) -> None:
    """Refuses what `folder` holds of another drafter, target or other data: it would load without an error."""

    def settings(config: DLiteConfig, run: TrainingRun) -> dict[str, Any]:
        files = [(each.file, each.conversations, each.supervised_tokens) for each in run.data]
        own = {name: getattr(config, name) for name in DLiteConfig.__annotations__}
        return {**own, "target": run.target, "data": files, "max_length": run.max_length}

    if not TrainingRecord.exists(folder):  # as in a sharded checkpoint
        return
    theirs = settings(DLiteConfig.from_pretrained(folder), TrainingRecord.load(folder).runs[-1])
    ours = settings(trainer.drafter.config, trainer.training_record().runs[-1])
    for name, value in ours.items():
        if theirs[name] != value:
            raise ValueError(
                f"{folder} was trained with `{name}` {theirs[name]!r}, but this training has {value!r}; choose "
                "another `output_dir`, or the same settings."
            )


def _save(trainer: DLiteTrainer) -> None:
    """The trained drafter in the target's dtype, with the record of its training; there whole or not at all."""
    folder = Path(trainer.args.output_dir, "drafter")
    whole, unfinished = folder.with_name("drafter.fp32"), folder.with_name("drafter.unfinished")
    trainer.save_model(str(whole), _internal_call=True)  # gathers what is sharded; `dlite-hf card` is what publishes
    if trainer.is_world_process_zero():
        drafter = DLiteForDrafting.from_pretrained(whole, dtype=trainer.target.dtype)
        drafter.save_pretrained(unfinished)
        TrainingRecord.load(whole).save(unfinished)
        shutil.rmtree(whole)
        unfinished.rename(folder)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()


def _say(args: DLiteTrainingArguments, message: str) -> None:
    if args.process_index == 0:
        print(message, flush=True)
