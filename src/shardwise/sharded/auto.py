"""`preset: auto`: the plan for this model, batch and machine, chosen before anything is changed.

What a loop of the user's does not see is chosen: the preset, tiers, and how activations are treated. The size of
micro-batches and their number are the loop's, and a mesh with other axes than those of data parallelism is the user's
to give, because it changes which batch a rank reads; `shardwise plan` chooses those too.

[Note: stages of auto] Where the mesh has stages and the plan lists none, they are cut so that the slowest computes as
little as possible, by what the model's operators take on rank 0's device (`fit/measured_work.py`). If nothing fits so,
by parameters, as without `auto`.

[Note: auto in elastic jobs] The plan is the fastest on the ranks that begin, among those that also fit when only as
many are left as the job needs. It stays: when ranks leave or join, its mesh follows as that of any plan does, and a
rank that joins is told the plan by the others.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from shardwise.comm import World
from shardwise.comm.world import num_ranks_per_host
from shardwise.errors import ConfigError, ModelError
from shardwise.fit.batch_rows import rows_of
from shardwise.fit.candidates import ON_DEVICE, ON_HOST, Candidate, Space, precisions_of, wires_of
from shardwise.fit.equal_blocks import without_values
from shardwise.fit.hardware_here import hardware_here, with_ranks_of
from shardwise.fit.measured_work import OperatorClock
from shardwise.fit.model_subject import ModelSubject, Updates
from shardwise.fit.search import DEVICE_SHARE, HOST_SHARE, Evaluated, Found, Limits, search
from shardwise.fit.stage_balance import Balance, stage_balance
from shardwise.init import Wishes, device_for
from shardwise.memory import in_own_precision
from shardwise.optim import vet
from shardwise.optim.precision.auto_precision import settle
from shardwise.parallel.pipeline import stage_layout
from shardwise.parallel.pipeline.loop_calls import parts_of_call
from shardwise.plan import Budget, Plan, PolicyName
from shardwise.plan.mesh import Mesh
from shardwise.plan.replica_groups import mesh_over
from shardwise.runtime.micro_batches import called_with
from shardwise.sharded.sharding import check_device, design, least_memory, require_elementwise, require_units
from shardwise.system.named_folder import folder_of
from shardwise.system.units import format_bytes, format_seconds

PLAN_FILE = "plan.yaml"
"""In the folder of a run: the plan that was chosen, and why."""
_log = logging.getLogger("shardwise")


def settled(
    model: nn.Module,
    plan: Plan,
    optimizers: Sequence[torch.optim.Optimizer],
    world: World,
    wishes: Wishes,
    batch: object,
    *,
    as_call: bool = False,
) -> Plan:
    """`plan` with what `preset: auto` stands for. All ranks call; the result is the same on all, and rank 0 logs why.
    With `as_call` a loop calls the model with `batch`, instead of `engine.train_step`: see [Note: calls in a search] in
    `fit/model_subject.py`.

    Raises `ConfigError` on all of them, with figures, if nothing fits.
    """
    if batch is None:
        raise ConfigError(
            "preset: auto needs a batch to count activations with. Give shard() one micro-batch of a rank, as the "
            "model is called with it: shard(model, 'auto', optimizer=optimizer, batch=batch). Only its shapes matter. "
            "Where there is none, choose before the job: shardwise plan --model ... --batch ... --out plan.yaml."
        )
    device = device_for(model, check_device(model, world), wishes, world)
    plan = settle(plan, world, device)
    updates = vet(optimizers, model)
    limits = _limits(plan, world, device)
    told: dict[str, object] = {}
    if world.rank == 0:
        try:
            found, base, stages = _search(model, plan, updates, world, batch, limits, as_call=as_call)
            chosen = found.best[0].candidate.plan(base).model_dump(mode="json", exclude_unset=True)
            told = {"plan": chosen}
            summary = "\n".join([*_summary(found, _fewest_ranks(world)), *stages])
            _log.warning("%s\n  the same plan without a search: %s", summary, json.dumps(chosen))
            if plan.run is not None:
                _write(folder_of(plan.run, "run") / PLAN_FILE, summary, chosen)
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
    *,
    as_call: bool,
) -> tuple[Found, Plan, list[str]]:
    """What was found, what all candidates have in common, and what is known of a pipeline's stages."""
    given = {name: getattr(plan, name) for name in plan.model_fields_set if name not in ("preset", "budget")}
    base = in_own_precision(Plan(**given), model)
    on_cpu = world.device.type == "cpu"
    machine = with_ranks_of(hardware_here(world), world)
    rows = rows_of(batch)
    if rows < 1:
        raise ConfigError("The batch for preset: auto has no samples. Give one of at least 1.")
    mesh = Mesh.of(base.mesh or {"dp": -1}, world.size)
    if mesh.island_axes:
        raise ConfigError(
            f"preset: auto does not choose among plans with islands, and the mesh is {mesh}. Name a preset; "
            f"`shardwise plan` for the ranks of one island says which."
        )
    num_data = math.prod(mesh.size(axis) for axis in mesh.data_axes)
    has_budget = plan.budget.device is not None
    policies: tuple[PolicyName, ...] = ("keep", "selective", "recompute", "offload")
    if plan.activations.policy is not None:
        policies = (plan.activations.policy,)
    space = Space(
        presets=(*ON_DEVICE, *ON_HOST) if has_budget or not on_cpu else ON_DEVICE,
        axes=(),
        activations=policies,
        schedules=(),
        rows=(rows,),
        precisions=precisions_of(plan.search.precisions or (), "search.precisions"),
        wires=wires_of(plan.search.wires or (), "search.wires"),
        shares=has_budget or not on_cpu,
        parts=_num_parts(model, base, mesh, batch) if as_call and mesh.has_stages else 0,
    )

    def searched(base: Plan) -> Found:
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
            varies_rows=False,
        )
        subject.world, subject.fewest_ranks = world, _fewest_ranks(world)
        return search(subject, world.size, limits, base=base, space=space)

    balance = _measured_stages(model, base, mesh, batch, world.device)
    if balance is None:
        return searched(base), base, []
    costs = [f"  stage {number} computes {one} for a micro-batch" for number, one in enumerate(balance.best)]
    listed = base.pipeline.model_copy(update={"stages": tuple(one.modules for one in balance.best)})
    cut = base.model_copy(update={"pipeline": listed})
    try:
        return searched(cut), cut, ["  stages of equal times, as measured:", *costs]
    except ConfigError as error:
        found = searched(base)
        return found, base, [f"  stages of equal parameters, not of equal times: {error}"]


def _num_parts(model: nn.Module, plan: Plan, mesh: Mesh, batch: object) -> int:
    """In how many parts a call of `model` with `batch` passes through its stages."""
    layout = stage_layout(without_values(model), plan, mesh)
    parts, _ = parts_of_call(called_with(batch), layout, in_training=True)
    return len(parts)


def _measured_stages(model: nn.Module, base: Plan, mesh: Mesh, batch: object, device: torch.device) -> Balance | None:
    """Stages of equal times. `None` where there are none, or the plan lists its own, or those by parameters are as
    good, or a model's operators cannot be timed one by one. See [Note: stages of auto]."""
    if not mesh.has_stages or base.pipeline.stages != "auto":
        return None
    try:
        bare = without_values(model)
        found = stage_balance(bare, stage_layout(bare, base, mesh), batch, base, mesh, OperatorClock(device))
    except (ConfigError, ModelError) as error:
        _log.warning("Stages are cut by parameters, because their times could not be measured: %s", error)
        return None
    return found if found.is_uneven else None


@dataclass
class _Here(ModelSubject):
    """Refuses what `shard` would refuse here, and counts what `fewest_ranks` will hold if the others leave."""

    world: World | None = None
    fewest_ranks: int = 1

    def evaluate(self, candidate: Candidate) -> Evaluated:
        assert self.world is not None
        plan = candidate.plan(self.base)
        designed = design(self.model, plan, self.world)
        require_elementwise(self.model, designed, self.updates or {})
        require_units(self.model, designed, self.updates or {})
        found = super().evaluate(candidate)
        return found if self.fewest_ranks == candidate.world_size else self._with_few(candidate, found)

    def _with_few(self, candidate: Candidate, found: Evaluated) -> Evaluated:
        """See [Note: auto in elastic jobs]."""
        mesh = mesh_over(dict(candidate.sizes), self.fewest_ranks)
        few = super().evaluate(replace(candidate, sizes=tuple(zip(mesh.axes, mesh.sizes, strict=True))))
        return replace(
            found,
            device_bytes=max(found.device_bytes, few.device_bytes),
            host_bytes=max(found.host_bytes, few.host_bytes),
            disk_bytes=max(found.disk_bytes, few.disk_bytes),
        )


def _fewest_ranks(world: World) -> int:
    """With how many ranks the job may have to continue."""
    return world.size if world.membership is None else min(world.size, world.membership.least)


def _limits(plan: Plan, world: World, device: torch.device) -> Limits:
    """What each device and host may hold, the smallest of all."""
    host, least = least_memory(world, device)
    host_bytes = int(HOST_SHARE * host)
    device_bytes = host_bytes // num_ranks_per_host(world) if least is None else int(DEVICE_SHARE * least)
    budget: Budget = plan.budget
    device_bytes = device_bytes if budget.device is None else budget.device
    return Limits(device_bytes, host_bytes if budget.host is None else budget.host)


def _write(path: Path, summary: str, plan: dict[str, Any]) -> None:
    """The plan as a file, for another run. A disk for records that is full ends no run."""
    comment = "".join(f"# {line}\n" for line in summary.splitlines())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(comment + yaml.safe_dump(plan, sort_keys=False), encoding="utf-8")
    except OSError as error:
        _log.warning("The plan that was chosen cannot be written to %s: %s.", path, error.strerror or error)


def _summary(found: Found, fewest_ranks: int) -> list[str]:
    """What was chosen, and why not what a person would ask about."""
    best = found.best[0]
    limit = format_bytes(found.limits.device_bytes)
    lines = [
        f"auto: {best.candidate}: {format_bytes(best.found.device_bytes)} of {limit} on each device, "
        f"{format_seconds(best.found.seconds)} a step foreseen; {found.num_candidates} candidates, "
        f"{len(found.evaluated)} evaluated"
    ]
    if fewest_ranks < best.candidate.world_size:
        lines[0] += f"; it fits with {fewest_ranks} of {best.candidate.world_size} ranks too, when the others have left"
    return lines + [f"  not {one.what}: {one.reason}" for one in found.why_not]
