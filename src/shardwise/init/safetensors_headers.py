"""Headers of safetensors files: which tensor lies where, with all guarantees of the format checked.

The format (https://huggingface.co/docs/safetensors) is eight bytes of length, a JSON object, and the tensors, each
contiguous, without holes or overlaps, to the end of the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import CheckpointError
from shardwise.plan.placement import Span
from shardwise.system.safe_files import MAX_JSON_BYTES, fill_exactly, open_regular, parse_object, read_exactly

MAX_DEPTH = 4
METADATA = "__metadata__"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The other way."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in a file: the path, its first byte, shape and dtype."""

    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def read(self, span: Span | None = None) -> torch.Tensor:
        """Elements `span` (or all), flat, on the CPU. Raises `CheckpointError` if the file is too short by now."""
        span = span or Span(0, self.numel)
        start = self.start + span.start * self.dtype.itemsize
        with open_regular(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            if start + span.numel * self.dtype.itemsize > size:
                raise CheckpointError(f"{self.path} ends at byte {size}; it was truncated after it was opened.")
            values = torch.empty(span.numel, dtype=self.dtype, device="cpu")
            if span.numel:
                fill_exactly(file, start, values.view(torch.uint8).numpy().data, self.path)
        return values


def read_head(path: Path) -> dict[str, Stored]:
    """The tensors of `path`, by name. Raises `CheckpointError` for any file that violates the format."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(read_exactly(file, 0, min(size, 8), path), "little")
        if not 2 <= length <= size - 8 or length > MAX_JSON_BYTES:
            raise CheckpointError(_odd(path, f"it claims a header of {length} bytes in a file of {size}"))
        content = read_exactly(file, 8, length, path)
    if not content.startswith(b"{"):
        raise CheckpointError(_odd(path, "its header does not begin with {"))
    entries = parse_object(content, path, max_depth=MAX_DEPTH)
    notes = entries.pop(METADATA, {})
    if not isinstance(notes, dict) or not all(isinstance(text, str) for text in notes.values()):
        raise CheckpointError(_odd(path, f"its {METADATA} is not a table of texts"))
    stored = {name: _stored(path, name, entry, 8 + length) for name, entry in entries.items()}
    end = 8 + length
    for name, one in sorted(stored.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if one.start != end:
            where = "overlaps the tensor before it" if one.start < end else "has unused bytes before it"
            raise CheckpointError(_odd(path, f"{name!a:.200} {where}"))
        end += one.num_bytes
    if end > size:
        raise CheckpointError(
            f"{path} has {size} bytes instead of {end}: it was truncated, so a tensor of its "
            f"header lies outside the file."
        )
    if end < size:
        raise CheckpointError(_odd(path, f"it has {size - end} bytes after its last tensor"))
    return stored


def _stored(path: Path, name: str, entry: Any, origin: int) -> Stored:
    if not isinstance(entry, Mapping) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(_odd(path, f"{name!a:.200} is not described by dtype, shape and data_offsets alone"))
    word, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(word, str) or word not in DTYPES:
        raise CheckpointError(_odd(path, f"{name!a:.200} is {word!a:.40}; known: {', '.join(DTYPES)}"))
    if not _are_sizes(shape) or len(shape) > 64 or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(_odd(path, f"{name!a:.200} has an impossible shape or offset"))
    dtype, (start, stop) = DTYPES[word], offsets
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            _odd(path, f"{name!a:.200} has {stop - start} bytes, which does not match its shape and dtype")
        )
    return Stored(path, origin + start, tuple(shape), dtype)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 2**62 for one in value)


def _odd(path: Path, why: str) -> str:
    return f"{path} is not a safetensors file that can be read: {why}."
