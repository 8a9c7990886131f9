"""The layout of a model under one plan: computed and checked first, then carried out as flat buffers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.comm import DataGroup, Line, SharedBuffers, World
from shardwise.comm.world import num_ranks_per_host
from shardwise.errors import ConfigError, ModelError
from shardwise.fit.budget import Fitted, Ranks, fit_on_fewer, within_budget
from shardwise.init import (
    FirstValues,
    Overwritten,
    Wishes,
    check_model,
    check_same_everywhere,
    check_same_settings,
    device_for,
    what_is_overwritten,
)
from shardwise.memory import (
    DiskMemory,
    Flat,
    HostMemory,
    Unit,
    UnitChoice,
    in_own_precision,
    make_units,
    open_disk,
    share,
    unit_specs,
)
from shardwise.optim import hyperparameters, require_states_for_disk, vet
from shardwise.optim.precision.auto_precision import settle
from shardwise.parallel.conversions import (
    Converted,
    check_plan,
    conversions_of,
    convert,
)
from shardwise.parallel.conversions import (
    check_device as check_conversions_on,
)
from shardwise.parallel.experts import AXIS as EXPERTS
from shardwise.parallel.experts import ExpertSplit
from shardwise.parallel.model_axes import (
    Boxes,
    carry_out_experts,
    carry_out_split,
    sequence_parts,
)
from shardwise.parallel.outline import Outline, SmallerMeshes, outline, smaller_meshes
from shardwise.plan import Budget, Offload, Plan, flatten
from shardwise.plan.mesh import STAGE_AXIS as STAGES
from shardwise.plan.mesh import TENSOR_AXIS as AXIS
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Table, mesh_for, table_for, takes_local_size
from shardwise.plan.replica_groups import num_groups, with_fewer_ranks
from shardwise.program import Update
from shardwise.runtime.activations import Treatments
from shardwise.runtime.codec import codec_for
from shardwise.system.calibration import readable_calibration
from shardwise.system.machine import memory_here
from shardwise.system.telemetry import ByteMeter

if TYPE_CHECKING:
    from shardwise.fit.fewer_groups import FewerGroups
    from shardwise.fit.smaller_meshes import PlainModel
    from shardwise.parallel.pipeline import Copies, StagedModel, StageLayout
    from shardwise.parallel.tensor import ModelSplit, Verifier
    from shardwise.parallel.tensor.views import ViewCheck

_log = logging.getLogger("shardwise")
Updates = Mapping[nn.Parameter, Update]
"""How each parameter is updated, as found when the optimizer was vetted."""


@dataclass(frozen=True)
class Sharding:
    """A model's flat buffers, unit by unit, with their plan and the counter of their bytes."""

    plan: Plan
    mesh: Mesh
    table: Table
    updates: Updates
    units: list[Unit]
    shared_buffers: list[SharedBuffers]
    meter: ByteMeter
    boxes: Boxes = field(default_factory=dict)
    """This rank's parts of parameters, if an axis splits or replicates them."""
    stage_design: Design | None = None
    """If there is a pipeline, the design of this rank's stages: the model, without the others, would not give it
    again."""
    split: ModelSplit | None = None
    """How the model itself is split, if the mesh has an axis `tp`."""
    experts: ExpertSplit | None = None
    """Which rank along `ep` has which experts, if the mesh has that axis."""
    converted: Converted = field(default_factory=Converted)
    """The modules that compute otherwise than in the plain model: see [Note: conversions]."""
    disk: DiskMemory | None = None
    """Holds the rows on a disk, if there are any."""
    treatments: Treatments = field(default_factory=Treatments)
    """Units whose activations are recomputed, or kept elsewhere."""
    fitted: str = ""
    """The outcome of the plan's budget, and why, if it had one."""
    budget: Budget = field(default_factory=Budget)
    """The budget of this plan, or of an earlier one."""
    smaller: SmallerMeshes = field(default_factory=SmallerMeshes)
    """Where an elastic job goes on without a whole replica group, and what fewer ranks keep off their devices."""
    plain: PlainModel | None = None
    """To time a step there, or in a pipeline, on the rank that does."""
    views: ViewCheck | None = None
    """Compares the views in the first step with those of the unsplit model, for a plan for `tp` of a user's own; kept
    where it may have to be made again."""
    if_forward_communicates: str = ""
    """What this rank says when the model's forward calls collectives of torch's: [Note: layers split by hand]."""

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.flats]

    @property
    def plan_to_fit(self) -> Plan:
        """The plan with its budget in the place of the offload that was found for it, to be found anew."""
        if not self.fitted or self.mesh.has_experts or self.mesh.same_params_axes:
            return self.plan
        return self.plan.model_copy(update={"offload": Offload(), "budget": self.budget})

    @property
    def device(self) -> torch.device:
        return self.units[0].flats[0].device

    @property
    def staged(self) -> StagedModel | None:
        """The pipeline stages of this rank, if there is a pipeline."""
        return None if self.stage_design is None else self.stage_design.staged

    @property
    def weights_outside(self) -> dict[str, float]:
        """How often gradients of these parameters count that do not come through the model, if not once: see [Note:
        terms outside of the model] in `at_rest/use.py`."""
        of_experts = frozenset() if self.experts is None else self.experts.params
        weights: dict[str, float] = {}
        for flat in self.flats:
            for slot, param in zip(flat.slots, flat.params, strict=True):
                weight = float(self.mesh.size(EXPERTS)) if param in of_experts else 1.0
                weights[slot.name] = weight / (1 if self.staged is None else len(self.staged.holders[slot.name]))
        return {name: weight for name, weight in weights.items() if weight != 1}

    def design_on(self, model: nn.Module, plan: Plan, world: World) -> Design:
        """The design of the same `model` for `plan` on a `world` in which ranks were lost or have joined, and this one
        has the same place in its replica group."""
        if self.stage_design is None:
            is_split = self.split is not None or self.experts is not None
            return design(model, plan, world, known=self if is_split else None)
        mesh = mesh_for(plan, world.size, world.local_size)
        return replace(self.stage_design, plan=plan, mesh=mesh, table=table_for(plan, mesh))

    def connect_converted(self, world: World) -> None:
        """Let converted modules send to the ranks of this mesh. All ranks call."""
        collectives = world.collectives(self.device)
        self.converted.connect(self.mesh, lambda axis: Line(collectives, world.group(self.mesh, axis)))

    def treated(self, plan: Plan, treatments: Treatments, world: World) -> Sharding:
        """The same with other `treatments`, which is all in which `plan` differs. All ranks call.

        Raises `TierError` on all of them for a folder that cannot be had, if activations are for a disk.
        """
        disk = self.disk
        if disk is None and plan.activations.policy == "disk":
            disk = open_disk([unit.spec for unit in self.units], plan, self.mesh, world, self.device)
            if disk is not None:
                disk.count_with(self.meter)
        design = self.stage_design
        if design is not None:
            design = replace(design, plan=plan, treatments=treatments)
        return replace(self, plan=plan, treatments=treatments, stage_design=design, disk=disk)


@dataclass(frozen=True, kw_only=True)
class Design(Outline):
    """What a plan means for one model in one world, for this rank. Nothing has been changed for it yet."""

    plan: Plan
    mesh: Mesh
    table: Table
    staged: StagedModel | None = field(repr=False, default=None)
    """If it is of a rank with some stages."""
    draws: bool = False
    """In that case: whether a training forward of the model, on whichever stages, draws random numbers."""
    copies: Copies | None = None
    """In that case: what copies of the whole model are known by."""

    def in_stages(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], rank: int, *, keeps_others: bool
    ) -> Design:
        """The part of it that concerns `rank`. Leaves its stages in `model`, and their parameters in `optimizers`; for
        `keeps_others` see `StagedModel`."""
        from shardwise.parallel.pipeline import Copies, StagedModel  # only ranks with a pipeline load them
        from shardwise.parallel.tensor import draws

        assert self.stages is not None
        parts = sequence_parts(self.split, self.mesh, self.stages)
        place = self.mesh.coordinate(rank)[STAGES]
        draws_numbers = draws(model)  # asked of the whole model, so that all ranks know the same
        copies = Copies.of(model)
        staged = StagedModel(model, self.stages, place, parts, keeps_others=keeps_others)
        staged.take_from(optimizers)
        return replace(self._of_stages(staged), draws=draws_numbers, copies=copies)

    def _of_stages(self, staged: StagedModel) -> Design:
        """The part of it that concerns a rank with some stages of the model."""
        own = staged.params
        present = set(staged.model.modules())
        sites = [tuple(site for site in choice.sites if site in present) for choice in self.choices]
        here = [replace(choice, sites=own_sites) for choice, own_sites in zip(self.choices, sites, strict=True)]
        choices = units_of_stages(here, staged.holders, staged.pp_rank)
        rows = {param: row for param, row in self.rows.items() if param in own}
        treatments = self.treatments.within(staged.model)
        boxes = staged.boxes(self.boxes)
        return replace(self, choices=choices, rows=rows, boxes=boxes, treatments=treatments, staged=staged)

    def own(self, updates: Updates) -> Updates:
        """Those of the parameters that this rank has."""
        if self.staged is None:
            return updates
        return {param: update for param, update in updates.items() if param in self.staged.params}

    def open_disk(
        self,
        world: World,
        model: nn.Module,
        device: torch.device,
        updates: Updates,
        known: DiskMemory | None = None,
        *,
        recovers: bool = False,
    ) -> DiskMemory | None:
        """The disk memory for rows on a disk, if any rank has such; `known` is that of the previous plan, or before
        ranks were lost or joined (`recovers`). All ranks call."""
        has_rows = any("disk" in (row.table.optim.tier, row.table.param.tier) for row in self.rows.values())
        if not has_rows and not self.treatments.have("disk"):
            return None
        choices = [replace(choice, boxes=self.boxes) for choice in self.choices]
        if self.stages is not None:
            own = self.stages.params_at(model, self.mesh.coordinate(world.rank)[STAGES])
            choices = [
                replace(choice, params={name: param for name, param in choice.params.items() if param in own})
                for choice in choices
            ]
        on_cpu = world.collectives(device).is_host
        specs = unit_specs(choices, self.rows, self.mesh, updates, on_cpu=on_cpu)
        are_final = self.stages is None  # what stages share becomes units of its own later
        return open_disk(specs, self.plan, self.mesh, world, device, known, makes_files=are_final, recovers=recovers)

    def carry_out(
        self, world: World, device: torch.device, updates: Updates, disk: DiskMemory | None = None
    ) -> Sharding:
        """Create the flat buffers, to be filled by the caller. All ranks call."""
        meter = ByteMeter()
        if disk is not None:
            disk.count_with(meter)
        collectives = world.collectives(device)

        def overlaps(axis: str) -> bool:
            return collectives.overlaps_compute(world.group(self.mesh, axis))

        choices = [replace(choice, boxes=self.boxes) for choice in self.choices]
        specs = unit_specs(
            choices, self.rows, self.mesh, updates, on_cpu=collectives.is_host, overlaps_compute=overlaps
        )
        units = make_units(choices, specs, self.rows, self.mesh.coordinate(world.rank), device, updates, meter)
        flats = [flat for unit in units for flat in unit.flats]
        host = HostMemory(meter, world.rank_device if device.type == world.rank_device.device.type else None)
        for flat in flats:
            flat.keep_below(host, disk)
            if (codes := flat.spec.table.rests_as) is not None:
                flat.rest_by(codec_for(codes, device))
        shared_buffers = share(flats, collectives, self.mesh, world.rank)
        laid = Sharding(self.plan, self.mesh, self.table, updates, units, shared_buffers, meter, self.boxes)
        stage_design = None if self.staged is None else self
        return replace(laid, stage_design=stage_design, experts=self.experts, disk=disk, treatments=self.treatments)


def units_of_stages(
    choices: Sequence[UnitChoice], holders: Mapping[str, Sequence[int]], pp_rank: int
) -> list[UnitChoice]:
    """Of the units of a whole model, those of one rank of a pipeline. `holders` are the ranks that have each
    parameter."""
    found = []
    for choice in choices:
        alone: dict[str, nn.Parameter] = {}
        shared: dict[tuple[int, ...], dict[str, nn.Parameter]] = {}
        for name, param in choice.params.items():
            pp_ranks = tuple(holders[name])
            if pp_rank in pp_ranks:
                (alone if len(pp_ranks) == 1 else shared.setdefault(pp_ranks, {}))[name] = param
        if alone:
            found.append(replace(choice, params=alone))
        for pp_ranks, theirs in shared.items():  # [Note: shared parameters] in parallel/pipeline/tied_gradients.py
            others = ",".join(map(str, pp_ranks)) if len(shared) > 1 else ""
            name = f"{choice.name}+{others}" if alone or others else choice.name
            found.append(replace(choice, name=name, params=theirs))
    return found


def design(model: nn.Module, plan: Plan, world: World, known: Sharding | None = None) -> Design:
    """The design of `plan` for `model`. Raises `ConfigError` or `ModelError` if it is impossible on the ranks of
    `world`.

    `known` is the current layout of a model that is already sharded.
    """
    mesh = mesh_for(plan, world.size, world.local_size)
    parts, had = (None, None) if known is None else (known.boxes, known.experts)
    found = outline(model, plan, mesh, world.rank, parts=parts, had=had)
    return Design(**vars(found), plan=plan, mesh=mesh, table=table_for(plan, mesh))


def settings_of(plan: Plan, world: World) -> dict[str, object]:
    """What has to be the same on all ranks, by key (`"wire.grad"`)."""
    values = plan.model_dump(mode="json", exclude={"patience_seconds"})
    if takes_local_size(plan):
        values["LOCAL_WORLD_SIZE"] = world.local_size
    return {
        ".".join(path): value for path, value in flatten(values).items() if not value or not isinstance(value, dict)
    }


def lay(
    model: nn.Module, plan: Plan, optimizers: Sequence[torch.optim.Optimizer], world: World, wishes: Wishes
) -> Sharding:
    """Lay a plain model into flat buffers, with its first values. All ranks call.

    Raises `ConfigError` or `ModelError` before anything is changed.
    """
    world.journal.forget_part()
    check_same_settings(settings_of(plan, world), "plan", world)
    device = device_for(model, check_device(model, world), wishes, world)
    check_same_settings({**wishes.settings(device), "optimizers": len(optimizers)}, "argument", world)
    for optimizer in optimizers:
        check_same_settings(hyperparameters(optimizer), "optimizer", world)
    plain = _to_be_timed(model, plan, optimizers, world)
    converted = convert(model, conversions_of(plan, model))
    try:
        check_plan(converted, plan)
        check_conversions_on(converted, device)
        sharding = _lay_converted(model, plan, optimizers, world, wishes, device)
    except BaseException:
        converted.undo()
        raise
    sharding = replace(sharding, converted=converted.within(model), plain=plain)
    sharding.connect_converted(world)
    return sharding


def _to_be_timed(
    model: nn.Module, plan: Plan, optimizers: Sequence[torch.optim.Optimizer], world: World
) -> PlainModel | None:
    """The model while it is plain, on the first rank: where it chooses among smaller meshes (`elastic/mesh_choice.py`),
    and where it predicts the time of a pipeline, of which it will have its own stages alone
    (`observe/prediction.py`)."""
    if world.rank != 0:
        return None
    mesh = mesh_for(plan, world.size, world.local_size)
    chooses = world.membership is not None and len(with_fewer_ranks(mesh)) > 2  # the first is of one whole group
    if not chooses and not (plan.run is not None and mesh.has_stages):
        return None
    from shardwise.fit.smaller_meshes import PlainModel  # only these jobs load it

    try:
        return PlainModel.of(model, vet(optimizers, model))
    except Exception as error:  # a model that cannot be copied is trained without it
        _log.info("No step is foreseen before ranks are lost, or in a pipeline: the model cannot be copied: %s", error)
        return None


def _lay_converted(
    model: nn.Module,
    plan: Plan,
    optimizers: Sequence[torch.optim.Optimizer],
    world: World,
    wishes: Wishes,
    device: torch.device,
) -> Sharding:
    """`lay`, once the modules of `model` are those that will compute."""
    mesh = mesh_for(plan, world.size, world.local_size)
    if mesh.island_axes or plan.says_islands:
        from shardwise.plan.placement.islands import check_islands  # only plans with islands load it

        check_islands(plan, mesh)
    peers = DataGroup(world, mesh, mesh.params_axes)
    everyone = DataGroup(world, mesh, (*mesh.island_axes, *mesh.params_axes)) if mesh.island_axes else peers
    plan = settle(plan, world, device)
    table_for(plan, mesh)  # so that a plan that does not fit the world is reported first
    updates: Updates = vet(optimizers, model)
    alike = DataGroup(world, mesh, mesh.axes) if mesh.has_stages else everyone
    check_same_everywhere(model, alike)
    overwritten = Overwritten() if wishes.weights is not None else what_is_overwritten(model, alike)
    if overwritten.now and world.rank == 0:
        _log.warning("%s", overwritten.now)
    plan = in_own_precision(plan, model)
    may_shrink = world.membership is not None and (len(with_fewer_ranks(mesh)) > 1 or num_groups(mesh) > 1)
    ranks = ranks_of(world, plan, device, says_memory=may_shrink)
    fitted = within_budget(model, plan, mesh, ranks, updates)
    budget, smaller = plan.budget, SmallerMeshes()
    if world.membership is not None:
        smaller = smaller_meshes(model, plan, mesh, lambda there, on: fit_on_fewer(model, there, on, ranks, updates))
        smaller = with_fewer_groups(smaller, model, plan, mesh, ranks, updates, world)
    plan = fitted.plan
    designed = design(model, plan, world)
    values = FirstValues(model, wishes, world, everyone, device)
    check_design(model, designed, optimizers, updates, device)
    verifier = _verifier(model, designed, plan)
    disk = designed.open_disk(world, model, device, updates)
    log_fitted(fitted, world)
    views = view_check(model, designed)
    if designed.stages is not None:
        world.collectives(device).prepare(mesh)
        values.give_to_stages(world)
        _warn_of_stages(model, designed.stages, world)
        designed = designed.in_stages(model, optimizers, world.rank, keeps_others=world.membership is not None)
    updates = designed.own(updates)
    try:
        sharding = designed.carry_out(world, device, updates, disk)
        sharding = replace(sharding, split=designed.split, fitted=fitted.summary, budget=budget, smaller=smaller)
        if world.rank == 0 and not mesh.model_axes:  # with these, forwards have collectives of our own
            sharding = replace(sharding, if_forward_communicates=overwritten.if_forward_communicates)
        values.apply(sharding.units)
        if designed.staged is not None:
            designed.staged.free_others(device)
    except BaseException:
        if disk is not None:
            disk.close()
        raise
    carry_out_experts(model, designed.experts, mesh, world, device)
    if designed.split is None:
        return sharding
    carry_out_split(model, designed.split, mesh, world, device)
    if verifier is not None:
        verifier.watch(model, designed.split, world, peers)
        designed.split.on_undo(verifier.close)
    if views is not None and (designed.stages is not None or world.membership is not None):
        sharding = replace(sharding, views=views)
    if views is not None and designed.stages is None:
        watch_views(views, model, sharding)
    return sharding


def _warn_of_stages(model: nn.Module, stages: StageLayout, world: World) -> None:
    from shardwise.parallel.pipeline import stage_warnings  # only ranks with a pipeline load it

    if world.rank == 0 and any(param.requires_grad for param in model.parameters()):
        for warning in stage_warnings(model, stages):
            _log.warning("%s", warning)


def _verifier(model: nn.Module, designed: Design, plan: Plan) -> Verifier | None:
    if designed.split is None or not plan.tensor.verify:
        return None
    from shardwise.parallel.tensor import Verifier  # only plans that ask for it load it

    return Verifier(model)


def watch_views(views: ViewCheck, model: nn.Module, sharding: Sharding) -> None:
    """Compare them in the first forward of the model, which is split, and has no stages."""
    split = sharding.split
    assert split is not None
    assert split.line is not None
    split.on_undo(views.watch(model, sharding.units, sharding.table.compute, split.line))


def view_check(model: nn.Module, designed: Design) -> ViewCheck | None:
    """A check of the heads that a forward counts, for the user's own tensor plans. The model is still whole."""
    asked = designed.plan.tensor.plan
    if designed.split is None or asked is None:
        return None
    from shardwise.parallel.tensor.views import ViewCheck  # only plans for tp of a user's own need it

    return ViewCheck(model, {1 if isinstance(rule, str) else int(rule.get("parts", 1)) for rule in asked.values()})


_CURES = {
    "matrix": "Put split parameters into a group that is updated element by element (Muon: use_muon=False).",
    "sums": "Give split parameters to an elementwise optimizer beside it, such as AdamW, or use shardwise.optim.Lamb.",
}


def check_design(
    model: nn.Module,
    designed: Design,
    optimizers: Sequence[torch.optim.Optimizer],
    updates: Updates,
    device: torch.device,
) -> None:
    """Raise `ConfigError` or `ModelError` for what this device, or these optimizers, cannot do as `designed`."""
    _check_batch_norms(model, designed, device)
    require_elementwise(model, designed, updates)
    require_units(model, designed, updates)
    require_states_for_disk(model, optimizers, {param: row.table for param, row in designed.rows.items()})


def require_elementwise(model: nn.Module, designed: Design, updates: Updates) -> None:
    """Raise `ModelError` for an optimizer that needs whole parameters, or sums of their rows, if ranks have only parts
    of them."""
    for name, param in model.named_parameters():
        box = designed.boxes.get(param)
        update = updates.get(param)
        if update is not None and update.whole and (where := _not_whole(designed, param, update.sends_signs)):
            raise ModelError(
                f"{update.whole} It works as it is where each rank updates whole parameters in the device's memory, as "
                f"with the preset ddp; here {name} {where}."
            )
        if box is not None and box.is_split and update is not None and (update.matrix or update.num_sums):
            axis = EXPERTS if designed.experts is not None and param in designed.experts.params else AXIS
            raise ModelError(
                f"The optimizer works on whole matrices, and {name} is split along {axis}: this rank has {box} of it. "
                f"{_CURES['matrix' if update.matrix else 'sums']}"
            )


def _not_whole(designed: Design, param: nn.Parameter, sends_signs: bool) -> str:
    """Why no optimizer of this plan has all of its parameters whole at once, if `param` is one; empty if it has. One
    that `sends_signs` needs them on the device."""
    if designed.stages is not None:
        return "is one stage's, and the optimizer's other parameters are other stages'"
    row, box = designed.rows.get(param), designed.boxes.get(param)
    if row is None:
        return ""
    table = row.table.on(designed.mesh)
    if box is not None and box.is_split:
        return f"is split: a rank has {box} of it"
    if table.optim.shard:
        return f"is updated in parts, sharded over {' and '.join(table.optim.shard)}"
    if sends_signs and table.optim.tier != "device":
        return f"is updated on the {table.optim.tier}"
    if sends_signs and table.low_rank is not None:
        return "has a gradient that the plan sends as factors (powersgd)"
    return "has its states on a disk" if table.optim.tier == "disk" else ""


def ranks_of(world: World, plan: Plan, device: torch.device, *, says_memory: bool = False) -> Ranks:
    """What the plan's budget has to know about the ranks, for a model that is on `device`; how much memory they have
    also without a budget, if it `says_memory`. All ranks call."""
    host_bytes = device_bytes = None
    if says_memory or plan.budget.device is not None:
        host_bytes, device_bytes = least_memory(world, device)
    says_it = plan.budget.device is not None and world.rank == 0
    calibration = readable_calibration() if says_it else None
    return Ranks(world.device.type == "cpu", num_ranks_per_host(world), host_bytes, device_bytes, calibration)


def least_memory(world: World, device: torch.device) -> tuple[int, int | None]:
    """Bytes of the smallest host, and of the smallest accelerator; `None` for a `device` that is none, or if that is
    unknown. All ranks call."""
    own = {
        "host": memory_here().total_bytes,
        "device": world.rank_device.memory_bytes if device.type in (world.device.type, "meta") else None,
    }
    told = [json.loads(message) for message in world.exchange(json.dumps(own).encode(), "memory")]
    devices = [one["device"] for one in told if one["device"] is not None]
    return min(one["host"] for one in told), min(devices, default=None)


def log_fitted(fitted: Fitted, world: World) -> None:
    """Log once how a budget was met."""
    if fitted.summary and world.rank == 0:
        _log.warning("%s", fitted.summary)


def with_fewer_groups(
    smaller: SmallerMeshes,
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    ranks: Ranks,
    updates: Updates,
    world: World,
) -> SmallerMeshes:
    """`smaller`, with what ranks of an elastic job keep off their devices when replica groups have left. `plan` still
    has its budget. What has no room then is logged once, by rank 0, which alone looks at it without a budget."""
    has_budget = plan.budget != Budget()
    if world.membership is None or plan.survive == "checkpoint" or not (has_budget or world.rank == 0):
        return smaller
    from shardwise.fit.fewer_groups import fewer_groups  # only these jobs load it

    found = fewer_groups(
        plan, mesh, lambda there, on: fit_on_fewer(model, there, on, ranks, updates), world.membership.least
    )
    if found.why and world.rank == 0:
        _log.warning("%s", _no_room(found, mesh, has_budget=has_budget))
    return found.beside(smaller, has_budget=has_budget)


def _no_room(found: FewerGroups, mesh: Mesh, *, has_budget: bool) -> str:
    then = "The job then waits for others, as with fewer than MIN of --elastic, or ends."
    if not has_budget:
        then = (
            "The system may then end ranks for lack of memory. With a budget they keep more on a disk, or the job "
            "waits for others."
        )
    return f"With fewer than {found.least} of {mesh.world_size} ranks there is no room: {found.why}. {then}"


def require_units(model: nn.Module, designed: Design, updates: Updates) -> None:
    """Raise `ModelError` for an optimizer that needs whole parameters, where states are read unit by unit from a
    disk."""
    for name, param in model.named_parameters():
        row = designed.rows.get(param)
        if row is None or row.table.optim.tier != "disk":
            continue
        if param in updates and (updates[param].matrix or updates[param].needs_norm):
            what = "the whole matrix" if updates[param].matrix else "norms of whole parameters"
            raise ModelError(
                f"The optimizer needs {what} of {name}, whose states the plan has on a disk, where each unit is "
                f"updated by itself. Put them on the host (rows: {{optim: {{tier: host}}}}), or take an elementwise "
                f"optimizer such as AdamW."
            )


def check_device(model: nn.Module, world: World) -> torch.device:
    """The model's device, possibly the meta device. Raises `ModelError` for a model that lies on another rank's device,
    or on several."""
    device = check_model(model)
    world.rank_device.check(device, next(name for name, _ in model.named_parameters()))
    return device


def _check_batch_norms(model: nn.Module, designed: Design, device: torch.device) -> None:
    """Raise `ConfigError` for a batch norm that torch cannot compute on this device in the plan's precision.

    On a CPU, torch takes weights in bf16 or fp16 only with statistics in the same dtype; ours stay in fp32, as they
    should.
    """
    for name, module in model.named_modules() if device.type == "cpu" else ():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm) or module.weight is None:
            continue
        compute = designed.rows[module.weight].table.compute
        statistics = module.running_mean
        if compute in ("bf16", "fp16") and statistics is not None and statistics.dtype == torch.float32:
            kind = type(module).__name__
            raise ConfigError(
                f"{name or 'The model'} is a {kind}, whose running statistics are in fp32, and on a CPU torch computes "
                f"none with weights in {compute} beside them. Keep its weights in fp32 with a rule of the plan: "
                f"rules: {{norms: {{classes: [{kind}], precision: fp32}}}}"
            )
