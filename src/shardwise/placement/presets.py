"""The schemes people ask for by name. A new one is a line here and a golden text in `tests/golden`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.config import Plan
from shardwise.errors import PlacementError, nearest
from shardwise.mesh import Mesh
from shardwise.placement.place import KINDS, Axes, Place
from shardwise.placement.table import Table


@dataclass(frozen=True)
class Preset:
    """A table without its dtypes, and where the idea comes from."""

    axes: Axes
    param: Place
    held: Place
    grad: Place
    optim: Place
    known_from: str

    def over(self, mesh: Mesh) -> Preset:
        """The preset with axes of `mesh`: one written for one axis takes all that the mesh has."""
        if self.axes != DP:
            mesh.require(self.axes, "This preset")
            return self

        def spread(place: Place) -> Place:
            return Place(shard=mesh.axes if place.shard else (), partial=mesh.axes if place.partial else ())

        places = {kind: spread(getattr(self, kind)) for kind in KINDS}
        return replace(self, axes=mesh.axes, **places)


DP, TWO = ("dp",), ("node", "local")
COPY, SHARD, PARTIAL = Place(), Place(shard=DP), Place(partial=DP)
LOCAL, BOTH = Place(shard=("local",)), Place(shard=TWO)

PRESETS = {
    #                    axes  param  held   grad     optim
    "ddp": Preset(DP, COPY, COPY, COPY, COPY, "PyTorch DDP (arXiv:2006.15704), Horovod (arXiv:1802.05799)"),
    "zero1": Preset(DP, COPY, COPY, PARTIAL, SHARD, "ZeRO stage 1 (arXiv:1910.02054)"),
    "zero2": Preset(DP, COPY, COPY, SHARD, SHARD, "ZeRO stage 2 (arXiv:1910.02054)"),
    "zero3": Preset(DP, SHARD, SHARD, SHARD, SHARD, "ZeRO stage 3 (arXiv:1910.02054), FSDP (arXiv:2304.11277)"),
    "zero3-kept": Preset(DP, SHARD, COPY, SHARD, SHARD, "FSDP with reshard_after_forward=False"),
    "hsdp": Preset(TWO, LOCAL, LOCAL, LOCAL, LOCAL, "FSDP hybrid sharding, MiCS (arXiv:2205.00119)"),
    "hpz": Preset(TWO, BOTH, LOCAL, BOTH, BOTH, "ZeRO++ secondary shard (arXiv:2306.10209)"),
}


def preset(name: str) -> Preset:
    """The preset called `name`, or a sentence with the nearest one."""
    if name not in PRESETS:
        raise PlacementError(f"There is no preset {name!r}. {nearest(name, PRESETS)}")
    return PRESETS[name]


def mesh_for(plan: Plan, world_size: int) -> Mesh:
    """The mesh that `plan` asks for, over `world_size` ranks.

    Without a mesh in the plan a one-axis preset takes all ranks; a two-axis preset takes them all on
    its inner axis (one node).
    """
    axes = preset(plan.preset).axes
    sizes = plan.mesh or {axis: 1 for axis in axes[:-1]} | {axes[-1]: -1}
    return Mesh.of(sizes, world_size)


def table_for(plan: Plan, mesh: Mesh) -> Table:
    """The table that `plan` asks for on `mesh`: the preset's rows, the plan's edits and dtypes.

    Parameters are kept and held in the compute dtype (`precision`); gradients at rest and optimizer
    states in at least fp32, so that sums over micro-batches and small updates are not rounded away.
    """
    base = preset(plan.preset).over(mesh)
    compute = plan.precision
    states = compute if compute != "bf16" else "fp32"
    table = {
        "param": replace(base.param, dtype=compute),
        "held": replace(base.held, dtype=compute),
        "grad": replace(base.grad, dtype=states),
        "optim": replace(base.optim, dtype=states),
    }
    for kind in KINDS:
        edit = getattr(plan.rows, kind)
        table[kind] = replace(table[kind], **{k: v for k, v in edit if v is not None})
        mesh.require(table[kind].shard + table[kind].partial, f"Row {kind!r}")
    for kind in ("param", "held"):
        if table[kind].dtype != compute:
            raise PlacementError(
                f"Row {kind!r} is {table[kind].dtype}, but forward and backward run in {compute}. "
                f"Set precision={table[kind].dtype}, or leave out rows.{kind}.dtype."
            )
    return Table(axes=mesh.axes, **table, compute=compute, wire=plan.wire.grad or compute)
