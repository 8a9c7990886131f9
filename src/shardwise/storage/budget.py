"""The least offload with which a model fits the memory that a plan allows: found before anything is changed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.config import Offload, Plan
from shardwise.errors import ConfigError
from shardwise.mesh import Mesh
from shardwise.placement import check_offload
from shardwise.program import Footprint, UnitSpec, Update, plan_step, straight_trace
from shardwise.storage.select import choose_units
from shardwise.storage.tables import tables_for
from shardwise.storage.unit import unit_spec
from shardwise.units import format_bytes

_SPLITS = ("tp", "pp", "ep")


@dataclass(frozen=True)
class Ranks:
    """What is known of the ranks: whether they compute on a CPU, and how many of them are on a host."""

    on_cpu: bool
    num_local: int


def within_budget(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    ranks: Ranks,
    updates: Mapping[nn.Parameter, Update] | None = None,
    states_per_param: int = 0,
) -> Plan:
    """`plan` with, in the place of its `budget`, the least `offload` that fits; as it is, if it has none. The same on
    all ranks.

    `updates` says how an optimizer updates each parameter; without it, it keeps `states_per_param` for each. Raises
    `ConfigError`, with figures, if nothing fits.
    """
    budget, allowed = plan.budget, plan.budget.device
    if allowed is None:
        if budget.host is not None:
            raise ConfigError("budget.host says how much may go to the host; say budget.device too, how much need not.")
        return plan
    _require_meant(plan, mesh)

    def holds(offload: Offload) -> Footprint:
        units = _units(model, plan.with_offload(offload), mesh, ranks, updates)
        prefetch_bytes = None if plan.prefetch_bytes == "auto" else plan.prefetch_bytes
        step = plan_step(units, straight_trace(units), prefetch_bytes=prefetch_bytes)
        return step.footprint(states_per_param=states_per_param, num_micro_batches=plan.accumulate)

    choices = _choices(model, plan)
    found = _first(choices, lambda offload: holds(offload).total <= allowed)
    if found is None:
        raise _too_large(allowed, min(map(holds, choices), key=lambda held: held.total), model, plan)
    host = holds(found).host
    taken = ranks.num_local * (host.total if host is not None else 0)
    if budget.host is not None and taken > budget.host:
        raise ConfigError(
            f"To fit {format_bytes(allowed)} on each device, {ranks.num_local} ranks would take "
            f"{format_bytes(taken)} of their host's memory: {format_bytes(taken - budget.host)} more than budget.host. "
            f"Allow more of either, or shard over more hosts."
        )
    return plan.with_offload(found)


def _require_meant(plan: Plan, mesh: Mesh) -> None:
    split = [axis for axis in mesh.axes if axis in _SPLITS and mesh.size(axis) > 1]
    if split:
        raise ConfigError(
            f"budget is for models that are not split, in this version, and the mesh has {' and '.join(split)}. Say "
            f"offload or rows instead."
        )
    if plan.offload != Offload():
        raise ConfigError("The plan has offload and budget, which would choose it. Leave out either.")
    check_offload(plan.with_offload(Offload(optim=1.0)), mesh)


def _units(
    model: nn.Module, plan: Plan, mesh: Mesh, ranks: Ranks, updates: Mapping[nn.Parameter, Update] | None
) -> tuple[UnitSpec, ...]:
    rows = tables_for(model, plan, mesh)
    specs = (unit_spec(choice, rows, mesh, updates, on_cpu=ranks.on_cpu) for choice in choose_units(model, plan))
    return tuple(spec for spec in specs if spec.flats)


def _choices(model: nn.Module, plan: Plan) -> list[Offload]:
    """Unit by unit: first what is updated on the host, then what rests there, too."""
    units = choose_units(model, plan)
    sizes = [sum(param.numel() for param in unit.params.values() if param.requires_grad) for unit in units]
    shares, together = [], 0
    for size in reversed([size for size in sizes if size]):
        together += size
        shares.append((together - 0.5) / max(1, sum(sizes)))  # so that rounding takes no unit more
    updated = [Offload(optim=share) for share in shares]
    return [Offload(), *updated, *(Offload(optim=1.0, param=share) for share in shares)]


def _first(choices: Sequence[Offload], fits: Callable[[Offload], bool]) -> Offload | None:
    """The first that fits; whatever comes after it does so as well."""
    place = bisect_left(choices, True, key=fits)
    return choices[place] if place < len(choices) else None


def _too_large(allowed: int, least: Footprint, model: nn.Module, plan: Plan) -> ConfigError:
    units = choose_units(model, plan)
    largest = max(units, key=lambda unit: sum(param.numel() for param in unit.params.values()))
    numel = sum(param.numel() for param in largest.params.values())
    return ConfigError(
        f"budget.device is {format_bytes(allowed)}, but with all that can go on the host each rank still holds "
        f"{format_bytes(least.total)} on its device ({format_bytes(least.total - allowed)} too much), of which "
        f"{format_bytes(least.working)} is what comes and goes. The largest unit is {largest.name}, with {numel:,} "
        f"parameters: make units smaller, or prefetch_bytes, or shard parameters over more ranks."
    )
