"""Which flat buffers rest in memory that the ranks of one host share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial

from shardwise.comm import Buffers, Group, Part, SharedBuffers
from shardwise.memory.dtypes import torch_dtype
from shardwise.memory.flat import Flat
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Axes


def share(flats: Iterable[Flat], collectives: Buffers, mesh: Mesh, rank: int) -> list[SharedBuffers]:
    """Put parameters at rest into shared memory, for every line of ranks that shares memory. All ranks call, before
    first values.

    The returned buffers are open: `close` them when the values are there.
    """
    if mesh.world_size == 1:
        return []
    by_axes: dict[Axes, list[Flat]] = defaultdict(list)
    for flat in flats:
        flat.send_from(collectives)
        if flat.spec.is_shareable:
            by_axes[flat.spec.table.param.shard].append(flat)
    found = []
    for axes, sharded in by_axes.items():
        parts, lines = [_part(flat) for flat in sharded], partial(_lines, axes, mesh)
        shared_buffers = collectives.shared_buffers(_line(axes, mesh, rank), parts, lines)
        if shared_buffers is not None:
            found.append(shared_buffers)
            for flat, piece in zip(sharded, shared_buffers.pieces, strict=True):
                flat.shared = piece
    return found


def _part(flat: Flat) -> Part:
    size = torch_dtype(flat.spec.table.compute).itemsize
    return Part(flat.spec.numel * size, flat.param_span.start * size, flat.param_span.stop * size)


def _line(axes: Axes, mesh: Mesh, rank: int) -> Group:
    ranks = mesh.among(rank, axes)
    return Group("+".join(axes), ranks, ranks.index(rank))


def _lines(axes: Axes, mesh: Mesh) -> set[tuple[int, ...]]:
    return {mesh.among(rank, axes) for rank in range(mesh.world_size)}
