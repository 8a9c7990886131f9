"""Measures how fast the disk of a folder reads and writes, by block size and queue depth."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.errors import ConfigError, TierError
from shardwise.system.disk import PAGE, DiskFile, IoQueue, Pending, SystemCalls, TierFolder, pages
from shardwise.system.units import format_bytes

BLOCKS = (2**17, 2**19, 2**20, 2**22, 2**24)
DEPTHS = (1, 2, 4, 8, 16)
QUICK_BLOCKS, QUICK_DEPTHS = (2**20, 2**22), (1, 8)
FILE_BYTES = 2**29
MAX_SHARE = 4
"""At most one part in so many of the free space is used."""
WINDOW_BYTES = 2**26
"""Submitted at once, and as much again while it is in progress, so that the queue never runs empty."""
AS_GOOD = 0.97


@dataclass(frozen=True)
class DiskRow:
    """Bytes per second with one setting."""

    block_bytes: int
    depth: int
    is_direct: bool
    write_bytes_per_second: float
    read_bytes_per_second: float

    @property
    def both(self) -> float:
        """The rate for bytes that are read and written again, as in an update: the harmonic mean."""
        if not self.write_bytes_per_second or not self.read_bytes_per_second:
            return 0.0
        return 2 / (1 / self.write_bytes_per_second + 1 / self.read_bytes_per_second)


@dataclass(frozen=True)
class Grid:
    """The settings to measure: each direct setting, then the best of them through the page cache."""

    blocks: Sequence[int] = BLOCKS
    depths: Sequence[int] = DEPTHS
    file_bytes: int = FILE_BYTES
    seconds: float = 0.7
    """Time for each of reading and writing with each setting, unless the file ends earlier."""

    @property
    def num_settings(self) -> int:
        return len(self.blocks) * len(self.depths) + 1

    @property
    def least_bytes(self) -> int:
        """A smaller file has fewer requests than the deepest queue takes, and its rates would say nothing."""
        return max(self.blocks) * max(self.depths)


class Cached(SystemCalls):
    """Uses the page cache, as if the file system did not support direct I/O."""

    def open(self, path: Path, flags: int) -> int:
        return super().open(path, flags & ~getattr(os, "O_DIRECT", 0))


def measure_disk(folder: Path, grid: Grid, tell: Callable[[DiskRow], None] = lambda _: None) -> list[DiskRow]:
    """One row per setting; `tell` is called with each as it is measured. The files written are unlinked, so that none
    remains.

    Raises `ConfigError` for a file that is too small to measure with, and `TierError` if the folder is not usable for
    a disk tier, or has too little room. A folder that did not exist is removed again.
    """
    if grid.file_bytes < grid.least_bytes:
        raise ConfigError(
            f"A file of {format_bytes(grid.file_bytes)} is too small: {max(grid.depths)} requests of "
            f"{format_bytes(max(grid.blocks))} at once need {format_bytes(grid.least_bytes)}. Give a larger --size, or "
            f"leave it out."
        )
    fresh = [at for at in (folder, *folder.parents) if not at.exists()]
    try:
        return _measured_in(folder, grid, tell)
    finally:
        for at in fresh:
            with contextlib.suppress(OSError):  # somebody uses it by now
                at.rmdir()


def _measured_in(folder: Path, grid: Grid, tell: Callable[[DiskRow], None]) -> list[DiskRow]:
    rows: list[DiskRow] = []
    tier_folder = TierFolder(folder)
    try:
        tier_folder.tidy_after_others()
        file_bytes = _sized(tier_folder, grid)
        data, into = _memory(file_bytes), pages(min(WINDOW_BYTES, file_bytes))
        for block_bytes in grid.blocks:
            for depth in grid.depths:
                rows.append(_measured(tier_folder, (file_bytes, block_bytes, depth, grid.seconds), data, into))
                tell(rows[-1])
    finally:
        tier_folder.close()
    best = best_of(rows)
    tier_folder = TierFolder(folder, calls=Cached())
    try:
        setting = (file_bytes, best.block_bytes, best.depth, grid.seconds)
        rows.append(_measured(tier_folder, setting, data, into, is_direct=False))
        tell(rows[-1])
    finally:
        tier_folder.close()
    return rows


def _sized(tier_folder: TierFolder, grid: Grid) -> int:
    """The bytes of the file, with the room there is. Raises `TierError` if that is too little."""
    free = SystemCalls().free_bytes(tier_folder.folder)
    file_bytes = bounded(grid.file_bytes, free)
    if file_bytes < grid.least_bytes:
        quick = max(QUICK_BLOCKS) * max(QUICK_DEPTHS)
        less = f", or measure with --quick, which needs {format_bytes(MAX_SHARE * quick)} free"
        raise TierError(
            f"{tier_folder.folder} has {format_bytes(free)} free. Measuring needs a file of "
            f"{format_bytes(grid.least_bytes)}, and takes at most a quarter of the free space: make room until "
            f"{format_bytes(MAX_SHARE * grid.least_bytes)} are free{less if grid.least_bytes > quick else ''}."
        )
    if file_bytes < grid.file_bytes // PAGE * PAGE:
        logging.getLogger("shardwise").warning(
            "%s has %s free, so a file of %s is measured instead of %s.",
            tier_folder.folder,
            format_bytes(free),
            format_bytes(file_bytes),
            format_bytes(grid.file_bytes),
        )
    return file_bytes


def bounded(file_bytes: int, free_bytes: int) -> int:
    """The part of `file_bytes` to use with `free_bytes` free, a multiple of pages; at least one page."""
    return max(PAGE, min(file_bytes, free_bytes // MAX_SHARE) // PAGE * PAGE)


def best_of(rows: Sequence[DiskRow]) -> DiskRow:
    """Of the direct settings within 3 % of the fastest, the one with the fewest bytes in flight."""
    direct = [row for row in rows if row.is_direct] or list(rows)
    fastest = max(row.both for row in direct)
    good = [row for row in direct if row.both >= AS_GOOD * fastest]
    return min(good, key=lambda row: (row.depth * row.block_bytes, row.depth))


def _measured(
    tier_folder: TierFolder,
    setting: tuple[int, int, int, float],
    data: torch.Tensor,
    into: torch.Tensor,
    *,
    is_direct: bool = True,
) -> DiskRow:
    file_bytes, block_bytes, depth, seconds = setting
    queue = IoQueue(depth, block_bytes)
    file = tier_folder.create("bench", file_bytes, queue)
    try:
        list(_windows(file, file.write, data))  # the first write of a block also allocates it
        write = _rate(file, file.write, data, seconds)
        os.posix_fadvise(file.descriptor(), 0, 0, os.POSIX_FADV_DONTNEED)
        read = _rate(file, file.read, into, seconds)
        return DiskRow(block_bytes, depth, is_direct and file.is_direct, write, read)
    finally:
        file.close()
        queue.close()


def _rate(file: DiskFile, move: Callable[[int, torch.Tensor], Pending], memory: torch.Tensor, seconds: float) -> float:
    """Bytes per second, including the write-back of the page cache; at most one pass over the file."""
    started = time.perf_counter()
    moved = 0
    for num_bytes in _windows(file, move, memory):
        moved += num_bytes
        if time.perf_counter() - started > seconds:
            break
    os.fdatasync(file.descriptor())
    return moved / (time.perf_counter() - started)


def _windows(file: DiskFile, move: Callable[[int, torch.Tensor], Pending], memory: torch.Tensor) -> Iterator[int]:
    """The bytes of each window of the file as it completes; the next one has been submitted by then."""
    starts = list(range(0, file.num_bytes, len(memory)))
    under_way: list[tuple[int, Pending]] = []
    try:
        for start in starts:
            window = memory[: min(len(memory), file.num_bytes - start)]
            under_way.append((len(window), move(start, window)))
            if len(under_way) > 1:
                num_bytes, pending = under_way.pop(0)
                pending.wait()
                yield num_bytes
        while under_way:
            num_bytes, pending = under_way.pop(0)
            pending.wait()
            yield num_bytes
    finally:
        for _, pending in under_way:
            pending.wait()


def _memory(file_bytes: int) -> torch.Tensor:
    """Random bytes, which no disk can compress."""
    memory = pages(min(WINDOW_BYTES, file_bytes))
    return memory.view(torch.int64).random_().view(torch.uint8)
