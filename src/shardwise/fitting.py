"""What becomes of activations where a budget has no room for them: each choice is rehearsed, and the cheapest that fits
is taken.

What recomputing costs is counted: the operations of matrix products and attention that a choice has more than `keep`,
over what this rank's processor does of them in a second, measured here. What moving costs is what is moved over what
the calibration file says of this machine; copies run beside the computation, so that it is the most that they can cost.
Without figures the order of `POLICIES` decides, which is that of most plans' costs.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.activations import treatments_for
from shardwise.calibration import Calibration, read_calibration
from shardwise.config import Activations, Plan, PolicyName
from shardwise.errors import ConfigError
from shardwise.rehearsal import Loss
from shardwise.report import promise_of
from shardwise.sharded_model import ShardedModel
from shardwise.storage import choose_units, torch_dtype
from shardwise.units import format_bytes, format_seconds

POLICIES: tuple[PolicyName, ...] = ("keep", "selective", "recompute", "offload", "disk")
PRODUCT = 512
"""Rows of the matrices whose product is timed."""


@dataclass(frozen=True)
class Limits:
    """Bytes allowed: on each rank's device, and of a host's memory for all of its ranks."""

    device: int
    host: int | None = None


@dataclass(frozen=True)
class Choice:
    """What one rank would hold by one choice, and what it costs in a step beside `keep`."""

    device: int
    host: int
    disk: int
    seconds: float | None

    def most(self, other: Choice) -> Choice:
        is_known = self.seconds is not None and other.seconds is not None
        seconds = max(self.seconds or 0.0, other.seconds or 0.0) if is_known else None
        return Choice(max(self.device, other.device), max(self.host, other.host), max(self.disk, other.disk), seconds)


@dataclass(frozen=True)
class FittedActivations:
    """The plan with what was chosen, and in words what and why."""

    plan: Plan
    said: str


def fit_activations(
    sharded: ShardedModel, batch: object, loss: Loss | None, limits: Limits, expert_load: float
) -> FittedActivations:
    """The first of `POLICIES` if it fits, else the cheapest that does; the same on all ranks, which all call.

    Raises `ConfigError`, with figures, if none fits.
    """
    plan, world = sharded.plan, sharded.world
    num_local = min(world.size, world.local_size or world.size)
    own, left_out = _rehearsed(sharded, batch, loss, num_local, expert_load)
    said = [json.loads(message) for message in world.exchange(json.dumps(_as_json(own)).encode(), "activations")]
    everyone = [{name: Choice(**one) for name, one in choices.items()} for choices in said]
    common = [name for name in POLICIES if all(name in choices for choices in everyone)]
    held = {name: _most([choices[name] for choices in everyone]) for name in common}
    room = _room(plan)
    fitting = [name for name in common if _fits(held[name], limits, num_local, room)]
    if not fitting:
        raise _nothing_fits(held, limits, num_local, left_out)
    picked = fitting[0] if fitting[0] == "keep" else _cheapest(held, fitting)
    chosen = plan.activations if plan.activations.policy == picked else Activations(policy=picked)
    return FittedActivations(
        plan.model_copy(update={"activations": chosen}), _said(picked, held, fitting, limits, num_local, left_out)
    )


def _rehearsed(
    sharded: ShardedModel, batch: object, loss: Loss | None, num_local: int, expert_load: float
) -> tuple[dict[PolicyName, Choice], dict[PolicyName, str]]:
    """What this rank would hold, by choice; and why others are not meant for this model."""
    choices = choose_units(sharded.model, sharded.plan)
    left_out: dict[PolicyName, str] = {}
    rate, calibration = _operations_per_second(sharded), read_calibration()
    found: dict[PolicyName, Choice] = {}
    num_kept = 0
    for policy in POLICIES:
        if policy == "disk" and sharded.plan.disk is None:
            continue
        plan = sharded.plan.model_copy(update={"activations": Activations(policy=policy)})
        try:
            treatments = treatments_for(sharded.model, choices, plan)
        except ConfigError as error:
            left_out[policy] = str(error)
            continue
        counting = CountedOperations()
        promise, activations = promise_of(sharded, batch, loss, expert_load, treatments, counting)
        num_kept = num_kept or counting.num
        host = promise.host.total if promise.host is not None else 0
        disk = promise.disk.activations if promise.disk is not None else 0
        moved = activations.host_bytes, activations.disk_bytes
        moving = _moving_seconds(*moved, calibration, sharded.plan.disk, num_local)
        computing = (counting.num - num_kept) / rate
        seconds = None if moving is None else sharded.plan.accumulate * (computing + moving)
        found[policy] = Choice(promise.total, host, disk, seconds)
    return found, left_out


class CountedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Inside `with`: the floating-point operations of matrix products, convolutions and attention."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # which a job that fits nothing need not load

        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.num = 0
        self._registry = flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = self._registry.get(func._overloadpacket)
        if count is not None:
            self.num += count(*args, **(kwargs or {}), out_val=result)
        return result


def _operations_per_second(sharded: ShardedModel) -> float:
    """Of the rank's device, in the dtype in which the model computes."""
    device, dtype = sharded.sharding.device, torch_dtype(sharded.table.compute)
    matrix = torch.ones(PRODUCT, PRODUCT, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        best = min(best, time.perf_counter() - started)
    return 2 * PRODUCT**3 / best


def _moving_seconds(
    to_host: int, to_disk: int, calibration: Calibration, folder: str | None, num_local: int
) -> float | None:
    """Of what a step moves away and back; `None` if the machine has not been measured."""
    seconds = 0.0
    if to_host:
        links, memory = calibration.links, calibration.memory
        if links is not None and links.to_device_bytes_per_second:
            seconds += to_host / links.from_device_bytes_per_second + to_host / links.to_device_bytes_per_second
        elif memory is not None:
            seconds += 2 * to_host * num_local / memory.copy_bytes_per_second
        else:
            return None
    if to_disk:
        disk = None if folder is None else calibration.disk_at(folder)
        if disk is None:
            return None
        seconds += num_local * to_disk * (1 / disk.write_bytes_per_second + 1 / disk.read_bytes_per_second)
    return seconds


def _most(choices: list[Choice]) -> Choice:
    most = choices[0]
    for choice in choices[1:]:
        most = most.most(choice)
    return most


def _room(plan: Plan) -> int | None:
    """Bytes that are free in the plan's folder, or the nearest above it that is there."""
    if plan.disk is None:
        return None
    place = Path(plan.disk).absolute()
    return shutil.disk_usage(next(at for at in (place, *place.parents) if at.exists())).free


def _fits(choice: Choice, limits: Limits, num_local: int, room: int | None) -> bool:
    has_room = not choice.disk or room is None or num_local * choice.disk <= room
    on_host = limits.host is None or num_local * choice.host <= limits.host
    return choice.device <= limits.device and on_host and has_room


def _cheapest(held: dict[PolicyName, Choice], fitting: list[PolicyName]) -> PolicyName:
    """By seconds, where they are known; else the first."""
    known = {name: seconds for name in fitting if (seconds := held[name].seconds) is not None}
    return min(known, key=lambda name: known[name]) if known else fitting[0]


def _as_json(choices: dict[PolicyName, Choice]) -> dict[str, Any]:
    return {name: asdict(choice) for name, choice in choices.items()}


def _figures(name: PolicyName, choice: Choice, num_local: int) -> str:
    said = f"{name} {format_bytes(choice.device)}"
    if choice.host:
        said += f" and {format_bytes(num_local * choice.host)} of a host"
    if choice.disk:
        said += f" and {format_bytes(num_local * choice.disk)} of its disk"
    return said if choice.seconds is None or name == "keep" else f"{said}, {format_seconds(choice.seconds)} more a step"


def _said(
    picked: PolicyName,
    held: dict[PolicyName, Choice],
    fitting: list[PolicyName],
    limits: Limits,
    num_local: int,
    left_out: dict[PolicyName, str],
) -> str:
    lines = [f"activations: {picked}, of {format_bytes(limits.device)} allowed on each device"]
    if picked != "keep":
        is_cheapest = len(fitting) > 1 and held[picked].seconds is not None
        why = "the cheapest of those that fit" if is_cheapest else "the first that fits"
        lines = [f"activations: {picked}, {why} in {format_bytes(limits.device)} on each device"]
    for name, choice in held.items():
        lines.append(f"  {_figures(name, choice, num_local)}{'' if name in fitting else ': too much'}")
    lines += [f"  not {name}: {why}" for name, why in left_out.items()]
    return "\n".join(lines)


def _nothing_fits(
    held: dict[PolicyName, Choice], limits: Limits, num_local: int, left_out: dict[PolicyName, str]
) -> ConfigError:
    least = min(held.values(), key=lambda choice: choice.device)
    over = least.device - limits.device
    what = f"at least {format_bytes(over)} more than the {format_bytes(limits.device)} of each device"
    if over <= 0:
        what = f"more of the host than the {format_bytes(limits.host or 0)} allowed, or of the disk than is free"
    every = "; ".join(_figures(name, choice, num_local) for name, choice in held.items())
    without = f" ({', '.join(left_out)} cannot be meant for this model.)" if left_out else ""
    return ConfigError(
        f"With this batch a step takes {what}, whatever becomes of activations: {every}.{without} Give smaller "
        f"micro-batches and accumulate more of them, allow more, or let states leave the device too (budget, offload)."
    )
