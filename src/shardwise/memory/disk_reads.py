"""Reads parameters that rest on a disk ahead of their use, and brings them to the device.

[Note: reading ahead] A program fetches a unit one computation before it is used, and where ranks gather it, it has to
be there before the gather starts. So while the unit fetched last is in use, the next one is read: the one that followed
the same two fetches the last time. This works for forwards, backwards, evaluations and any method in
`engine.inference`, across the end of one and the beginning of the next, and needs no communication. While nothing is
known yet, the next unit of the model is assumed. What was read ahead and is not fetched is dropped, and so is what has
been written to since.

The order is that of the last pass, not of a program: evaluation and generation have none at first, and a prefetch there
would gather, for which ranks must agree. Before they gather what they have read, they exchange whether reading
succeeded, so that a disk error is the same on all and nobody is left waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

import torch

from shardwise.errors import TierError
from shardwise.memory.host_memory import Copied, Copy
from shardwise.system.disk import BufferPool, Pending

Tensor = torch.Tensor
_Context = tuple[Hashable, Hashable]
"""The last two fetches, the latest one last."""
Start = Callable[[Tensor], Pending]
"""Starts to read one flat buffer's parameters into a buffer."""


class DiskRead:
    """The parameters of one flat buffer on their way from a disk to the device. Waited for like a copy."""

    def __init__(
        self,
        what: str,
        buffer: Tensor,
        pending: Pending,
        copy: Callable[[Tensor], Copy],
        leave: Leave,
        wait_for: Callable[[Pending], None],
    ) -> None:
        """`copy` starts to bring `what` from the buffer to the device; `leave` takes the buffer back once that copy is
        done; `wait_for` waits for the disk."""
        self._what = what
        self._buffer = buffer
        self._pending = pending
        self._wait_for = wait_for
        self._copy = copy
        self._leave = leave
        self._copied: Copy = Copied()
        self._has_arrived = False
        self._fault: TierError | None = None

    def arrive(self) -> None:
        """Wait for the disk, and start the copy to the device. A failure is kept for `wait`."""
        if self._has_arrived:
            return
        self._has_arrived = True
        try:
            self._wait_for(self._pending)
            self._copied = self._copy(self._buffer)
        except TierError as error:
            self._fault = error
        self._leave(self, self._buffer, self._copied)

    def wait(self) -> None:
        """Order what is computed from here on after it. Raises `TierError` if the disk failed."""
        self.arrive()
        if self._fault is not None:
            raise TierError(f"{self._what} could not be read. {self._fault}") from self._fault
        self._copied.wait()

    def land(self) -> None:
        """Return once the resting parameters are no longer read: they are in a buffer, or on the device."""
        self._pending.join()


Leave = Callable[[DiskRead, Tensor, Copy], None]


class DiskReads:
    """The buffers into which one rank's parameters are read, and what has been read ahead.

    Keys name the flat buffers, in the order of the model.
    """

    def __init__(self, make_pool: Callable[[], BufferPool], wait_for: Callable[[Pending], None] = Pending.wait) -> None:
        """`make_pool` is called for the first read; `wait_for` waits for the disk."""
        self._make_pool = make_pool
        self._wait_for = wait_for
        self._pool: BufferPool | None = None
        self._starts: dict[Hashable, Start] = {}
        self._ahead: dict[Hashable, tuple[Tensor, Pending]] = {}
        self._under_way: list[DiskRead] = []
        """Fetched and not yet waited for."""
        self._leaving: deque[tuple[Tensor, Copy]] = deque()
        """Buffers that a copy to the device may still read."""
        self._last: _Context = (None, None)
        self._after: dict[_Context, Hashable] = {}
        """By two consecutive fetches, the one that followed."""
        self._not_ahead: set[_Context] = set()
        """Contexts after which nothing is read ahead, because an update came in between."""
        self._has_changed = False
        """Whether parameters have been written since the last fetch."""

    def register(self, key: Hashable, start: Start) -> None:
        """Register `key`, the next of the model; `start` reads its parameters."""
        self._starts[key] = start

    def fetch(self, key: Hashable, what: str, copy: Callable[[Tensor], Copy]) -> DiskRead:
        """Bring the parameters of `key` to the device, starting now unless they were read ahead, and read those
        expected next.

        `what` is their name in errors.
        """
        if not self._has_changed:
            self._not_ahead.discard(self._last)
        self._has_changed = False
        self._after[self._last] = key
        self._last = self._last[1], key
        found = self._ahead.pop(key, None)
        if found is not None and found[1].has_failed:  # nobody has seen that failure, and it may be transient
            self._require_pool().give_back(found[0])
            found = None
        if found is None:
            buffer = self._take()
            found = buffer, self._starts[key](buffer)
        read = DiskRead(what, *found, copy, self._leave, self._wait_for)
        self._under_way.append(read)
        self._read_ahead()
        return read

    def forget(self, key: Hashable) -> None:
        """The parameters of `key` are about to change: drop what has been read of them."""
        self._has_changed = True
        if key in self._ahead:
            self._not_ahead.add(self._last)
            self._drop(key)

    def forget_all(self) -> None:
        """Drop everything read ahead, and finish the fetches under way."""
        for read in list(self._under_way):
            read.arrive()
        for key in list(self._ahead):
            self._drop(key)
        self._last = (None, None)

    def _read_ahead(self) -> None:
        """Read what is expected next, as far as there are buffers; drop what was read and is no longer expected."""
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
        """The keys to read ahead, in order, at most one per buffer."""
        wanted: list[Hashable] = []
        last = self._last
        for _ in range(self._require_pool().num_buffers):
            if last in self._not_ahead:
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
        """A buffer; if none is free, that of what would be needed last."""
        while not self._has_free():
            if self._ahead:
                self._drop(next(reversed(self._ahead)))
            else:
                self._under_way[0].arrive()
        return self._require_pool().take()

    def _drop(self, key: Hashable) -> None:
        buffer, pending = self._ahead.pop(key)
        pending.join()
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
