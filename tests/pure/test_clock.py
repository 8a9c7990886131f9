"""The clock on programs whose times can be computed by hand, and on all golden programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.errors import ConfigError, ProgramError
from shardwise.fit.clock import RankProgram, Timeline, time_ranks
from shardwise.fit.hardware import AttentionShare, Disk, Hardware, Host, Link, hardware
from shardwise.fit.operations import Operation, UnitWork, Work, Worked
from shardwise.fit.prices import COPIES_TO_DECODE, COPIES_TO_ENCODE, PRICES, Prices
from shardwise.fit.step_time import step_time
from shardwise.plan import Plan, PrecisionName
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import PRESETS, Codes, SumOfCodes, Wire, mesh_for, pack, padded_numel, table_for
from shardwise.program import (
    EFFECTS,
    Action,
    FlatSpec,
    Moment,
    PlacedUpdate,
    StepProgram,
    UnitSpec,
    parse,
    plan_step,
    schedule_trace,
    straight_passes,
    straight_trace,
    update_by,
)
from shardwise.program.schedule import Op, schedule_for, timed
from shardwise.system.telemetry.timeline import TRACKS
from tests.golden.refresh import programs

FAST = 1e30
NUMEL = 2**20
GATHERED = NUMEL * 4
"""Bytes of a whole buffer. Between two ranks half of it is sent by each, in a second."""
TOY = Hardware(
    name="toy",
    ranks_per_node=2,
    memory_bytes=1,
    memory_bytes_per_second=FAST,
    peak_flops={"fp32": 1.0, "bf16": 1.0},
    attention=AttentionShare(share=1),
    memory_share=1,
    local=Link(latency_seconds=0, bytes_per_second=GATHERED / 2, share=1),
    network=Link(latency_seconds=0, bytes_per_second=GATHERED / 2, share=1),
    host=Host(
        memory_bytes=1,
        memory_bytes_per_second=FAST,
        adam_elements_per_second=FAST,
        link_bytes_per_second=GATHERED / 2,
    ),
    disk=Disk(read_bytes_per_second=FAST, write_bytes_per_second=FAST),
)
"""Computes one operation a second, and moves or updates memory in no time."""


def computing(forward: float, backward: float | None = None, **more: float) -> UnitWork:
    """A forward of so many seconds on `TOY`; the default is a backward of twice as many."""

    def lasting(seconds: float) -> tuple[Operation, ...]:
        """Attention, because its FLOPs may be given apart from its shape."""
        return (Operation("attention", (1, 1, 1, 1), "fp32", seconds),) if seconds else ()

    parts = (forward, 2 * forward if backward is None else backward, more.get("weights", 0), more.get("recompute", 0))
    return UnitWork(*map(lasting, parts))


def units(names: str, mesh: Mesh, preset: str = "zero3", optimizer: str | None = None) -> tuple[UnitSpec, ...]:
    """One unit for each letter."""
    table = table_for(Plan(preset=preset), mesh).on(mesh)
    shape = (NUMEL // 256, 256)
    slots = pack([("weight", shape)])
    updates = (PlacedUpdate(slots[0].span, update_by(optimizer, shape, is_hidden=True)),) if optimizer else ()
    numel = padded_numel(slots, mesh.world_size)
    return tuple(UnitSpec(name, (FlatSpec(name, numel, 1, table, mesh, True, updates),)) for name in names)


TWO = Mesh.of({"dp": 2}, 2)
GATHERS_AHEAD = """
before forward a
    gather a param dp fp32 2097152 B @gather
    gather b param dp fp32 2097152 B @gather
    wait a full
after forward a
    free a full
before forward b
    wait b full
after forward b
    free b full
"""


def time_step(step: StepProgram, work: Work, on: Hardware, mesh: Mesh, num_micro_batches: int = 1) -> Timeline:
    """A step of ranks that all have the same program."""
    return time_ranks([RankProgram(step, work)], on, mesh, num_micro_batches=num_micro_batches)


def timed_program(text: str, seconds: dict[str, float], on: Hardware = TOY) -> Timeline:
    step = StepProgram(units("".join(seconds), TWO), parse(text), ())
    work = {name: computing(length) for name, length in seconds.items()}
    return time_step(step, work, on, TWO)


def test_a_gather_is_hidden_behind_computation_and_waited_for_where_it_is_not() -> None:
    timeline = timed_program(GATHERS_AHEAD, {"a": 3, "b": 3})
    assert timeline.step_seconds == pytest.approx(1 + 3 + 3)
    assert timeline.exposed == {"dp": pytest.approx(1)}
    spans = {(event.stream, event.text.split()[0], event.text.split()[1]): event for event in timeline.events}
    assert spans["gather", "gather", "b"].begin == pytest.approx(1)
    assert spans["gather", "gather", "b"].end == pytest.approx(2)
    assert spans["compute", "forward", "b"].begin == pytest.approx(4)
    waited = spans["compute", "wait", "a"]
    assert waited.waited_seconds == pytest.approx(1)
    assert waited.axis == "dp"
    assert waited.waited_for.startswith("gather a param dp")
    assert timeline.busy == {"compute": pytest.approx(6 / 7), "gather": pytest.approx(2 / 7)}


@pytest.mark.parametrize(
    ("verb", "codes", "num_ranks"),
    [
        ("gather", Codes("int8", 256), 2),
        ("reduce_scatter", Codes("int4", 128), 2),
        ("all_reduce", Codes("int4", 128), 2),
        ("all_reduce", Codes("int8", 256), 8),
    ],
)
def test_codes_take_the_time_of_their_bytes_and_computation(verb: str, codes: Codes, num_ranks: int) -> None:
    """Elements that are encoded and decoded by one rank are counted one by one."""
    mesh = Mesh.of({"dp": num_ranks}, num_ranks)
    way = SumOfCodes.cheapest(verb, codes, Wire("fp32"), NUMEL, num_ranks)
    own = NUMEL // num_ranks
    sent_bytes = (num_ranks - 1) * codes.num_bytes(own) if verb == "gather" else way.sent_bytes(NUMEL, num_ranks)
    encoded, decoded = (own, NUMEL) if verb == "gather" else (NUMEL, num_ranks * NUMEL)
    if verb == "reduce_scatter" or way.plain is not None:
        decoded = NUMEL
    subject = "param" if verb == "gather" else "grad"
    action = Action(verb, "a", subject, "dp", "fp32", sent_bytes, codes=str(way))  # type: ignore[arg-type]
    on = TOY.model_copy(update={"memory_bytes_per_second": 8.0, "ranks_per_node": num_ranks})
    cost = Prices(StepProgram(units("a", mesh), (), ()), on, mesh).of(action)
    assert cost.computing == pytest.approx(encoded * COPIES_TO_ENCODE + decoded * COPIES_TO_DECODE)
    assert cost.seconds == pytest.approx(sent_bytes / (GATHERED / 2))


PROCESSOR = TOY.model_copy(
    update={
        "memory_bytes_per_second": 8.0,
        "host": Host(memory_bytes=1, memory_bytes_per_second=FAST, adam_elements_per_second=FAST),
    }
)


@pytest.mark.parametrize(("verb", "rounds"), [("reduce_scatter", 1), ("all_reduce", 2)])
def test_processors_add_up_what_they_receive(verb: str, rounds: int) -> None:
    """The half of the other rank is read, and the sum read and written; devices add while they receive."""
    action = Action(verb, "a", "grad", "dp", "fp32", rounds * GATHERED // 2)  # type: ignore[arg-type]
    step = StepProgram(units("a", TWO), (), ())
    assert Prices(step, PROCESSOR, TWO).of(action).computing == pytest.approx(NUMEL / 2 * 3 * 4 / 8.0)
    assert Prices(step, TOY, TWO).of(action).computing == 0


@pytest.mark.parametrize(("verb", "rounds", "share"), [("reduce_scatter", 1, 0.5), ("all_reduce", 2, 1.0)])
def test_processors_allocate_sums_that_are_made_in_no_kept_buffer(verb: str, rounds: int, share: float) -> None:
    action = Action(verb, "a", "grad", "dp", "fp32", rounds * GATHERED // 2)  # type: ignore[arg-type]
    slow = PROCESSOR.model_copy(update={"fresh_blocks": ((GATHERED, 100.0),)})
    (unit,) = units("a", TWO)
    for keeps in (False, True):
        own = replace(unit, flats=(replace(unit.flats[0], keeps_grad_buffer=keeps),))
        costs = [Prices(StepProgram((own,), (), ()), on, TWO).of(action).computing for on in (PROCESSOR, slow)]
        assert costs[1] - costs[0] == pytest.approx(0 if keeps else 100.0 * share)


def test_processors_copy_their_own_part_into_a_sum_in_a_wider_dtype() -> None:
    """What arrives in bf16 is added to a copy of what is here in bf16."""
    (unit,) = units("a", TWO)
    table = table_for(Plan(preset="zero3", precision="bf16"), TWO).on(TWO)
    step = StepProgram((replace(unit, flats=(replace(unit.flats[0], table=table),)),), (), ())
    action = Action("reduce_scatter", "a", "grad", "dp", "fp32", NUMEL)
    copied, added = 2 + 4, 2 + 2 * 4
    assert Prices(step, PROCESSOR, TWO).of(action).computing == pytest.approx(NUMEL / 2 * (copied + added) / 8.0)


def test_gradients_that_wait_on_the_host_are_added_there() -> None:
    step = StepProgram(units("a", TWO, "offload"), (), ())
    action = Action("wait", "a", "grad")
    for on, computing in ((PROCESSOR, 3 * GATHERED / 2 / 8.0), (TOY, 0.0)):
        prices = Prices(step, on, TWO, num_micro_batches=2)
        assert prices.of(action).computing == pytest.approx(computing)
        assert Prices(step, on, TWO).of(action).computing == 0


def test_a_cast_that_adams_update_does_in_its_own_pass_is_free_and_others_are_not() -> None:
    slow = TOY.model_copy(update={"host": TOY.host.model_copy(update={"memory_bytes_per_second": 8.0})})  # type: ignore[union-attr]
    action = Action("cast", "a", "outgoing", dtype="bf16")
    for optimizer, is_free in ((None, True), ("adamw", True), ("lion", False), ("adamw-int8", False), ("lamb", False)):
        cost = Prices(StepProgram(units("a", TWO, "offload", optimizer), (), ()), slow, TWO).of(action)
        assert cost.computing == (0 if is_free else pytest.approx(NUMEL / 2 * (4 + 4) / 8.0)), optimizer


def test_a_step_says_what_its_updates_on_the_host_take_there() -> None:
    host = TOY.host.model_copy(update={"adam_elements_per_second": NUMEL / 4, "cores": 96})  # type: ignore[union-attr]
    on, work = TOY.model_copy(update={"host": host}), {"a": computing(1), "b": computing(1)}
    for preset, expected in (
        ("offload", "8.0 s of updates on the host, at 262.1 K elements a second for the 96 cores of a node"),
        ("zero3", None),
    ):
        named = units("ab", TWO, preset)
        step = plan_step(named, straight_trace(named))
        lines = list(step_time([RankProgram(step, work)], on, TWO, num_micro_batches=1).lines)
        found = [line for line in lines if "updates on the host" in line]
        assert [line.partition(", and fewer")[0] for line in found] == ([] if expected is None else [expected])


def test_what_overlaps_is_slowed_by_the_contention_of_the_hardware() -> None:
    timeline = timed_program(GATHERS_AHEAD, {"a": 3, "b": 3}, TOY.model_copy(update={"contention": 2.0}))
    gathered = next(event for event in timeline.events if event.text.startswith("gather b"))
    assert [gathered.begin, gathered.end] == pytest.approx([1, 3])  # at half its rate
    assert timeline.step_seconds == pytest.approx(1 + (2 + 2) + 3)  # one of three seconds of `a` took two


def test_two_actions_on_one_link_get_half_of_it_each() -> None:
    text = """
before forward a
    gather a param dp fp32 2097152 B @gather
    wait a full
after forward a
before backward a
after backward a
    reduce_scatter a grad dp fp32 2097152 B @reduce
    gather b param dp fp32 2097152 B @gather
before forward b
    wait b full
after forward b
after backward
    wait a grad
"""
    timeline = timed_program(text, {"a": 1, "b": 0})
    assert timeline.step_seconds == pytest.approx(1 + 3 + 2)
    ends = [event.end for event in timeline.events if event.stream in ("gather", "reduce")]
    assert sorted(ends) == pytest.approx([1, 6, 6])


def test_actions_of_one_stream_run_in_their_order() -> None:
    text = GATHERS_AHEAD.replace("    wait a full", "").replace("    wait b full", "    wait b full\n    wait a full")
    timeline = timed_program(text, {"a": 1, "b": 1})
    first, second = (event for event in timeline.events if event.stream == "gather")
    assert (first.text.split()[1], second.text.split()[1]) == ("a", "b")
    assert second.begin == pytest.approx(first.end)


def test_communication_of_the_model_itself_is_waited_for() -> None:
    mesh = Mesh.of({"dp": 1, "tp": 2}, 2)
    summed = Operation("all_reduce", num_bytes=GATHERED, axis="tp")
    step = plan_step(units("a", mesh), straight_trace(units("a", mesh)))
    timeline = time_step(step, {"a": UnitWork((*computing(2).forward, summed))}, TOY, mesh)
    assert timeline.step_seconds == pytest.approx(2 + 2, rel=1e-5)
    assert timeline.exposed["tp"] == pytest.approx(2, rel=1e-5)


@pytest.mark.parametrize(("computed", "step"), [(5, 5 + 2 * 0.5), (1, 1 * 1.5 + (2 - 1) + 2)])
def test_messages_that_overlap_are_waited_for_where_they_take_longer_than_what_is_computed(
    computed: float, step: float
) -> None:
    """A message of two seconds in the forward; both take half as long again while both go on."""
    mesh = Mesh.of({"dp": 1, "tp": 2}, 2)
    sent = Operation("all_reduce", num_bytes=GATHERED, axis="tp", overlaps=True)
    busy = TOY.model_copy(update={"contention": 1.5})
    program = plan_step(units("a", mesh), straight_trace(units("a", mesh)))
    work = {"a": UnitWork((*computing(computed).forward, sent), computing(1 if computed < 2 else 0).backward)}
    timeline = time_step(program, work, busy, mesh)
    assert timeline.step_seconds == pytest.approx(step, rel=1e-5)
    assert timeline.exposed.get("tp", 0.0) == pytest.approx(max(0, 2 - computed), abs=1e-5)


def test_offloaded_activations_leave_and_come_beside_the_computation() -> None:
    """Each copy takes a second, each computation one: what `b` leaves is fetched first, and nothing hides it."""
    moved = GATHERED / 2
    single = Mesh.of({"dp": 1}, 1)
    ab = units("ab", single)
    leaves = (*computing(1).forward, Operation("evict", num_bytes=moved, axis="host"))
    fetches = (Operation("fetch", num_bytes=moved, axis="host"), *computing(1).forward)
    moments = [block.moment for block in plan_step(ab, straight_trace(ab)).micro_batch]
    operations = {"after forward a": leaves, "after forward b": leaves, "after backward b": fetches}
    work = [Worked(moment, operations.get(str(moment), ())) for moment in moments]
    timeline = time_step(plan_step(ab, straight_trace(ab)), work, TOY, single)
    evicted = [event for event in timeline.events if event.stream == "evict"]
    assert [event.begin for event in evicted] == pytest.approx([1, 2])
    assert timeline.step_seconds == pytest.approx(1 + 1 + 1, rel=1e-5)  # fetched beside the last eviction


@pytest.mark.parametrize(
    ("preset", "precision", "num_ranks", "new"),
    [
        ("ddp", "fp32", 1, 0),  # each stays where autograd has made it
        ("ddp", "bf16", 1, 1),  # in fp32, where they wait for the step
        ("zero2", "fp32", 2, 4 * 0.5),  # sent from blocks that stay; sums of halves are new
        ("zero3", "fp32", 2, 4 * 1.5),  # sent from blocks that are given back
    ],
)
def test_how_often_gradients_are_written_to_new_pages(
    preset: str, precision: PrecisionName, num_ranks: int, new: float
) -> None:
    """In a step of four micro-batches, on processors."""
    mesh = Mesh.of({"dp": num_ranks}, num_ranks)
    table = table_for(Plan(preset=preset, precision=precision), mesh).on(mesh)
    (unit,) = units("a", mesh)
    unit = replace(unit, flats=(replace(unit.flats[0], table=table),))
    step = plan_step((unit,), straight_trace((unit,)))
    seconds = [
        time_step(step, {"a": computing(1)}, on, mesh, num_micro_batches=4).step_seconds
        for on in (PROCESSOR, PROCESSOR.model_copy(update={"fresh_blocks": ((GATHERED, 100.0),)}))
    ]
    assert seconds[1] - seconds[0] == pytest.approx(100.0 * new)


NEW_BLOCKS = ((2**19, 0.0), (2**20, 100.0))
ALLOCATING = (Operation("memory", kernels=0, allocated_bytes=(2**20,)),)
"""A block that takes 100 s in new pages, and no time in others."""


@pytest.mark.parametrize(
    ("preset", "num_ranks", "has_budget", "new"),
    [
        ("zero2", 2, False, 3),  # of forwards alone
        ("zero2", 2, True, 6),
        ("ddp", 1, False, 6),  # gradients stay where they are made, and would stay in the heap
    ],
)
def test_blocks_of_a_backward_have_pages_of_the_heap(preset: str, num_ranks: int, has_budget: bool, new: int) -> None:
    """Of three micro-batches, on processors: see [Note: blocks of a backward] in `system/heap.py`."""
    mesh = Mesh.of({"dp": num_ranks}, num_ranks)
    abc = units("a", mesh, preset)
    on = PROCESSOR.model_copy(update={"fresh_blocks": NEW_BLOCKS})
    seconds = [
        time_ranks(
            [RankProgram(plan_step(abc, straight_trace(abc)), {"a": work}, has_budget=has_budget)],
            on,
            mesh,
            num_micro_batches=3,
        ).step_seconds
        for work in (UnitWork(), UnitWork(ALLOCATING, ALLOCATING))
    ]
    assert seconds[1] - seconds[0] == pytest.approx(100.0 * new)


def test_gradients_in_new_pages_take_longer_than_in_a_kept_buffer() -> None:
    slow = TOY.model_copy(update={"fresh_blocks": ((2**20, 1.0),)})
    for keeps in (True, False):
        (unit,) = units("a", TWO)
        unit = replace(unit, flats=tuple(replace(flat, keeps_grad_buffer=keeps) for flat in unit.flats))
        step = plan_step((unit,), straight_trace((unit,)))
        seconds = {
            on.fresh_blocks: time_step(step, {"a": computing(1)}, on, TWO, num_micro_batches=2).step_seconds
            for on in (TOY, slow)
        }
        new_pages = seconds[slow.fresh_blocks] - seconds[()]
        assert new_pages == pytest.approx(0 if keeps else 2 * GATHERED / 2**20), "once in each backward"


def test_micro_batches_that_repeat_are_not_simulated_and_take_as_long() -> None:
    """Exact: a program with all micro-batches written out takes the same time."""
    for preset in PRESETS:
        two_axes = len(PRESETS[preset].axes) == 2
        mesh = mesh_for(Plan(preset=preset, mesh={"node": 2, "local": 2} if two_axes else None), 4)
        abc = units("abc", mesh, preset)
        step = plan_step(abc, straight_trace(abc))
        work = {"a": computing(2), "b": computing(3), "c": computing(1, recompute=2)}
        repeated = time_step(step, work, TOY, mesh, num_micro_batches=7)
        written = StepProgram(abc, step.micro_batch * 7, step.step, step.matrix_exchanges)
        assert repeated.ranks[0].num_repeated > 0
        at_once = time_ranks([RankProgram(written, work)], TOY, mesh)
        assert repeated.step_seconds == pytest.approx(at_once.step_seconds, rel=1e-9)
        assert repeated.exposed == pytest.approx(at_once.exposed, rel=1e-9)
        assert repeated.busy == pytest.approx(at_once.busy, rel=1e-9)
        assert repeated.mfu == pytest.approx(at_once.mfu, rel=1e-9)
        assert repeated.recompute_seconds == pytest.approx(at_once.recompute_seconds, rel=1e-9)


# -- pipelines --------------------------------------------------------------------------------------------


def pipeline(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    chunks: int = 1,
    message: float = 0,
    *,
    each: UnitWork | None = None,
    dp: int = 1,
    on: Hardware = TOY,
) -> Timeline:
    """A unit for each stage; a forward takes 1 s, a backward 2, of which 1 is for gradients of parameters."""
    schedule = schedule_for(name, num_ranks, num_micro_batches, chunks)
    mesh = Mesh.of({"pp": num_ranks, "dp": dp}, num_ranks * dp)
    programs = []
    for pp_rank, row in enumerate(schedule.rows):
        stages = sorted({op.stage for op in row})
        own = units("".join(chr(97 + stage) for stage in stages), mesh, "ddp")
        of_stage = {stage: (unit,) for stage, unit in zip(stages, own, strict=True)}
        step = plan_step(own, schedule_trace(row, straight_passes(row, of_stage)))
        work = {unit.name: each or computing(1, 1, weights=1) for unit in own}
        of_units = {unit.name: (stage,) for stage, (unit,) in of_stage.items()}
        sent = dict.fromkeys(range(schedule.num_stages), message)
        programs.append(RankProgram(step, work, pp_rank * dp, row, sent, of_units))
    return time_ranks(programs, on, mesh, num_micro_batches=num_micro_batches)


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_micro_batches", "chunks"),
    [("gpipe", 3, 4, 1), ("1f1b", 4, 8, 1), ("1f1b", 4, 2, 1), ("zb-h1", 4, 8, 1), ("interleaved", 4, 8, 2)],
)
def test_a_pipeline_takes_as_long_as_its_schedule(
    name: str, num_ranks: int, num_micro_batches: int, chunks: int
) -> None:
    timeline = pipeline(name, num_ranks, num_micro_batches, chunks)
    drawn = timed(schedule_for(name, num_ranks, num_micro_batches, chunks))
    assert timeline.step_seconds == pytest.approx(drawn.length, rel=1e-5)
    assert timeline.bubble == pytest.approx(drawn.bubble, rel=1e-5)
    for rank, spans in zip(timeline.ranks, drawn.spans, strict=True):
        ops = {event.text: event for event in rank.events if event.stream == "stages" and "wait" not in event.text}
        for op, begin, end in spans:
            event = ops[f"{op.kind}{op.micro_batch}@{op.stage}"]
            assert [event.begin, event.end] == pytest.approx([begin, end], abs=1e-6)


@pytest.mark.parametrize(("name", "new"), [("gpipe", (6 + 2, 6 + 2)), ("1f1b", (6 + 1, 6 + 0))])
def test_backwards_that_follow_a_forward_have_pages_of_the_heap(name: str, new: tuple[int, int]) -> None:
    """Of three micro-batches, each of which allocates two blocks in its forward, and one in its backward."""
    on = PROCESSOR.model_copy(update={"fresh_blocks": NEW_BLOCKS})
    every = [
        pipeline(name, 2, 3, each=work, dp=2, on=on).ranks
        for work in (UnitWork(), UnitWork(2 * ALLOCATING, ALLOCATING))
    ]
    allocating = [after.busy["compute"] - before.busy["compute"] for before, after in zip(*every, strict=True)]
    assert allocating == pytest.approx([100.0 * num for num in new])


def test_messages_take_time_between_stages() -> None:
    """With one micro-batch nothing hides them: three there, three back, a second each."""
    plain, with_messages = pipeline("1f1b", 4, 1), pipeline("1f1b", 4, 1, message=GATHERED / 2)
    assert plain.step_seconds == pytest.approx(4 * 3, rel=1e-5)
    assert with_messages.step_seconds == pytest.approx(4 * 3 + 6, rel=1e-5)


@pytest.mark.parametrize("at_once", [True, False])
def test_gradients_that_stages_share_are_exchanged_before_the_norm(at_once: bool) -> None:
    """Each rank sends its own to the two others, two seconds each: one after the other, and all ranks at once. A rank
    that is timed alone waits for nobody else."""
    mesh, schedule = Mesh.of({"pp": 3, "dp": 1}, 3), schedule_for("1f1b", 3, 1)
    programs = []
    for pp_rank, row in enumerate(schedule.rows):
        own = units(f"{'abc'[pp_rank]}t", mesh, "ddp")
        step = plan_step(own, schedule_trace(row, straight_passes(row, {pp_rank: own[:1]})))
        of_units = {"abc"[pp_rank]: (pp_rank,), "t": (pp_rank,)}
        sent = dict.fromkeys(range(2), 0.0)
        programs.append(RankProgram(step, {own[0].name: computing(1)}, pp_rank, row, sent, of_units, {"t": (0, 1, 2)}))
    shown = programs if at_once else [replace(programs[0], row=())]
    plain = [replace(one, holders={}) for one in shown]
    (with_shared, *_), (without, *_) = (time_ranks(some, TOY, mesh).ranks for some in (shown, plain))
    assert with_shared.seconds - without.seconds == pytest.approx(4, rel=1e-3)  # padded for three ranks
    assert with_shared.exposed["pp"] - without.exposed.get("pp", 0) == pytest.approx(4, rel=1e-3)
    assert "add gradients t" in [event.text for event in with_shared.events]


def test_gathers_behind_a_step_are_hidden_by_the_next_one() -> None:
    """Of `zero1` on devices, alone and in a pipeline: each unit's gather is waited for where it is used next."""

    def seconds(mesh: Mesh, *, overlaps: bool) -> float:
        programs = []
        num_stages = mesh.size("pp") if "pp" in mesh.axes else 1
        schedule = schedule_for("1f1b", num_stages, 2)
        for pp_rank, row in enumerate(schedule.rows):
            plain = units("abc", mesh, "zero1")
            own = tuple(
                replace(unit, flats=tuple(replace(flat, overlaps_compute=overlaps) for flat in unit.flats))
                for unit in plain
            )
            trace = straight_trace(own)
            if num_stages > 1:
                trace = schedule_trace(row, straight_passes(row, {pp_rank: own}))
            step = plan_step(own, trace)
            work = {unit.name: computing(2) for unit in own}
            ops = row if num_stages > 1 else ()
            programs.append(RankProgram(step, work, pp_rank * 2, ops, {0: 0.0}))
        return time_ranks(programs, TOY, mesh, num_micro_batches=2).step_seconds

    alone = Mesh.of({"dp": 2}, 2)
    assert seconds(alone, overlaps=False) - seconds(alone, overlaps=True) == pytest.approx(2, rel=1e-4)  # but the first
    staged = Mesh.of({"pp": 2, "dp": 2}, 4)
    assert seconds(staged, overlaps=True) < seconds(staged, overlaps=False) - 1


def test_a_message_without_bytes_is_an_error() -> None:
    mesh = Mesh.of({"pp": 2, "dp": 1}, 2)
    schedule = schedule_for("1f1b", 2, 1)
    own = units("a", mesh, "ddp")
    step = plan_step(own, schedule_trace(schedule.rows[0], straight_passes(schedule.rows[0], {0: own})))
    program = RankProgram(step, {"a": computing(1)}, 0, schedule.rows[0])
    with pytest.raises(ProgramError, match="message after F0@0 has no price"):
        time_ranks([program, replace(program, rank=1, row=(Op("F", 0, 1), Op("B", 0, 1)))], TOY, mesh)


def test_ranks_that_do_the_same_are_one() -> None:
    """100,000 ranks have as many events as 8."""

    def events(num_ranks: int) -> int:
        mesh = Mesh.of({"dp": num_ranks}, num_ranks)
        ab = units("ab", mesh)
        step = plan_step(ab, straight_trace(ab))
        timeline = time_step(step, {"a": computing(1), "b": computing(1)}, hardware("h100-sxm").with_ranks(8), mesh)
        assert len(timeline.ranks) == 1
        return len(timeline.events)

    assert events(100_000) == events(8)


# -- every action -----------------------------------------------------------------------------------------


def test_every_action_of_the_vocabulary_has_a_price() -> None:
    assert PRICES.keys() == EFFECTS.keys()


@pytest.mark.parametrize("preset", ["zero3", "offload"])
@pytest.mark.parametrize("optimizer", ["lamb", "muon", "adafactor"])
def test_every_action_of_a_program_is_timed_in_its_order_with_its_bytes(preset: str, optimizer: str) -> None:
    mesh = mesh_for(Plan(preset=preset), 4)
    abc = units("abc", mesh, preset, optimizer)
    check_times(plan_step(abc, straight_trace(abc), buffers_bytes=1024), mesh)


GOLDEN = {name: one for name, one in programs().items() if "pp" not in one.mesh.axes}
"""One stage of a pipeline has no time without the others."""


@pytest.mark.parametrize("name", GOLDEN)
def test_every_action_of_a_golden_program_is_timed_in_its_order_with_its_bytes(name: str) -> None:
    check_times(GOLDEN[name].step, GOLDEN[name].mesh)


def check_times(step: StepProgram, mesh: Mesh) -> None:
    """What the timeline moves is what the footprint's walk and the byte counts see: the same actions, in their order on
    each stream."""
    step.footprint()
    timeline = time_step(step, {unit.name: computing(1) for unit in step.units}, TOY.with_ranks(2), mesh)
    planned = [action for block in (*step.micro_batch, *step.step) for action in block.actions]
    by_stream: dict[str, list[str]] = {}
    for action in planned:
        if action.communicates or action.copies:
            stream = action.verb if action.subject == "states" else action.stream
            by_stream.setdefault(stream, []).append(str(action))
    timed_by_stream: dict[str, list[str]] = {}
    for event in timeline.events:
        words = event.text.split()
        if (words[0], words[2:3]) in [(verb, [subject]) for verb, subject in EFFECTS if verb != "wait"]:
            action = Action.parse(event.text)
            is_its_codes = event.stream == "compute" != action.stream  # what it computes beside what it sends
            if (action.communicates or action.copies) and not is_its_codes:
                timed_by_stream.setdefault(event.stream, []).append(event.text)
    assert timed_by_stream == by_stream
    prices = Prices(step, TOY.with_ranks(2), mesh)
    assert [action for action in planned if action.sent_bytes and not prices.of(action).seconds] == []
    moved = sum(Action.parse(text).sent_bytes for texts in timed_by_stream.values() for text in texts)
    assert moved == step.sent_bytes() + sum(step.copied_bytes().values())


def test_what_has_no_price_is_named() -> None:
    ab = units("ab", TWO)
    step = plan_step(ab, straight_trace(ab))
    with pytest.raises(ProgramError, match=r"work of unit 'b' is not known, so 'after forward b' has no time"):
        time_step(step, {"a": computing(1)}, TOY, TWO)
    work = {"a": computing(1), "b": UnitWork((Operation("product", (1, 1, 1), "fp8", 2),))}
    with pytest.raises(ConfigError, match=r"'toy' has no rate for fp8: peak_flops has fp32, bf16"):
        time_step(step, work, TOY, TWO)
    on_disk = units("ab", TWO, "infinity")
    step = plan_step(on_disk, straight_trace(on_disk))
    work = {name: computing(1) for name in "ab"}
    with pytest.raises(ConfigError, match="'toy' has no disk"):
        time_step(step, work, TOY.model_copy(update={"disk": None}), TWO)
    strange = StepProgram(ab, parse("before forward c\n    gather c param dp fp32 8 B\nafter forward c"), ())
    with pytest.raises(ProgramError, match="'gather c param dp fp32 8 B' has no price: the flat buffer 'c'"):
        time_step(strange, {"c": computing(1)}, TOY, TWO)


def test_work_counted_in_another_order_is_refused() -> None:
    a = units("a", TWO)
    step = plan_step(a, straight_trace(a))
    with pytest.raises(ProgramError, match="'after forward a' was not counted"):
        time_step(step, [Worked(Moment("after", "forward", "z"))], TOY, TWO)


def test_the_trace_has_the_tracks_and_names_of_a_measured_one(tmp_path: Path) -> None:
    ab = units("ab", TWO)
    step = plan_step(ab, straight_trace(ab))
    timeline = time_step(step, {"a": computing(1), "b": computing(1)}, TOY, TWO)
    timeline.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if "cat" in event} <= set(TRACKS)
    names = {(event["cat"], event["name"]) for event in events if event.get("ph") == "b"}
    assert {
        ("units", "forward a"),
        ("units", "backward b"),
        ("on the way", "a param"),
        ("on the way", "b grad"),
    } <= names
    opened = sum({"b": 1, "e": -1}.get(event["ph"], 0) for event in events)
    assert opened == 0
