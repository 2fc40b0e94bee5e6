# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""Who answers when conversations are regenerated: a target in this process, or a server that runs it."""

from .base import Answer, Backend, PromptTooLongError, Request
from .local import LocalBackend
from .remote import OpenAIBackend


__all__ = ["Answer", "Backend", "LocalBackend", "OpenAIBackend", "PromptTooLongError", "Request"]
