"""Which plans have islands."""

from __future__ import annotations

from shardwise.errors import ConfigError
from shardwise.plan import Islands, Plan
from shardwise.plan.mesh import ISLAND_AXIS, Mesh
from shardwise.plan.placement.place import KINDS
from shardwise.plan.placement.presets import ruled_tables, table_for


def check_islands(plan: Plan, mesh: Mesh, num_units: int | None = None) -> None:
    """Raise `ConfigError` for islands that the rest of the plan, or a model with that many trained units, excludes."""
    asked = plan.islands
    if ISLAND_AXIS not in mesh.axes:
        if asked != Islands():
            raise ConfigError(
                f"The plan says how islands come together, but its mesh is {mesh}. Add an axis to it: "
                f"mesh: {{{ISLAND_AXIS}: 2, ...}}, or leave out islands."
            )
        return
    _check_schedule(asked, num_units)
    tables = (table_for(plan, mesh), *ruled_tables(plan, mesh).values())
    if (
        any(table.place(kind).tier == "disk" for table in tables for kind in KINDS)
        or plan.budget.disk is not None
        or plan.offload.optim_disk
        or plan.offload.param_disk
    ):
        raise ConfigError(
            "Rows on a disk are not supported with islands in this version: an outer step would read and write all "
            "master weights there. Keep them on the device or on the host."
        )
    if plan.survive in ("host", "buddy"):
        raise ConfigError(
            f"survive is {plan.survive}, but an island leaves as a whole when it loses a rank, so nothing of it is "
            f"kept elsewhere. Leave out survive: other islands go on."
        )


def _check_schedule(asked: Islands, num_units: int | None) -> None:
    if asked.every % asked.fragments:
        raise ConfigError(
            f"islands.every is {asked.every} steps and islands.fragments {asked.fragments}, which does not divide "
            f"them. Make every a multiple of {asked.fragments}."
        )
    apart = asked.every // asked.fragments
    if asked.overlap >= apart:
        raise ConfigError(
            f"islands.overlap is {asked.overlap} steps, but every {apart} steps a fragment's outer gradients are sent, "
            f"and one is on its way at a time. Make overlap {apart - 1} or less."
        )
    if num_units is not None and asked.fragments > num_units:
        raise ConfigError(
            f"islands.fragments is {asked.fragments}, but only {num_units} units of this model have trained "
            f"parameters, and a fragment is made of units. Make it {num_units} or less, or units smaller (units)."
        )
