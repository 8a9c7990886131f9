"""Messages between threads of one process: ranks for tests and first experiments, without a process group."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict

from shardwise.comm.collectives import Tensor
from shardwise.comm.watch.fault import Fault
from shardwise.comm.watch.status import Status
from shardwise.comm.work import Done, LinkError, Work

_POLL_SECONDS = 0.05
_Route = tuple[int, int, int]


class PostOffice:
    """The messages between all threads of one world, and the board of that world."""

    def __init__(self) -> None:
        self._boxes: dict[_Route, queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        self._statuses: dict[int, Status] = {}
        self._fault: Fault | None = None
        self._lock = threading.Lock()

    def box(self, route: _Route) -> queue.SimpleQueue[Tensor]:
        """The queue of one sender, receiver and tag."""
        with self._lock:
            return self._boxes[route]

    def put(self, message: Tensor, route: _Route) -> None:
        """Under the lock, or a queue that is empty at that moment could be deleted before the message is in it."""
        with self._lock:
            self._boxes[route].put(message)

    def drop(self, route: _Route) -> None:
        """A message was taken; delete its queue, unless another one is in it."""
        with self._lock:
            if self._boxes[route].empty():
                del self._boxes[route]

    # -- the board --------------------------------------------------------------------------------------

    outlives_ranks = False  # it ends with the process, which all ranks share

    def publish(self, status: Status) -> None:
        self._statuses[status.rank] = status

    def read(self, rank: int) -> Status | None:
        return self._statuses.get(rank)

    def fault(self) -> Fault | None:
        return self._fault

    def claim(self, fault: Fault) -> Fault:
        with self._lock:
            self._fault = self._fault or fault
            return self._fault

    def leave(self, size: int) -> None:
        """The board ends with this object."""


class ThreadTransport:
    """One thread's end of a `PostOffice`. A message is copied when it is sent."""

    name = "threads"

    def __init__(self, office: PostOffice, rank: int) -> None:
        self._office = office
        self._rank = rank
        self._is_aborted = threading.Event()

    def send(self, tensor: Tensor, rank: int, tag: int) -> Work:
        self._office.put(tensor.detach().clone(), (self._rank, rank, tag))
        return Done()

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Work:
        return _Expected(self._office, tensor, (rank, self._rank, tag), self._is_aborted)

    def lost_ranks(self) -> tuple[int, ...]:
        """A thread cannot be killed."""
        return ()

    def closed_ranks(self) -> tuple[int, ...]:
        return ()

    def end_lost_waits(self) -> None:
        return

    def abort(self) -> None:
        self._is_aborted.set()

    def close(self) -> None:
        """The office belongs to the code that made the threads."""


class _Expected:
    def __init__(self, office: PostOffice, tensor: Tensor, route: _Route, is_aborted: threading.Event) -> None:
        self._office = office
        self._tensor = tensor
        self._route = route
        self._is_aborted = is_aborted

    def wait(self) -> None:
        box = self._office.box(self._route)
        while True:
            try:
                message = box.get(timeout=_POLL_SECONDS)
                break
            except queue.Empty:
                if self._is_aborted.is_set():
                    raise LinkError(self._route[0], f"Nothing came from rank {self._route[0]}.") from None
        self._office.drop(self._route)
        self._tensor.detach().copy_(message)
