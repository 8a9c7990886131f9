"""The index of a checkpoint: which elements of which tensor lie in which file, and what the files must be like."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError

FORMAT = 1
INDEX = "index.json"
LATEST = "latest"


@dataclass(frozen=True)
class Chunk:
    """Elements `start` to `stop` of the flattened tensor `name`, under `key` in `file`. Both 0: a scalar."""

    kind: str
    name: str
    start: int
    stop: int
    file: str
    key: str


@dataclass(frozen=True)
class File:
    """What a file must be like to be the one that was written."""

    name: str
    num_bytes: int
    crc32: int


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
    files: list[File] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    rng: list[dict[str, Any]] = field(default_factory=list)
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def read_index(folder: Path) -> Index:
    """The index of the checkpoint in `folder`, or a sentence about why there is none."""
    path = folder / INDEX
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {INDEX}.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else None
        raise CheckpointError(f"{path} has format {found!r}; this version of shardwise reads format {FORMAT}.")
    try:
        files = [File(**entry) for entry in raw.pop("files")]
        chunks = [Chunk(**entry) for entry in raw.pop("chunks")]
        return Index(**raw, files=files, chunks=chunks)
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is not an index that shardwise wrote: {error}") from error
