"""How long a step takes on the meshes on which a job goes on with fewer ranks: the same global batch, as the planner
prices it. The mesh with the shortest step has the most tokens per second."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.fit.batch_rows import rows_of, with_rows
from shardwise.fit.clock import RankProgram, time_ranks
from shardwise.fit.equal_blocks import without_values
from shardwise.fit.few_blocks import count_alike
from shardwise.fit.foreseen import rank_units
from shardwise.fit.hardware import Hardware
from shardwise.parallel.conversions import Converted
from shardwise.parallel.outline import SmallerMeshes
from shardwise.plan import Plan
from shardwise.plan.mesh import SEQUENCE_AXIS, Mesh
from shardwise.plan.replica_groups import Smaller
from shardwise.program import Update
from shardwise.runtime.micro_batches import MicroBatch
from shardwise.system.torch_private import tree_map_only
from shardwise.system.units import format_seconds


@dataclass(frozen=True)
class PlainModel:
    """A model as it was before it was split, without values, and how its parameters are updated."""

    model: nn.Module
    updates: Mapping[nn.Parameter, Update] | None
    converted: Converted | None = None
    """Its modules that are converted already; without, they will be."""

    @classmethod
    def of(cls, model: nn.Module, updates: Mapping[nn.Parameter, Update]) -> PlainModel:
        bare = without_values(model)
        params = dict(bare.named_parameters())
        by_name = {name: updates[param] for name, param in model.named_parameters() if param in updates}
        return cls(bare, {params[name]: update for name, update in by_name.items()})

    def seconds(
        self, batch: object, plan: Plan, mesh: Mesh, smaller: SmallerMeshes, hardware: Hardware, *, on_cpu: bool
    ) -> list[float]:
        """Of a step on `every` one of the `smaller` meshes but the first, which is one of a whole group.

        `batch` is a micro-batch of one data rank of `mesh`, whole along `sp`. `hardware` has as many ranks on a node as
        the job has now, of which `Hardware.with_ranks_left` takes those that stay.

        Raises `ModelError` for a model that cannot be rehearsed.
        """
        rows, num_data_ranks = rows_of(batch), mesh.data_place(0)[1]
        found = []
        for axes in smaller.every[1:]:
            size = math.prod(axes.values())
            there = smaller.plan_on(plan.model_copy(update={"mesh": dict(axes)}), size)
            on, parts = Mesh.of(axes, size), axes.get(SEQUENCE_AXIS, 1)
            part = with_rows(batch, rows * num_data_ranks // on.data_place(0)[1], rows, parts)
            programs = self.programs(part, there, on, on_cpu=on_cpu)
            left = hardware.with_ranks_left(min(size, hardware.ranks_per_node))
            found.append(time_ranks(programs, left, on, num_micro_batches=plan.accumulate).step_seconds)
        return found

    def programs(self, part: object, plan: Plan, mesh: Mesh, *, on_cpu: bool) -> list[RankProgram]:
        """Of one rank, or of one of each stage, with what they compute of a micro-batch, of which `part` is one rank's.

        Raises `ModelError` for a model that cannot be rehearsed.
        """
        kinds = rank_units(self.model, plan, mesh, updates=self.updates, on_cpu=on_cpu)
        bare, known = without_values(self.model), self.converted
        counted = count_alike(bare, part, plan, mesh, converted=known, on_cpu=on_cpu)
        return [kind.program(plan, its) for kind, its in zip(kinds, counted, strict=True)]


def joined(batch: object, num_parts: int) -> object:
    """A batch of which `batch` is one of `num_parts` equal parts along `sp`, with the tokens of that part again."""

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat(1, num_parts, *[1] * (tensor.dim() - 2)) if tensor.dim() > 1 else tensor

    if isinstance(batch, MicroBatch):
        args, kwargs = tree_map_only(torch.Tensor, repeated, (batch.args, batch.kwargs))
        return MicroBatch(args, kwargs)
    return tree_map_only(torch.Tensor, repeated, batch)


def in_words(meshes: Smaller, chosen: Smaller, seconds: Sequence[float]) -> str:
    """How long a step takes on each, and which of them were not `chosen`."""
    words = []
    for axes, taken in sorted(zip(meshes, seconds, strict=True), key=lambda one: -math.prod(one[0].values())):
        left_out = "" if axes in chosen else " (left out)"
        words.append(f"{format_seconds(taken)} on {Mesh.of(axes, math.prod(axes.values()))}{left_out}")
    return "; ".join(words)
