"""How long a step would take with other numbers of ranks: the program of one rank laid on other meshes. Pure.

[Note: the same batch] The global batch stays, as it does in an elastic job, so that each of twice as many ranks
computes half as much. That is not rehearsed again: the operations that were counted are taken with fewer or more rows.
What ranks send and update is planned anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardwise.errors import ConfigError
from shardwise.fit.clock import RankProgram, time_ranks
from shardwise.fit.hardware import Hardware
from shardwise.fit.operations import Operation, Operations, Work, Worked
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Table
from shardwise.plan.replica_groups import group_size, mesh_over
from shardwise.program import plan_step
from shardwise.program.spec import FlatSpec
from shardwise.program.step_program import PrefetchBytes
from shardwise.system.even_parts import round_up


def sizes_up_to(most: int, axes: Mapping[str, int]) -> list[int]:
    """Numbers of ranks for which to predict, in whole replica groups: each about a third more than the one before."""
    unit, found = group_size(axes), list[int]()
    groups = 1
    while groups * unit <= most:
        found.append(groups * unit)
        groups = max(groups + 1, groups * 4 // 3)
    last = most // unit * unit
    return found if last in found or not last else [*found, last]


def seconds_by_size(
    program: RankProgram,
    hardware: Hardware,
    mesh: Mesh,
    table: Table,
    sizes: Iterable[int],
    *,
    num_micro_batches: int,
    prefetch_bytes: PrefetchBytes = "auto",
) -> dict[int, float]:
    """Seconds of a step by the number of ranks, for those of `sizes` that are whole replica groups.

    `program` is of a rank on `mesh`, `table` the plan's for all axes of the mesh. Of each node as many ranks take part
    as now, or fewer if there are fewer in all (`Hardware.with_ranks_left`). Empty in a pipeline, and where parameters
    have other tables: then the program does not tell what it would be elsewhere.
    """
    if program.row or any(not _is_of(flat, table, mesh) for flat in _flats(program)):
        return {}
    axes = mesh.named_sizes
    found = {}
    for size in sizes:
        try:
            other = mesh_over(axes, size)
        except ConfigError:  # no whole replica groups
            continue
        moved = _on(program, other, table, mesh.world_size / size, prefetch_bytes)
        there = hardware.with_ranks_left(min(size, hardware.ranks_per_node))
        found[size] = time_ranks([moved], there, other, num_micro_batches=num_micro_batches).step_seconds
    return found


def _on(program: RankProgram, mesh: Mesh, table: Table, share: float, prefetch_bytes: PrefetchBytes) -> RankProgram:
    units = tuple(
        replace(unit, flats=tuple(_flat_on(flat, mesh, table) for flat in unit.flats)) for unit in program.step.units
    )
    trace = tuple(block.moment for block in program.step.micro_batch if block.moment.unit)  # the last is of no unit
    step = plan_step(units, trace, prefetch_bytes=prefetch_bytes)
    return replace(program, step=step, work=_scaled(program.work, share))


def _flats(program: RankProgram) -> list[FlatSpec]:
    return [flat for unit in program.step.units for flat in unit.flats]


def _is_of(flat: FlatSpec, table: Table, mesh: Mesh) -> bool:
    return flat.table == table.on(mesh)


def _flat_on(flat: FlatSpec, mesh: Mesh, table: Table) -> FlatSpec:
    unit = mesh.num_replicas * table.align
    used = max((placed.span.stop for placed in flat.updates), default=flat.numel)
    return replace(flat, mesh=mesh, table=table.on(mesh), numel=round_up(used, unit), even_numel=None)


def _scaled(work: Work, share: float) -> Sequence[Worked]:
    assert not isinstance(work, Mapping), "what a rehearsal has counted is by moment"
    return [
        replace(
            one,
            operations=_part(one.operations, one.weights, share),
            recomputed=_part(one.recomputed, (), share),
            weights=_part(one.weights, one.weights, share),
        )
        for one in work
    ]


def _part(operations: Operations, weights: Operations, share: float) -> Operations:
    of_weights = set(weights)
    return tuple(_times(one, share, sums_rows=one in of_weights) for one in operations)


def _times(one: Operation, share: float, *, sums_rows: bool) -> Operation:
    """`one` over `share` of its rows, which the products for gradients of weights sum up, and which are the first
    dimension of other products, or their batch."""
    shape = list(one.shape)
    if shape and one.kind in ("product", "attention"):
        dim = 0 if one.kind == "attention" else 3 if len(shape) == 4 else 2 if sums_rows else 0
        shape[dim] = max(1, round(shape[dim] * share))
    blocks = tuple(round(size * share) for size in one.allocated_bytes)
    num_bytes, flops = one.num_bytes * share, one.flops * share
    return replace(one, shape=tuple(shape), flops=flops, num_bytes=num_bytes, allocated_bytes=blocks)
