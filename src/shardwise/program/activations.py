"""What the model itself holds while it computes, by the moments of a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.program.action import END_OF_BACKWARD, Moment
from shardwise.program.spec import Trace

Awaited = tuple[tuple[str, int], ...]
"""Flat buffers whose gradients stay where they are made, each with the number of elements whose gradient has not come
yet in a backward that has begun."""


class Held(NamedTuple):
    """The most live bytes beside gradients that have come, while `awaited` had not."""

    num_bytes: int
    awaited: Awaited


class Mark(NamedTuple):
    """A moment, the peak of live bytes since the previous moment, and the bytes live at it; `heap_bytes` of the latter
    lie in the heap of the process.

    `peaks` are those since the previous moment while gradients came one after another, `awaited` those that have not
    come at the moment, and `come_bytes` those of `live_bytes` that have: see [Note: gradients come one by one] in
    `walk.py`. All are empty where gradients do not stay where they are made, or it is not known when they come.
    """

    moment: Moment
    peak_bytes: int
    live_bytes: int
    heap_bytes: int = 0
    peaks: tuple[Held, ...] = ()
    awaited: Awaited = ()
    come_bytes: int = 0

    def peaks_with(self, num_bytes: int) -> tuple[Held, ...]:
        """`peaks` with so many bytes more."""
        return tuple(Held(max(0, one.num_bytes + num_bytes), one.awaited) for one in self.peaks)

    def renamed(self, rename: Callable[[str], str], num_bytes: int = 0) -> Mark:
        """The same with other names of units and flat buffers, above so many bytes more."""

        def those(awaited: Awaited) -> Awaited:
            return tuple((rename(flat), numel) for flat, numel in awaited)

        return Mark(
            self.moment._replace(unit=rename(self.moment.unit)),
            self.peak_bytes + num_bytes,
            self.live_bytes + num_bytes,
            self.heap_bytes,
            tuple(Held(one.num_bytes, those(one.awaited)) for one in self.peaks_with(num_bytes)),
            those(self.awaited),
            self.come_bytes,
        )


@dataclass(frozen=True)
class Activations:
    """Bytes that are neither parameters nor buffers, of one micro-batch or of all micro-batches in the order of a
    pipeline's schedule: inputs, tensors saved for the backward, what the backward allocates, and each gradient until it
    is handed over.

    `marks` are the moments of a pass in order, the end of the backward last. `process_bytes` is an allowance for memory
    that computing takes from the system and that no tensor accounts for.
    """

    marks: tuple[Mark, ...]
    process_bytes: int = 0
    on_cpu: bool = True
    """Whether they are on the CPU, where gradients may be sent from blocks that are kept."""
    host_bytes: int = 0
    """The most of them that lies on the host, where a plan puts them there; `disk_bytes` likewise. Not part of any
    mark."""
    disk_bytes: int = 0
    staging_bytes: int = 0
    """The most host memory through which they go to a disk and come back. `unit_bytes`: the most that one unit sends
    there, of which as much may be read ahead."""
    unit_bytes: int = 0
    peak_heap_bytes: int = 0
    """The most that lies in the heap of the process at once; 0 where it has none."""
    host_heap_bytes: int = 0
    """The most of `host_bytes` that lies there."""
    gap_bytes: int = 0
    """What is free between blocks of the heap, however many lie there."""
    code_bytes: int = 0
    """Pages of libraries that computing reads for the first time, of which the ranks of a host have one copy."""

    @property
    def beside_tensors_bytes(self) -> int:
        """What a process takes when it begins to compute, whatever the plan."""
        return self.process_bytes + self.gap_bytes + self.code_bytes

    @property
    def trace(self) -> Trace:
        """The order in which units are used."""
        return tuple(mark.moment for mark in self.marks if mark.moment != END_OF_BACKWARD)
