"""What `explain` has to say, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardwise.calibration import Calibration
from shardwise.config import Plan, plan_table
from shardwise.mesh import EXPERT_AXIS, SEQUENCE_AXIS, Mesh
from shardwise.placement import (
    KINDS,
    WIDTH,
    Offloaded,
    Span,
    Table,
    check_offload,
    pack,
    padded_numel,
    ruled_tables,
    table_for,
)
from shardwise.program import (
    Activations,
    Buffer,
    FlatSpec,
    Footprint,
    ImageBytes,
    PlacedUpdate,
    StepProgram,
    UnitSpec,
    image_bytes,
    plan_step,
    render,
    schedule_trace,
    straight_passes,
    straight_trace,
    update_by,
)
from shardwise.program.schedule import Op, Schedule, schedule_of, timed
from shardwise.tier_time import TierTime, tier_time
from shardwise.units import format_bytes

NUM_STAND_INS = 4
STAND_IN_SHAPE = (2**10, 2**10)
STAND_IN_NUMEL = 2**20


@dataclass(frozen=True)
class UnitSize:
    """A unit of a real model: elements of its parameters, all of them and the frozen ones."""

    name: str
    numel: int
    frozen_numel: int = 0
    on_host: str = ""
    """What of it is on the host, in words."""
    activations: str = ""
    """What becomes of them, if they are not just kept."""


@dataclass(frozen=True)
class Subject:
    """What is to be trained: units of a model, or what stands in for them, and what is known of its optimizer.

    `sizes` is empty if the units stand in for a model. `batch` says where the batch came from whose `activations` were
    counted.
    """

    units: tuple[UnitSpec, ...]
    sizes: tuple[UnitSize, ...] = ()
    num_states: int = 2
    optimizer: str | None = None
    activations: Activations | None = None
    """Of the model; of a pipeline of all that the rank does in a step."""
    batch: str | None = None
    activation_bytes: int = 0
    """What a rank sends of activations and their gradients, in a forward and backward on the batch."""
    stages: str = ""
    """Of a pipeline: which rank has which modules."""
    pipeline_rank: int = 0
    """Of a pipeline: where the units lie."""
    stages_of_units: tuple[tuple[int, ...], ...] = ()
    """Of a pipeline, for each unit the stages that use it; empty if that is not known."""
    experts: str = ""
    """Which rank along `ep` has which experts."""
    expert_load: float = 0.0
    """How many times an even share of the tokens experts were rehearsed to get."""
    row_numel: int = 0
    """Elements that go to experts for one choice of one token, in all layers together."""
    budget: str = ""
    """What the plan's budget came to, and why."""


@dataclass(frozen=True)
class Explanation:
    """A plan on a mesh: its table, the program of one step, and what each rank holds and sends.

    `held` is what each rank holds, `replicated` what it would without sharding.
    """

    plan: Plan
    mesh: Mesh
    table: Table
    known_from: str
    subject: Subject
    step: StepProgram
    held: Footprint
    replicated: Footprint
    tiers: TierTime | None = None
    """What tiers cost a rank in a step, with all ranks on one host; `None` where all is on the device."""
    per_host: int = 0
    """Ranks of each host; 0 if that is not asked."""

    @property
    def images(self) -> ImageBytes | None:
        """What others would go back to if the rank is lost, where the plan says that they lie in the host's memory."""
        if self.plan.survive != "host":
            return None
        return image_bytes([flat for unit in self.subject.units for flat in unit.flats], self.subject.num_states)

    @property
    def rules(self) -> dict[str, Table]:
        """The tables of the plan's rules, by name."""
        return ruled_tables(self.plan, self.mesh)

    @property
    def schedule(self) -> Schedule | None:
        """The order of micro-batches, if the mesh has a pipeline."""
        num_ranks = _pipeline_size(self.mesh)
        return schedule_of(self.plan, num_ranks) if num_ranks > 1 else None

    @property
    def program(self) -> str:
        return render(self.step.micro_batch) + render(self.step.step)

    @property
    def sent_bytes(self) -> int:
        """What one rank sends in one optimizer step, all its micro-batches included; of activations if they are
        known."""
        return self.step.sent_bytes(self.plan.accumulate) + self.subject.activation_bytes * self.plan.accumulate

    @property
    def copied_bytes(self) -> dict[str, int]:
        """What goes between one rank's device and the host in one optimizer step, by `evict` and `fetch`."""
        return self.step.copied_bytes(self.plan.accumulate)

    @property
    def sent_by_axis(self) -> dict[str, int]:
        """The same by mesh axis."""
        return self.step.sent_by_axis(self.plan.accumulate)

    @property
    def sent_by_hosts(self) -> list[int]:
        """What leaves each host in one optimizer step for parameters and gradients, on the CPU."""
        return self.step.sent_by_hosts(self.mesh, self.per_host, self.plan.accumulate)

    @property
    def attention(self) -> str | None:
        """What ranks that share in sequences send beside the program; `None` where none do."""
        mesh = self.mesh
        if SEQUENCE_AXIS not in mesh.axes or mesh.size(SEQUENCE_AXIS) == 1:
            return None
        size = mesh.size(SEQUENCE_AXIS)
        ulysses = f"{size - 1}/{size} of a rank's queries, keys, values and outputs, each way"
        ring = f"a rank's keys and values {size - 1} times each way, and their gradients in fp32 {size} times"
        said = {"ulysses": f"ulysses sends {ulysses}", "ring": f"ring sends {ring}"}
        kinds = list(said) if self.plan.sequence.attention == "auto" else [self.plan.sequence.attention]
        lines = ", or ".join(said[kind] for kind in kinds)
        return f"Attention is not in these figures: along {SEQUENCE_AXIS}, for each layer, {lines}."

    @property
    def dispatch(self) -> str | None:
        """What ranks that share in experts send beside the program; `None` where none do."""
        if not self.mesh.has_experts:
            return None
        size = self.mesh.size(EXPERT_AXIS)
        rows = "a row of its hidden state"
        if self.subject.row_numel:
            num_bytes = self.subject.row_numel * WIDTH[self.table.compute]
            rows = f"{format_bytes(num_bytes)} in all layers together"
        counted = ""
        if self.subject.batch is not None:
            counted = (
                f" Experts are counted with {self.subject.expert_load:g} times an even share of the tokens, or, with a "
                f"capacity, with as many as all ranks may send."
            )
        return (
            f"Tokens on their way to experts are not in these figures: along {EXPERT_AXIS}, for each token and expert "
            f"that it chose, {rows}, there and back, in forward and in backward; {size - 1}/{size} of it to other "
            f"ranks where experts are evenly loaded.{counted}"
        )


def explain(
    plan: Plan, mesh: Mesh, table: Table, known_from: str, subject: Subject, calibration: Calibration | None = None
) -> Explanation:
    """Plan one step of the subject's units, and the same step with a copy on every rank.

    They are used in the order of the rehearsal that counted its activations, or else one after the other.
    `calibration` is what the machine was measured to give.
    """
    copies = table_for(Plan(preset="ddp", precision=plan.precision), mesh).on(mesh)
    replicas = tuple(
        replace(unit, flats=tuple(replace(flat, table=copies) for flat in unit.flats)) for unit in subject.units
    )
    step, replicated = (_planned(plan, mesh, some, subject) for some in (subject.units, replicas))
    held = _held(plan, step, subject)
    tiers = tier_time(
        step,
        held,
        calibration or Calibration(),
        num_micro_batches=plan.accumulate,
        num_local=mesh.world_size,
        folder=plan.disk,
    )
    return Explanation(plan, mesh, table, known_from, subject, step, held, _held(plan, replicated, subject), tiers)


def said_on_host(flats: Sequence[FlatSpec]) -> str:
    """What of a unit is on the host, and on a disk."""
    what: dict[Buffer, str] = {"param": "parameters", "grad": "gradients", "master": "update"}
    trained = [flat for flat in flats if flat.trainable] or list(flats)
    on_disk = any(flat.tier_of("master") == "disk" for flat in trained)
    rests = any(flat.rests_on_disk for flat in trained)
    there = [word for buffer, word in what.items() if any(flat.tier_of(buffer) == "host" for flat in trained)]
    there += ["update"] if on_disk else []
    said = [f"{', '.join(there)} on the host"] if there else []
    below = [word for word, is_there in (("parameters", rests), ("states", on_disk)) if is_there]
    return ", ".join([*said, f"{' and '.join(below)} on the disk"] if below else said)


def stand_in(table: Table, mesh: Mesh, plan: Plan, optimizer: str | None = None) -> tuple[UnitSpec, ...]:
    """Units to look at where there is no model."""
    check_offload(plan, mesh)
    offloaded = Offloaded.of(plan.offload, [1] * NUM_STAND_INS)
    tables = [offloaded.table(index, table) for index in range(NUM_STAND_INS)]
    numel = padded_numel(pack([("weight", (STAND_IN_NUMEL,))]), mesh.world_size)
    names = [f"h.{index}" for index in range(NUM_STAND_INS)]
    update = update_by(optimizer, STAND_IN_SHAPE, is_hidden=True) if optimizer else None
    updates = (PlacedUpdate(Span(0, STAND_IN_NUMEL), update),) if update else ()
    return tuple(
        UnitSpec(name, (FlatSpec(name, numel, 1, own.on(mesh), mesh, True, updates),))
        for name, own in zip(names, tables, strict=True)
    )


def as_json(explained: Explanation) -> dict[str, Any]:
    """Everything as values that JSON has; bytes are per rank."""
    table, subject, schedule = explained.table, explained.subject, explained.schedule
    host = explained.held.host
    return {
        "plan": {path: {"value": value, "from": origin} for path, value, origin in plan_table(explained.plan)},
        "mesh": dict(zip(explained.mesh.axes, explained.mesh.sizes, strict=True)),
        "known_from": explained.known_from,
        "table": {kind: asdict(table.place(kind)) for kind in KINDS},
        "rules": {name: {kind: asdict(ruled.place(kind)) for kind in KINDS} for name, ruled in explained.rules.items()},
        "compute": table.compute,
        "wire": table.wire,
        "units": list(map(_unit_as_json, subject.sizes)) or f"{NUM_STAND_INS} x {STAND_IN_NUMEL} (no model given)",
        "optimizer": subject.optimizer,
        "optimizer_states": subject.num_states,
        "batch": subject.batch,
        "bytes": by_kind(explained.held),
        **({} if host is None else {"bytes_on_host": {**host.by_kind, "total": host.total}}),
        **({} if host is None else {"copied_bytes_per_step": explained.copied_bytes}),
        **({} if explained.images is None else {"image_bytes": asdict(explained.images)}),
        **({} if explained.held.disk is None else {"bytes_on_disk": explained.held.disk.by_kind}),
        **({} if explained.tiers is None else {"tiers": explained.tiers.as_json()}),
        **({"budget": subject.budget.splitlines()} if subject.budget else {}),
        "peak_at": _said_peak(explained.held),
        "replicated_bytes": by_kind(explained.replicated),
        "sent_bytes_per_step": explained.sent_bytes,
        "sent_bytes_by_axis": explained.sent_by_axis,
        **({"sent_bytes_by_host": explained.sent_by_hosts} if explained.per_host else {}),
        "program": explained.program,
        **({} if schedule is None else {"schedule": str(schedule), "bubble": timed(schedule).bubble}),
        **({"stages": subject.stages.splitlines()} if subject.stages else {}),
        **({"experts": subject.experts.splitlines()} if subject.experts else {}),
    }


def _unit_as_json(size: UnitSize) -> dict[str, Any]:
    return {key: value for key, value in asdict(size).items() if key not in ("on_host", "activations") or value}


def by_kind(footprint: Footprint) -> dict[str, int]:
    return {**footprint.by_kind, "total": footprint.total}


def _said_peak(footprint: Footprint) -> str | None:
    return None if footprint.peak_at is None else str(footprint.peak_at)


def _planned(plan: Plan, mesh: Mesh, units: Sequence[UnitSpec], subject: Subject) -> StepProgram:
    if subject.activations is not None:
        trace = subject.activations.trace
    elif _pipeline_size(mesh) > 1:
        row = schedule_of(plan, _pipeline_size(mesh)).rows[subject.pipeline_rank]
        trace = schedule_trace(row, straight_passes(row, _by_stage(units, row, subject.stages_of_units)))
    else:
        trace = straight_trace(tuple(units))
    prefetch_bytes = None if plan.prefetch_bytes == "auto" else plan.prefetch_bytes
    return plan_step(units, trace, prefetch_bytes=prefetch_bytes)


def _by_stage(
    units: Sequence[UnitSpec], row: Sequence[Op], stages_of_units: Sequence[Sequence[int]]
) -> dict[int, list[UnitSpec]]:
    """The units of each stage; where that is not known, they are dealt out evenly."""
    stages = sorted({op.stage for op in row})
    if not stages_of_units:
        stages_of_units = [(stages[index * len(stages) // len(units)],) for index in range(len(units))]
    pairs = list(zip(units, stages_of_units, strict=True))
    return {stage: [unit for unit, own in pairs if stage in own] for stage in stages}


def _pipeline_size(mesh: Mesh) -> int:
    return mesh.size("pp") if "pp" in mesh.axes else 1


def _held(plan: Plan, step: StepProgram, subject: Subject) -> Footprint:
    return step.footprint(
        states_per_param=subject.num_states, num_micro_batches=plan.accumulate, activations=subject.activations
    )
