"""The thread that keeps MPI's messages moving, and how other threads may call MPI.

[Note: progress] MPI moves a large message only while both ends are inside an MPI call, and a blocking MPI wait can
neither be ended from outside nor release the interpreter. So all calls are non-blocking: operations are polled by the
threads that wait for them, and by a thread of our own while all others compute.

[Note: who may call MPI] With MPI_THREAD_MULTIPLE any thread posts and polls for itself; with MPI_THREAD_SERIALIZED too,
one at a time. Below that only the thread that initialized MPI may call it, which is ours: other threads hand it their
operations, and check from time to time whether they are done.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from shardwise.errors import CommError


class Requests(list[Any]):
    """The MPI requests of one step, and the number of bytes expected by each receive among them."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: dict[int, int] = {}
        self.statuses: list[Any] = []


Steps = Iterator[Sequence[Any]]
"""An operation, cut where it waits: it yields the MPI requests that have to be complete before it goes on."""
OnEnd = Callable[[BaseException | None], None]
Late = Callable[[], None]
Result = TypeVar("Result")
_SPINS = 100
"""Polls without a pause: a small message takes some ten microseconds."""
_FIRST_PAUSE_SECONDS, _LONGEST_WAIT_SECONDS, _LONGEST_PAUSE_SECONDS = 2e-5, 5e-4, 1e-3
_MOVED_SECONDS = 3e-5
"""A poll that takes longer than this has moved bytes."""


class Operation:
    """An operation, advanced step by step. Several threads may advance it, one at a time."""

    __slots__ = ("_late", "_lock", "_on_end", "_requests", "_steps", "error", "is_message", "is_over")

    def __init__(self, steps: Steps, *, is_message: bool, on_end: OnEnd | None, late: Late | None) -> None:
        self.is_message = is_message
        self.is_over = False
        self.error: BaseException | None = None
        self._steps = steps
        self._requests: Sequence[Any] = ()
        self._lock = threading.Lock()
        self._on_end = on_end
        self._late = late

    def advance(self, complete: Callable[[Sequence[Any]], bool]) -> bool:
        """Go on as far as possible without waiting. Returns whether all is done. `complete` tests MPI requests."""
        if not self._lock.acquire(blocking=False):
            return self.is_over
        try:
            while not self.is_over:
                if self._requests and not complete(self._requests):
                    if self._late is not None:
                        self._late()
                    return False
                following = next(self._steps, None)
                if following is None:
                    self._requests, self._steps = (), iter(())  # releases the tensors as well
                    self._finish(None)
                else:
                    self._requests = following
        except BaseException as error:  # raised in `wait`
            self._finish(error)
        finally:
            self._lock.release()
        return True

    def _finish(self, error: BaseException | None) -> None:
        self.error, self.is_over = error, True
        if self._on_end is not None:
            self._on_end(error)


class Progress:
    """The progress thread, from MPI_Init to MPI_Finalize. One per process."""

    def __init__(self, mpi: Any, initialize: Callable[[], int]) -> None:
        """`initialize` returns MPI's thread level; it runs in the thread, and its exceptions are raised here."""
        self._mpi = mpi
        self._initialize = initialize
        self._level = mpi.THREAD_SINGLE
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._wake = threading.Event()
        self._new: deque[Operation] = deque()
        self._messages: deque[Operation] = deque()
        self._others: list[Operation] = []
        self._abandoned: list[Operation] = []
        self._pause = _FIRST_PAUSE_SECONDS
        self._num_waiting = 0
        self._counting = threading.Lock()
        self._is_stopping = self._finalizes = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="shardwise-mpi", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        self._calls_directly = self._level >= mpi.THREAD_SERIALIZED
        is_serialized = self._level == mpi.THREAD_SERIALIZED
        self._turn: contextlib.AbstractContextManager[Any] = (
            threading.RLock() if is_serialized else contextlib.nullcontext()
        )

    def start(
        self, steps: Steps, *, is_message: bool = False, on_end: OnEnd | None = None, late: Late | None = None
    ) -> Operation:
        """Begin an operation; its first step is posted before anything that is begun later.

        `is_message`: a message of a single step, whose end matters only to the threads that wait for it. Otherwise
        `on_end` is called with the error or `None` by the thread that reaches the end, and `late` from time to time
        before that; it may raise.
        """
        operation = Operation(steps, is_message=is_message, on_end=on_end, late=late)
        if self._calls_directly:
            self._advance(operation)
        self._new.append(operation)
        self._pause = _FIRST_PAUSE_SECONDS
        if not self._wake.is_set():
            self._wake.set()
        return operation

    def wait(self, operation: Operation, look: Callable[[], None] | None = None) -> None:
        """Return once it is done, or raise its error. `look` is called from time to time, and may raise to end the
        wait."""
        if not self._poll(operation):
            self._wait(operation, look)
        if operation.error is not None:
            raise operation.error

    def call(self, function: Callable[[], Result]) -> Result:
        """The result of `function`, which may block; it runs on a thread that may call MPI."""
        if self._calls_directly:
            with self._turn:
                return function()
        results: list[Result] = []

        def steps() -> Steps:
            results.append(function())
            yield ()

        self.wait(self.start(steps()))
        return results[0]

    def stop(self, *, finalizes: bool) -> None:
        """End the thread, and MPI with it. Blocks as MPI_Finalize does, until all ranks have called it."""
        if os.getpid() != self._pid:
            return
        self._is_stopping, self._finalizes = True, finalizes
        self._wake.set()
        while self._thread.is_alive():
            self._thread.join(0.1)  # signals are handled in between

    # -- those who wait ---------------------------------------------------------------------------------

    def _wait(self, operation: Operation, look: Callable[[], None] | None) -> None:
        with self._counting:
            self._num_waiting += 1
        try:
            polls, pause = 0, 0.0
            while True:
                began = time.perf_counter()
                if self._poll(operation):
                    return
                if look is not None and polls % 8 == 0:
                    look()
                polls += 1
                if time.perf_counter() - began > _MOVED_SECONDS:
                    polls, pause = 1, 0.0
                elif polls > _SPINS:
                    pause = min(max(_FIRST_PAUSE_SECONDS, 1.2 * pause), _LONGEST_WAIT_SECONDS)
                time.sleep(pause)
        finally:
            with self._counting:
                self._num_waiting -= 1

    def _poll(self, operation: Operation) -> bool:
        return self._advance(operation) if self._calls_directly else operation.is_over

    def _advance(self, operation: Operation) -> bool:
        if operation.is_over:
            return True
        with self._turn:
            return operation.advance(self._complete)

    def _complete(self, requests: Sequence[Any]) -> bool:
        if not isinstance(requests, Requests):
            return bool(requests[0].Test() if len(requests) == 1 else self._mpi.Request.Testall(requests))
        if not requests.statuses:
            requests.statuses = [self._mpi.Status() for _ in requests]
        if not self._mpi.Request.Testall(requests, requests.statuses):
            return False
        for index, num_bytes in requests.expected.items():
            arrived = requests.statuses[index].Get_count(self._mpi.BYTE)
            if arrived != num_bytes:
                raise CommError(
                    f"Rank {requests.statuses[index].Get_source()} of the group sent {arrived} bytes, where this one "
                    f"expects {num_bytes}. Give tensors of the same shapes and dtypes on all ranks."
                )
        return True

    # -- the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._level = self._initialize()
        except BaseException as error:  # raised by the constructor, in the thread that started this one
            self._failure = error
            return
        finally:
            self._ready.set()
        while not self._is_stopping:
            if not (self._new or self._messages or self._others):
                self._wake.wait()
                self._wake.clear()
                continue
            began = time.perf_counter()
            has_ended = self._tick()
            if has_ended or time.perf_counter() - began > _MOVED_SECONDS:
                self._pause = _FIRST_PAUSE_SECONDS
            else:
                self._pause = min(1.3 * self._pause, _LONGEST_PAUSE_SECONDS)
            self._rest()
        if self._finalizes:
            self._mpi.Finalize()

    def _rest(self) -> None:
        if not self._calls_directly:  # other threads wait for this one to post
            if self._wake.wait(self._pause):
                self._wake.clear()
        elif self._num_waiting:
            time.sleep(_LONGEST_PAUSE_SECONDS)  # they poll for themselves
        else:
            time.sleep(self._pause)

    def _tick(self) -> bool:
        """Poll all operations. Returns whether any has ended. Of messages only the oldest is polled: MPI moves all of
        them."""
        while self._new:
            operation = self._new.popleft()
            if self._calls_directly or not self._has_ended(operation):
                (self._messages if operation.is_message else self._others).append(operation)
        num_before = len(self._messages) + len(self._others)
        while self._messages and self._has_ended(self._messages[0]):
            self._messages.popleft()
        if not self._calls_directly:  # only this thread polls them
            self._messages = deque(message for message in self._messages if not self._has_ended(message))
        self._others = [operation for operation in self._others if not self._has_ended(operation)]
        return len(self._messages) + len(self._others) < num_before

    def _has_ended(self, operation: Operation) -> bool:
        if not self._advance(operation):
            return False
        if operation.error is not None:
            self._abandoned.append(operation)
        return True
