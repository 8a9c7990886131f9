"""Programs in which something comes too late, too early or not at all are refused, with the block and the action."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_pass import Wrong, simulate
from strategies import ONE, TWO, flat, with_dtypes

from shardwise.errors import ProgramError
from shardwise.plan.placement import PRESETS, Span
from shardwise.plan.placement import Place as Row
from shardwise.program import (
    EFFECTS,
    Action,
    Block,
    FlatSpec,
    PlacedUpdate,
    Program,
    UnitSpec,
    Update,
    check,
    check_step,
    plan_step,
    straight_trace,
)
from shardwise.runtime import GradMover, ParamMover
from tests.thorough import drawn, varies

BUFFERS_BYTES = 64
AWAITED = {"full": "whole buffer", "param": "resting range"}
"""What a computation waits for, in words."""
Place = tuple[int, int]
"""Block and action, by number."""


HOST = Row(shard=("dp",), tier="host")
TABLES = {
    **PRESETS,
    "zero3, all on the host": replace(PRESETS["zero3-offload"], param=HOST, held=HOST),
    "zero2, all on the host": replace(PRESETS["offload"], param=Row(tier="host"), held=Row(tier="host")),
    "zero1, states on the host": replace(PRESETS["zero1"], optim=HOST),
    "zero1, gathered behind the step": PRESETS["zero1"],
    "zero3, states on a disk, the rest on the host": replace(PRESETS["infinity"], param=HOST, held=HOST),
}


def units_of(name: str, num: int = 3) -> tuple[UnitSpec, ...]:
    """Units with matrices that lie across ranks (unless they are updated one by one), the middle one with a frozen
    buffer too."""
    mesh = ONE if len(TABLES[name].axes) == 1 else TWO
    table = with_dtypes(TABLES[name], mesh)

    def trained(label: str) -> FlatSpec:
        plain = flat(label, table, mesh, 4)
        update = Update(matrix=(16, 15) if table.step == "device" else None)
        updates = (PlacedUpdate(Span(0, 240), update),)
        is_behind = "behind the step" in name
        return FlatSpec(plain.name, plain.numel, 1, plain.table, mesh, True, updates, overlaps_compute=is_behind)

    frozen = flat("h.1:frozen", table, mesh, trainable=False)
    return tuple(
        UnitSpec(f"h.{index}", (trained(f"h.{index}"), *((frozen,) if index == 1 else ()))) for index in range(num)
    )


def programs(name: str) -> Iterator[tuple[Program, Callable[[Program], None]]]:
    """The pass and the step of a preset, each with what checks it."""
    units = units_of(name)
    planned = plan_step(units, straight_trace(units), buffers_bytes=BUFFERS_BYTES)
    yield planned.micro_batch, lambda program: check(program, units)
    yield planned.step, lambda program: check_step(program, units, buffers_bytes=BUFFERS_BYTES)


def places(program: Program, are: Callable[[Action], bool] = lambda _: True) -> list[Place]:
    return [
        (at, index) for at, block in enumerate(program) for index, action in enumerate(block.actions) if are(action)
    ]


def without(program: Program, place: Place) -> Program:
    at, index = place
    block = program[at]
    left = Block(block.moment, block.actions[:index] + block.actions[index + 1 :])
    return (*program[:at], left, *program[at + 1 :])


def moved(program: Program, place: Place, to: Place) -> Program:
    """The action at `place` taken out, and put in before what is at `to` then."""
    action = program[place[0]].actions[place[1]]
    rest = without(program, place)
    at, index = to
    block = rest[at]
    with_it = Block(block.moment, (*block.actions[:index], action, *block.actions[index:]))
    return (*rest[:at], with_it, *rest[at + 1 :])


def refusal(program: Program, checked: Callable[[Program], None]) -> str:
    with pytest.raises(ProgramError) as caught:
        checked(program)
    return str(caught.value)


def assert_names_a_block(message: str, program: Program) -> None:
    moments = {str(block.moment) for block in program} | {"After the backward"}
    assert any(message.startswith(moment) for moment in moments), message
    assert re.search(r"'\w+ \S+ \w+|computes|back at rest|gradients of", message), message


@pytest.mark.parametrize("name", sorted(TABLES))
def test_an_action_left_out_is_refused(name: str) -> None:
    for program, checked in programs(name):
        checked(program)
        for place in places(program):
            assert_names_a_block(refusal(without(program, place), checked), program)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_an_action_done_twice_is_refused(name: str) -> None:
    for program, checked in programs(name):
        for at, index in places(program):
            actions = program[at].actions
            twice = Block(program[at].moment, (*actions[: index + 1], *actions[index:]))
            assert_names_a_block(refusal((*program[:at], twice, *program[at + 1 :]), checked), program)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_wait_before_what_it_waits_for_is_refused(name: str) -> None:
    for program, checked in programs(name):
        for place in places(program, lambda action: action.verb == "wait"):
            wait = program[place[0]].actions[place[1]]
            made = wait.effect.waits
            begun = [
                other
                for other in places(program, lambda one: one.effect.makes == made and one.flat == wait.flat)  # noqa: B023
                if other < place
            ]
            if not begun:
                assert wait.subject == "param", "the step before has begun it"
                continue
            message = refusal(moved(program, place, begun[-1]), checked)
            assert f"'{wait}'" in message


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_wait_behind_the_computation_that_it_is_for_is_refused(name: str) -> None:
    for program, checked in programs(name):
        for at, index in places(program, lambda action: action.verb == "wait" and action.subject in AWAITED):
            wait = program[at].actions[index]
            if program[at].moment.phase != "forward" and wait.subject == "param":
                continue  # in a step, where nothing computes with it
            message = refusal(moved(program, (at, index), (at + 1, 0)), checked)
            awaited = AWAITED[wait.subject]
            assert message.startswith(f"{program[at].moment}: {wait.flat} computes, but its {awaited} is still on")


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_free_before_its_wait_or_its_computation_is_refused(name: str) -> None:
    for program, checked in programs(name):
        for place in places(program, lambda action: action.verb == "free"):
            free = program[place[0]].actions[place[1]]
            home = max(
                at
                for at, block in enumerate(program[: place[0]])
                if block.moment.edge == "before" and block.moment.unit == free.flat.partition(":")[0]
            )
            wait = next(
                (at for at in places(program) if program[at[0]].actions[at[1]] == Action("wait", free.flat, "full")),
                None,
            )
            too_early = [(home, len(program[home].actions))] + ([wait] if wait is not None else [])
            for goal in too_early:
                assert_names_a_block(refusal(moved(program, place, goal), checked), program)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_reduction_before_its_gradients_are_there_is_refused(name: str) -> None:
    for program, checked in programs(name):
        for place in places(program, lambda action: action.subject == "grad" and action.verb != "wait"):
            action = program[place[0]].actions[place[1]]
            first = next(
                at
                for at in places(program)
                if program[at[0]].actions[at[1]].effect.makes == "sum"
                and program[at[0]].actions[at[1]].flat == action.flat
            )
            if first != place:
                continue
            message = refusal(moved(program, place, (place[0] - 1, 0)), checked)
            assert message.startswith(f"{program[place[0] - 1].moment}: '{action}', but ")


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_step_over_the_next_axis_before_the_last_is_waited_for_is_refused(name: str) -> None:
    for program, checked in programs(name):
        for at, index in places(
            program, lambda action: action.subject in ("range", "sum", "updated") and action.verb == "wait"
        ):
            actions = program[at].actions
            follows = next(i for i in range(index + 1, len(actions)) if actions[i].flat == actions[index].flat)
            message = refusal(moved(program, (at, index), (at, follows)), checked)
            assert message.startswith(f"{program[at].moment}: '{actions[follows]}', but its ")
            assert "still on its way by '" in message


def outcome(program: Program, units: tuple[UnitSpec, ...], is_late: Iterator[bool]) -> object:
    try:
        return simulate(program, units, is_late)
    except Wrong as error:
        return str(error)


@varies
@settings(deadline=None, max_examples=drawn(30, 150))
@given(st.sampled_from(sorted(TABLES)), st.integers(0, 2**32), st.integers(1, 3))
def test_what_passes_is_right_and_nothing_else(name: str, seed: int, num_edits: int) -> None:
    """Actions are moved at random. What the check lets through computes the same at whatever moment each
    communication is done, and what it refuses does not at some."""
    rng = random.Random(seed)
    units = units_of(name)
    program = plan_step(units, straight_trace(units)).micro_batch
    right = simulate(program, units, itertools.repeat(False))
    edited = program
    for _ in range(num_edits):
        every = places(edited)
        if not every:
            return
        place = rng.choice(every)
        at = min(len(program) - 1, max(0, place[0] + rng.choice((-2, -1, 0, 0, 1, 2))))
        edited = moved(edited, place, (at, rng.randint(0, len(edited[at].actions))))
    times = [itertools.repeat(False), itertools.repeat(True), (rng.random() < 0.5 for _ in itertools.count())]
    is_right = all(outcome(edited, units, is_late) == right for is_late in times)
    try:
        check(edited, units)
    except ProgramError:
        assert not is_right
    else:
        assert is_right


def test_an_update_behind_the_step_is_awaited_where_its_unit_computes_first() -> None:
    units = units_of("zero1, gathered behind the step")
    planned = plan_step(units, straight_trace(units))
    trained = ["h.0", "h.1", "h.2"]
    after = [(action.verb, action.subject) for action in planned.step[-1].actions]
    assert ("gather", "updated") in after
    assert ("wait", "param") not in after
    waits = [(str(block.moment), str(action)) for block in planned.micro_batch for action in block.actions]
    assert waits == [(f"before forward {name}", f"wait {name} param") for name in trained]
    evaluation = plan_step(units, straight_trace(units)[: 2 * len(units)], training=False)
    assert [str(action) for block in evaluation.micro_batch for action in block.actions] == [wait for _, wait in waits]


def test_the_simulation_finds_what_is_wrong() -> None:
    """Without a wait a late gather gives garbage, and an early one is not noticed: both extremes are needed."""
    units = units_of("zero3")
    program = plan_step(units, straight_trace(units)).micro_batch
    right = simulate(program, units, itertools.repeat(False))
    assert simulate(program, units, itertools.repeat(True)) == right
    [wait] = [place for place in places(program) if str(program[place[0]].actions[place[1]]) == "wait h.0 grad"]
    late = moved(program, wait, (wait[0], 0))
    assert simulate(late, units, itertools.repeat(True)) == right  # the last one may be waited for at any time
    [first, *_] = [place for place in places(program) if str(program[place[0]].actions[place[1]]) == "wait h.1 full"]
    with pytest.raises(Wrong):
        simulate(without(program, first), units, itertools.repeat(True))


PROVIDED = {
    ("agree", "verdict"),
    ("agree", "sums"),
    ("agree", "norms"),
    ("broadcast", "buffers"),
    ("update", "master"),
    ("compare", "checksums"),
    *(entry for entry in EFFECTS if entry[0] == "checksum"),
    ("mix", "master"),
} | {entry for entry in EFFECTS if entry[1] in ("update", "matrix", "states", "momentum", "signs", "outer", "anchor")}
"""What is not of one flat buffer, an optimizer's, or of islands: given to the executor by `sharded/assembly.py`."""


def test_the_runtime_has_a_method_for_every_effect_and_no_other() -> None:
    params, grads = (kind.moves(kind.__new__(kind)).keys() for kind in (ParamMover, GradMover))
    assert not params & grads
    assert params | grads == EFFECTS.keys() - PROVIDED


def test_every_effect_names_waits_that_there_are() -> None:
    for effect in EFFECTS.values():
        for subject in effect.awaited or ():
            assert EFFECTS["wait", subject].waits == effect.makes
