"""Hypothesis strategies: meshes, tables, units and traces that the library accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import KINDS, PRESETS, WIDTH, Axes, Dtype, Kind, Place, Preset, Table, Wire
from shardwise.plan.placement.table import narrows
from shardwise.program import FlatSpec, Moment, Trace, UnitSpec

Draw = Callable[[st.SearchStrategy[Any]], Any]

AXES = ("pod", "node", "local")
ONE, TWO = Mesh(("dp",), (4,)), Mesh(("node", "local"), (2, 2))
DTYPES = st.sampled_from(sorted(WIDTH))


@st.composite
def meshes(draw: Draw, max_size: int = 4) -> Mesh:
    """One to three axes of sizes 1 to `max_size`."""
    axes = AXES[-draw(st.integers(1, 3)) :]
    return Mesh(axes, tuple(draw(st.integers(1, max_size)) for _ in axes))


@st.composite
def shards(draw: Draw, axes: Axes) -> dict[Kind, Axes]:
    """What each row is sharded over. Rows nest, so each takes the first few of one order of axes."""
    splitting = draw(st.permutations(axes))
    most = draw(st.integers(0, len(axes)))
    depth = {kind: draw(st.integers(0, most)) for kind in ("param", "grad")}
    depth |= {"held": draw(st.integers(0, len(axes))), "optim": most}
    return {kind: tuple(axis for axis in axes if axis in splitting[: depth[kind]]) for kind in KINDS}


@st.composite
def tables(draw: Draw, axes: Axes, *, tiers: bool = False) -> Table:
    """Any legal table over `axes`; everything on the device unless `tiers`."""
    shard = draw(shards(axes))
    summands = tuple(axis for axis in axes if axis not in shard["grad"] and draw(st.booleans()))
    compute = draw(DTYPES)
    states = draw(DTYPES.filter(lambda dtype: dtype == compute or WIDTH[dtype] > WIDTH[compute]))

    def place(kind: Kind, dtype: Dtype) -> Place:
        tier = draw(st.sampled_from(["device", "host", "disk"])) if tiers else "device"
        return Place(shard[kind], summands if kind == "grad" else (), tier, dtype)

    return Table(
        axes,
        param=place("param", compute),
        held=place("held", compute),
        grad=place("grad", draw(DTYPES)),
        optim=place("optim", states),
        compute=compute,
        grad_wire=Wire(draw(DTYPES)),
        param_wire=draw(st.sampled_from([None, *(Wire(one) for one in sorted(WIDTH) if narrows(Wire(one), compute))])),
        step=draw(st.sampled_from(["device", "host"])) if tiers else "device",
    )


def with_dtypes(preset: Preset, mesh: Mesh, compute: Dtype = "bf16", states: Dtype = "fp32") -> Table:
    """`preset` on `mesh`, with gradients and states in `states`."""
    over = preset.over(mesh)
    wide, narrow = ({"dtype": dtype} for dtype in (states, compute))
    return Table(
        mesh.axes,
        replace(over.param, **narrow),
        replace(over.held, **narrow),
        replace(over.grad, **wide),
        replace(over.optim, **wide),
        compute=compute,
        grad_wire=Wire(compute),
        step="device" if preset.optim.tier == "device" else "host",
    )


@st.composite
def placed(draw: Draw, max_size: int = 4) -> tuple[Mesh, Table]:
    """A mesh and a table on it: a preset as often as not, or any legal one."""
    if draw(st.booleans()):
        preset = PRESETS[draw(st.sampled_from(sorted(PRESETS)))]
        axes = preset.axes if len(preset.axes) > 1 else AXES[-draw(st.integers(1, 3)) :]
        mesh = Mesh(axes, tuple(draw(st.integers(1, max_size)) for _ in axes))
        return mesh, with_dtypes(preset, mesh).on(mesh)
    mesh = draw(meshes(max_size))
    return mesh, draw(tables(mesh.axes)).on(mesh)


def flat(name: str, table: Table, mesh: Mesh, units_of_numel: int = 1, *, trainable: bool = True) -> FlatSpec:
    """A flat buffer with `units_of_numel` times the fewest elements that divide evenly on `mesh`."""
    return FlatSpec(name, units_of_numel * 16 * mesh.world_size, 1, table.on(mesh), mesh, trainable)


@st.composite
def unit_lists(draw: Draw, mesh: Mesh, table: Table, max_units: int = 5) -> tuple[UnitSpec, ...]:
    """Units with a trainable flat buffer, a frozen one, or both."""
    units = []
    for index in range(draw(st.integers(1, max_units))):
        labels = draw(st.sampled_from([("",), ("",), ("", ":frozen"), (":frozen",)]))
        sizes = [draw(st.integers(1, 3)) for _ in labels]
        units.append(
            UnitSpec(
                f"u{index}",
                tuple(
                    flat(f"u{index}{label}", table, mesh, size, trainable=not label)
                    for label, size in zip(labels, sizes, strict=True)
                ),
            )
        )
    return tuple(units)


@st.composite
def forwards(draw: Draw, units: Sequence[UnitSpec]) -> list[Moment]:
    """Calls that nest as modules do: one after the other or inside another; any again, some never."""
    moments: list[Moment] = []
    open_units: list[str] = []
    for _ in range(draw(st.integers(1, 3 * len(units)))):
        idle = [unit.name for unit in units if unit.name not in open_units]
        if open_units and (not idle or draw(st.booleans())):
            moments.append(Moment("after", "forward", open_units.pop()))
        elif idle:
            open_units.append(draw(st.sampled_from(idle)))
            moments.append(Moment("before", "forward", open_units[-1]))
    return moments + [Moment("after", "forward", unit) for unit in reversed(open_units)]


@st.composite
def traces(draw: Draw, units: Sequence[UnitSpec], *, training: bool = True) -> Trace:
    """A forward and, in `training`, backwards in any order and overlapping in any way, some of them twice."""
    moments = draw(forwards(units))
    if not training:
        return tuple(moments)
    used = sorted({moment.unit for moment in moments})
    waiting = [unit for unit in draw(st.permutations(used)) for _ in range(draw(st.sampled_from([1, 1, 1, 2])))]
    open_units: list[str] = []
    while waiting or open_units:
        idle = [unit for unit in waiting if unit not in open_units]
        if open_units and (not idle or draw(st.booleans())):
            unit = open_units.pop(draw(st.integers(0, len(open_units) - 1)))
            moments.append(Moment("after", "backward", unit))
        else:
            unit = idle[0]
            waiting.remove(unit)
            open_units.append(unit)
            moments.append(Moment("before", "backward", unit))
    return tuple(moments)
