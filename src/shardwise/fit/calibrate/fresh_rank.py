"""One of the ranks that are started to measure what a block of memory costs where its pages are new each time."""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from shardwise.comm import World
from shardwise.fit.calibrate.speed_rank import Measuring
from shardwise.system.devices import RankDevice

BLOCKS = tuple(sixteenths << 16 for sixteenths in (256, 144, 96, 64, 48, 32, 24, 16, 15, 8, 4))
"""Bytes of a block: costs jump where malloc begins to map blocks (1 MB), and pages become large (2 MiB). The largest
are first, because smaller ones leave room in the heap from which larger ones would be served."""
TOGETHER = 2**26
"""Bytes that are allocated before any are returned, as in a forward: what has just been returned is still in caches."""


def fresh_blocks(measuring: Measuring) -> Iterator[tuple[int, float]]:
    """(bytes, seconds) to allocate a block, write to each of its pages and return it, beyond writing to them again."""
    for num_bytes in BLOCKS:
        count = TOGETHER // num_bytes

        def blocks(num_bytes: int = num_bytes, count: int = count) -> list[torch.Tensor]:
            return _touch([torch.empty(num_bytes, dtype=torch.uint8, device="cpu") for _ in range(count)])

        room, kept = blocks(), blocks()
        del room  # below what is kept, so that the heap does not shrink whenever these blocks are returned
        again = measuring.seconds(lambda kept=kept: _touch(kept))  # type: ignore[misc]  # as a default
        yield num_bytes, max(0.0, measuring.seconds(blocks) - again) / count


def _touch(blocks: list[torch.Tensor]) -> list[torch.Tensor]:
    """Write to each page of `blocks`."""
    for one in blocks:
        one[:: mmap.PAGESIZE].fill_(1)
    return blocks


def main(out: str) -> None:
    """Rank 0 writes the rows of `fresh_blocks` as JSON, by size."""
    with World.join(timeout_seconds=60) as world:
        found = sorted(fresh_blocks(Measuring(world, RankDevice.cpu())))
        if world.rank == 0:
            Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
