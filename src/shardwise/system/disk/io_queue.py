"""Threads that read and write, with as many requests in flight as keep a disk busy.

Threads with `preadv`, not io_uring: a step makes few and large calls, for which threads are as fast. Of io_uring's own
time (liburing 2026.3.30 through ctypes; 512 MiB, 8 requests of 4 MiB, direct, in turns) they took 0.95 to read and 0.92
to write, with 47 ms of processor time against 35 and 30. And nothing has to be installed, or allowed in a container.

[Note: daemon threads] Python waits at exit for the threads of a `ThreadPoolExecutor`, and for all that are no daemons.
One whose call the disk does not answer never returns, and a process that has given up its disk would not end.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue

from shardwise.errors import ConfigError, StateError
from shardwise.system.disk.align import PAGE
from shardwise.system.disk.pending import Patience, Pending

DEPTH = 8
BLOCK_BYTES = 2**20
"""Keeps most NVMe drives busy; `shardwise bench disk` finds the best values for a machine."""
Request = Callable[[], None]
_Waiting = SimpleQueue[tuple[Future[None], Request] | None]
"""Requests, each with what tells that it is done; `None` ends one thread."""


class IoQueue:
    """Up to `depth` requests in flight, of at most `block_bytes` each, started in the order given. Call `close()`."""

    def __init__(self, depth: int = DEPTH, block_bytes: int = BLOCK_BYTES, patience: Patience | None = None) -> None:
        if depth < 1 or block_bytes < PAGE or block_bytes % PAGE:
            raise ConfigError(
                f"A queue of depth {depth} with blocks of {block_bytes} bytes was asked for; the depth is at least 1, "
                f"and blocks are multiples of {PAGE} bytes."
            )
        self.depth = depth
        self.block_bytes = block_bytes
        self.patience = Patience() if patience is None else patience
        self.note_done: Callable[[], None] | None = None
        """Called after each request, by the thread that has done it."""
        self._waiting: _Waiting = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end, self._waiting, self._threads)

    def start(self, requests: Iterable[Request]) -> Pending:
        return Pending([self._start(request) for request in requests], self.patience)

    def do_here(self, request: Request) -> None:
        """Do one in the calling thread, and return when it is done."""
        try:
            request()
        finally:
            self.patience.num_done += 1
            if self.note_done is not None:
                self.note_done()

    def close(self) -> None:
        """Wait for the requests in flight, unless the disk was given up, and end the threads. May be called twice."""
        if self.patience.is_over:
            _cancel_all(self._waiting)
        self._end()
        for thread in self._threads:
            self.patience.await_end(thread)

    def _start(self, request: Request) -> Future[None]:
        if not self._end.alive:
            raise StateError("A read or a write was asked for after its disk had been closed.")
        call: Future[None] = Future()
        self._waiting.put((call, partial(self.do_here, request)))
        if len(self._threads) < self.depth:
            name = f"shardwise disk {len(self._threads)}"
            thread = threading.Thread(target=_work, args=(self._waiting,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return call


def _work(waiting: _Waiting) -> None:
    """What each thread does: see [Note: daemon threads]."""
    while (item := waiting.get()) is not None:
        call, request = item
        if call.set_running_or_notify_cancel():
            try:
                request()
            except BaseException as error:
                call.set_exception(error)
            else:
                call.set_result(None)
        del item, call, request  # and with them a buffer, and maybe the queue


def _cancel_all(waiting: _Waiting) -> None:
    with contextlib.suppress(Empty):
        while True:
            if (item := waiting.get_nowait()) is not None:
                item[0].cancel()


def _end(waiting: _Waiting, threads: list[threading.Thread]) -> None:
    for _ in threads:
        waiting.put(None)
