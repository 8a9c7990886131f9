"""Which smaller mesh a job goes on with when no replica group is whole: that with the most tokens per second.

[Note: chosen beforehand] Nobody is to wait for a choice when a rank is lost, and all must make the same. So rank 0
rehearses the batch of its first forward on each mesh that the model can have (`parallel/outline.py`), before any step:
of those of as many ranks the fastest is taken, such as `{pp: 2, tp: 1}` or `{pp: 1, tp: 2}`, and none that is slower
than one with fewer ranks. Where nobody chooses, the largest is taken, and the first of as many ranks: where the
hardware is not known (neither `shardwise calibrate` nor a profile of the device), or the model cannot be rehearsed.
With a single smaller mesh there is nothing to choose.

[Note: agreed before it is used] The launcher decides how many ranks go on, and which; the ranks know the mesh of that
number. So both have to know of a choice, whoever is lost. Rank 0 tells the others in the first commit, before the
message that ends the step; when a rank has heard the end of it, all have heard of the choice, and only then does it
count, and each tells the launcher. If ranks regroup before that, they report what they have heard: then it counts if
one of those that are left knows of it, and otherwise nobody alive does, nor the launcher.
"""

from __future__ import annotations

import logging
import time

import torch

from shardwise.fit.hardware_here import described_hardware, with_ranks_of
from shardwise.fit.smaller_meshes import PlainModel, in_words, joined
from shardwise.plan.mesh import SEQUENCE_AXIS
from shardwise.plan.replica_groups import Smaller, fastest, fastest_of_each_size, in_order
from shardwise.runtime.micro_batches import MicroBatch
from shardwise.sharded.sharded_model import ShardedModel

_log = logging.getLogger("shardwise")


def choose_meshes(sharded: ShardedModel, plain: PlainModel, called: MicroBatch) -> Smaller:
    """Of the job's smaller meshes one for each number of ranks, in the order in which they are taken, by what a step
    would take of which this rank's first micro-batch is `called`. None if that is not known."""
    mesh, sharding, sequence = sharded.mesh, sharded.parts.sharding, sharded.parts.sequence
    world, smaller, hardware = sharded.world, sharding.smaller, described_hardware(sharded.world)
    if hardware is None or len(smaller.every) < 3:  # the first is of one whole group
        return ()
    hardware = with_ranks_of(hardware, world)
    is_part = sequence is not None and not sequence.splits(called.args, called.kwargs)
    begun, on_cpu = time.perf_counter(), sharding.device.type == "cpu"
    try:
        batch = joined(called, mesh.size(SEQUENCE_AXIS)) if is_part else called
        with torch.random.fork_rng([]), world.journal.unobserved():
            every = plain.seconds(batch, sharded.plan, mesh, smaller, hardware, on_cpu=on_cpu)
    except Exception as error:  # never into a loop that would train without it
        _log.info("If no replica group is whole, the others take the largest mesh: no step is foreseen: %s", error)
        return ()
    meshes, seconds = fastest_of_each_size(smaller.every, every)
    found = fastest(meshes, seconds)
    _log.info(
        "If no replica group is whole, a step is foreseen to take %s. That was counted in %.1f s.",
        in_words(smaller.every[1:], found, every),
        time.perf_counter() - begun,
    )
    return in_order(meshes, found)
