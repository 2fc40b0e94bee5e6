# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""How far an evaluation has come: in its folder, so that a call that was killed can be taken up again."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..json_lines import read_json_lines
from .measuring import CACHE_SETTINGS
from .methods import Method


ROWS_FILE, SESSIONS_FILE, CONDITIONS_FILE = "rows.jsonl", "sessions.jsonl", "conditions.json"
Key = tuple[str, str, float]


@dataclass
class Progress:
    """The rows so far, and what all of them share.

    Args:
        folder: where `conditions.json`, `rows.jsonl` and `sessions.jsonl` are.
        conditions: what another call must have in common with this one to go on.
        methods: those that are compared.
        has_chosen: whether it is settled which caches the methods use.
        rows: those of finished sessions and of the running one.
        skipped: how many turns of a finished session did not fit, by its task, id and temperature.
        finished_at: when the last row was measured.
    """

    folder: Path
    conditions: dict[str, Any]
    methods: list[Method]
    has_chosen: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[Key, int] = field(default_factory=dict)
    finished_at: str | None = None

    @classmethod
    def open(cls, folder: Path, conditions: dict[str, Any], methods: Sequence[Method]) -> "Progress":
        """A new evaluation, or the one in `folder` up to the last session that it finished.

        Raises:
            ValueError: if the one in `folder` is under other conditions, or its files do not fit together.
        """
        progress = cls(folder, json.loads(json.dumps(conditions)), list(methods))
        if (folder / CONDITIONS_FILE).exists():
            progress._resume(json.loads((folder / CONDITIONS_FILE).read_text(encoding="utf-8")))
            return progress
        if (folder / ROWS_FILE).exists():
            raise ValueError(f"{folder} holds {ROWS_FILE}, but not {CONDITIONS_FILE}; name another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        progress.conditions["started_at"] = _now()
        progress._write_conditions()
        return progress

    def _resume(self, stored: dict[str, Any]) -> None:
        if stored["has_chosen"]:
            chosen = {each["name"]: each for each in stored["methods"]}
            self.methods = [_with_cache_of(each, chosen.get(each.name)) for each in self.methods]
        begun = {**stored["conditions"], "methods": stored["methods"]}
        self.conditions["started_at"] = begun["started_at"]
        now = {**self.conditions, "methods": json.loads(json.dumps(self.describe_methods()))}
        for name in sorted(begun.keys() | now.keys()):
            if begun.get(name) != now.get(name):
                raise ValueError(
                    f"{self.folder} holds an evaluation with `{name}` {begun.get(name)!r}, but this one has "
                    f"{now.get(name)!r}; name another folder, or the same conditions."
                )
        self.has_chosen, self.finished_at = stored["has_chosen"], stored["finished_at"]
        self._read_rows()

    def _read_rows(self) -> None:
        """Reads the rows of finished sessions; what a kill left of another one is dropped from the file."""
        rows_file, sessions_file = self.folder / ROWS_FILE, self.folder / SESSIONS_FILE
        num_rows: dict[Key, int] = {}
        for file in (rows_file, sessions_file):
            file.touch()
            _drop_torn_line(file)
        for line in read_json_lines(sessions_file):
            self.skipped[_key(line)], num_rows[_key(line)] = line["skipped"], line["rows"]
        rows = list(read_json_lines(rows_file))
        self.rows = [row for row in rows if _key(row) in num_rows]
        found = Counter(map(_key, self.rows))
        for key, count in num_rows.items():
            if found[key] != count:
                raise ValueError(
                    f"{rows_file} holds {found[key]} rows of {key[1]!r}, but {SESSIONS_FILE} says {count}; name "
                    "another folder."
                )
        if len(self.rows) < len(rows):
            _replace(rows_file, "".join(map(_line, self.rows)))

    def describe_methods(self) -> list[dict[str, Any]]:
        """The methods as JSON."""
        return [method.describe() for method in self.methods]

    def choose(self, methods: list[Method]) -> None:
        """Settles with which caches the methods run, for this call and for those that go on with it."""
        self.methods, self.has_chosen = methods, True
        self._write_conditions()

    def _write_conditions(self) -> None:
        state = {
            "conditions": self.conditions,
            "methods": self.describe_methods(),
            "has_chosen": self.has_chosen,
            "finished_at": self.finished_at,
        }
        _replace(self.folder / CONDITIONS_FILE, json.dumps(state, indent=1) + "\n")

    def is_finished(self, key: Key) -> bool:
        """Whether all turns of a session have run."""
        return key in self.skipped

    def add_row(self, row: dict[str, Any]) -> None:
        """Keeps a row of the running session."""
        self.rows.append(row)
        _append(self.folder / ROWS_FILE, row)

    def finish_session(self, key: Key, num_rows: int, num_skipped: int) -> None:
        """Says that a session is complete: until then its rows do not count."""
        self.skipped[key] = num_skipped
        task, session_id, temperature = key
        line = {"task": task, "id": session_id, "temperature": temperature, "rows": num_rows, "skipped": num_skipped}
        _append(self.folder / SESSIONS_FILE, line)

    def finish(self) -> dict[str, Any]:
        """The parts of a report: `conditions`, `methods` and `rows`."""
        skipped: Counter[str] = Counter()
        for (task, _, _), count in self.skipped.items():
            skipped[task] += count
        if self.finished_at is None:
            self.finished_at = _now()
            self._write_conditions()
        conditions = {**self.conditions, "skipped_turns": dict(skipped), "finished_at": self.finished_at}
        return {"conditions": conditions, "methods": self.describe_methods(), "rows": self.rows}


def _with_cache_of(method: Method, chosen: dict[str, Any] | None) -> Method:
    """The method with the cache that an earlier call chose for it."""
    if chosen is None:
        return method
    cache = {name: value for name, value in chosen["settings"].items() if name in CACHE_SETTINGS}
    return replace(method, settings={**method.settings, **cache}, note=chosen["note"])


def _key(record: dict[str, Any]) -> Key:
    return record["task"], record["id"], record["temperature"]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _append(file: Path, record: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(_line(record))


def _replace(file: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, file)


def _drop_torn_line(file: Path) -> None:
    """Cuts off what a kill left behind the last newline."""
    with file.open("r+b") as lines:
        lines.truncate(lines.read().rfind(b"\n") + 1)


__all__ = ["Progress"]
