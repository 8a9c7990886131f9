"""Chooses how to treat activations of a live engine: each policy is rehearsed and timed by the clock, and the fastest
that fits is taken, as a search chooses among plans.

An engine chooses, not the plan's `budget`: the choice needs a batch to rehearse, which `shard` does not have. `preset:
auto` chooses activations together with all else, before there is an engine.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from shardwise.comm.world import num_ranks_per_host
from shardwise.errors import ConfigError, ModelError
from shardwise.fit.hardware import Hardware
from shardwise.fit.hardware_here import hardware_here, with_ranks_of
from shardwise.fit.search import Evaluated, Limits
from shardwise.fit.step_time import step_time
from shardwise.memory import UnitChoice, choose_units
from shardwise.plan import Activations, Plan, PolicyName
from shardwise.runtime.activations import Treatments, treatments_for
from shardwise.sharded.engine_report import promise_of
from shardwise.sharded.rehearsed_step import RehearsedStep, rehearse_step
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.system.named_folder import folder_of
from shardwise.system.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from shardwise.runtime.rehearsal import Loss

POLICIES: tuple[PolicyName, ...] = ("keep", "selective", "recompute", "offload", "disk")
"""In the usual order of their costs."""


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
    """Activations are kept if that fits; else the fastest of `POLICIES` that does. All ranks must call; the result is
    the same on all.

    Raises `ConfigError`, with figures, if none fits.
    """
    plan, world = sharded.plan, sharded.world
    meant, left_out = _meant(sharded)
    own = _rehearsed(sharded, meant, batch, loss, expert_load)
    mine = {"found": {name: asdict(one) for name, one in own.items()}, "room": _room(plan)}
    answers = [json.loads(message) for message in world.exchange(json.dumps(mine).encode(), "activations")]
    everyone = [{name: Evaluated(**one) for name, one in answer["found"].items()} for answer in answers]
    common = [name for name in POLICIES if all(name in one for one in everyone)]
    found = {name: _most([one[name] for one in everyone]) for name in common}
    room = min((answer["room"] for answer in answers if answer["room"] is not None), default=None)
    fitting = [name for name in common if found[name].fits(limits) and found[name].disk_bytes <= _or_any(room)]
    if not fitting:
        on_disk = "" if room is None else f" {plan.disk} has {format_bytes(room)} free."
        raise _nothing_fits(found, limits, left_out, on_disk)
    picked = fitting[0] if fitting[0] == "keep" else min(fitting, key=lambda name: found[name].seconds)
    chosen = plan.activations if plan.activations.policy == picked else Activations(policy=picked)
    summary = _summary(picked, found, fitting, limits, left_out)
    return FittedActivations(plan.model_copy(update={"activations": chosen}), meant[picked], summary)


def _or_any(room: int | None) -> float:
    return math.inf if room is None else room


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
    expert_load: float,
) -> dict[PolicyName, Evaluated]:
    """What this rank, and with it its host, would take, by policy."""
    world = sharded.world
    num_local = num_ranks_per_host(world)
    hardware = with_ranks_of(hardware_here(world), world)
    found: dict[PolicyName, Evaluated] = {}
    for policy, treatments in meant.items():
        with _failing_alike(sharded):
            step = rehearse_step(sharded, batch, loss, expert_load, treatments, counts_work=True)
        promise = promise_of(sharded, step.activations)
        seconds, parts = _timed(sharded, step, hardware)
        found[policy] = Evaluated(
            seconds=seconds,
            device_bytes=promise.total,
            host_bytes=num_local * promise.host_total,
            disk_bytes=num_local * (0 if promise.disk is None else promise.disk.activations),
            parts=parts,
        )
    return found


def _timed(sharded: ShardedModel, step: RehearsedStep, hardware: Hardware) -> tuple[float, Mapping[str, float]]:
    """Seconds of a step, and what they go into; infinitely many if it uses what nobody knows the speed of, which is
    then taken only if all else does not fit."""
    try:
        time = step_time(
            [step.program(sharded)],
            hardware,
            sharded.mesh,
            num_micro_batches=sharded.plan.accumulate,
            keeps_events=False,
        )
    except ConfigError:
        return math.inf, {}
    return time.timeline.step_seconds, time.breakdown


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


def _most(found: list[Evaluated]) -> Evaluated:
    """Of all ranks: the slowest of them, and the most that any takes."""
    return replace(
        max(found, key=lambda one: one.seconds),
        device_bytes=max(one.device_bytes for one in found),
        host_bytes=max(one.host_bytes for one in found),
        disk_bytes=max(one.disk_bytes for one in found),
    )


def _room(plan: Plan) -> int | None:
    """Free bytes in the plan's folder, or in its nearest existing parent."""
    if plan.disk is None:
        return None
    place = folder_of(plan.disk)
    return shutil.disk_usage(next(at for at in (place, *place.parents) if at.exists())).free


def _figures(name: PolicyName, found: Evaluated) -> str:
    text = f"{name} {format_bytes(found.device_bytes)}"
    if found.host_bytes:
        text += f" and {format_bytes(found.host_bytes)} of a host"
    if found.disk_bytes:
        text += f" and {format_bytes(found.disk_bytes)} of its disk"
    return text if math.isinf(found.seconds) else f"{text}, {format_seconds(found.seconds)} a step"


def _summary(
    picked: PolicyName,
    found: Mapping[PolicyName, Evaluated],
    fitting: list[PolicyName],
    limits: Limits,
    left_out: Mapping[PolicyName, str],
) -> str:
    limit = format_bytes(limits.device_bytes)
    lines = [f"activations: {picked}, of {limit} allowed on each device"]
    if picked != "keep":
        why = "the fastest of those that fit" if len(fitting) > 1 else "the only one that fits"
        lines = [f"activations: {picked}, {why} in {limit} on each device"]
    lines += [f"  {_figures(name, one)}{'' if name in fitting else ': too much'}" for name, one in found.items()]
    lines += [f"  not {name}: {why}" for name, why in left_out.items()]
    return "\n".join(lines)


def _nothing_fits(
    found: Mapping[PolicyName, Evaluated], limits: Limits, left_out: Mapping[PolicyName, str], on_disk: str
) -> ConfigError:
    over = min(one.over(limits)[0] for one in found.values())
    what = f"at least {format_bytes(over)} more than the {format_bytes(limits.device_bytes)} of each device"
    if over <= 0:
        what = f"more of the host than the {format_bytes(limits.host_bytes or 0)} allowed, or of the disk than is free"
    every = "; ".join(_figures(name, one) for name, one in found.items())
    without = f" ({', '.join(left_out)} do not apply to this model.)" if left_out else ""
    return ConfigError(
        f"With this batch a step takes {what}, with every policy for activations: {every}.{on_disk}{without} Give "
        f"smaller micro-batches and accumulate more of them, allow more, or let states leave the device too (budget, "
        f"offload)."
    )
