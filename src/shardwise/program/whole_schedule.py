"""The micro-batches of a step on one rank of a pipeline as one program.

[Note: over the schedule] The program of a schedule does for all micro-batches, in the rank's order, what `build_pass`
does for one, so gathers run ahead from one pass into the next, and reductions run beside it. The row `held` says what
is kept of a unit from its first use in the step to its last: with `zero3-kept` it is gathered once; with `zero3` for
each forward and each backward; with a held part (`hpz`), from that part. Gradients that wait for the step in shards are
reduced after each backward, others once, after the unit's last one.

A program for each kind of pass would be shorter, but could not prefetch from one pass into the next, keep buffers whole
between them, or reduce beside another pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardwise.program.action import END_OF_BACKWARD, Action, Block, Moment, Program
from shardwise.program.build import (
    Gathered,
    Needs,
    drop_to_held,
    free_due,
    lasting,
    reductions_due,
)
from shardwise.program.effects import Phase
from shardwise.program.schedule import Op, OpKind
from shardwise.program.spec import Trace, UnitSpec

PassTraces = Mapping[tuple[OpKind, int], Trace]
"""By kind of op and stage: the moments of one micro-batch in order, without the end of a backward."""
PHASE_OF: Mapping[OpKind, Phase] = {
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weights",
}


def schedule_trace(row: Sequence[Op], passes: PassTraces) -> Trace:
    """The order in which a rank uses its units in a step: its `row` of the schedule, with the moments of each op from
    `passes`."""
    trace: list[Moment] = []
    for kind, micro_batch, stage in row:
        of_op = (*passes.get((kind, stage), ()), *(() if kind == "F" else (END_OF_BACKWARD,)))
        trace += (Moment(one.edge, one.phase, one.unit, micro_batch) for one in of_op)
    return tuple(trace)


def straight_passes(row: Sequence[Op], units: Mapping[int, Sequence[UnitSpec]]) -> dict[tuple[OpKind, int], Trace]:
    """The passes of stages that use their units one after the other: assumed until something is recorded.

    `units` are those of each stage of the rank, in the order of the forward. Where backwards have two halves, each unit
    is assumed to leave some of its gradients to the second; then its first half ends as that of the next one begins.
    """
    passes: dict[tuple[OpKind, int], Trace] = {}
    for kind, stage in dict.fromkeys((op.kind, op.stage) for op in row):
        in_order = units.get(stage, ()) if kind == "F" else reversed(units.get(stage, ()))
        phase = PHASE_OF[kind]
        names = [unit.name for unit in in_order if kind != "W" or unit.trainable]
        begin, end = ([Moment(edge, phase, name) for name in names] for edge in ("before", "after"))
        if kind == "I" and len(names) > 1:
            in_turn = [
                begin[0],
                *(moment for both in zip(begin[1:], end[:-1], strict=True) for moment in both),
                end[-1],
            ]
        else:
            in_turn = [moment for both in zip(begin, end, strict=True) for moment in both]
        passes[kind, stage] = tuple(in_turn)
    return passes


def is_over_schedule(trace: Iterable[Moment]) -> bool:
    """Whether the trace is of a pipeline's schedule, as opposed to a single micro-batch."""
    return any(moment.micro_batch is not None for moment in trace)


def build_schedule(units: Sequence[UnitSpec], trace: Trace, *, reduces: bool) -> Program:
    """All micro-batches of a step, without look-ahead; see [Note: over the schedule].

    Without `reduces` gradients stay on the rank that made them (`no_sync`).
    """
    by_name = {unit.name: unit for unit in units}
    gathered = Gathered(flat for unit in units for flat in unit.flats)
    needs = Needs(trace, (unit.name for unit in units if not gathered.is_whole(unit)))
    last = {moment.unit: index for index, moment in enumerate(trace) if _has_left_gradients(moment)}
    blocks = []
    owed: dict[str, tuple[Action, ...]] = {}
    """By unit, what is done with it only at the end of the running backward."""
    freed, held = ({unit.name: of(unit) for unit in units} for of in (free_due, drop_to_held))
    late = {unit.name: lasting(unit) for unit in units}
    reduced = {
        (unit.name, is_last): reductions_due(unit, is_last=is_last) for unit in units for is_last in (False, True)
    }
    for index, moment in enumerate(trace):
        if not moment.unit:
            blocks.append(Block(moment, gathered.drop(action for some in owed.values() for action in some)))
            owed.clear()
            continue
        unit = by_name[moment.unit]
        due: tuple[Action, ...] = ()
        if moment.edge == "before":
            due = gathered.make_whole(unit) if moment.needs_params else ()
        else:
            if moment.needs_params and needs.is_over(index):
                due = freed[unit.name]
            elif moment.needs_params and not needs.is_next(index):
                due = held[unit.name]
            if moment.phase != "forward" and late[unit.name]:
                owed[unit.name] = tuple(action for action in due if action.flat in late[unit.name])
                due = tuple(action for action in due if action.flat not in late[unit.name])
            if reduces and _has_left_gradients(moment):
                due = (*due, *reduced[unit.name, last[moment.unit] == index])
            due = gathered.drop(due) if due else ()
        if not gathered.is_whole(unit):
            needs.note_absent(index)
        blocks.append(Block(moment, due))
    return (*blocks, Block(END_OF_BACKWARD, gathered.drop_all(units)))


def _has_left_gradients(moment: Moment) -> bool:
    return moment.edge == "after" and bool(moment.unit) and moment.leaves_gradients
