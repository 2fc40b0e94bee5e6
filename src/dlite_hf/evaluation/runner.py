# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""An evaluation: every prompt under every method, one after the other; it can be killed and taken up again."""

import json
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..folder_lock import alone_in
from .cache_choice import with_faster_caches
from .checks import check_assistants, check_evaluation, prompt_room
from .conditions import describe_conditions
from .divergence import compare
from .measuring import Clock, Measurement, measure
from .methods import PLAIN, Method
from .progress import Progress
from .sessions import PrefixCache, Session, Turn, make_sessions, render_prompt
from .tasks import Task


WARM_UP_TOKENS = 32
CHOICE_TOKENS = 128


def evaluate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[Method],
    tasks: Sequence[Task],
    output_dir: str | os.PathLike,
    *,
    num_prompts: int | None = None,
    max_new_tokens: int = 512,
    max_prompt_tokens: int | None = None,
    min_prompt_tokens: int = 1,
    temperatures: Sequence[float] = (0.0,),
    seed: int = 0,
    chat_template_kwargs: dict[str, Any] | None = None,
    target_name: str | None = None,
    target_quantization: str | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Generates every turn of every session with all methods, and records what each took.

    The methods take turns in being first, in one direction and then in the other. Before the first row of a process,
    and of each temperature, all of them run once unrecorded. Each temperature is a pass of its own. In `output_dir`,
    `rows.jsonl` gets a line for every turn, and `sessions.jsonl` one for every finished session: a call that was
    killed goes on with the session that it was in, from that session's start, so that its caches and answers are
    those of a call that was not.

    Plain generation uses a static cache where that is faster, which is timed once, before all rows, and so does a
    DLite drafter; but not on CUDA, where Transformers compiles the forward for it.

    Args:
        target: the target, in evaluation mode.
        tokenizer: its tokenizer, with a chat template.
        methods: those to compare, of which one is plain generation.
        tasks: what to generate.
        output_dir: a folder for the evaluation alone.
        num_prompts: takes the first so many records of each task; by default all.
        max_new_tokens: where an answer is cut.
        max_prompt_tokens: a turn whose prompt is longer, or leaves no room for the answer, is counted and not run.
        min_prompt_tokens: so is one whose prompt is shorter; and, in a live session, what comes after such a turn.
        temperatures: 0 is greedy.
        seed: of sampling; every turn has its own, the same for all methods.
        chat_template_kwargs: for the chat template, such as `{"enable_thinking": False}`.
        target_name: by default the folder or id that it was loaded from; of a folder only the last name is kept.
        target_quantization: how its weights were quantised; by default what the target says.
        clock: tells the time in seconds.

    Returns:
        `conditions`, `methods` and `rows`, the parts of a report.

    Raises:
        ValueError: if the target is in training mode, an argument makes no sense, the chat template refuses a record,
            an assistant's context is shorter than prompts may be, another process evaluates in `output_dir` or it
            holds an evaluation under other conditions, or no prompt fits.
    """
    check_evaluation(
        target,
        methods,
        tasks,
        temperatures,
        {"max_new_tokens": max_new_tokens, "num_prompts": num_prompts, "min_prompt_tokens": min_prompt_tokens},
    )
    tasks = [replace(task, records=task.records[:num_prompts]) for task in tasks]
    conditions = describe_conditions(
        target,
        tokenizer,
        tasks,
        target_name=target_name,
        target_quantization=target_quantization,
        temperatures=temperatures,
        chat_template_kwargs=chat_template_kwargs,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        min_prompt_tokens=min_prompt_tokens,
        num_prompts=num_prompts,
        seed=seed,
    )
    room = prompt_room(target, max_new_tokens, max_prompt_tokens)
    fitting = range(min_prompt_tokens, room + 1)
    sessions = [session for task in tasks for session in make_sessions(task)]
    check_assistants(methods, room, max_new_tokens)
    for session in sessions:
        for turn in session.turns:  # rather now than after hours
            _render(tokenizer, session, turn, [""] * turn.index, chat_template_kwargs)
    total = len(temperatures) * sum(len(session.turns) for session in sessions)
    with alone_in(output_dir, "evaluating"), logging.tqdm(total=total, desc="Evaluating", unit="turn") as bar:
        progress = Progress.open(Path(output_dir), conditions, methods)
        run = _Run(target, tokenizer, sessions, progress, fitting, max_new_tokens, seed, chat_template_kwargs, clock)
        for temperature in temperatures:
            run.is_warm = False
            for session in sessions:
                if not progress.is_finished((session.task, session.id, temperature)):
                    run.run_session(session, temperature)
                bar.update(len(session.turns))
        if not progress.rows:
            raise ValueError(
                f"No prompt has from {min_prompt_tokens} to {room} tokens; give others, or change `min_prompt_tokens` "
                "or `max_prompt_tokens`."
            )
        return progress.finish()


def _render(
    tokenizer: PreTrainedTokenizerBase,
    session: Session,
    turn: Turn,
    answers: Sequence[str],
    chat_template_kwargs: dict[str, Any] | None,
) -> torch.Tensor:
    """The prompt `[1, T]` of a turn."""
    try:
        return render_prompt(tokenizer, turn.context(answers), session.tools, chat_template_kwargs)
    except Exception as error:  # whatever a template or a tokenizer raises, it means the same
        raise ValueError(
            f"The prompt of record {session.id!r} of {session.task}, turn {turn.index + 1}, cannot be rendered "
            f"({type(error).__name__}: {error}); repair the record, or give a tokenizer whose chat template takes it."
        ) from error


def _sized(method: Method, cache_length: int) -> Method:
    """The method, its static cache as long as its session needs it."""
    if "cache_implementation" not in method.settings or "max_cache_len" in method.settings:
        return method
    return replace(method, settings={**method.settings, "max_cache_len": cache_length})


@dataclass
class _Run:
    """One process's part of an evaluation."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sessions: list[Session]
    progress: Progress
    fitting: range  # how many tokens a prompt may have
    max_new_tokens: int
    seed: int
    chat_template_kwargs: dict[str, Any] | None
    clock: Clock
    is_warm: bool = False

    def run_session(self, session: Session, temperature: float) -> None:
        """Every turn of a session that fits, under all methods."""
        caches = {method.name: PrefixCache() for method in self.progress.methods if method.keeps_cache}
        answers: list[str] = []
        num_rows, cache_length = 0, self._cache_length(session)
        for turn, prompt_ids in self._prompts(session, answers):
            if not self.is_warm:
                self._warm_up(prompt_ids, temperature)
            row, plain = self._run_turn(session, turn, prompt_ids, temperature, caches, cache_length)
            self.progress.add_row(row)
            answers.append(self.tokenizer.decode(plain, skip_special_tokens=True))
            num_rows += 1
        self.progress.finish_session((session.task, session.id, temperature), num_rows, len(session.turns) - num_rows)

    def _prompts(self, session: Session, answers: list[str]) -> Iterator[tuple[Turn, torch.Tensor]]:
        """The turns whose prompt `[1, T]` fits; `answers`, plain generation's, grows meanwhile."""
        for turn in session.turns:
            if turn.is_live and len(answers) < turn.index:  # an earlier one did not fit, so its answer is unknown
                return
            prompt_ids = _render(self.tokenizer, session, turn, answers, self.chat_template_kwargs)
            if prompt_ids.shape[1] in self.fitting:
                yield turn, prompt_ids

    def _run_turn(
        self,
        session: Session,
        turn: Turn,
        prompt_ids: torch.Tensor,
        temperature: float,
        caches: dict[str, PrefixCache],
        cache_length: int,
    ) -> tuple[dict[str, Any], list[int]]:
        """The row of a turn, and plain generation's answer."""
        methods = self.progress.methods
        # Every turn has all orders, however many turns a session has, and no method always follows the same one.
        reverses, shift = divmod(len(self.progress.skipped) + turn.index, len(methods))  # by finished sessions
        order = [*methods[shift:], *methods[:shift]][:: -1 if reverses % 2 else 1]
        measurements, tokens = {}, {}
        for method in order:
            method = _sized(method, cache_length)
            kept = caches.get(method.name)
            cache, cached_tokens = kept.prepare(prompt_ids, self.max_new_tokens) if kept is not None else (None, 0)
            measurement, output = measure(
                self.target,
                method,
                prompt_ids,
                max_new_tokens=self.max_new_tokens,
                temperature=temperature,
                seed=zlib.crc32(json.dumps([self.seed, session.task, session.id, turn.index]).encode()),
                cache=cache,
                cached_tokens=cached_tokens,
                clock=self.clock,
            )
            if kept is not None:
                kept.keep(output.sequences, output.cache)
            measurements[method.name] = asdict(measurement)
            tokens[method.name] = output.sequences[0, prompt_ids.shape[1] :].tolist()
        others = [method for method in methods if method.kind != PLAIN and temperature == 0]
        plain = tokens[PLAIN]
        row = {
            "task": session.task,
            "id": session.id,
            "turn": turn.index,
            "temperature": temperature,
            "prompt_tokens": prompt_ids.shape[1],
            "order": [method.name for method in order],
            "measurements": {method.name: measurements[method.name] for method in methods},
            "identical": {method.name: tokens[method.name] == plain for method in others},
            "divergence": {
                method.name: compare(
                    self.target,
                    prompt_ids,
                    plain,
                    tokens[method.name],
                    (method.num_draft_tokens or 0) + 1,
                    caches[PLAIN],
                )
                for method in others
                if tokens[method.name] != plain
            },
        }
        return row, plain

    def _warm_up(self, prompt_ids: torch.Tensor, temperature: float) -> None:
        if not self.progress.has_chosen:
            self.progress.choose(self._with_faster_caches())
        for method in self.progress.methods:
            num_tokens = min(WARM_UP_TOKENS, self.max_new_tokens)
            self._run_unrecorded(method, prompt_ids, temperature, num_tokens, PrefixCache())
        self.is_warm = True

    def _with_faster_caches(self) -> list[Method]:
        """The methods with the faster kind of cache, timed behind prompts of the quartiles' and the largest length."""
        prompts = sorted(
            (length, number, turn.index)
            for number, session in enumerate(self.sessions)
            for turn, length in self._turns_that_fit(session)
        )
        compiles, num_tokens = self.target.device.type == "cuda", min(CHOICE_TOKENS, self.max_new_tokens)
        timed = [prompts[(len(prompts) - 1) * quarter // 4] for quarter in (1, 2, 3, 4)]
        lengths = ", ".join(f"{length:,}" for length, *_ in timed)
        return with_faster_caches(
            self.progress.methods,
            [(number, turn) for _, number, turn in timed],
            partial(self._seconds_of_turn, num_tokens=num_tokens),
            compiles=compiles,
            # Of one size, so that it compiles once.
            max_cache_len=max(map(self._cache_length, self.sessions)) if compiles else None,
            what=f"Turns of {lengths} tokens, each with {num_tokens} new ones,",
        )

    def _seconds_of_turn(self, method: Method, place: tuple[int, int], kept: PrefixCache, num_tokens: int) -> float:
        """Of a whole turn, what is new in its prompt included, at a place: the session's number and the turn's."""
        number, turn = place
        session = self.sessions[number]
        method = _sized(method, self._cache_length(session))
        if turn == 0:
            kept = PrefixCache()
        else:  # `kept` is cut back, or filled, to the turn before
            self._run_unrecorded(method, self._prompt_without_answers(session, turn - 1), 0.0, 1, kept)
        prompt_ids = self._prompt_without_answers(session, turn)
        measurement, cache = self._run_unrecorded(method, prompt_ids, 0.0, num_tokens, kept)
        if "cache_implementation" in method.settings and len(session.turns) > 1 and not cache.is_croppable:
            raise ValueError("it cannot be kept from turn to turn.")
        return measurement.seconds

    def _prompt_without_answers(self, session: Session, turn: int) -> torch.Tensor:
        """The prompt `[1, T]` of a turn, if earlier answers are not known yet."""
        return _render(self.tokenizer, session, session.turns[turn], [""] * turn, self.chat_template_kwargs)

    def _turns_that_fit(self, session: Session) -> Iterator[tuple[Turn, int]]:
        """With how long the prompt can be, if earlier answers are as long as they may be."""
        for turn in session.turns:
            length = self._prompt_without_answers(session, turn.index).shape[1]
            if length in self.fitting:
                earlier = turn.index * self.max_new_tokens if turn.is_live else 0
                yield turn, min(length + earlier, self.fitting[-1])
            elif turn.is_live:
                return

    def _cache_length(self, session: Session) -> int:
        """Tokens that a cache of the whole session holds."""
        return max((length for _, length in self._turns_that_fit(session)), default=0) + self.max_new_tokens

    def _run_unrecorded(
        self, method: Method, prompt_ids: torch.Tensor, temperature: float, num_tokens: int, kept: PrefixCache
    ) -> tuple[Measurement, Cache]:
        cache, cached_tokens = kept.prepare(prompt_ids, num_tokens)
        measurement, output = measure(
            self.target,
            method,
            prompt_ids,
            max_new_tokens=num_tokens,
            temperature=temperature,
            seed=self.seed,
            cache=cache,
            cached_tokens=cached_tokens,
            clock=self.clock,
        )
        if method.keeps_cache:
            kept.keep(output.sequences, output.cache)
        return measurement, output.cache


__all__ = ["evaluate"]
