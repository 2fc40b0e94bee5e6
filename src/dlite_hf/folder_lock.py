# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""One run a folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def alone_in(folder: str | os.PathLike, doing: str) -> Iterator[None]:
    """Holds a lock of a folder, which the system frees however the process ends.

    Args:
        folder: an `output_dir`; it is made if it is missing.
        doing: what a run does there, such as `"training"`.

    Raises:
        ValueError: if another run holds it.
    """
    os.makedirs(folder, exist_ok=True)
    try:
        lock = FileLock(Path(folder, f"{doing}.lock")).acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"Another run is {doing} in `output_dir` {folder}; let it finish, or choose another folder."
        ) from error
    with lock:
        yield


__all__ = ["alone_in"]
