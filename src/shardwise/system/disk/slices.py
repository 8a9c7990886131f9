"""Processing data slice by slice: read the next slice, work on this one, write the previous one.

A pure function makes the list of steps, and `walk` executes it. So what overlaps can be tested without a disk or a
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from shardwise.errors import ConfigError

NUM_BUFFERS = 3
"""One that is read into, one that is worked on, one that is written from."""


class Waiting(Protocol):
    def wait(self) -> None: ...


@dataclass(frozen=True)
class Step:
    """`read` and `write` start a transfer of slice `index` into or out of buffer `buffer`; `have_read` and
    `have_written` wait for it; `work` comes between them."""

    verb: Literal["read", "have_read", "work", "write", "have_written"]
    index: int
    buffer: int


def steps(num_slices: int, num_buffers: int = NUM_BUFFERS) -> Iterator[Step]:
    """The steps to process `num_slices`.

    With three buffers or more, the reads of the next slices and the write of the previous one overlap with the work.
    With two, a read does, but each write is waited for before the next read. With one, nothing overlaps.
    """
    if num_buffers < 1:
        raise ConfigError(
            f"{num_buffers} buffers were asked for to go through {num_slices} slices; at least 1 is needed."
        )
    next_read = 0
    for index in range(num_slices):
        ahead = index + max(0, num_buffers - 2) + (1 if num_buffers == 2 else 0)
        while next_read <= min(ahead, num_slices - 1):
            buffer = next_read % num_buffers
            if next_read >= num_buffers:
                yield Step("have_written", next_read - num_buffers, buffer)
            yield Step("read", next_read, buffer)
            next_read += 1
        yield Step("have_read", index, index % num_buffers)
        yield Step("work", index, index % num_buffers)
        yield Step("write", index, index % num_buffers)
    for index in range(max(0, num_slices - num_buffers), num_slices):
        yield Step("have_written", index, index % num_buffers)


def walk(
    num_slices: int,
    *,
    read: Callable[[int, int], Waiting],
    work: Callable[[int, int], None],
    write: Callable[[int, int], Waiting],
    num_buffers: int = NUM_BUFFERS,
) -> None:
    """Execute `steps`. Each function is called with a slice and its buffer.

    If anything raises, transfers in flight are waited for first, because they still use the buffers.
    """
    reading: dict[int, Waiting] = {}
    writing: dict[int, Waiting] = {}
    try:
        for step in steps(num_slices, num_buffers):
            match step.verb:
                case "read":
                    reading[step.index] = read(step.index, step.buffer)
                case "have_read":
                    reading.pop(step.index).wait()
                case "work":
                    work(step.index, step.buffer)
                case "write":
                    writing[step.index] = write(step.index, step.buffer)
                case "have_written":
                    writing.pop(step.index).wait()
    except BaseException as first:
        for transfer in (*reading.values(), *writing.values()):
            try:
                transfer.wait()
            except Exception as error:  # a transfer's; the first failure is raised
                first.add_note(f"Besides: {error}")
        raise
