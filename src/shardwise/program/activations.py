"""What the model itself holds while it computes, by the moments of a program."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.program.action import Moment
from shardwise.program.spec import Trace


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment, the most bytes that lived at once since the moment before it, and those that live at it."""

    moment: Moment
    peak_bytes: int
    live_bytes: int


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch that are neither parameters nor buffers: inputs, what is saved for the backward, what
    the backward makes, and each gradient until it is handed over.

    `marks` are the moments of a pass in their order, the end of the backward last. `process_bytes` is an allowance for
    what computing takes from the system besides, and no tensor shows.
    """

    marks: tuple[Mark, ...]
    process_bytes: int = 0
    on_cpu: bool = True
    """Whether they lie on the CPU, where gradients that are sent may do so from blocks that are kept."""
    host_bytes: int = 0
    """Of them, at most, what lies on the host meanwhile, where a plan says so; likewise on a disk. No mark has it."""
    disk_bytes: int = 0

    @property
    def trace(self) -> Trace:
        """The order in which units are used."""
        return tuple(mark.moment for mark in self.marks if mark.moment.unit)

    def beside(self, forward_bytes: int, backward_bytes: int) -> Activations:
        """The same while so many bytes more live: in the forward, and in the backward, the way into it included."""
        marks = []
        for mark in self.marks:
            more = forward_bytes if mark.moment.phase == "forward" else backward_bytes
            marks.append(Mark(mark.moment, mark.peak_bytes + more, mark.live_bytes + more))
        return replace(self, marks=tuple(marks))
