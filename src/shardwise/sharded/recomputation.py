"""Verifies the gradients of each rank: another one computes the same micro-batch, and must get the same bits.

[Note: recomputed elsewhere] Wrong results of a rank's own forward and backward go into the sum of all gradients, and
are in no copy that could tell. So every so many steps (`verify: {gradients: 1000}`), before the step itself, all ranks
compute the gradients of their first micro-batch, and then those of the rank before them. Nothing is reduced: checksums
of a unit's gradients are taken where its backward ends, and the gradients are dropped. If the two results for a
micro-batch differ, a third rank computes it (of two ranks, the first one again), and the majority is right.

Both must draw the same random numbers, so these passes have a seed of their own, and generators and buffers are
restored after them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch

from shardwise.comm import World
from shardwise.errors import StateError
from shardwise.memory import Flat, Unit
from shardwise.memory.tensor_checksum import checksum
from shardwise.runtime.corruption import GRADIENT, Report, Where, judge
from shardwise.runtime.micro_batches import LossFunction, MicroBatch
from shardwise.runtime.verification import corruption_error
from shardwise.sharded.sharded_model import ShardedModel

Tensor = torch.Tensor
Sums = dict[Where, int]
_SUBJECT = "batches"


def verify_gradients(sharded: ShardedModel, first: MicroBatch, loss_fn: LossFunction | None) -> None:
    """All ranks, of which there are several, call before the forward of a step. Raises `CorruptionError` on all."""
    world, step = sharded.world, sharded.progress.num_steps + 1
    mine = _packed(first)
    lengths = _lengths(world, mine)
    if not all(lengths):
        raise StateError(
            f"verify.gradients: the batch of rank {lengths.index(0)} cannot be sent to another rank. It may have "
            "tensors, numbers and text, in lists and mappings; leave verify.gradients out for others."
        )
    own = _sums(sharded, first, loss_fn, world.rank, step)
    before, batch = _shifted(sharded, mine, lengths, 1)
    theirs = _sums(sharded, batch, loss_fn, before, step)
    told = world.exchange(_hash(own) + _hash(theirs), _SUBJECT)
    num = len(_hash(own))
    if all(told[rank][:num] == told[(rank + 1) % world.size][num:] for rank in range(world.size)):
        return
    sums = {(_part(world.rank), where): value for where, value in own.items()}
    sums |= {(_part(before), where): value for where, value in theirs.items()}
    third, batch = _shifted(sharded, mine, lengths, 2) if world.size > 2 else (world.rank, first)
    again = _sums(sharded, batch, loss_fn, third, step)
    changed = frozenset(where for where, value in again.items() if third == world.rank and own.get(where) != value)
    if third != world.rank:
        sums |= {(_part(third), where): value for where, value in again.items()}
    reports = world.exchange(json.dumps(Report(sums, changed).to_json()).encode(), _SUBJECT)
    findings = judge([Report.from_json(json.loads(message)) for message in reports])
    if findings:
        units = {flat.name: unit.name for unit in sharded.parts.sharding.units for flat in unit.flats}
        raise corruption_error(findings, units, step, None)


def _sums(sharded: ShardedModel, part: MicroBatch, loss_fn: LossFunction | None, of: int, step: int) -> Sums:
    """The checksums of the gradients of a micro-batch of rank `of`; nothing is left of them."""
    sums: Sums = {}
    runner = sharded.parts.runner

    def take(unit: Unit) -> None:
        for flat in unit.flats:
            _take(flat, sums)

    with _undisturbed(sharded, seed=step * sharded.world.size + of), runner.probing(take):
        loss = part.loss(sharded.model(*part.args, **part.kwargs), loss_fn)
        sharded.backward(loss, part.weight)
    return sums


def _take(flat: Flat, sums: Sums) -> None:
    for slot, gradient in flat.grads.fresh_gradients():
        where = Where(flat.name, GRADIENT, slot.name)
        sums[where] = (sums.get(where, 0) + int(checksum(gradient))) % 2**63
    flat.grads.drop()


@contextmanager
def _undisturbed(sharded: ShardedModel, seed: int) -> Iterator[None]:
    """Inside, a pass leaves no trace in buffers and random number generators."""
    buffers = [(buffer, buffer.clone()) for buffer in sharded.model.buffers()]
    device = sharded.parts.sharding.device
    accelerated = device.type != "cpu"
    try:
        with torch.random.fork_rng([device] if accelerated else [], device_type=device.type if accelerated else "cuda"):
            torch.manual_seed(seed)
            yield
    finally:
        for buffer, values in buffers:
            buffer.copy_(values)


# -- batches as messages ----------------------------------------------------------------------------------


def _packed(part: MicroBatch) -> Tensor:
    """A micro-batch as bytes; none if it has what cannot be sent."""
    stream = io.BytesIO()
    try:
        torch.save((part.args, part.kwargs, part.target, part.has_target, part.weight), stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception:  # objects of any class raise anything
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def _lengths(world: World, mine: Tensor) -> list[int]:
    return [int(message) for message in world.exchange(str(len(mine)).encode(), _SUBJECT)]


def _shifted(sharded: ShardedModel, mine: Tensor, lengths: list[int], by: int) -> tuple[int, MicroBatch]:
    """The micro-batch of the rank that is `by` before this one, and its number."""
    world = sharded.world
    source, target = (world.rank - by) % world.size, (world.rank + by) % world.size
    none = mine[:0]
    sent = [mine if rank == target else none for rank in range(world.size)]
    arrived = [
        torch.empty(lengths[source], dtype=torch.uint8, device="cpu") if rank == source else none
        for rank in range(world.size)
    ]
    world.collectives(torch.device("cpu")).all_to_all(arrived, sent, world.everybody, _SUBJECT).wait()
    stream = io.BytesIO(arrived[source].numpy().tobytes())
    args, kwargs, goal, has_target, weight = torch.load(
        stream, weights_only=True, map_location=sharded.parts.sharding.device
    )
    return source, MicroBatch(args, kwargs, goal, has_target, weight)


def _part(rank: int) -> str:
    return f"micro-batch of rank {rank}"


def _hash(sums: Sums) -> bytes:
    return blake2b(repr(sorted(sums.items(), key=str)).encode(), digest_size=16).digest()
