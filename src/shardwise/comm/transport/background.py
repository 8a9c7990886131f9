"""Threads that complete collectives while this rank computes: one per line that needs it.

[Note: who goes on] A collective over several hosts has steps that depend on each other: what arrived over the network
is passed on to neighbours, and what neighbours contributed is summed before it is sent. If that were done in `wait`,
nothing would be under way while this rank computes; if it were done at the start, ranks would wait for each other
there. Each line has its own thread, so that no line waits for a rank that is late along another one.

[Note: who posts] gloo (torch 2.13) writes a message from the thread that posts it, if the other rank has posted its
receive, and holds the connection's lock meanwhile. If that thread loses its core then, gloo's own polls for the lock as
often as it gets one, until the writer has its turn again. The thread that computes has used up its time when it posts,
one that only posts has not: eight sums of 1.3 MB beside a step of 8 ms, on two ranks and two cores that have a load of
15, take 5.0 ms of processor time instead of 7.7 (medians of 6; gloo's own all-reduces 5.9).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from shardwise.comm.work import Work

Queue = SimpleQueue["_Job | None"]


class _Job:
    """A `Work` whose steps run on a background thread.

    [Note: done is a lock] Events of `threading` are written in Python: to make, set and await one takes 20 calls, and a
    lock, which is held until the job is done, none.
    """

    __slots__ = ("_error", "_is_busy", "_made", "_steps")

    def __init__(self, steps: Callable[[], Work | None]) -> None:
        self._steps: Callable[[], Work | None] | None = steps
        self._made: Work | None = None
        self._error: BaseException | None = None
        self._is_busy = threading.Lock()
        self._is_busy.acquire()

    @property
    def is_done(self) -> bool:
        return not self._is_busy.locked()

    def wait(self) -> None:
        with self._is_busy:
            pass
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait for what its steps have begun, too."""
        self.wait()
        made, self._made = self._made, None
        if made is not None:
            made.wait()

    def run(self) -> None:
        assert self._steps is not None
        try:
            self._made = self._steps()
        except BaseException as error:  # re-raised in `wait`
            self._error = error
        finally:
            self._steps = None  # releases what the steps hold
            self._is_busy.release()


class Background:
    """The background threads of one rank. Only its computing thread calls `start` and `close`."""

    def __init__(self, name: str) -> None:
        """`name` prefixes the names of the threads."""
        self._name = name
        self._threads: dict[str, tuple[threading.Thread, Queue]] = {}
        self._last: dict[str, _Job] = {}

    def start(self, line: str, steps: Callable[[], Work | None]) -> _Job:
        """Run `steps` after everything started for `line` before. `wait` raises what they raise."""
        found = self._threads.get(line)
        if found is None:
            queue: Queue = SimpleQueue()
            thread = threading.Thread(target=_work, args=(queue,), name=f"{self._name} {line}", daemon=True)
            found = self._threads[line] = thread, queue
            thread.start()
        job = self._last[line] = _Job(steps)
        found[1].put(job)
        return job

    def post(self, line: str, post: Callable[[], Work]) -> _Job:
        """Let a thread of the line's own `post` messages, and the one that completes its collectives wait for them."""
        return self.start(line, self.start(f"{line}, posts", post).finish)

    def close(self, abort: Callable[[], None]) -> None:
        """End all threads. `abort` is called if one is still busy, and has to end its waits."""
        if not all(job.is_done for job in self._last.values()):
            abort()
        for _, queue in self._threads.values():
            queue.put(None)
        for thread, _ in self._threads.values():
            thread.join()
        self._threads.clear()
        self._last.clear()


def _work(queue: Queue) -> None:
    with torch.inference_mode():  # so that tensors made in any mode may be written here
        while (job := queue.get()) is not None:
            job.run()
            del job  # it holds tensors, and the next job may be long in coming
