"""`engine.inference()` for a model in pipeline stages, whose ranks make the same calls, and between them draw the same
random numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from shardwise.errors import StateError
from shardwise.pipeline import AXIS, Pipeline
from shardwise.pipeline.calls import Calls
from shardwise.runtime import bytes_left_out
from shardwise.sharded_model import ShardedModel
from shardwise.tensor import AXIS as TENSOR_AXIS
from shardwise.tensor import Generators, draws
from shardwise.tensor.forwards import whole_sequences
from shardwise.units import format_bytes


@contextmanager
def inference_in_stages(sharded: ShardedModel, pipeline: Pipeline, keep_bytes: int | None) -> Iterator[None]:
    """See `Engine.inference`. All ranks of the world enter and leave."""
    draws_in_forwards = _agree(sharded, keep_bytes)
    device = sharded.sharding.device
    calls = Calls(pipeline, sharded.world.collectives(device), device)
    staged = pipeline.staged
    numbers = _same_numbers(sharded, staged.wholes, draws_in_forwards=draws_in_forwards)
    whole = whole_sequences(staged.own_modules())  # none of them is in the model unless its stage runs
    with sharded.inference(keep_bytes), numbers, calls.answered(), whole, staged.receiving_whole_sequences():
        yield


def _agree(sharded: ShardedModel, keep_bytes: int | None) -> bool:
    """Raise `StateError` on all ranks unless each keeps the whole of its stages; whether any part of the model draws
    random numbers in training."""
    left, needed = bytes_left_out(sharded.runner.units, keep_bytes)
    mine = json.dumps([left, needed, draws(sharded.model)]).encode()
    told = [json.loads(one) for one in sharded.world.exchange(mine, "inference")]
    if any(one[0] for one in told):
        rank = max(range(len(told)), key=lambda one: told[one][1])
        raise StateError(
            f"In a pipeline engine.inference() keeps the parameters of a rank's stages whole, wherever they rest, and "
            f"those of rank {rank} take {format_bytes(told[rank][1])}. Give it keep_bytes={told[rank][1]} or more."
        )
    return any(one[2] for one in told)


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
