"""`preset: auto`: the plan for this model, batch and machine, chosen before anything is changed.

What a loop of the user's does not see is chosen: the preset, tiers, and how activations are treated. The size of
micro-batches and their number are the loop's, and a mesh with other axes than those of data parallelism is the user's
to give, because it changes which batch a rank reads; `shardwise plan` chooses those too.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.comm import World
from shardwise.errors import ConfigError, ModelError
from shardwise.fit.calibrate.speed import calibrated_hardware, this_machine
from shardwise.fit.candidates import ON_DEVICE, ON_HOST, Candidate, Space
from shardwise.fit.hardware import Hardware, hardware, profiles
from shardwise.fit.model_subject import ModelSubject, Updates, rows_of
from shardwise.fit.search import DEVICE_SHARE, HOST_SHARE, Evaluated, Found, Limits, search
from shardwise.init import Wishes, device_for
from shardwise.memory import in_own_precision
from shardwise.optim import vet
from shardwise.optim.precision.auto import settle
from shardwise.plan import Budget, Plan, PolicyName
from shardwise.plan.mesh import Mesh
from shardwise.sharded.sharding import check_device, design, require_elementwise, require_units
from shardwise.system.calibration import readable_calibration
from shardwise.system.machine import Cgroups, host_memory
from shardwise.system.units import format_bytes, format_seconds

_log = logging.getLogger("shardwise")


def settled(
    model: nn.Module,
    plan: Plan,
    optimizers: Sequence[torch.optim.Optimizer],
    world: World,
    wishes: Wishes,
    batch: object,
) -> Plan:
    """`plan` with what `preset: auto` stands for. All ranks call; the result is the same on all, and rank 0 logs why.

    Raises `ConfigError` on all of them, with figures, if nothing fits.
    """
    if batch is None:
        raise ConfigError(
            "preset: auto needs a batch to count activations with. Give shard() one micro-batch of a rank, as the "
            "model is called with it: shard(model, 'auto', optimizer=optimizer, batch=batch). Only its shapes matter."
        )
    if world.membership is not None:
        raise ConfigError(
            "preset: auto is not for elastic jobs, in which a rank that joins later would have to choose the same. "
            "Choose before: shardwise plan --model ... --batch ... --out plan.yaml."
        )
    device = device_for(model, wishes, world)
    plan = settle(plan, world, device)
    updates = vet(optimizers, model)
    check_device(model, world)
    limits, num_local = _limits(plan, world, device)
    told: dict[str, object] = {}
    if world.rank == 0:
        try:
            found, base = _search(model, plan, updates, world, batch, limits, num_local)
            told = {"plan": found.best[0].candidate.plan(base).model_dump(mode="json", exclude_unset=True)}
            _log.warning("%s", _summary(found))
        except (ConfigError, ModelError) as error:
            told = {"error": str(error), "is_model": isinstance(error, ModelError)}
    answer = json.loads(world.exchange(json.dumps(told).encode(), "auto")[0])
    if "error" in answer:
        raise (ModelError if answer["is_model"] else ConfigError)(answer["error"])
    return Plan(**answer["plan"])


def _search(
    model: nn.Module,
    plan: Plan,
    updates: Updates,
    world: World,
    batch: object,
    limits: Limits,
    num_local: int,
) -> tuple[Found, Plan]:
    """What was found, and what all candidates have in common."""
    given = {name: getattr(plan, name) for name in plan.model_fields_set if name not in ("preset", "budget")}
    base = in_own_precision(Plan(**given), model)
    on_cpu = world.device.type == "cpu"
    machine = hardware_here(world).with_ranks(num_local)
    rows = rows_of(batch)
    mesh = Mesh.of(base.mesh or {"dp": -1}, world.size)
    num_data = math.prod(mesh.size(axis) for axis in mesh.data_axes)
    subject = _Here(
        model,
        batch,
        machine,
        rows * base.accumulate * num_data,
        base,
        updates,
        num_states=0,
        on_cpu=on_cpu,
        disk=plan.budget.disk or plan.disk,
    )
    subject.world = world
    has_budget = plan.budget.device is not None
    policies: tuple[PolicyName, ...] = ("keep", "selective", "recompute", "offload")
    if plan.activations.policy is not None:
        policies = (plan.activations.policy,)
    space = Space(
        presets=(*ON_DEVICE, *ON_HOST) if has_budget or not on_cpu else ON_DEVICE,
        axes=(),
        activations=policies,
        schedules=((base.pipeline.schedule, base.pipeline.virtual_stages or 1),),
        rows=(rows,),
        shares=has_budget or not on_cpu,
    )
    return search(subject, world.size, limits, base=base, space=space), base


@dataclass
class _Here(ModelSubject):
    """Refuses what `shard` would refuse here."""

    world: World | None = None

    def evaluate(self, candidate: Candidate) -> Evaluated:
        assert self.world is not None
        plan = candidate.plan(self.base)
        designed = design(self.model, plan, self.world)
        require_elementwise(self.model, designed, self.updates or {})
        require_units(self.model, designed, self.updates or {})
        return super().evaluate(candidate)


def _limits(plan: Plan, world: World, device: torch.device) -> tuple[Limits, int]:
    """What each device and host may hold, the smallest of all, and how many ranks share a host."""
    num_local = min(world.size, world.local_size or world.size)
    host = Cgroups().memory(host_memory()).total_bytes
    own = {"host": host, "device": None if device.type == "cpu" else world.rank_device.memory_bytes}
    told = [json.loads(message) for message in world.exchange(json.dumps(own).encode(), "memory")]
    host_bytes = int(HOST_SHARE * min(one["host"] for one in told))
    devices = [one["device"] for one in told if one["device"] is not None]
    device_bytes = int(DEVICE_SHARE * min(devices)) if devices else host_bytes // num_local
    budget: Budget = plan.budget
    device_bytes = device_bytes if budget.device is None else budget.device
    return Limits(device_bytes, host_bytes if budget.host is None else budget.host), num_local


def hardware_here(world: World) -> Hardware:
    """This machine, if `shardwise calibrate` has measured it; otherwise the profile of this rank's device, by its
    name, or of an unknown one that of the nearest memory."""
    known = readable_calibration()
    if known.hardware is not None and known.machine == this_machine():
        return calibrated_hardware(known, known.machine)
    if world.device.type == "cpu":
        return hardware("cpu")
    name = torch.cuda.get_device_name(world.device).lower() if world.device.type == "cuda" else ""
    profile_of = {one: hardware(one) for one in profiles() if one != "cpu"}
    words = name.replace("-", " ").split()
    named = [one for one in profile_of if one.partition("-")[0] in words or one.partition("-")[0] in name]
    memory = world.rank_device.memory_bytes or 0
    nearest = min(named or profile_of, key=lambda one: abs(profile_of[one].memory_bytes - memory))
    if not named:
        _log.warning("There is no hardware profile for %s; %s is assumed.", name or world.device, nearest)
    return profile_of[nearest]


def _summary(found: Found) -> str:
    """What was chosen, and why not what a person would ask about."""
    best = found.best[0]
    limit = format_bytes(found.limits.device_bytes)
    lines = [
        f"auto: {best.candidate}: {format_bytes(best.found.device_bytes)} of {limit} on each device, "
        f"{format_seconds(best.found.seconds)} a step foreseen; {found.num_candidates} candidates, "
        f"{len(found.evaluated)} evaluated"
    ]
    lines += [f"  not {one.what}: {one.reason}" for one in found.why_not]
    return "\n".join(lines)
