"""Run by `test_published_weights_faults.py`: two ranks publish versions 1 and 2, and one is killed in the middle of the
second, which is written beside a step; or a reader that is killed when it has begun to read.

dies_while_publishing.py FOLDER RANK|read
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import own_rows


def main() -> None:
    folder = sys.argv[1]
    if sys.argv[2] == "read":
        found = sw.published(folder, reader="killed")
        assert found is not None
        found.tensors()
        os.kill(os.getpid(), signal.SIGKILL)
    put, num_written = own_rows._put, 0

    def dies(*args: Any) -> None:
        nonlocal num_written
        num_written += 1
        if num_written == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        put(*args)

    with sw.World.join() as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        with sw.shard(model, "zero3", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), world=world) as engine:
            engine.publish(folder, version=1, keep=1)
            if world.rank == int(sys.argv[2]):
                own_rows._put = dies
            engine.publish(folder, version=2, keep=1, wait=False)
            for _ in range(10_000):
                engine.backward(engine(torch.ones(2, 64)).sum())
                engine.step()


if __name__ == "__main__":
    main()
