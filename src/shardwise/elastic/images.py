"""The image of one rank: what it alone holds, in a file in memory that outlives the process.

[Note: two images] A file has two regions of the same layout. *Live*: optimizer states, and master weights that lie in
no other shared memory, are tensors in it, which the optimizer updates in place. *Shadow*: everything, as it was after
the last step, copied behind the next forward and backward. Before an update the copy is waited for, and the live region
is marked as torn until the step is complete on this rank. So at any moment one of the two is whole:

    forward, backward    live = N; shadow = N, or on its way (what is not in the live region, others have in sight)
    update               live = torn; shadow = N
    after it             live = N + 1; shadow = N until all ranks have said that they are as far

A mark is two numbers, the second the complement of the first: who finds them at odds, for the rank was killed between
the two, takes the region for torn.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from shardwise.checkpoint.codec import dtype_name, dtype_of
from shardwise.errors import StateError

Tensor = torch.Tensor
PARAM = "param"
BLOCK = "#block"
"""A cell that others lie in."""
TORN = -1
_ALIGNED = 64
_LIVE, _SHADOW, _DIRECTORY, _LIVE_AT, _SHADOW_AT, _NUM_BYTES = 0, 2, 4, 5, 6, 7
_HEAD = mmap.PAGESIZE


@dataclass(frozen=True)
class Cell:
    """One tensor of an image: `kind` is `param`, or a state's key. `place` is in bytes from a region's start."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    place: int
    num_bytes: int
    is_live: bool
    """Whether the live region has it: the optimizer updates it there. Else the shadow alone does."""
    is_piece: bool = True
    """Whether it is of the parameter's elements, rather than one number for all of them."""


@dataclass(frozen=True)
class Directory:
    """What an image holds. Live cells come first, so that they are copied as one."""

    cells: tuple[Cell, ...]
    live_bytes: int
    shadow_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.live_bytes + self.shadow_bytes


class Plot:
    """Finds a place for every cell."""

    def __init__(self) -> None:
        self._live: list[Cell] = []
        self._other: list[Cell] = []
        self._ends = [0, 0]

    def add(self, name: str, kind: str, tensor: Tensor, *, is_live: bool, is_piece: bool = True) -> None:
        self._put(name, kind, tensor, self._room(tensor.nbytes, is_live=is_live), is_live=is_live, is_piece=is_piece)

    def add_block(self, name: str, block: Tensor, cells: Sequence[tuple[str, str, Tensor]], *, is_live: bool) -> None:
        """`cells` as they lie in `block`, where it is live a cell too; else each by itself."""
        if not is_live:
            for cell in cells:
                self.add(*cell, is_live=False)
            return
        start = self._room(block.nbytes, is_live=True)
        self._put(name, BLOCK, block, start, is_live=True, is_piece=False)
        for cell in cells:
            place = start + cell[2].data_ptr() - block.data_ptr()
            self._put(*cell, place, is_live=True, is_piece=True)

    def directory(self) -> Directory:
        live_bytes, rest = self._ends
        others = [replace(cell, place=cell.place + live_bytes) for cell in self._other]
        return Directory((*self._live, *others), live_bytes, live_bytes + rest)

    def _room(self, num_bytes: int, *, is_live: bool) -> int:
        region = 0 if is_live else 1
        start = self._ends[region]
        self._ends[region] = -(-(start + num_bytes) // _ALIGNED) * _ALIGNED
        return start

    def _put(self, name: str, kind: str, tensor: Tensor, place: int, *, is_live: bool, is_piece: bool) -> None:
        cell = Cell(name, kind, dtype_name(tensor.dtype), tuple(tensor.shape), place, tensor.nbytes, is_live, is_piece)
        (self._live if is_live else self._other).append(cell)


class Image:
    """One mapped file, or with no path memory of this process alone. Raises `OSError` where there is no room."""

    def __init__(self, mapped: mmap.mmap, path: Path | None) -> None:
        self.path = path
        self._mapped = mapped
        self._marks = np.frombuffer(memoryview(mapped), np.int64, 8)
        first = int(self._marks[_DIRECTORY])
        if not first:
            raise StateError(f"{path} is no image of a rank.")
        said = json.loads(bytes(mapped[_HEAD : _HEAD + first]))
        cells = tuple(Cell(**{**cell, "shape": tuple(cell["shape"])}) for cell in said["cells"])
        self.directory = Directory(cells, said["live_bytes"], said["shadow_bytes"])
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._live_at, self._shadow_at = int(self._marks[_LIVE_AT]), int(self._marks[_SHADOW_AT])

    @classmethod
    def create(cls, path: Path | None, directory: Directory) -> Image:
        """One with nothing in it yet: both regions are torn."""
        text = json.dumps(asdict(directory)).encode()
        live_at = _pages(_HEAD + len(text))
        shadow_at = live_at + _pages(directory.live_bytes)
        num_bytes = shadow_at + _pages(max(1, directory.shadow_bytes))
        mapped = _mapped(path, num_bytes)
        marks = np.frombuffer(memoryview(mapped), np.int64, 8)
        marks[_LIVE_AT], marks[_SHADOW_AT], marks[_NUM_BYTES] = live_at, shadow_at, num_bytes
        for at in (_LIVE, _SHADOW):
            _mark(marks, at, TORN)
        mapped[_HEAD : _HEAD + len(text)] = text
        marks[_DIRECTORY] = len(text)
        return cls(mapped, path)

    @classmethod
    def open(cls, path: Path) -> Image:
        """That of another rank. Raises `OSError` if there is none."""
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0), path)

    @property
    def live_step(self) -> int:
        """The step whose state the live region has, or `TORN`."""
        return _marked(self._marks, _LIVE)

    @live_step.setter
    def live_step(self, step: int) -> None:
        _mark(self._marks, _LIVE, step)

    @property
    def shadow_step(self) -> int:
        return _marked(self._marks, _SHADOW)

    @shadow_step.setter
    def shadow_step(self, step: int) -> None:
        _mark(self._marks, _SHADOW, step)

    @property
    def steps(self) -> set[int]:
        """Those of which it has a state."""
        return {self.live_step, self.shadow_step} - {TORN}

    @property
    def extent(self) -> tuple[int, int]:
        """The addresses of the live region."""
        first = self._bytes.data_ptr() + self._live_at
        return first, first + self.directory.live_bytes

    def live(self, cell: Cell) -> Tensor:
        return self._view(self._live_at, cell)

    def shadow(self, cell: Cell) -> Tensor:
        return self._view(self._shadow_at, cell)

    def _view(self, start: int, cell: Cell) -> Tensor:
        place = start + cell.place
        return self._bytes[place : place + cell.num_bytes].view(dtype_of(cell.dtype)).view(cell.shape)

    def copy_live(self) -> None:
        """All live cells to the shadow: in one go, and without the interpreter's lock."""
        if self.directory.live_bytes:
            first = self._bytes.data_ptr()
            ctypes.memmove(first + self._shadow_at, first + self._live_at, self.directory.live_bytes)

    def remove(self) -> None:
        """Nobody will look for it any more; who has it mapped keeps it."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _mapped(path: Path | None, num_bytes: int) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, num_bytes)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # a full file system says so here, not by a signal later
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _mark(marks: np.ndarray, at: int, step: int) -> None:
    marks[at] = step
    marks[at + 1] = ~step


def _marked(marks: np.ndarray, at: int) -> int:
    step, check = int(marks[at]), int(marks[at + 1])
    return step if check == ~step else TORN
