"""Memory that the ranks of a line read as one, and in which each writes its own part.

[Note: shared parameters] Parameters sharded over ranks of one host rest there exactly once, and a gather sends nothing.
Each rank maps the whole privately (other ranks do not see what it writes there, and the next `renew` discards it), and
its own part shared. All that is left of a gather is to wait until every rank has written:

    open     every rank announces that it has finished reading, and waits until all have
    (write)  each its own part
    close    every rank announces that it has written
    (read)   after `wait_closed`: all ranks have closed as often as this one
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from shardwise.comm.group import Group
from shardwise.comm.shared_buffers import Part
from shardwise.comm.transport.shm.file import (
    PAGE,
    SharedFile,
    bytes_of,
    forget,
    give_back,
    has_own_pages,
    whole_pages,
)
from shardwise.comm.transport.shm.neighbours import Neighbours
from shardwise.comm.watch.journal import Awaited, Entry, Journal
from shardwise.system.pages import LEAST_BYTES, bring

Tensor = torch.Tensor


class MappedBuffer:
    """One piece: a `SharedBuffer`."""

    def __init__(self, shared_buffers: MappedBuffers, file: SharedFile, offset: int, part: Part) -> None:
        self._shared_buffers = shared_buffers
        self._mapped = file.map_privately(offset, whole_pages(part.num_bytes))
        self.whole: Tensor = bytes_of(self._mapped)[: part.num_bytes]
        first = part.own_start // PAGE * PAGE
        self._of_own = file.map(offset + first, whole_pages(max(1, part.own_stop - first)))
        self._start, self._stop = part.own_start - first, part.own_stop - first
        self.own: Tensor = bytes_of(self._of_own)[self._start : self._stop]
        self._comes_at_once = part.num_bytes >= LEAST_BYTES
        self._is_to_come = self._comes_at_once
        """Whether it does when it is next read: see [Note: pages in one call] in `system/pages.py`."""

    def renew(self) -> None:
        forget(self._mapped)
        self._is_to_come = self._comes_at_once

    def relax(self) -> bool:
        if not has_own_pages(self._mapped):
            self.renew()
        return self._is_to_come

    def resume(self) -> None:
        self._is_to_come = False
        bring(self.whole)

    def wait_closed(self) -> None:
        self._shared_buffers.wait_closed()
        if self._is_to_come:
            self.resume()

    def let_go(self) -> None:
        give_back(self._of_own, self._start, self._stop)


class MappedBuffers:
    """`SharedBuffers` of the ranks of one host."""

    def __init__(
        self, group: Group, neighbours: Neighbours, journal: Journal, file: SharedFile, parts: Sequence[Part]
    ) -> None:
        """Raises `OSError` if there is not enough address space. The caller may close `file` in either case."""
        num_ranks = len(group.ranks)
        self._group = group
        self._neighbours = neighbours
        self._journal = journal
        head = whole_pages(2 * 8 * num_ranks)
        counts = np.frombuffer(memoryview(file.map(0, head)), np.int64, 2 * num_ranks)
        self._opened, self._closed = counts[:num_ranks], counts[num_ranks:]
        self._num_opened = self._num_closed = 0
        self._last: Entry | None = None
        self._all_have_closed = True
        self.pieces: list[MappedBuffer] = []
        offset = head
        for part in parts:
            self.pieces.append(MappedBuffer(self, file, offset, part))
            offset += whole_pages(part.num_bytes)

    def open(self) -> None:
        self._num_opened += 1
        entry = self._journal.enter("open", self._group, self._num_opened, torch.uint8, "shared buffers")
        self._publish(self._opened, self._num_opened)
        Awaited(self._journal, entry, _All(self, self._opened, self._num_opened)).wait()

    def close(self) -> None:
        self._num_closed += 1
        self._last = self._journal.enter("close", self._group, self._num_closed, torch.uint8, "shared buffers")
        self._all_have_closed = False
        self._publish(self._closed, self._num_closed)

    def wait_closed(self) -> None:
        """Block until the others have closed as often as this rank; reading is then safe until the next `open`."""
        if self._all_have_closed or self._last is None:
            return
        Awaited(self._journal, self._last, _All(self, self._closed, self._num_closed)).wait()
        self._all_have_closed = True

    def _publish(self, counts: np.ndarray, count: int) -> None:
        counts[self._group.index] = count
        self._neighbours.notify()

    def wait_until(self, counts: np.ndarray, count: int) -> None:
        for index, rank in enumerate(self._group.ranks):
            if index != self._group.index:
                self._neighbours.wait_for(rank, partial(_has_come, counts, index, count))


def _has_come(counts: np.ndarray, index: int, count: int) -> bool | None:
    return bool(counts[index] >= count) or None


class _All:
    """A work that completes when every rank's count has come so far."""

    def __init__(self, shared_buffers: MappedBuffers, counts: np.ndarray, count: int) -> None:
        self._shared_buffers = shared_buffers
        self._counts = counts
        self._count = count

    def wait(self) -> None:
        self._shared_buffers.wait_until(self._counts, self._count)
