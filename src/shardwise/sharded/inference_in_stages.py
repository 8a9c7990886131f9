"""`engine.inference()` for a model in pipeline stages, whose ranks make the same calls, and between them draw the same
random numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torch import nn

from shardwise.parallel.pipeline import AXIS, Pipeline
from shardwise.parallel.pipeline.call_agreement import CallAgreement
from shardwise.parallel.pipeline.inference_calls import Calls
from shardwise.parallel.tensor import AXIS as TENSOR_AXIS
from shardwise.parallel.tensor import Generators, draws
from shardwise.parallel.tensor.forwards import whole_sequences
from shardwise.runtime import keeps_all
from shardwise.sharded.inference_checks import paged_caches_refused, require_same_budget
from shardwise.sharded.sharded_model import ShardedModel


class _Agreed(NamedTuple):
    draws: bool
    """Whether forwards in training mode draw random numbers, in any part of the model."""
    gathers: bool
    """Whether any rank gathers parameters in calls, because it does not keep all of its stages."""


@contextmanager
def inference_in_stages(sharded: ShardedModel, pipeline: Pipeline, keep_bytes: int | None) -> Iterator[None]:
    """See `Engine.inference`. All ranks of the world enter and leave."""
    world, mesh, staged = sharded.world, sharded.mesh, pipeline.staged
    same_stages = _ranks_by_place(sharded)[pipeline.pp_rank]
    agreed = _agree(sharded, keep_bytes)
    numbers = _same_numbers(sharded, staged.wholes, draws_in_forwards=agreed.draws)
    whole = whole_sequences(staged.own_modules())  # none of them is in the model unless its stage runs
    agreement = CallAgreement(pipeline.line, staged.wholes)
    if agreed.gathers:
        pipelines = sorted({mesh.group(rank, AXIS) for rank in range(world.size)})
        agreement = CallAgreement(pipeline.line, staged.wholes, pipelines, partial(world.exchange, subject="calls"))
    device = sharded.parts.sharding.device
    with sharded.inference(keep_bytes, world.line("stages", same_stages)) as inference, numbers:
        calls = Calls(pipeline, world.collectives(device), device, inference, agreement)
        refused = paged_caches_refused(sharded.model, AXIS)
        with whole, staged.receiving_whole_sequences(), refused, calls.answered():
            yield


def _ranks_by_place(sharded: ShardedModel) -> dict[int, list[int]]:
    """By pipeline rank, the ranks with the same stages."""
    found: dict[int, list[int]] = {}
    for rank in range(sharded.world.size):
        found.setdefault(sharded.mesh.coordinate(rank)[AXIS], []).append(rank)
    return found


def _agree(sharded: ShardedModel, keep_bytes: int | None) -> _Agreed:
    """Raise `StateError` on all ranks unless those with the same stages keep the same of them."""
    gathers = not keeps_all(sharded.parts.runner.units, keep_bytes)
    mine = json.dumps([gathers, keep_bytes, draws(sharded.model)]).encode()
    told = [json.loads(one) for one in sharded.world.exchange(mine, "inference")]
    agreed = _Agreed(draws=any(one[2] for one in told), gathers=any(one[0] for one in told))
    if agreed.gathers:
        for ranks in _ranks_by_place(sharded).values():
            require_same_budget({rank: told[rank][1] for rank in ranks}, have="have the same stages and ")
    return agreed


@contextmanager
def _same_numbers(sharded: ShardedModel, wholes: Sequence[nn.Module], *, draws_in_forwards: bool) -> Iterator[None]:
    """A context in which ranks that share a sample draw the same numbers, those of the first, so that they sample the
    same tokens. Forwards of `wholes` in training mode draw others, because stages differ in how many they draw.

    Afterwards the first rank's generators go on, and others' are as before.
    """
    world, mesh, model = sharded.world, sharded.mesh, sharded.model
    stages = world.group(mesh, AXIS)
    generators = Generators(world.rank_device, stages.index)
    before = generators.states()
    for axis in (TENSOR_AXIS, AXIS):
        if axis in mesh.axes and mesh.size(axis) > 1:
            generators.synchronize(world, world.group(mesh, axis))

    depth = 0  # of modules with all stages, one in another

    def enter(*_: object) -> None:
        nonlocal depth
        depth += 1
        if depth == 1 and draws_in_forwards and model.training:
            generators.use_own()

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1
        if not depth:
            generators.use_common()

    handles = [
        handle
        for whole in wholes
        for handle in (
            whole.register_forward_pre_hook(enter, prepend=True),
            whole.register_forward_hook(leave, always_call=True),
        )
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if stages.index:
            generators.restore(before)
