"""The index of a checkpoint: which elements of which tensor lie in which bytes of which file, and their checksums.

[Note: checksums] Every chunk is summed in blocks, at most 64 of them, so that a rank that needs a part of a chunk
checks what it reads and reads little more than it needs, and so that the index stays small. The head of each file and
the index itself have sums of their own: no byte of a checkpoint is without one.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError

FORMAT = 3
READABLE = (2, 3)
"""In format 2 there were no narrow chunks."""
INDEX = "index.json"
LEAST_BLOCK_BYTES = 2**16
MOST_BLOCKS = 64


@dataclass(frozen=True)
class Chunk:
    """Elements `start` to `stop` of the flattened tensor `name`: bytes of `file` from `offset`, under `key`.

    `kind` is `param`, `buffer`, `state.KEY` of an optimizer, or `rank`: what one rank remembers, as JSON. With `shape`
    it is whole and not made of the parameter's elements (a state that is a scalar); both ends are then 0.
    `crc32` has a sum for each `block_bytes` of them. `is_narrow` is a state that its optimizer keeps in fewer bits than
    others do: those have it in the parameter's own dtype.
    """

    kind: str
    name: str
    start: int
    stop: int
    file: str
    key: str
    dtype: str
    offset: int
    num_bytes: int
    block_bytes: int
    crc32: list[int]
    shape: list[int] | None = None
    is_narrow: bool = False


@dataclass(frozen=True)
class File:
    """What a file must be like to be the one that was written. Its head is the first `head_bytes`."""

    name: str
    num_bytes: int
    head_bytes: int
    head_crc32: int


@dataclass
class Index:
    step: int
    world_size: int
    layout: str
    state: dict[str, Any]
    shapes: dict[str, list[int]]
    groups: list[dict[str, Any]]
    """One per parameter group of the optimizer: its settings, and under `params` the names of its parameters."""
    versions: dict[str, str]
    ties: dict[str, str] = field(default_factory=dict)
    """Further names of a parameter, and the name it has here."""
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """States of the optimizer that are plain numbers, by parameter and key."""
    metrics: dict[str, float] = field(default_factory=dict)
    files: list[File] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def to_json(self) -> str:
        body = {one.name: getattr(self, one.name) for one in fields(self)}
        body |= {"files": [vars(file) for file in self.files], "chunks": [vars(chunk) for chunk in self.chunks]}
        text = _canonical(body)
        return f'{{"format": {FORMAT}, "crc32": {zlib.crc32(text.encode())}, "index": {text}}}\n'


def block_bytes_of(num_bytes: int) -> int:
    """How large the blocks are in which a chunk of `num_bytes` is summed."""
    size = LEAST_BLOCK_BYTES
    while size * MOST_BLOCKS < num_bytes:
        size *= 2
    return size


def read_index(folder: Path) -> Index:
    """The index of the checkpoint in `folder`, or a `CheckpointError` that says why there is none."""
    path = folder / INDEX
    try:
        raw = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {INDEX}.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    found = raw.get("format") if isinstance(raw, dict) else None
    if isinstance(found, int) and found > FORMAT:
        raise CheckpointError(
            f"{path} has format {found}, written by a newer shardwise; this one reads format {FORMAT}. "
            f"Update shardwise."
        )
    if found not in READABLE:
        raise CheckpointError(f"{path} has format {found!r}; this version of shardwise reads format {FORMAT}.")
    body = raw.get("index")
    if zlib.crc32(_canonical(body).encode()) != raw.get("crc32"):
        raise CheckpointError(f"{path} is damaged: its checksum is not the one it was written with.")
    try:
        files = [File(**entry) for entry in body.pop("files")]
        chunks = [Chunk(**entry) for entry in body.pop("chunks")]
        return Index(**body, files=files, chunks=chunks)
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index that shardwise wrote: {error}") from error


def _canonical(body: object) -> str:
    """The same text for the same content, however a person or a tool has laid it out since."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"))
