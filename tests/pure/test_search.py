"""The search over plans, on a model that is made of arithmetic: what it finds, prunes, refuses and says."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import pytest

from shardwise.errors import ConfigError
from shardwise.fit.candidates import Bounds, Candidate, Load, Size, Space, candidates, wires_of
from shardwise.fit.clock import RankProgram
from shardwise.fit.hardware import Hardware, hardware
from shardwise.fit.least_steps import Least, Run
from shardwise.fit.operations import Operation, UnitWork, product
from shardwise.fit.search import Evaluated, Found, Limits, Objective, search
from shardwise.fit.step_time import step_time
from shardwise.plan import Plan, PolicyName, PrecisionName
from shardwise.plan.placement import mesh_for, table_for
from shardwise.program import (
    END_OF_BACKWARD,
    Activations,
    FlatSpec,
    Mark,
    UnitSpec,
    plan_step,
    schedule_trace,
    straight_passes,
    straight_trace,
)
from shardwise.program.in_flight import StageBytes, over_schedule
from shardwise.program.schedule import SCHEDULES, schedule_of
from shardwise.system.even_parts import divisors
from tests.thorough import sampled, soak, thorough_only

GIB = 2**30


@dataclass
class Blocks:
    """`num` equal blocks, each of 12 width^2 parameters as in a transformer, on sequences of `length` tokens."""

    num: int = 32
    width: int = 4096
    length: int = 4096
    num_rows: int = 1024
    hardware: Hardware = field(default_factory=lambda: hardware("h100-sxm"))
    num_asked: int = 0

    @property
    def numel(self) -> int:
        return 12 * self.width**2

    def row_bytes(self, policy: PolicyName) -> float:
        """Of one block and sample."""
        kept = {"keep": 34, "selective": 20, "recompute": 2, "offload": 2}[policy]
        return kept * self.width * self.length

    def work(self, rows: int, tp: int, policy: PolicyName) -> UnitWork:
        tokens, width = rows * self.length, self.width
        forward = product(tokens, 12 * width // tp, width, "bf16", 2)
        sums = (Operation("all_reduce", num_bytes=2 * tokens * width, axis="tp"),) * 2 if tp > 1 else ()
        again = {"recompute": (forward,), "selective": (product(tokens, 3 * width // tp, width, "bf16", 2),)}
        moved = {"offload": (Operation("evict", num_bytes=32 * tokens * width // tp, axis="host", kernels=0),)}
        back = {"offload": (Operation("fetch", num_bytes=32 * tokens * width // tp, axis="host", kernels=0),)}
        return UnitWork(
            (forward, *sums, *moved.get(policy, ())),
            (*back.get(policy, ()), forward, forward, *sums),
            (),
            again.get(policy, ()),
        )

    def size(self, policy: PolicyName, precision: PrecisionName | None) -> Size:
        again = {"recompute": 1.0, "selective": 0.25}.get(policy, 0.0)
        flops = (3 + again) * 2 * self.length * self.numel * self.num
        seconds = flops / self.hardware.peak("bf16")
        return Size(
            self.num * self.numel,
            self.num * self.numel,
            self.numel,
            self.num,
            2,
            seconds,
            self.num * self.row_bytes(policy),
            self.num * 32 * self.width * self.length if policy == "offload" else 0.0,
            32 * self.width * self.length if policy == "offload" else 0.0,
            blocks_row_bytes=self.num * self.row_bytes(policy),
        )

    def check(self, candidate: Candidate) -> None:
        if self.width % candidate.size("tp"):
            raise ConfigError(f"{self.width} columns do not divide among {candidate.size('tp')} ranks")

    def confirm(self, candidate: Candidate) -> Evaluated:
        return self.evaluate(candidate)

    def least(self, candidate: Candidate, *, itself: bool = False) -> Least:
        work = self.work(candidate.rows, candidate.size("tp"), candidate.policy)
        computed = [one for one in (*work.forward, *work.backward, *work.recompute) if one.kind == "product"]
        seconds, stages = sum(map(self.hardware.operation_seconds, computed)), candidate.size("pp")
        waits = SCHEDULES[candidate.schedule].waits * (stages - 1) / candidate.chunks
        held = self.num / stages * self.row_bytes(candidate.policy) * candidate.rows / candidate.size("tp")
        return Least((Run(self.num * seconds / stages * (candidate.accumulate + waits)),), (Load(1.0, held),))

    def blocks_by_rank(self, candidate: Candidate) -> Sequence[int]:
        return [self.num // candidate.size("pp")] * candidate.size("pp")

    def held(self, candidate: Candidate, enough: int | None = None) -> int:
        return 0

    def timed(self, candidate: Candidate) -> Evaluated:
        return self.evaluate(candidate)

    def relieved(self, candidate: Candidate, limits: Limits) -> Candidate:
        raise ConfigError(f"Half of {candidate} does not fit {limits} either.")

    def evaluate(self, candidate: Candidate, base: Plan | None = None) -> Evaluated:
        self.num_asked += 1
        tp, pp = candidate.size("tp"), candidate.size("pp")
        plan = candidate.plan(base or Plan(precision="bf16"))
        mesh = mesh_for(plan, candidate.world_size, self.hardware.ranks_per_node)
        table = table_for(plan, mesh).on(mesh)
        align = math.lcm(8, table.align) * mesh.num_replicas
        numel = -(-self.numel // tp // align) * align
        work = self.work(candidate.rows, tp, candidate.policy)
        row_bytes = self.row_bytes(candidate.policy) * candidate.rows / tp
        schedule = schedule_of(plan, pp) if pp > 1 else None
        ranks, held = [], []
        for place in range(pp):
            names = [f"h.{place}.{index}" for index in range(self.num // pp)]
            units = tuple(
                UnitSpec(name, (FlatSpec(name, numel, 1, table, mesh, overlaps_compute=True),)) for name in names
            )
            trace = straight_trace(units)
            live, marks = 0.0, []
            for moment in trace:
                before = live
                live += row_bytes * {"after forward": 1, "after backward": -1}.get(f"{moment.edge} {moment.phase}", 0)
                marks.append(Mark(moment, int(max(live, before)), int(live)))
            marks.append(Mark(END_OF_BACKWARD, 0, 0))
            if schedule is None:
                counted = Activations(tuple(marks), on_cpu=False)
                ranks.append(RankProgram(plan_step(units, trace), dict.fromkeys(names, work)))
            else:
                row = schedule.rows[place]
                stages = sorted({op.stage for op in row})
                of_stage = {stage: units[at :: len(stages)] for at, stage in enumerate(stages)}
                bytes_of = {}
                for stage, some in of_stage.items():
                    own = tuple(mark for mark in marks if mark.moment.unit in {"", *(unit.name for unit in some)})
                    bytes_of[stage] = StageBytes(Activations(own, on_cpu=False), int(row_bytes * len(some)))
                counted = over_schedule(row, bytes_of, set(names))
                step = plan_step(units, schedule_trace(row, straight_passes(row, of_stage)))
                sent = dict.fromkeys(range(schedule.num_stages), 2 * candidate.rows * self.length * self.width)
                where = {unit.name: (stage,) for stage, some in of_stage.items() for unit in some}
                rank = mesh.rank({**dict.fromkeys(mesh.axes, 0), "pp": place})
                ranks.append(RankProgram(step, dict.fromkeys(names, work), rank, row, sent, where))
            held.append(
                ranks[-1].step.footprint(num_micro_batches=plan.accumulate, activations=counted, states_per_param=2)
            )
        time_of = step_time(ranks, self.hardware, mesh, num_micro_batches=plan.accumulate)
        host = max(one.host_total for one in held)
        return Evaluated(
            time_of.timeline.step_seconds,
            max(one.total for one in held),
            host * min(8, candidate.world_size),
            parts=time_of.breakdown,
            mfu=time_of.timeline.mfu,
        )


BF16 = Plan(precision="bf16")
LIMITS = Limits(72 * GIB, 1800 * GIB)
SMALL = Space(activations=("keep", "recompute"), schedules=(("1f1b", 1),))


def found(blocks: Blocks, world_size: int, limits: Limits = LIMITS, **more: object) -> Found:
    return search(blocks, world_size, limits, base=BF16, **more)  # type: ignore[arg-type]


def test_divisors() -> None:
    assert divisors(100_000)[-1] == 100_000
    assert all(
        divisors(number) == [one for one in range(1, number + 1) if number % one == 0] for number in range(1, 60)
    )


@thorough_only("slow; smaller tests beside it cover the same code")
def test_no_bound_is_above_what_is_found() -> None:
    """Or a candidate could be pruned that is the best."""
    blocks = Blocks(num=8, width=1024, length=1024, num_rows=64)
    sizes = {(policy, None): blocks.size(policy, None) for policy in Space().activations}
    bounds = Bounds(BF16, blocks.hardware, sizes, blocks.blocks_by_rank)
    every = list(candidates(16, 8, blocks.num_rows, blocks.num, BF16, Space()))
    for candidate in every[:: len(every) // 40]:
        bound, exact = bounds.of(candidate), blocks.evaluate(candidate)
        assert bound.device_bytes <= 1.001 * exact.device_bytes, candidate
        assert bound.host_bytes <= 1.001 * exact.host_bytes + 1, candidate
        assert bound.seconds <= 1.001 * exact.seconds, candidate
        least = blocks.least(candidate)
        num_bytes = bound.bytes_with(least.loads, grad_waits=candidate.has_gradients_beside)
        assert least.seconds <= 1.001 * exact.seconds, candidate
        assert num_bytes <= 1.001 * exact.device_bytes, candidate


def test_what_goes_to_the_host_bounds_a_step() -> None:
    """On a slow link that is all of it, so that none of these plans has to be evaluated."""
    machine = hardware("h100-sxm")
    assert machine.host is not None
    host = machine.host.model_copy(update={"link_bytes_per_second": 1e9})
    blocks = Blocks(num=4, width=1024, num_rows=16, hardware=machine.model_copy(update={"host": host}))
    space = Space(presets=("zero1", "zero2"), activations=("keep", "offload"), schedules=(("1f1b", 1),), shares=False)
    sizes = {(one, None): blocks.size(one, None) for one in space.activations}
    bounds = Bounds(BF16, blocks.hardware, sizes, blocks.blocks_by_rank)
    for candidate in candidates(8, 8, blocks.num_rows, blocks.num, BF16, replace(space, rows=(1,))):
        if candidate.policy == "offload":
            assert 0.4 < bounds.of(candidate).seconds / blocks.evaluate(candidate).seconds <= 1.001, candidate
    chosen = found(blocks, 8, space=space)
    moved = [one for one in chosen.evaluated if one.candidate.policy == "offload"]
    assert [one.candidate for one in moved] == [replace(chosen.best[0].candidate, policy="offload")]


def test_no_bound_of_stages_on_a_slow_network_is_above_what_is_found() -> None:
    """A pipeline gathers what is held of parameters once a step, and a unit stays whole from one pass to the next."""
    blocks = Blocks(num=8, width=1024, length=64, num_rows=32, hardware=with_network(1e8))
    space = Space(presets=("zero2", "zero3", "zero3-kept", "hpz"), axes=("pp",), activations=("keep",), rows=(1,))
    bounds = Bounds(BF16, blocks.hardware, {("keep", None): blocks.size("keep", None)}, blocks.blocks_by_rank)
    num = 0
    for candidate in candidates(32, 8, blocks.num_rows, blocks.num, BF16, space):
        num += candidate.size("pp") > 1
        bound, exact = bounds.of(candidate), blocks.evaluate(candidate)
        assert bound.seconds <= 1.001 * exact.seconds, candidate
        assert bound.device_bytes <= 1.001 * exact.device_bytes, candidate
        if candidate.preset == "zero3-kept":  # parameters are whole, however few micro-batches there are
            blocks_held = (blocks.num - 1) / candidate.size("pp")
            assert bound.device_bytes > 2 * blocks.numel * blocks_held, candidate
    assert num > 20


NARROW = wires_of(("int8", "int4", "param=int8"), "--wires")


def with_network(bytes_per_second: float) -> Hardware:
    machine = hardware("h100-sxm")
    slow = {"bytes_per_second": bytes_per_second, "node_bytes_per_second": bytes_per_second}
    return machine.model_copy(update={"network": machine.network.model_copy(update=slow)})


def test_no_bound_of_narrow_wires_is_above_what_is_found() -> None:
    """Over a network that is all that counts, for each way to send a model, on one axis and on two."""
    blocks = Blocks(num=2, width=1024, length=64, num_rows=32, hardware=with_network(1e8))
    space = Space(axes=("tp",), activations=("keep",), rows=(2,), wires=NARROW)
    sizes = {("keep", None): blocks.size("keep", None)}
    for base in (BF16, Plan(precision="bf16", wire={"param": "int8", "grad": "int4"})):
        bounds, num = Bounds(base, blocks.hardware, dict(sizes), blocks.blocks_by_rank), 0
        for candidate in candidates(16, 8, blocks.num_rows, blocks.num, base, space):
            try:
                bound = bounds.of(candidate)
            except ConfigError:  # hsdp sends no parameters between hosts
                continue
            num += 1
            assert bound.seconds <= 1.001 * blocks.evaluate(candidate, base).seconds, candidate
        assert num > 30


def test_narrow_wires_are_chosen_where_they_are_asked_for_and_pay() -> None:
    """Between hosts: on a mesh with an axis for them, and nowhere on one host. The table and the reasons say so."""
    blocks = Blocks(num=4, width=1024, length=64, num_rows=64, hardware=with_network(1e8))
    space = Space(presets=("zero1", "zero3"), axes=(), activations=("keep",), rows=(4,), shares=False)
    plain, narrow = found(blocks, 16, space=space), found(blocks, 16, space=replace(space, wires=NARROW))
    best = narrow.best[0]
    assert not any(one.candidate.wires for one in plain.best)
    assert best.candidate.wires == (("param", "int8"), ("grad", "int4"))
    assert best.candidate.sizes == (("node", 2), ("local", 8))
    assert str(best.candidate).endswith("parameters sent in int8, gradients sent in int4 (numerics asked for)")
    assert best.found.seconds < plain.best[0].found.seconds
    reasons = {one.what: one.reason for one in narrow.why_not}
    assert "waiting along dp" in reasons["all sent as it is"]
    assert reasons["gradients sent in int8"].startswith("+")
    assert {"zero1", "zero3"} - {best.candidate.preset} <= set(reasons)
    plan = best.candidate.plan(Plan(precision="bf16", search={"wires": ["int4"]}))
    assert (plan.wire.param.dtype, plan.wire.grad.dtype, plan.mesh) == ("int8", "int4", {"node": 2, "local": 8})
    assert "search" not in plan.model_fields_set

    fast = found(replace(blocks, length=4096, hardware=with_network(1e13)), 16, space=replace(space, wires=NARROW))
    assert not fast.best[0].candidate.wires, "codes have to be made and read"
    assert not any(one.wires for one in candidates(8, 8, 64, 4, BF16, replace(space, wires=NARROW)))
    alone = next(one for one in candidates(8, 1, 64, 4, BF16, replace(space, wires=NARROW)) if one.wires)
    assert alone.sizes == (("dp", 8),), "with one rank on a host, all of them are on several"


def test_names_of_wires() -> None:
    assert wires_of((), "--wires") == ()
    assert wires_of(("int4", "grad=int4"), "--wires") == ((("grad", "int4"),),)
    assert set(NARROW) == {
        (("param", "int8"),),
        (("grad", "int8"),),
        (("grad", "int4"),),
        (("param", "int8"), ("grad", "int8")),
        (("param", "int8"), ("grad", "int4")),
    }
    refused = ("int9", "Did you mean 'int8'"), ("state=int8", "those of param or grad"), ("param=", "--wires is")
    for word, said in refused:
        with pytest.raises(ConfigError, match=said):
            wires_of((word,), "--wires")


def test_a_pipeline_with_one_micro_batch_takes_the_time_of_all_stages() -> None:
    """Where a step leaves gathers in flight, a second one is timed: it waits for its own messages. Only the update, and
    what belongs to it, is of a quarter of the parameters."""
    blocks = Blocks(num=4, width=1024, length=1024, num_rows=8)
    whole, staged = (
        blocks.evaluate(Candidate("zero1", (*(("pp", pp),) * (pp > 1), ("dp", 2)), 4, 1)).seconds for pp in (1, 4)
    )
    assert staged > 0.9 * whole


def test_the_best_of_a_small_space_is_found() -> None:
    """Against evaluating every candidate."""
    blocks = Blocks(num=4, width=1024, length=512, num_rows=8)
    space = Space(activations=("keep", "recompute"), schedules=(("1f1b", 1),))
    limits = Limits(1 * GIB, 100 * GIB)
    every = list(candidates(4, 4, blocks.num_rows, blocks.num, BF16, space))
    exact = {one: blocks.evaluate(one) for one in every}
    fastest = min(result.seconds for result in exact.values() if result.fits(limits))
    chosen = found(blocks, 4, limits, space=space, most_evaluated=len(every))
    assert chosen.best[0].found.seconds == pytest.approx(fastest)
    few = found(blocks, 4, limits, space=space)
    if few.num_left:
        assert few.best[0].found.seconds <= 1.05 * fastest
    else:  # bounds prove that no other is among them
        in_order = sorted(result.seconds for result in exact.values() if result.fits(limits))
        assert [one.found.seconds for one in few.best] == pytest.approx(in_order[: len(few.best)])


@thorough_only("slow; smaller tests beside it cover the same code")
def test_less_memory_chooses_more_sharding_and_no_memory_says_what_would_do() -> None:
    blocks = Blocks(num=4, num_rows=32)
    roomy = found(blocks, 16, space=SMALL)
    assert roomy.best[0].found.fits(LIMITS)
    small = Limits(roomy.best[0].found.device_bytes // 3, LIMITS.host_bytes)
    tight = found(blocks, 16, small, space=SMALL)
    assert tight.best[0].found.fits(small)
    assert tight.best[0].found.seconds >= roomy.best[0].found.seconds
    with pytest.raises(ConfigError) as raised:
        found(blocks, 2, Limits(6 * GIB, 16 * GIB), space=Space(presets=("ddp", "zero3"), axes=()))
    said = str(raised.value)
    assert said.startswith("No plan fits on 2 ranks. The smallest is zero3")
    assert "too much" in said
    assert "What would do: devices of " in said
    assert " ranks (zero3" in said


@thorough_only("slow; smaller tests beside it cover the same code")
def test_the_least_time_memory_or_cost() -> None:
    blocks = Blocks(num=4, num_rows=16)
    fast, small, cheap = (found(blocks, 8, space=SMALL, objective=one).best[0] for one in ("time", "memory", "cost"))
    assert small.found.device_bytes <= fast.found.device_bytes
    assert fast.found.seconds <= small.found.seconds
    spent = cheap.found.seconds * cheap.candidate.world_size
    assert spent <= 1.001 * fast.found.seconds * 8


def test_why_neighbours_are_not_chosen() -> None:
    """Of the neighbours a person would ask about: too slow with what costs most, too large with by how much, or
    impossible with the check's reason."""
    chosen = found(Blocks(num=4, num_rows=64), 16, Limits(10 * GIB, LIMITS.host_bytes), space=SMALL)
    why_not = {one.what: one for one in chosen.why_not}
    assert {"ddp", "zero3"} & set(why_not)
    assert any("too much on a device" in one.reason for one in chosen.why_not)
    assert any("mostly " in one.reason for one in chosen.why_not)
    assert chosen.front[0].found.seconds <= chosen.front[-1].found.seconds
    odd = Blocks(num_rows=96, width=4095, num=24)
    refused = found(odd, 24, space=Space(axes=("tp",)))
    assert any("4095 columns do not divide" in reason for reason in refused.refused.values())


@pytest.mark.parametrize(
    ("space", "objective", "best", "asked"),
    [
        (Space(("hsdp",), ("tp",), ("keep",)), "time", {"node": 2, "local": 8}, {"zero3", "hpz", "tp 2"}),
        (Space(("zero3", "offload"), ("tp",), ("keep",)), "time", {"dp": 16}, {"hsdp", "zero1", "offload"}),
        (
            Space(("ddp",), ("pp",), ("keep",), (("interleaved", 2),)),
            "memory",
            {"pp": 2, "dp": 8},
            {"zero1", "pp 1", "pp 4, 1f1b"},
        ),
        (Space(("zero1",), (), ("keep",)), "cost", {"dp": 1}, {"2 ranks", "zero3"}),
    ],
)
def test_neighbours_are_what_a_search_of_everything_would_look_at(
    space: Space, objective: Objective, best: dict[str, int], asked: set[str]
) -> None:
    """On the axes that another preset or size needs: nodes keep their ranks, and every step its samples."""
    blocks = Blocks(num=4, width=1024, length=1024, num_rows=64)
    chosen = found(blocks, 16, space=space, objective=objective, most_evaluated=4)
    assert dict(chosen.best[0].candidate.sizes) == best
    reasons = {one.what: one.reason for one in chosen.why_not}
    assert asked <= set(reasons)
    assert reasons.get("2 ranks", "+ device-seconds").startswith("+")
    wide = Space(schedules=(*SMALL.schedules, *space.schedules))
    every = {one for size in (1, 2, 4, 8, 16) for one in candidates(size, 8, blocks.num_rows, 4, BF16, wide)}
    assert {one.candidate for one in chosen.evaluated} <= every


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match="samples of a step cannot be divided"):
        found(Blocks(num_rows=7), 16, space=Space(axes=()))
    with pytest.raises(ConfigError, match="read different ones in micro-batches of 3 or 5"):
        found(Blocks(num_rows=32), 16, space=Space(axes=(), rows=(3, 5)))


def test_a_plan_may_ask_for_as_many_stages_as_a_published_run_has() -> None:
    """Llama 3 405B has 126 blocks in 128 stages on 16 ranks, of which the first and the last have no block."""
    plan = Plan(pipeline={"schedule": "interleaved", "virtual_stages": 8})
    space = Space(presets=("zero1",), axes=("pp",), activations=("keep",), schedules=(), rows=(1,))
    asked = list(candidates(256, 8, 512, 126, plan, space))
    assert (16, 8) in {(one.size("pp"), one.chunks) for one in asked}


def test_the_schedule_of_the_plan_is_kept() -> None:
    """With the stages on each rank that it has without asking, and with any number of micro-batches it takes."""

    def kept(**pipeline: object) -> list[Candidate]:
        base = Plan(mesh={"pp": 4}, accumulate=6, pipeline=pipeline)
        space = Space(presets=("ddp",), axes=(), schedules=(), activations=("keep",), rows=(1,))
        return list(candidates(4, 4, 6, 8, base, space))

    for asked, chunks in (
        ({"schedule": "interleaved"}, 2),
        ({"schedule": "interleaved", "virtual_stages": 1}, 1),
        ({"schedule": "interleaved", "virtual_stages": 3}, 3),
        ({"schedule": "gpipe"}, 1),
        ({}, 1),
    ):
        (one,) = kept(**asked)
        assert one.chunks == chunks
        plan = one.plan(Plan(mesh={"pp": 4}))
        assert schedule_of(plan, 4).num_stages == 4 * chunks
        assert plan.pipeline.schedule == asked.get("schedule", "1f1b")


def test_a_mesh_of_the_plan_is_kept() -> None:
    base = Plan(precision="bf16", mesh={"dp": -1, "tp": 2})
    chosen = search(Blocks(num=8, num_rows=64), 16, LIMITS, base=base)
    assert all(dict(one.candidate.sizes) == {"dp": 8, "tp": 2} for one in chosen.best)


class Weighed(Blocks):
    """Of which one rank of a pipeline shows what all of them hold."""

    def held(self, candidate: Candidate, enough: int | None = None) -> int:
        num_asked = self.num_asked
        found = self.evaluate(candidate)
        self.num_asked = num_asked
        return found.device_bytes


def test_a_rank_of_a_pipeline_that_has_no_room_is_enough() -> None:
    """To know that a plan does not fit: it is not evaluated, and what is found is the same."""
    sizes = {"num": 4, "width": 1024, "length": 512, "num_rows": 32}
    space = Space(("zero1", "zero2"), ("pp",), ("keep", "recompute"), (("1f1b", 1), ("interleaved", 2)), shares=False)
    limits = Limits(int(0.42 * GIB))
    plain, weighed = Blocks(**sizes), Weighed(**sizes)
    every, few = (found(blocks, 8, limits, space=space) for blocks in (plain, weighed))
    assert few.best == every.best
    assert few.why_not == every.why_not
    assert weighed.num_asked < plain.num_asked
    assert any(one.candidate.size("pp") > 1 and not one.found.fits(limits) for one in every.evaluated)


def test_two_rounds_of_a_slow_pipeline_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further one takes at least what its busiest rank computes, so that what is too slow with two is not timed
    with three."""
    blocks = Blocks(num=4, length=2048, num_rows=64, hardware=with_network(5e9))
    space = Space(("zero1", "zero2", "zero3"), ("pp",), ("keep",), rows=(1,), shares=False)
    few = found(blocks, 16, space=space)
    num_asked, blocks.num_asked = blocks.num_asked, 0
    monkeypatch.setattr("shardwise.fit.search._Search._with_rounds", lambda _, __, bound: bound)
    every = found(blocks, 16, space=space)
    assert few.best == every.best
    assert few.why_not == every.why_not
    assert num_asked < blocks.num_asked
    longer = [one.candidate for one in every.evaluated if one.candidate.size("pp") > 1 and not one.found.is_exact]
    for candidate in longer:
        two = replace(candidate, accumulate=2 * candidate.size("pp"))
        more = blocks.least(candidate).seconds - blocks.least(two).seconds
        assert blocks.evaluate(two).seconds + more <= 1.001 * blocks.evaluate(candidate).seconds, candidate
    assert len(longer) > 4


class Watched(Blocks):
    """Notes whether Python's collector runs by itself."""

    def evaluate(self, candidate: Candidate, base: Plan | None = None) -> Evaluated:
        self.collects = gc.isenabled()
        return super().evaluate(candidate, base)


@pytest.mark.parametrize("limits", [LIMITS, Limits(GIB // 64)], ids=["found", "nothing fits"])
def test_a_search_leaves_the_collector_as_it_was(limits: Limits) -> None:
    """Which runs by itself before and afterwards, and not meanwhile."""
    blocks, num_frozen = Watched(num=2, width=1024, num_rows=8), gc.get_freeze_count()
    with pytest.raises(ConfigError) if limits != LIMITS else nullcontext():
        found(blocks, 2, limits, space=Space(("zero1",), (), ("keep",), shares=False))
    assert not blocks.collects
    assert gc.isenabled()
    assert gc.get_freeze_count() <= num_frozen


@pytest.mark.parametrize("most", [1, 60])
def test_no_neighbour_of_the_best_is_better(most: int) -> None:
    """Also where so few may be evaluated that the search ends before it comes to them."""
    space = Space(axes=("tp", "pp"), activations=("keep", "recompute"), schedules=(("1f1b", 1),))
    chosen = search(Blocks(num=4, width=1024, num_rows=32), 8, LIMITS, space=space, most_evaluated=most)
    best = chosen.best[0]
    fitting = [one for one in chosen.why_not if one.found is not None and one.found.fits(LIMITS)]
    assert fitting
    assert all(one.found.seconds >= best.found.seconds for one in fitting if one.found is not None)


def test_what_holds_all_micro_batches_is_evaluated_with_all_of_them() -> None:
    """Of other schedules a few rounds tell what more hold."""
    blocks = Blocks(num=4, width=1024, length=256, num_rows=32)
    base = Plan(precision="bf16", mesh={"pp": 2, "dp": 2}, pipeline={"schedule": "gpipe"})  # type: ignore[arg-type]
    space = Space(("zero1", "zero2"), (), ("keep",), schedules=(), rows=(1,), shares=False)
    chosen = search(blocks, 4, LIMITS, base=base, space=space)
    assert {(one.candidate.schedule, one.candidate.accumulate) for one in chosen.best} == {("gpipe", 16)}
    for one in chosen.best:
        assert not one.candidate.has_gradients_beside
        assert one.found.device_bytes == blocks.evaluate(one.candidate, base).device_bytes
        few = replace(one.candidate, accumulate=6)
        assert one.found.device_bytes > 1.2 * blocks.evaluate(few, base).device_bytes


class Guessed(Blocks):
    """Whose activations seem to be kept on the host in a fifth of the time that it takes."""

    def evaluate(self, candidate: Candidate, base: Plan | None = None) -> Evaluated:
        found = super().evaluate(candidate, base)
        share = 0.2 if candidate.policy == "offload" else 1.0
        return replace(found, seconds=share * found.seconds, is_exact=False)

    def confirm(self, candidate: Candidate) -> Evaluated:
        return super().evaluate(candidate)


def test_reasons_are_those_of_what_was_found_exactly() -> None:
    """A neighbour that seems better, and had been left out, is evaluated exactly; if it is not, the reason says so."""
    space = Space(("zero2",), (), ("keep", "offload"), shares=False)
    chosen = found(Guessed(num=4, num_rows=64), 8, space=space, most_evaluated=1)
    assert chosen.best[0].candidate.policy == "keep"
    (moved,) = (one for one in chosen.why_not if one.what == "activations offload")
    assert moved.found is not None
    assert moved.found.is_exact
    assert moved.found.seconds > chosen.best[0].found.seconds
    assert moved.reason.startswith("+")


def test_a_neighbour_that_was_not_asked_for_is_not_chosen() -> None:
    chosen = search(Blocks(num=4, width=1024, num_rows=8), 4, LIMITS, space=Space(("zero3",), ("tp",), ("keep",)))
    assert {one.candidate.preset for one in chosen.best} == {"zero3"}
    assert any(one.found is not None and one.found.seconds < chosen.best[0].found.seconds for one in chosen.why_not)


@sampled
@pytest.mark.parametrize(("world_size", "num_rows"), [(1024, 4096), (100_000, 400_000)])
def test_large_worlds_ask_for_no_more_than_small_ones(world_size: int, num_rows: int) -> None:
    blocks = Blocks(num=4, width=12288, num_rows=num_rows)
    chosen = found(blocks, world_size)
    assert chosen.best[0].found.fits(LIMITS)
    assert chosen.best[0].candidate.world_size == world_size
    assert blocks.num_asked < 250
    assert math.isfinite(chosen.best[0].found.mfu)


@soak("counts seconds of a processor, which a slow one has more of")
@pytest.mark.parametrize(("world_size", "num_rows", "seconds"), [(1024, 4096, 10), (100_000, 400_000, 60)])
def test_large_worlds_take_seconds(world_size: int, num_rows: int, seconds: float) -> None:
    """On one core, by its own clock: other work on the machine does not count."""
    begun = time.process_time()
    found(Blocks(num=16, width=12288, num_rows=num_rows), world_size)
    assert time.process_time() - begun < seconds
