"""Which share of a model goes to the host or to a disk, and what its rows are then. The plan's `offload` says how
much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.config import Offload, Plan
from shardwise.errors import ConfigError
from shardwise.mesh import Mesh
from shardwise.placement.place import Tier
from shardwise.placement.presets import table_for
from shardwise.placement.table import Table


@dataclass(frozen=True)
class Offloaded:
    """Sets of units, by their place in the model: those updated on the host and, among them, those with states on a
    disk, those whose parameters rest on the host too, and those whose parameters rest on the disk instead."""

    updated: frozenset[int]
    on_disk: frozenset[int]
    resting: frozenset[int]
    resting_on_disk: frozenset[int]

    @classmethod
    def of(cls, offload: Offload, sizes: Sequence[int]) -> Offloaded:
        """The units that `offload` means, given the trained elements of each: always the last ones."""
        shares = (offload.optim, offload.optim_disk, offload.param, offload.param_disk)
        return cls(*(share_of_last(sizes, share) for share in shares))

    def table(self, place: int, table: Table) -> Table:
        """The table of the unit at `place`, given `table` from the plan. What a rule has put on another tier stays
        there."""
        if place not in self.updated or table.step != "device":
            return table
        params: Tier = "disk" if place in self.resting_on_disk else "host" if place in self.resting else "device"
        return with_update_on_host(table, params=params, states="disk" if place in self.on_disk else "host")


def with_update_on_host(table: Table, *, params: Tier = "device", states: Tier = "host") -> Table:
    """`table` with the update on the host and `states` there or on a disk; gradients are on the host too if they wait
    in the form that the update needs. Resting parameters go to `params`."""
    optim = replace(table.optim, tier=states)
    waits_as_due = (table.grad.shard, table.grad.partial, table.grad.dtype) == (optim.shard, (), optim.dtype)
    there = replace(
        table, optim=optim, step="host", grad=replace(table.grad, tier="host") if waits_as_due else table.grad
    )
    if params == "device":
        return there
    held = replace(table.held, tier=params) if table.held.shard == table.param.shard else table.held
    return replace(there, param=replace(table.param, tier=params), held=held)


def share_of_last(sizes: Sequence[int], share: float) -> frozenset[int]:
    """The places of the last of `sizes` that together make up at least `share` of the total."""
    wanted, found = share * sum(sizes), 0
    places = []
    for place in reversed(range(len(sizes))):
        if found >= wanted:
            break
        places.append(place)
        found += sizes[place]
    return frozenset(places)


def check_offload(plan: Plan, mesh: Mesh) -> None:
    """Raise `ConfigError` for a share that contradicts another one or the plan's rows."""
    asked = plan.offload
    if asked.param > asked.optim:
        raise ConfigError(
            f"offload.param is {asked.param:g} and offload.optim {asked.optim:g}, but parameters rest on the host only "
            f"where they are updated there. Make offload.optim {asked.param:g} or more."
        )
    if asked.optim_disk > asked.optim:
        raise ConfigError(
            f"offload.optim_disk is {asked.optim_disk:g} and offload.optim {asked.optim:g}, but states on a disk are "
            f"updated on the host. Make offload.optim {asked.optim_disk:g} or more."
        )
    if asked.param_disk > min(asked.param, asked.optim_disk):
        raise ConfigError(
            f"offload.param_disk is {asked.param_disk:g}, offload.param {asked.param:g} and offload.optim_disk "
            f"{asked.optim_disk:g}, but parameters rest on a disk only beside their states. Make both "
            f"{asked.param_disk:g} or more."
        )
    table = table_for(plan, mesh).on(mesh)
    if asked.param_disk and table.param.shard != table.optim.shard:
        raise ConfigError(
            f"offload.param_disk is {asked.param_disk:g}, but parameters are {table.param} and states {table.optim}, "
            f"and on a disk both lie in one file. Take a preset that shards parameters, such as zero3, or leave it out."
        )
    if asked.optim and table.step != "device":
        raise ConfigError(
            f"offload.optim is {asked.optim:g}, a share of the units, but the plan's rows have the states of all units "
            f"on the {table.optim.tier}. Leave out offload, or take a preset with states on the device."
        )
