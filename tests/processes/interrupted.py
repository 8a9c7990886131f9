"""Run by `test_interrupts.py`: trains until Ctrl-C, which comes when all ranks have left their `ready-RANK`.

interrupted.py FOLDER training | saving | stubborn

There is a checkpoint of step 1. `training` goes on with steps; `saving` is in the middle of the next checkpoint's file;
`stubborn` too, and ignores Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import write


def main(folder: Path, when: str) -> None:
    ready = folder / f"ready-{os.environ.get('RANK', '0')}"

    def half(handle: int, window: memoryview, _: int) -> bool:
        os.write(handle, window[:4096])
        if when == "stubborn":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        tell(ready)
        time.sleep(60)
        raise AssertionError("nobody has interrupted this")

    model = nn.Linear(64, 64)
    plan = {"preset": "zero3", "run": str(folder / "run")}
    engine = sw.shard(model, plan, optimizer=torch.optim.AdamW(model.parameters()))
    while True:
        engine.backward(engine(torch.ones(2, 64)).sum())
        engine.step()
        engine.log({"loss": 1.0})
        if engine.num_steps == 1:
            engine.save(folder / "checkpoints")
        elif when == "training":
            if engine.num_steps == 3:
                tell(ready)
        else:
            write.write_at = half
            engine.save(folder / "checkpoints")


def tell(ready: Path) -> None:
    """Whole, with the process id."""
    ready.with_suffix(".draft").write_text(str(os.getpid()))
    ready.with_suffix(".draft").rename(ready)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
