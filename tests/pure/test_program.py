"""Programs: text that parses back, a check that refuses, passes that change when but never what."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ONE, TWO, flat, placed, traces, unit_lists, with_dtypes

from shardwise.errors import ProgramError
from shardwise.plan import Plan, PowerSGD
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import PRESETS, WIDTH, Span, table_for
from shardwise.program import (
    AFTER_STEP,
    BEFORE_STEP,
    EFFECTS,
    END_OF_BACKWARD,
    LEAST_APART_BYTES,
    NUM_KEPT_BLOCKS,
    Action,
    Activations,
    Block,
    FactoredMatrix,
    FlatSpec,
    Footprint,
    Held,
    Mark,
    Moment,
    PlacedUpdate,
    Program,
    StepProgram,
    Trace,
    UnitSpec,
    Update,
    build_pass,
    check,
    ends_of_messages,
    overlap,
    parse,
    plan_step,
    prefetch,
    render,
    straight_trace,
)
from shardwise.program.action import COPYING, Edge, Phase, Stream
from shardwise.program.footprint import GAP_BYTES
from shardwise.program.low_rank import MESSAGE_OF_GRADIENTS
from shardwise.system.heap import HEAP_BLOCK_BYTES
from tests.thorough import drawn, varies

# --- text --------------------------------------------------------------------------------------------

NAMES = st.text(min_size=1, max_size=8)  # a module may have any name without a dot
UNITS = st.just("") | NAMES
MOMENTS = st.builds(
    Moment, st.sampled_from(get_args(Edge)), st.sampled_from(get_args(Phase)), UNITS, st.none() | st.integers(0, 999)
)


@st.composite
def actions(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Action:
    """Any action that the library can make: those without an axis have no dtype, bytes or stream either."""
    (verb, subject), name = draw(st.sampled_from(sorted(EFFECTS))), draw(NAMES)
    has_bytes = EFFECTS[verb, subject].sends or verb in COPYING
    if not has_bytes and draw(st.booleans()):
        return Action(verb, name, subject)
    sent = draw(st.integers(0, 2**50)) if has_bytes else 0
    dtype, over = draw(st.sampled_from([*WIDTH, "-"])), draw(NAMES.filter(lambda name: name != "-"))
    return Action(verb, name, subject, over, dtype, sent, draw(st.sampled_from(get_args(Stream))))


PROGRAMS = st.lists(st.builds(Block, MOMENTS, st.lists(actions(), max_size=4).map(tuple)), max_size=5).map(tuple)


@given(MOMENTS)
def test_a_moment_parses_back(moment: Moment) -> None:
    assert Moment.parse(str(moment)) == moment


@given(actions())
def test_an_action_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(PROGRAMS)
def test_a_program_parses_back(program: Program) -> None:
    assert parse(render(program)) == program


def test_comments_and_blank_lines_are_passed_over() -> None:
    text = "# a title\n\nbefore forward h.0\n    # why\n    gather h.0 param dp bf16 96 B @gather\n\n"
    gather = Action("gather", "h.0", "param", "dp", "bf16", 96, "gather")
    assert parse(text) == (Block(Moment("before", "forward", "h.0"), (gather,)),)


@pytest.mark.parametrize("text", ["amid forward h.0", "before lunch", "before forward a b", "gather h.0"])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(ProgramError, match=f"'{text}' is not a moment; one reads like 'before forward h.0'"):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "grab h.0 full",
        "gather h.0",
        "gather h.0 everything dp bf16",
        "gather h.0 full dp",
        "wait",
        "gather h.0 full dp int3",
        "gather h.0 full dp bf16 many B",
        "gather h.0 full dp bf16 9 B @gahter",
    ],
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ProgramError, match=f"'{text}' is not an action; one reads like 'gather h.0"):
        Action.parse(text)


# --- check -------------------------------------------------------------------------------------------


def units_of(name: str, mesh: Mesh | None = None, *, num: int = 3, **dtypes: Any) -> tuple[UnitSpec, ...]:
    mesh = mesh or (ONE if len(PRESETS[name].axes) == 1 else TWO)
    table = with_dtypes(PRESETS[name], mesh, **dtypes)
    return tuple(UnitSpec(f"h.{index}", (flat(f"h.{index}", table, mesh),)) for index in range(num))


def planned(units: tuple[UnitSpec, ...], **options: Any) -> StepProgram:
    return plan_step(units, straight_trace(units), **options)


def edited(program: Program, moment: str, edit: Callable[[list[Action]], Iterable[Action]]) -> Program:
    """`program` with other actions at `moment`."""
    assert [str(block.moment) for block in program].count(moment) == 1
    return tuple(
        Block(block.moment, tuple(edit(list(block.actions)))) if str(block.moment) == moment else block
        for block in program
    )


def without(text: str) -> Callable[[list[Action]], list[Action]]:
    """Drop the one action that begins with `text`."""

    def drop(actions: list[Action]) -> list[Action]:
        [dropped] = [action for action in actions if str(action).startswith(text)]
        return [action for action in actions if action is not dropped]

    return drop


def with_first(text: str) -> Callable[[list[Action]], list[Action]]:
    return lambda actions: [Action.parse(text), *actions]


def with_last(text: str) -> Callable[[list[Action]], list[Action]]:
    return lambda actions: [*actions, Action.parse(text)]


@pytest.mark.parametrize(
    ("moment", "edit", "message"),
    [
        (
            "before forward h.1",
            without("wait h.1 full"),
            "before forward h.1: h.1 computes, but its whole buffer is still on its way.",
        ),
        ("before forward h.0", without("gather h.1"), "'wait h.1 full', but nothing of it is on its way (not there)."),
        ("before forward h.0", with_last("gather h.0 param dp bf16 0 B"), "but its whole buffer is there already."),
        (
            "before forward h.0",
            with_last("gather h.2 param pd bf16 0 B"),
            "but its next step is 'gather h.2 param dp bf16",
        ),
        ("before forward h.0", with_first("gather x param dp bf16 0 B"), "but there is no flat buffer 'x'."),
        (
            "after forward h.0",
            with_last("free h.0 full"),
            "after forward h.0: 'free h.0 full', but its whole buffer is not there.",
        ),
        ("after forward h.0", with_last("wait h.2 grad"), "but nothing of it is on its way (not there)."),
        ("after backward h.1", without("free h.1 full"), "After the backward h.1 are not back at rest."),
        ("after backward h.1", without("wait h.2 grad"), "the gradients of h.2 are still on their way."),
        ("after backward h.1", without("reduce_scatter h.1"), "but nothing of it is on its way (not there)."),
        ("after backward", with_last("reduce_scatter h.1 grad dp fp32 0 B"), "but nothing of it is left to reduce."),
    ],
)
def test_a_broken_zero3_program_is_refused(moment: str, edit: Any, message: str) -> None:
    units = units_of("zero3")
    program = planned(units).micro_batch
    check(program, units)
    with pytest.raises(ProgramError, match=re.escape(message)):
        check(edited(program, moment, edit), units)


def test_a_gradient_that_is_never_reduced_is_refused() -> None:
    units = units_of("zero2")
    program = tuple(
        Block(block.moment, tuple(action for action in block.actions if action.flat != "h.1"))
        for block in planned(units).micro_batch
    )
    with pytest.raises(ProgramError, match=r"After the backward the gradients of h\.1 are not reduced\."):
        check(program, units)


def test_a_gather_over_two_axes_needs_both() -> None:
    units = units_of("hpz")
    program = planned(units, prefetch_bytes=0).micro_batch
    broken = edited(program, "before forward h.1", lambda actions: actions[:2])
    with pytest.raises(
        ProgramError, match=r"h\.1 computes, but its whole buffer is there in part: 'gather h\.1 param local"
    ):
        check(broken, units)


def test_what_rests_whole_is_never_freed() -> None:
    units = units_of("ddp")
    program = edited(planned(units).micro_batch, "after forward h.0", with_last("free h.0 full"))
    with pytest.raises(ProgramError, match="it rests whole and is never freed"):
        check(program, units)


def test_two_steps_of_a_reduction_need_a_wait_between() -> None:
    units = units_of("hsdp")
    program = planned(units).micro_batch
    with pytest.raises(ProgramError, match=r"its sum is still on its way by 'reduce_scatter h\.2 grad local"):
        check(edited(program, "after backward h.1", without("wait h.2 sum")), units)


# --- every table, every trace ------------------------------------------------------------------------


@varies
@settings(deadline=None, max_examples=drawn(50, 300))
@given(st.data())
def test_every_trace_of_every_table_passes_the_check(data: st.DataObject) -> None:
    mesh, table = data.draw(placed())
    units = data.draw(unit_lists(mesh, table))
    trace = data.draw(traces(units))
    budget = data.draw(st.just("auto") | st.integers(0, 3 * max(unit_bytes(units))))
    plan = plan_step(units, trace, prefetch_bytes=budget)  # checks
    assert [block.moment for block in plan.micro_batch] == [*trace, END_OF_BACKWARD]
    assert parse(render(plan.micro_batch)) == plan.micro_batch
    assert plan.footprint().working >= 0


@settings(deadline=None)
@given(st.data())
def test_an_evaluation_leaves_everything_at_rest(data: st.DataObject) -> None:
    mesh, table = data.draw(placed())
    units = data.draw(unit_lists(mesh, table))
    trace = data.draw(traces(units, training=False))
    program = plan_step(units, trace, training=False).micro_batch
    verbs = Counter((action.verb, action.flat) for block in program for action in block.actions)
    for unit in units:
        for one in unit.flats:
            assert verbs["gather", one.name] == len(one.table.param.shard) * verbs["free", one.name]
    assert not any(action.subject in ("grad", "held") for block in program for action in block.actions)
    assert END_OF_BACKWARD not in [block.moment for block in program]


@varies
@settings(deadline=None, max_examples=drawn(40, 200))
@given(st.data())
def test_prefetching_changes_when_and_never_what(data: st.DataObject) -> None:
    mesh, table = data.draw(placed())
    units = data.draw(unit_lists(mesh, table))
    training = data.draw(st.booleans())
    trace = data.draw(traces(units, training=training))
    full_bytes = {one.name: one.full_bytes for unit in units for one in unit.flats}
    budget = data.draw(st.integers(0, 4 * max(full_bytes.values())))
    plain = build_pass(units, trace, training=training)
    ahead = prefetch(plain, full_bytes, budget)
    assert counted(ahead) == counted(plain) == counted(overlap(plain), but="wait")
    assert prefetch(plain, full_bytes, 0) == plain
    assert most_ahead(plain, ahead, full_bytes) <= budget
    check(overlap(ahead), units)


def test_the_next_unit_is_on_its_way_by_default() -> None:
    units = units_of("zero3")
    program = {str(block.moment): block.actions for block in planned(units).micro_batch}
    assert [str(action).split(" param")[0] for action in program["before forward h.0"]] == [
        "gather h.0",
        "gather h.1",
        "wait h.0 full",
    ]
    assert [action.flat for action in program["before backward h.1"] if action.verb == "gather"] == ["h.0"]


@pytest.mark.parametrize("num_ahead", [0.5, 1, 3, 12, 20, 40, 1000])
def test_gathers_run_as_far_ahead_as_the_budget_allows(num_ahead: float) -> None:
    """However far, also past the blocks that are looked at one by one: to the first block before a computation from
    which on there is room, behind their last use."""
    table = with_dtypes(PRESETS["zero3"], ONE)
    units = tuple(UnitSpec(f"h.{index}", (flat(f"h.{index}", table, ONE, 1 + index % 3),)) for index in range(48))
    full_bytes = {one.name: one.full_bytes for unit in units for one in unit.flats}
    budget, plain = int(num_ahead * max(full_bytes.values())), build_pass(units, straight_trace(units))
    ahead, last_use, goals = [0] * len(plain), dict[str, int](), list[tuple[int, str]]()
    for home, block in enumerate(plain):
        for action in (one for one in block.actions if one.verb == "gather"):
            goal, num_bytes = home, full_bytes[action.flat]
            for index in range(home - 1, last_use.get(action.flat, -1), -1):
                if ahead[index] + num_bytes > budget:
                    break
                goal = index if plain[index].moment.edge == "before" else goal
            ahead[goal:home] = [one + num_bytes for one in ahead[goal:home]]
            goals.append((goal, action.flat))
        last_use.update((action.flat, home) for action in block.actions)
    found = prefetch(plain, full_bytes, budget)
    places = [(index, one.flat) for index, block in enumerate(found) for one in block.actions if one.verb == "gather"]
    assert sorted(places) == sorted(goals)
    assert (places != [(home, one.flat) for home, block in enumerate(plain) for one in block.actions]) == (budget > 0)


def test_a_unit_with_two_buffers_is_on_its_way_as_a_whole() -> None:
    table = with_dtypes(PRESETS["zero3"], ONE)
    units = tuple(
        UnitSpec(name, (flat(name, table, ONE), flat(f"{name}:frozen", table, ONE, trainable=False)))
        for name in ("a", "b")
    )
    program = {str(block.moment): block.actions for block in planned(units).micro_batch}
    gathered = [action.flat for action in program["before forward a"] if action.verb == "gather"]
    assert gathered == ["a", "a:frozen", "b", "b:frozen"]


def unit_bytes(units: Sequence[UnitSpec]) -> list[int]:
    return [sum(one.full_bytes for one in unit.flats) for unit in units]


def counted(program: Program, but: str = "") -> Counter[Action]:
    actions = (action for block in program for action in block.actions if action.verb != but)
    return Counter(action.on("compute") for action in actions)


def most_ahead(plain: Program, ahead: Program, full_bytes: dict[str, int]) -> int:
    """The most bytes gathered, or in flight, before the block for which they are due."""
    due = {}
    for name in full_bytes:
        homes = [index for index, block in enumerate(plain) for _ in gathers_of(block, name)]
        issued = [index for index, block in enumerate(ahead) for _ in gathers_of(block, name)]
        due[name] = set(zip(issued, homes, strict=True))
    return max(
        sum(full_bytes[name] for name, pairs in due.items() for start, home in pairs if start <= index < home)
        for index in range(len(plain))
    )


def gathers_of(block: Block, name: str) -> list[Action]:
    return [action for action in block.actions if (action.verb, action.flat) == ("gather", name)]


# --- shapes of traces that models have ---------------------------------------------------------------


def trace_of(text: str) -> Trace:
    """`> a` before and `< a` after, forward until the bar and backward behind it."""
    forward, _, backward = text.partition("|")
    moments = []
    for phase, part in (("forward", forward), ("backward", backward)):
        words = part.split()
        moments += [
            Moment("before" if edge == ">" else "after", phase, unit)
            for edge, unit in zip(words[::2], words[1::2], strict=True)
        ]
    return tuple(moments)


def verbs_at(program: Program) -> list[str]:
    """What happens to which flat buffer, block by block, in one line each."""
    return [" ".join(f"{action.verb}:{action.flat}" for action in block.actions) for block in program]


def plain_pass(text: str, *, training: bool = True, name: str = "zero3") -> list[str]:
    trace = trace_of(text)
    table = with_dtypes(PRESETS[name], ONE)
    units = [UnitSpec(unit, (flat(unit, table, ONE),)) for unit in sorted({moment.unit for moment in trace})]
    program = build_pass(units, trace, training=training)
    check(overlap(program), units)
    return verbs_at(program)


def test_the_last_unit_stays_whole_for_its_backward() -> None:
    assert plain_pass("> a < a > b < b | > b < b > a < a") == [
        "gather:a",
        "free:a",
        "gather:b",
        "",
        "",
        "free:b reduce_scatter:b",
        "gather:a",
        "free:a reduce_scatter:a",
        "",
    ]


def test_a_unit_used_twice_in_a_row_stays_whole_and_is_gathered_again_otherwise() -> None:
    assert plain_pass("> a < a > a < a > b < b", training=False)[:4] == ["gather:a", "", "", "free:a"]
    apart = plain_pass("> a < a > b < b > a < a", training=False)
    assert apart == ["gather:a", "free:a", "gather:b", "free:b", "gather:a", "free:a"]


def test_a_unit_around_others_stays_whole_meanwhile() -> None:
    trace = "> rest > a < a > b < b < rest | > rest > b < b > a < a < rest"
    assert plain_pass(trace) == [
        "gather:rest",
        "gather:a",
        "free:a",
        "gather:b",
        "",
        "",
        "",
        "",
        "free:b reduce_scatter:b",
        "gather:a",
        "free:a reduce_scatter:a",
        "free:rest reduce_scatter:rest",
        "",
    ]


def test_a_unit_that_has_no_backward_is_freed_at_the_end() -> None:
    assert plain_pass("> a < a > b < b > b < b | > a < a")[-1] == ""
    assert plain_pass("> a < a > b | > b < b")[-1] == ""
    assert plain_pass("> a < a > b")[-1] == "free:b"


def test_what_is_kept_whole_is_gathered_once_however_often_it_is_used() -> None:
    blocks = plain_pass("> a < a > b < b > a < a | > a < a > b < b", name="zero3-kept")
    assert blocks[:6] == ["gather:a", "", "gather:b", "", "", ""]
    assert plain_pass("> a < a > b < b | > b < b", name="zero3-kept")[-1] == "free:a"


def test_a_second_use_takes_what_is_held_nearby() -> None:
    """hpz: the second forward of a shared block gathers over the fast axis alone, as its backward does."""
    units = units_of("hpz", num=2)
    trace = trace_of("> h.0 < h.0 > h.1 < h.1 > h.0 < h.0 > h.1 < h.1 | > h.1 < h.1 > h.0 < h.0")
    gathers = [action for block in build_pass(units, trace) for action in block.actions if action.verb == "gather"]
    assert [f"{one.flat} {one.subject} {one.over}" for one in gathers] == [
        "h.0 param node",
        "h.0 param local",
        "h.1 param node",
        "h.1 param local",
        "h.0 held local",
        "h.1 held local",
        "h.0 held local",
    ]


def test_a_backward_in_two_parts_reduces_twice() -> None:
    """Reentrant checkpointing runs a backward inside a backward: a unit may be through more than once."""
    for name in PRESETS:
        units = units_of(name)
        trace = (*straight_trace(units), *straight_trace(units)[-2:])
        check(plan_step(units, trace).micro_batch, units)


def test_frozen_units_are_gathered_and_never_reduced() -> None:
    for name in PRESETS:
        [unit] = units_of(name, num=1)
        frozen = replace(unit, flats=tuple(replace(one, trainable=False) for one in unit.flats))
        plan = planned((frozen,), buffers_bytes=8)
        assert not any(action.subject == "grad" for block in plan.micro_batch for action in block.actions)
        assert plan.step[0].actions == ()
        held = plan.footprint()
        assert (held.grad, held.optim) == (0, 0)


def test_what_is_frozen_of_a_unit_around_the_model_is_freed_when_the_backward_ends() -> None:
    """See [Note: blind calls] in `runtime/hooks.py`: nothing tells when it is read for the last time."""
    table = with_dtypes(PRESETS["zero3"], ONE)
    around = UnitSpec("a", (flat("a", table, ONE), flat("a:frozen", table, ONE, trainable=False)), spans_model=True)
    freed: list[list[str]] = []
    for unit in (around, replace(around, spans_model=False)):
        program = {str(block.moment): block.actions for block in planned((unit, *units_of("zero3"))).micro_batch}
        moments = ("after backward a", "after backward")
        freed += [[action.flat for action in program[at] if action.verb == "free"] for at in moments]
    assert freed == [["a"], ["a:frozen"], ["a", "a:frozen"], []]


def test_a_module_name_may_hold_a_colon() -> None:
    table = with_dtypes(PRESETS["zero3"], ONE)
    units = tuple(
        UnitSpec(name, (flat(name, table, ONE), flat(f"{name}:frozen", table, ONE, trainable=False)))
        for name in ("a:b", "a")
    )
    planned(units)


# --- the step ----------------------------------------------------------------------------------------


def step_verbs(name: str, **options: Any) -> list[list[str]]:
    program = planned(units_of(name, num=2), **options).step
    assert [block.moment for block in program] == [BEFORE_STEP, AFTER_STEP]
    return [[f"{action.verb} {action.flat}" for action in block.actions] for block in program]


def test_communication_of_a_step_overlaps_that_of_the_next_buffer() -> None:
    before, after = step_verbs("zero1")
    assert before == [
        "reduce_scatter h.0",
        "reduce_scatter h.1",
        "wait h.0",
        "wait h.1",
        "agree *",
    ]
    assert after == ["cast h.0", "gather h.0", "cast h.1", "gather h.1", "wait h.0", "wait h.1"]


def test_a_step_ends_with_the_buffers_if_there_are_any() -> None:
    assert step_verbs("zero3")[1] == ["cast h.0", "cast h.1"]
    assert step_verbs("zero3", buffers_bytes=8)[1] == ["cast h.0", "cast h.1", "broadcast *"]


def test_one_rank_sends_nothing() -> None:
    alone = Mesh(("dp",), (1,))
    for name, one in PRESETS.items():
        mesh = alone if len(one.axes) == 1 else Mesh(("node", "local"), (1, 1))
        assert planned(units_of(name, mesh), buffers_bytes=8).sent_bytes() == 0


# --- bytes -------------------------------------------------------------------------------------------

NUMEL = 64 * 1024
"""Elements of each flat buffer below, on four ranks."""


def wide_units(name: str, num: int = 3, mesh: Mesh | None = None, **dtypes: Any) -> tuple[UnitSpec, ...]:
    return tuple(
        replace(unit, flats=tuple(replace(one, numel=NUMEL) for one in unit.flats))
        for unit in units_of(name, mesh, num=num, **dtypes)
    )


def agreed_bytes(sizes: Sequence[int], num_params: int) -> int:
    """The verdict: an all-reduce per axis of the squared norm, what is left, and a flag per parameter, in fp32."""
    return sum(2 * (size - 1) * -(-(num_params + 2) // size) * 4 for size in sizes)


@pytest.mark.parametrize(
    ("name", "sixteenths"),
    [
        # per unit, in sixteenths of its bytes in bf16: n-1 of n on dp=4, 1 of 2 on each axis of 2 x 2
        ("ddp", 3 * 2 * 12),  # all-reduce
        ("zero1", 3 * (12 + 12)),  # reduce-scatter, and new parameters gathered
        ("zero2", 3 * (12 + 12)),
        ("zero3", 2 * (12 + 12 + 12) + (12 + 12)),  # two gathers and a reduce-scatter; the last unit stays whole
        ("zero3-kept", 3 * (12 + 12)),
        # gather halves twice, reduce-scatter a half, all-reduce the other half over nodes
        ("hsdp", 2 * (8 + 8 + 8 + 2 * 4) + (8 + 8 + 2 * 4)),
        # gather quarters over nodes and halves within, halves again for the backward, reduce-scatter both
        ("hpz", 2 * ((4 + 8) + 8 + (8 + 4)) + ((4 + 8) + (8 + 4))),
    ],
)
def test_bytes_sent_are_what_one_counts_by_hand(name: str, sixteenths: int) -> None:
    plan = planned(wide_units(name))
    sizes = [4] if len(PRESETS[name].axes) == 1 else [2, 2]
    assert plan.sent_bytes() == sixteenths * NUMEL * 2 // 16 + agreed_bytes(sizes, num_params=3)


@pytest.mark.parametrize("name", ["zero2", "zero1"])
def test_what_is_sent_per_micro_batch_counts_as_often(name: str) -> None:
    plan = planned(wide_units(name))
    scatter = 3 * NUMEL * 2 * 3 // 4
    assert plan.sent_bytes(5) - plan.sent_bytes(1) == (4 * scatter if name == "zero2" else 0)


# --- footprint ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "param", "grad", "optim"),
    [
        # bytes per element, times four ranks: bf16 parameters, fp32 gradients, fp32 master and two states
        ("ddp", 8, 16, 48),
        ("zero1", 8, 16, 12),
        ("zero2", 8, 4, 12),
        ("zero3", 2, 4, 12),
        ("zero3-kept", 2, 4, 12),
        ("hsdp", 4, 8, 24),
        ("hpz", 2, 4, 12),
    ],
)
def test_bytes_at_rest_are_what_one_counts_by_hand(name: str, param: int, grad: int, optim: int) -> None:
    promise = planned(wide_units(name)).footprint()
    quarter = 3 * NUMEL // 4
    assert (promise.param, promise.grad, promise.optim) == (param * quarter, grad * quarter, optim * quarter)
    assert promise.total == promise.param + promise.grad + promise.optim + promise.working


def test_without_a_second_dtype_the_parameter_is_its_own_master() -> None:
    units = units_of("ddp", num=1, compute="fp32")
    promise = planned(units).footprint(states_per_param=1)
    assert promise.param == promise.optim == units[0].flats[0].numel * 4


def test_one_unit_works_in_what_it_gathers_and_reduces() -> None:
    """zero3, one unit of N elements on four ranks: N whole in bf16 and its gradient in bf16, and when the whole
    is freed the gradient with what arrives of three others and the sum in fp32."""
    [unit] = wide_units("zero3", num=1)
    plan = planned((unit,))
    grad = NUMEL // 4 * 4
    in_backward = NUMEL * 2 + NUMEL * 2
    in_reduction = NUMEL * 2 + 3 * (NUMEL // 4) * 2 + NUMEL // 4 * 4
    assert plan.footprint(states_per_param=0).working == max(in_backward, in_reduction) - grad


def test_activations_are_counted_at_the_moment_when_everything_is_most() -> None:
    """zero3, two units of N elements on four ranks."""
    units = wide_units("zero3", num=2)
    trace = straight_trace(units)
    first, second = (unit.name for unit in units)

    def foreseen(at: str, peak: int, num_micro_batches: int = 1) -> Footprint:
        moments = [*trace, END_OF_BACKWARD]
        marks = tuple(Mark(moment, peak if str(moment) == at else 100, 100) for moment in moments)
        return plan_step(units, trace).footprint(
            activations=Activations(marks, 7), states_per_param=0, num_micro_batches=num_micro_batches
        )

    whole, fresh, shard = NUMEL * 2, NUMEL * 2, NUMEL // 4 * 4
    held = foreseen(f"after backward {second}", 10**9)
    assert (held.activations, held.process, str(held.peak_at)) == (10**9, 7, f"after backward {second}")
    assert held.working == 2 * whole + fresh  # both are gathered
    assert held.grad == 0
    held = foreseen(f"before forward {first}", 10**9, num_micro_batches=2)
    assert held.grad == 2 * shard  # of the micro-batch before
    assert held.working == 0
    without = plan_step(units, trace).footprint(states_per_param=0)
    assert (without.activations, without.process, without.peak_at) == (None, 0, None)
    assert list(without.by_kind) == ["param", "grad", "optim", "working"]


def test_gradients_that_stay_where_they_are_made_count_once_they_have_come() -> None:
    """One unit of N elements on one rank, whose gradients come in two halves."""
    alone = Mesh(("dp",), (1,))
    [unit] = units = wide_units("ddp", num=1, mesh=alone, compute="fp32")
    trace = straight_trace(units)
    name, half, whole = unit.flats[0].name, NUMEL // 2 * 4, NUMEL * 4

    def held(*beside: int, is_known: bool = True, num_micro_batches: int = 1, come: int = 0) -> Footprint:
        """With the most bytes beside gradients before the first, the second, and after both have come; so many bytes as
        `come` are freed after the moment behind them."""
        awaited = [((name, numel),) for numel in (NUMEL, NUMEL // 2, 0)]
        peaks = tuple(map(Held, beside, awaited)) if is_known else ()
        marks = {moment: Mark(moment, 0, 0) for moment in (*trace, END_OF_BACKWARD)}
        before, after = (Moment(edge, "backward", unit.name) for edge in ("before", "after"))
        marks[before] = Mark(before, 0, beside[0], awaited=awaited[0] if is_known else ())
        marks[after] = Mark(after, max(beside), come, peaks=peaks, come_bytes=come)
        marks[END_OF_BACKWARD] = Mark(END_OF_BACKWARD, come, 0, peaks=(Held(0, ()),) if come else ())
        found = plan_step(units, trace).footprint(
            activations=Activations(tuple(marks.values())), states_per_param=0, num_micro_batches=num_micro_batches
        )
        return replace(found, param=0, optim=0)

    most = 10 * NUMEL
    assert held(most, 5 * NUMEL, 0).total == most
    assert held(most, 9 * NUMEL, 0).total == held(most, 9 * NUMEL, 0, come=2 * whole).total == 9 * NUMEL + half
    assert held(most, 9 * NUMEL, 8 * NUMEL).total == 8 * NUMEL + whole
    assert (held(most, 9 * NUMEL, 0).activations, held(most, 9 * NUMEL, 0).grad) == (9 * NUMEL, half)
    assert held(most, 9 * NUMEL, 0, is_known=False).total == most + whole
    second = held(most, 9 * NUMEL, 0, num_micro_batches=2)
    assert second.total == most + whole, "they are added to those of the first, which are there"


def test_what_freed_activations_leave_in_the_heap_is_promised() -> None:
    """Two units whose gradients have all come when the activations are gone, which the heap does not return."""
    units = wide_units("zero3", num=2)
    trace = straight_trace(units)
    moments = [*trace, END_OF_BACKWARD]
    middle = len(trace) // 2
    heap = NUMEL

    def foreseen(heap_bytes: int, at_the_middle: int) -> Footprint:
        marks = tuple(
            Mark(moment, at_the_middle if index == middle else 0, 0, heap_bytes if index == middle else 0)
            for index, moment in enumerate(moments)
        )
        activations = Activations(marks, 7, peak_heap_bytes=heap_bytes)
        return plan_step(units, trace).footprint(activations=activations, states_per_param=0)

    without, beside, gaps = foreseen(0, 0), foreseen(heap, 0), min(GAP_BYTES, heap)
    assert (without.process, beside.process) == (7, 7 + heap + gaps)
    assert beside.total == without.total + heap + gaps
    used = foreseen(heap, 10**9)
    assert used.total == foreseen(0, 10**9).total + gaps, "the peak is where the heap is used"


def test_gaps_between_activations_in_the_heap_are_promised_on_whatever_tier_they_are() -> None:
    units = wide_units("zero3", num=2)
    trace = straight_trace(units)
    marks = tuple(Mark(moment, 0, 0) for moment in (*trace, END_OF_BACKWARD))
    activations = Activations(marks, 7, host_bytes=2 * NUMEL, host_heap_bytes=NUMEL)
    held = plan_step(units, trace).footprint(activations=activations, states_per_param=0)
    assert held.process == 7 + NUMEL
    assert held.host is not None
    assert held.host.activations == 2 * NUMEL
    activations = Activations(marks, 7, host_bytes=2 * NUMEL, host_heap_bytes=2 * GAP_BYTES)
    held = plan_step(units, trace).footprint(activations=activations, states_per_param=0)
    assert held.process == 7 + GAP_BYTES, "there are not the more the larger it is"


def test_gaps_between_gradients_that_stay_in_the_heap_are_promised() -> None:
    """Of two parameters, one of which has a block from the system for its gradient."""
    alone, large = Mesh(("dp",), (1,)), HEAP_BLOCK_BYTES // 4
    [unit] = wide_units("ddp", num=1, mesh=alone, compute="fp32")
    updates = tuple(PlacedUpdate(span, Update()) for span in (Span(0, 1000), Span(1000, 1000 + large)))
    flats = tuple(replace(flat, numel=1000 + large, updates=updates) for flat in unit.flats)
    units = (replace(unit, flats=flats),)
    trace = straight_trace(units)
    marks = tuple(Mark(moment, 0, 0) for moment in (*trace, END_OF_BACKWARD))
    for on_cpu, gaps in ((True, 4000), (False, 0)):
        held = plan_step(units, trace).footprint(activations=Activations(marks, 7, on_cpu))
        assert held.process == 7 + gaps


def test_pages_of_libraries_are_promised_once_for_the_ranks_of_a_host() -> None:
    units = wide_units("zero3", num=2)
    trace = straight_trace(units)
    marks = tuple(Mark(moment, 0, 0) for moment in (*trace, END_OF_BACKWARD))
    step = plan_step(units, trace)
    alone, shared = (
        step.footprint(activations=Activations(marks, 7, code_bytes=100), local_size=size) for size in (1, 4)
    )
    assert (alone.process, shared.process) == (107, 32)


@pytest.mark.parametrize("preset", ["zero3", "zero3-kept", "zero2", "hsdp"])
def test_what_ranks_of_a_host_read_in_place_takes_nothing_when_it_is_gathered(preset: str) -> None:
    """By hand: of parameters in pieces, what is gathered or held is not there."""
    units = wide_units(preset, num=3)
    (flat,) = units[0].flats
    world = flat.mesh.world_size
    planned = plan_step(units, straight_trace(units))
    apart, together = planned.footprint(), planned.footprint(local_size=world)
    in_pieces = bool(flat.table.param.shard)
    assert together.working < apart.working, "nor is what others send of gradients received"
    assert apart.total - apart.working == together.total - together.working
    if in_pieces:
        line = max(abs(one - rank) for rank in range(world) for one in flat.mesh.among(rank, flat.table.param.shard))
        assert planned.footprint(local_size=line) == apart, "a line that no host has whole is gathered"


def test_gradients_that_ranks_of_a_host_read_in_place_are_not_received_and_a_ranks_own_lie_in_the_sum() -> None:
    """zero3, one unit of N elements on two ranks: half of the gradients to be read, and half where the sum is made."""
    numel = 2 * LEAST_APART_BYTES
    mesh = Mesh(("dp",), (2,))

    def working(dtype: str, numel: int, local_size: int) -> int:
        units = tuple(
            replace(unit, flats=tuple(replace(one, numel=numel) for one in unit.flats))
            for unit in units_of("zero3", mesh, num=1, compute=dtype)
        )
        return planned(units).footprint(states_per_param=0, local_size=local_size).working

    grad = numel // 2 * 4
    assert working("fp32", numel, 2) == numel * 4 - grad
    assert working("fp32", numel, 1) == 2 * numel * 4 - grad, "whole, with the other's part and the sum"
    assert working("bf16", numel, 2) == numel * 2 + grad - grad, "the sum is in fp32, so that nothing lies there"
    assert working("fp32", 64, 2) == 64 * 4 + 32 * 4 - 32 * 4, "too little to be worth it"


def test_blocks_that_are_kept_for_messages_are_promised_where_parameters_stay() -> None:
    units = wide_units("zero2", num=3)
    trace = straight_trace(units)
    marks = tuple(Mark(moment, 10**9 if index == 0 else 0, 0) for index, moment in enumerate((*trace, END_OF_BACKWARD)))
    held = plan_step(units, trace).footprint(activations=Activations(marks))
    assert (held.activations, held.working) == (10**9, NUM_KEPT_BLOCKS * NUMEL * 2)
    alone = wide_units("offload", num=3, mesh=Mesh(("dp",), (1,)))
    held = plan_step(alone, trace).footprint(activations=Activations(marks))
    assert held.working == NUMEL * WIDTH[alone[0].flats[0].table.grad_wire.dtype], (
        "what is only copied to the host leaves its block to the next"
    )
    sizes = {alone[0].name: NUMEL // 2, alone[1].name: NUMEL}
    uneven = tuple(
        replace(unit, flats=tuple(replace(one, numel=sizes.get(unit.name, NUMEL // 4)) for one in unit.flats))
        for unit in alone
    )
    assert plan_step(uneven, trace).footprint(activations=Activations(marks)).working == held.working
    staged = wide_units("offload", num=3, mesh=Mesh(("dp", "pp"), (1, 2)))
    held = plan_step(staged, trace).footprint(activations=Activations(marks))
    assert held.working == 0, "what stages leave in fp32, to be sent in bf16, is in no such block"
    on_gpu = plan_step(units, trace).footprint(activations=Activations(marks, on_cpu=False))
    assert (on_gpu.activations, on_gpu.working) == (10**9, 0)  # it has no blocks of shared memory


def test_activations_of_another_order_are_refused() -> None:
    units = wide_units("zero3", num=2)
    marks = tuple(Mark(moment, 0, 0) for moment in straight_trace(units[:1]))
    with pytest.raises(ProgramError, match="rehearsed in another order"):
        plan_step(units, straight_trace(units)).footprint(activations=Activations(marks))


def test_looking_ahead_costs_what_lies_ahead() -> None:
    units = wide_units("zero3", num=4)
    trace = tuple(moment for moment in straight_trace(units) if moment.phase == "forward")
    working = [
        plan_step(units, trace, prefetch_bytes=num * NUMEL * 2, training=False).footprint().working for num in (0, 1, 2)
    ]
    grad = 4 * NUMEL // 4 * 4  # a promise has room for gradients, which an evaluation does not use
    assert working == [max(0, num * NUMEL * 2 - grad) for num in (1, 2, 3)]


def factored_units(*names: str) -> list[UnitSpec]:
    table = table_for(Plan(preset="ddp", powersgd=PowerSGD(rank=1, start_step=0)), ONE).on(ONE)
    matrix = FactoredMatrix(0, Span(0, 64), 8, 8, 1)
    return [UnitSpec(name, (FlatSpec(name, 64, 1, table, ONE, factored=(matrix,)),)) for name in names]


def test_factors_of_several_buffers_are_one_message() -> None:
    """Three have as many gradients as one message is for; the fourth comes with the end of the backward."""
    units = factored_units("a", "b", "c", "d")
    program = overlap(
        build_pass(units, straight_trace(tuple(units))), dict.fromkeys("abcd", MESSAGE_OF_GRADIENTS // 3 + 1)
    )
    check(program, units)
    assert [text for text in verbs_at(program) if text] == [
        "project:d",
        "project:c",
        "project:b",
        "wait:d wait:c wait:b restore:d restore:c restore:b project:a",
        "wait:d wait:c wait:b wait:a restore:a wait:a",
    ]
    actions = {
        (number, place): str(action)
        for number, block in enumerate(program)
        for place, action in enumerate(block.actions)
    }
    last = [actions[position].split()[:2] for position in sorted(ends_of_messages(program))]
    assert last == [["project", "b"], ["restore", "b"], ["project", "a"], ["restore", "a"]]


def test_factors_do_not_wait_for_others_while_their_unit_computes_again() -> None:
    units = factored_units("a", "b")
    trace = trace_of("> a < a > b < b > a < a | > a < a > b < b > a < a")
    program = overlap(build_pass(units, trace), dict.fromkeys("ab", 1))
    check(program, units)
    assert [text for text in verbs_at(program) if text] == [
        "project:a",
        "project:b",
        "wait:a wait:b restore:a restore:b wait:a wait:b",
        "project:a",
        "wait:a restore:a wait:a",
    ]
