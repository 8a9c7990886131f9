"""Threads as ranks: try a model at any world size in one process, in milliseconds.

```python
def train(world):
    engine = sw.shard(build(), "zero3", world=world)
    ...

losses = run_ranks(4, train)
```
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from shardwise.comm import PostOffice, ThreadTransport, World

Result = TypeVar("Result")


def run_ranks(
    num_ranks: int,
    work: Callable[[World], Result],
    *,
    timeout_seconds: float = 60,
    patience_seconds: float = 1,
) -> list[Result]:
    """Call `work(world)` on `num_ranks` threads that are each other's world; what they return, by rank.

    If ranks raise, the error of the first one to do so is raised here, and the others are released from
    their waiting. The seconds are those of `World.join`. Random numbers are shared between threads: build
    models before, or seed under a lock.
    """
    office = PostOffice()
    results: dict[int, Result] = {}
    failures: list[tuple[int, BaseException]] = []

    def rank(index: int) -> None:
        try:
            with World(
                index,
                num_ranks,
                ThreadTransport(office, index),
                board=office,
                timeout_seconds=timeout_seconds,
                patience_seconds=patience_seconds,
            ) as world:
                results[index] = work(world)
        except BaseException as error:  # handed to the caller below
            failures.append((index, error))

    threads = [threading.Thread(target=rank, args=(index,), name=f"rank {index}") for index in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        index, error = failures[0]
        error.add_note(f"(raised on rank {index} of {num_ranks})")
        raise error
    return [results[index] for index in range(num_ranks)]
