"""Who goes on when ranks are lost or join, and on which mesh. Pure.

A *replica group* is the ranks that hold and train one copy of the model together: those that differ only along `tp`,
`pp`, `sp` and `ep`. Without such axes it is a single rank. If one of its ranks is lost, the others can compute nothing,
so the group leaves the mesh as a whole, which is one coordinate along the data axes. Its healthy ranks become *spares*.
As soon as spares and newcomers are as many as a group has ranks, they form one. An *island* leaves and comes back like
that too, with all of its axes: nobody else has trained its model.

If no group is whole, those that are left form a *smaller* one, if the job has a mesh for it: with fewer ranks along
`tp`, `pp` or `ep`, each of which holds a larger part of the model, or along `sp`, each of which computes a larger part
of every sample, or along several of these. Whenever ranks come or are lost then, all of them form the largest mesh that
there is for as many. Meshes that are slower than others of fewer ranks are not among these, if that is known
(`fastest`).

The replica as the unit of failure is known from torchft and FT-HSDP (arXiv:2602.00277).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.plan.mesh import EXPERT_AXIS, ISLAND_AXIS, MODEL_AXES, Mesh, place_along
from shardwise.system.even_parts import divisors


@dataclass(frozen=True)
class Regrouped:
    """Who goes on. Members are numbered as `regroup` was given them."""

    groups: tuple[tuple[int, ...], ...]
    """The members of each replica group, in the order of their places along `tp`, `pp`, `sp` and `ep`; groups in the
    order of their first members."""
    spares: tuple[int, ...]
    """Healthy members without a group, fewer than a group needs."""
    leaving: tuple[dict[str, int], ...]
    """The coordinates along the data axes of the groups that do not go on."""

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.groups))

    def members_on(self, mesh: Mesh) -> tuple[int, ...]:
        """By rank of `mesh`, which has as many ranks and the same groups: the member that has it."""
        number_of = {place: number for number, place in enumerate(_places(mesh, _data_axes(mesh)))}
        rank_of = {place: number for number, place in enumerate(_places(mesh, axes_of_group(mesh.axes)))}
        return tuple(
            self.groups[number_of[place_along(mesh, _data_axes(mesh), rank)]][rank_of[group_place(mesh, rank)]]
            for rank in range(mesh.world_size)
        )


def regroup(mesh: Mesh, seats: Sequence[int | None]) -> Regrouped:
    """Who goes on of the members that have the ranks `seats` of `mesh`; `None` for spares and newcomers. Ranks of
    `mesh` that no member has are lost.

    Groups that are whole stay as they are. As many groups as possible are formed of all other members: first those
    that have lost the fewest ranks are filled up, so that as few members as possible hold another part of the model
    than before, and then there are new ones.
    """
    axes = axes_of_group(mesh.axes)
    places = _places(mesh, axes)
    seated: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {at: {} for at in _places(mesh, _data_axes(mesh))}
    for member, seat in enumerate(seats):
        if seat is not None:
            seated[place_along(mesh, _data_axes(mesh), seat)][place_along(mesh, axes, seat)] = member
    whole = {at: group for at, group in seated.items() if len(group) == len(places)}
    broken = {at: group for at, group in seated.items() if at not in whole}
    waiting = [member for member, seat in enumerate(seats) if seat is None]
    num_formed = (len(waiting) + sum(map(len, broken.values()))) // len(places)
    mended = sorted((at for at in broken if broken[at]), key=lambda at: -len(broken[at]))[:num_formed]
    formed = [broken[at] for at in mended] + [{} for _ in range(num_formed - len(mended))]
    left_over = [group for at, group in broken.items() if at not in mended]
    spares = _fill(formed, left_over, waiting, places)
    groups = sorted((tuple(group[place] for place in places) for group in (*whole.values(), *formed)), key=min)
    leaving = tuple(dict(zip(_data_axes(mesh), at, strict=True)) for at in broken if at not in mended)
    return Regrouped(tuple(groups), tuple(sorted(spares)), leaving)


@dataclass(frozen=True)
class GoingOn:
    """Who forms the next generation of a job."""

    members: tuple[int, ...]
    """By rank. Empty if no replica group is whole."""
    spares: tuple[int, ...]
    """The others."""


def going_on(
    axes: Mapping[str, int],
    num_before: int,
    seats: Mapping[int, int],
    waiting: Sequence[int] = (),
    smaller: Smaller = (),
) -> GoingOn:
    """Who goes on of the members that had the ranks `seats` among `num_before`, on the mesh of a plan's `axes`, or on
    one of the `smaller` ones.

    A replica group that has lost a rank leaves at once, and its others become spares, even if it could be filled up:
    ranks may be anywhere in a step when one is lost, and a member with another part of the model than before has to
    come in where a step begins. There, as many groups as possible are formed of the `waiting` members.

    Where no group is whole, all members may get another part of the model, at any point of a step: as few as possible
    if they can form a group. On a smaller mesh, those go on that have as many parts as possible between them: what a
    step has changed just now is read by one that had the same part as the lost rank.
    """
    were_whole = num_before % group_size(axes) == 0
    if were_whole:
        found = _in_whole_groups(axes, num_before, seats, waiting)
        if found.members or not smaller:
            return found
    everyone = [*sorted(seats, key=seats.__getitem__), *waiting]
    members = tuple(everyone[: most_of(axes, smaller, len(everyone))] if seats else ())
    if len(members) < len(seats):
        members = _of_all_parts(mesh_of(axes, smaller, num_before), seats, len(members))
    if were_whole and len(members) >= group_size(axes):
        members = _laid(axes, num_before, seats, members)
    return GoingOn(members, _others(everyone, members))


def _of_all_parts(mesh: Mesh, seats: Mapping[int, int], num: int) -> tuple[int, ...]:
    """So many of the members with the ranks `seats` of `mesh`, in their order: first one with each part."""
    axes = parts_of_copies(mesh)
    in_order = sorted(seats, key=seats.__getitem__)
    places = {member: place_along(mesh, axes, seats[member]) for member in in_order}
    firsts = {place: member for member, place in reversed(places.items())}
    chosen = [*firsts.values(), *_others(in_order, tuple(firsts.values()))][:num]
    return tuple(member for member in in_order if member in chosen)


def _in_whole_groups(
    axes: Mapping[str, int], num_before: int, seats: Mapping[int, int], waiting: Sequence[int]
) -> GoingOn:
    mesh = mesh_over(axes, num_before)
    coming = waiting if _data_axes(mesh) else ()  # without such axes there is only one group
    of_group: dict[tuple[int, ...], list[int]] = {}
    for member, seat in seats.items():
        of_group.setdefault(place_along(mesh, _data_axes(mesh), seat), []).append(member)
    size = len(_places(mesh, axes_of_group(mesh.axes)))
    whole = {member for group in of_group.values() if len(group) == size for member in group}
    members = [*(member for member in seats if member in whole), *coming]
    going = _laid(axes, num_before, seats, members) if whole else ()
    return GoingOn(going, _others((*seats, *waiting), going))


def _laid(
    axes: Mapping[str, int], num_before: int, seats: Mapping[int, int], members: Sequence[int]
) -> tuple[int, ...]:
    """By rank: the `members` that form whole groups, as `regroup` has them."""
    regrouped = regroup(mesh_over(axes, num_before), [seats.get(member) for member in members])
    if not regrouped.groups:
        return ()
    after = mesh_over(axes, regrouped.num_ranks)
    return tuple(members[number] for number in regrouped.members_on(after))


def _others(members: Sequence[int], without: Sequence[int]) -> tuple[int, ...]:
    gone = set(without)
    return tuple(member for member in members if member not in gone)


Smaller = Sequence[Mapping[str, int]]
"""Axes of the meshes on which a job goes on without a whole replica group; the first is of one group, the others of
fewer ranks. In the order in which they are taken, the largest first until the `fastest` are known: the first for which
there are enough ranks. Empty if it does not go on."""


def most_of(axes: Mapping[str, int], smaller: Smaller, num_ranks: int) -> int:
    """How many of `num_ranks` can train on the mesh of `axes`, or on one of the `smaller` ones."""
    of_each = group_size(axes)
    has_data_axis = bool(axes.keys() - axes_of_group(axes))
    whole = num_ranks // of_each if has_data_axis else min(1, num_ranks // of_each)
    sizes = (math.prod(mesh.values()) for mesh in smaller)
    return whole * of_each or next((size for size in sizes if size <= num_ranks), 0)


def fastest(smaller: Smaller, seconds: Mapping[int, float]) -> Smaller:
    """Those of the `smaller` meshes to go on with, if a step takes so many `seconds` on as many ranks: without each of
    which one with fewer ranks is faster. Then the largest that is left, for however many ranks, is the fastest.

    The first one, with the sizes of the plan, stays. So do all, where something is not known.
    """
    sizes = [math.prod(mesh.values()) for mesh in smaller]
    if not seconds.keys() >= set(sizes[1:]):
        return smaller
    return [
        mesh
        for place, mesh in enumerate(smaller)
        if place == 0 or all(seconds[sizes[place]] <= seconds[size] for size in sizes[place + 1 :])
    ]


def in_order(smaller: Smaller, worth_having: Smaller) -> Smaller:
    """All of the `smaller` meshes, those that are not `worth_having` last: then none of these is ever taken, since one
    of fewer ranks comes first. Ranks that train on one already, because the order was not known yet, go on from it."""
    return (*worth_having, *(mesh for mesh in smaller if mesh not in worth_having))


def fastest_of_each_size(smaller: Smaller, seconds: Sequence[float]) -> tuple[Smaller, dict[int, float]]:
    """Of `smaller` meshes, of which the first is one group and a step on the others takes so many `seconds`: for each
    number of ranks the one with the shortest step, of equals the first; and how long that is, by ranks."""
    first, *others = smaller
    best: dict[int, tuple[float, Mapping[str, int]]] = {}
    for mesh, taken in zip(others, seconds, strict=True):
        size = math.prod(mesh.values())
        if size not in best or taken < best[size][0]:
            best[size] = taken, mesh
    in_order = sorted(best, reverse=True)
    return (first, *(best[size][1] for size in in_order)), {size: best[size][0] for size in in_order}


def split_alike(smaller: Smaller, chosen: Smaller) -> Smaller:
    """Of the `smaller` meshes those that split models and samples as the `chosen` ones do, in their order, whatever the
    other axes are called. None if there is not one for each."""
    found = [next((mesh for mesh in smaller if _split(mesh) == _split(one)), None) for one in chosen]
    return () if None in found else [mesh for mesh in found if mesh is not None]


def _split(axes: Mapping[str, int]) -> dict[str, int]:
    return {axis: axes[axis] for axis in axes_of_group(axes) if axes[axis] > 1}


def mesh_of(axes: Mapping[str, int], smaller: Smaller, num_ranks: int) -> Mesh:
    """The mesh of `num_ranks`: that of `mesh_over`, or the smaller one of as many. Raises `ConfigError` if there is
    none."""
    for mesh in smaller:
        if math.prod(mesh.values()) == num_ranks:
            return Mesh.of(mesh, num_ranks)
    return mesh_over(axes, num_ranks)


def group_size(axes: Mapping[str, int]) -> int:
    """Ranks of a replica group, on the mesh of a plan's `axes`."""
    return math.prod(axes[axis] for axis in axes_of_group(axes))


def group_place(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The place of `rank` in its replica group. Ranks of several groups with the same place have the same part."""
    return place_along(mesh, axes_of_group(mesh.axes), rank)


def num_groups(mesh: Mesh) -> int:
    """Replica groups of `mesh`."""
    return math.prod(map(mesh.size, _data_axes(mesh)))


def num_leaving(mesh: Mesh, smaller: Smaller, num_lost: int = 1) -> int:
    """How many ranks leave `mesh` when one of them is lost: those of its replica group. If that is the only one: the
    `num_lost` ranks, and those without a place on a smaller mesh."""
    if num_groups(mesh) > 1:
        return mesh.world_size // num_groups(mesh)
    axes = mesh.named_sizes
    return mesh.world_size - most_of(axes, smaller, mesh.world_size - num_lost)


def is_lone(mesh: Mesh) -> bool:
    """Whether `mesh` is one replica group that goes on as a smaller one, and whose ranks have different parts of the
    model."""
    return shrinks(mesh) and bool(mesh.parted_axes)


def parts_of_copies(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which ranks have different parts of those parameters of which several ranks have the same part,
    and go on without each other."""
    if not is_lone(mesh):
        return mesh.parted_axes
    shared = set(mesh.replica_axes).intersection(shrinking_axes(mesh))
    if shared == {EXPERT_AXIS}:  # experts are on one rank each, and all else is as under data parallelism
        return mesh.model_axes
    return mesh.parted_axes if shared else ()


def shrinks(mesh: Mesh) -> bool:
    """Whether `mesh` is one replica group, and fewer of its ranks may go on without the others."""
    return num_groups(mesh) == 1 and bool(shrinking_axes(mesh))


def shrinking_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes, of more than one rank, along which a replica group can go on with fewer ranks: all of its own. No
    island does: the others go on without it."""
    of_group = axes_of_group(mesh.axes) if not mesh.island_axes else ()
    return tuple(axis for axis in of_group if mesh.size(axis) > 1)


def with_fewer_ranks(mesh: Mesh) -> list[dict[str, int]]:
    """The axes of one replica group, if it can go on with fewer ranks, and of those with fewer, the largest first; of
    which a model may not allow all. Their numbers are divisors of the present ones, because what a forward counts
    evenly now (heads, tokens of a split sequence) it does there too. Of as many ranks, those come first that keep more
    along the last axis of the mesh, whose ranks are next to each other."""
    axes = shrinking_axes(mesh)
    if not axes:
        return []
    alone = dict.fromkeys(mesh.axes, 1)
    sizes = itertools.product(*(divisors(mesh.size(axis)) for axis in axes))
    found = [{**alone, **dict(zip(axes, some, strict=True))} for some in sizes]
    return sorted(found, key=lambda one: (math.prod(one.values()), *reversed(one.values())), reverse=True)


def copy_axes(mesh: Mesh, shard: Collection[str]) -> tuple[str, ...]:
    """The axes along which ranks have copies of what is sharded, or dealt out, along `shard`, and go on without each
    other. What the ranks of one replica group have does not count as a copy, unless it goes on with fewer of them."""
    of_group = set(axes_of_group(mesh.axes)) - (set(mesh.replica_axes) if shrinks(mesh) else set())
    return tuple(axis for axis in mesh.axes if axis not in shard and axis not in of_group)


def _fill(
    formed: Sequence[dict[tuple[int, ...], int]],
    left_over: Sequence[Mapping[tuple[int, ...], int]],
    waiting: Sequence[int],
    places: Sequence[tuple[int, ...]],
) -> list[int]:
    """Give every place of the groups `formed` to a member: to one that had this place in a group that is given up, if
    there is one, else to any. Returns those that are not needed."""
    free = {member: place for group in left_over for place, member in group.items()}
    still_open = []
    for group, place in itertools.product(formed, places):
        if place in group:
            continue
        same = next((member for member, had in free.items() if had == place), None)
        if same is None:
            still_open.append((group, place))
        else:
            group[place] = same
            del free[same]
    rest = sorted([*free, *waiting])
    for (group, place), member in zip(still_open, rest, strict=False):
        group[place] = member
    return rest[len(still_open) :]


def mesh_over(axes: Mapping[str, int], num_ranks: int) -> Mesh:
    """The mesh of a plan's `axes` over `num_ranks`: its own if that fits, else one with the same replica groups.

    If the size of the innermost data axis divides the number of groups, it is kept and the outermost data axis gets the
    quotient; otherwise the innermost gets all. Raises `ConfigError` if `num_ranks` are not a number of whole groups.
    """
    try:
        return Mesh.of(axes, num_ranks)
    except ConfigError:
        data_axes = [axis for axis in axes if axis not in axes_of_group(axes)]
        of_each = group_size(axes)
        if not data_axes or of_each < 1 or num_ranks % of_each:
            raise
        num, inner = num_ranks // of_each, axes[data_axes[-1]]
        sizes = {**axes, **dict.fromkeys(data_axes, 1)}
        if len(data_axes) > 1 and inner > 0 and num % inner == 0:
            sizes |= {data_axes[0]: num // inner, data_axes[-1]: inner}
        else:
            sizes[data_axes[-1]] = num
        return Mesh.of(sizes, num_ranks)


def axes_of_group(axes: Iterable[str]) -> tuple[str, ...]:
    """Of the axes of a mesh, those along which the ranks of a replica group differ: all but `island`, if there are
    islands."""
    every = tuple(axes)
    if ISLAND_AXIS in every:
        return tuple(axis for axis in every if axis != ISLAND_AXIS)
    return tuple(axis for axis in MODEL_AXES if axis in every)


def _data_axes(mesh: Mesh) -> tuple[str, ...]:
    """The other axes: `island`, or data axes but for `ep`."""
    of_group = axes_of_group(mesh.axes)
    return tuple(axis for axis in mesh.axes if axis not in of_group)


def _places(mesh: Mesh, axes: Sequence[str]) -> list[tuple[int, ...]]:
    """All coordinates along `axes`, in order."""
    return list(itertools.product(*(range(mesh.size(axis)) for axis in axes)))
