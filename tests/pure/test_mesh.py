"""Named axes over ranks: coordinates and ranks are inverse, groups partition the world."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.plan.mesh import Mesh

NAMES = ["dp", "tp", "pp", "sp", "node", "local"]
AXES = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 5), min_size=1, max_size=4)
MESHES = AXES.map(lambda axes: Mesh(tuple(axes), tuple(axes.values())))


@given(MESHES)
def test_coordinate_and_rank_are_inverse(mesh: Mesh) -> None:
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.world_size)]
    assert [mesh.rank(coordinate) for coordinate in coordinates] == list(range(mesh.world_size))
    assert all(tuple(coordinate) == mesh.axes for coordinate in coordinates)
    in_bounds = [0 <= place < mesh.size(axis) for one in coordinates for axis, place in one.items()]
    assert all(in_bounds)


@given(MESHES)
def test_groups_of_an_axis_partition_the_ranks(mesh: Mesh) -> None:
    for axis in mesh.axes:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert {len(group) for group in groups} == {mesh.size(axis)}
        for group in groups:
            assert all(mesh.group(rank, axis) == group for rank in group)
            assert [mesh.coordinate(rank)[axis] for rank in group] == list(range(mesh.size(axis)))


@given(MESHES)
def test_ranks_of_a_group_differ_on_its_axis_alone(mesh: Mesh) -> None:
    for axis in mesh.axes:
        for group in mesh.groups(axis):
            others = [{**mesh.coordinate(rank), axis: 0} for rank in group]
            assert all(other == others[0] for other in others)


@given(AXES, st.data())
def test_one_size_may_be_what_the_others_leave(axes: dict[str, int], data: st.DataObject) -> None:
    open_axis = data.draw(st.sampled_from(sorted(axes)))
    mesh = Mesh.of({**axes, open_axis: -1}, math.prod(axes.values()))
    assert mesh == Mesh.of(axes, math.prod(axes.values()))
    assert mesh.size(open_axis) == axes[open_axis]


@given(AXES, st.integers(1, 200))
def test_a_mesh_of_another_size_than_the_world_is_refused(axes: dict[str, int], world_size: int) -> None:
    assume(math.prod(axes.values()) != world_size)
    with pytest.raises(ConfigError, match=rf"but the world has {world_size}\. Make the sizes multiply"):
        Mesh.of(axes, world_size)


def test_the_last_axis_varies_fastest() -> None:
    mesh = Mesh.of({"node": 2, "local": 4}, 8)
    assert str(mesh) == "node=2 x local=4"
    assert mesh.groups("local") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert mesh.groups("node") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.coordinate(6) == {"node": 1, "local": 2}


def test_lines_of_100_000_ranks() -> None:
    """What each says of itself is as long as its lines, not as the world."""
    mesh = Mesh(("node", "local"), (12_500, 8))
    assert mesh.group(99_999, "local") == tuple(range(99_992, 100_000))
    assert mesh.group(99_999, "node") == tuple(range(7, 100_000, 8))
    assert (mesh.stride("node"), mesh.stride("local")) == (8, 1)
    lines = mesh.groups("local")
    assert (len(lines), lines[-1]) == (12_500, tuple(range(99_992, 100_000)))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"dp": -1, "tp": -1}, "Only one mesh axis may be -1, but dp and tp are."),
        ({"dp": -1, "tp": 3}, "The mesh dp=-1 x tp=3 makes 3 ranks, but the world has 8. Start a multiple of 3 ranks"),
        ({"dp": 0}, "Mesh axis 'dp' has size 0; a size is at least 1."),
        ({"dp": -1, "tp": 0}, "Mesh axis 'tp' has size 0; a size is at least 1."),
        ({"dp": -2, "tp": -4}, "Mesh axis 'dp' has size -2; a size is at least 1."),
        ({}, "A mesh needs distinct axes with one size each"),
    ],
)
def test_axes_that_make_no_mesh(axes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Mesh.of(axes, 8)
    assert str(caught.value).startswith(message)


def test_axes_stand_once_with_one_size_each() -> None:
    for axes, sizes in ((("dp", "dp"), (2, 2)), (("dp",), (2, 2))):
        with pytest.raises(ConfigError, match="distinct axes with one size each"):
            Mesh(axes, sizes)


def test_an_axis_that_is_not_there_is_named_with_the_nearest() -> None:
    mesh = Mesh(("node", "local"), (2, 4))
    mesh.require(["node", "local"], "The row 'grad'")
    with pytest.raises(ConfigError) as caught:
        mesh.require(["node", "locl"], "The row 'grad'")
    assert str(caught.value) == (
        "The row 'grad' names mesh axis 'locl', but the mesh is node=2 x local=4. Did you mean 'local'?"
    )
    with pytest.raises(ConfigError, match="'dp'"):
        mesh.size("dp")
    with pytest.raises(ConfigError, match="'dp'"):
        mesh.group(0, "dp")


@settings(max_examples=30)
@given(MESHES)
def test_data_axes_are_those_that_mean_no_other_parallelism(mesh: Mesh) -> None:
    assert set(mesh.data_axes) == set(mesh.axes) & {"dp", "node", "local"}
    groups = [*{mesh.among(rank, mesh.data_axes) for rank in range(mesh.world_size)}]
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert {len(group) for group in groups} == {math.prod(mesh.size(axis) for axis in mesh.data_axes)}
    assert set(mesh.replica_axes) == set(mesh.axes) & {"dp", "node", "local", "sp"}
    assert {len(mesh.among(rank, mesh.replica_axes)) for rank in range(mesh.world_size)} == {mesh.num_replicas}
    shares = {mesh.data_place(rank) for rank in range(mesh.world_size)}
    assert shares == {(place, len(groups[0])) for place in range(len(groups[0]))}
    assert all(mesh.among(rank, mesh.axes) == tuple(range(mesh.world_size)) for rank in range(mesh.world_size))
    for axis in mesh.axes:
        assert all(mesh.among(rank, [axis]) == mesh.group(rank, axis) for rank in range(mesh.world_size))
