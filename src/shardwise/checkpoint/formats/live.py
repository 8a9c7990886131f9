"""Writes a sharded model as a Hugging Face folder during training: unit by unit, on rank 0."""

from __future__ import annotations

import copy
from collections.abc import Iterator
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
            with drafted(folder, overwrite=overwrite) as draft:
                _write(model, weights.metadata(), arriving, draft, max_file_bytes)
        except (CheckpointError, ValueError) as error:  # ValueError: a configuration that transformers refuses
            refusal = str(error)
    for _ in arriving:  # each step is a collective, whatever happens on rank 0
        pass
    answer = world.exchange(refusal.encode(), "save_pretrained")[0].decode()
    if answer:
        raise CheckpointError(answer)


def _write(
    model: nn.Module,
    weights: tuple[Weight, ...],
    arriving: Iterator[tuple[str, Tensor]],
    draft: Path,
    max_file_bytes: int,
) -> None:
    specs = {one.name: Spec(PARAM, one.name, tuple(one.shape), one.dtype) for one in weights}
    with HfWriter(draft, list(specs.values()), max_file_bytes) as writer:
        while (item := next(arriving, None)) is not None:  # a `for` would close it, with the others in the middle
            writer.write(specs[item[0]], item[1].contiguous())
    _write_configuration(model, draft, next((one.dtype for one in weights if one.dtype.is_floating_point), None))


def _write_configuration(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """As transformers does; a plain module has no configuration, and its folder is a state dict."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if not hasattr(config, "save_pretrained"):
        return
    config.architectures = [type(model).__name__]
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if hasattr(model, "can_generate") and model.can_generate():
        model.generation_config.save_pretrained(folder)
