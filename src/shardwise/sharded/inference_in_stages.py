"""`engine.inference()` for a model in pipeline stages, whose ranks make the same calls, and between them draw the same
random numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from shardwise.parallel.pipeline import AXIS, Pipeline
from shardwise.parallel.pipeline.call_agreement import CallAgreement
from shardwise.parallel.pipeline.inference_calls import Calls
from shardwise.parallel.tensor import AXIS as TENSOR_AXIS
from shardwise.parallel.tensor import Generators
from shardwise.parallel.tensor.forwards import whole_sequences
from shardwise.runtime import keeps_all
from shardwise.sharded.inference_checks import paged_caches_refused, require_same_budget
from shardwise.sharded.sharded_model import ShardedModel


@contextmanager
def inference_in_stages(sharded: ShardedModel, pipeline: Pipeline, keep_bytes: int | None) -> Iterator[None]:
    """See `Engine.inference`. All ranks of the world enter and leave."""
    world, mesh, staged = sharded.world, sharded.mesh, pipeline.staged
    same_stages = _ranks_by_place(sharded)[pipeline.pp_rank]
    gathers = _any_gathers(sharded, keep_bytes)
    whole = whole_sequences(staged.own_modules())  # none of them is in the model unless its stage runs
    called = staged.names_of_called()
    agreement = CallAgreement(pipeline.line, called)
    if gathers:
        pipelines = sorted({mesh.group(rank, AXIS) for rank in range(world.size)})
        agreement = CallAgreement(pipeline.line, called, pipelines, partial(world.exchange, subject="calls"))
    device = sharded.parts.sharding.device
    with sharded.inference(keep_bytes, world.line("stages", same_stages)) as inference, _same_numbers(sharded):
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


def _any_gathers(sharded: ShardedModel, keep_bytes: int | None) -> bool:
    """Whether any rank gathers parameters in calls, because it does not keep all of its stages. Raises `StateError` on
    all ranks unless those with the same stages keep the same of them."""
    mine = json.dumps([not keeps_all(sharded.parts.runner.units, keep_bytes), keep_bytes]).encode()
    told = [json.loads(one) for one in sharded.world.exchange(mine, "inference")]
    gathers = any(one[0] for one in told)
    if gathers:
        for ranks in _ranks_by_place(sharded).values():
            require_same_budget({rank: told[rank][1] for rank in ranks}, have="have the same stages and ")
    return gathers


@contextmanager
def _same_numbers(sharded: ShardedModel) -> Iterator[None]:
    """A context in which ranks that share a sample draw the same numbers, those of the first, so that they sample the
    same tokens.

    Afterwards ranks go on with these numbers, but for those that drew others before, which get them back.
    """
    world, mesh = sharded.world, sharded.mesh
    stages = world.group(mesh, AXIS)
    generators = Generators(world.rank_device, stages.index)
    before = generators.states()
    for axis in (TENSOR_AXIS, AXIS):
        if axis in mesh.axes and mesh.size(axis) > 1:
            generators.synchronize(world, world.group(mesh, axis))
    drew_others = any(not torch.equal(*pair) for pair in zip(before, generators.states(), strict=True))
    try:
        yield
    finally:
        if stages.index and drew_others:
            generators.restore(before)
