"""Weights in safetensors files: each rank reads the bytes of the elements that it keeps, and no others.

The format (https://huggingface.co/docs/safetensors) is eight bytes of length, a JSON header, and the tensors, each
contiguous: elements `a` to `b` of one are the bytes `a * itemsize` to `b * itemsize` of its range. Reading them with
`pread` into place needs no mapping, whose pages would count as this process's memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import CheckpointError
from shardwise.placement import Span

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: its file, its first byte there, and what the bytes are."""

    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFiles:
    """The tensors of one safetensors file, or of a folder as `save_pretrained` writes it; headers only, so far.

    Raises `CheckpointError` for files that are missing, damaged, or of another format.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.bytes_read = 0
        self.tensors: dict[str, Stored] = {}
        for path in _files(place):
            for name, stored in _header(path).items():
                if name in self.tensors:
                    raise CheckpointError(f"{name} is both in {self.tensors[name].path.name} and in {path.name}.")
                self.tensors[name] = stored

    def read(self, name: str, span: Span) -> torch.Tensor:
        """Elements `span` of the tensor, flat, on the CPU, in the file's dtype."""
        stored = self.tensors[name]
        values = torch.empty(span.numel, dtype=stored.dtype)
        if not span.numel:
            return values
        into = values.view(torch.uint8).numpy().data
        start = stored.start + span.start * stored.dtype.itemsize
        with stored.path.open("rb", buffering=0) as file:
            done = 0
            while done < len(into):
                got = os.preadv(file.fileno(), [into[done:]], start + done)
                if got == 0:
                    raise CheckpointError(f"{stored.path} ends within {name}; it was not written to its end.")
                done += got
        self.bytes_read += len(into)
        return values


def _files(place: Path) -> list[Path]:
    """The safetensors files that `place` names."""
    if place.is_file():
        if place.name.endswith(".index.json"):
            return _indexed(place)
        _refuse_pickle(place)
        return [place]
    if not place.is_dir():
        raise CheckpointError(f"weights={str(place)!r}: there is no such file or folder.")
    if (place / INDEX).exists():
        return _indexed(place / INDEX)
    found = [place / SINGLE] if (place / SINGLE).exists() else sorted(place.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        names = ", ".join(path.name for path in found[:3])
        raise CheckpointError(f"{place} has several files ({names}) and no {INDEX}; name the one that is meant.")
    for path in (*place.glob("*.bin"), *place.glob("*.pt"), *place.glob("*.pth")):
        _refuse_pickle(path)
    raise CheckpointError(f"{place} has neither {SINGLE} nor {INDEX}; is it the folder that save_pretrained wrote?")


def _indexed(index: Path) -> list[Path]:
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}.") from error
    missing = [name for name in files if not (index.parent / name).exists()]
    if missing:
        raise CheckpointError(f"{index} names {', '.join(missing[:3])}, which {index.parent} does not have.")
    return [index.parent / name for name in files]


def _refuse_pickle(path: Path) -> None:
    if path.suffix in (".bin", ".pt", ".pth", ".pkl"):
        raise CheckpointError(
            f"{path} is a pickle, which can run code and cannot be read in part. Write it as safetensors: "
            f"model.save_pretrained(folder), or safetensors.torch.save_file(state_dict, file)."
        )


def _header(path: Path) -> dict[str, Stored]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if not 2 <= length <= size - 8:
                raise ValueError(f"it claims a header of {length} bytes in a file of {size}")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        return {name: _stored(path, name, entry, 8 + length, size) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file that can be read: {error}.") from error


def _stored(path: Path, name: str, entry: Mapping[str, Any], origin: int, size: int) -> Stored:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} is {entry['dtype']}; known: {', '.join(DTYPES)}")
    dtype, shape = DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
    start, stop = entry["data_offsets"]
    if stop - start != math.prod(shape) * dtype.itemsize or origin + stop > size:
        raise ValueError(f"{name} does not lie within the file as its header says")
    return Stored(path, origin + start, shape, dtype)


def some(names: Iterable[str], limit: int = 5) -> str:
    """The first few of many names, in words."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
