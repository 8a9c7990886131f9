"""Chooses how to treat activations that exceed a budget: each policy is rehearsed, and the cheapest that fits is taken.

The cost of recomputing is counted: the additional operations of matrix products and attention compared with `keep`,
divided by this rank's measured rate. The cost of moving is the bytes moved divided by the rates in the calibration file
of this machine; copies overlap with the computation, so it is an upper bound. Without these rates the order of
`POLICIES` decides, which is the usual order of their costs.

An engine chooses, not the plan's `budget`: the choice needs a batch to rehearse, which `shard` does not have.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import ConfigError, ModelError
from shardwise.fit.counted_work import CountedOperations
from shardwise.memory import UnitChoice, choose_units, torch_dtype
from shardwise.plan import Activations, Plan, PolicyName
from shardwise.runtime.activations import Treatments, treatments_for
from shardwise.sharded.engine_report import promise_of
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.system.calibration import Calibration, readable_calibration
from shardwise.system.disk import folder_of
from shardwise.system.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from shardwise.runtime.rehearsal import Loss

POLICIES: tuple[PolicyName, ...] = ("keep", "selective", "recompute", "offload", "disk")
PRODUCT = 512
"""The size of the square matrices whose product is timed."""


@dataclass(frozen=True)
class Limits:
    """Bytes allowed: on each rank's device, and of a host's memory for all of its ranks."""

    device: int
    host: int | None = None


@dataclass(frozen=True)
class Choice:
    """What one rank would hold with one policy, in bytes, and its cost per step compared with `keep`."""

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
    """The plan with the chosen policy, its treatments of this rank's units, and a description of the choice and its
    reason."""

    plan: Plan
    treatments: Treatments
    summary: str


def fit_activations(
    sharded: ShardedModel, batch: object, loss: Loss | None, limits: Limits, expert_load: float
) -> FittedActivations:
    """The first of `POLICIES` if it fits, else the cheapest that does. All ranks must call; the result is the same on
    all.

    Raises `ConfigError`, with figures, if none fits.
    """
    plan, world = sharded.plan, sharded.world
    num_local = min(world.size, world.local_size or world.size)
    meant, left_out = _meant(sharded)
    own = _rehearsed(sharded, meant, batch, loss, num_local, expert_load)
    mine = {"choices": _as_json(own), "room": _room(plan)}
    answers = [json.loads(message) for message in world.exchange(json.dumps(mine).encode(), "activations")]
    everyone = [{name: Choice(**one) for name, one in answer["choices"].items()} for answer in answers]
    common = [name for name in POLICIES if all(name in choices for choices in everyone)]
    held = {name: _most([choices[name] for choices in everyone]) for name in common}
    room = min((answer["room"] for answer in answers if answer["room"] is not None), default=None)
    fitting = [name for name in common if _fits(held[name], limits, num_local, room)]
    if not fitting:
        on_disk = "" if room is None else f" {plan.disk} has {format_bytes(room)} free."
        raise _nothing_fits(held, limits, num_local, left_out, on_disk)
    picked = fitting[0] if fitting[0] == "keep" else _cheapest(held, fitting)
    chosen = plan.activations if plan.activations.policy == picked else Activations(policy=picked)
    summary = _summary(picked, held, fitting, limits, num_local, left_out)
    return FittedActivations(plan.model_copy(update={"activations": chosen}), meant[picked], summary)


def _meant(sharded: ShardedModel) -> tuple[dict[PolicyName, Treatments], dict[PolicyName, str]]:
    """What each policy means for this rank's units; and why others are not meant for the model, the same on all
    ranks."""
    plan, staged = sharded.plan, sharded.parts.sharding.staged
    if staged is None:
        choices = choose_units(sharded.model, plan)
    else:
        _require_no_rules(plan)
        choices = [UnitChoice(unit.name, {}, tuple(unit.sites)) for unit in sharded.parts.sharding.units]
    meant: dict[PolicyName, Treatments] = {}
    left_out: dict[PolicyName, str] = {}
    for policy in POLICIES:
        if policy == "disk" and plan.disk is None:
            continue
        wanted = plan.model_copy(update={"activations": Activations(policy=policy)})
        try:
            meant[policy] = treatments_for(sharded.model, choices, wanted, of_stage=staged is not None)
            if staged is not None:
                pieces = [name for stage in staged.stages for name in staged.layout.stages[stage]]
                meant[policy].check_stages(sharded.model, pieces)
        except ConfigError as error:
            left_out[policy] = str(error)
    if staged is not None:  # each stage knows its own modules
        for answer in sharded.world.exchange(json.dumps(left_out).encode(), "activations"):
            left_out = json.loads(answer) | left_out
    return {policy: one for policy, one in meant.items() if policy not in left_out}, left_out


def _require_no_rules(plan: Plan) -> None:
    """Which units a rule comes to, and which of them are the second or third, one stage cannot know."""
    named = next((name for name, rule in plan.rules.items() if rule.activations.policy is not None), None)
    if named is not None:
        raise ConfigError(
            f"fit_activations() in a pipeline chooses one policy for all units, and the plan's rule {named!r} has "
            f"activations of its own. Leave them out, or try plans with engine.rehearse(batch)."
        )


def _rehearsed(
    sharded: ShardedModel,
    meant: Mapping[PolicyName, Treatments],
    batch: object,
    loss: Loss | None,
    num_local: int,
    expert_load: float,
) -> dict[PolicyName, Choice]:
    """What this rank would hold, by policy."""
    rate, calibration = _operations_per_second(sharded), readable_calibration()
    found: dict[PolicyName, Choice] = {}
    num_kept = 0
    for policy, treatments in meant.items():
        counting = CountedOperations()
        with _failing_alike(sharded):
            promise, _, moved = promise_of(sharded, batch, loss, expert_load, treatments, counting)
        num_kept = num_kept or counting.num_flops
        host = promise.host.total if promise.host is not None else 0
        disk = promise.disk.activations if promise.disk is not None else 0
        moving = _moving_seconds(*moved, calibration, sharded.plan.disk, num_local)
        computing = (counting.num_flops - num_kept) / rate
        seconds = None if moving is None else sharded.plan.accumulate * (computing + moving)
        found[policy] = Choice(promise.total, host, disk, seconds)
    return found


@contextmanager
def _failing_alike(sharded: ShardedModel) -> Iterator[None]:
    """Raise `ModelError` on all ranks if the stage of one cannot be rehearsed: the others would wait for it."""
    if sharded.parts.pipeline is None:
        yield
        return
    error: ModelError | None = None
    try:
        yield
    except ModelError as raised:
        error = raised
    answers = [one.decode() for one in sharded.world.exchange(str(error or "").encode(), "activations")]
    if error is not None:
        raise error
    if any(answers):
        raise ModelError(next(filter(None, answers)))


def _operations_per_second(sharded: ShardedModel) -> float:
    """The rate of the rank's device, in the dtype in which the model computes."""
    device, dtype = sharded.parts.sharding.device, torch_dtype(sharded.table.compute)
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
    """Seconds to move a step's bytes away and back; `None` if the machine has not been measured."""
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
    """Free bytes in the plan's folder, or in its nearest existing parent."""
    if plan.disk is None:
        return None
    place = folder_of(plan.disk)
    return shutil.disk_usage(next(at for at in (place, *place.parents) if at.exists())).free


def _fits(choice: Choice, limits: Limits, num_local: int, room: int | None) -> bool:
    has_room = not choice.disk or room is None or num_local * choice.disk <= room
    on_host = limits.host is None or num_local * choice.host <= limits.host
    return choice.device <= limits.device and on_host and has_room


def _cheapest(held: dict[PolicyName, Choice], fitting: list[PolicyName]) -> PolicyName:
    """The policy with the lowest known seconds; without any, the first."""
    known = {name: seconds for name in fitting if (seconds := held[name].seconds) is not None}
    return min(known, key=lambda name: known[name]) if known else fitting[0]


def _as_json(choices: dict[PolicyName, Choice]) -> dict[str, Any]:
    return {name: asdict(choice) for name, choice in choices.items()}


def _figures(name: PolicyName, choice: Choice, num_local: int) -> str:
    text = f"{name} {format_bytes(choice.device)}"
    if choice.host:
        text += f" and {format_bytes(num_local * choice.host)} of a host"
    if choice.disk:
        text += f" and {format_bytes(num_local * choice.disk)} of its disk"
    return text if choice.seconds is None or name == "keep" else f"{text}, {format_seconds(choice.seconds)} more a step"


def _summary(
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
    held: dict[PolicyName, Choice], limits: Limits, num_local: int, left_out: dict[PolicyName, str], on_disk: str
) -> ConfigError:
    least = min(held.values(), key=lambda choice: choice.device)
    over = least.device - limits.device
    what = f"at least {format_bytes(over)} more than the {format_bytes(limits.device)} of each device"
    if over <= 0:
        what = f"more of the host than the {format_bytes(limits.host or 0)} allowed, or of the disk than is free"
    every = "; ".join(_figures(name, choice, num_local) for name, choice in held.items())
    without = f" ({', '.join(left_out)} do not apply to this model.)" if left_out else ""
    return ConfigError(
        f"With this batch a step takes {what}, with every policy for activations: {every}.{on_disk}{without} Give "
        f"smaller micro-batches and accumulate more of them, allow more, or let states leave the device too (budget, "
        f"offload)."
    )
