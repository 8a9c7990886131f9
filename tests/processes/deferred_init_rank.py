"""Run by `test_deferred_init_memory.py` on real processes: build a model of 256 MiB in several ways; print the memory.

Each line: the way, and MiB of resident memory at the peak over what there was before. The largest comes last,
because the allocator keeps some of it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import shardwise as sw

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests import inside

MIB = 2**20
NUM_BLOCKS, WIDTH = 16, 2048


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS)))


def peak_bytes() -> int:
    """The most this process has had resident since the last `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measured(world: sw.World, way: str, born: Callable[[], sw.Engine]) -> None:
    world.barrier()
    reset_peak()
    before, start = peak_bytes(), time.monotonic()
    engine = born()
    took, seconds = peak_bytes() - before, time.monotonic() - start
    share = sum(flat.param.nbytes for flat in inside.flats(engine))
    assert share == NUM_BLOCKS * WIDTH * WIDTH * 4 // world.size
    print(f"{way} {took / MIB:.0f} MiB in {seconds:.2f} s", flush=True)
    engine.close()


def deferred(world: sw.World) -> sw.Engine:
    torch.manual_seed(0)
    with sw.deferred_init():
        model = build()
    return sw.shard(model, "zero3", world=world)


def from_file(world: sw.World, file: Path) -> sw.Engine:
    with torch.device("meta"):
        model = build()
    return sw.shard(model, "zero3", weights=file, world=world)


def main() -> None:
    torch.set_num_threads(1)
    world = sw.World.join()
    file = Path(sys.argv[1])
    with sw.deferred_init():
        nn.Linear(4, 4)  # torch imports its rules for shapes at first use
    sw.shard(nn.Linear(4, 4), "zero3", world=world).close()
    measured(world, "file", lambda: from_file(world, file))
    measured(world, "deferred", lambda: deferred(world))
    measured(world, "plain", lambda: sw.shard(build(), "zero3", world=world))
    world.close()


main()
