"""What a step through stages costs beside its computation, in calls of Python functions, which no load changes."""

from __future__ import annotations

from pipelined import batches
from twins import adamw

import shardwise as sw
from benchmarks.calls import MESSAGES, OWN, calls_during
from shardwise.testing import run_ranks
from tests.models import Decoder

MICRO_BATCHES, MORE_BLOCKS = 4, 2
MOST_FOR_A_BLOCK, MOST_FOR_A_MICRO_BATCH = 64, 211
"""Of these, 22 take in the gradients of a block's eleven parameters. They were 169 and 463 before each event of a unit
that comes next in the program was taken first, 73 and 292 before whole parameters stayed awake for a whole step, and 61
and 293 while contexts and trees were made that hold nothing. What messages take was counted too then, and depends on
how late the other rank is; without it they are 63.5 and 210, each time."""


def test_a_block_and_a_micro_batch_cost_few_calls() -> None:
    [few, many] = [calls_of_a_step(num_blocks, MICRO_BATCHES) for num_blocks in (4, 4 + 2 * MORE_BLOCKS)]
    longer = calls_of_a_step(4, 2 * MICRO_BATCHES)
    for rank in range(2):
        for_a_block = (many[rank] - few[rank]) / (MORE_BLOCKS * MICRO_BATCHES)
        for_a_micro_batch = (longer[rank] - few[rank]) / MICRO_BATCHES - 2 * for_a_block
        assert for_a_block <= MOST_FOR_A_BLOCK
        assert for_a_micro_batch <= MOST_FOR_A_MICRO_BATCH


def calls_of_a_step(num_blocks: int, num_micro_batches: int) -> list[int]:
    """By rank, how many functions of this library a step of two stages calls, once it follows its program."""

    def rank(world: sw.World) -> int:
        model = Decoder(num_blocks=num_blocks)
        plan = {"preset": "ddp", "mesh": {"pp": 2}, "accumulate": num_micro_batches}
        with sw.shard(model, plan, optimizer=adamw(model), world=world) as engine:
            [(x, y)] = batches(1, 2 * num_micro_batches)
            for _ in range(2):
                engine.train_step((x, y))
            return calls_during(lambda: engine.forward_backward((x, y)), within=OWN, but=MESSAGES)

    return run_ranks(2, rank)
