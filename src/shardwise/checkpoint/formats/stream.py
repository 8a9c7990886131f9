"""Writes safetensors files tensor by tensor, so that a file may be larger than memory.

The format (https://github.com/huggingface/safetensors#format): eight bytes with the length of the header, the header as
JSON, and the bytes of the tensors without gaps. All offsets are known before the first tensor is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shardwise.checkpoint.formats.source import Spec
from shardwise.errors import CheckpointError
from shardwise.init.safetensors_headers import NAMES

Tensor = torch.Tensor


@dataclass(frozen=True)
class Layout:
    """Where everything lies in a file: `head`, and the byte at which each tensor begins, by key."""

    head: bytes
    offsets: Mapping[str, int]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> Layout:
        """`tensors` maps keys to specs with the shapes and dtypes of the file. Raises `CheckpointError` for a dtype
        that the format does not have."""
        within, end = {}, 0
        for key, spec in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
            within[key] = end  # wide dtypes first, so that each tensor begins at a multiple of its element size
            end += spec.num_bytes
        head = _head(tensors, within, metadata)
        return cls(head, {key: len(head) + start for key, start in within.items()}, len(head) + end)


class SafetensorsFile:
    """One file being written. Use it in a `with`; the end of the context raises unless every tensor was written.

    `tensors` maps keys to specs with the shapes and dtypes of the file. They may be written in any order.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._missing = dict(tensors)
        self._layout = Layout.of(tensors, metadata)
        self._file = path.open("wb")
        self._file.write(self._layout.head)

    def offset(self, key: str) -> int:
        """The byte of the file at which a tensor begins."""
        return self._layout.offsets[key]

    def write(self, key: str, tensor: Tensor) -> None:
        """Write `tensor` at its offset; it must have the shape and dtype of its spec."""
        spec = self._missing.pop(key)
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise CheckpointError(
                f"{key} was announced as {spec.dtype} {list(spec.shape)} and came as {tensor.dtype} "
                f"{list(tensor.shape)}; the checkpoint contradicts itself."
            )
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._file.seek(self.offset(key))
        self._file.write(flat.numpy().data)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None and self._missing:
                raise CheckpointError(f"{self._path} was closed before {next(iter(self._missing))} was written.")
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


def _head(tensors: Mapping[str, Spec], offsets: Mapping[str, int], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for key, spec in tensors.items():
        if spec.dtype not in NAMES:
            raise CheckpointError(f"{spec.name} is {spec.dtype}, which safetensors files cannot hold.")
        ends = [offsets[key], offsets[key] + spec.num_bytes]
        header[key] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": ends}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def split_by_size(specs: Sequence[Spec], max_bytes: int) -> list[list[Spec]]:
    """`specs` in order, in runs of at most `max_bytes`; a larger tensor is a run of its own."""
    runs: list[list[Spec]] = []
    room = 0
    for spec in specs:
        if not runs or spec.num_bytes > room:
            runs.append([])
            room = max_bytes
        runs[-1].append(spec)
        room -= spec.num_bytes
    return runs
