# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Evaluations of a scripted target by a scripted clock: what is counted, in which order, and after a kill."""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from transformers import GenerationConfig, LlamaConfig

from dlite_hf import evaluation
from dlite_hf.evaluation import conditions, metrics, runner
from dlite_hf.evaluation.methods import Method, make_methods
from dlite_hf.evaluation.report import Report
from dlite_hf.evaluation.runner import evaluate
from dlite_hf.evaluation.tasks import Task
from dlite_hf.generation.statistics import running_statistics

from ..replay import make_replay_drafter
from ..targets import make_chatml_tokenizer, make_drafter, make_target


FIRST_SECONDS, PLAIN_SECONDS = 2.0, 0.5  # of a call's first forward, and of each after it
END = 1  # of a turn, for `make_chatml_tokenizer`
TIMED = 32  # calls that choose caches: two methods, two kinds of cache, four prompts twice
BEFORE = 8  # and where a prompt is not its session's first, each run's call that brings the cache to the turn before


class Killed(BaseException):
    """As SIGKILL: nothing catches it."""


class ScriptedTarget:
    """Answers as it is told: `rounds` for each method and prompt are the tokens that each of its forwards emits.

    The time passes while it works, and never elsewhere.
    """

    training = False
    dtype = torch.float32
    device = torch.device("cpu")
    generation_config = GenerationConfig(eos_token_id=END, repetition_penalty=1.5)

    def __init__(self, script, context=4096, round_seconds=0.25):
        self.script, self.round_seconds = script, round_seconds
        self.config = LlamaConfig(max_position_embeddings=context, name_or_path="somewhere/scripted")
        self.now = 0.0
        self.calls = []
        self.kill_at = None
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def clock(self):
        return self.now

    def num_parameters(self):
        return 1000

    def named_parameters(self):
        return [("weight", self.weight)]

    def generate(self, input_ids, attention_mask, streamer, max_new_tokens, method="plain", **options):
        if len(self.calls) == self.kill_at:
            raise Killed
        self.calls.append((method, input_ids[0].tolist(), max_new_tokens))
        streamer.put(input_ids)
        rounds = self.script(method, input_ids[0].tolist(), max_new_tokens)
        for number, tokens in enumerate(rounds):
            self.now += FIRST_SECONDS if number == 0 else PLAIN_SECONDS if method == "plain" else self.round_seconds
            streamer.put(torch.tensor(tokens))
            if number and method == "dlite" and (statistics := running_statistics()) is not None:
                statistics.num_rounds += 1
                statistics.num_drafted_tokens += 4
                is_cut = len(tokens) > 1 and tokens[-1] == END  # an accepted draft token ended the turn
                statistics.token_origins += range(1, len(tokens) + 1) if is_cut else [*range(1, len(tokens)), 0]
        answer = torch.tensor([sum(rounds, [])])
        cache = SimpleNamespace(get_seq_length=lambda: input_ids.shape[1], is_croppable=False, is_compileable=False)
        return SimpleNamespace(sequences=torch.cat([input_ids, answer], dim=1), cache=cache)


PLAIN = Method("plain", "plain")
DLITE = Method("dlite", "dlite", {"method": "dlite"}, num_draft_tokens=4)
STOCK = Method("stock", "assistant", {"method": "stock"}, num_draft_tokens=4)


def make_task(*texts, name="toy"):
    records = [{"id": f"r{i}", "turns": [text] if isinstance(text, str) else text} for i, text in enumerate(texts)]
    return Task(name, "general", records, file="toy.jsonl", sha256="0" * 64)


def in_rounds(tokens, *lengths):
    """`tokens` in parts of these lengths."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def run(target, methods, tasks, folder, tokenizer=None, **options):
    tokenizer = tokenizer or make_chatml_tokenizer()
    return evaluate(target, tokenizer, methods, tasks, folder, clock=target.clock, **options)


def test_tau_is_emitted_tokens_over_verifications(tmp_path):
    """Pooled over all rounds of all prompts, no prefill's token, the last round as it was cut."""
    answer = list(range(40, 49)) + [END]
    lengths = {
        # The last round of "a" is cut at the end of the turn, which was drafted.
        "a": {"dlite": (1, 5, 4), "stock": (3, 5, 2)},
        "b": {"dlite": (1,) * 10, "stock": (1, 4, 4, 1)},
    }

    def script(method, prompt, max_new_tokens):
        which = "b" if make_chatml_tokenizer().convert_tokens_to_ids("b") in prompt else "a"
        return in_rounds(answer, *([1] * 10 if method == "plain" else lengths[which][method]))

    result = run(ScriptedTarget(script), [PLAIN, DLITE, STOCK], [make_task("a", "b")], tmp_path)
    first, second = result["rows"]
    assert [first["measurements"][name]["accepted_per_position"] for name in ("dlite", "stock")] == [
        [2, 2, 2, 2],
        [2, 1, 1, 1],
    ]
    assert [row["measurements"]["stock"]["prefill_tokens"] for row in (first, second)] == [3, 1]
    figures = {name: metrics.tau(result["rows"], name).value for name in ("plain", "dlite", "stock")}
    assert figures == {"plain": 1.0, "dlite": (9 + 9) / (2 + 9), "stock": (7 + 9) / (2 + 3)}
    # Accepted only is another figure.
    assert metrics.accepted(result["rows"], "dlite") == (8 + 0) / (2 + 9)
    assert first["identical"] == {"dlite": True, "stock": True} and first["divergence"] == {}


def fixed_script(method, prompt, max_new_tokens):
    """Six tokens, alike for all methods; which they are depends on the prompt."""
    answer = [40 + sum(prompt) % 7 + i for i in range(6)]
    return in_rounds(answer, *{"plain": (1,) * 6, "dlite": (1, 3, 2), "stock": (2, 4)}[method])


def test_figures_that_cannot_flatter(tmp_path, monkeypatch):
    """Warm-up in no row, interleaved, other lengths flagged, slower is slower, missing is null."""

    def script(method, prompt, max_new_tokens):
        rounds = fixed_script(method, prompt, max_new_tokens)
        return rounds[:-1] if method == "stock" else rounds + [[50]] * 9 * (method == "dlite")

    monkeypatch.setattr(runner, "compare", lambda *arguments: {"first_difference": 2})
    target = ScriptedTarget(script)
    result = run(target, [PLAIN, DLITE, STOCK], [make_task("a", "b", "c", "d")], tmp_path)
    assert [call[0] for call in target.calls[:TIMED]] == 8 * (["plain"] * 2 + ["dlite"] * 2)
    warm_up, calls = target.calls[TIMED : TIMED + 3], [call[0] for call in target.calls[TIMED + 3 :]]
    assert {(name, limit) for name, _, limit in warm_up} == {(name, 32) for name in ("plain", "dlite", "stock")}
    orders = [["plain", "dlite", "stock"], ["dlite", "stock", "plain"], ["stock", "plain", "dlite"]]
    orders.append(orders[0][::-1])
    assert [row["order"] for row in result["rows"]] == orders
    assert calls == sum(orders, [])
    # So does every turn of a session of as many turns as there are methods.
    talks = run(target, [PLAIN, DLITE], [make_task(*[["a", "b"]] * 4)], tmp_path / "talks")
    firsts = [[row["order"][0] for row in talks["rows"] if row["turn"] == turn] for turn in (0, 1)]
    assert firsts == [["plain", "dlite", "dlite", "plain"], ["dlite", "dlite", "plain", "plain"]]
    for row in result["rows"]:
        plain, stock = row["measurements"]["plain"], row["measurements"]["stock"]
        assert (plain["first_token_seconds"], plain["seconds"]) == (2.0, 2.0 + 5 * PLAIN_SECONDS)
        assert (stock["drafted"], stock["drafting_seconds"], stock["peak_bytes"]) == (None, None, None)
        assert row["identical"] == {"dlite": False, "stock": False}
        assert row["divergence"] == dict.fromkeys(("dlite", "stock"), {"first_difference": 2})
    # Both emit another number of tokens than plain generation, so no speedup is theirs.
    assert len(metrics.flagged_rows(result["rows"], "dlite")) == 4
    assert metrics.speedup(result["rows"], "dlite") is metrics.speedup(result["rows"], "stock") is None


def test_below_one_is_printed_as_such_with_the_conditions(tmp_path):
    target = ScriptedTarget(lambda *arguments: [[40 + i] for i in range(6)], round_seconds=1.4)
    result = run(target, [PLAIN, DLITE], [make_task("a", "b")], tmp_path)
    assert metrics.speedup(result["rows"], "dlite").value == pytest.approx((2 + 5 * 0.5) / (2 + 5 * 1.4))
    assert "0.50x" in Report(**result).to_markdown()
    conditions = result["conditions"]
    assert conditions["target"] == {
        "name": "somewhere/scripted",
        "parameters": 1000,
        "sha256": hashlib.sha256(b"weight" + bytes(8)).hexdigest(),
        "dtype": "float32",
        "quantization": None,
    }
    for name in ("machine", "device", "threads", "torch", "transformers", "dlite_hf", "dtype", "started_at"):
        assert conditions[name] is not None
    assert (conditions["thinking"], conditions["max_new_tokens"], conditions["temperatures"]) == (None, 512, [0.0])
    assert conditions["generation"] == {
        "used": {"0.0": {"do_sample": False}},
        "eos_token_id": END,
        "ignored": {"repetition_penalty": 1.5},
    }
    (task,) = conditions["tasks"]
    assert (task["name"], task["category"], task["records"], task["file"]) == ("toy", "general", 2, "toy.jsonl")


def test_whether_the_target_thinks_is_said(tmp_path):
    """Where nobody says it, a template that knows the switch has a default of its own."""
    tokenizer = make_chatml_tokenizer()
    tokenizer.chat_template = "{% if enable_thinking %}{% endif %}" + tokenizer.chat_template
    cases = [(None, "the chat template's default"), ({"enable_thinking": False}, False)]
    for number, (options, said) in enumerate(cases):
        folder = tmp_path / str(number)
        result = run(
            ScriptedTarget(fixed_script), [PLAIN], [make_task("a")], folder, tokenizer, chat_template_kwargs=options
        )
        assert result["conditions"]["thinking"] == said


def test_long_prompts_are_counted_and_not_run(tmp_path):
    target = ScriptedTarget(fixed_script, context=60)
    tasks = [make_task("a" * 200, ["b", "c" * 200, "d"]), make_task("e", name="other")]
    result = run(target, [PLAIN, DLITE], tasks, tmp_path, max_new_tokens=10)
    assert [(row["task"], row["id"], row["turn"]) for row in result["rows"]] == [("toy", "r1", 0), ("other", "r0", 0)]
    assert result["conditions"]["skipped_turns"] == {"toy": 3, "other": 0}
    with pytest.raises(ValueError, match="No prompt has from 1 to 50 tokens"):
        run(target, [PLAIN, DLITE], [make_task("a" * 200)], tmp_path / "other", max_new_tokens=10)
    # A replayed turn that does not fit says nothing of the next one: here the limit is the caller's.
    record = {"id": "m", "messages": [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]}
    task = Task("replayed", "agent", [record])
    result = run(target, [PLAIN, DLITE], [task], tmp_path / "replayed", max_new_tokens=10, max_prompt_tokens=40)
    assert [row["turn"] for row in result["rows"]] == [0] and result["conditions"]["skipped_turns"] == {"replayed": 1}
    # Nor does one that is too short; a live turn after it would lack its answer.
    limit = {"max_new_tokens": 10}
    result = run(target, [PLAIN, DLITE], [task], tmp_path / "both", **limit)
    first, second = (row["prompt_tokens"] for row in result["rows"])
    limit |= {"min_prompt_tokens": second}
    result = run(target, [PLAIN, DLITE], [task, make_task(["b", "c" * 20])], tmp_path / "long", **limit)
    assert [(row["task"], row["turn"], row["prompt_tokens"]) for row in result["rows"]] == [("replayed", 1, second)]
    assert first < second and result["conditions"]["skipped_turns"] == {"replayed": 1, "toy": 2}
    assert result["conditions"]["min_prompt_tokens"] == second


def test_all_methods_see_plain_answers_of_earlier_turns(tmp_path):
    def script(method, prompt, max_new_tokens):
        return [[50]] if method == "plain" else [[60]]

    target = ScriptedTarget(script)
    sampled = {"temperatures": [1.0], "num_prompts": 1}
    result = run(target, [PLAIN, DLITE], [make_task(["a", "b"], "c")], tmp_path, **sampled)
    assert [(row["turn"], row["identical"], row["divergence"]) for row in result["rows"]] == [(0, {}, {}), (1, {}, {})]
    prompts = {tuple(prompt) for _, prompt, limit in target.calls if limit == 512}
    assert len(prompts) == 2
    assert 50 in max(prompts, key=len) and 60 not in max(prompts, key=len)


def without_times_of_day(result):
    days = ("started_at", "finished_at")
    conditions = {name: value for name, value in result["conditions"].items() if name not in days}
    return {**result, "conditions": conditions}


KILL_TASKS = [make_task(["a", "b", "c"], "d"), make_task(["e", "f"], name="other")]
KILL_OPTIONS = {"temperatures": [0.0, 1.0]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An evaluation that was not killed: its result, its folder, and how many calls it took."""
    target, folder = ScriptedTarget(fixed_script), tmp_path_factory.mktemp("whole")
    result = run(target, [PLAIN, DLITE], KILL_TASKS, folder, **KILL_OPTIONS)
    return result, folder, len(target.calls)


def test_an_evaluation_that_is_killed_in_any_call_goes_on(tmp_path, whole):
    """In the choice of caches, in a warm-up, and in each task and temperature: the same rows as without."""
    result, whole_folder, num_calls = whole
    for kill_at in range(num_calls):
        target, folder = ScriptedTarget(fixed_script), tmp_path / str(kill_at)
        target.kill_at = kill_at
        with pytest.raises(Killed):
            run(target, [PLAIN, DLITE], KILL_TASKS, folder, **KILL_OPTIONS)
        target.kill_at = None
        resumed = run(target, [PLAIN, DLITE], KILL_TASKS, folder, **KILL_OPTIONS)
        assert without_times_of_day(resumed) == without_times_of_day(result), kill_at
        assert (folder / "rows.jsonl").read_bytes() == (whole_folder / "rows.jsonl").read_bytes(), kill_at


def test_an_evaluation_whose_files_end_anywhere_goes_on(tmp_path, whole):
    """A kill tears the line that is being written; the one before it is always whole."""
    result, whole_folder, _ = whole
    for name in ("rows.jsonl", "sessions.jsonl"):
        content = (whole_folder / name).read_bytes()
        last = content.rfind(b"\n", 0, -1) + 1
        for length in range(last, len(content), 1 if name == "sessions.jsonl" else 7):
            folder = tmp_path / f"{name}-{length}"
            shutil.copytree(whole_folder, folder)
            (folder / name).write_bytes(content[:length])
            if name == "rows.jsonl":  # the session's end is written after its rows
                sessions = (folder / "sessions.jsonl").read_bytes()
                (folder / "sessions.jsonl").write_bytes(sessions[: sessions.rfind(b"\n", 0, -1) + 1])
            resumed = run(ScriptedTarget(fixed_script), [PLAIN, DLITE], KILL_TASKS, folder, **KILL_OPTIONS)
            assert without_times_of_day(resumed) == without_times_of_day(result), length
            assert (folder / name).read_bytes() == content, length


def test_a_finished_evaluation_has_nothing_left_to_do(tmp_path, whole):
    result, whole_folder, _ = whole
    shutil.copytree(whole_folder, tmp_path / "copy")
    target = ScriptedTarget(fixed_script)
    again = run(target, [PLAIN, DLITE], KILL_TASKS, tmp_path / "copy", **KILL_OPTIONS)
    assert not target.calls and again == result and again["conditions"]["finished_at"]


def counts_of(result):
    """The rows without what a real clock says."""
    return [
        {
            **row,
            "measurements": {
                m: {k: v for k, v in each.items() if "seconds" not in k} for m, each in row["measurements"].items()
            },
        }
        for row in result["rows"]
    ]


def test_a_real_target_killed_within_a_session(tmp_path, monkeypatch):
    """Its caches after the kill are those of a run that went through, and the target is left as it was."""
    target, tokenizer = make_target("llama"), make_chatml_tokenizer()
    drafter = make_replay_drafter(make_drafter(target, num_draft_tokens=3), num_right=2)
    drafter.replay(target, torch.arange(2, 60)[None])
    methods = [*make_methods(target), Method("dlite", "dlite", assistant=drafter, num_draft_tokens=3)]
    messages = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant") * 3, "abcdef", strict=True)
    ]
    task = Task("agent", "agent", [{"id": "m", "messages": messages}])
    before, generate, calls = dict(vars(target)), type(target).generate, []
    whole = evaluate(target, tokenizer, methods, [task], tmp_path / "whole", max_new_tokens=8)
    assert [row["measurements"]["plain"]["cached_tokens"] for row in whole["rows"]][0] == 0
    for row in whole["rows"][1:]:
        cached = {name: each["cached_tokens"] for name, each in row["measurements"].items()}
        assert cached["plain"] == cached["dlite"] > 0 == cached["prompt_lookup"]
        assert set(row["identical"].values()) == {True}

    def kill_at_the_second_turn(*arguments, **options):
        calls.append(1)
        if len(calls) == TIMED + 3 * BEFORE + 8:  # three calls warm up, three are the first turn's
            raise Killed
        return generate(*arguments, **options)

    monkeypatch.setattr(type(target), "generate", kill_at_the_second_turn)
    for is_killed in (True, False):
        if is_killed:
            with pytest.raises(Killed):
                evaluate(target, tokenizer, methods, [task], tmp_path / "killed", max_new_tokens=8)
        else:
            resumed = evaluate(target, tokenizer, methods, [task], tmp_path / "killed", max_new_tokens=8)
    assert counts_of(resumed) == counts_of(whole)
    assert vars(target) == before


@pytest.fixture
def timed(monkeypatch):
    """`timed(target, device, seconds)`: calls of `measure`, which take as long as `seconds(method)` says."""
    monkeypatch.setattr(conditions, "hardware", lambda device: "a machine")
    measure, calls = runner.measure, []

    def patch(target, device, seconds, is_croppable=True):
        def measure_on_device(target, method, prompt_ids, **options):
            calls.append((method.name, method.settings))
            target.device = torch.device("cpu")
            measurement, output = measure(target, replace(method, settings={}), prompt_ids, **options)
            target.device = torch.device(device)
            vars(output.cache).update(is_croppable=is_croppable, layers=[], crop=lambda number: None)
            return replace(measurement, seconds=seconds(method)), output

        monkeypatch.setattr(runner, "measure", measure_on_device)
        target.device = torch.device(device)
        return calls

    return patch


def length_of(*texts):
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=False)]
    return len(make_chatml_tokenizer().apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


@pytest.mark.parametrize(("static_seconds", "chosen"), [(7.0, "static"), (9.0, "dynamic")])
def test_plain_generation_has_the_faster_cache_on_cuda(tmp_path, timed, static_seconds, chosen):
    target = ScriptedTarget(fixed_script)
    calls = timed(target, "cuda", lambda method: static_seconds if "max_cache_len" in method.settings else 8.0)
    # The longest prompt that can fit: one is too long, and an answer before the last one may have 10 tokens.
    tasks = [make_task("a", "a" * 200, ["b", "c"])]
    options = {"max_new_tokens": 10, "max_prompt_tokens": 100}
    result = run(target, [PLAIN, DLITE], tasks, tmp_path, **options)
    static = {"cache_implementation": "static", "max_cache_len": length_of("b", "", "c") + 10 + 10}
    settings = static if chosen == "static" else {}
    runs = [("plain", {})] * 2, [("plain", static)] * 2
    # The last prompt is not its session's first, which each run reads before it.
    assert calls[:21] == 3 * sum(runs, []) + 2 * runs[0] + 2 * runs[1] + [("plain", settings)]
    (plain, drafter) = result["methods"]
    assert (plain["settings"], drafter["settings"]) == (settings, DLITE.settings)
    lengths = f"{length_of('a')}, {length_of('a')}, {length_of('a')}, {length_of('b', '', 'c') + 10}"
    assert plain["note"] == (
        f"Turns of {lengths} tokens, each with 10 new ones, took 32.000 s with a dynamic cache, "
        f"{4 * static_seconds:.3f} s with a static one and a compiled forward; the {chosen} one is used."
    )
    # Another call keeps the choice, and times nothing.
    del calls[:]
    again = run(target, [PLAIN, DLITE], tasks, tmp_path, **options)
    assert not calls and again["methods"] == result["methods"]


def test_on_a_cpu_a_drafter_has_the_faster_cache_too(tmp_path, timed):
    target = ScriptedTarget(fixed_script)
    seconds = {("plain", True): 1.0, ("dlite", True): 3.0}
    calls = timed(target, "cpu", lambda method: seconds.get((method.name, "max_cache_len" in method.settings), 2.0))
    result = run(target, [PLAIN, DLITE, STOCK], [make_task("a", ["b", "c"])], tmp_path, max_new_tokens=10)
    settings = {method["name"]: method["settings"] for method in result["methods"]}
    static = {"cache_implementation": "static"}
    assert settings == {"plain": static, "dlite": DLITE.settings, "stock": STOCK.settings}
    # A session's own length, whatever other sessions need.
    lengths = [settings["max_cache_len"] for name, settings in calls[TIMED + BEFORE + 3 :] if name == "plain"]
    whole = length_of("b", "", "c") + 10 + 10
    assert lengths == [length_of("a") + 10, whole, whole]


def test_live_sessions_with_static_caches(tmp_path, monkeypatch):
    """Rendered into the next prompt, an answer may have more tokens than were generated.

    The target, which `generate` would have remember the length of a cache of its own making, is left as it was.
    """
    static = {"cache_implementation": "static"}

    def choose(methods, prompts, time, **options):
        return [replace(method, settings=static) for method in methods]

    monkeypatch.setattr(runner, "with_faster_caches", choose)
    target = make_target("llama")
    methods = [PLAIN, Method("dlite", "dlite", assistant=make_drafter(target), num_draft_tokens=3)]
    before = dict(vars(target))
    result = evaluate(
        target, make_chatml_tokenizer(), methods, [make_task(["a", "b", "c"])], tmp_path, max_new_tokens=8
    )
    assert [row["identical"] for row in result["rows"]] == [{"dlite": True}] * 3
    assert [row["measurements"]["dlite"]["cached_tokens"] > 0 for row in result["rows"]] == [False, True, False]
    assert vars(target) == before


def test_a_cache_is_chosen_by_whole_turns(tmp_path, monkeypatch):
    """Each timed call reads what is new in its prompt, as the turns that are measured do."""
    measure, calls = runner.measure, []

    def watch(target, method, prompt_ids, **options):
        calls.append((prompt_ids.shape[1], options["cached_tokens"], options["max_new_tokens"]))
        return measure(target, method, prompt_ids, **options)

    monkeypatch.setattr(runner, "measure", watch)
    target, tokenizer, tasks = make_target("llama"), make_chatml_tokenizer(), [make_task(["a", "b"])]
    evaluate(target, tokenizer, [PLAIN], tasks, tmp_path, max_new_tokens=8)
    first, second = length_of("a"), length_of("a", "", "b")
    runs = [(first, 0, 1), (second, first, 8), (first, first - 1, 1), (second, first, 8)]
    assert calls[:20] == 3 * 4 * [(first, 0, 8)] + 2 * runs


def test_a_static_cache_that_does_not_serve_is_not_used(tmp_path, timed):
    def seconds(method):
        if "max_cache_len" in method.settings and method.name == "dlite":
            raise ValueError("no static cache")
        return 1.0 if "max_cache_len" in method.settings else 2.0

    target = ScriptedTarget(fixed_script)
    timed(target, "cpu", seconds, is_croppable=False)
    result = run(target, [PLAIN, DLITE], [make_task(["b", "c"])], tmp_path)
    assert [method["settings"] for method in result["methods"]] == [{}, DLITE.settings]
    assert [method["note"] for method in result["methods"]] == [
        "A static cache does not serve: it cannot be kept from turn to turn.",
        "A static cache does not serve: no static cache",
    ]


def test_a_second_run_in_the_folder_is_refused(tmp_path):
    with FileLock(tmp_path / "evaluating.lock"), pytest.raises(ValueError, match="Another run is evaluating in `outp"):
        run(ScriptedTarget(fixed_script), [PLAIN, DLITE], [make_task("a")], tmp_path)


def test_other_conditions_are_refused(tmp_path):
    target, tasks = ScriptedTarget(fixed_script), [make_task("a", "b")]
    run(target, [PLAIN, DLITE], tasks, tmp_path)

    def refuse(message, methods=(PLAIN, DLITE), tasks=tasks, **options):
        with pytest.raises(ValueError, match=message):
            run(target, list(methods), tasks, tmp_path, **options)

    refuse(f"{tmp_path} holds an evaluation with `max_new_tokens` 512, but this one has 8; name", max_new_tokens=8)
    refuse("`seed` 0, but this one has 1", seed=1)
    refuse(
        r"`thinking` None, but this one has False|`chat_template_kwargs`",
        chat_template_kwargs={"enable_thinking": False},
    )
    tokenizer = make_chatml_tokenizer()
    tokenizer.chat_template += " "
    refuse("`chat_template_sha256`", tokenizer=tokenizer)
    target.weight = torch.nn.Parameter(torch.ones(2))
    refuse("`target`")
    target.weight = torch.nn.Parameter(torch.zeros(2))
    refuse("`methods`", methods=(PLAIN, STOCK))
    refuse("`tasks`", tasks=[make_task("a", "b", "c")])
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        refuse("`machine`|`threads`")
    finally:
        torch.set_num_threads(threads)
    (tmp_path / "conditions.json").unlink()
    refuse("holds rows.jsonl, but not conditions.json")


def test_files_that_do_not_fit_together_are_refused(tmp_path):
    target = ScriptedTarget(fixed_script)
    run(target, [PLAIN, DLITE], [make_task(["a", "b"])], tmp_path)
    rows = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text(rows[0])
    with pytest.raises(ValueError, match="holds 1 rows of 'r0', but sessions.jsonl says 2"):
        run(target, [PLAIN, DLITE], [make_task(["a", "b"])], tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": [DLITE]}, r"The methods are \['dlite'\]; give every method its own name, and 'plain'"),
        ({"methods": [PLAIN, DLITE, DLITE]}, "every method its own name"),
        ({"tasks": []}, r"The tasks are \[\]"),
        ({"tasks": [make_task("a"), make_task("b")]}, "every task its own name"),
        ({"temperatures": []}, "`temperatures` is"),
        ({"temperatures": [-1.0]}, "`temperatures` is"),
        ({"temperatures": [1.0, 1.0]}, "none twice"),
        ({"temperatures": [float("nan")]}, "`temperatures` is"),
        ({"temperatures": [float("inf")]}, "below 0 or infinite"),
        ({"max_new_tokens": 0}, "`max_new_tokens` is 0"),
        ({"num_prompts": 0}, "`num_prompts` is 0"),
        ({"min_prompt_tokens": 0}, "`min_prompt_tokens` is 0"),
        ({"max_new_tokens": 4096}, "`max_new_tokens` 4096 and `max_prompt_tokens` None leave no room"),
    ],
)
def test_refused_arguments(tmp_path, options, message):
    arguments = {"methods": [PLAIN, DLITE], "tasks": [make_task("a")], **options}
    with pytest.raises(ValueError, match=message):
        run(ScriptedTarget(fixed_script), arguments.pop("methods"), arguments.pop("tasks"), tmp_path, **arguments)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no b') if 'b' in messages[-1].content else 'x' }}", "(TemplateError: no b); repair"),
        ("{{ messages[-1].content + 1 if 'b' in messages[-1].content else 'x' }}", "(TypeError: "),
        ("{{ '' if 'b' in messages[-1].content else 'x' }}", "(ValueError: The chat template renders no token; "),
        (None, "(ValueError: Cannot use chat template functions"),
    ],
)
def test_a_record_that_cannot_be_rendered_is_found_before_anything_runs(tmp_path, template, message):
    target, tokenizer = ScriptedTarget(fixed_script), make_chatml_tokenizer()
    tokenizer.chat_template = template
    text = "The prompt of record 'r1' of toy, turn 1" if template else "The prompt of record 'r0' of toy, turn 1"
    with pytest.raises(ValueError, match=re.escape(f"{text}, cannot be rendered {message}")):
        evaluate(target, tokenizer, [PLAIN, DLITE], [make_task("a", "b")], tmp_path / "out")
    assert not target.calls and not (tmp_path / "out").exists()


def test_an_assistant_with_a_shorter_context_is_refused(tmp_path):
    """It would fail at the first longer prompt, or draft noise and make others look fast."""
    target = ScriptedTarget(fixed_script)
    stock = replace(STOCK, assistant=SimpleNamespace(config=LlamaConfig(max_position_embeddings=100)))
    message = (
        "'stock' has a context of 100 tokens, but prompts may have 4086 and answers 10; pass `max_prompt_tokens` 90"
    )
    with pytest.raises(ValueError, match=message):
        run(target, [PLAIN, stock], [make_task("a")], tmp_path, max_new_tokens=10)
    assert not any(tmp_path.iterdir())


def test_a_target_in_training_mode_is_refused(tmp_path):
    target = ScriptedTarget(fixed_script)
    target.training = True
    with pytest.raises(ValueError, match="target is in training mode"):
        run(target, [PLAIN, DLITE], [make_task("a")], tmp_path)
    assert json.dumps(PLAIN.describe())


def test_the_public_names():
    assert all(getattr(evaluation, name) is not None for name in evaluation.__all__)
    assert evaluation.evaluate is evaluate and set(evaluation._LAZY) == set(evaluation.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        evaluation.nothing  # noqa: B018
