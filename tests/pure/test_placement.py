"""The table and its moves: on every rank of every mesh, each move leaves exactly what the target place says."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ONE, TWO, meshes, shards, tables, with_dtypes

from shardwise.errors import ConfigError, PlacementError
from shardwise.plan import PlaceEdit, Plan, Rows, load_plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import (
    KINDS,
    PRESETS,
    WIDTH,
    Axes,
    Layout,
    Move,
    Place,
    Slot,
    Span,
    Table,
    Tier,
    Wire,
    mesh_for,
    moves,
    pack,
    padded_numel,
    preset,
    table_for,
)

Array = np.ndarray[Any, np.dtype[np.int64]]

# --- every rank of a mesh, in one process ------------------------------------------------------------


@dataclass
class Ranks:
    """One flat buffer on all ranks of `mesh`, moved literally."""

    mesh: Mesh
    layout: Layout
    place: Place
    held: list[Array]
    goal: Tier = "device"
    """Where a fetch brings things; the move names where they come from."""

    def span(self, rank: int, shard: Axes) -> Span:
        return self.layout.span(shard, self.mesh.coordinate(rank))

    def apply(self, move: Move) -> None:
        assert move.verb in ("fetch", "evict") or self.place.tier != "disk", "nothing can be computed on disk"
        getattr(self, move.verb)(move)
        assert self.place.dtype == move.dtype

    def cast(self, move: Move) -> None:
        assert move.over == move.dtype != self.place.dtype
        self.place = replace(self.place, dtype=move.dtype)

    def fetch(self, move: Move) -> None:
        assert move.over == self.place.tier != "device"
        self.place = replace(self.place, tier=self.goal)

    def evict(self, move: Move) -> None:
        assert move.over != self.place.tier
        self.place = replace(self.place, tier=move.over)

    def slice(self, move: Move) -> None:
        assert move.over not in self.place.shard + self.place.partial
        before, after = self.place.shard, (*self.place.shard, move.over)
        self.held = [
            part(held, self.span(rank, after).within(self.span(rank, before))) for rank, held in enumerate(self.held)
        ]
        self.place = replace(self.place, shard=after)

    def gather(self, move: Move) -> None:
        before = self.place.shard
        after = tuple(axis for axis in before if axis != move.over)
        gathered = []
        for rank in range(self.mesh.world_size):
            group = self.mesh.group(rank, move.over)
            spans, whole = [self.span(other, before) for other in group], self.span(rank, after)
            assert [spans[0].start, spans[-1].stop] == [whole.start, whole.stop]
            assert all(one.stop == two.start for one, two in itertools.pairwise(spans)), "a gather never reorders"
            gathered.append(np.concatenate([self.held[other] for other in group]))
        self.held, self.place = gathered, replace(self.place, shard=after)

    def reduce_scatter(self, move: Move) -> None:
        before, after = self.place.shard, (*self.place.shard, move.over)
        scattered = []
        for rank, total in enumerate(self._totals(move)):
            group = self.mesh.group(rank, move.over)
            chunk = np.split(total, len(group))[group.index(rank)]
            mine = self.span(rank, after).within(self.span(rank, before))
            assert np.array_equal(chunk, part(total, mine)), "the chunk of a rank is its range"
            scattered.append(chunk)
        self.held, self.place = scattered, replace(self.place, shard=after, partial=self._summed(move))

    def all_reduce(self, move: Move) -> None:
        self.held, self.place = self._totals(move), replace(self.place, partial=self._summed(move))

    def _totals(self, move: Move) -> list[Array]:
        assert move.over in self.place.partial
        groups = [self.mesh.group(rank, move.over) for rank in range(self.mesh.world_size)]
        # A sum is its own cast; what it makes is in the dtype of the move.
        self.place = replace(self.place, dtype=move.dtype)
        return [np.sum([self.held[other] for other in group], axis=0) for group in groups]

    def _summed(self, move: Move) -> Axes:
        return tuple(axis for axis in self.place.partial if axis != move.over)


def part(held: Array, span: Span) -> Array:
    return held[span.start : span.stop]


def ranks_at(source: Place, mesh: Mesh, layout: Layout, summands: Array) -> Ranks:
    """Every rank holding what `source` says of one tensor; `summands` has a dim per axis, and the elements last."""
    ranks = Ranks(mesh, layout, source, [])
    ranks.held = [part(mine, ranks.span(rank, source.shard)) for rank, mine in enumerate(whole(source, mesh, summands))]
    return ranks


def whole(place: Place, mesh: Mesh, summands: Array) -> Array:
    """By rank the whole tensor: summed over every axis, but for those over which `place` is partial."""
    summed = tuple(dim for dim, axis in enumerate(mesh.axes) if axis not in place.partial)
    total = summands.sum(axis=summed, keepdims=True)
    return np.broadcast_to(total, summands.shape).reshape(mesh.world_size, -1)


def transitions(table: Table) -> Iterator[tuple[str, Place, Place]]:
    """The moves of one training step, by the moment at which they are due."""
    yield "before forward", table.param, table.full
    yield "after forward", table.full, table.held
    yield "before backward", table.held, table.full
    yield "after backward", table.fresh, table.grad
    yield "before step, grads", table.grad, table.due
    yield "before step, states", table.optim, table.due
    yield "after step, states", table.due, table.optim
    yield "after step, params", table.due, table.param


@settings(deadline=None)
@given(st.data())
def test_every_rank_ends_with_what_the_target_says(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    table = data.draw(tables(mesh.axes, tiers=True)).on(mesh)
    layout = Layout.of(2 * mesh.world_size, table.order, mesh)
    summands = np.random.default_rng(0).integers(-99, 99, (*mesh.sizes, layout.numel))
    for moment, source, target in transitions(table):
        if source.tier == target.tier == "disk":  # a state that stays on disk is never moved
            continue
        ranks = ranks_at(source, mesh, layout, summands)
        ranks.goal = target.tier
        for move in moves(source, target, table.order):
            assert move.verb in ("cast", "fetch", "evict") or mesh.size(move.over) > 1, "an axis of one rank is silent"
            ranks.apply(move)
        assert (set(ranks.place.shard), set(ranks.place.partial)) == (set(target.shard), set(target.partial)), moment
        assert (ranks.place.tier, ranks.place.dtype) == (target.tier, target.dtype), moment
        for rank, expected in enumerate(whole(target, mesh, summands)):
            assert np.array_equal(ranks.held[rank], part(expected, ranks.span(rank, target.shard))), (moment, rank)


@given(st.data())
def test_ranges_of_a_place_partition_the_buffer_and_nest(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    table = data.draw(tables(mesh.axes)).on(mesh)
    layout = Layout.of(3 * mesh.world_size, table.order, mesh)
    by_width = sorted((table.place(kind).shard for kind in KINDS), key=len)
    for shard in by_width:
        spans = {layout.span(shard, mesh.coordinate(rank)) for rank in range(mesh.world_size)}
        ordered = sorted(spans, key=lambda span: span.start)
        assert [ordered[0].start, ordered[-1].stop] == [0, layout.numel]
        assert all(one.stop == two.start for one, two in itertools.pairwise(ordered))
        assert len({span.numel for span in spans}) == 1
        assert len(spans) == math.prod(mesh.size(axis) for axis in shard)
    for rank in range(mesh.world_size):
        ranges = [layout.span(shard, mesh.coordinate(rank)) for shard in by_width]
        assert all(small.overlap(large) == small for large, small in itertools.pairwise(ranges))


@given(st.data())
def test_an_axis_of_one_rank_leaves_the_table(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    table = data.draw(tables(mesh.axes)).on(mesh)
    assert all(mesh.size(axis) > 1 for axis in table.axes + table.order)
    assert table.on(mesh) == table
    for _, source, target in transitions(table):
        axes = [move.over for move in moves(source, target, table.order) if move.verb != "cast"]
        assert len(axes) == len(set(axes)), "at most one move per axis"


# --- the order sends the fewest bytes ----------------------------------------------------------------


def sent_bytes(path: Sequence[Move], source: Place, table: Table, layout: Layout) -> float:
    """What one rank sends on `path`; infinite if the moves cannot be made in this order."""
    shard, partial, dtype, tier = list(source.shard), set(source.partial), source.dtype, source.tier
    numel, total = layout.span(source.shard, dict.fromkeys(layout.order, 0)).numel, 0.0
    for move in path:
        size = layout.sizes.get(move.over, 2)
        outer_first = [axis for axis in layout.order if axis in shard]
        match move.verb:
            case "fetch":
                tier = "device"
            case "cast":
                if tier == "disk" or partial:
                    return math.inf  # nothing is computed on disk, and a sum is taken in the wider dtype
                dtype = move.dtype
            case "slice" | "reduce_scatter":
                if any(layout.order.index(move.over) < layout.order.index(axis) for axis in shard):
                    return math.inf  # the range would fall apart
                total += (
                    (size - 1) * numel / size * table.grad_wire.num_bytes(1) if move.verb == "reduce_scatter" else 0
                )
                numel //= size
                shard.append(move.over)
                partial.discard(move.over)
            case "all_reduce":
                total += 2 * (size - 1) * numel / size * table.grad_wire.num_bytes(1)
                partial.discard(move.over)
            case "gather":
                if outer_first[-1] != move.over:
                    return math.inf
                total += (size - 1) * numel * WIDTH[dtype]
                numel *= size
                shard.remove(move.over)
    return total


@settings(deadline=None)
@given(st.data())
def test_no_other_order_of_the_same_moves_sends_fewer_bytes(data: st.DataObject) -> None:
    mesh = data.draw(meshes(max_size=3))
    table = data.draw(tables(mesh.axes, tiers=True)).on(mesh)
    layout = Layout.of(72 * mesh.world_size, table.order, mesh)
    for moment, source, target in transitions(table):
        path = moves(source, target, table.order)
        if source.tier == target.tier == "disk" or target.partial:
            continue
        least = min(sent_bytes(other, source, table, layout) for other in itertools.permutations(path))
        assert sent_bytes(path, source, table, layout) == least, moment


def test_shards_travel_and_narrow_bytes_travel() -> None:
    shard, copy = Place(shard=("dp",), dtype="fp32"), Place(dtype="bf16")
    assert said(moves(shard, copy, ("dp",))) == "cast(bf16) gather(dp)"
    assert said(moves(replace(shard, dtype="bf16"), replace(copy, dtype="fp32"), ("dp",))) == "gather(dp) cast(fp32)"
    assert said(moves(replace(shard, tier="host"), copy, ("dp",))) == "cast(bf16) fetch(host) gather(dp)"
    assert said(moves(replace(shard, tier="disk"), copy, ("dp",))) == "fetch(disk) cast(bf16) gather(dp)"
    summand = Place(partial=("node", "local"), dtype="bf16")
    local = Place(shard=("local",), dtype="fp32")
    assert said(moves(summand, local, ("local",))) == "reduce_scatter(local) all_reduce(node)"
    assert said(moves(summand, replace(local, tier="host"), ("local",))).endswith("all_reduce(node) evict(host)")


def test_a_sum_is_taken_in_the_wider_dtype() -> None:
    narrow = Place(partial=("dp",), dtype="bf16")
    [move] = moves(narrow, Place(shard=("dp",), dtype="fp32"), ("dp",))
    assert move == Move("reduce_scatter", "dp", "fp32")
    wide = Place(partial=("dp",), dtype="fp32")
    path = moves(wide, Place(shard=("dp",), dtype="bf16"), ("dp",))
    assert path == [Move("reduce_scatter", "dp", "fp32"), Move("cast", "bf16", "bf16")]


# --- the presets move what the papers say ------------------------------------------------------------


def said(path: Sequence[Move]) -> str:
    return " ".join(map(str, path))


def program_of(table: Table) -> dict[str, str]:
    """What a table moves, silent moments left out."""
    lines = {moment: said(moves(source, target, table.order)) for moment, source, target in transitions(table)}
    return {moment: line for moment, line in lines.items() if line}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ddp", {"after backward": "all_reduce(dp)", "after step, params": "cast(bf16)"}),
        (
            "zero1",
            {
                "after backward": "cast(fp32)",
                "before step, grads": "reduce_scatter(dp)",
                "after step, params": "cast(bf16) gather(dp)",
            },
        ),
        ("zero2", {"after backward": "reduce_scatter(dp)", "after step, params": "cast(bf16) gather(dp)"}),
        (
            "zero3",
            {
                "before forward": "gather(dp)",
                "after forward": "slice(dp)",
                "before backward": "gather(dp)",
                "after backward": "reduce_scatter(dp)",
                "after step, params": "cast(bf16)",
            },
        ),
        (
            "zero3-kept",
            {
                "before forward": "gather(dp)",
                "after backward": "reduce_scatter(dp)",
                "after step, params": "cast(bf16)",
            },
        ),
        (
            "hsdp",
            {
                "before forward": "gather(local)",
                "after forward": "slice(local)",
                "before backward": "gather(local)",
                "after backward": "reduce_scatter(local) all_reduce(node)",
                "after step, params": "cast(bf16)",
            },
        ),
        (
            "hpz",
            {
                "before forward": "gather(node) gather(local)",
                "after forward": "slice(local)",
                "before backward": "gather(local)",
                "after backward": "reduce_scatter(local) reduce_scatter(node)",
                "after step, params": "cast(bf16)",
            },
        ),
        (
            "offload",
            {
                "after backward": "reduce_scatter(dp) evict(host)",
                "after step, params": "cast(bf16) fetch(host) gather(dp)",
            },
        ),
        (
            "zero3-offload",
            {
                "before forward": "gather(dp)",
                "after forward": "slice(dp)",
                "before backward": "gather(dp)",
                "after backward": "reduce_scatter(dp) evict(host)",
                "after step, params": "cast(bf16) fetch(host)",
            },
        ),
        (
            "infinity",
            {
                "before forward": "gather(dp)",
                "after forward": "slice(dp)",
                "before backward": "gather(dp)",
                "after backward": "reduce_scatter(dp) evict(host)",
                "after step, params": "cast(bf16) fetch(host)",
                "before step, states": "fetch(disk)",
                "after step, states": "evict(disk)",
            },
        ),
    ],
)
def test_presets_move_what_the_papers_say(name: str, expected: dict[str, str]) -> None:
    mesh = ONE if len(PRESETS[name].axes) == 1 else TWO
    assert program_of(with_dtypes(PRESETS[name], mesh)) == expected


def test_every_preset_is_expected_above() -> None:
    on_device = {"ddp", "zero1", "zero2", "zero3", "zero3-kept", "hsdp", "hpz"}
    assert set(PRESETS) == on_device | {"offload", "zero3-offload", "infinity"}
    assert all(one.known_from for one in PRESETS.values())


def test_rows_between_the_presets() -> None:
    """What no preset has, the same function moves."""
    hsdp = with_dtypes(PRESETS["hsdp"], TWO)
    late = replace(hsdp, grad=replace(hsdp.grad, partial=("node",)))
    assert program_of(late)["after backward"] == "reduce_scatter(local)"
    assert program_of(late)["before step, grads"] == "all_reduce(node)"
    both = {"shard": ("node", "local")}
    hsdp_zero1 = replace(hsdp, grad=replace(hsdp.grad, **both), optim=replace(hsdp.optim, **both))
    assert program_of(hsdp_zero1)["after step, params"] == "cast(bf16) gather(node)"
    zero2 = with_dtypes(PRESETS["zero2"], ONE)
    host = {"tier": "host"}
    offload = replace(zero2, grad=replace(zero2.grad, **host), optim=replace(zero2.optim, **host), step="host")
    assert program_of(offload)["after backward"] == "reduce_scatter(dp) evict(host)"
    assert program_of(offload)["after step, params"] == "cast(bf16) fetch(host) gather(dp)"
    zero3 = with_dtypes(PRESETS["zero3"], ONE)
    disk = {"tier": "disk"}
    infinity = replace(
        offload,
        param=replace(zero3.param, **disk),
        held=replace(zero3.held, **disk),
        optim=replace(zero3.optim, **disk),
    )
    assert program_of(infinity)["before step, states"] == "fetch(disk)"
    assert program_of(infinity)["after step, params"] == "cast(bf16) evict(disk)"


# --- a wrong table says which row and what to do -----------------------------------------------------

COPY, SHARD = Place(), Place(shard=("dp",))


def wrong(**rows: Place) -> str:
    axes = ("node", "local") if any("local" in row.shard or "node" in row.shard for row in rows.values()) else ("dp",)
    table = {"param": COPY, "held": COPY, "grad": COPY, "optim": COPY} | rows
    with pytest.raises(PlacementError) as caught:
        Table(axes, **table)
    return str(caught.value)


def test_an_axis_that_is_not_there_has_a_nearest_one() -> None:
    message = wrong(param=Place(shard=("dpp",)), optim=SHARD)
    assert message == "param is placed on axis 'dpp', but a plan places over dp. Did you mean 'dp'?"


def test_a_sharded_parameter_needs_sharded_states() -> None:
    assert "Shard optim over it too." in wrong(param=SHARD)
    assert wrong(grad=SHARD).startswith("grad is sharded over dp but its optimizer state is not")


def test_sharded_and_partial_is_a_contradiction() -> None:
    message = wrong(grad=Place(shard=("dp",), partial=("dp",)), optim=SHARD)
    assert message == "grad is both sharded and partial over dp; choose one."


@pytest.mark.parametrize("kind", ["param", "held", "optim"])
def test_only_gradients_are_summands(kind: str) -> None:
    assert wrong(**{kind: Place(partial=("dp",))}).startswith(f"{kind} is partial over dp, but only gradients are")


def test_ranges_must_nest() -> None:
    both = Place(shard=("node", "local"))
    message = wrong(param=Place(shard=("node",)), grad=Place(shard=("local",)), optim=both)
    assert message.startswith("param is sharded over node and grad over local: neither contains the other")
    assert message.endswith("Shard grad over node too.")


def test_axes_stand_once_and_in_the_order_of_the_mesh() -> None:
    """Two rows that say the same must be equal: what is held is compared with what rests."""
    assert "names an axis twice: dp+dp" in wrong(held=Place(shard=("dp", "dp")))
    message = wrong(held=Place(shard=("local", "node")), optim=Place(shard=("node", "local")))
    assert message == "held is placed on local+node; write the axes in the order of the mesh: node+local."


def test_states_are_at_least_as_wide_as_parameters() -> None:
    message = wrong(optim=Place(dtype="bf16"))
    assert message == (
        "optim is bf16, narrower than param in fp32, so updates would be rounded away. Make optim fp32 or wider."
    )


# --- tables from plans -------------------------------------------------------------------------------


def table_of(plan: Plan, world_size: int = 4) -> Table:
    return table_for(plan, mesh_for(plan, world_size))


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_every_preset_has_a_table_in_every_precision(name: str, precision: Any) -> None:
    table = table_of(Plan(preset=name, precision=precision))
    states = "fp32" if precision == "bf16" else precision
    assert [table.param.dtype, table.held.dtype, table.compute, str(table.grad_wire)] == [precision] * 4
    assert [table.grad.dtype, table.optim.dtype] == [states] * 2


def test_a_preset_of_one_axis_takes_all_that_the_mesh_has() -> None:
    table = table_of(Plan(preset="zero1", mesh={"node": 2, "local": 2}))
    assert table.optim.shard == table.grad.partial == ("node", "local")
    assert table.order == ("local", "node")


def test_a_preset_of_two_axes_takes_one_node_unless_told() -> None:
    plan = Plan(preset="hsdp")
    assert str(mesh_for(plan, 4)) == "node=1 x local=4"
    assert mesh_for(Plan(preset="hsdp", mesh={"node": 2, "local": -1}), 4) == TWO
    with pytest.raises(ConfigError, match=r"This preset names mesh axis 'node', but the mesh is dp=4\. Known: dp\."):
        table_of(Plan(preset="hsdp", mesh={"dp": 4}))


def test_a_preset_of_two_axes_takes_the_ranks_of_a_host_for_its_inner_one() -> None:
    for name in ("hsdp", "hpz"):
        assert str(mesh_for(Plan(preset=name), 8, 4)) == "node=2 x local=4"
        assert str(mesh_for(Plan(preset=name), 4, 4)) == "node=1 x local=4"
        assert str(mesh_for(Plan(preset=name, mesh={"node": 4, "local": 2}), 8, 4)) == "node=4 x local=2"
    assert str(mesh_for(Plan(preset="zero3"), 8, 3)) == "dp=8"
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE, but 3 does not divide the world's 8"):
        mesh_for(Plan(preset="hsdp"), 8, 3)
    with pytest.raises(ConfigError, match="'local': LOCAL_WORLD_SIZE, which is not set"):
        mesh_for(Plan(preset="hpz"), 8, 0)


def test_a_plan_shards_over_the_expert_axis_too_but_not_experts() -> None:
    mesh = mesh_for(Plan(mesh={"dp": 2, "ep": -1}), 8)
    assert (mesh.data_axes, mesh.replica_axes, mesh.num_replicas) == (("dp", "ep"), ("dp", "ep"), 8)
    assert (mesh.model_axes, mesh.params_axes, mesh.parted_axes) == ((), ("dp", "ep"), ("ep",))
    assert [mesh.data_place(rank) for rank in range(8)] == [(rank, 8) for rank in range(8)]
    for name in ("zero1", "zero3"):
        table = table_for(Plan(preset=name), mesh)
        assert table.axes == table.optim.shard == ("dp", "ep")
        own = table.without("ep")
        assert own == table_for(Plan(preset=name), Mesh(("dp",), (2,)))
    assert not mesh_for(Plan(mesh={"dp": 8, "ep": 1}), 8).has_experts


def test_a_plan_shards_over_the_sequence_axis_too() -> None:
    mesh = mesh_for(Plan(mesh={"dp": 2, "sp": -1}), 8)
    assert (mesh.data_axes, mesh.replica_axes, mesh.num_replicas) == (("dp",), ("dp", "sp"), 8)
    table = table_for(Plan(preset="zero1"), mesh)
    assert table.axes == table.optim.shard == table.grad.partial == ("dp", "sp")
    assert [mesh.data_place(rank) for rank in range(8)] == [(rank // 4, 2) for rank in range(8)]
    three = Mesh(("node", "local", "sp"), (2, 2, 2))
    table = table_for(Plan(preset="hsdp"), three)
    assert (table.axes, table.param.shard) == (("node", "local", "sp"), ("local",))


def test_context_parallelism_is_called_sp() -> None:
    with pytest.raises(ConfigError, match=r"'cp' is called 'sp' here \(sequence parallelism\); write sp\."):
        mesh_for(Plan(mesh={"dp": 2, "cp": 2}), 4)


def test_a_table_is_over_the_replica_axes_alone() -> None:
    mesh = Mesh(("pp", "node", "local", "tp"), (2, 2, 2, 2))
    table = table_for(Plan(preset="zero3"), mesh)
    assert table.axes == table.param.shard == ("node", "local")
    assert table_for(Plan(preset="hsdp"), mesh).param.shard == ("local",)
    with pytest.raises(PlacementError, match="axis 'tp', but a plan places over node, local"):
        table_for(Plan(preset="zero1", rows=Rows(optim=PlaceEdit(shard=("node", "local", "tp")))), mesh)


def test_an_unknown_preset_has_a_nearest_one() -> None:
    with pytest.raises(PlacementError, match=r"There is no preset 'zero4'\. Did you mean 'zero[123]'\?"):
        preset("zero4")


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("ZeRO-3", "Did you mean 'zero3'?"),
        ("DDP", "Did you mean 'ddp'?"),
        ("fsdp", "Did you mean 'zero3'?"),  # and not hsdp, whose letters are nearer
        ("FULL_SHARD", "Did you mean 'zero3'?"),
        ("shard_grad_op", "Did you mean 'zero3-kept'?"),
        ("zero2-offload", "Did you mean 'offload'?"),
        ("tp", "mesh: {dp: -1, tp: 2}."),
    ],
)
def test_a_preset_by_another_librarys_name(name: str, cure: str) -> None:
    with pytest.raises(PlacementError) as raised:
        preset(name)
    assert str(raised.value).startswith(f"There is no preset {name!r}. ")
    assert str(raised.value).endswith(cure)


def test_a_mesh_that_does_not_multiply_is_refused() -> None:
    with pytest.raises(ConfigError, match="makes 6 ranks, but the world has 4"):
        mesh_for(Plan(mesh={"node": 3, "local": 2}), 4)


def test_rows_are_edited_one_value_at_a_time() -> None:
    plan = load_plan("zero3", ["rows.held.shard=[]", "rows.grad.dtype=bf16", "precision=bf16", "wire.grad=fp32"])
    table = table_of(plan)
    assert table.held == table.full
    assert (table.grad, table.grad_wire) == (Place(shard=("dp",), dtype="bf16"), Wire("fp32"))
    assert table.param == Place(shard=("dp",), dtype="bf16")


@pytest.mark.parametrize("name", ["ddp", "zero3", "offload"])
def test_one_rank_rounds_no_gradients(name: str) -> None:
    """Nothing is sent, also where they go to the host."""
    plan = load_plan(name, ["precision=fp32", "wire.grad=bf16"])
    rounded = {}
    for size in (1, 2):
        mesh = mesh_for(plan, size)
        rounded[size] = str(table_for(plan, mesh).on(mesh).grad_wire)
    assert rounded == {1: "fp32", 2: "bf16"}


def test_edited_axes_may_come_in_any_order() -> None:
    edits = ["mesh={node: 2, local: 2}", "rows.held.shard=[local, node]"]
    table = table_of(load_plan("hpz", edits))
    assert table.held == table.param


@pytest.mark.parametrize(
    ("preset_name", "override", "message"),
    [
        ("zero3", "rows.param.dtype=bf16", "Row 'param' is bf16, but forward and backward run in fp32"),
        ("zero3", "rows.held.shard=[pd]", r"Row 'held' names mesh axis 'pd', but the mesh is dp=4. Did you mean 'dp'"),
        ("ddp", "rows.param.shard=[dp]", "Shard optim over it too"),
        ("zero3", "rows.grad.partial=[dp]", "grad is both sharded and partial over dp"),
        ("zero2", "rows.optim.dtype=bf16", "narrower than param"),
        ("zero2", "rows.grad.tier=disk", "Row 'grad' is placed on tier 'disk', where parameters and"),
        (
            "zero3",
            "rows.param.tier=disk",
            "Row 'param' rests on the disk as shard.dp. in fp32 and 'optim' on",
        ),
        (
            "zero3",
            "rows.held.tier=disk",
            "Row 'held' is on the disk, but only parameters that rest there can be held there",
        ),
        ("zero3", "rows.param.tier=host", "Row 'param' is on the host and 'optim' on the device, but the update is"),
        ("zero2", "rows.grad.tier=host", "Row 'grad' is on the host and 'optim' on the device"),
        ("zero1", "rows.grad.tier=host", r"Row 'grad' waits on the host as summands over dp, and sums are taken on"),
        (
            "zero3",
            "rows.held.tier=host",
            "Row 'held' is on the host, but only parameters that rest there can be held there",
        ),
        ("offload", "rows.grad.dtype=bf16", "Row 'grad' waits on the host as shard.dp. in bf16, but the update needs"),
    ],
)
def test_an_edit_that_cannot_be_meant_is_refused(preset_name: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table_of(load_plan(preset_name, [override]))


# --- flat buffers ------------------------------------------------------------------------------------

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=8)


@given(SHAPES, st.integers(1, 12))
def test_parameters_lie_aligned_in_order_without_overlap(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    slots = pack((str(index), shape) for index, shape in enumerate(shapes))
    assert [slot.shape for slot in slots] == shapes
    assert all(slot.start % 16 == 0 for slot in slots)
    assert all(one.span.stop <= two.start < one.span.stop + 16 for one, two in itertools.pairwise(slots))
    numel = padded_numel(slots, num_ranks)
    end = max((slot.span.stop for slot in slots), default=0)
    assert numel % (16 * num_ranks) == 0
    assert end <= numel < end + 16 * num_ranks


def test_a_scalar_has_one_element() -> None:
    assert pack([("scale", ())]) == (Slot("scale", (), 0),)
    assert Slot("scale", (), 0).numel == 1


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_an_overlap_is_what_both_cover(a: int, b: int, c: int, d: int) -> None:
    one, two = Span(a, a + b), Span(c, c + d)
    both = one.overlap(two)
    assert set(range(both.start, both.stop)) == set(range(one.start, one.stop)) & set(range(two.start, two.stop))
    assert both.numel >= 0


@given(st.data())
def test_drawn_shards_are_what_a_table_accepts(data: st.DataObject) -> None:
    """The other direction of legality: rows that do not nest are refused, whatever they are."""
    axes = ("pod", "node", "local")
    free = {kind: data.draw(st.lists(st.sampled_from(axes), unique=True)) for kind in KINDS}
    rows = {kind: Place(tuple(axis for axis in axes if axis in free[kind])) for kind in KINDS}
    sets = {kind: set(free[kind]) for kind in KINDS}
    nests = all(one <= two or two <= one for one, two in itertools.combinations(sets.values(), 2))
    legal = nests and sets["param"] <= sets["optim"] and sets["grad"] <= sets["optim"]
    if legal:
        assert Table(axes, **rows).order is not None
    else:
        with pytest.raises(PlacementError):
            Table(axes, **rows)
    assert Table(axes, **{kind: Place(shard) for kind, shard in data.draw(shards(axes)).items()})
