"""Writes a sharded model as a Hugging Face folder during training: unit by unit, on rank 0."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.checkpoint.formats.drafts import drafted
from shardwise.checkpoint.formats.hf import HfWriter
from shardwise.checkpoint.formats.source import PARAM, Spec
from shardwise.comm import World
from shardwise.errors import CheckpointError

Tensor = torch.Tensor
Writer = Callable[[Path, Iterator[tuple[str, Tensor]]], None]
"""Writes a folder of the tensors that it gets."""


class Weight(Protocol):
    """What is known of a tensor before it is there."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


class Weights(Protocol):
    """Whole tensors under the names that files have; each is an exchange of all ranks."""

    def metadata(self) -> tuple[Weight, ...]: ...
    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


def save_pretrained(
    model: nn.Module, weights: Weights, world: World, folder: Path, *, max_file_bytes: int, overwrite: bool
) -> None:
    """Write `weights` and the configuration of `model` into `folder`. All ranks must call, and all get the error if
    rank 0 cannot write."""
    refusal = ""
    arriving = iter(weights)
    if world.rank == 0:
        try:
            writer_for(model, weights, max_file_bytes=max_file_bytes, overwrite=overwrite)(folder, arriving)
        except (CheckpointError, ValueError) as error:  # ValueError: a configuration that transformers refuses
            refusal = str(error)
    for _ in arriving:  # each step is a collective, whatever happens on rank 0
        pass
    answer = world.exchange(refusal.encode(), "save_pretrained")[0].decode()
    if answer:
        raise CheckpointError(answer)


def writer_for(model: nn.Module, weights: Weights, *, max_file_bytes: int, overwrite: bool) -> Writer:
    """What writes the configuration of `model`, as it is now, and the tensors of `weights` as they arrive. It needs
    neither of the two any more, so another thread may call it."""
    specs = {one.name: Spec(PARAM, one.name, tuple(one.shape), one.dtype) for one in weights.metadata()}
    dtype = next((spec.dtype for spec in specs.values() if spec.dtype.is_floating_point), None)
    configurations = _configurations(model, dtype)

    def write(folder: Path, arriving: Iterator[tuple[str, Tensor]]) -> None:
        with drafted(folder, overwrite=overwrite) as draft:
            with HfWriter(draft, list(specs.values()), max_file_bytes) as writer:
                while (item := next(arriving, None)) is not None:  # a `for` would close it, with others in the middle
                    writer.write(specs[item[0]], item[1].contiguous())
            for configuration in configurations:
                configuration.save_pretrained(draft)

    return write


def _configurations(model: Any, dtype: torch.dtype | None) -> list[Any]:
    """Those that transformers writes; a plain module has none, and its folder is a state dict."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if not hasattr(config, "save_pretrained"):
        return []
    config.architectures = [type(model).__name__]
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    if hasattr(model, "can_generate") and model.can_generate():
        return [config, copy.deepcopy(model.generation_config)]
    return [config]
