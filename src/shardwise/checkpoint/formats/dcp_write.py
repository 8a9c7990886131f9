"""Writes torch's distributed checkpoints (DCP) without a process group, one tensor at a time.

[Note: why not torch's writer] `dcp.save` keeps every tensor of a file until the file is finished
(`_write_files_from_queue` in `torch/distributed/checkpoint/filesystem.py`, 2.13), so a checkpoint as large as memory
could not be written by one process. The layout is torch's; the tests read it with torch's loader.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.checkpoint.formats.dcp import MODEL, OPTIM
from shardwise.checkpoint.formats.dcp_metadata import METADATA, ObjectPath
from shardwise.checkpoint.formats.source import STATE, Source, Spec
from shardwise.checkpoint.formats.stream import split_by_size

Tensor = torch.Tensor
Tick = Callable[[Spec], None]
VERSION = "1.0.0"


@dataclass
class _MetadataDraft:
    """The metadata while it is being built."""

    keys: dict[str, Any] = field(default_factory=dict)
    places: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)
    paths: dict[str, ObjectPath] = field(default_factory=dict)


class _Draft:
    """A file to which chunks are written, with their metadata."""

    def __init__(self, file: IO[bytes], name: str, metadata: _MetadataDraft) -> None:
        self._file = file
        self._name = name
        self._metadata = metadata

    def tensor(self, path: ObjectPath, value: Tensor) -> None:
        key = self._key(path)
        origin = torch.Size([0] * value.dim())
        chunk = ChunkStorageMetadata(origin, value.size())
        self._metadata.keys[key] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), [chunk])
        self._metadata.places[MetadataIndex(key, origin)] = self._save(value)

    def alias(self, path: ObjectPath, other: ObjectPath) -> None:
        """Add the same tensor under another key, with the same bytes."""
        key, known = self._key(path), self._key(other)
        self._metadata.keys[key] = self._metadata.keys[known]
        origin = self._metadata.keys[known].chunks[0].offsets
        self._metadata.places[MetadataIndex(key, origin)] = self._metadata.places[MetadataIndex(known, origin)]

    def object(self, path: ObjectPath, value: Any) -> None:
        key = self._key(path)
        self._metadata.keys[key] = BytesStorageMetadata()
        self._metadata.places[MetadataIndex(key)] = self._save(value)

    def _key(self, path: ObjectPath) -> str:
        key = ".".join(map(str, path))
        self._metadata.paths[key] = path
        return key

    def _save(self, value: Any) -> _StorageInfo:
        start = self._file.tell()
        blob = io.BytesIO()  # torch.save needs a file that begins at 0
        torch.save(value, blob)
        self._file.write(blob.getbuffer())
        return _StorageInfo(self._name, start, self._file.tell() - start)


def files_of(source: Source, max_bytes: int) -> dict[str, list[Spec]]:
    """The tensors of each file."""
    runs = split_by_size(source.specs, max_bytes) or [[]]
    return {f"__0_{number}.distcp": run for number, run in enumerate(runs)}


def write_dcp(source: Source, folder: Path, max_bytes: int, tick: Tick) -> None:
    """Write `source` as FSDP2's users save it: `{"model": ..., "optim": ..., "user": ..., "step": ...}`."""
    aliases: dict[str, list[str]] = {}
    for alias, name in source.ties.items():
        aliases.setdefault(name, []).append(alias)
    metadata = _MetadataDraft()
    for number, (name, specs) in enumerate(files_of(source, max_bytes).items()):
        with (folder / name).open("wb") as file:
            draft = _Draft(file, name, metadata)
            for spec in specs:
                draft.tensor(_path(spec), source.read(spec).contiguous())
                for alias in aliases.get(spec.name, ()) if not spec.is_state else ():
                    draft.alias((MODEL, alias), _path(spec))
                tick(spec)
            if number == 0:
                _write_objects(draft, source)
    whole = Metadata(metadata.keys, metadata.paths, metadata.places, StorageMeta(), VERSION)
    (folder / METADATA).write_bytes(pickle.dumps(whole))


def _path(spec: Spec) -> ObjectPath:
    return (OPTIM, "state", spec.name, spec.kind.removeprefix(STATE)) if spec.is_state else (MODEL, spec.name)


def _write_objects(draft: _Draft, source: Source) -> None:
    for name, numbers in source.numbers.items():
        for key, value in numbers.items():
            draft.object((OPTIM, "state", name, key), value)
    for number, group in enumerate(source.groups):
        for key, value in group.items():
            draft.object((OPTIM, "param_groups", number, key), value)
    if source.user:
        draft.object(("user",), source.user)
    draft.object(("step",), source.step)
