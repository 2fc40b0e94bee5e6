# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""All that is ever read from a target, in training and inference: tapped layers, embeddings, whether it fits."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .configuration_dlite import DLiteConfig


logger = logging.get_logger(__name__)

# The capture of the call that runs in this thread: hooks of another call on the same target stay silent.
_running_capture: ContextVar["HiddenStatesCapture | None"] = ContextVar("dlite_running_capture", default=None)


class HiddenStatesCapture:
    """Rows of the target's hidden states, laid out as Transformers lays out `outputs.hidden_states`.

    Args:
        num_layers: layers of the target, L.
        num_rows: how many of the last positions are kept of every forward; `None` keeps all.
    """

    def __init__(self, num_layers: int, num_rows: int | None):
        self.num_rows = num_rows
        self._rows: list[torch.Tensor | None] = [None] * (num_layers + 1)

    def keep(self, layer_id: int, hidden_states: torch.Tensor) -> None:
        """Keeps the last rows of `hidden_states` `[N, T, H]` and of what earlier forwards put out."""
        if self.num_rows is not None:
            # A copy, so that the rest of the prompt's hidden states can be freed.
            before, rows = self._rows[layer_id + 1], hidden_states[:, -self.num_rows :]
            num_before = self.num_rows - rows.shape[1]
            if before is None or num_before == 0:
                hidden_states = rows.clone()
            else:
                hidden_states = torch.cat([before[:, -num_before:], rows], dim=1)
        self._rows[layer_id + 1] = hidden_states

    @property
    def hidden_states(self) -> tuple[torch.Tensor | None, ...]:
        """L + 1 entries, `None` where nothing was asked for or seen; entry i + 1 is the output of layer i."""
        return tuple(self._rows)


@contextmanager
def capture_hidden_states(
    target: PreTrainedModel, layer_ids: Sequence[int], num_rows: int | None
) -> Iterator[HiddenStatesCapture]:
    """Keeps the last `num_rows` rows of the outputs of `layer_ids` of every forward of `target` inside the block.

    Of several forwards (a prefill in chunks) the last rows of them all remain, or with `num_rows=None` those of the
    last forward. The last layer is read from the decoder's own output, after the final norm, as in
    `outputs.hidden_states[-1]`. The hooks write only for the thread and the call that entered the block, and are gone
    when it ends.

    Args:
        target: the causal LM.
        layer_ids: layers of its text decoder.
        num_rows: how many of the last positions to keep; `None` keeps all.

    Raises:
        ValueError: if the layers of the target's decoder cannot be found.
    """
    decoder, layers = text_decoder(target)
    capture = HiddenStatesCapture(len(layers), num_rows)

    def keep_output_of(layer_id: int) -> Any:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            # A compiled forward runs without capture: dynamo cannot trace a context variable.
            if not torch.compiler.is_compiling() and _running_capture.get() is capture:
                capture.keep(layer_id, output if isinstance(output, torch.Tensor) else output[0])

        return hook

    with ExitStack() as stack:
        for layer_id in layer_ids:
            module = decoder if layer_id == len(layers) - 1 else layers[layer_id]
            stack.callback(module.register_forward_hook(keep_output_of(layer_id)).remove)
        token = _running_capture.set(capture)
        stack.callback(_running_capture.reset, token)
        yield capture


def gather_features(
    hidden_states: Sequence[torch.Tensor | None] | None, layer_ids: Sequence[int], rows: slice | torch.Tensor
) -> torch.Tensor | None:
    """Features `[N, rows, S, H]` out of `hidden_states` as Transformers or a capture lays them out.

    Returns `None` where a layer is missing, as under a compiled target that runs without the hooks.

    Raises:
        ValueError: if the layers do not all put out `[N, T, H]`.
    """
    selected = [states for i in layer_ids if hidden_states and (states := hidden_states[i + 1]) is not None]
    if len(selected) < len(layer_ids):
        return None
    shapes = {tuple(states.shape) for states in selected}
    if len(shapes) > 1 or selected[-1].ndim != 3:
        raise ValueError(
            f"The target's layers {list(layer_ids)} put out the shapes {sorted(shapes)}, but DLite reads one shape, "
            "`[N, T, H]`; choose other `target_layer_ids`."
        )
    device = selected[-1].device

    def take(states: torch.Tensor) -> torch.Tensor:
        # The layers of a target may lie on several devices.
        return states[:, rows if isinstance(rows, slice) else rows.to(states.device)].to(device)

    return torch.stack([take(states) for states in selected], dim=2)


def text_decoder(target: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The target's text decoder and its layers, found by their number.

    Raises:
        ValueError: unless the decoder, or else one module in it, holds one list of as many layers as the target has.
    """
    decoder = target.get_decoder()
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers

    def lists_of(module: nn.Module) -> list[tuple[nn.Module, nn.ModuleList]]:
        children = module.children()
        return [(module, each) for each in children if isinstance(each, nn.ModuleList) and len(each) == num_layers]

    # Most decoders hold their layers themselves; what `get_decoder` calls one may also be a model around it.
    found = lists_of(decoder) or [pair for module in decoder.modules() for pair in lists_of(module)]
    if len(found) != 1:
        raise ValueError(
            f"{type(decoder).__name__} has {len(found)} lists of {num_layers} layers, but DLite reads one list; "
            "generate without `assistant_model`."
        )
    return found[0]


def embed_tokens(target: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """The target's own input embeddings `[..., H]` of `token_ids`, never trained here."""
    with torch.no_grad():
        embedding = target.get_input_embeddings()
        if not embedding.weight.is_meta:  # an offloaded embedding moves its inputs itself
            token_ids = token_ids.to(embedding.weight.device)
        return embedding(token_ids)


def check_compatible(target: PreTrainedModel, config: DLiteConfig) -> None:
    """Refuses a target that the drafter cannot serve; warns where only its name differs.

    Raises:
        ValueError: if depth, hidden size or vocabulary differ from those that the drafter was made for.
    """
    text_config = target.config.get_text_config(decoder=True)
    for name, expected, actual in (
        ("layers", config.num_target_layers, text_config.num_hidden_layers),
        ("hidden size", config.hidden_size, text_config.hidden_size),
        ("vocabulary size", config.vocab_size, text_config.vocab_size),
    ):
        if expected != actual:
            raise ValueError(
                f"The drafter was made for a target with {name} {expected}, but {type(target).__name__} has {actual}; "
                "load the drafter of this target, or make one with `DLiteForDrafting.from_target`."
            )
    trained_for, name = _model_name(config.target_name_or_path), _model_name(target.config.name_or_path)
    if trained_for and name and trained_for != name:
        logger.warning_once(
            f"The drafter was trained for {config.target_name_or_path}, but the target is "
            f"{target.config.name_or_path}: the output stays the target's own, though fewer tokens may be accepted."
        )


def _model_name(name_or_path: str | None) -> str:
    """The last part of a Hub id or a folder, that of the Hub's cache included; empty where there is none."""
    parts = PurePath(name_or_path or "").parts
    cached = [part.split("--")[-1] for part in parts if part.startswith("models--")]
    if cached:
        return cached[0]
    return parts[-1] if parts else ""
