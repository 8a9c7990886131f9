"""Reports on an engine: bytes of a rank, promised and measured, the table, and timelines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.plan import Plan
from shardwise.plan.placement import KINDS, table_for
from shardwise.program import Activations, Footprint, UnitSpec, plan_step, straight_trace
from shardwise.program.schedule import picture, timed
from shardwise.runtime.activations import SAVED, STAGING, Treatments
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.system.heap import keeps_freed_blocks
from shardwise.system.telemetry import write_trace
from shardwise.system.units import format_bytes, format_count

if TYPE_CHECKING:
    from shardwise.runtime.rehearsal import Loss


KEEPS_FREED_BLOCKS = (
    "malloc keeps blocks of up to 32 MiB that are freed, so the process holds more than a plan foresees: start ranks "
    "with `shardwise launch`, or set its variables (docs/launching.md)"
)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank by kind: as the plan promised, as counted at the peak, and as replicas would need.

    Kinds are `param`, `grad`, `optim` (states and master weights) and `working` (gathered parameters and messages at
    their peak). Activations on the device are not included. Activations on the host or on a disk are measured as
    `activations` there, at their peak, and promised by the latest `engine.rehearse`; so is `staging`, host memory
    through which they go to a disk.
    """

    promised: dict[str, int]
    measured: dict[str, int]
    replicated: dict[str, int]
    promised_on_host: dict[str, int] = field(default_factory=dict)
    """Bytes of rows on the host: `param`, `optim`, and `buffers` for gradients and copies; empty if there are none."""
    measured_on_host: dict[str, int] = field(default_factory=dict)
    promised_on_disk: dict[str, int] = field(default_factory=dict)
    """Bytes of the files for rows on a disk: `optim`; empty if there are none."""
    measured_on_disk: dict[str, int] = field(default_factory=dict)
    image_bytes: int = 0
    """Bytes of host memory for images that outlive this rank (docs/elastic.md)."""
    kept_bytes: int = 0
    """Bytes of host memory for copies of what ranks of other hosts hold."""
    image_bytes_on_disk: int = 0
    """Bytes on the disk for both: the second version of each file, and copies of other hosts' files."""
    heap_returns: int = 0
    """How often free pages of the heap were returned to the system, on a CPU ([Note: free heap is returned] in
    `system/heap.py`), and how many bytes in all."""
    heap_returned_bytes: int = 0
    keeps_freed_blocks: bool = False
    """Whether malloc keeps large blocks that are freed, which no promise has room for: ranks that something else than
    `shardwise launch` started, on a CPU ([Note: ranks of other launchers] in `system/heap.py`)."""

    @property
    def promised_total(self) -> int:
        return sum(self.promised.values())

    @property
    def measured_total(self) -> int:
        return sum(self.measured.values())

    @property
    def replicated_total(self) -> int:
        return sum(self.replicated.values())

    def __str__(self) -> str:
        """A table with a line for each kind, and one for the total; and what a promise does not hold for."""
        columns = (self.promised, self.measured, self.replicated)
        totals = (self.promised_total, self.measured_total, self.replicated_total)
        rows = [
            ("bytes of this rank", "promised", "measured", "if replicated"),
            *((kind, *(format_bytes(column[kind]) for column in columns)) for kind in self.promised),
            ("in all", *map(format_bytes, totals)),
            *_below("host", self.promised_on_host, self.measured_on_host),
            *_below("disk", self.promised_on_disk, self.measured_on_disk),
            *_line("images on the host", self.image_bytes),
            *_line("copies for other hosts", self.kept_bytes),
            *_line("images and copies on the disk", self.image_bytes_on_disk),
            *_line(f"free heap, returned {self.heap_returns} times", self.heap_returned_bytes),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{name:{widths[0]}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
            for name, *cells in rows
        ]
        return "\n".join([*lines, KEEPS_FREED_BLOCKS] if self.keeps_freed_blocks else lines)


def _line(name: str, num_bytes: int) -> list[tuple[str, str, str, str]]:
    """A line for what has no promise, if there is any."""
    return [(name, "", format_bytes(num_bytes), "")] if num_bytes else []


def _below(tier: str, promised: dict[str, int], measured: dict[str, int]) -> Iterator[tuple[str, str, str, str]]:
    """Lines for another tier; kinds that are only promised by a rehearsal may have no promise."""
    for kind in {**promised, **measured}:
        foreseen = format_bytes(promised[kind]) if kind in promised else ""
        yield f"{kind} on the {tier}", foreseen, format_bytes(measured.get(kind, 0)), ""


def memory_of(sharded: ShardedModel) -> MemoryReport:
    """Promise and measurement for this rank."""
    specs = tuple(unit.spec for unit in sharded.parts.sharding.units)
    ddp = table_for(Plan(preset="ddp", precision=sharded.plan.precision), sharded.mesh)
    replicas = tuple(spec.under(ddp.on(sharded.mesh)) for spec in specs)
    promised, replicated = _footprint(sharded, specs), _footprint(sharded, replicas)
    on_host = dict(promised.host.by_kind) if promised.host is not None else {}
    on_disk = dict(promised.disk.by_kind) if promised.disk is not None else {}
    treatments, rehearsed = sharded.parts.sharding.treatments, sharded.rehearsed
    if treatments.have("offload") and rehearsed:
        on_host[SAVED] = sum(one.host_bytes for one in rehearsed)
    if treatments.have("disk") and rehearsed:
        on_host[STAGING] = sum(one.staging_bytes for one in rehearsed)
        on_disk[SAVED] = sum(one.disk_bytes for one in rehearsed)
    report = MemoryReport(promised.by_kind, {}, replicated.by_kind, on_host, promised_on_disk=on_disk)
    return measured_anew(sharded, report)


def measured_anew(sharded: ShardedModel, report: MemoryReport) -> MemoryReport:
    """`report`, which is slow to compute, with new measurements."""
    meter, treatments = sharded.parts.sharding.meter, sharded.parts.sharding.treatments
    on_host = _measured_on_host(sharded) if report.promised_on_host.keys() - {SAVED, STAGING} else {}
    on_disk = {kind: meter.on("disk").now[kind] for kind in report.promised_on_disk if kind != SAVED}
    if treatments.have("offload"):
        on_host[SAVED] = meter.on("host").peak[SAVED]
    if treatments.have("disk"):
        on_host[STAGING] = meter.on("host").peak[STAGING]
        on_disk[SAVED] = meter.on("disk").peak[SAVED]
    report = replace(
        report,
        measured=_measured(sharded),
        measured_on_host=on_host,
        measured_on_disk=on_disk,
        keeps_freed_blocks=sharded.parts.sharding.device.type == "cpu" and keeps_freed_blocks(),
    )
    heap = sharded.parts.runner.heap
    return (
        report
        if heap is None
        else replace(report, heap_returns=heap.num_returns, heap_returned_bytes=heap.returned_bytes)
    )


def rehearsed(
    sharded: ShardedModel, batch: object, loss: Loss | None, expert_load: float, *, as_call: bool
) -> Footprint:
    """What a step on `batch` will hold on this rank, including activations; `as_call`: with the model called by a loop
    of one's own."""
    from shardwise.sharded.activation_disk import check_room  # only jobs that ask for it load it
    from shardwise.sharded.rehearsed_step import rehearse_step  # likewise

    treatments = sharded.parts.sharding.treatments
    activations = rehearse_step(sharded, batch, loss, expert_load, treatments, as_call=as_call).activations
    check_room(sharded, activations)
    sharded.rehearsed = (activations,)
    return promise_of(sharded, activations)


def promise_of(sharded: ShardedModel, activations: Activations) -> Footprint:
    """What a step with these activations will hold on this rank."""
    specs = tuple(unit.spec for unit in sharded.parts.sharding.units)
    return _footprint(sharded, specs, activations)


def _footprint(sharded: ShardedModel, specs: tuple[UnitSpec, ...], activations: Activations | None = None) -> Footprint:
    programs = sharded.parts.runner.programs
    is_known = specs == programs.specs or programs.program.is_over_schedule
    trace = programs.trace if is_known else straight_trace(specs)
    trace = trace if activations is None else activations.trace
    planned = plan_step(specs, trace, prefetch_bytes=sharded.plan.prefetch_bytes)
    return planned.footprint(
        states_per_param=0,  # without an optimizer; otherwise each parameter's update determines its states
        coordinate=sharded.mesh.coordinate(sharded.world.rank),
        num_micro_batches=sharded.plan.accumulate,
        activations=activations,
    )


def _measured(sharded: ShardedModel) -> dict[str, int]:
    meter = sharded.parts.sharding.meter
    states = sharded.parts.optimizer.state_bytes() if sharded.parts.optimizer is not None else 0
    resting = meter.now["param"] + meter.now["optim"]
    return {
        "param": meter.now["param"],
        "grad": meter.peak["grad"],
        "optim": meter.now["optim"] + states,
        "working": max(0, meter.peak_total - resting - meter.peak["grad"]),
    }


def _measured_on_host(sharded: ShardedModel) -> dict[str, int]:
    held = sharded.parts.sharding.meter.on("host").now
    states = sharded.parts.optimizer.state_bytes("host") if sharded.parts.optimizer is not None else 0
    return {"param": held["param"], "optim": held["optim"] + states, "buffers": held["buffers"]}


def describe(sharded: ShardedModel) -> str:
    """The table, the units, and the bytes of this rank."""
    plan, world, table, units = sharded.plan, sharded.world, sharded.table, sharded.parts.sharding.units
    memory = memory_of(sharded)
    lines = (
        f"{plan.preset} on {sharded.mesh}, rank {world.rank} of {world.size}",
        *_transport_lines(sharded),
        f"table, computing in {table.compute}, gradients travelling in {table.grad_wire}",
        *(f"  {kind:6} {table.place(kind)}" for kind in KINDS),
        *_island_lines(sharded),
        *sharded.parts.sharding.fitted.splitlines(),
        f"{len(units)} units",
        *(f"  {unit.name:24} {_unit_text(unit.spec, sharded.parts.sharding.treatments)}" for unit in units),
        "bytes of this rank, as promised",
        *(f"  {kind:8} {format_bytes(num_bytes)}" for kind, num_bytes in memory.promised.items()),
        *(f"  {kind:8} {format_bytes(num_bytes)} on the host" for kind, num_bytes in memory.promised_on_host.items()),
        *(f"  {kind:8} {format_bytes(num_bytes)} on the disk" for kind, num_bytes in memory.promised_on_disk.items()),
        *str(sharded.converted).splitlines(),
        *_expert_lines(sharded),
        *_stage_lines(sharded),
    )
    return "\n".join(lines)


def _island_lines(sharded: ShardedModel) -> list[str]:
    """Where the model is that islands have in common, and when they come together."""
    steps, outer = sharded.parts.runner.programs.program.outer_steps, sharded.table.outer
    if not steps or outer is None:
        return []
    from shardwise.program.outer_step import in_words  # only plans with islands load it

    return [f"  anchor {outer.place}", "outer steps, between islands", *(f"  {line}" for line in in_words(steps))]


def _expert_lines(sharded: ShardedModel) -> list[str]:
    """Which rank along `ep` has which experts."""
    experts = sharded.parts.sharding.experts
    return [] if experts is None else ["experts", *(f"  {line}" for line in str(experts).splitlines())]


def _stage_lines(sharded: ShardedModel) -> list[str]:
    """Which rank has which stage of a pipeline, and the grid of its schedule."""
    if sharded.parts.pipeline is None:
        return []
    layout = sharded.parts.pipeline.layout
    bubble = timed(layout.schedule).bubble
    lines = ["stages", *str(layout).splitlines(), f"schedule {layout.schedule.name}, {bubble:.0%} of it waiting"]
    return [*lines[:1], *(f"  {line}" for line in lines[1:-1]), lines[-1], *picture(layout.schedule).splitlines()]


def _transport_lines(sharded: ShardedModel) -> list[str]:
    """Such as `bytes travel along local by shared memory, along node by gloo`."""
    world, mesh = sharded.world, sharded.mesh
    if world.size == 1:
        return []
    collectives = world.collectives(sharded.parts.sharding.device)
    lines = {axis: world.group(mesh, axis) for axis in mesh.axes if mesh.size(axis) > 1}
    ways = [f"along {axis} by {collectives.transport(line)}" for axis, line in lines.items()]
    return [f"bytes travel {', '.join(ways)}"]


def _unit_text(unit: UnitSpec, treatments: Treatments) -> str:
    frozen = sum(flat.numel for flat in unit.flats if not flat.trainable)
    numel = sum(flat.numel for flat in unit.flats)
    updated = ", updated on the host" if any(flat.updates_below for flat in unit.flats) else ""
    updated += ", states on the disk" if any(flat.updates_from_disk for flat in unit.flats) else ""
    updated += ", parameters on the host" if any(flat.tier_of("param") == "host" for flat in unit.flats) else ""
    updated += ", parameters on the disk" if any(flat.rests_on_disk for flat in unit.flats) else ""
    updated += f", {treatments.describe(unit.name)}" if treatments.describe(unit.name) else ""
    return format_count(numel) + (f", {format_count(frozen)} of them frozen" if frozen else "") + updated


@contextmanager
def write_timeline(sharded: ShardedModel, path: Path) -> Iterator[None]:
    """Write the timeline of every rank inside the context to `path`, as rank 0. All ranks must call."""
    sharded.parts.timeline.start()
    try:
        yield
    finally:
        events = sharded.parts.timeline.stop()
    told = sharded.world.exchange(json.dumps(events).encode(), "timeline")
    if sharded.world.rank == 0:
        write_trace(path, [json.loads(message) for message in told])
