"""What the model itself holds while it computes, by the moments of a program."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.program.action import END_OF_BACKWARD, Moment
from shardwise.program.spec import Trace


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment, the most bytes that lived at once since the moment before it, and those that live at it."""

    moment: Moment
    peak_bytes: int
    live_bytes: int


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch, or of all of them in the order of a pipeline's schedule, that are neither parameters
    nor buffers: inputs, what is saved for the backward, what the backward makes, and each gradient until it is handed
    over.

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
        return tuple(mark.moment for mark in self.marks if mark.moment != END_OF_BACKWARD)
