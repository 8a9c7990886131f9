"""Work ahead of the one who waits for it, in threads.

[Note: threads, not processes]
What feeds a large model is mostly reading: memory-mapped tokens, arrow tables, files; numpy, torch, arrow and
the decoders of images let other threads run meanwhile. Threads need no pickling, no shared memory and no second
copy of the source; an error keeps its traceback; and they may be started beside NCCL, gloo and CUDA, where a
fork may hang. What they do not speed up is a transform that is slow in Python itself: that is what
`processes.py` is for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Made = TypeVar("Made")
Task = Callable[[threading.Event], Made]

THREAD_NAME = "shardwise-data"


class Abandoned(Exception):  # noqa: N818  # no error: how a task leaves when its event says that nobody waits
    """Raised by a task when its event was set; nobody sees it."""


def run_ahead(tasks: Iterator[Task[Made]], workers: int, depth: int) -> Generator[Made, None, None]:
    """What `tasks` make, in their order, with at most `depth` of them made or being made ahead.

    `workers` threads make them; with 0 the caller does, when it asks. An exception comes to the caller where
    the result would have come. When the caller leaves, tasks under way are told by their event and waited for;
    no thread outlives this generator.
    """
    stop = threading.Event()
    if workers == 0:
        for task in tasks:
            yield task(stop)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix=THREAD_NAME)
    ahead: deque[Future[Made]] = deque()
    try:
        ahead.extend(pool.submit(task, stop) for task in islice(tasks, depth))
        while ahead:
            made = ahead.popleft().result()
            ahead.extend(pool.submit(task, stop) for task in islice(tasks, 1))
            yield made
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
