# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""DLite in Transformers: history-free speculative decoding. Importing it makes `assistant_model=drafter` work."""

from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel

from .configuration_dlite import DLiteConfig
from .generation.attention import register_attention
from .generation.candidate_generator import DLiteCandidateGenerator
from .generation.integration import install
from .generation.statistics import SpeculationStatistics, speculation_statistics
from .modeling_dlite import DLiteForDrafting


if TYPE_CHECKING:
    from .regeneration import regenerate
    from .regeneration_backends import LocalBackend, OpenAIBackend
    from .trace import Trace, trace_generation
    from .trainer import DLiteTrainer
    from .training_args import DLiteTrainingArguments

__version__ = "0.1.0"

__all__ = [
    "DLiteCandidateGenerator",
    "DLiteConfig",
    "DLiteForDrafting",
    "DLiteTrainer",
    "DLiteTrainingArguments",
    "LocalBackend",
    "OpenAIBackend",
    "SpeculationStatistics",
    "Trace",
    "regenerate",
    "speculation_statistics",
    "trace_generation",
]

# What needs the Trainer and its dependencies is imported when it is asked for.
_LAZY = {
    "DLiteTrainer": "trainer",
    "DLiteTrainingArguments": "training_args",
    "LocalBackend": "regeneration_backends",
    "OpenAIBackend": "regeneration_backends",
    "Trace": "trace",
    "regenerate": "regeneration",
    "trace_generation": "trace",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


AutoConfig.register(DLiteConfig.model_type, DLiteConfig)
AutoModel.register(DLiteConfig, DLiteForDrafting)
register_attention()
install()
