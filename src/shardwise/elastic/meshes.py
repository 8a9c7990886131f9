"""The mesh of a plan in a world of another size than it was written for."""

from __future__ import annotations

from shardwise.config import Plan
from shardwise.errors import ConfigError
from shardwise.mesh import Mesh
from shardwise.placement import mesh_for


def plan_on(plan: Plan, num_ranks: int, local_size: int | None) -> Plan:
    """`plan` with a mesh for `num_ranks`: its own if that fits, else one with the same axes.

    If the size of the innermost axis divides `num_ranks`, it is kept and the outermost axis gets the quotient;
    otherwise the innermost axis gets all ranks.
    """
    try:
        mesh_for(plan, num_ranks, local_size)
    except ConfigError:
        axes = tuple(plan.mesh) if plan.mesh is not None else ("node", "local")
        inner = (plan.mesh or {}).get(axes[-1], -1)
        sizes = dict.fromkeys(axes, 1)
        if len(axes) > 1 and inner > 0 and num_ranks % inner == 0:
            sizes[axes[0]], sizes[axes[-1]] = num_ranks // inner, inner
        else:
            sizes[axes[-1]] = num_ranks
        Mesh.of(sizes, num_ranks)
        return plan.model_copy(update={"mesh": sizes})
    return plan
