"""The micro-batches of a step on one rank of a pipeline as one program.

[Note: over the schedule] The program of a schedule is what `build_pass` is for one micro-batch, for all of them, in the
order in which the rank has them: so gathers run ahead from one pass into the next, and reductions go on beside it. What
`held` says is kept of a unit from its first use in the step to its last: with `zero3-kept` it is gathered once, with
`zero3` for each forward and each backward, and with a part that is held (`hpz`) from that. Gradients that wait for the
step in shards are reduced after each backward, others once, after the unit's last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardwise.program.action import END_OF_BACKWARD, Action, Block, Moment, Program
from shardwise.program.build import (
    Needs,
    There,
    drop_to_held,
    free_due,
    reduce_due,
    reduces_each_time,
)
from shardwise.program.effects import Phase
from shardwise.program.schedule import Op, OpKind
from shardwise.program.spec import Trace, UnitSpec

PassTraces = Mapping[tuple[OpKind, int], Trace]
"""By kind of op and stage, the moments of one micro-batch in their order; an end of a backward is none of them."""
PHASE_OF: Mapping[OpKind, Phase] = {
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weights",
}


def schedule_trace(row: Sequence[Op], passes: PassTraces) -> Trace:
    """The order in which a rank uses its units in a step: its `row` of the schedule, each op as `passes` have it."""
    trace: list[Moment] = []
    for kind, micro_batch, stage in row:
        trace += (replace(moment, micro_batch=micro_batch) for moment in passes.get((kind, stage), ()))
        if kind != "F":
            trace.append(replace(END_OF_BACKWARD, micro_batch=micro_batch))
    return tuple(trace)


def straight_passes(row: Sequence[Op], units: Mapping[int, Sequence[UnitSpec]]) -> dict[tuple[OpKind, int], Trace]:
    """Those of stages that use their units one after the other: what is assumed until something is recorded.

    `units` are those of each stage of the rank, in the order of the forward. Where backwards have two halves, each unit
    is taken to leave some of its gradients to the second.
    """
    passes: dict[tuple[OpKind, int], Trace] = {}
    for kind, stage in dict.fromkeys((op.kind, op.stage) for op in row):
        in_order = units.get(stage, ()) if kind == "F" else reversed(units.get(stage, ()))
        phase = PHASE_OF[kind]
        passes[kind, stage] = tuple(
            Moment(edge, phase, unit.name)
            for unit in in_order
            if kind != "W" or unit.trainable
            for edge in ("before", "after")
        )
    return passes


def is_over_schedule(trace: Iterable[Moment]) -> bool:
    """Whether it is of a pipeline's schedule, and not of a single micro-batch."""
    return any(moment.micro_batch is not None for moment in trace)


def build_schedule(units: Sequence[UnitSpec], trace: Trace, *, reduces: bool = True) -> Program:
    """All micro-batches of a step, without look-ahead yet; see [Note: over the schedule].

    Without `reduces` gradients stay on the rank that made them (`no_sync`).
    """
    by_name = {unit.name: unit for unit in units}
    there = There({flat.name for unit in units for flat in unit.flats if flat.resident})
    needs = Needs(trace, (unit.name for unit in units if not there.is_whole(unit)))
    last = {moment.unit: index for index, moment in enumerate(trace) if _has_left_gradients(moment)}
    blocks = []
    for index, moment in enumerate(trace):
        if not moment.unit:
            blocks.append(Block(moment))
            continue
        unit = by_name[moment.unit]
        due: tuple[Action, ...] = ()
        if moment.edge == "before":
            due = there.make_whole(unit) if moment.needs_params else ()
        else:
            if moment.needs_params and needs.is_over(index):
                due = free_due(unit)
            elif moment.needs_params and not needs.is_next(index):
                due = drop_to_held(unit)
            if reduces and _has_left_gradients(moment):
                due = (*due, *_reductions(unit, is_last=last[moment.unit] == index))
            due = there.drop(due)
        if not there.is_whole(unit):
            needs.note_absent(index)
        blocks.append(Block(moment, due))
    return (*blocks, Block(END_OF_BACKWARD, there.drop_all(units)))


def _has_left_gradients(moment: Moment) -> bool:
    return moment.edge == "after" and bool(moment.unit) and moment.leaves_gradients


def _reductions(unit: UnitSpec, *, is_last: bool) -> Iterable[Action]:
    trained = (flat for flat in unit.flats if flat.trainable and (is_last or reduces_each_time(flat)))
    return (action for flat in trained for action in reduce_due(flat))
