"""Who goes on when ranks are lost or join, on drawn meshes: replica groups leave and come back whole."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.elastic.rebuild import plan_on
from shardwise.errors import ConfigError
from shardwise.parallel.outline import OffDevice, SmallerMeshes
from shardwise.plan import Offload, load_plan, replica_groups
from shardwise.plan.mesh import MODEL_AXES, Mesh
from shardwise.plan.replica_groups import (
    Regrouped,
    Smaller,
    fastest,
    fastest_of_each_size,
    going_on,
    in_order,
    mesh_of,
    mesh_over,
    most_of,
    num_groups,
    regroup,
    split_alike,
    with_fewer_ranks,
)
from tests.thorough import varies

NAMES = ("island", "pp", "node", "dp", "ep", "sp", "tp")
MESHES = (
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 3), min_size=1, max_size=4)
    .filter(lambda axes: axes.keys() - MODEL_AXES.keys())
    .map(lambda axes: Mesh(tuple(axes), tuple(axes.values())))
)


@st.composite
def losses(draw: Any) -> tuple[Mesh, list[int | None]]:
    """A mesh, and who is there after ranks were lost and others have joined, in any order."""
    mesh = draw(MESHES)
    survivors = draw(st.sets(st.integers(0, mesh.world_size - 1)))
    return mesh, draw(st.permutations([*survivors, *([None] * draw(st.integers(0, 6)))]))


def of_group(mesh: Mesh) -> set[str]:
    """The axes along which the ranks of a group differ. All of an island are one group."""
    return set(mesh.axes) - {"island"} if "island" in mesh.axes else set(mesh.axes) & MODEL_AXES.keys()


def group_size(mesh: Mesh) -> int:
    return math.prod(mesh.size(axis) for axis in of_group(mesh))


def data_place(mesh: Mesh, rank: int) -> dict[str, int]:
    return {axis: at for axis, at in mesh.coordinate(rank).items() if axis not in of_group(mesh)}


def model_place(mesh: Mesh, rank: int) -> dict[str, int]:
    return {axis: at for axis, at in mesh.coordinate(rank).items() if axis in of_group(mesh)}


def laid(mesh: Mesh, regrouped: Regrouped) -> tuple[Mesh, tuple[int, ...]] | None:
    """The mesh of those that go on, and its members by rank; `None` if no group is whole."""
    if not regrouped.groups:
        return None
    after = mesh_over(mesh.named_sizes, regrouped.num_ranks)
    return after, regrouped.members_on(after)


@varies
@given(losses())
def test_every_member_has_one_place_or_is_a_spare_and_no_group_could_be_formed_of_the_spares(given: Any) -> None:
    mesh, seats = given
    regrouped = regroup(mesh, seats)
    assert sorted([*(one for group in regrouped.groups for one in group), *regrouped.spares]) == list(range(len(seats)))
    assert {len(group) for group in regrouped.groups} <= {group_size(mesh)}
    assert len(regrouped.spares) < group_size(mesh)


@varies
@given(losses())
def test_the_ranks_of_a_group_are_one_group_of_the_new_mesh(given: Any) -> None:
    mesh, seats = given
    regrouped = regroup(mesh, seats)
    if (found := laid(mesh, regrouped)) is not None:
        after, members = found
        assert model_place(after, 0).keys() == model_place(mesh, 0).keys()
        assert group_size(after) == group_size(mesh)
        rank_of = {member: rank for rank, member in enumerate(members)}
        places = [{tuple(data_place(after, rank_of[one]).items()) for one in group} for group in regrouped.groups]
        assert all(len(place) == 1 for place in places)


@varies
@given(losses())
def test_nobody_changes_its_part_of_the_model_whose_group_goes_on(given: Any) -> None:
    """And a group that is whole stays together; so do those that are left of one that is filled up."""
    mesh, seats = given
    regrouped = regroup(mesh, seats)
    found = laid(mesh, regrouped)
    lost = set(range(mesh.world_size)) - set(seats)
    leaving = [tuple(place.items()) for place in regrouped.leaving]
    assert all(any(tuple(data_place(mesh, rank).items()) == place for rank in lost) for place in leaving)
    for rank in range(mesh.world_size):
        place = tuple(data_place(mesh, rank).items())
        if rank in lost or place in leaving:
            continue
        assert found is not None
        after, members = found
        others = [one for one in range(mesh.world_size) if data_place(mesh, one) == dict(place) and one not in lost]
        now = [members.index(seats.index(one)) for one in others]
        assert [model_place(after, one) for one in now] == [model_place(mesh, one) for one in others]
        assert len({tuple(data_place(after, one).items()) for one in now}) == 1


@varies
@given(losses())
def test_single_ranks_all_go_on_in_their_order(given: Any) -> None:
    mesh, seats = given
    if group_size(mesh) == 1 and seats:
        found = laid(mesh, regroup(mesh, seats))
        assert found is not None
        assert found[1] == tuple(range(len(seats)))


@varies
@given(MESHES, st.data())
def test_what_was_lost_comes_back_when_spares_and_newcomers_are_enough(mesh: Mesh, data: st.DataObject) -> None:
    """The mesh is the first one again, and those that stayed have the places that they had."""
    lost = data.draw(st.sets(st.integers(0, mesh.world_size - 1), min_size=1))
    seats: list[int | None] = [rank for rank in range(mesh.world_size) if rank not in lost]
    smaller = regroup(mesh, seats)
    if (found := laid(mesh, smaller)) is None:
        return
    after, members = found
    here: list[int | None] = [members.index(one) if one in members else None for one in range(len(seats))]
    again = regroup(after, [*here, *([None] * len(lost))])
    assert not again.spares
    larger = mesh_over(mesh.named_sizes, again.num_ranks)
    assert larger == mesh
    back = again.members_on(larger)
    for rank, member in enumerate(members):
        assert model_place(larger, back.index(member)) == model_place(after, rank)


def test_a_lost_rank_takes_its_group_along() -> None:
    mesh = Mesh(("pp", "dp", "tp"), (2, 2, 2))
    regrouped = regroup(mesh, [0, 1, 2, 4, 5, 6, 7])  # without rank 3: pp 0, dp 1, tp 1
    assert regrouped.leaving == ({"dp": 1},)
    assert regrouped.spares == (2, 5, 6)  # which were ranks 2, 6 and 7
    assert regrouped.members_on(Mesh(("pp", "dp", "tp"), (2, 1, 2))) == (0, 1, 3, 4)


def test_a_newcomer_takes_the_lost_place_and_the_group_goes_on() -> None:
    mesh = Mesh(("dp", "tp"), (2, 2))
    regrouped = regroup(mesh, [0, 1, 2, None])
    assert (regrouped.leaving, regrouped.spares) == ((), ())
    assert regrouped.members_on(mesh) == (0, 1, 2, 3)


def test_the_rest_of_two_groups_is_one_group() -> None:
    """The one that has lost less is filled up, by whoever had the place that it lacks."""
    mesh = Mesh(("dp", "tp"), (2, 3))
    regrouped = regroup(mesh, [0, 3, 5])  # one rank of the first group, and two of the second
    assert regrouped.leaving == ({"dp": 0},)
    assert regrouped.members_on(Mesh(("dp", "tp"), (1, 3))) == (1, 0, 2)
    mesh = Mesh(("dp", "tp"), (2, 2))
    assert regroup(mesh, [0, 3]).members_on(Mesh(("dp", "tp"), (1, 2))) == (0, 1)
    assert regroup(mesh, [1, 3]).members_on(Mesh(("dp", "tp"), (1, 2))) == (1, 0)
    mesh = Mesh(("dp", "tp"), (3, 3))  # one rank of each group, with tp 0, 2 and 1
    assert regroup(mesh, [0, 5, 7]).members_on(Mesh(("dp", "tp"), (1, 3))) == (0, 2, 1)


def test_nobody_goes_on_where_no_group_is_whole() -> None:
    regrouped = regroup(Mesh(("dp", "tp"), (1, 2)), [0])
    assert (regrouped.groups, regrouped.spares, regrouped.leaving) == ((), (0,), ({"dp": 0},))


OF_FOUR = ({"tp": 4}, {"tp": 2}, {"tp": 1})
OF_TWO = ({"dp": 1, "tp": 2}, {"dp": 1, "tp": 1})


@pytest.mark.parametrize(
    ("axes", "smaller", "num_before", "seats", "waiting", "members", "mesh"),
    [
        ({"tp": 4}, OF_FOUR, 4, {0: 0, 2: 2, 3: 3}, (), (0, 2), "tp=2"),
        ({"tp": 4}, OF_FOUR, 2, {2: 1}, (), (2,), "tp=1"),
        ({"tp": 4}, OF_FOUR, 2, {0: 0, 2: 1}, (3,), (0, 2), "tp=2"),
        ({"tp": 4}, OF_FOUR, 2, {0: 0, 2: 1}, (3, 4, 5), (0, 2, 3, 4), "tp=4"),
        ({"tp": 4}, OF_FOUR, 4, {0: 0, 1: 1, 2: 2, 3: 3}, (4, 5, 6, 7), (0, 1, 2, 3), "tp=4"),
        ({"tp": 4}, OF_FOUR[:1], 4, {0: 0, 1: 1, 2: 2}, (), (), ""),
        ({"tp": 4}, (), 4, {0: 0, 1: 1, 2: 2}, (), (), ""),
        ({"dp": 2, "tp": 2}, OF_TWO, 4, {1: 1, 2: 2, 3: 3}, (), (2, 3), "dp=1 x tp=2"),
        ({"dp": 2, "tp": 2}, OF_TWO, 4, {1: 1, 2: 2}, (), (2, 1), "dp=1 x tp=2"),  # each keeps its part
        ({"dp": 2, "tp": 2}, OF_TWO, 4, {0: 0, 2: 2}, (), (0, 2), "dp=1 x tp=2"),
        ({"dp": 2, "tp": 2}, OF_TWO, 2, {7: 1}, (), (7,), "dp=1 x tp=1"),
        ({"dp": 2, "tp": 2}, OF_TWO, 1, {7: 0}, (3, 4, 5), (7, 3, 4, 5), "dp=2 x tp=2"),
        ({"dp": 2, "tp": 2}, OF_TWO, 4, {}, (3, 4), (), ""),
    ],
)
def test_who_goes_on_where_no_group_is_whole(
    axes: dict[str, int],
    smaller: Smaller,
    num_before: int,
    seats: dict[int, int],
    waiting: tuple[int, ...],
    members: tuple[int, ...],
    mesh: str,
) -> None:
    found = going_on(axes, num_before, seats, waiting, smaller)
    assert found.members == members
    assert sorted([*found.members, *found.spares]) == sorted([*seats, *waiting])
    if members:
        assert str(mesh_of(axes, smaller, len(members))) == mesh


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"tp": 4}, ["tp=4", "tp=2", "tp=1"]),
        ({"dp": 2, "ep": 2}, ["dp=1 x ep=2", "dp=1 x ep=1"]),
        ({"pp": 2, "tp": 2}, ["pp=2 x tp=2", "pp=1 x tp=2", "pp=2 x tp=1", "pp=1 x tp=1"]),
        ({"dp": 4}, []),
        ({"island": 2, "tp": 2}, []),
    ],
)
def test_meshes_with_fewer_ranks(axes: dict[str, int], expected: list[str]) -> None:
    mesh = Mesh(tuple(axes), tuple(axes.values()))
    assert [str(Mesh.of(one, math.prod(one.values()))) for one in with_fewer_ranks(mesh)] == expected


@pytest.mark.parametrize(
    ("axes", "left", "members"),
    [
        ({"sp": 2, "tp": 2}, (0, 2, 3), (0, 3)),  # 0 and 2 have the same half of each layer
        ({"sp": 2, "tp": 2}, (1, 2, 3), (1, 2)),
        ({"tp": 2, "sp": 2}, (0, 1, 3), (0, 3)),
        ({"ep": 2, "tp": 2}, (0, 2, 3), (0, 3)),
        ({"pp": 2, "tp": 2}, (0, 2, 3), (0, 2)),  # all have another part
        ({"ep": 4}, (1, 2, 3), (1, 2)),
    ],
)
def test_on_a_smaller_mesh_as_many_parts_as_possible_go_on(
    axes: dict[str, int], left: tuple[int, ...], members: tuple[int, ...]
) -> None:
    smaller = with_fewer_ranks(Mesh(tuple(axes), tuple(axes.values())))
    assert going_on(axes, 4, {rank: rank for rank in left}, (), smaller).members == members


OF_EIGHT = tuple({"tp": size} for size in (8, 4, 2, 1))


@pytest.mark.parametrize(
    ("seconds", "by_num_left"),
    [
        ({4: 1.0, 2: 2.0, 1: 4.0}, {7: 4, 3: 2, 1: 1}),
        ({4: 3.0, 2: 2.0, 1: 4.0}, {7: 2, 3: 2, 1: 1}),
        ({4: 3.0, 2: 5.0, 1: 4.0}, {7: 4, 3: 1, 1: 1}),
        ({4: 4.0, 2: 5.0, 1: 3.0}, {8: 8, 7: 1, 3: 1}),
        ({4: 2.0, 2: 2.0, 1: 2.0}, {7: 4, 3: 2}),  # the largest of those that take as long
        ({4: 4.0, 1: 3.0}, {7: 4, 3: 2}),  # not all are known
    ],
)
def test_the_fastest_smaller_mesh_for_any_number_of_ranks(
    seconds: dict[int, float], by_num_left: dict[int, int]
) -> None:
    found = fastest(OF_EIGHT, seconds)
    assert {num: most_of({"tp": 8}, found, num) for num in by_num_left} == by_num_left
    preferred = in_order(OF_EIGHT, found)
    assert {num: most_of({"tp": 8}, preferred, num) for num in by_num_left} == by_num_left
    assert {str(mesh_of({"tp": 8}, preferred, num)) for num in (8, 4, 2, 1)} == {f"tp={num}" for num in (8, 4, 2, 1)}


def test_of_meshes_of_as_many_ranks_the_fastest() -> None:
    whole, along_tp, alone, along_pp = ({"pp": pp, "tp": tp} for pp, tp in ((2, 2), (1, 2), (1, 1), (2, 1)))
    every = (whole, along_tp, alone, along_pp)
    assert fastest_of_each_size(every, [2.0, 4.0, 1.0]) == ((whole, along_pp, alone), {2: 1.0, 1: 4.0})
    assert fastest_of_each_size(every, [2.0, 4.0, 2.0]) == ((whole, along_tp, alone), {2: 2.0, 1: 4.0})
    told = SmallerMeshes(every[:3], "", {}, 0, every[3:]).told()
    heard = SmallerMeshes.heard(json.loads(json.dumps(told)))
    assert heard.every == every
    assert heard.settled((whole, along_pp, alone)).every == (whole, along_pp, alone)
    assert heard.settled(()).every == every[:3], "nobody could choose"
    assert heard.is_open
    assert not SmallerMeshes.heard(json.loads(json.dumps(heard.settled(()).told()))).is_open
    assert not SmallerMeshes((whole, alone)).is_open, "there is nothing to choose"


def test_smaller_meshes_follow_a_plan_with_other_axes() -> None:
    whole, half, alone = ({"dp": 1, "tp": num} for num in (4, 2, 1))
    known = SmallerMeshes((whole, half, alone), is_settled=True)
    assert known.after({"node": -1, "local": 2, "tp": 4}).every == tuple(
        {"node": 1, "local": 1, "tp": num} for num in (4, 2, 1)
    )
    assert SmallerMeshes((whole, alone)).after({"local": 2, "tp": 4}).every == (
        {"local": 1, "tp": 4},
        {"local": 1, "tp": 1},
    ), "the model cannot be split in two"
    assert known.after({"dp": 8}).every == ()
    dealt_out = SmallerMeshes().after({"dp": 2, "ep": 2})
    assert dealt_out.every == ({"dp": 1, "ep": 2}, {"dp": 1, "ep": 1})
    assert not dealt_out.is_open


def test_the_choice_among_smaller_meshes_outlives_a_plan_with_other_axes() -> None:
    whole, along_pp, along_tp, alone = ({"pp": pp, "tp": tp} for pp, tp in ((2, 2), (2, 1), (1, 2), (1, 1)))
    known = SmallerMeshes((whole, along_tp, alone), others=(along_pp,))
    chosen = (whole, along_pp, alone)
    after = known.settled(chosen).after({"dp": 2, "pp": 2, "tp": 2})
    assert after.every == tuple({"dp": 1, **mesh} for mesh in chosen)
    assert known.after({"dp": 2, "pp": 2, "tp": 2}).is_open
    assert list(split_alike(after.every, chosen)) == list(after.every)
    assert split_alike(after.every, ({"tp": 4},)) == ()


@pytest.mark.parametrize(
    ("axes", "num_ranks", "expected"),
    [
        ({"dp": 4}, 3, "dp=3"),
        ({"dp": -1}, 3, "dp=3"),
        ({"node": 2, "local": 2}, 3, "node=1 x local=3"),
        ({"node": 2, "local": 2}, 6, "node=3 x local=2"),
        ({"node": -1, "local": 2}, 3, "node=1 x local=3"),
        ({"node": 2, "local": -1}, 3, "node=1 x local=3"),
        ({"pod": 2, "node": 2, "local": 2}, 6, "pod=3 x node=1 x local=2"),
        ({"pp": 2, "dp": 2, "tp": 2}, 4, "pp=2 x dp=1 x tp=2"),
        ({"pp": 2, "dp": 2, "tp": 2}, 12, "pp=2 x dp=3 x tp=2"),
        ({"node": 2, "local": 2, "tp": 2}, 6, "node=1 x local=3 x tp=2"),
        ({"dp": 3, "ep": 2}, 4, "dp=2 x ep=2"),
        ({"dp": 2, "tp": 1}, 4, "dp=4 x tp=1"),
        ({"island": 2, "node": 2, "ep": 2}, 4, "island=1 x node=2 x ep=2"),
        ({"dp": 2, "island": 2}, 6, "dp=2 x island=3"),
    ],
)
def test_the_mesh_over_other_numbers_of_ranks(axes: dict[str, int], num_ranks: int, expected: str) -> None:
    assert str(mesh_over(axes, num_ranks)) == expected


@pytest.mark.parametrize(("axes", "num_ranks"), [({"dp": 2, "tp": 2}, 3), ({"tp": 4}, 2), ({"dp": 2, "tp": 2}, 0)])
def test_ranks_that_are_no_number_of_groups_have_no_mesh(axes: dict[str, int], num_ranks: int) -> None:
    with pytest.raises(ConfigError):
        mesh_over(axes, num_ranks)


def test_a_plan_keeps_its_own_mesh_where_that_fits() -> None:
    none = SmallerMeshes()
    given = load_plan({"preset": "hsdp"})
    assert plan_on(given, 4, 2, none) is given
    assert plan_on(given, 3, 2, none).mesh == {"node": 1, "local": 3}
    fixed = load_plan({"preset": "hsdp", "mesh": {"node": 2, "local": 2}})
    assert plan_on(plan_on(fixed, 3, None, none), 3, None, none).mesh == {"node": 1, "local": 3}
    assert plan_on(fixed, 4, None, none) is fixed


def test_a_plan_keeps_more_off_the_device_on_a_smaller_mesh_alone() -> None:
    split = load_plan({"preset": "zero1", "mesh": {"tp": 4}})
    there = {1: OffDevice(Offload(optim=0.5), "scratch")}
    told = SmallerMeshes(({"tp": 4}, {"tp": 2}, {"tp": 1}), "", there).told()
    smaller = SmallerMeshes.heard(json.loads(json.dumps(told)))
    alone = plan_on(split, 1, None, smaller)
    assert (alone.mesh, alone.offload, alone.disk) == ({"tp": 1}, Offload(optim=0.5), "scratch")
    assert plan_on(split, 2, None, smaller) == load_plan({"preset": "zero1", "mesh": {"tp": 2}})
    assert plan_on(split, 4, None, smaller) is split


@varies
@given(MESHES, st.data())
def test_only_whole_groups_go_on_and_nobody_changes_its_part_of_the_model(mesh: Mesh, data: st.DataObject) -> None:
    axes = mesh.named_sizes
    there = data.draw(st.sets(st.integers(0, mesh.world_size - 1)))
    found = going_on(axes, mesh.world_size, {rank: rank for rank in there})
    places = [data_place(mesh, rank) for rank in there]
    whole = {rank for rank in there if places.count(data_place(mesh, rank)) == group_size(mesh)}
    assert set(found.members) == whole
    assert sorted((*found.members, *found.spares)) == sorted(there)
    if whole:
        after = mesh_over(axes, len(whole))
        assert [model_place(after, rank) for rank in range(len(whole))] == [
            model_place(mesh, one) for one in found.members
        ]


@varies
@given(MESHES, st.data())
def test_those_that_wait_come_in_as_groups(mesh: Mesh, data: st.DataObject) -> None:
    axes = mesh.named_sizes
    num_waiting = data.draw(st.integers(0, 7))
    waiting = range(100, 100 + num_waiting)
    found = going_on(axes, mesh.world_size, {rank: rank for rank in range(mesh.world_size)}, waiting)
    assert len(found.members) == mesh.world_size + num_waiting // group_size(mesh) * group_size(mesh)
    assert set(range(mesh.world_size)) < {*found.members, -1}
    after = mesh_over(axes, len(found.members))
    for rank, member in enumerate(found.members):
        if member < 100:
            assert model_place(after, rank) == model_place(mesh, member)


def test_a_group_that_could_be_filled_up_leaves_at_once_and_comes_in_later() -> None:
    axes = {"dp": 3, "tp": 2}
    at_once = going_on(axes, 6, {10: 1, 13: 3, 14: 4, 15: 5})  # one is left of each of the first two groups
    assert (at_once.members, at_once.spares) == ((14, 15), (10, 13))
    later = going_on(axes, 2, {14: 0, 15: 1}, at_once.spares)
    assert (later.members, later.spares) == ((14, 15, 10, 13), ())
    assert going_on({"dp": 1, "tp": 2}, 2, {0: 0}, [5]).members == (), "nobody has the rest of the model"


def test_groups_of_many_ranks_are_not_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or copies of 100,000 ranks, each of which asks, took minutes."""
    monkeypatch.setattr(replica_groups, "_places", None)
    assert num_groups(Mesh(("dp", "tp"), (100_000, 8))) == 100_000
    assert num_groups(Mesh(("pp", "tp"), (4, 8))) == 1
