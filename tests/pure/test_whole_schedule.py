"""The program of a pipeline's whole schedule: what is gathered and reduced how often, and what runs ahead."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_pass import Wrong, simulate
from strategies import ONE, TWO, flat, with_dtypes

from shardwise.errors import ProgramError
from shardwise.plan.placement import PRESETS
from shardwise.plan.placement import Place as Row
from shardwise.program import (
    Action,
    Block,
    Moment,
    Program,
    StepProgram,
    UnitSpec,
    check,
    parse,
    plan_step,
    render,
    schedule_trace,
    straight_passes,
    straight_trace,
)
from shardwise.program.activations import Activations, Mark
from shardwise.program.in_flight import StageBytes, over_schedule
from shardwise.program.schedule import Op, schedule_for
from tests.thorough import drawn, varies

MICRO_BATCHES = 4
LATE = replace(PRESETS["zero3"], grad=Row(partial=("dp",)))
TABLES = {**PRESETS, "zero3, sums taken late": LATE}
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)]


def units_of(name: str, num: int) -> tuple[UnitSpec, ...]:
    mesh = ONE if len(TABLES[name].axes) == 1 else TWO
    table = with_dtypes(TABLES[name], mesh)
    frozen = flat("h.1:frozen", table, mesh, trainable=False)
    return tuple(
        UnitSpec(f"h.{index}", (flat(f"h.{index}", table, mesh), *((frozen,) if index == 1 else ())))
        for index in range(num)
    )


def row_of(schedule: str, num_chunks: int, rank: int = 0) -> tuple[Op, ...]:
    return schedule_for(schedule, 2, MICRO_BATCHES, num_chunks).rows[rank]


def planned(name: str, schedule: str = "1f1b", num_chunks: int = 1, *, num: int = 4, rank: int = 0) -> StepProgram:
    """A rank with `num` units, dealt out to its stages."""
    units, row = units_of(name, num), row_of(schedule, num_chunks, rank)
    stages = sorted({op.stage for op in row})
    share = num // len(stages)
    by_stage = {stage: units[place * share : (place + 1) * share] for place, stage in enumerate(stages)}
    return plan_step(units, schedule_trace(row, straight_passes(row, by_stage)))


def counts(program: Program, verb: str) -> Counter[tuple[str, str]]:
    """How often each flat buffer is the object of `verb`, by axis."""
    actions = (action for block in program for action in block.actions if action.verb == verb)
    return Counter((action.flat, action.over) for action in actions)


@pytest.mark.parametrize("name", ["zero3", "hpz"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_is_frozen_of_a_unit_around_the_model_is_freed_when_a_backward_ends(schedule: str, name: str) -> None:
    """See [Note: blind calls] in `runtime/hooks.py`: once for each micro-batch, as often as it is gathered."""
    _, *others = units_of(name, 2)
    units = tuple(replace(unit, spans_model=True) for unit in others)
    row = row_of(schedule, 1)
    program = plan_step(units, schedule_trace(row, straight_passes(row, {0: units}))).micro_batch
    freed = [str(block.moment) for block in program for action in block.actions if _frees(action, "h.1:frozen")]
    backwards = [moment for moment in freed if "forward" not in moment]
    assert backwards
    assert all(moment.startswith("after backward #") or moment == "after backward" for moment in backwards)
    assert len(freed) == counts(program, "gather")["h.1:frozen", "dp" if name == "zero3" else "local"]
    plain = plan_step(tuple(others), schedule_trace(row, straight_passes(row, {0: tuple(others)}))).micro_batch
    for verb in ("gather", "slice", "free"):
        assert counts(program, verb) == counts(plain, verb)


def _frees(action: Action, flat: str) -> bool:
    return (action.verb, action.flat) == ("free", flat)


@pytest.mark.parametrize(("schedule", "num_chunks"), SCHEDULES)
@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_preset_goes_with_every_schedule_and_its_text_parses_back(
    name: str, schedule: str, num_chunks: int
) -> None:
    program = planned(name, schedule, num_chunks).micro_batch
    assert parse(render(program)) == program
    ends = [str(block.moment) for block in program if not block.moment.unit]
    num_ends = sum(op.kind != "F" for op in row_of(schedule, num_chunks))
    assert ends[-1] == "after backward"
    assert len(ends) == num_ends + 1


@pytest.mark.parametrize(("schedule", "num_chunks"), SCHEDULES)
def test_what_is_kept_is_gathered_once_and_what_is_not_once_for_each_use_at_most(
    schedule: str, num_chunks: int
) -> None:
    kept = counts(planned("zero3-kept", schedule, num_chunks).micro_batch, "gather")
    assert set(kept.values()) == {1}
    each = counts(planned("zero3", schedule, num_chunks).micro_batch, "gather")
    assert max(each.values()) <= 2 * MICRO_BATCHES
    assert min(each.values()) > 1
    held = counts(planned("hpz", schedule, num_chunks).micro_batch, "gather")
    assert {held[name] for name in held if name[1] == "node"} == {1}
    assert min(held[name] for name in held if name[1] == "local") > 1


@pytest.mark.parametrize(("schedule", "num_chunks"), SCHEDULES)
@pytest.mark.parametrize(
    ("name", "times"), [("ddp", 1), ("zero1", 0), ("zero3, sums taken late", 0), ("zero2", 4), ("zero3", 4)]
)
def test_shards_of_gradients_are_reduced_after_each_backward_and_others_once(
    name: str, times: int, schedule: str, num_chunks: int
) -> None:
    """Summands wait for the step, whose own program reduces them."""
    step = planned(name, schedule, num_chunks)
    reduced = counts(step.micro_batch, "reduce_scatter") + counts(step.micro_batch, "all_reduce")
    assert [reduced[f"h.{index}", "dp"] for index in range(4)] == [times] * 4
    assert sum(counts(step.step, "reduce_scatter").values()) == (0 if times else 4)


def test_gathers_run_ahead_from_one_pass_into_the_next() -> None:
    """Only the very first unit has to be waited for at once; one pass after the other waits in each."""
    program = planned("zero3").micro_batch

    def waits_at_once(program: Program) -> int:
        found = 0
        for block in program:
            begun = {action.flat for action in block.actions if action.verb == "gather"}
            found += any(action.verb == "wait" and action.flat in begun for action in block.actions)
        return found

    units = units_of("zero3", 4)
    assert waits_at_once(program) == 1
    assert waits_at_once(plan_step(units, straight_trace(units)).micro_batch) == 1
    following = [block for block in program if str(block.moment) == "before backward h.0 #0"]
    assert [action.flat for block in following for action in block.actions if action.verb == "gather"][:1] == ["h.1"]


def test_a_reduction_goes_on_beside_the_forward_of_another_micro_batch() -> None:
    """That of the stage's first unit, whose backward is the last of its pass."""
    program = planned("zero2").micro_batch
    at = next(
        index
        for index, block in enumerate(program)
        if any(str(action).startswith("reduce_scatter h.0") for action in block.actions)
    )
    moments = [str(block.moment) for block in program[at : at + 4]]
    assert moments == ["after backward h.0 #0", "after backward #0", "before forward h.0 #2", "after forward h.0 #2"]
    assert str(program[at + 3].actions[0]) == "wait h.0 grad"


def test_halves_of_a_backward_leave_a_gradient_once_and_reduce_it_as_it_is_made() -> None:
    program = planned("zero3", "zb-h1", rank=1).micro_batch
    reduced = [block.moment for block in program if any(action.verb == "reduce_scatter" for action in block.actions)]
    assert {moment.phase for moment in reduced} == {"backward_weights"}
    freed = [block.moment for block in program if any(action.verb == "free" for action in block.actions)]
    assert "backward_weights" not in {moment.phase for moment in freed}
    units = units_of("zero3", 4)
    whole = sum(one.full_bytes for unit in units for one in unit.flats)
    assert planned("zero2", "zb-h1", rank=1).footprint().working < whole


def test_the_bytes_of_a_step_are_those_of_its_one_program() -> None:
    step = planned("zero3-kept")
    assert step.sent_bytes(MICRO_BATCHES) == step.sent_bytes(1)
    once = plan_step(units_of("zero3-kept", 4), straight_trace(units_of("zero3-kept", 4)))
    gathered = sum(flat.full_bytes * 3 // 4 for unit in step.units for flat in unit.flats)
    assert once.sent_bytes(MICRO_BATCHES) - step.sent_bytes() == (MICRO_BATCHES - 1) * gathered
    assert step.footprint().working >= sum(flat.full_bytes for unit in step.units for flat in unit.flats)


def test_a_unit_may_have_a_name_that_looks_like_a_number() -> None:
    for moment in (
        Moment("before", "forward", "#3", 4),
        Moment("after", "backward", "#3"),
        Moment("after", "forward", 'a" #3'),
    ):
        assert Moment.parse(str(moment)) == moment
    assert str(Moment("before", "backward_weights", "h.0", 12)) == "before backward_weights h.0 #12"
    with pytest.raises(ProgramError, match="is not a moment"):
        Moment.parse("before forward h.0 #x")


def test_activations_are_those_of_each_op_beside_what_others_have_left() -> None:
    """Two units, of which one leaves gradients to the second half of a backward; a forward leaves 100 bytes."""
    pair = [Moment(edge, "forward", name) for name in ("a", "b") for edge in ("before", "after")]
    pair += [Moment(edge, "backward", name) for name in ("b", "a") for edge in ("before", "after")]
    marks = (*(Mark(moment, 10, 5) for moment in pair), Mark(Moment("after", "backward"), 1, 0))
    stage = StageBytes(Activations(marks, 7, code_bytes=9), held=100, aside=30)
    row = row_of("zb-h1", 1, rank=1)
    found = over_schedule(row, {1: stage}, {"b"}, sent_bytes=1000)
    assert (found.process_bytes, found.code_bytes) == (7, 9)
    units = (replace(units_of("zero3", 1)[0], name="a"), replace(units_of("zero3", 1)[0], name="b"))
    units = tuple(replace(one, flats=(replace(one.flats[0], name=one.name),)) for one in units)
    program = plan_step(units, found.trace)
    assert [str(block.moment) for block in program.micro_batch] == [str(mark.moment) for mark in found.marks]
    assert program.footprint(activations=found).activations
    by_moment = {str(mark.moment): mark.peak_bytes for mark in found.marks}
    assert by_moment["before forward a #0"] == 1010
    assert by_moment["before backward_input b #1"] == 1010 + 30  # of micro-batch 0 what its first half has left
    assert by_moment["before backward_weights b #0"] == 1030 + 5 + 30  # micro-batch 1 has left as much
    assert "before backward_weights a #0" not in by_moment


def test_the_heap_holds_what_micro_batches_in_flight_leave_in_it() -> None:
    """Of the 100 bytes of each forward 60 lie there, of one micro-batch at most 80. Two are in flight on the first of
    two ranks."""
    pair = [Moment("after", "forward", "a"), Moment("after", "backward", "a")]
    marks = (Mark(pair[0], 100, 100, 60), Mark(pair[1], 90, 0, 0), Mark(Moment("after", "backward"), 1, 0))
    stage = StageBytes(Activations(marks, 7, peak_heap_bytes=80), held=100)
    found = over_schedule(row_of("1f1b", 1, rank=0), {0: stage})
    assert found.peak_heap_bytes == 60 + 80
    by_moment = {str(mark.moment): mark.heap_bytes for mark in found.marks}
    assert [by_moment[f"after forward a #{batch}"] for batch in range(4)] == [60, 120, 120, 120]
    assert [by_moment[f"after backward a #{batch}"] for batch in range(4)] == [60, 60, 60, 0]


@varies
@settings(deadline=None, max_examples=drawn(25, 400))
@given(st.sampled_from(sorted(TABLES)), st.sampled_from(SCHEDULES), st.integers(0, 2**32), st.integers(1, 3))
def test_what_passes_the_check_is_right_and_nothing_else(
    name: str, schedule: tuple[str, int], seed: int, num_edits: int
) -> None:
    """Actions are moved at random, or left out. What the check lets through computes the same at whatever moment each
    communication is done, and what it refuses does not at some."""
    rng = random.Random(seed)
    step = planned(name, *schedule, num=2, rank=seed % 2)
    right = simulate(step.micro_batch, tuple(step.units), itertools.repeat(False))
    edited = [list(block.actions) for block in step.micro_batch]
    for _ in range(num_edits):
        filled = [at for at, actions in enumerate(edited) if actions]
        if not filled:
            return
        at = rng.choice(filled)
        action = edited[at].pop(rng.randrange(len(edited[at])))
        if rng.random() < 0.8:
            to = min(len(edited) - 1, max(0, at + rng.choice((-3, -1, 0, 0, 1, 3))))
            edited[to].insert(rng.randint(0, len(edited[to])), action)
    program = tuple(Block(block.moment, tuple(acts)) for block, acts in zip(step.micro_batch, edited, strict=True))

    def outcome(lates: object) -> object:
        try:
            return simulate(program, tuple(step.units), lates)
        except Wrong as error:
            return str(error)

    times = [itertools.repeat(False), itertools.repeat(True), (rng.random() < 0.5 for _ in itertools.count())]
    is_right = all(outcome(lates) == right for lates in times)
    try:
        check(program, step.units)
    except ProgramError:
        assert not is_right
    else:
        assert is_right
