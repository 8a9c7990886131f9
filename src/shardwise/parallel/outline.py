"""What a plan makes of a model on one mesh: how each axis splits it, its units, and how their activations are treated.

Everything is computed and checked before anything is changed, for a model that may be on the meta device: `shard`, the
search for a plan and `explain` refuse the same, with the same words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.errors import ConfigError, ModelError
from shardwise.memory import LabelledTable, UnitChoice, choose_units
from shardwise.parallel.experts import ExpertSplit, check_routers, expert_split
from shardwise.parallel.model_axes import Boxes, boxes_after, boxes_for, rows_for, split_of
from shardwise.plan import Budget, Offload, Plan
from shardwise.plan.mesh import SEQUENCE_AXIS, Mesh
from shardwise.plan.mesh import STAGE_AXIS as STAGES
from shardwise.plan.mesh import TENSOR_AXIS as AXIS
from shardwise.plan.replica_groups import Smaller, axes_of_group, num_groups, split_alike, with_fewer_ranks
from shardwise.runtime import check_backend
from shardwise.runtime.activations import Treatments, treatments_for

if TYPE_CHECKING:
    from shardwise.parallel.pipeline import StageLayout
    from shardwise.parallel.tensor import ModelSplit


@dataclass(frozen=True)
class Outline:
    """`boxes` are one rank's parts of parameters, if an axis cuts or copies them."""

    choices: list[UnitChoice] = field(repr=False)
    rows: dict[nn.Parameter, LabelledTable] = field(repr=False)
    boxes: Boxes = field(repr=False)
    split: ModelSplit | None = field(repr=False, default=None)
    """How the model itself is split along `tp`."""
    experts: ExpertSplit | None = field(repr=False, default=None)
    stages: StageLayout | None = None
    treatments: Treatments = field(default_factory=Treatments)


def outline(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    rank: int,
    *,
    parts: Boxes | None = None,
    had: ExpertSplit | None = None,
    stages: StageLayout | None = None,
    like: Outline | None = None,
) -> Outline:
    """For `rank` of `mesh`. A model that is already sharded comes with its `parts`, and how its experts are split.

    `stages` are those of a pipeline, and `like` is the outline for another preset, other stages or other ranks that
    read different samples, if they are known: nothing else may differ.

    Raises `ConfigError` or `ModelError` if the plan is impossible for this model.
    """
    experts = expert_split(model, plan, mesh, rank, had) if like is None else like.experts
    rows = rows_for(model, plan, mesh, experts, parts)
    tables = [table.on(mesh) for table in {row.table for row in rows.values()}]
    if SEQUENCE_AXIS in mesh.axes and mesh.size(SEQUENCE_AXIS) > 1:
        from shardwise.parallel.sequence import check_model  # only plans with that axis load it

        check_model(model, plan)
    check_backend(plan.compile, stays_whole=all(table.stays_whole for table in tables))
    split = split_of(model, plan, mesh, rank, experts) if parts is None and like is None else None
    if like is not None:
        split, boxes = like.split, like.boxes
    elif parts is None:
        boxes = boxes_for(model, mesh, rank, split, experts)
    else:
        boxes = boxes_after(model, mesh, rank, parts, had, experts)
    if plan.paths == "by_rank" and mesh.has_stages:
        raise ConfigError(
            f"paths is by_rank, but along {STAGES} ranks also wait for what other stages send, so all call the same "
            f"modules. Leave paths out of the plan, or {STAGES} out of the mesh."
        )
    if mesh.has_stages and stages is None:
        from shardwise.parallel.pipeline import stage_layout  # only plans with a pipeline load it

        stages = stage_layout(model, plan, mesh)
    if like is None or (like.stages is None) != (stages is None):
        check_routers(model, in_stages=stages is not None, is_compiled=plan.compile is not None)
    choices = choose_units(model, plan, parts) if like is None else like.choices
    if mesh.island_axes or plan.says_islands:
        from shardwise.plan.placement.islands import check_islands  # only plans with islands load it

        check_islands(plan, mesh, sum(any(one.requires_grad for one in unit.params.values()) for unit in choices))
        if stages is not None and plan.islands.fragments > 1:
            _check_fragments_of_stages(model, plan, stages)
    treatments = treatments_for(model, choices, plan) if like is None else like.treatments
    if stages is not None:
        treatments.check_stages(model, stages.pieces)
    return Outline(choices, rows, boxes, split, experts, stages, treatments)


def _check_fragments_of_stages(model: nn.Module, plan: Plan, stages: StageLayout) -> None:
    """Raise `ConfigError` for a trained parameter of several stages, each of which deals out its own units."""
    from shardwise.parallel.pipeline import holders_of  # only plans with a pipeline load it

    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    shared = [name for name, ranks in holders_of(model, stages).items() if len(ranks) > 1 and name in trained]
    if shared:
        raise ConfigError(
            f"islands.fragments is {plan.islands.fragments}, and stages share {shared[0]}. Each stage deals out its "
            f"own units, so the outer step of what they share would come at another time in each. Leave fragments out, "
            f"or do not tie it."
        )


Fit = Callable[[Plan, Mesh], Plan]
"""A plan for a mesh as its ranks have room for it. Raises `ConfigError` if they have none."""


@dataclass(frozen=True)
class OffDevice:
    """What a plan keeps off the device, and in which folder if some of it is on a disk."""

    offload: Offload
    disk: str | None


@dataclass(frozen=True)
class SmallerMeshes:
    """The meshes on which a job of one model and plan goes on when no replica group is whole, and what fewer ranks keep
    off their devices, in whole groups (`fit/fewer_groups.py`) or on these."""

    meshes: Smaller = ()
    why_none: str = ""
    """Why there is none, in words that follow a colon; empty where that is plain from the plan."""
    off_device: Mapping[int, OffDevice] = field(default_factory=dict)
    """By the number of ranks, of those with fewer than the job begins with, if the plan has a budget: each of them
    holds more of the model, and so has to keep more off its device."""
    least: int = 0
    """The fewest ranks that keep to the plan's budget, if not all fewer ones do: the job needs as many."""
    others: Smaller = ()
    """Those with as many ranks as one of `meshes`, on which a step may be shorter. None where the plan has a budget."""
    is_settled: bool = False
    """Whether all ranks know which of them are taken, and in which order."""

    @property
    def every(self) -> Smaller:
        return (*self.meshes, *self.others)

    @property
    def is_open(self) -> bool:
        """Whether ranks have to agree on which of them are taken: the first is of one whole group."""
        return len(self.every) > 2 and not self.is_settled

    def settled(self, meshes: Smaller) -> SmallerMeshes:
        """With these, one for each number of ranks, and no others; if there are none, with those of `meshes`."""
        return replace(self, meshes=tuple(meshes or self.meshes), others=(), is_settled=True)

    def after(self, axes: Mapping[str, int]) -> SmallerMeshes:
        """For another plan of a live model, whose mesh has these `axes`. Its layers are split as before, so that those
        that could be over fewer ranks still can; and what so many ranks share along `sp` and `ep`, fewer can, too."""
        of_group = axes_of_group(axes)
        alone = {axis: axes[axis] if axis in of_group else 1 for axis in axes}
        group, *fewer = (with_fewer_ranks(Mesh.of(alone, math.prod(alone.values()))) if axes else []) or [{}]
        if not fewer:
            return replace(self, meshes=(), others=())
        known = [_layers_in(one) for one in (group, *self.every)]
        found, others = [group], list[Mapping[str, int]]()
        for one in fewer:
            if _layers_in(one) in known:
                is_other = any(math.prod(one.values()) == math.prod(other.values()) for other in found)
                (others if is_other else found).append(one)
        renewed = replace(self, meshes=tuple(found), others=tuple(others))
        return renewed.settled(split_alike(renewed.every, self.meshes)) if self.is_settled else renewed

    def plan_on(self, plan: Plan, num_ranks: int) -> Plan:
        """`plan`, of whichever mesh, with what `num_ranks` keep off their devices if that is one of these."""
        there = self.off_device.get(num_ranks)
        return plan if there is None else plan.model_copy(update={"offload": there.offload, "disk": there.disk})

    def of_smaller_meshes(self) -> SmallerMeshes:
        """The same without what was found for whole groups."""
        sizes = {math.prod(axes.values()) for axes in self.meshes[1:]}
        kept = {size: there for size, there in self.off_device.items() if size in sizes}
        return replace(self, off_device=kept, least=0)

    def told(self) -> dict[str, Any]:
        """All of it for a rank that joins, as JSON has it."""
        off_device = [[size, one.offload.model_dump(), one.disk] for size, one in self.off_device.items()]
        meshes, others = list(map(dict, self.meshes)), list(map(dict, self.others))
        numbers = {"least": self.least, "is_settled": self.is_settled}
        return {"meshes": meshes, "others": others, "off_device": off_device, **numbers}

    @classmethod
    def heard(cls, told: Mapping[str, Any]) -> SmallerMeshes:
        off_device = {size: OffDevice(Offload(**offload), disk) for size, offload, disk in told["off_device"]}
        meshes, others = tuple(told["meshes"]), tuple(told["others"])
        return cls(meshes, "", off_device, told["least"], others, told["is_settled"])


def _layers_in(axes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the axes along which layers are divided."""
    return {axis: axes[axis] for axis in (AXIS, STAGES) if axes.get(axis, 1) > 1}


def smaller_meshes(model: nn.Module, plan: Plan, mesh: Mesh, fit: Fit) -> SmallerMeshes:
    """For a plain `model`: those with fewer ranks along the axes of a replica group, as far as it can be split so, and
    there is room for it by `fit`. `plan` still has its budget: then of those with as many ranks the first alone."""
    of_group, *fewer = with_fewer_ranks(mesh) or [{}]
    if not fewer:
        return SmallerMeshes()
    found, others, whys, off_device = [of_group], list[dict[str, int]](), list[str](), dict[int, OffDevice]()
    for axes_of in fewer:
        on = Mesh.of(axes_of, math.prod(axes_of.values()))
        is_other = any(on.world_size == math.prod(one.values()) for one in found)
        if is_other and plan.budget != Budget():
            continue
        try:
            there = fit(plan.model_copy(update={"mesh": axes_of}), on)
            outline(model, there, on, 0)
        except (ConfigError, ModelError) as error:
            whys.append(f"on {on}: {str(error).removesuffix('.')}")
        else:
            (others if is_other else found).append(axes_of)
            if plan.budget != Budget():
                off_device[on.world_size] = OffDevice(there.offload, there.disk)
    if len(found) == 1 and num_groups(mesh) == 1:
        return SmallerMeshes((), whys[0])
    return SmallerMeshes(tuple(found), "", off_device, others=tuple(others))


def kept_buffers(model: nn.Module) -> list[str]:
    """The names of the buffers of `model` that checkpoints have."""
    names = [name for name, _ in model.named_buffers()]
    kept = model.state_dict(keep_vars=True).keys() if names else ()
    return [name for name in names if name in kept]
