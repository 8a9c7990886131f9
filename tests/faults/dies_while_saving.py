"""Run by `test_checkpoint_faults.py`: two steps, a checkpoint after each; rank 1 is killed in its second file if asked.

dies_while_saving.py FOLDER [die | die-awaited]

With `die-awaited` rank 0 waits for the checkpoint, and takes SIGTERM for a request that it cannot answer meanwhile.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import write
from shardwise.launch import StopRequest


def main() -> None:
    with sw.World.join() as world:
        model = nn.Linear(64, 64)
        with sw.shard(model, "zero3", optimizer=torch.optim.AdamW(model.parameters()), world=world) as engine:
            resumed = engine.resume(sys.argv[1])
            if resumed is not None and world.rank == 0:
                print(f"resumed from {resumed.step}", flush=True)
            while engine.num_steps < 2:
                engine.backward(engine(torch.ones(2, 64)).sum())
                engine.step()
                if engine.num_steps == 2 and sys.argv[2:]:
                    engine.wait_for_save()  # the first file is complete; on a busy machine it may not have been begun
                    if world.rank == 1:
                        write.write_at = die
                    engine.save(sys.argv[1], wait=False)
                    if world.rank == 0 and sys.argv[2] == "die-awaited":
                        with StopRequest():
                            engine.wait_for_save()
                    signal.pause()
                engine.save(sys.argv[1], wait=False)


def die(handle: int, window: memoryview, offset: int) -> None:
    os.write(handle, window[:4096])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
