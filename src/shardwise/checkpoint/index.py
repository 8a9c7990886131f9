"""The index of a checkpoint: which elements of which tensor lie in which bytes of which file, and their checksums.

[Note: checksums] Every chunk is summed in blocks, at most 64 of them, so that a rank that needs a part of a chunk can
check what it reads and reads little more than it needs, while the index stays small. The header of each file and the
index itself have their own sums, so every byte of a checkpoint has one. The index has two: `text_crc32` of its text,
which is quick to compare, and `crc32` of its content, for an index that was reformatted.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from shardwise.errors import CheckpointError
from shardwise.plan.placement import Box, Span
from shardwise.system.safe_files import parse_json, read_own_text

FORMAT = 5
READABLE = (2, 3, 4, 5)
"""Format 2 has no narrow chunks; before 4 the optimizer was not named; before 5 nothing was split."""
INDEX = "index.json"
ISLAND = "island"
"""`island.3.param` is what island 3 has of its own, beside what islands have in common."""
UNSENT, FACTOR, LOST = "unsent", "factor", "lost"
"""The kinds of what was not sent of gradients or averages, of the second factors of gradients, and of what codes of
gradients have lost."""
MAX_INDEX_BYTES = 2**30
LEAST_BLOCK_BYTES = 2**16
MOST_BLOCKS = 64

_AS_WRITTEN = re.compile(r'\{"format": \d+, "crc32": \d+, "text_crc32": (\d{1,10}), "index": ')

Count = Annotated[int, Field(strict=True, ge=0, le=2**60)]
Crc = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]


@dataclass(frozen=True)
class Chunk:
    """Elements `start` to `stop` of the flattened tensor `name`: bytes of `file` from `offset`, under `key`.

    `kind` is `param`, `buffer`, `state.KEY` of an optimizer, or `rank`: one rank's own document, as JSON; with islands
    also `outer.KEY` of the outer optimizer and what each has of its own, such as `island.1.param`. With `shape`
    it is a separate tensor, not made of the parameter's elements (a scalar state); `start` and `stop` are then 0. With
    `box`, which has for each dimension the ranges that a rank had (tensor parallelism), the elements are those of that
    part of the tensor, flattened. `crc32` has a sum per `block_bytes`. `is_narrow` marks a state that its optimizer
    keeps in fewer bits than others, which have it in the parameter's own dtype.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: str
    name: str
    start: Count
    stop: Count
    file: str
    key: str
    dtype: str
    offset: Count
    num_bytes: Count
    block_bytes: Count
    crc32: list[Crc]
    shape: list[Count] | None = None
    is_narrow: Flag = False
    box: list[list[list[Count]]] | None = None


@dataclass(frozen=True)
class File:
    """The properties by which a file is recognized as the one that was written. Its header is the first
    `head_bytes`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    num_bytes: Count
    head_bytes: Count
    head_crc32: Crc


@dataclass
class Index:
    __pydantic_config__ = ConfigDict(extra="forbid")

    step: Count
    world_size: Annotated[int, Field(strict=True, ge=1, le=2**24)]
    layout: str
    state: dict[str, Any]
    shapes: dict[str, list[Count]]
    groups: list[dict[str, Any]]
    """One per parameter group of the optimizer: its settings, and under `params` the names of its parameters."""
    versions: dict[str, str]
    ties: dict[str, str] = field(default_factory=dict)
    """Further names of a parameter, and its name in this index."""
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """States of the optimizer that are plain numbers, by parameter and key."""
    metrics: dict[str, Number] = field(default_factory=dict)
    files: list[File] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    optimizer: str = ""
    """The name of the optimizer's class; "" if there was none, or it is unknown."""

    def to_json(self) -> str:
        body = {one.name: getattr(self, one.name) for one in fields(self)}
        body |= {"files": [vars(file) for file in self.files], "chunks": [vars(chunk) for chunk in self.chunks]}
        text = json.dumps(body, separators=(",", ":"))
        sums = f'"crc32": {zlib.crc32(_canonical(body))}, "text_crc32": {zlib.crc32(text.encode())}'
        return f'{{"format": {FORMAT}, {sums}, "index": {text}}}\n'


def own_kind(kind: str) -> str:
    """`kind` without the island whose own it is."""
    return kind.split(".", 2)[-1] if kind.startswith(f"{ISLAND}.") else kind


def box_of(ranges: Sequence[Sequence[Sequence[int]]], shape: Sequence[int]) -> Box:
    """The box that `Chunk.box` describes, for a tensor of `shape`."""
    return Box(tuple(shape), tuple(tuple(Span(*span) for span in own) for own in ranges))


def block_bytes_of(num_bytes: int) -> int:
    """The size of the blocks in which a chunk of `num_bytes` is summed."""
    size = LEAST_BLOCK_BYTES
    while size * MOST_BLOCKS < num_bytes:
        size *= 2
    return size


def read_body(folder: Path) -> dict[str, Any]:
    """The index of the checkpoint in `folder`, with valid checksums, but not checked further.

    Raises `CheckpointError` if there is none, it is damaged, or its format is unknown.
    """
    path = folder / INDEX
    try:
        content = read_own_text(path, MAX_INDEX_BYTES)
        raw = parse_json(content, path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {INDEX}.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    found = raw.get("format") if isinstance(raw, dict) else None
    if type(found) is int and found > FORMAT:
        raise CheckpointError(
            f"{path} has format {found}, written by a newer shardwise; this one reads format {FORMAT}. "
            f"Update shardwise."
        )
    if type(found) is not int or found not in READABLE:
        raise CheckpointError(f"{path} has format {found!r}; this version of shardwise reads format {FORMAT}.")
    body = raw.get("index")
    if not isinstance(body, dict):
        raise CheckpointError(f"{path} is not an index that shardwise wrote: it has no object 'index'.")
    if not _is_as_written(content) and zlib.crc32(_canonical(body)) != raw.get("crc32"):
        raise CheckpointError(f"{path} is damaged: its checksum does not match.")
    return body


def _is_as_written(content: str) -> bool:
    """Whether the text is as `Index.to_json` wrote it: then its own sum suffices, and the canonical form is not
    needed."""
    found = _AS_WRITTEN.match(content) if content.endswith("}}\n") else None
    return found is not None and zlib.crc32(content[found.end() : -2].encode()) == int(found[1])


def _canonical(body: object) -> bytes:
    """The same text for the same content, however it has been reformatted since."""
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
