"""Which share of a model goes to the host or to a disk, and what its rows are then. The plan's `offload` says how
much."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from shardwise.errors import ConfigError
from shardwise.plan import Offload, Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement.place import Tier
from shardwise.plan.placement.presets import resident_table, ruled_tables, table_for
from shardwise.plan.placement.table import Table


class UnitNumel(NamedTuple):
    """Elements of a unit's whole parameters: of those that are trained, by which shares of states are counted, and of
    all, by which shares of parameters are."""

    trained: int
    all: int


@dataclass(frozen=True)
class Offloaded:
    """Sets of units, by their place in the model: those updated on the host and, among them, those with states on a
    disk; those whose parameters rest on the host or below and, among them, those that rest on the disk.

    Trained parameters rest only where their unit is updated, and frozen ones anywhere.
    """

    updated: frozenset[int]
    on_disk: frozenset[int]
    resting: frozenset[int]
    resting_on_disk: frozenset[int]

    @classmethod
    def of(cls, offload: Offload, sizes: Sequence[UnitNumel]) -> Offloaded:
        """The units that `offload` means, given the size of each: the last ones that make up its shares."""
        trained, total = [size.trained for size in sizes], sum(size.all for size in sizes)
        updated, on_disk = (share_of_last(trained, share) for share in (offload.optim, offload.optim_disk))

        def resting(share: float, beside: frozenset[int], first: frozenset[int] = frozenset()) -> frozenset[int]:
            movable = _movable(sizes, beside)
            wanted = share * total - sum(movable[place] for place in first)
            left = [0 if place in first else numel for place, numel in enumerate(movable)]
            return first | last_with(left, wanted)

        below = resting(offload.param_disk, on_disk)
        return cls(updated, on_disk, resting(offload.param, updated, below), below)

    def table(self, place: int, table: Table, *, is_trained: bool = True) -> Table:
        """The table of the trained or of the frozen parameters of the unit at `place`, given `table` from the plan.
        What a rule has put on another tier stays there."""
        if table.step != "device" or (is_trained and place not in self.updated):
            return table
        states: Tier = "disk" if place in self.on_disk else "host"
        params: Tier = "host" if place in self.resting else "device"
        if place in self.resting_on_disk and (states == "disk" or not is_trained):
            params = "disk"
        if is_trained:
            return with_update_on_host(table, params=params, states=states)
        beside: Tier = "disk" if params == "disk" else "host"
        return table if params == "device" else with_update_on_host(table, params=params, states=beside)


@lru_cache(256)  # all parameters of a model have few tables
def with_update_on_host(table: Table, *, params: Tier, states: Tier) -> Table:
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


def _movable(sizes: Sequence[UnitNumel], updated: Collection[int]) -> list[int]:
    """The elements of each unit that may rest off the device, if those units are `updated` there: frozen ones always
    may."""
    return [size.all if place in updated else size.all - size.trained for place, size in enumerate(sizes)]


def share_of_last(sizes: Sequence[int], share: float) -> frozenset[int]:
    """The places of the last of `sizes` that together make up at least `share` of the total."""
    return last_with(sizes, share * sum(sizes))


def last_with(sizes: Sequence[int], wanted: float) -> frozenset[int]:
    """The places of the last of `sizes` that together make up at least `wanted`, without empty ones."""
    found = 0
    places = []
    for place in reversed(range(len(sizes))):
        if found >= wanted:
            break
        if sizes[place]:
            places.append(place)
        found += sizes[place]
    return frozenset(places)


def check_budget(plan: Plan, mesh: Mesh) -> None:
    """Raise `ConfigError` for a budget that contradicts itself or the rest of the plan."""
    budget = plan.budget
    if budget.device is None:
        if budget.host is not None or budget.disk is not None:
            which = "host" if budget.host is not None else "disk"
            raise ConfigError(
                f"budget.{which} limits what may leave the device; give budget.device too, the limit of the device."
            )
        return
    if budget.disk is not None and budget.host is None:
        raise ConfigError(
            "budget.disk takes what the host has no room for; give budget.host too, or nothing would ever go there."
        )
    if budget.disk is not None and plan.disk not in (None, budget.disk):
        raise ConfigError(f"The plan's disk is {plan.disk} and budget.disk {budget.disk}. Name one folder.")
    if plan.offload != Offload():
        raise ConfigError("The plan has offload and budget, and the budget would choose the offload. Leave out either.")
    table = table_for(plan, mesh).on(mesh)
    if table.step != "device":
        raise ConfigError(
            f"The plan has a budget, which chooses the units that are updated off the device, but its rows have the "
            f"states of all units on the {table.optim.tier}. Leave out budget, or take a preset with states on the "
            f"device."
        )


def check_offload(plan: Plan, mesh: Mesh, sizes: Sequence[UnitNumel] | None = None) -> None:
    """Raise `ConfigError` for a share that contradicts another one, the plan's rows, or a model with units of these
    `sizes`."""
    asked = plan.offload
    if asked.optim_disk > asked.optim:
        raise ConfigError(
            f"offload.optim_disk is {asked.optim_disk:g} and offload.optim {asked.optim:g}, but states on a disk are "
            f"updated on the host. Make offload.optim {asked.optim_disk:g} or more."
        )
    if asked.param_disk > asked.param:
        raise ConfigError(
            f"offload.param_disk is {asked.param_disk:g} and offload.param {asked.param:g}, of which it is a part. "
            f"Make offload.param {asked.param_disk:g} or more."
        )
    if sizes is not None:
        _check_frozen(asked, sizes)
    table = table_for(plan, mesh).on(mesh)
    if asked.param_disk and table.param.shard != table.optim.shard:
        raise ConfigError(
            f"offload.param_disk is {asked.param_disk:g}, but parameters are {table.param} and states {table.optim}, "
            f"and on a disk both lie in one file. Take a preset that shards parameters, such as zero3, or leave it out."
        )
    ruled = {f"rule {name!r}": one for name, one in ruled_tables(plan, mesh).items()}
    ruled |= {"resident_below": resident_table(plan, mesh)} if plan.resident_below else {}
    apart = [name for name, one in ruled.items() if one.on(mesh).param.shard != one.on(mesh).optim.shard]
    if asked.param_disk and apart:  # updates on the disk would not reach the copies
        raise ConfigError(
            f"offload.param_disk is {asked.param_disk:g}, but {apart[0]} has parameters sharded otherwise than their "
            f"states, and on a disk both lie in one file. Leave one of them out."
        )
    if asked.optim and table.step != "device":
        raise ConfigError(
            f"offload.optim is {asked.optim:g}, a share of the units, but the plan's rows have the states of all units "
            f"on the {table.optim.tier}. Leave out offload, or take a preset with states on the device."
        )


def _check_frozen(asked: Offload, sizes: Sequence[UnitNumel]) -> None:
    """Raise `ConfigError` if trained parameters would have to rest where they are not updated. A share of 1 beside a
    smaller one of states means all frozen parameters."""
    found, total = Offloaded.of(asked, sizes), sum(size.all for size in sizes)
    frozen = total - sum(size.trained for size in sizes)

    def is_too_much(share: float, states: float, updated: Collection[int]) -> bool:
        if share <= states:
            return False
        return not frozen or (share < 1 and share * total > sum(_movable(sizes, updated)))

    beside = f"of this model {frozen / max(1, total):.3g} is frozen" if frozen else "nothing in this model is frozen"
    if is_too_much(asked.param, asked.optim, found.updated):
        raise ConfigError(
            f"offload.param is {asked.param:g} and offload.optim {asked.optim:g}, but trained parameters rest on the "
            f"host only where they are updated there, and {beside}. Make offload.optim {asked.param:g} or more."
        )
    if is_too_much(asked.param_disk, asked.optim_disk, found.on_disk):
        raise ConfigError(
            f"offload.param_disk is {asked.param_disk:g} and offload.optim_disk {asked.optim_disk:g}, but trained "
            f"parameters rest on a disk only beside their states, and {beside}. Make offload.optim_disk "
            f"{asked.param_disk:g} or more."
        )
