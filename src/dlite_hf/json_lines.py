# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Files of prompts and conversations: JSON lines, one record a line."""

import json
import os
from collections.abc import Iterator
from typing import Any


def read_json_lines(file: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The records of a file, one for every line.

    Raises:
        OSError: if there is no such file.
        ValueError: if a line is not a JSON object.
    """
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number}, is not JSON ({error}); complete or remove it.") from error
            if not isinstance(record, dict):
                raise ValueError(f"{file}, line {number}, is a {type(record).__name__}; give one record a line.")
            yield record


__all__ = ["read_json_lines"]
