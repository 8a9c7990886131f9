"""A rank that joins a running job: it receives the others' state, and takes part from the next step on.

It may be new, or a spare that has trained with them before: see [Note: spares] in `recovery.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint import Held, Loaded
from shardwise.checkpoint.json_codec import decode
from shardwise.comm import World
from shardwise.elastic.optimizer_attributes import Told, take_over
from shardwise.elastic.rebuild import boxes_on, plan_on, rebuilt, without_states
from shardwise.elastic.regroup_reports import IMAGES, RECOVERY
from shardwise.elastic.trained_params import TrainedParams
from shardwise.errors import StateError
from shardwise.memory import Unit, choose_units, make_units, unit_specs
from shardwise.optim import vet
from shardwise.parallel.conversions import conversions_of, convert
from shardwise.parallel.experts import expert_split
from shardwise.parallel.experts.loads import Loads
from shardwise.parallel.model_axes import rows_for
from shardwise.parallel.outline import SmallerMeshes
from shardwise.plan import Budget, Plan
from shardwise.plan.mesh import EXPERT_AXIS, SAME_PARAMS_AXES, Mesh
from shardwise.plan.placement import table_for
from shardwise.plan.schema import plan_heard
from shardwise.sharded.sharded_model import Progress, ShardedModel, scaler_for
from shardwise.sharded.sharding import Design, Sharding, Updates, check_device, design, view_check
from shardwise.sharded.state import Former
from shardwise.system.telemetry import ByteMeter
from shardwise.version import __version__


@dataclass(frozen=True)
class Built:
    """What a script has made, in plain values, for ranks that join to compare."""

    params: dict[str, list[int]]
    """The shapes of whole parameters, by name: those of its pipeline stage, on a rank that has one."""
    buffers: dict[str, list[int]]
    optimizers: list[str]
    """Their classes."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> Built:
        """`shapes` are those of the parameters, where `model` has only parts of them."""
        if shapes is None:
            shapes = {name: param.shape for name, param in model.named_parameters()}
        buffers = {name: list(buffer.shape) for name, buffer in model.named_buffers()}
        params = {name: list(shape) for name, shape in shapes.items()}
        return cls(params, buffers, [type(one).__name__ for one in optimizers])


def versions_here() -> str:
    """Of what ranks have to have the same, to understand each other and to compute alike."""
    return f"shardwise {__version__} and torch {torch.__version__.partition('+')[0]}"


def _require_same(difference: str) -> None:
    if difference:
        raise StateError(
            f"This rank has joined ranks that train already, and its script has made something else than theirs: "
            f"{difference}. They go on without it. Let ranks that come later run the same code with the same "
            f"configuration, or start the job again with the new one, from its last checkpoint."
        )


def first_difference(mine: Built, others: Sequence[Built]) -> str:
    """In which way this rank has built something else than the `others`, each of which has its part of the model; empty
    if it has not."""
    params = {name: shape for one in others for name, shape in one.params.items()}
    buffers = {name: shape for one in others for name, shape in one.buffers.items()}
    if odd := _odd(mine.params, params, mine.params.keys() | params.keys()):
        return f"parameter {odd}"
    if odd := _odd(mine.buffers, buffers, mine.buffers.keys() & buffers.keys()):  # some are made in the first forward
        return f"buffer {odd}"
    if mine.optimizers != others[0].optimizers:
        return f"its optimizers are {', '.join(mine.optimizers)}, and theirs {', '.join(others[0].optimizers)}"
    return ""


def _odd(mine: Mapping[str, list[int]], theirs: Mapping[str, list[int]], names: Iterable[str]) -> str:
    """How the first of `names` differs, of which either may have none; empty if all are alike."""
    for name in sorted(names):
        here, there = mine.get(name), theirs.get(name)
        if here is None or there is None:
            return f"{name} is only {'there' if here is None else 'here'}"
        if here != there:
            return f"{name} has the shape {here} here and {there} there"
    return ""


@dataclass(frozen=True)
class Arrival:
    """What a rank that joins has received from the others."""

    plan: Plan
    label: int
    version: int
    void_after: int
    void_until: int
    loop: dict[str, Any]
    """See `Host.state_for_newcomers`."""
    schedules: list[list[Any]]
    """For each optimizer, the class and state of its schedulers."""
    groups: list[dict[str, Any]]
    """Settings of the optimizers' parameter groups."""
    attributes: list[Told]
    """What optimizers count in attributes of their own."""

    def resumed(self, folder: Path, num_steps: int) -> Loaded | None:
        """What `resume` returns here: the loop goes on where those of the others are, after `num_steps` steps, whether
        they have saved or not."""
        state = self.loop["state"]
        if state is None:
            return Loaded(folder, num_steps, NeverSaved()) if num_steps else None
        return Loaded(folder, num_steps, decode(state))


class NeverSaved(dict[str, Any]):
    """Empty; a lookup raises `StateError` with the reason."""

    def __missing__(self, key: str) -> Any:
        raise StateError(
            f"This rank has joined a job that has not saved or resumed a checkpoint yet, so there is no "
            f"state[{key!r}]. Read it with state.get(), or register its object with engine.remember(): ranks that join "
            f"then receive its state without a checkpoint."
        )


def arrive(
    model: nn.Module,
    plan: Plan,
    optimizers: Sequence[torch.optim.Optimizer],
    world: World,
    before_change: Callable[[], None],
    progress: Progress | None = None,
) -> tuple[ShardedModel, Arrival]:
    """Shard `model` and fill it with the others' values, while they shard theirs for the new world. `progress` is that
    of a rank that has trained before.

    The model and the optimizers must be built as on the other ranks, with any values; raises `StateError` otherwise, on
    this rank alone: the others go on without it.
    """
    check_device(model, world)
    converted = convert(model, conversions_of(plan, model))
    vet(optimizers, model)  # what this rank alone has wrong is found before it waits for the others
    sent = _sent_by_others(world)
    state = sent[0]["came"]
    theirs = state.get("versions", "another version")
    if theirs != versions_here():  # then nothing else of it can be relied on
        _require_same(f"it has {versions_here()}, and they have {theirs}")
    trained = TrainedParams.union([TrainedParams(**one["came"]["trained"]) for one in sent])
    built = [Built(**one["came"]["built"]) for one in sent]
    _require_same(first_difference(Built.of(model, optimizers), built) or trained.other_group(model, optimizers))
    plan = _plan_of_others(state, plan.patience_seconds)
    for optimizer, num_steps in zip(optimizers, state["optimizer_steps"], strict=True):
        without_states(optimizer, num_steps)
    mesh = Mesh.of(state["mesh"], math.prod(state["mesh"].values()))
    budget, smaller = Budget(**state["budget"]), SmallerMeshes.heard(state["smaller"])
    device = next(iter(model.parameters())).device
    trained.plan_in(model)
    trained.add_groups(model, optimizers)
    updates: Updates = vet(optimizers, model)
    here = plan_on(plan, world.size, world.local_size, smaller)
    designed = design(model, here, world)
    views = view_check(model, designed)
    if designed.stages is not None:
        designed = designed.in_stages(model, optimizers, world.rank, keeps_others=True)
        converted = converted.within(model)
    updates = designed.own(updates)
    units = _units(model, plan, mesh, updates, device, designed)
    specs = [(flat.spec, flat.slots) for unit in units for flat in unit.flats]
    held = Held(specs, tuple(map(tuple, state["stands_for"])))
    progress = progress or Progress(scaler=scaler_for(plan))
    _catch_up(progress, optimizers, state)
    for one in sent:
        _load_buffers(model, decode(one["came"]["buffers"]))
    Loads(model).begin({name: counts for one in sent for name, counts in decode(one["came"]["loads"]).items()})
    table = table_for(plan, mesh)
    bare = Sharding(here, mesh, table, updates, units, [], ByteMeter(), converted=converted, smaller=smaller)
    bare = replace(bare, fitted=state["fitted"], budget=budget, views=views)
    if designed.staged is not None:
        designed.staged.free_others(device)
        bare = replace(bare, stage_design=designed, treatments=designed.treatments)
    trained.rest_in(model)
    former = Former(model, optimizers, bare, progress, before_change)
    sharded = rebuilt(former, plan, held, world)
    first = sent[0]
    numbers = (first["label"], first["version"], first["void_after"], first["void_until"])
    return sharded, Arrival(plan, *numbers, state["loop"], state["schedules"], _settings_in(state), state["attributes"])


def _sent_by_others(world: World) -> list[dict[str, Any]]:
    """The messages with what ranks that come are to know: several, if ranks have different pipeline stages."""
    world.exchange(b"{}", IMAGES)  # the others look for images of lost ranks; this rank can read none
    messages = [json.loads(one) for one in world.exchange(b"{}", RECOVERY)]
    sent = [one for one in messages if one.get("came")]
    if not sent:
        raise StateError("This rank has joined a running job, but no other rank sent it the state of the training.")
    return sent


def _plan_of_others(state: Mapping[str, Any], patience_seconds: float | None) -> Plan:
    """Theirs as it is by now: with what they have searched for, settled or fitted, whatever this rank's device is fast
    at, and after a `reshard` another one than this rank's script has begun with. Patience may differ between ranks."""
    return plan_heard(state["plan"]).model_copy(update={"patience_seconds": patience_seconds})


def _catch_up(progress: Progress, optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Any]) -> None:
    """Give this rank the others' steps, loss scale, settings of parameter groups and attributes of optimizers."""
    progress.num_steps = state["num_steps"]
    if progress.scaler is not None and state["scale"] is not None:
        progress.scaler.load_state_dict(decode(state["scale"]))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, settings in zip(groups, _settings_in(state), strict=True):
        group.update(settings)
    take_over(optimizers, state["attributes"])
    for optimizer in optimizers if progress.num_steps else ():
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch warns where a scheduler's step comes first


def _settings_in(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of all parameter groups; new each time, because a learning rate may be a tensor that is written to in place."""
    return [{key: decode(value) for key, value in one.items()} for one in state["groups"]]


def _units(
    model: nn.Module, plan: Plan, mesh: Mesh, updates: Updates, device: torch.device, designed: Design
) -> list[Unit]:
    """The units and flat buffers that the others had before, on another mesh than `designed`, computed from the model;
    they allocate no memory. Those of this rank's part of the model, or of the first one if `mesh` has other parts."""
    boxes = designed.boxes
    if designed.staged is None:
        chosen, rows = choose_units(model, plan), rows_for(model, plan, mesh, expert_split(model, plan, mesh, 0))
        of_parts = (*SAME_PARAMS_AXES, EXPERT_AXIS)
        if any(mesh.size(axis) != designed.mesh.size(axis) for axis in of_parts if axis in mesh.axes):
            boxes = boxes_on(model, plan, mesh, 0)
    else:  # the model has no other stages any more, and tables name axes, not their sizes
        chosen, rows = designed.choices, designed.rows
    choices = [replace(choice, boxes=boxes) for choice in chosen]
    specs = unit_specs(choices, rows, mesh, updates)
    return make_units(choices, specs, rows, mesh.coordinate(0), device, updates)


def _load_buffers(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in values:  # else it is of another pipeline stage
                buffer.copy_(values[name])
