"""The content of `explain` as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise.fit.loss_price import LossPrice, Rates, loss_prices
from shardwise.fit.prices import Prices
from shardwise.fit.step_time import StateCopies, StepTime
from shardwise.fit.tier_time import TierTime, tier_time
from shardwise.observe.differences import Difference
from shardwise.plan import Plan, plan_table
from shardwise.plan.mesh import EXPERT_AXIS, MODEL_AXES, SEQUENCE_AXIS, STAGE_AXIS, Mesh
from shardwise.plan.placement import (
    KINDS,
    WIDTH,
    Offloaded,
    Span,
    Table,
    UnitNumel,
    check_offload,
    pack,
    padded_numel,
    ruled_tables,
    table_for,
)
from shardwise.plan.replica_groups import Smaller, num_leaving
from shardwise.program import (
    Activations,
    Buffer,
    FactoredMatrix,
    FlatSpec,
    Footprint,
    PlacedUpdate,
    StepProgram,
    UnitSpec,
    actions_of,
    plan_step,
    render,
    schedule_trace,
    shortened,
    straight_passes,
    straight_trace,
    update_by,
)
from shardwise.program.buddies import CopyBytes, copy_bytes
from shardwise.program.image_bytes import ON_ACCELERATOR, ImageBytes, image_bytes, what_begins_anew, why_no_images
from shardwise.program.outer_step import in_words as outer_steps_in_words
from shardwise.program.schedule import Op, Schedule, schedule_of, timed
from shardwise.program.verification import build_verification, in_words, why_not_recomputed
from shardwise.system.calibration import Calibration
from shardwise.system.units import format_bytes, format_seconds

NUM_EXAMPLES = 4
EXAMPLE_SHAPE = (2**10, 2**10)
EXAMPLE_NUMEL = 2**20


@dataclass(frozen=True)
class UnitSize:
    """A unit of a real model: the elements of its parameters, and of the frozen ones."""

    name: str
    numel: int
    frozen_numel: int = 0
    on_host: str = ""
    """A description of what is offloaded."""
    activations: str = ""
    """A description of how activations are treated, unless they are simply kept."""


@dataclass(frozen=True)
class Subject:
    """What is trained: the units of a model, or example units, and what is known about the optimizer.

    `sizes` is empty for example units. `batch` is the source of the batch on which `activations` were counted.
    """

    units: tuple[UnitSpec, ...]
    sizes: tuple[UnitSize, ...] = ()
    num_states: int = 2
    optimizer: str | None = None
    activations: Activations | None = None
    """Those of the model; with a pipeline, those of everything that the rank does in a step."""
    batch: str | None = None
    activation_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of activations and their gradients that a rank sends in one forward and backward on the batch, by mesh
    axis."""
    tied_bytes: int = 0
    """Bytes that a rank sends in one step to other stages, for gradients of parameters that they have too."""
    stages: str = ""
    """With a pipeline: which rank has which modules."""
    pipeline_rank: int = 0
    """With a pipeline: the place of the units."""
    stages_of_units: tuple[tuple[int, ...], ...] = ()
    """With a pipeline: for each unit the stages that use it; empty if unknown."""
    experts: str = ""
    """Which rank along `ep` has which experts."""
    conversions: str = ""
    """The modules that compute otherwise than in the plain model."""
    expert_load: float = 0.0
    """The load of experts in the rehearsal, as a multiple of an even share of the tokens."""
    row_numel: int = 0
    """Elements that are sent to experts for one choice of one token, in all layers together."""
    budget: str = ""
    """The result of the plan's budget, and the reason for it."""
    smaller: Smaller = ()
    """The meshes on which an elastic job goes on without a whole replica group."""
    smaller_times: str = ""
    """How long a step takes on each mesh with fewer ranks than a group has, in words, if that is foreseen."""
    smaller_seconds: Mapping[int, float] = field(default_factory=dict)
    """The same by the number of ranks."""
    why_no_smaller: str = ""
    """Why there is none, if a reason is known."""
    room_after_a_loss: str = ""
    """How much of a host's memory the ranks take that are left without one, in a sentence."""


@dataclass(frozen=True)
class Explanation:
    """A plan on a mesh: its table, the program of one step, and what each rank holds and sends.

    `held` is what each rank holds, `replicated` what it would hold without sharding.
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
    """What tiers cost a rank in a step; `None` if everything is on the device."""
    per_host: int = 0
    """Ranks per host; 0 if not given, and all are on one."""
    time: StepTime | None = None
    """How long a step takes, if that was asked for."""
    measured: Difference | None = None
    """The same beside what the plan's own run has measured, if it has run like this."""
    checkpoint_every: float | None = None
    """Seconds between two checkpoints, if that was given."""
    memory_rate: float | None = None
    """Bytes of memory that the machine was measured to copy in a second."""
    disk_rate: float | None = None
    """Bytes that a rank reads from the plan's disk, and writes there again, in a second, if that was measured."""

    @property
    def losses(self) -> list[LossPrice]:
        """What losing a rank, a host or the launcher costs an elastic job; nothing of a single rank. Hosts have
        `per_host` ranks, or all."""
        if self.mesh.world_size == 1:
            return []
        step = None if self.time is None else self.time.step_seconds
        on_device = self.time is not None and not self.time.hardware.is_processor
        return loss_prices(
            self.mesh,
            self._flats,
            self.subject.num_states,
            per_host=self.per_host or self.mesh.world_size,
            survive=self.plan.survive,
            why_restarted=self.why_restarted or (ON_ACCELERATOR if on_device else ""),
            smaller=self.subject.smaller,
            rates=Rates(step, self.checkpoint_every, self.memory_rate, self.disk_rate),
        )

    @property
    def begins_anew(self) -> str:
        """What an elastic job lets go of when ranks leave or join; empty if nothing is."""
        return what_begins_anew(self._flats)

    @property
    def why_restarted(self) -> str:
        """Why an elastic job with this plan restarts from its last checkpoint when a rank is lost; empty if the other
        ranks continue."""
        if self.plan.survive == "checkpoint":
            return "the plan says survive: checkpoint"
        return why_no_images(self.mesh, self.subject.smaller, self.subject.why_no_smaller)

    @property
    def num_leaving(self) -> int:
        """How many ranks leave an elastic job when one of them is lost: those of its replica group or island, or those
        without a place on the smaller mesh on which the others go on."""
        return num_leaving(self.mesh, self.subject.smaller)

    @property
    def images(self) -> ImageBytes | None:
        """The images from which a lost rank is restored, if the plan keeps them in the host's memory."""
        if self.plan.survive not in ("host", "buddy") or self.why_restarted:
            return None
        return image_bytes(self._flats, self.subject.num_states)

    @property
    def copies(self) -> CopyBytes | None:
        """What is copied to other hosts during each next step, if the plan says so. Hosts have `per_host` ranks, or
        one."""
        if self.plan.survive != "buddy" or self.why_restarted:
            return None
        hosts = [rank // max(1, self.per_host) for rank in range(self.mesh.world_size)]
        return copy_bytes(self._flats, self.subject.num_states, hosts)

    @property
    def state_copies(self) -> StateCopies | None:
        """What an elastic job copies of a rank's state beside each step."""
        if self.images is None or not self.images.copy:
            return None
        return StateCopies(0 if self.copies is None else self.copies.sent, self.images.copy)

    @property
    def _flats(self) -> list[FlatSpec]:
        return [flat for unit in self.subject.units for flat in unit.flats]

    @property
    def rules(self) -> dict[str, Table]:
        """The tables of the plan's rules, by name."""
        return ruled_tables(self.plan, self.mesh)

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of micro-batches, if the mesh has a pipeline."""
        num_ranks = self.mesh.degree(STAGE_AXIS)
        return schedule_of(self.plan, num_ranks) if num_ranks > 1 else None

    @property
    def verification(self) -> str:
        """What is added to verified steps, if there are any: what is compared, what it costs, and the actions."""
        every, gradients = self.plan.verify.every, self.plan.verify.gradients
        again = []
        if gradients is not None:
            why = why_not_recomputed(self.mesh, is_elastic=False, is_deterministic=True)
            what = f"refused, because {why}" if why else "one micro-batch of each rank, computed by two"
            again = [f"before each {gradients}th step: {what}"]
        if every is None:
            return "\n".join(again)
        program = build_verification(self.subject.units)
        lines = in_words(self.subject.units, every)
        if self.time is not None:
            prices = Prices(self.step, self.time.hardware, self.mesh, num_states=self.subject.num_states)
            seconds = prices.verification(program, self.plan.accumulate)
            share = seconds / every / self.time.step_seconds
            lines.append(f"takes {format_seconds(seconds)} of such a step, {share:.2%} of the time of all")
        return "\n".join([*lines, *again, shortened(render(program))])

    @property
    def outer_steps(self) -> str:
        """With islands: when they come together, what that sends, and the actions of the first fragment."""
        steps = self.step.outer_steps
        if not steps:
            return ""
        lines, every = outer_steps_in_words(steps), steps[0].fragment.every
        if self.time is not None:
            prices = Prices(self.step, self.time.hardware, self.mesh, num_states=self.subject.num_states)
            actions = (action for step in steps for action in actions_of(step.program))
            seconds = sum(cost.seconds + cost.computing for cost in map(prices.of, actions))
            share = seconds / every / self.time.step_seconds
            lines.append(
                f"takes {format_seconds(seconds)} in {every} steps if nothing overlaps, {share:.2%} of their time"
            )
        first = render(tuple(block for block in steps[0].program if block.actions))
        return "\n".join([*lines, shortened(first)])

    @property
    def program(self) -> str:
        return render(self.step.micro_batch) + render(self.step.step)

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends in one optimizer step with all its micro-batches, including activations if they
        were counted."""
        return sum(self.sent_by_axis.values())

    @property
    def copied_bytes(self) -> dict[str, int]:
        """Bytes that go between one rank's device and the host in one optimizer step, by `evict` and `fetch`."""
        return self.step.copied_bytes(self.plan.accumulate)

    @property
    def sent_by_axis(self) -> dict[str, int]:
        """`sent_bytes` by mesh axis."""
        sent = Counter(self.params_by_axis)
        sent.update(self.activations_by_axis)
        return dict(sent)

    @property
    def params_by_axis(self) -> dict[str, int]:
        """Bytes that one rank sends in one optimizer step for parameters and gradients, by mesh axis."""
        sent = Counter(self.step.sent_by_axis(self.plan.accumulate))
        if self.subject.tied_bytes:
            sent[STAGE_AXIS] += self.subject.tied_bytes
        return dict(sent)

    @property
    def activations_by_axis(self) -> dict[str, int]:
        """Bytes of activations and their gradients that one rank sends in all micro-batches of a step, by mesh axis;
        empty if they were not counted."""
        return {axis: sent * self.plan.accumulate for axis, sent in self.subject.activation_bytes.items() if sent}

    @property
    def uncounted_axes(self) -> list[str]:
        """The axes along which activations are sent that were not counted, because there is no batch."""
        axes = [axis for axis in self.mesh.axes if axis in MODEL_AXES and self.mesh.size(axis) > 1]
        return [] if self.subject.batch else axes

    @property
    def held_in_shared_memory(self) -> Footprint | None:
        """What each rank of a host holds if these share its memory, as on CPUs; `None` if nothing is saved by that."""
        held = _held(self.plan, self.step, self.subject, self.per_host or 1)
        return held if held.total < self.held.total else None

    @property
    def sent_by_hosts(self) -> list[int]:
        """Bytes that leave each host in one optimizer step for parameters and gradients, on the CPU."""
        return self.step.sent_by_hosts(self.mesh, self.per_host, self.plan.accumulate)

    @property
    def attention(self) -> str | None:
        """What attention over split sequences sends, if it was not counted."""
        mesh = self.mesh
        if SEQUENCE_AXIS not in self.uncounted_axes:
            return None
        size = mesh.size(SEQUENCE_AXIS)
        ulysses = f"{size - 1}/{size} of a rank's queries, keys, values and outputs, each way"
        ring = f"a rank's keys and values {size - 1} times each way, and their gradients in fp32 {size} times"
        texts = {"ulysses": f"ulysses sends {ulysses}", "ring": f"ring sends {ring}"}
        kinds = list(texts) if self.plan.sequence.attention == "auto" else [self.plan.sequence.attention]
        text = ", or ".join(texts[kind] for kind in kinds)
        return f"Along {SEQUENCE_AXIS}, in each layer, {text}."

    @property
    def dispatch(self) -> str | None:
        """What is sent to experts, if it was not counted, or the load for which it was; `None` without experts."""
        if not self.mesh.has_experts:
            return None
        if self.subject.batch is not None:
            return (
                f"Experts are counted with {self.subject.expert_load:g} times an even share of the tokens, or, with a "
                f"capacity, with the most that all ranks may send."
            )
        size = self.mesh.size(EXPERT_AXIS)
        rows = "a row of its hidden state"
        if self.subject.row_numel:
            num_bytes = self.subject.row_numel * WIDTH[self.table.compute]
            rows = f"{format_bytes(num_bytes)} in all layers together"
        return (
            f"Along {EXPERT_AXIS}, for each token and each of its experts, {rows}, there and back, in forward and in "
            f"backward; {size - 1}/{size} of it goes to other ranks if experts are evenly loaded."
        )


def explain(
    plan: Plan,
    mesh: Mesh,
    table: Table,
    known_from: str,
    subject: Subject,
    calibration: Calibration | None = None,
    *,
    per_host: int = 0,
) -> Explanation:
    """Plan one step of the subject's units, and the same step with a replica on every rank.

    Units are used in the order of the rehearsal that counted activations, else one after the other. `calibration` has
    the measured rates of the machine, which `per_host` ranks share; default: all of them.
    """
    copies = table_for(Plan(preset="ddp", precision=plan.precision), mesh).on(mesh)
    replicas = tuple(unit.under(copies) for unit in subject.units)
    step, replicated = (_planned(plan, mesh, some, subject) for some in (subject.units, replicas))
    held = _held(plan, step, subject)
    tiers = tier_time(
        step,
        held,
        calibration or Calibration(),
        num_micro_batches=plan.accumulate,
        num_local=per_host or mesh.world_size,
        folder=plan.disk,
    )
    whole = _held(plan, replicated, subject)
    memory = calibration.memory.copy_bytes_per_second if calibration and calibration.memory else None
    measured = calibration.disk_at(plan.disk) if calibration and plan.disk else None
    disk = None
    if measured is not None:
        seconds_per_byte = 1 / measured.read_bytes_per_second + 1 / measured.write_bytes_per_second
        disk = 1 / seconds_per_byte / (per_host or mesh.world_size)
    return Explanation(
        plan, mesh, table, known_from, subject, step, held, whole, tiers, per_host, memory_rate=memory, disk_rate=disk
    )


def describe_offload(flats: Sequence[FlatSpec]) -> str:
    """The parts of a unit that are on the host, and on a disk, in words; empty if there are none."""
    what: dict[Buffer, str] = {"param": "parameters", "grad": "gradients", "master": "update"}
    on_disk = any(flat.updates_from_disk for flat in flats)
    rests = any(flat.rests_on_disk for flat in flats)
    meant = {buffer: [flat for flat in flats if flat.trainable or buffer == "param"] for buffer in what}
    there = [word for buffer, word in what.items() if any(flat.tier_of(buffer) == "host" for flat in meant[buffer])]
    there += ["update"] if on_disk else []
    parts = [f"{', '.join(there)} on the host"] if there else []
    below = [word for word, is_there in (("parameters", rests), ("states", on_disk)) if is_there]
    return ", ".join([*parts, f"{' and '.join(below)} on the disk"] if below else parts)


def example_units(table: Table, mesh: Mesh, plan: Plan, optimizer: str | None = None) -> tuple[UnitSpec, ...]:
    """Example units for an explanation without a model."""
    sizes = [UnitNumel(1, 1)] * NUM_EXAMPLES
    check_offload(plan, mesh, sizes)
    offloaded = Offloaded.of(plan.offload, sizes)
    tables = [offloaded.table(index, table) for index in range(NUM_EXAMPLES)]
    numel = padded_numel(pack([("weight", (EXAMPLE_NUMEL,))]), mesh.world_size, table.align)
    names = [f"h.{index}" for index in range(NUM_EXAMPLES)]
    update = update_by(optimizer, EXAMPLE_SHAPE, is_hidden=True) if optimizer else None
    span = Span(0, EXAMPLE_NUMEL)
    updates = (PlacedUpdate(span, update),) if update else ()
    if update is not None and update.summands:
        tables = [own.with_summands() for own in tables]
    matrix = table.low_rank.matrix_of(EXAMPLE_SHAPE) if table.low_rank is not None and table.on(mesh).axes else None
    factored = (FactoredMatrix(0, span, *matrix),) if matrix is not None else ()
    return tuple(
        UnitSpec(name, (FlatSpec(name, numel, 1, own.on(mesh), mesh, True, updates, factored=factored),))
        for name, own in zip(names, tables, strict=True)
    )


def _codes_as_json(table: Table, mesh: Mesh) -> dict[str, dict[str, Any]]:
    found = {"param": table.param_codes, "frozen": table.frozen_codes, "grad": table.on(mesh).grad_codes}
    return {
        kind: {
            "as": str(codes),
            "along": list(codes.axes),
            **({} if codes.feedback is None else {"feedback": asdict(codes.feedback)}),
            **({} if codes.rest is None else {"rest": str(codes.rest)}),
            **({"rests": True} if codes.rests else {}),
        }
        for kind, codes in found.items()
        if codes is not None
    }


def as_json(explained: Explanation) -> dict[str, Any]:
    """Everything as JSON values; bytes are per rank."""
    table, subject, schedule = explained.table, explained.subject, explained.schedule
    host, shared = explained.held.host, explained.held_in_shared_memory
    return {
        "plan": {path: {"value": value, "from": origin} for path, value, origin in plan_table(explained.plan)},
        "mesh": explained.mesh.named_sizes,
        "known_from": explained.known_from,
        "table": {kind: asdict(table.place(kind)) for kind in KINDS},
        "rules": {name: {kind: asdict(ruled.place(kind)) for kind in KINDS} for name, ruled in explained.rules.items()},
        "compute": table.compute,
        "wire": {"param": str(table.param_wire or table.param.dtype), "grad": str(table.grad_wire)},
        **({"codes": codes} if (codes := _codes_as_json(table, explained.mesh)) else {}),
        "units": list(map(_unit_as_json, subject.sizes)) or f"{NUM_EXAMPLES} x {EXAMPLE_NUMEL} (no model given)",
        "optimizer": subject.optimizer,
        "optimizer_states": subject.num_states,
        "batch": subject.batch,
        "bytes": by_kind(explained.held),
        **({} if host is None else {"bytes_on_host": {**host.by_kind, "total": host.total}}),
        **({} if host is None else {"copied_bytes_per_step": explained.copied_bytes}),
        **({"begins_anew": explained.begins_anew} if explained.begins_anew else {}),
        **({"restarted_because": explained.why_restarted} if explained.why_restarted else {}),
        **({"losses": [one.as_json() for one in explained.losses]} if explained.losses else {}),
        **({"room_after_a_loss": subject.room_after_a_loss} if subject.room_after_a_loss else {}),
        **({"ranks_that_leave": explained.num_leaving} if not explained.why_restarted else {}),
        **({"smaller_meshes": subject.smaller_times.split("; ")} if subject.smaller_times else {}),
        **({} if explained.images is None else {"image_bytes": asdict(explained.images)}),
        **({} if explained.copies is None else {"copy_bytes": asdict(explained.copies)}),
        **({} if explained.held.disk is None else {"bytes_on_disk": explained.held.disk.by_kind}),
        **({} if explained.tiers is None else {"tiers": explained.tiers.as_json()}),
        **({} if explained.time is None else {"time": explained.time.as_json()}),
        **({} if explained.measured is None else {"measured_seconds": explained.measured.measured}),
        **({"budget": subject.budget.splitlines()} if subject.budget else {}),
        **({} if shared is None else {"bytes_in_shared_memory": by_kind(shared)}),
        "peak_at": _peak_moment(explained.held),
        "replicated_bytes": by_kind(explained.replicated),
        "sent_bytes_per_step": explained.sent_bytes,
        "sent_bytes_by_axis": explained.sent_by_axis,
        "activation_bytes_by_axis": explained.activations_by_axis,
        **({"sent_bytes_by_host": explained.sent_by_hosts} if explained.per_host else {}),
        "program": explained.program,
        **({"verification": explained.verification} if explained.verification else {}),
        **({"outer_steps": explained.outer_steps.splitlines()} if explained.outer_steps else {}),
        **({} if schedule is None else {"schedule": str(schedule), "bubble": timed(schedule).bubble}),
        **({"stages": subject.stages.splitlines()} if subject.stages else {}),
        **({"experts": subject.experts.splitlines()} if subject.experts else {}),
        **({"conversions": subject.conversions.splitlines()} if subject.conversions else {}),
    }


def _unit_as_json(size: UnitSize) -> dict[str, Any]:
    return {key: value for key, value in asdict(size).items() if key not in ("on_host", "activations") or value}


def by_kind(footprint: Footprint) -> dict[str, int]:
    return {**footprint.by_kind, "total": footprint.total}


def _peak_moment(footprint: Footprint) -> str | None:
    return None if footprint.peak_at is None else str(footprint.peak_at)


def _planned(plan: Plan, mesh: Mesh, units: Sequence[UnitSpec], subject: Subject) -> StepProgram:
    if subject.activations is not None:
        trace = subject.activations.trace
    elif mesh.has_stages:
        row = schedule_of(plan, mesh.degree(STAGE_AXIS)).rows[subject.pipeline_rank]
        trace = schedule_trace(row, straight_passes(row, _by_stage(units, row, subject.stages_of_units)))
    else:
        trace = straight_trace(tuple(units))
    return plan_step(units, trace, prefetch_bytes=plan.prefetch_bytes)


def _by_stage(
    units: Sequence[UnitSpec], row: Sequence[Op], stages_of_units: Sequence[Sequence[int]]
) -> dict[int, list[UnitSpec]]:
    """The units of each stage; if that is unknown, they are divided evenly."""
    stages = sorted({op.stage for op in row})
    if not stages_of_units:
        stages_of_units = [(stages[index * len(stages) // len(units)],) for index in range(len(units))]
    pairs = list(zip(units, stages_of_units, strict=True))
    return {stage: [unit for unit, own in pairs if stage in own] for stage in stages}


def _held(plan: Plan, step: StepProgram, subject: Subject, per_host: int = 1) -> Footprint:
    """What each rank holds; `per_host` ranks share memory."""
    return step.footprint(
        states_per_param=subject.num_states,
        num_micro_batches=plan.accumulate,
        activations=subject.activations,
        local_size=per_host,
    )
