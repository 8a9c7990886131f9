"""Parameters that rest on a disk, on their way to the device: read ahead of those who ask for them.

[Note: reading ahead] A program fetches a unit one computation before it is used, and where ranks gather it, it has to
be there before the gather starts. So what is fetched next is read while what was fetched last is used: whatever
followed the same two fetches the last time. That is known for forwards, backwards, evaluations and any method in
`engine.inference`, from the end of one to the beginning of the next, and asks no rank for anything. Where nothing is
known yet it is the next of the model. What was read ahead and is not fetched goes, as does what somebody writes to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

import torch

from shardwise.errors import TierError
from shardwise.storage.host_memory import Copied, Copy
from shardwise.tiers import BufferPool, Pending

Tensor = torch.Tensor
_Context = tuple[Hashable, Hashable]
"""What was fetched last, and before that."""
Start = Callable[[Tensor], Pending]
"""Begins to read one flat buffer's parameters into a buffer."""


class DiskRead:
    """The parameters of one flat buffer on their way from a disk to the device. Waited for like a copy."""

    def __init__(self, what: str, buffer: Tensor, pending: Pending, copy: Callable[[Tensor], Copy], leave: Leave):
        """`copy` starts to bring `what` from the buffer to the device; `leave` gives the buffer back behind it."""
        self._what = what
        self._buffer = buffer
        self._pending = pending
        self._copy = copy
        self._leave = leave
        self._copied: Copy = Copied()
        self._is_through = False
        self._fault: TierError | None = None

    def arrive(self) -> None:
        """They are on their way from the buffer, or the disk has failed."""
        if self._is_through:
            return
        self._is_through = True
        try:
            self._pending.wait()
            self._copied = self._copy(self._buffer)
        except TierError as error:
            self._fault = error
        self._leave(self, self._buffer, self._copied)

    def wait(self) -> None:
        """What is computed from here on comes after it. Raises `TierError` if the disk failed."""
        self.arrive()
        if self._fault is not None:
            raise TierError(f"{self._what} could not be read. {self._fault}") from self._fault
        self._copied.wait()

    def land(self) -> None:
        """Nobody reads what rests any more: it is in a buffer, or on the device."""
        self._pending.settle()


Leave = Callable[[DiskRead, Tensor, Copy], None]


class DiskReads:
    """The buffers into which one rank's parameters are read, and what is read ahead.

    Whose parameters they are is said by keys, numbered in the order of the model.
    """

    def __init__(self, make_pool: Callable[[], BufferPool]) -> None:
        """`make_pool` is called for the first read."""
        self._make_pool = make_pool
        self._pool: BufferPool | None = None
        self._starts: dict[Hashable, Start] = {}
        self._ahead: dict[Hashable, tuple[Tensor, Pending]] = {}
        self._under_way: list[DiskRead] = []
        """What has been fetched and not been waited for."""
        self._leaving: deque[tuple[Tensor, Copy]] = deque()
        """Buffers that a copy to the device may still read."""
        self._last: _Context = (None, None)
        self._after: dict[_Context, Hashable] = {}
        """What was fetched after two others."""
        self._in_vain: set[_Context] = set()
        """After what nothing is read ahead: an update came between."""
        self._has_changed = False
        """Whether somebody has written to parameters since the last fetch."""

    def know(self, key: Hashable, start: Start) -> None:
        """The parameters of `key`, the next of the model, are read by `start`."""
        self._starts[key] = start

    def fetch(self, key: Hashable, what: str, copy: Callable[[Tensor], Copy]) -> DiskRead:
        """Begin to bring the parameters of `key` to the device, if that has not begun, and to read those to come.

        `what` is what an error calls them."""
        if not self._has_changed:
            self._in_vain.discard(self._last)
        self._has_changed = False
        self._after[self._last] = key
        self._last = self._last[1], key
        found = self._ahead.pop(key, None)
        if found is not None and found[1].has_failed:  # nobody was told of that; it may be over
            self._require_pool().give_back(found[0])
            found = None
        if found is None:
            buffer = self._take()
            found = buffer, self._starts[key](buffer)
        read = DiskRead(what, *found, copy, self._leave)
        self._under_way.append(read)
        self._read_ahead()
        return read

    def forget(self, key: Hashable) -> None:
        """The parameters of `key` are about to change: what has been read of them is of no use."""
        self._has_changed = True
        if key in self._ahead:
            self._in_vain.add(self._last)
            self._drop(key)

    def forget_all(self) -> None:
        """Nothing is read ahead any more, and what was fetched has arrived, or never will."""
        for read in list(self._under_way):
            read.arrive()
        for key in list(self._ahead):
            self._drop(key)
        self._last = (None, None)

    def _read_ahead(self) -> None:
        """What is expected next, as far as there are buffers; what was read and is not, goes."""
        wanted = self._wanted()
        for key in [key for key in self._ahead if key not in wanted]:
            self._drop(key)
        for key in wanted:
            if key not in self._ahead:
                if not self._has_free():
                    return
                buffer = self._require_pool().take()
                self._ahead[key] = buffer, self._starts[key](buffer)

    def _wanted(self) -> list[Hashable]:
        """What is to be read ahead, in its order: as many as there are buffers."""
        wanted: list[Hashable] = []
        last = self._last
        for _ in range(self._require_pool().num_buffers):
            if last in self._in_vain:
                break
            expected = self._expected(last)
            wanted.append(expected)
            last = last[1], expected
        return wanted

    def _expected(self, last: tuple[Hashable, Hashable]) -> Hashable:
        known = self._after.get(last)
        if known is not None:
            return known
        keys = list(self._starts)
        return keys[(keys.index(last[1]) + 1) % len(keys)]

    def _take(self) -> Tensor:
        """A buffer, if need be that of what was read ahead first."""
        while not self._has_free():
            if self._ahead:
                self._drop(next(reversed(self._ahead)))
            else:
                self._under_way[0].arrive()
        return self._require_pool().take()

    def _drop(self, key: Hashable) -> None:
        buffer, pending = self._ahead.pop(key)
        pending.settle()
        self._require_pool().give_back(buffer)

    def _has_free(self) -> bool:
        if not self._require_pool().num_free and self._leaving:
            self._land()
        return self._require_pool().num_free > 0

    def _land(self) -> None:
        buffer, copy = self._leaving.popleft()
        copy.land()
        self._require_pool().give_back(buffer)

    def _leave(self, read: DiskRead, buffer: Tensor, copy: Copy) -> None:
        self._under_way.remove(read)
        self._leaving.append((buffer, copy))

    def _require_pool(self) -> BufferPool:
        if self._pool is None:
            self._pool = self._make_pool()
        return self._pool
