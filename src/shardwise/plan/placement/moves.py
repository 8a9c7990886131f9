"""The moves from one place to another. Nothing else in the library decides what to communicate."""

from __future__ import annotations

from typing import Literal, NamedTuple

from shardwise.plan.placement.place import DEPTH, WIDTH, Axes, Dtype, Place, wider

MoveVerb = Literal["cast", "fetch", "evict", "slice", "gather", "reduce_scatter", "all_reduce"]


class Move(NamedTuple):
    """One step on the way: `gather(local)`, `fetch(host)`, `cast(bf16)`.

    `dtype` is that of the bytes after the move.
    """

    verb: MoveVerb
    over: str
    dtype: Dtype

    def __str__(self) -> str:
        return f"{self.verb}({self.over})"


def moves(source: Place, target: Place, order: Axes) -> list[Move]:
    """The moves that turn `source` into `target`, in the order that sends the fewest bytes.

    `order` is the table's: see [Note: why places nest] in `table.py`. Narrowing moves (slice, reduce-scatter) follow
    it, widening ones (gather) go against it. Axes that are summed without being split have no place in the order and
    come after the scatters, when there is less to sum.

    Only shards are copied between tiers: bytes are fetched before they are gathered, and evicted after they are
    reduced. Only narrow bytes are sent: a narrowing cast comes first (after the fetch if the bytes lie on disk, where
    nothing can be computed), a widening cast last. A sum does its own cast: it is taken, and kept, in the wider of the
    two dtypes.
    """
    summed = [axis for axis in source.partial if axis not in target.partial]
    narrows = WIDTH[target.dtype] < WIDTH[source.dtype] and not summed
    path = _nearer(source, target, narrows=narrows)
    dtype = target.dtype if narrows else source.dtype
    for axis in (axis for axis in order if axis in target.shard and axis not in source.shard):
        if axis in summed:
            dtype = wider(dtype, target.dtype)
        path.append(Move("reduce_scatter" if axis in summed else "slice", axis, dtype))
    for axis in (axis for axis in reversed(summed) if axis not in target.shard):
        dtype = wider(dtype, target.dtype)
        path.append(Move("all_reduce", axis, dtype))
    path += [
        Move("gather", axis, dtype) for axis in reversed(order) if axis in source.shard and axis not in target.shard
    ]
    if dtype != target.dtype:
        path.append(Move("cast", target.dtype, target.dtype))
    if DEPTH[target.tier] > DEPTH[source.tier]:
        path.append(Move("evict", target.tier, target.dtype))
    return path


def _nearer(source: Place, target: Place, *, narrows: bool) -> list[Move]:
    """The moves that precede communication: a narrowing cast, where it can be computed, and a fetch."""
    cast = [Move("cast", target.dtype, target.dtype)] if narrows else []
    if DEPTH[target.tier] >= DEPTH[source.tier]:
        return cast
    if source.tier == "disk":
        return [Move("fetch", source.tier, source.dtype), *cast]
    return [*cast, Move("fetch", source.tier, target.dtype if narrows else source.dtype)]
