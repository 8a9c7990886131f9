"""Which rank keeps a copy of another's state on another host, and what that costs. Pure.

Known from in-memory checkpoints to peers: Gemini (Wang et al., SOSP 2023) and the buddies of diskless checkpointing
(Plank, Li and Puening, 1998).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Axes
from shardwise.plan.replica_groups import copy_axes, group_place, is_lone, shrinks
from shardwise.program.host_bytes import lines_on_hosts
from shardwise.program.image_bytes import image_bytes, rows_bytes
from shardwise.program.spec import FlatSpec

Keepers = tuple[int | None, ...]
"""By rank: who keeps a copy of its state; `None` if nobody has to."""


def buddies(hosts: Sequence[Hashable]) -> tuple[int, ...]:
    """By rank: a rank of another host, for copies. `hosts` has the host of each rank, of which there are at least two.

    Ranks in the order of their hosts, each gives to the one that comes as much later as the largest host has ranks: so
    all keep one copy. Where one host has more ranks than all others together, those share in its copies.
    """
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    by_host = lines_on_hosts([numbers[host] for host in hosts])
    if len(by_host) < 2:
        raise ValueError("there is no other host")
    largest = max(by_host, key=len)
    order = [rank for ranks in by_host for rank in ranks]
    found = dict.fromkeys(order, 0)
    if 2 * len(largest) <= len(order):
        for index, rank in enumerate(order):
            found[rank] = order[(index + len(largest)) % len(order)]
    else:
        others = [rank for rank in order if rank not in largest]
        found.update({rank: others[index % len(others)] for index, rank in enumerate(largest)})
        found.update(dict(zip(others, largest, strict=False)))
    return tuple(found[rank] for rank in range(len(hosts)))


@dataclass(frozen=True)
class Kept:
    """How ranks keep some of their parameters between steps."""

    shard: Axes
    """See `kept_axes`."""
    split: Axes
    """See `FlatSpec.split_axes`."""
    at_rest: Axes | None
    """Along which axes the parameters themselves are sharded, if they are their own master weights."""

    @classmethod
    def of(cls, flat: FlatSpec) -> Kept:
        is_own = flat.trainable and flat.master_is_param
        return cls(kept_axes(flat), flat.split_axes, flat.table.param.shard if is_own else None)

    def as_json(self) -> list[Any]:
        return [self.shard, self.split, self.at_rest]

    @classmethod
    def from_json(cls, told: Sequence[Any]) -> Kept:
        shard, split, at_rest = told
        return cls(tuple(shard), tuple(split), None if at_rest is None else tuple(at_rest))


KeptByRank = Sequence[Collection[Kept]]
"""By rank: how it keeps what it has. The ranks of different pipeline stages have different parameters, and a plan's
rules may shard those along different axes."""


def kept_alike(flats: Sequence[FlatSpec], num_ranks: int) -> KeptByRank:
    """Where all ranks have the parameters of `flats`."""
    return [frozenset(map(Kept.of, flats))] * num_ranks


def keepers(flats: Sequence[FlatSpec], hosts: Sequence[Hashable], kept: KeptByRank = ()) -> Keepers:
    """Who keeps a copy of which rank's state: of those alone that have something of which their host has all copies.

    `hosts` has the host of each rank; without any, all are on one. `flats` are those of all ranks, unless `kept` says
    what each has.

    If one rank of a replica group is lost, the others do not go on either. So what they have does not count as a copy,
    and keepers are in other groups, at the same place: they read what they keep for ranks with the same part of the
    model. Where all ranks with one place are on one host, there is no group without it, and they have no keepers. Where
    there is one group only, and those that are left go on as a smaller one, any rank of another host keeps a copy.
    """
    size = flats[0].mesh.world_size if flats else len(hosts)
    if len(set(hosts)) < 2 or not flats:
        return (None,) * size
    mesh, every = flats[0].mesh, kept or kept_alike(flats, size)
    possible: dict[int, int] = {}
    for ranks in [list(range(size))] if shrinks(mesh) else _with_one_place(mesh):
        there = [hosts[rank] for rank in ranks]
        if len(set(there)) > 1:
            possible |= {rank: ranks[at] for rank, at in zip(ranks, buddies(there), strict=True)}

    def needs_one(rank: int) -> bool:
        parts = ((*one.shard, *one.split) for one in every[rank] if one.shard)
        return is_lone(mesh) or any(_is_alone(rank, axes, mesh, hosts) for axes in parts)

    return tuple(possible.get(rank) if needs_one(rank) else None for rank in range(size))


def _with_one_place(mesh: Mesh) -> Iterator[list[int]]:
    """The ranks of all replica groups with the same place in them."""
    places = [group_place(mesh, rank) for rank in range(mesh.world_size)]
    for place in dict.fromkeys(places):
        yield [rank for rank, one in enumerate(places) if one == place]


def _is_alone(rank: int, shard: tuple[str, ...], mesh: Mesh, hosts: Sequence[Hashable]) -> bool:
    """Whether all ranks that keep the same parts as `rank`, and go on without it, are on its host."""
    same = mesh.among(rank, copy_axes(mesh, shard))
    return len({hosts[other] for other in same}) == 1


def kept_axes(flat: FlatSpec) -> tuple[str, ...]:
    """The mesh axes along which ranks keep different parts of it between steps: master weights, or what is frozen. None
    of an island, which leaves as a whole, with all that it has: so nobody restores a part of it."""
    return () if flat.mesh.island_axes else flat.kept.shard


@dataclass(frozen=True)
class CopyBytes:
    """Of one rank: what it sends to another host in each step, once before that, and keeps for others."""

    sent: int
    sent_once: int
    """What never changes: sharded parameters that are frozen."""
    kept: int
    """Of the host's memory: what changes twice, as the last copy that is whole stays until the next one is."""
    kept_on_disk: int = 0
    """Of the host's disk likewise, for what others have on theirs."""


def copy_bytes(
    flats: Sequence[FlatSpec],
    states_per_param: int,
    hosts: Sequence[Hashable],
    coordinate: Mapping[str, int] | None = None,
) -> CopyBytes:
    """`coordinate` is the rank's; without one, of the rank with the most. Zeros where nobody needs a copy."""
    counts = Counter(keeper for keeper in keepers(flats, hosts) if keeper is not None)
    most = max(counts.values(), default=0)
    if not most:
        return CopyBytes(0, 0, 0)
    trained, frozen = [flat for flat in flats if flat.trainable], [flat for flat in flats if not flat.trainable]
    changing, still = (image_bytes(part, states_per_param, coordinate).copy for part in (trained, frozen))
    on_disk, still_there = (rows_bytes(part, states_per_param, coordinate) for part in (trained, frozen))
    return CopyBytes(
        changing + on_disk,
        still + still_there,
        most * (2 * changing + still),
        most * (2 * on_disk + still_there),
    )
