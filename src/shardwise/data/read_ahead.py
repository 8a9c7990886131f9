"""Runs work ahead of its consumer, in threads.

[Note: threads, not processes]
Feeding a large model is mostly reading: memory-mapped tokens, arrow tables, files. numpy, torch, arrow and image
decoders release the GIL meanwhile. Threads need no pickling, no shared memory and no second copy of the source; errors
keep their tracebacks; and threads may be started beside NCCL, gloo and CUDA, where a fork may hang. They do not speed
up a transform that is slow in Python itself; for that there is `processes.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import TypeVar

Made = TypeVar("Made")
Task = Callable[[threading.Event], Made]

THREAD_NAME = "shardwise-data"


class _Collected(Exception):  # noqa: N818  # not an error either
    """Raised in `run_ahead` by `abandon`."""


class Abandoned(Exception):  # noqa: N818  # not an error, but how a task ends when its result is no longer needed
    """Raised by a task when its event was set; never reaches the user."""


def run_ahead(tasks: Iterator[Task[Made]], workers: int, depth: int) -> Generator[Made, None, None]:
    """The results of `tasks`, in order, with at most `depth` of them finished or running ahead.

    `workers` threads run them; with 0 the caller does, on demand. An exception is raised in place of the result. When
    the caller leaves, running tasks are signalled by their event and waited for; no thread outlives this generator,
    unless it is ended by `abandon`.
    """
    stop = threading.Event()
    if workers == 0:
        for task in tasks:
            yield task(stop)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix=THREAD_NAME)
    ahead: deque[Future[Made]] = deque()
    waits = True
    try:
        ahead.extend(pool.submit(task, stop) for task in islice(tasks, depth))
        while ahead:
            made = ahead.popleft().result()
            ahead.extend(pool.submit(task, stop) for task in islice(tasks, 1))
            yield made
    except _Collected:
        waits = False
    finally:
        stop.set()
        pool.shutdown(wait=waits, cancel_futures=True)


def abandon(results: Generator[Made, None, None]) -> None:
    """End `results` of `run_ahead` without waiting for its threads, which end by themselves.

    For finalizers: a collection of garbage may run them in any thread, whatever lock it holds. One that joined threads
    there waited forever for a lock of `threading` which its own thread held.
    """
    with suppress(_Collected, StopIteration):
        results.throw(_Collected())
