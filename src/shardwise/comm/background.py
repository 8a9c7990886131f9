"""Threads that bring collectives to their end while this rank computes: one for each line that needs it.

[Note: who goes on] A collective over several hosts has steps that depend on each other: what came over the network has
to be handed to neighbours, and what neighbours gave has to be summed before it can leave. Done when this rank waits for
it, nothing would be on its way while it computes; done when it is started, ranks would wait for each other there. Lines
have threads of their own, so that no line waits for a rank that is late along another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

Queue = SimpleQueue["_Job | None"]


class _Job:
    """A `Work`."""

    __slots__ = ("_error", "_is_done", "_steps")

    def __init__(self, steps: Callable[[], None]) -> None:
        self._steps: Callable[[], None] | None = steps
        self._is_done = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        self._is_done.wait()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        assert self._steps is not None
        try:
            self._steps()
        except BaseException as error:  # raised where this is waited for
            self._error = error
        finally:
            self._steps = None  # and what it held
            self._is_done.set()


class Background:
    """Those of one rank. `start` and `close` are its computing thread's to call."""

    def __init__(self, name: str) -> None:
        """`name` is what threads are called by."""
        self._name = name
        self._threads: dict[str, tuple[threading.Thread, Queue]] = {}
        self._last: dict[str, _Job] = {}

    def start(self, line: str, steps: Callable[[], None]) -> _Job:
        """Do `steps` after all that was started for `line` before; what they raise is raised by `wait`."""
        found = self._threads.get(line)
        if found is None:
            queue: Queue = SimpleQueue()
            thread = threading.Thread(target=_work, args=(queue,), name=f"{self._name} {line}", daemon=True)
            found = self._threads[line] = thread, queue
            thread.start()
        job = self._last[line] = _Job(steps)
        found[1].put(job)
        return job

    def close(self, cut: Callable[[], None]) -> None:
        """End all threads; `cut` is called if one is not done, and has to end its waits."""
        if any(not job._is_done.is_set() for job in self._last.values()):
            cut()
        for _, queue in self._threads.values():
            queue.put(None)
        for thread, _ in self._threads.values():
            thread.join()
        self._threads.clear()
        self._last.clear()


def _work(queue: Queue) -> None:
    with torch.inference_mode():  # whatever mode a tensor was made in, it may be written to here
        while (job := queue.get()) is not None:
            job.run()
            del job  # it holds tensors, and the next one may be long in coming
