# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What a drafter gains: tasks, methods, measurements, and the report on them.

```python
from dlite_hf.evaluation import Report, evaluate, load_task, make_methods

methods = make_methods(target, drafters=["dlite=model_cards/SmolLM2-135M-Instruct-DLite"])
result = evaluate(target, tokenizer, methods, [load_task("gsm8k", 32)], "evaluation")
print(Report(**result).to_markdown())
```
"""

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .methods import Method, make_methods
    from .report import Report
    from .runner import evaluate
    from .tasks import TASK_CATEGORIES, Task, load_task

__all__ = ["TASK_CATEGORIES", "Method", "Report", "Task", "evaluate", "load_task", "make_methods"]

# A card reads reports, for which it needs none of what an evaluation does.
_LAZY = {
    "Method": "methods",
    "Report": "report",
    "TASK_CATEGORIES": "tasks",
    "Task": "tasks",
    "evaluate": "runner",
    "load_task": "tasks",
    "make_methods": "methods",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
