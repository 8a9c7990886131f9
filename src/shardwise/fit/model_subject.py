"""A PyTorch model as the subject of a search: rehearsed on fake tensors for each way to split it, as `explain` does.

What a search asks about candidates is answered here; what the model computes and holds, `rehearsals.py` knows, what
that says of candidates that were not rehearsed, `derived_bounds.py`. The model itself is only read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from shardwise.fit.budget import Ranks, within_budget
from shardwise.fit.candidates import ON_DEVICE, SCHEDULE, Candidate, Size
from shardwise.fit.clock import RankProgram
from shardwise.fit.counts_by_stage import counts_of_ranks
from shardwise.fit.derived_bounds import OPTIMISM, WITHIN, DerivedBounds
from shardwise.fit.foreseen import Counted, RankUnits, rank_units
from shardwise.fit.hardware import Hardware
from shardwise.fit.least_steps import Least
from shardwise.fit.rehearsals import Rehearsals, of_model
from shardwise.fit.search import Evaluated, Limits
from shardwise.fit.stage_cuts import StageCuts, is_block
from shardwise.fit.step_time import step_time
from shardwise.memory import in_own_precision
from shardwise.parallel.outline import Outline, outline
from shardwise.plan import Budget, Plan, PolicyName, PrecisionName
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import WIDTH
from shardwise.program import Footprint, Mark, Update
from shardwise.program.schedule import Op, schedule_of, schedule_of_calls
from shardwise.runtime.activations import treatments_for

Updates = Mapping[nn.Parameter, Update]


@dataclass
class ModelSubject:
    """`model` on `hardware`, which is given with the ranks of a node; `batch` is a micro-batch of one data rank as the
    model is called with, any number of samples of it, along the first dim of its tensors. `num_rows` are the samples of
    a step on all ranks. `updates` say how parameters are updated; without, each has `num_states` of its size."""

    model: nn.Module
    batch: object
    hardware: Hardware
    num_rows: int
    base: Plan
    updates: Updates | None = None
    num_states: int = 2
    on_cpu: bool = True
    disk: str | None = None
    """A folder on a local disk, for states that the host has no room for."""
    varies_rows: bool = True
    """Whether micro-batches of other sizes will be asked for."""
    _held: dict[Candidate, dict[int, Footprint]] = field(default_factory=dict, init=False)
    _num_held: int = field(default=0, init=False)
    """How many rehearsals there were when that was asked for."""
    _units: dict[tuple[Candidate, Plan], list[RankUnits]] = field(default_factory=dict, init=False)
    _outlines: dict[object, Outline] = field(default_factory=dict, init=False)
    _sizes: dict[tuple[PolicyName, PrecisionName | None], Size] = field(default_factory=dict, init=False)
    _widths: dict[PrecisionName | None, int] = field(default_factory=dict, init=False)
    """Bytes of an element that computes."""

    def __post_init__(self) -> None:
        self.base = in_own_precision(self.base, self.model)
        self.rehearsals = Rehearsals(self.model, self.batch, self.base, self.on_cpu, self.varies_rows)
        self._cuts = StageCuts(self.model, self.base, self.hardware.ranks_per_node)
        self._bounds = DerivedBounds(self.rehearsals, self._cuts, self.hardware, self.size, self._unit_bytes)

    def rebase(self, base: Plan) -> None:
        """From now on candidates have `base` in common. What was rehearsed under another one counts for it, too."""
        self.base = self.rehearsals.base = self._cuts.base = base

    def size(self, policy: PolicyName, precision: PrecisionName | None) -> Size:
        key = policy, precision
        if key not in self._sizes:
            rows = self.rehearsals.rows_of_size
            candidate = Candidate(ON_DEVICE[0], (("dp", 1),), rows, 1, policy, precision=precision)
            mesh = candidate.mesh
            plan = candidate.plan(_plain(self.base))
            (units,) = rank_units(self.model, plan, mesh, None, self.updates, on_cpu=self.on_cpu)
            (counted,) = self.rehearsals.count(candidate)
            flats = [flat for unit in units.units for flat in unit.flats]
            self._widths[precision] = max(WIDTH[flat.table.compute] for flat in flats)
            operations = [one for worked in counted.worked for one in worked.operations if one.flops]
            seconds = sum(one.flops / self.hardware.peak(one.dtype) for one in operations)
            moved = [sum(one.num_bytes for one in part.operations if one.kind == "evict") for part in counted.worked]
            self._sizes[key] = Size(
                numel=sum(flat.numel for flat in flats),
                trained_numel=sum(flat.numel for flat in flats if flat.trainable),
                largest_unit_numel=max(sum(flat.numel for flat in unit.flats) for unit in units.units),
                num_blocks=max(1, sum(is_block(unit.name) for unit in units.units)),
                num_states=self.num_states,
                flops_seconds=OPTIMISM * seconds / rows,
                row_bytes=OPTIMISM * max(mark.peak_bytes for mark in counted.activations.marks) / rows,
                host_row_bytes=OPTIMISM * sum(moved) / rows,
                host_unit_row_bytes=max(moved) / rows,
                between_row_bytes=OPTIMISM * _between_passes(counted.activations.marks) / rows,
                blocks_row_bytes=OPTIMISM * _left_by_blocks(counted.activations.marks) / rows,
            )
        return self._sizes[key]

    def _unit_bytes(self, precision: PrecisionName | None) -> int:
        """Of the gradients of a unit, at most, which a backward holds whatever the samples. How much of it is split
        along `tp` differs between models."""
        return self.size("keep", precision).largest_unit_numel * self._widths[precision]

    def blocks_by_rank(self, candidate: Candidate) -> Sequence[int]:
        blocks, num_ranks = self._cuts.of(candidate).blocks, candidate.size("pp")
        return [sum(blocks[rank::num_ranks]) for rank in range(num_ranks)]

    def check(self, candidate: Candidate) -> None:
        """As `shard` does. Whether attention and experts can be split, only a forward tells."""
        stages, rows = candidate.size("pp"), self.rehearsals.rows_of_batch
        plain = replace(candidate, rows=rows, accumulate=stages, policy="keep", wires=())
        if self.base.pipeline.stages == "auto":
            plain = replace(plain, schedule=SCHEDULE, chunks=1)
        self._outline(plain)
        if candidate.size("sp") * candidate.size("ep") > 1:
            self.rehearsals.derived(plain)

    def least(self, candidate: Candidate, *, itself: bool = False) -> Least:
        return self._bounds.least(candidate, itself=itself)

    def evaluate(self, candidate: Candidate) -> Evaluated:
        """From rehearsals of two sizes of micro-batches, without a pipeline: see [Note: derived counts]."""
        timed, programs, counted = self._derived_step(candidate)
        return self._with_bytes(timed, candidate, programs, counted, self._held_of(candidate))

    def timed(self, candidate: Candidate) -> Evaluated:
        return self._derived_step(candidate)[0]

    def held(self, candidate: Candidate, enough: int | None = None) -> int:
        """Of the second rank of a pipeline, which also holds what has arrived, of the first, which has most
        micro-batches in flight, and of the last one, which has the loss: a program for each, and no clock."""
        plan, mesh = candidate.placed(self.base, self.hardware.ranks_per_node)
        ranks, known, most = self._ranks(candidate, plan, mesh), self._held_of(candidate), 0
        for place in dict.fromkeys((1, 0, len(ranks) - 1)):
            if place not in known:
                counted = self._derived_ranks(candidate, ranks, (place,))
                (program,) = _programs(plan, [ranks[place]], counted)
                known[place] = self._footprint(candidate, program, *counted)
            most = max(most, known[place].total)
            if enough is not None and most > enough:
                break
        return most

    def _held_of(self, candidate: Candidate) -> dict[int, Footprint]:
        """What some ranks of a pipeline hold, by their place, as far as that was asked for since the last rehearsal."""
        if self._num_held != self.rehearsals.num_made:
            self._num_held = self.rehearsals.num_made
            self._held.clear()
        return self._held.setdefault(candidate, {})

    def relieved(self, candidate: Candidate, limits: Limits) -> Candidate:
        """With the least that a budget (`within_budget`) would put off the device, beside what activations take."""
        disk = self.disk if self.hardware.disk is not None and limits.host_bytes is not None else None
        budget = Budget(device=limits.device_bytes, host=limits.host_bytes, disk=disk)
        fullest = candidate.fullest
        plan, mesh = fullest.placed(self.base, self.hardware.ranks_per_node)
        counted = self._derived_ranks(fullest, self._ranks(fullest, plan, mesh))
        ranks = Ranks(self.on_cpu, min(candidate.world_size, self.hardware.ranks_per_node))
        fitted = within_budget(
            self.model,
            plan.model_copy(update={"budget": budget}),
            mesh,
            ranks,
            self.updates,
            self.num_states,
            activations=[one.activations for one in counted],
            describes=False,
        )
        offload = fitted.plan.offload
        on_disk = offload.optim_disk > 0 or offload.param_disk > 0
        return replace(candidate, offload=offload, disk=disk if on_disk else None)

    def confirm(self, candidate: Candidate) -> Evaluated:
        """From a rehearsal of just this: the step that `shard` would plan."""
        plan, mesh = candidate.placed(self.base, self.hardware.ranks_per_node)
        ranks, counted = self._ranks(candidate, plan, mesh), self.rehearsals.count(candidate)
        programs = _programs(plan, ranks, counted, checks=True)
        timed = self._timed(candidate, plan, mesh, ranks, programs, is_exact=True)
        return self._with_bytes(timed, candidate, programs, counted, {})

    def _ranks(self, candidate: Candidate, plan: Plan, mesh: Mesh) -> list[RankUnits]:
        """Known for each plan but for its micro-batches, and for its activations unless stages depend on them. Of a
        pipeline only the rows of the schedule depend on the number of micro-batches."""
        num_stages = candidate.size("pp")
        plain = replace(candidate, rows=1, accumulate=1, policy="keep" if num_stages == 1 else candidate.policy)
        key = plain, self.base
        if key not in self._units:
            found = rank_units(self.model, plan, mesh, self._outline(candidate), self.updates, on_cpu=self.on_cpu)
            alike = self._units.get((replace(plain, policy="keep"), self.base), [])
            self._units[key] = [one.with_programs_of(other) for one, other in zip(found, alike, strict=False)] or found
        units = self._units[key]
        if num_stages == 1:
            return units
        schedule = schedule_of(plan, num_stages)
        if candidate.parts:
            schedule = schedule_of_calls(num_stages, schedule.num_stages, min(2, candidate.accumulate))
        return _with_rows(units, schedule.rows)

    def _outline(self, candidate: Candidate) -> Outline:
        """That of its plan. How layers are split, and activations treated, is the same for many."""
        plan, mesh = candidate.placed(self.base, self.hardware.ranks_per_node)
        stages = self._cuts.of(candidate).layout if mesh.has_stages else None
        if candidate.size("ep") > 1:  # experts also split the other axes
            return outline(self.model, plan, mesh, 0, stages=stages)
        split = tuple((axis, candidate.size(axis)) for axis in WITHIN), plan.tensor.verify and mesh.has_stages
        like = self._outlines.get((split, candidate.policy))
        if like is None and split in self._outlines:
            like = self._outlines[split]
            like = replace(like, treatments=treatments_for(self.model, like.choices, plan))
        found = outline(self.model, plan, mesh, 0, stages=stages, like=like)
        for alike in (split, (split, candidate.policy)):
            self._outlines.setdefault(alike, found)
        return found

    def _derived_step(self, candidate: Candidate) -> tuple[Evaluated, list[RankProgram], list[Counted]]:
        """How long it takes, and the programs of its ranks with what was counted of each."""
        plan, mesh = candidate.placed(self.base, self.hardware.ranks_per_node)
        ranks = self._ranks(candidate, plan, mesh)
        counted = self._derived_ranks(candidate, ranks)
        is_exact = len(ranks) == 1 and self.rehearsals.is_rehearsed(of_model(candidate))
        programs = _programs(plan, ranks, counted, checks=is_exact)
        return self._timed(candidate, plan, mesh, ranks, programs, is_exact=is_exact), programs, counted

    def _timed(
        self,
        candidate: Candidate,
        plan: Plan,
        mesh: Mesh,
        ranks: Sequence[RankUnits],
        programs: Sequence[RankProgram],
        *,
        is_exact: bool,
    ) -> Evaluated:
        """How long the step takes: see [Note: calls in a search].

        Copies of states beside a step (`survive`) are not in it: on accelerators none are made, as all ranks restart;
        on processors, who gets one depends on which ranks are on which host, which is looked up rank by rank.
        """
        time = step_time(
            _programs(plan, *self._in_parts(candidate, ranks)) if candidate.parts else programs,
            self.hardware,
            mesh,
            num_micro_batches=plan.accumulate,
            num_states=self.num_states,
            keeps_events=False,
        )
        return Evaluated(
            seconds=time.timeline.step_seconds,
            device_bytes=0,
            parts=time.breakdown,
            mfu=time.timeline.mfu,
            is_exact=is_exact,
        )

    def _with_bytes(
        self,
        timed: Evaluated,
        candidate: Candidate,
        programs: Sequence[RankProgram],
        counted: Sequence[Counted],
        known: Mapping[int, Footprint],
    ) -> Evaluated:
        """`timed`, with what the fullest rank holds: what an engine promises, which fits wherever ranks run. Where
        those of a host share memory it is less (`local_size`), and a budget that counted on that would be exceeded by
        the same plan on more hosts. Of some ranks that may be `known`, by their place."""
        held = [
            known.get(place) or self._footprint(candidate, program, one)
            for place, (program, one) in enumerate(zip(programs, counted, strict=True))
        ]
        num_local = min(candidate.world_size, self.hardware.ranks_per_node)
        return replace(
            timed,
            device_bytes=max(one.total for one in held),
            host_bytes=num_local * max(one.host_total for one in held),
            disk_bytes=num_local * max(one.disk_total for one in held),
            process_bytes=max(one.activations.beside_tensors_bytes for one in counted),
        )

    def _footprint(self, candidate: Candidate, program: RankProgram, counted: Counted) -> Footprint:
        return program.step.footprint(
            states_per_param=self.num_states, num_micro_batches=candidate.accumulate, activations=counted.activations
        )

    def _in_parts(self, candidate: Candidate, ranks: Sequence[RankUnits]) -> tuple[list[RankUnits], list[Counted]]:
        """The ranks of a pipeline with the parts of all calls as micro-batches, and what these compute."""
        num_stages = 1 + max(op.stage for rank in ranks for op in rank.row)
        schedule = schedule_of_calls(len(ranks), num_stages, candidate.accumulate, candidate.parts)
        ranks = _with_rows(ranks, schedule.rows)
        return ranks, self._derived_ranks(replace(candidate, rows=-(-candidate.rows // candidate.parts)), ranks)

    def _derived_ranks(
        self, candidate: Candidate, ranks: Sequence[RankUnits], places: Sequence[int] | None = None
    ) -> list[Counted]:
        """Of all `ranks` of a pipeline, or of those at some `places`."""
        counted = self.rehearsals.derived(candidate)
        if len(ranks) == 1:
            return counted
        return counts_of_ranks(ranks, places, counted[0], self.rehearsals.message_bytes(candidate))


# [Note: calls in a search] A loop that calls the model in stages holds what a call of its whole micro-batch holds, and
# from the second call of a step on its gradients beside that: two calls are counted, each as one micro-batch. But it
# takes the time of parts, which pass through the stages one behind the other, so parts are timed. The head, which runs
# once for all of them, is timed with each, so a call takes a little longer than foreseen, by what other ranks wait for
# it, whichever plan it is.


def _with_rows(ranks: Sequence[RankUnits], rows: Sequence[tuple[Op, ...]]) -> list[RankUnits]:
    """The ranks of a pipeline with other ops."""
    return [replace(rank, row=row) for rank, row in zip(ranks, rows, strict=True)]


def _programs(
    plan: Plan, ranks: Sequence[RankUnits], counted: Sequence[Counted], *, checks: bool = False
) -> list[RankProgram]:
    """What a clock needs of each rank, which has to know what all stages send. What is only priced is not checked: what
    is proposed is, as `shard` does."""
    sent = {stage: num_bytes for one in counted for stage, num_bytes in one.message_bytes.items()}
    counted = [replace(one, message_bytes=sent) for one in counted]
    return [units.program(plan, one, checks=checks) for units, one in zip(ranks, counted, strict=True)]


def _between_passes(marks: Sequence[Mark]) -> int:
    """Bytes that a forward leaves for its backward."""
    forward = [mark.live_bytes for mark in marks if mark.moment.phase == "forward"]
    return forward[-1] if forward else 0


def _left_by_blocks(marks: Sequence[Mark]) -> int:
    """Bytes that the forwards of all blocks leave for their backwards."""
    left = before = 0
    for mark in marks:
        if mark.moment.phase == "forward" and mark.moment.edge == "after" and is_block(mark.moment.unit):
            left += mark.live_bytes - before
        before = mark.live_bytes
    return left


def _plain(base: Plan) -> Plan:
    """Without what only some meshes can have."""
    return base.model_copy(update={"mesh": None})
