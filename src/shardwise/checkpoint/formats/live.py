"""Writes a sharded model as a Hugging Face folder during training: unit by unit, on rank 0."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.checkpoint.formats.drafts import drafted
from shardwise.checkpoint.formats.hf import METADATA, HfWriter, shards_of, write_index
from shardwise.checkpoint.formats.source import PARAM, Spec
from shardwise.checkpoint.formats.stream import Layout
from shardwise.comm import World
from shardwise.comm.agreed import agreed
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
    arriving = iter(weights)
    with agreed(world, "save_pretrained", CheckpointError):
        try:
            if world.rank == 0:
                files = WeightFolder(model, weights, max_file_bytes=max_file_bytes)
                files.write(folder, arriving, overwrite=overwrite)
        finally:
            for _ in arriving:  # each step is a collective, whatever happens on rank 0
                pass


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a folder: the file, its first byte there, and its dtype."""

    file: str
    start: int
    dtype: torch.dtype


class WeightFolder:
    """A Hugging Face folder: all of it is known, but for the values of `weights`.

    It has the configuration of `model` as it is now, and refers to neither of the two any more, so another thread may
    write it.
    """

    def __init__(self, model: nn.Module, weights: Weights, *, max_file_bytes: int) -> None:
        specs = [Spec(PARAM, one.name, tuple(one.shape), one.dtype) for one in weights.metadata()]
        self._max_file_bytes = max_file_bytes
        self._shards = shards_of(specs, max_file_bytes)
        self._specs = {spec.name: spec for spec in specs}
        dtype = next((spec.dtype for spec in specs if spec.dtype.is_floating_point), None)
        self._configurations = _configurations(model, dtype)

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(spec.num_bytes for spec in self._specs.values())

    def write(self, folder: Path, arriving: Iterator[tuple[str, Tensor]], *, overwrite: bool = True) -> None:
        """Make `folder` of the tensors that arrive, in the order of `weights`; see `drafted`."""
        with drafted(folder, overwrite=overwrite) as draft:
            with HfWriter(draft, list(self._specs.values()), self._max_file_bytes) as writer:
                while (item := next(arriving, None)) is not None:  # a `for` would close it, with others in the middle
                    writer.write(self._specs[item[0]], item[1].contiguous())
            self._write_configurations(draft)

    def begin(self, draft: Path) -> None:
        """Make `draft` with everything but values: files with their heads, and zeros for each tensor at its `place`."""
        draft.mkdir(parents=True)
        for name, layout in self._layouts.items():
            with (draft / name).open("wb") as file:
                file.write(layout.head)
                file.truncate(layout.num_bytes)
        write_index(draft, self._shards)
        self._write_configurations(draft)

    def places(self) -> dict[str, Place]:
        """By tensor, where it lies in what `begin` makes: the same on all ranks."""
        return {
            spec.name: Place(file, self._layouts[file].offsets[spec.name], spec.dtype)
            for file, run in self._shards.items()
            for spec in run
        }

    @cached_property
    def _layouts(self) -> dict[str, Layout]:
        return {file: Layout.of({spec.name: spec for spec in run}, METADATA) for file, run in self._shards.items()}

    def _write_configurations(self, draft: Path) -> None:
        for configuration in self._configurations:
            configuration.save_pretrained(draft)


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
