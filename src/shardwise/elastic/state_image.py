"""The image of one rank: the state that only it holds, in a memory file that outlives the process.

[Note: two images] A file has two regions of the same layout. *Live*: optimizer states, and master weights that are in
no other shared memory, are tensors in it, and the optimizer updates them in place. *Shadow*: the whole state after the
last step, copied during the next forward and backward. Before an update, the rank waits for that copy and marks the
live region as torn until the step is complete on this rank. It waits before the verdict, since who has that may have
updated when this rank is lost: then nobody has its parameters as they were, which may not be in the live region. So one
of the two is whole at any moment:

    forward, backward    live = N; shadow = N, or being copied (other ranks can read what is not in the live region)
    update               live = torn; shadow = N
    after it             live = N + 1; shadow = N until all ranks have reported that they are complete

[Note: copies] The copy of an image on another host is a file of the same format. Both of its regions have all that
changes, and are filled in turn: while the state of one step arrives in one region, the other has the step before. So
sender and connection may fail at any time. What never changes is sent once, into the shadow.

[Note: rows of an image] What lies on a disk stays there: a cell of it has its place in the files of a flat buffer, of
which there are two (see [Note: two versions] in `memory/disk_rows.py`). A small cell says in which of them the state
is. It is in the live region and in the shadow, like what it points to. A flat buffer that never changes has one file.
In a copy on another host, what comes into the live region comes into the first file, and else into the second.

[Note: codes in an image] States that an optimizer keeps as codes are in it as they are, with their scales in a cell of
their own. Whoever reads an image reads them as numbers: blocks of codes are counted from the first element of a
parameter, and another mesh cuts them elsewhere. A parameter that rests as codes has these, scales included, in one
cell, of whole blocks, and ranks go on with them as they are.

[Note: sums in an image] Plans that verify (`verify`) take checksums of the state at the end of some steps. They are in
a cell, as JSON, with the version that they are of, and so in copies of the image, too. Whoever reads the image of a
rank that is lost compares it with them, as nobody else knew that rank's sums.

A mark is two numbers, the second the complement of the first. If they do not match, because the rank was killed between
the two writes, the region counts as torn.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.checkpoint.json_codec import dtype_name, dtype_of
from shardwise.errors import StateError
from shardwise.memory.tensor_checksum import checksum
from shardwise.optim.quantize import Coded
from shardwise.plan.placement import Dtype
from shardwise.plan.placement.wire import CodeDtype
from shardwise.system.even_parts import round_up
from shardwise.system.machine import processor_vendor

Tensor = torch.Tensor
PARAM = "param"
BLOCK = "#block"
"""The kind of a cell that contains other cells."""
AT = "#at"
"""The name and kind of the cell that says, for each flat buffer on a disk, which of its files has the state."""
SUMS = "#sums"
"""The name and kind of the cell with the checksums of the state: see [Note: sums in an image]."""
TORN = -1
_ALIGNED = 64
_LIVE, _SHADOW, _DIRECTORY, _LIVE_AT, _SHADOW_AT = 0, 2, 4, 5, 6
_HEAD = mmap.PAGESIZE
_ROW_BYTES = 2**19
"""What is copied at once. Of a block that fits into the second-level cache glibc's memmove does not read what it is
about to write over: on an AMD EPYC (1 MiB of that cache, glibc 2.36), 195 MiB take 8.6 to 9.0 ms of processor time in
rows of 512 KiB, and 10.3 to 10.9 ms at once; with rows of 128 KiB 10.0 to 10.6.

Intel's read it all the same: on a Xeon (2 MiB, glibc 2.36) 204 MiB take 33.3 ms in rows, and 21.9 ms at once, past the
cache, as glibc does with blocks of that size; of 16 to 96 MiB both take as long."""


@dataclass(frozen=True)
class RestingCodes:
    """A parameter that lies as codes of whole blocks (`dtype`, `block` as in the plan), and the dtype of its
    elements."""

    dtype: CodeDtype
    block: int
    elements: Dtype


@dataclass(frozen=True)
class Cell:
    """One tensor of an image. `kind` is `param` or the key of a state; `offset` is its start in a region, in bytes."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    is_live: bool
    """Whether it is in the live region too, where the optimizer updates it, rather than only in the shadow."""
    is_piece: bool = True
    """Whether it has a value per element of the parameter, rather than one for all."""
    is_still: bool = False
    """Whether it never changes, and is written to the shadow once."""
    rows: int | None = None
    """If it lies on a disk: the number of its flat buffer in `Directory.rows`; `offset` is its place in the file."""
    codes: RestingCodes | Coded | None = None
    """How it is read, if it has codes, of a parameter or of a state: see [Note: codes in an image]."""

    @classmethod
    def of(cls, name: str, kind: str, tensor: Tensor, offset: int, **more: Any) -> Cell:
        """That of `tensor`; `more` are the fields that its form does not say."""
        return cls(name, kind, dtype_name(tensor.dtype), tuple(tensor.shape), offset, tensor.nbytes, **more)


@dataclass(frozen=True)
class RowsOnDisk:
    """The files of one flat buffer on a disk: two, or one if it never changes."""

    name: str
    paths: tuple[str, ...]
    num_bytes: int
    """Of each."""

    @property
    def is_still(self) -> bool:
        """Whether it never changes."""
        return len(self.paths) == 1


@dataclass(frozen=True)
class Directory:
    """The cells of an image. Live cells come first, so that one copy takes them all; constant cells come last."""

    cells: tuple[Cell, ...]
    live_bytes: int
    changing_bytes: int
    shadow_bytes: int
    rows: tuple[RowsOnDisk, ...] = ()
    """What lies on a disk: see [Note: rows of an image]."""
    is_all: bool = False
    """Whether the rank had no parameters besides these, so that a rank with another part of the model can read it."""

    @classmethod
    def read(cls, text: bytes) -> Directory:
        fields = json.loads(text)
        cells = tuple(map(_cell_of, fields.pop("cells")))
        rows = tuple(RowsOnDisk(one["name"], tuple(one["paths"]), one["num_bytes"]) for one in fields.pop("rows"))
        return cls(cells, rows=rows, **fields)

    def text(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def is_live_whole(self) -> bool:
        """Whether the live region has everything that changes."""
        return all(cell.is_live or cell.is_still for cell in self.cells)

    def of_copy(self, paths: Sequence[Sequence[str]] = ()) -> Directory:
        """The directory of a copy on another host, whose regions both have everything that changes: see [Note:
        copies]. `paths` are those of the files there."""
        cells = tuple(replace(cell, is_live=not cell.is_still) for cell in self.cells)
        rows = tuple(replace(one, paths=tuple(own)) for one, own in zip(self.rows, paths, strict=True))
        return replace(self, cells=cells, live_bytes=self.changing_bytes, rows=rows)

    def scales(self) -> dict[tuple[str, str], Cell]:
        """The cells with the scales of codes, by their names and kinds."""
        every = {(cell.name, cell.kind): cell for cell in self.cells}
        keys = ((cell.name, cell.codes.scales) for cell in self.cells if isinstance(cell.codes, Coded))
        return {key: every[key] for key in keys}

    @property
    def num_bytes(self) -> int:
        """Of memory."""
        return self.live_bytes + self.shadow_bytes

    def disk_bytes(self, *, is_new: bool) -> int:
        """Of its state on a disk; unless it `is_new`, without what never changes."""
        return sum(rows.num_bytes for rows in self.rows if is_new or not rows.is_still)


class Plot:
    """Assigns an offset to every cell."""

    def __init__(self) -> None:
        self._live: list[Cell] = []
        self._other: list[Cell] = []
        self._still: list[Cell] = []
        self._ends = [0, 0, 0]
        self._in_rows: list[Cell] = []
        self._rows: list[RowsOnDisk] = []

    def add(
        self,
        name: str,
        kind: str,
        tensor: Tensor,
        *,
        is_live: bool,
        is_piece: bool = True,
        codes: Coded | None = None,
    ) -> None:
        at = self._room(tensor.nbytes, is_live=is_live)
        self._put(Cell.of(name, kind, tensor, at, is_live=is_live, is_piece=is_piece, codes=codes))

    def add_block(self, name: str, block: Tensor, cells: Sequence[tuple[str, str, Tensor]], *, is_live: bool) -> None:
        """Add `cells`, views of `block`. If they are live, `block` is a cell too and they are placed inside it."""
        if not is_live:
            for cell in cells:
                self.add(*cell, is_live=False)
            return
        start = self._room(block.nbytes, is_live=True)
        self._put(Cell.of(name, BLOCK, block, start, is_live=True, is_piece=False))
        for cell in cells:
            offset = start + cell[2].data_ptr() - block.data_ptr()
            self._put(Cell.of(*cell, offset, is_live=True))

    def add_still(self, name: str, kind: str, tensor: Tensor, codes: RestingCodes | None = None) -> None:
        """Add a tensor that never changes."""
        start = self._ends[2]
        self._ends[2] = round_up(start + tensor.nbytes, _ALIGNED)
        self._still.append(Cell.of(name, kind, tensor, start, is_live=False, is_still=True, codes=codes))

    def add_rows(self, rows: RowsOnDisk) -> None:
        """Add a flat buffer on a disk, behind those before."""
        self._rows.append(rows)

    def add_in_rows(self, name: str, kind: str, tensor: Tensor, rows: int, place: int) -> None:
        """Add a tensor that lies at byte `place` of the files of `rows`."""
        is_still = self._rows[rows].is_still
        self._in_rows.append(Cell.of(name, kind, tensor, place, is_live=True, is_still=is_still, rows=rows))

    def directory(self) -> Directory:
        live_bytes, rest, still = self._ends
        changing = live_bytes + rest
        others = [replace(cell, offset=cell.offset + live_bytes) for cell in self._other]
        last = [replace(cell, offset=cell.offset + changing) for cell in self._still]
        cells = (*self._live, *others, *last, *self._in_rows)
        return Directory(cells, live_bytes, changing, changing + still, tuple(self._rows))

    def _room(self, num_bytes: int, *, is_live: bool) -> int:
        region = 0 if is_live else 1
        start = self._ends[region]
        self._ends[region] = round_up(start + num_bytes, _ALIGNED)
        return start

    def _put(self, cell: Cell) -> None:
        (self._live if cell.is_live else self._other).append(cell)


@dataclass(frozen=True)
class ImagePlace:
    """Where images of a rank's state lie, or copies of them: in files of `folder` that begin with `name`, by which
    others look for them. Without a folder, in memory of this process: no other one reads them."""

    folder: Path | None
    name: str
    waiting_bytes: int = 0
    """An image of at most this size that finds no space in the folder waits in other memory: see [Note: twice the
    images] in `image_space.py`."""

    def path(self, number: int) -> Path | None:
        return None if self.folder is None else self.folder / f"{self.name}-{number}.image"


class Image:
    """One mapped file, or without a path memory of this process alone."""

    def __init__(self, mapped: mmap.mmap, path: Path | None) -> None:
        self.path = path
        self._mapped = mapped
        self._marks = np.frombuffer(memoryview(mapped), np.int64, 8)
        first = int(self._marks[_DIRECTORY])
        if not first:
            raise StateError(f"{path} is not a rank's image, or was not completed.")
        self.directory = Directory.read(bytes(mapped[_HEAD : _HEAD + first]))
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._behind = torch.frombuffer(mapped, dtype=torch.uint8)
        """The same, for shadows: torch counts changes of each. What is copied there behind the computation is no change
        of a live tensor, which a checkpoint may be reading (see [Note: late copies] in checkpoint/snapshot.py)."""
        self._live_at, self._shadow_at = int(self._marks[_LIVE_AT]), int(self._marks[_SHADOW_AT])

    @classmethod
    def create(cls, path: Path | None, directory: Directory) -> Image:
        """An empty image, with both regions torn. Raises `OSError` if there is no space."""
        text = directory.text()
        live_at = round_up(_HEAD + len(text), mmap.PAGESIZE)
        shadow_at = live_at + round_up(directory.live_bytes, mmap.PAGESIZE)
        num_bytes = shadow_at + round_up(max(1, directory.shadow_bytes), mmap.PAGESIZE)
        mapped = _mapped(path, num_bytes)
        marks = np.frombuffer(memoryview(mapped), np.int64, 8)
        marks[_LIVE_AT], marks[_SHADOW_AT] = live_at, shadow_at
        for at in (_LIVE, _SHADOW):
            write_mark(marks, at, TORN)
        mapped[_HEAD : _HEAD + len(text)] = text
        marks[_DIRECTORY] = len(text)
        return cls(mapped, path)

    @classmethod
    def open(cls, path: Path) -> Image:
        """Another rank's image. Raises `OSError` if the file cannot be read, and `StateError` if it is incomplete."""
        with path.open("r+b") as file:
            if not os.fstat(file.fileno()).st_size:
                raise StateError(f"{path} is not a rank's image, or was not completed.")
            return cls(mmap.mmap(file.fileno(), 0), path)

    @property
    def live_version(self) -> int:
        """The version of the state that is in the live region, or `TORN`."""
        return read_mark(self._marks, _LIVE)

    @live_version.setter
    def live_version(self, version: int) -> None:
        write_mark(self._marks, _LIVE, version)

    @property
    def shadow_version(self) -> int:
        return read_mark(self._marks, _SHADOW)

    @shadow_version.setter
    def shadow_version(self, version: int) -> None:
        write_mark(self._marks, _SHADOW, version)

    @property
    def versions(self) -> set[int]:
        """The versions of the state that it has."""
        return {self.live_version, self.shadow_version} - {TORN}

    def tear(self) -> None:
        """Nobody is to read it."""
        self.live_version = self.shadow_version = TORN

    @property
    def extent(self) -> tuple[int, int]:
        """First and last address of the live region."""
        first = self._bytes.data_ptr() + self._live_at
        return first, first + self.directory.live_bytes

    def live(self, cell: Cell) -> Tensor:
        return _view(self._bytes, self._live_at, cell)

    def shadow(self, cell: Cell) -> Tensor:
        return _view(self._behind, self._shadow_at, cell)

    def region(self, *, is_live: bool) -> Tensor:
        """All bytes of one region: uint8."""
        start, size = self._shadow_at, self.directory.shadow_bytes
        if is_live:
            start, size = self._live_at, self.directory.live_bytes
        return self._bytes[start : start + size]

    def files(self, *, is_live: bool) -> Tensor:
        """For each flat buffer on a disk, which of its files has what the region has of it: uint8, to be written."""
        cell = next(cell for cell in self.directory.cells if cell.kind == AT)
        return self.live(cell) if is_live else self.shadow(cell)

    def write_sums(self, version: int, sums: Mapping[tuple[str, str], int]) -> None:
        """Note the checksums of cells of `version`, by name and kind, in the live region."""
        cell = next(cell for cell in self.directory.cells if cell.kind == SUMS)
        text = json.dumps([version, [[*key, value] for key, value in sums.items()]]).encode()
        view = self.live(cell)
        view.zero_()
        if len(text) <= len(view):
            view[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def noted_sums(self, *, is_live: bool) -> dict[tuple[str, str], int] | None:
        """The checksums that a region has of its own version; empty if it has none, `None` if they are unreadable."""
        cell = next((cell for cell in self.directory.cells if cell.kind == SUMS), None)
        version, view = (self.live_version, self.live) if is_live else (self.shadow_version, self.shadow)
        text = b"" if cell is None else bytes(view(cell).numpy().tobytes()).rstrip(b"\0")
        if not text or version == TORN:
            return {}
        try:
            of_version, sums = json.loads(text)
            return {(name, kind): int(value) for name, kind, value in sums} if of_version == version else {}
        except (ValueError, TypeError):
            return None

    def tear_what_has_changed(self) -> str:
        """Mark each region as torn, of which a cell has another checksum than was noted. Returns the name of such a
        cell; empty if there is none, or nothing was noted. See [Note: sums in an image]."""
        found = ""
        for is_live in (True, False):
            sums, view = self.noted_sums(is_live=is_live), self.live if is_live else self.shadow
            cells = [cell for cell in self.directory.cells if cell.rows is None and (cell.is_live or not is_live)]
            changed = SUMS if sums is None else first_changed(sums, ((cell, view(cell)) for cell in cells))
            found = found or changed
            if changed and is_live:
                self.live_version = TORN
            elif changed:
                self.shadow_version = TORN
        return found

    def copy_live(self) -> None:
        """Copy all live cells to the shadow, at once and without the GIL."""
        num_bytes = self.directory.live_bytes
        live, shadow = self._bytes[self._live_at :], self._behind[self._shadow_at :]
        copy_bytes(shadow[:num_bytes].numpy(), live[:num_bytes].numpy())

    def moved_to(self, path: Path | None) -> Image:
        """One in the file `path`, with the same cells in the same state. Raises `OSError` if there is no space."""
        image = Image.create(path, self.directory)
        for is_live in (True, False):
            copy_bytes(image.region(is_live=is_live).numpy(), self.region(is_live=is_live).numpy())
        image.live_version, image.shadow_version = self.live_version, self.shadow_version
        return image

    def remove(self) -> None:
        """Delete the file; processes that have it mapped keep it."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _cell_of(fields: dict[str, Any]) -> Cell:
    shape, codes = fields.pop("shape"), fields.pop("codes")
    if codes is not None:
        codes = Coded(**codes) if "scales" in codes else RestingCodes(**codes)
    return Cell(**fields, shape=tuple(shape), codes=codes)


def _view(memory: Tensor, start: int, cell: Cell) -> Tensor:
    offset = start + cell.offset
    # `data` counts its own writes: with one count for all cells, a note beside the states would look like a write to
    # them, after which `verify` does not expect the same bits
    return memory[offset : offset + cell.num_bytes].view(dtype_of(cell.dtype)).view(cell.shape).data


def first_changed(sums: Mapping[tuple[str, str], int], values: Iterable[tuple[Cell, Tensor]]) -> str:
    """The first of these cells whose value has another checksum than `sums` say, in words; empty if there is none."""
    for cell, value in values:
        noted = sums.get((cell.name, cell.kind))
        if noted is not None and int(checksum(value)) != noted:
            return f"{cell.kind} of {cell.name}"
    return ""


def _mapped(path: Path | None, num_bytes: int) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, num_bytes)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # a full file system raises here, instead of SIGBUS later
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def copy_bytes(target: np.ndarray, source: np.ndarray, *, by_rows: bool | None = None) -> None:
    """Copy bytes without the GIL, `by_rows` (by default where that is faster) that are in no larger block: the even
    ones and the odd ones."""
    by_rows = processor_vendor() != "GenuineIntel" if by_rows is None else by_rows
    num_pairs = len(source) // (2 * _ROW_BYTES) if by_rows else 0
    in_rows = num_pairs * 2 * _ROW_BYTES
    to, of = (memory[:in_rows].reshape(num_pairs, 2, _ROW_BYTES) for memory in (target, source))
    for row in (0, 1):
        np.copyto(to[:, row], of[:, row])
    np.copyto(target[in_rows:], source[in_rows:])


def write_mark(marks: np.ndarray | Tensor, at: int, version: int) -> None:
    """Write `version` and its complement: torn, they do not fit."""
    marks[at] = version
    marks[at + 1] = ~version


def read_mark(marks: np.ndarray | Tensor, at: int) -> int:
    """The version; `TORN` if a mark was being written."""
    version, check = int(marks[at]), int(marks[at + 1])
    return version if check == ~version else TORN
