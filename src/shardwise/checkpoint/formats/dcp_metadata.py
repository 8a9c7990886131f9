"""Reads and checks the `.metadata` of a torch distributed checkpoint, as plain data.

It is a pickle of torch's `Metadata` (`torch/distributed/checkpoint/metadata.py`). Only its description is read, without
using torch's classes: see [Note: inert pickles] in `checkpoint/formats/opcodes.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch

from shardwise.checkpoint.formats.cover import why_not_covered
from shardwise.checkpoint.formats.opcodes import Made, Name, read_pickle
from shardwise.checkpoint.formats.torch_files import DTYPES
from shardwise.errors import CheckpointError
from shardwise.system.safe_files import is_plain_name, read_regular

ObjectPath = tuple[str | int, ...]
METADATA = ".metadata"
MAX_METADATA_BYTES = 2**30
MAX_NESTING = 24


@dataclass(frozen=True)
class Location:
    """Bytes of a file in the checkpoint's folder."""

    file: str
    start: int
    num_bytes: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chunk:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    location: Location


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in chunks that cover it exactly; empty chunks are left out."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Metadata:
    """By key: tensors, and where other objects lie. `paths` has the path of a key in the nested dict that was saved."""

    tensors: dict[str, StoredTensor]
    objects: dict[str, Location]
    paths: dict[str, ObjectPath]


def read_metadata(folder: Path) -> Metadata:
    """Raises `CheckpointError` for anything that torch would not have written."""
    return _Reader(folder / METADATA).read()


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Metadata:
        root, _ = read_pickle(read_regular(self._path, MAX_METADATA_BYTES), str(self._path))
        keys = self._mapping(self._field(root, "Metadata", "state_dict_metadata"), "list of keys")
        locations = self._locations(self._field(root, "Metadata", "storage_data"))
        tensors, objects = {}, {}
        for key, entry in keys.items():
            if not isinstance(key, str):
                self._refuse("a key in it is not text")
            if _short_name(entry) == "BytesStorageMetadata":
                objects[key] = self._location(locations, key, None)
            else:
                tensors[key] = self._tensor(key, entry, locations)
        return Metadata(tensors, objects, self._paths(root.field("planner_data")))

    def _tensor(self, key: str, entry: Any, locations: dict[Any, Location]) -> StoredTensor:
        shape = self._sizes(self._field(entry, "TensorStorageMetadata", "size"), key)
        dtype = self._dtype(self._field(entry, "TensorStorageMetadata", "properties"), key)
        listed = self._field(entry, "TensorStorageMetadata", "chunks")
        if not isinstance(listed, list):
            self._refuse(f"the pieces of {key} are not a list")
        boxes = [
            tuple(self._sizes(self._field(one, "ChunkStorageMetadata", word), key) for word in ("offsets", "sizes"))
            for one in listed
        ]
        wrong = why_not_covered(shape, [(offsets, sizes) for offsets, sizes in boxes])
        if wrong:
            raise CheckpointError(f"{key} cannot be read from {self._path.parent}: by its metadata {wrong}.")
        chunks = tuple(
            Chunk(offsets, sizes, self._location(locations, key, offsets))
            for offsets, sizes in boxes
            if math.prod(sizes)
        )
        for chunk in chunks:
            if chunk.location.num_bytes < math.prod(chunk.sizes) * dtype.itemsize and not chunk.location.transforms:
                self._refuse(f"a piece of {key} has fewer bytes than its elements take")
        in_order = sorted((chunk.location for chunk in chunks), key=lambda location: (location.file, location.start))
        if any(one.file == two.file and two.start < one.start + one.num_bytes for one, two in pairwise(in_order)):
            self._refuse(f"two pieces of {key} use the same bytes")
        return StoredTensor(shape, dtype, chunks)

    def _dtype(self, properties: Any, key: str) -> torch.dtype:
        state = properties.state if _short_name(properties) == "TensorProperties" else None
        name = state[0] if isinstance(state, tuple) and state else None
        dtype = DTYPES.get(name.full) if isinstance(name, Name) else None
        return dtype if dtype is not None else self._refuse(f"the dtype of {key} is not one of this torch")

    def _locations(self, entry: Any) -> dict[Any, Location]:
        locations: dict[Any, Location] = {}
        for index, info in self._mapping(entry, "list of locations").items():
            fqn, offset = self._field(index, "MetadataIndex", "fqn"), index.field("offset")
            if not isinstance(fqn, str):
                self._refuse("a key in it is not text")
            location = (fqn, None if offset is None else self._sizes(offset, fqn))
            if location in locations:
                self._refuse(f"it gives the location of {fqn} twice")
            locations[location] = self._info(info, fqn)
        return locations

    def _info(self, info: Any, fqn: str) -> Location:
        file = self._field(info, "_StorageInfo", "relative_path")
        start, num_bytes = info.field("offset"), info.field("length")
        transforms = info.field("transform_descriptors") or ()
        if not is_plain_name(file):
            raise CheckpointError(
                f"{self._path} says that {fqn} lies in {file!a:.200}, which is not a plain file name. The files "
                f"of a checkpoint must be in its own folder; this one is damaged, or was made to read other files."
            )
        if not _is_size(start) or not _is_size(num_bytes):
            self._refuse(f"{fqn} has an impossible range of bytes")
        if not isinstance(transforms, list | tuple) or not all(isinstance(one, str) for one in transforms):
            self._refuse(f"{fqn} has a transformation whose name is not text")
        return Location(file, start, num_bytes, tuple(transforms))

    def _location(self, locations: dict[Any, Location], key: str, offsets: tuple[int, ...] | None) -> Location:
        if (key, offsets) not in locations:
            raise CheckpointError(f"{self._path.parent} does not say where {key} is; its metadata is incomplete.")
        return locations[key, offsets]

    def _paths(self, entry: Any) -> dict[str, ObjectPath]:
        if entry is None:
            return {}
        paths: dict[str, ObjectPath] = {}
        for key, path in self._mapping(entry, "list of paths").items():
            parts = list(path) if isinstance(path, tuple | list) else []
            if not isinstance(key, str) or not 0 < len(parts) <= MAX_NESTING:
                self._refuse("a key's path in the saved state is not a path")
            if not all(isinstance(part, str) or _is_size(part) for part in parts):
                self._refuse(f"the path of {key} in the saved state is not a path")
            paths[key] = tuple(parts)
        return paths

    # -- types ------------------------------------------------------------------------------------------

    def _field(self, made: Any, name: str, key: str) -> Any:
        if _short_name(made) != name:
            self._refuse(f"it has {_words(made)} instead of {name}")
        return made.field(key)

    def _mapping(self, value: Any, what: str) -> dict[Any, Any]:
        return value if isinstance(value, dict) else self._refuse(f"its {what} is {_words(value)}")

    def _sizes(self, value: Any, key: str) -> tuple[int, ...]:
        if _short_name(value) == "Size" and len(value.args) == 1:
            value = value.args[0]
        if not isinstance(value, tuple | list) or len(value) > 64 or not all(_is_size(one) for one in value):
            self._refuse(f"the shape or place of {key} is not one that a tensor can have")
        return tuple(value)

    def _refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self._path} is not metadata of a distributed checkpoint: {why}.")


def _short_name(made: Any) -> str:
    return _last_word(made.name) if isinstance(made, Made) else ""


@lru_cache(64)
def _last_word(name: str) -> str:
    return name.rpartition(".")[2]


def _words(value: Any) -> str:
    return f"{value.name:.100}" if isinstance(value, Made) else f"a {type(value).__name__}"


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62
