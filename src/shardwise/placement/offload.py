"""Which share of a model goes to the host, and what its rows are then. The plan's `offload` says how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.config import Plan
from shardwise.errors import ConfigError
from shardwise.mesh import Mesh
from shardwise.placement.presets import table_for
from shardwise.placement.table import Table


def with_update_on_host(table: Table, *, params: bool = False) -> Table:
    """`table` with states and update on the host; gradients too where they wait as the update needs them, and with
    `params` what rests of the parameters."""
    optim = replace(table.optim, tier="host")
    waits_as_due = (table.grad.shard, table.grad.partial, table.grad.dtype) == (optim.shard, (), optim.dtype)
    there = replace(
        table, optim=optim, step="host", grad=replace(table.grad, tier="host") if waits_as_due else table.grad
    )
    if not params:
        return there
    held = replace(table.held, tier="host") if table.held.shard == table.param.shard else table.held
    return replace(there, param=replace(table.param, tier="host"), held=held)


def share_of_last(sizes: Sequence[int], share: float) -> frozenset[int]:
    """The places of the last of `sizes` that are together at least `share` of all."""
    wanted, found = share * sum(sizes), 0
    places = []
    for place in reversed(range(len(sizes))):
        if found >= wanted:
            break
        places.append(place)
        found += sizes[place]
    return frozenset(places)


def check_offload(plan: Plan, mesh: Mesh) -> None:
    """Raise `ConfigError` for a share that cannot be meant beside the plan's rows."""
    asked = plan.offload
    if asked.param > asked.optim:
        raise ConfigError(
            f"offload.param is {asked.param:g} and offload.optim {asked.optim:g}, but parameters rest on the host only "
            f"where they are updated there. Make offload.optim {asked.param:g} or more."
        )
    if asked.optim and table_for(plan, mesh).step != "device":
        raise ConfigError(
            f"offload.optim is {asked.optim:g}, a share of the units, but the plan's rows have the states of all units "
            f"on the {table_for(plan, mesh).optim.tier}. Leave out offload, or take a preset with states on the device."
        )
