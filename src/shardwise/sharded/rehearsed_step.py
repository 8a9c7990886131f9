"""A live engine's step, rehearsed with this rank's parts: what it holds, and what a clock needs to time it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from shardwise.comm import Line
from shardwise.fit.clock import RankProgram
from shardwise.fit.counted_work import CountedWork
from shardwise.fit.operations import Worked
from shardwise.fit.stage_rehearsal import StageRehearsal
from shardwise.parallel.experts import loaded
from shardwise.parallel.tensor import AXIS
from shardwise.program import END_OF_BACKWARD, Activations, plan_step
from shardwise.runtime.activations import Treatments
from shardwise.runtime.rehearsal import rehearse
from shardwise.sharded.sharded_model import ShardedModel

if TYPE_CHECKING:
    from shardwise.runtime.rehearsal import Loss


@dataclass(frozen=True)
class RehearsedStep:
    """What a rank holds in a step, and, if it was counted, what one micro-batch computes and sends within its layers:
    in a pipeline, in all stages of this rank, forwards in order and then backwards."""

    activations: Activations
    worked: tuple[Worked, ...] = ()

    def program(self, sharded: ShardedModel) -> RankProgram:
        """For a clock. A rank of a pipeline is timed by itself, as if it waited for no other stage."""
        plan, units = sharded.plan, sharded.parts.sharding.units
        trace = tuple(one.moment for one in self.worked if one.moment != END_OF_BACKWARD)
        step = plan_step(tuple(unit.spec for unit in units), trace, prefetch_bytes=plan.prefetch_bytes)
        staged = sharded.parts.sharding.staged
        names = {unit.name: unit.flats[0].slots[0].name for unit in units if unit.trained_grads}
        holders = {} if staged is None else {unit: staged.holders[name] for unit, name in names.items()}
        shared = {unit: places for unit, places in holders.items() if len(places) > 1}
        has_budget = sharded.parts.sharding.budget.device is not None
        return RankProgram(step, self.worked, sharded.world.rank, holders=shared, has_budget=has_budget)


def rehearse_step(
    sharded: ShardedModel,
    batch: object,
    loss: Loss | None,
    expert_load: float,
    treatments: Treatments,
    *,
    counts_work: bool = False,
    as_call: bool = False,
) -> RehearsedStep:
    """A step on `batch` with the given `treatments` of activations; `as_call`: see `StageRehearsal`.

    Under a pipeline all its ranks call; otherwise no other rank is asked. Raises `ModelError` for a model that cannot
    be rehearsed.
    """
    mesh, sharding, sequence = sharded.mesh, sharded.parts.sharding, sharded.parts.sequence
    watch = CountedWork(mesh.named_sizes) if counts_work else None
    compares_batches = watch is not None and AXIS in mesh.axes and sharding.device.type == "cpu"

    @contextmanager
    def around(twin: nn.Module) -> Iterator[None]:
        ledger = None if watch is None else watch.ledger
        with loaded(twin, expert_load), ExitStack() as stack:
            if sequence is not None:
                stack.enter_context(sequence.rehearsed(twin, ledger))
            if compares_batches:  # in each forward
                Line(None, sharded.world.group(mesh, AXIS), ledger).all_same(b"")
            yield

    with sharded.world.journal.unobserved():
        if sharded.parts.pipeline is not None:
            stages = StageRehearsal(
                sharded.parts.pipeline.staged,
                sharding.units,
                batch,
                sharding.device,
                sharded.table.compute,
                loss,
                treatments,
                around,
                watch,
                as_call=as_call,
            )
            return RehearsedStep(stages.activations(sharded.parts.pipeline.exchange), stages.rank.worked)
        activations = rehearse(
            sharded.model,
            sharding.units,
            batch,
            device=sharding.device,
            compute=sharded.table.compute,
            loss=loss,
            around=around,
            treatments=treatments,
            watch=watch,
        )
        return RehearsedStep(activations, () if watch is None else tuple(watch.worked))
