"""Run by `test_interrupts.py`: trains until Ctrl-C, which comes when all ranks have left their `ready-RANK`.

interrupted.py FOLDER training | saving | stubborn | RANK:POINT

There is a checkpoint of step 1. `training` goes on with steps; `saving` is in the middle of the next checkpoint's file;
`stubborn` too, and ignores Ctrl-C. With a rank and one of `POINTS`, that rank interrupts all of its process group, as a
terminal does, when the next checkpoint gets there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import folder as folders
from shardwise.checkpoint import saver, write
from shardwise.checkpoint.draft_notes import Notes

POINTS: dict[str, tuple[Any, str]] = {
    "room": (folders, "check_room"),
    "file": (write, "write_at"),
    "start": (saver, "write_rank"),
    "note": (write, "write_text"),
    "wait": (Notes, "wait"),
    "index": (folders, "publish"),
    "rename": (folders, "exchange"),
    "removal": (folders, "thin_out"),
}
"""By what is about to be done."""


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
            rank, _, point = when.partition(":")
            if not point:
                write.write_at = half
            elif rank == os.environ["RANK"]:
                interrupt_at(point)
            engine.save(folder / "checkpoints")
            raise AssertionError("nobody has interrupted this")


def interrupt_at(point: str) -> None:
    owner, name = POINTS[point]
    goes_on = getattr(owner, name)

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, goes_on)
        os.killpg(0, signal.SIGINT)
        return goes_on(*args, **kwargs)

    setattr(owner, name, interrupt)


def tell(ready: Path) -> None:
    """Whole, with the process id."""
    ready.with_suffix(".draft").write_text(str(os.getpid()))
    ready.with_suffix(".draft").rename(ready)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
