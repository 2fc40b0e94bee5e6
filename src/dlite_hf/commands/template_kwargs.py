# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The field `chat_template_kwargs`, which answering and training share: both must render a conversation alike."""

import json
from typing import Any


TEMPLATE_KWARGS_HELP = "For the chat template, as when serving: '{\"enable_thinking\": false}'."


def read_template_kwargs(text: str | None) -> dict[str, Any] | None:
    """The field's value.

    Raises:
        ValueError: if it is no JSON object.
    """
    if text is None:
        return None
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"`chat_template_kwargs` is {text!r}, which is not JSON ({error}); write it as "
            "'{\"enable_thinking\": false}'."
        ) from error
    if not isinstance(options, dict):
        raise ValueError(f"`chat_template_kwargs` is {text}, but must be a JSON object.")
    return options
