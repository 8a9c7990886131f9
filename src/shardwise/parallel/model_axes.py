"""How the model axes `tp` and `ep` split a model: each rank's part of every parameter, and the changes to its modules.

`parallel/tensor/` and `parallel/experts/` implement this independently of each other; here a plan and a mesh determine
which of them apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.comm import BatchCheck, Line, World
from shardwise.errors import ConfigError, ModelError
from shardwise.memory import LabelledTable, tables_for
from shardwise.parallel.experts import AXIS as EXPERTS
from shardwise.parallel.experts import ExpertSplit, RankTotal, share_totals
from shardwise.plan import Plan
from shardwise.plan.mesh import STAGE_AXIS as STAGES
from shardwise.plan.mesh import TENSOR_AXIS as AXIS
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Box
from shardwise.runtime import named_tensors
from shardwise.system.own_hooks import hook

if TYPE_CHECKING:
    from shardwise.parallel.pipeline import StageLayout
    from shardwise.parallel.tensor import Generators, ModelSplit, Regions

Boxes = Mapping[nn.Parameter, Box]


def boxes_for(model: nn.Module, mesh: Mesh, rank: int, split: ModelSplit | None, experts: ExpertSplit | None) -> Boxes:
    """The boxes of `rank` for the parameters of `model`; empty if no axis splits or replicates any."""
    size, number, own_experts = _own_experts(mesh, rank, experts)
    if not mesh.same_params_axes:
        return own_experts
    split_boxes = split.boxes if split is not None else {}
    for param in own_experts:
        if param in split_boxes:
            name = next(name for name, one in model.named_parameters() if one is param)
            raise ModelError(
                f"tensor.plan splits {name}, of which the ranks along {EXPERTS} have whole experts. Leave it out of "
                f"tensor.plan, or {EXPERTS} out of the mesh."
            )
    whole = {param: Box.whole(param.shape, size, number) for param in model.parameters()}
    return {**whole, **split_boxes, **own_experts}


def boxes_after(
    model: nn.Module, mesh: Mesh, rank: int, known: Boxes, had: ExpertSplit | None, experts: ExpertSplit | None
) -> Boxes:
    """The boxes of `rank` after a live model is resharded: experts may be split anew (`had` is their current split),
    while parts along `tp` stay as in `known`."""
    size, number, own_experts = _own_experts(mesh, rank, experts)
    whole_shapes = {} if had is None else had.whole_shapes
    for name, param in model.named_parameters():
        if param in own_experts and param not in whole_shapes and param in known and known[param].is_split:
            raise ModelError(
                f"{name} is split along {AXIS}, and along {EXPERTS} ranks have whole experts. Save a checkpoint, and "
                f"resume it with a plan whose tensor.plan leaves {name} out."
            )
    whole = {  # a former part keeps its shape until it is laid out, so its box is computed from the whole shape
        param: Box.whole(whole_shapes.get(param, tuple(param.shape)), size, number)
        for param in (model.parameters() if had is not None else ())
    }
    kept = {param: box for param, box in known.items() if param not in whole_shapes}
    return {**whole, **kept, **own_experts}


def _own_experts(mesh: Mesh, rank: int, experts: ExpertSplit | None) -> tuple[int, int, Boxes]:
    """How many ranks list the same parameters as `rank`, its place among them, and the boxes of its experts."""
    alike = mesh.among(rank, mesh.same_params_axes)
    number = alike.index(rank)
    return len(alike), number, experts.boxes(len(alike), number) if experts is not None else {}


def rows_for(
    model: nn.Module, plan: Plan, mesh: Mesh, experts: ExpertSplit | None, known: Boxes | None = None
) -> dict[nn.Parameter, LabelledTable]:
    """The table of every parameter: those of experts are sharded along all axes but `ep`. `known` are the boxes of a
    model that is already split."""
    rows = tables_for(model, plan, mesh, known)
    for param in experts.params if experts is not None else ():
        row = rows[param]
        label = f"{row.label}-{EXPERTS}" if row.label else EXPERTS
        rows[param] = LabelledTable(label, row.table.without(EXPERTS))
    return rows


def split_of(
    model: nn.Module, plan: Plan, mesh: Mesh, rank: int, experts: ExpertSplit | None = None
) -> ModelSplit | None:
    """How tensor parallelism splits `model` for `rank`; `None` if the mesh has no such axis, or one rank along it."""
    if AXIS not in mesh.model_axes:
        return None
    if plan.compile is not None:
        raise ConfigError(f"compile needs units whose modules do not communicate. Leave it out of a plan with {AXIS}.")
    if plan.tensor.verify and mesh.has_stages:
        raise ConfigError(
            f"tensor.verify compares the whole model, and along {STAGES} a rank has only a stage of it. Check the "
            f"model once with {STAGES} left out of the mesh, then train without tensor.verify."
        )
    from shardwise.parallel.tensor import split_for  # here and below: only plans with that axis load it

    excluded = [found.path for found in experts.modules] if experts is not None else []
    return split_for(model, plan, mesh.coordinate(rank)[AXIS], mesh.size(AXIS), excluded)


def sequence_parts(split: ModelSplit | None, mesh: Mesh, stages: StageLayout) -> dict[int, int]:
    """By pipeline stage, into how many parts the sequence that it receives is split. The first blocks of
    such stages are prepared for it."""
    firsts = [names[0] for names in stages.stages]
    if split is None:
        return {}
    from shardwise.parallel.tensor import begin_stages

    begin_stages(split, firsts)
    return {stage: mesh.size(AXIS) for stage, name in enumerate(firsts) if split.receives_part(name)}


def carry_out_split(model: nn.Module, split: ModelSplit, mesh: Mesh, world: World, device: torch.device) -> None:
    """Change the model in place. Its parameters are already parts. All ranks must call."""
    from shardwise.parallel.tensor import Regions

    group = world.group(mesh, AXIS)
    line = Line(world.collectives(device), group)
    regions = Regions(line, synchronize_generators(model, mesh, world))
    split.carry_out(line, regions)
    handles = (
        model.register_forward_pre_hook(hook(_begin, regions)),
        model.register_forward_hook(hook(_end, regions)),
        model.register_forward_pre_hook(hook(_CheckBatch(BatchCheck(line, device))), with_kwargs=True),
    )
    for handle in handles:
        split.on_undo(handle.remove)


def _begin(regions: Regions, *_: object) -> None:
    regions.reset()


def _end(regions: Regions, *_: object) -> None:
    regions.end()


def carry_out_experts(
    model: nn.Module, experts: ExpertSplit | None, mesh: Mesh, world: World, device: torch.device
) -> None:
    """Dispatch tokens to the ranks that have their experts, and let routers balance over the tokens of all ranks."""
    collectives = world.collectives(device)
    if experts is not None:
        experts.carry_out(Line(collectives, world.group(mesh, EXPERTS)))
    axes = [axis for axis in mesh.replica_axes if mesh.size(axis) > 1]
    share_totals(model, RankTotal([Line(collectives, world.group(mesh, axis)) for axis in axes]))


def synchronize_generators(model: nn.Module, mesh: Mesh, world: World) -> Generators | None:
    """Make ranks that share a sample draw the same numbers from now on, if the model draws any. All ranks must call."""
    if AXIS not in mesh.model_axes:
        return None
    from shardwise.parallel.tensor import Generators, draws

    if not draws(model):
        return None
    group = world.group(mesh, AXIS)
    generators = Generators(world.rank_device, group.index)
    generators.synchronize(world, group)
    return generators


class _CheckBatch:
    """A forward pre-hook that compares the batches of the ranks of a line: all that the first call is given, and of
    later ones in training what is given as it is. Caches, which objects and nested tuples have, differ between ranks.
    """

    def __init__(self, check: BatchCheck) -> None:
        self._check = check

    def __call__(self, model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        if self._check.is_silent:
            return
        if self._check.is_first:
            self._check.see(named_tensors(args, kwargs))
        elif model.training and torch.is_grad_enabled():
            given = {**{f"argument {number}": value for number, value in enumerate(args)}, **kwargs}
            self._check.see({name: value for name, value in given.items() if isinstance(value, torch.Tensor)})
