"""Run by `test_launcher_dies.py`: an elastic job that saves after each of two steps.

saving_rank.py OUT

In the second save the rank that was member 1 at the beginning leaves the file `saving` in OUT when it begins to write,
and goes on as soon as `go on` is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import write


def main(out: Path) -> None:
    world = sw.World.join(patience_seconds=1)
    membership = world.membership
    assert membership is not None
    note(out, membership.member, "joined", folder=str(membership.folder), pid=os.getpid(), time=time.time())
    model = nn.Linear(64, 64)
    engine = sw.shard(model, "zero3", optimizer=torch.optim.AdamW(model.parameters()), world=world)
    while engine.num_steps < 2:
        engine.backward(engine(torch.ones(2, 64)).sum())
        engine.step()
        if engine.num_steps == 2 and membership.member == 1:
            wait_in_writing(out)
        engine.save(out / "checkpoints")
    note(out, membership.member, "done", generation=engine.world.generation, num_void=engine.num_void)
    engine.close()


def wait_in_writing(out: Path) -> None:
    written = write.write_at

    def later(handle: int, window: memoryview, offset: int) -> None:
        (out / "saving").touch()
        while not (out / "go on").exists():
            time.sleep(0.02)
        written(handle, window, offset)

    write.write_at = later


def note(out: Path, member: int, what: str, **more: object) -> None:
    with (out / f"member-{member}").open("a") as stream:
        stream.write(json.dumps({"what": what, **more}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
