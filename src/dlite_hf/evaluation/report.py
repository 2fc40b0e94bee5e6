# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What an evaluation leaves, `report.json`: under which conditions which methods ran, and every row.

```python
report = Report.load("report.json")
print(report.to_markdown())
```

Figures are computed from the rows whenever they are shown, and none is stored.
"""

import json
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .metrics import Row


_ROW_FIELDS = {"task", "id", "turn", "temperature", "prompt_tokens", "measurements", "identical"}
_MEASUREMENT_FIELDS = {"tokens", "seconds"}


@dataclass(frozen=True)
class Report:
    """
    Args:
        conditions: what all rows share: the target, the machine, versions, lengths, tasks.
        methods: the ways to generate, each with its `name` in the rows, its `kind`, and what it ran with.
        rows: one prompt at one temperature each, with a measurement for each method that ran.

    Raises:
        ValueError: if a part has another shape, or a row measures a method that `methods` does not list.
    """

    conditions: dict[str, Any]
    methods: list[dict[str, Any]]
    rows: list[Row]

    def __post_init__(self) -> None:
        if not isinstance(self.conditions, dict):
            raise ValueError(f"`conditions` is a {type(self.conditions).__name__}, but must be a dictionary.")
        _check_dictionaries("methods", self.methods, {"name", "kind"})
        _check_dictionaries("rows", self.rows, _ROW_FIELDS)
        names = self.names
        if len(set(names)) < len(names):
            raise ValueError(f"`methods` has names that repeat, {names}; give every method its own.")
        for number, row in enumerate(self.rows):
            if unknown := row["measurements"].keys() - set(names):
                raise ValueError(f"Row {number} measures {sorted(unknown)}, but `methods` lists only {names}.")
            for name, measurement in row["measurements"].items():
                if missing := _MEASUREMENT_FIELDS - measurement.keys():
                    raise ValueError(f"Row {number} lacks {sorted(missing)} of {name!r}; measure it again.")

    @property
    def names(self) -> list[str]:
        """The names of the methods, in order."""
        return [method["name"] for method in self.methods]

    @property
    def drafters(self) -> set[str]:
        """The last parts of the folders or Hub ids that methods were loaded from."""
        return {Path(each["checkpoint"]).name for each in self.methods if each.get("checkpoint")}

    @property
    def categories(self) -> dict[str, str]:
        """The category of each task that has one."""
        tasks = self.conditions.get("tasks") or []
        return {task["name"]: task["category"] for task in tasks if task.get("category")}

    @classmethod
    def load(cls, file: str | os.PathLike) -> "Report":
        """Reads a report.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file is none.
        """
        name = Path(file).name
        try:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{name} is no JSON ({error}); give a report of `dlite-hf evaluate`.") from error
        if not isinstance(content, dict) or content.keys() != {"conditions", "methods", "rows"}:
            raise ValueError(
                f"{name} is no report of `dlite-hf evaluate`: it must have `conditions`, `methods` and `rows`."
            )
        try:
            return cls(**content)
        except ValueError as error:
            raise ValueError(f"{name} is no report of `dlite-hf evaluate`: {error}") from error

    def save(self, file: str | os.PathLike) -> None:
        """Writes the report, one row a line, so that two of them can be compared line by line."""
        head = {"conditions": self.conditions, "methods": self.methods}
        opened = json.dumps(head, indent=1, ensure_ascii=False, allow_nan=False).removesuffix("\n}")
        rows = ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in self.rows)
        Path(file).write_text(f'{opened},\n "rows": [\n{rows}\n]\n}}\n', encoding="utf-8")

    def only(self, names: Collection[str]) -> "Report":
        """The same report without the other methods."""

        def kept(each: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in each.items() if name in names}

        rows = [
            row | {key: kept(row[key]) for key in ("measurements", "identical", "divergence") if key in row}
            for row in self.rows
        ]
        return replace(self, methods=[each for each in self.methods if each["name"] in names], rows=rows)

    def of_drafter(self, drafter: str) -> "Report":
        """The methods that ran a drafter, and those of Transformers that run none.

        Args:
            drafter: the last part of its folder or of its id on the Hub.

        Raises:
            ValueError: if none did, or drafters of other weights have that name, too.
        """
        methods = [each for each in self.methods if Path(each.get("checkpoint") or "").name == drafter]
        found = {each["name"] for each in methods}
        if not found:
            raise ValueError(
                f"The report measures no drafter {drafter!r}, but {sorted(self.drafters)}; evaluate this one."
            )
        if len({each.get("sha256") for each in methods}) > 1:
            raise ValueError(
                f"The report measures several drafters {drafter!r}, as {sorted(found)}; give a report of one of them."
            )
        return self.only({*found, *(each["name"] for each in self.methods if not each.get("checkpoint"))})

    def to_markdown(self) -> str:
        """The report to read: conditions, tables, where it is slower, where outputs part, what was left out."""
        from .views import VIEWS  # it renders reports

        return "# Evaluation\n\n" + "\n\n".join(
            f"## {view.title}\n\n{text}" for view in VIEWS.values() if view.title and (text := view.render(self))
        )


def _check_dictionaries(name: str, values: Any, required: Iterable[str]) -> None:
    if not isinstance(values, list) or not values:
        raise ValueError(f"`{name}` must be a list with at least one entry.")
    for number, each in enumerate(values):
        missing = sorted(set(required) - each.keys()) if isinstance(each, dict) else sorted(required)
        if missing:
            raise ValueError(f"`{name}` lacks {missing} in entry {number}.")


__all__ = ["Report"]
