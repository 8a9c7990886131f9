"""What micro-batches in flight hold besides the one being computed.

Stages are rehearsed in order, each on the output of the one before, because a rank has no other modules. What a step
allocates is within 0.85 and 1.05 of the prediction (`tests/ranks/test_pipeline_memory.py`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwise.program.action import END_OF_BACKWARD, Moment
from shardwise.program.activations import Activations, Mark
from shardwise.program.schedule import Op, OpKind, Schedule


def held_beside(
    schedule: Schedule, rank: int, held: Mapping[int, int], aside: Mapping[int, int]
) -> dict[tuple[OpKind, int], int]:
    """By kind of op and stage: the most bytes that other micro-batches of `rank` hold during such an op.

    `held[stage]` are the bytes that a forward leaves for its backward, `aside[stage]` those that the first half of a
    backward (`I`) leaves for the second (`W`).
    """
    alive: dict[tuple[int, int], int] = {}
    most: dict[tuple[OpKind, int], int] = {}
    for kind, batch, stage in schedule.rows[rank]:
        alive.pop((stage, batch), 0)
        others = sum(alive.values())
        most[kind, stage] = max(most.get((kind, stage), 0), others)
        if kind in "FI":
            alive[stage, batch] = held[stage] if kind == "F" else aside[stage]
    return most


@dataclass(frozen=True)
class StageBytes:
    """What a rehearsal has measured of one micro-batch in one stage."""

    activations: Activations
    """Of its forward, directly followed by its backward, or by the first half of it."""
    held: int
    """Bytes that the forward leaves for the backward."""
    aside: int = 0
    """Bytes that the first half of a backward leaves for the second: more than `held` where activations are computed
    again."""

    @property
    def held_heap(self) -> int:
        """Those of `held` that lie in the heap."""
        left = [mark.heap_bytes for mark in self.activations.marks if mark.moment.phase == "forward"]
        return min(self.held, left[-1]) if left else 0


def over_schedule(
    row: Sequence[Op], stages: Mapping[int, StageBytes], halved: Container[str] = (), sent_bytes: int = 0
) -> Activations:
    """What a rank holds in a step: each op of its `row`, plus what other micro-batches have left by then.

    `halved` are the units some of whose gradients come in the second half of a backward, `sent_bytes` what is in
    transit between stages at any time.
    """
    alive: dict[tuple[int, int], int] = {}
    in_heap: dict[tuple[int, int], int] = {}
    """Those of them that lie there."""
    held_heap = {stage: found.held_heap for stage, found in stages.items()}
    peak_heap = 0
    of_ops: dict[tuple[OpKind, int], list[Mark]] = {}
    marks: list[Mark] = []
    for op in row:
        own, own_heap = alive.pop((op.stage, op.micro_batch), 0), in_heap.pop((op.stage, op.micro_batch), 0)
        aside = stages[op.stage].aside
        beside, heap = sum(alive.values()) + sent_bytes, sum(in_heap.values())
        peak_heap = max(peak_heap, stages[op.stage].activations.peak_heap_bytes + heap)
        if (op.kind, op.stage) not in of_ops:
            of_ops[op.kind, op.stage] = list(_marks_of(op, stages[op.stage], halved))
        for mark in of_ops[op.kind, op.stage]:
            edge, phase, unit = mark.moment.edge, mark.moment.phase, mark.moment.unit
            moment = Moment(edge, phase, unit, op.micro_batch)  # `replace` takes several times as long
            peaks = mark.peaks_with(beside) if mark.peaks else ()
            held = mark.peak_bytes + beside, mark.live_bytes + beside, mark.heap_bytes + heap
            marks.append(Mark(moment, *held, peaks, mark.awaited, mark.come_bytes))
        if op.kind in "FI":
            alive[op.stage, op.micro_batch] = stages[op.stage].held if op.kind == "F" else aside
            of_aside = min(aside, own_heap * max(own, aside) // own) if own else 0
            in_heap[op.stage, op.micro_batch] = held_heap[op.stage] if op.kind == "F" else of_aside
    counted = [found.activations for found in stages.values()]
    return Activations(
        (*marks, Mark(END_OF_BACKWARD, sent_bytes, sent_bytes)),
        max((one.process_bytes for one in counted), default=0),
        all(one.on_cpu for one in counted),
        peak_heap_bytes=peak_heap,
        gap_bytes=max((one.gap_bytes for one in counted), default=0),
        code_bytes=max((one.code_bytes for one in counted), default=0),
    )


def _marks_of(op: Op, found: StageBytes, halved: Container[str]) -> Iterator[Mark]:
    """The marks of one op alone."""
    marks = found.activations.marks
    match op.kind:
        case "I":
            yield from _of_first_half(marks, halved)
        case "W":
            yield from _of_second_half(marks, halved, found.aside)
        case _:
            yield from (mark for mark in marks if (mark.moment.phase == "forward") == (op.kind == "F"))


def _of_first_half(marks: Sequence[Mark], halved: Container[str]) -> Iterator[Mark]:
    """A unit of which gradients are left has ended once that of its input has come, which is when the unit before it
    begins, or all ends. One that is around others (the model's own) has ended with all."""
    around = _units_around(marks)
    peak = live = heap = 0
    waiting: list[Moment] = []
    last: list[Moment] = []
    for mark in marks:
        edge, phase, unit = mark.moment.edge, mark.moment.phase, mark.moment.unit
        if phase == "forward":
            continue
        moment = Moment(edge, "backward_input", unit) if unit in halved else mark.moment
        peak, live, heap = max(peak, mark.peak_bytes), mark.live_bytes, mark.heap_bytes
        if edge == "after" and unit in halved:
            (last if unit in around else waiting).append(moment)
            continue
        ended = [] if edge == "after" and unit else waiting if unit else [*waiting, *last]
        if not unit:
            yield from (Mark(one, peak, live, heap) for one in ended)
        gradients = () if unit in halved else (mark.peaks, mark.awaited, mark.come_bytes)
        yield Mark(moment, peak, live, heap, *gradients)
        if edge == "before":
            yield from (Mark(one, live, live, heap) for one in ended)
        if ended:
            waiting = []
        peak = 0


def _of_second_half(marks: Sequence[Mark], halved: Container[str], aside: int) -> Iterator[Mark]:
    """It allocates what the whole backward allocates beyond what is left, unit by unit as the first half has ended
    them."""
    made: dict[tuple[str, str], int] = {}
    for last, mark in pairwise(marks):
        if mark.moment.phase != "forward":
            left = max(mark.live_bytes, last.live_bytes)
            made[mark.moment.edge, mark.moment.unit] = max(0, mark.peak_bytes - left)
    first_half = [mark.moment for mark in _of_first_half(marks, halved)]
    for moment in first_half:
        if moment.edge == "after" and moment.unit in halved:
            for edge in ("before", "after"):
                its = Moment(edge, "backward_weights", moment.unit)
                yield Mark(its, aside + made.get((edge, moment.unit), 0), aside)
    yield from (Mark(moment, aside + made["after", ""], aside) for moment in first_half if not moment.unit)


def _units_around(marks: Sequence[Mark]) -> set[str]:
    """The units that compute their forward around those of others."""
    around, running = set[str](), list[str]()
    for mark in marks:
        if mark.moment.phase == "forward" and mark.moment.edge == "before":
            around.update(running)
            running.append(mark.moment.unit)
        elif mark.moment.phase == "forward" and mark.moment.unit in running:
            running.remove(mark.moment.unit)
    return around
