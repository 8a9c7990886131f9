"""Run by `test_bad_batch.py` on real processes: a loop one of whose batches fails wherever it goes.

bad_batch.py OUT WHERE PLAN      WHERE: `forward` (whoever has the sample raises), `source` (it cannot be read),
`own` (the loop reads its data by itself), `worker` (nothing is bad, but the worker process that reads it is killed,
once)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw

NUM_SAMPLES, ROWS, NUM_STEPS, BAD_STEP = 240, 12, 9, 4


class Samples:
    """One of them, by its number, is bad."""

    def __init__(self, bad: int, where: str, out: Path | None = None) -> None:
        self.bad, self.where, self.out = bad, where, out

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.bad and self.where == "source":
            raise OSError("damaged")
        if index == self.bad and self.where == "worker" and self.out is not None:
            with contextlib.suppress(FileExistsError):
                (self.out / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(16, generator=generator)
        return {"x": x, "y": x[:4] * 2, "index": torch.tensor(index)}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def loader(where: str, world: Any, bad: int, out: Path | None = None) -> sw.data.Loader:
    source = Samples(bad, where, out)
    workers = sw.data.Workers(1, processes=where == "worker")
    return sw.data.Loader(source, batch_rows=ROWS, seed=3, world=world, workers=workers)


def bad_sample() -> int:
    """The seventh of the batch of `BAD_STEP`."""
    return int(loader("", (0, 1), -1).draw(BAD_STEP).index[6])


def main(out: Path, where: str, plan: str) -> None:
    torch.set_num_threads(1)
    world = sw.World.join()
    assert world.membership is not None
    member = world.membership.member
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = sw.shard(model, json.loads(plan), optimizer=optimizer, world=world)
    bad = bad_sample()
    batches = loader(where, tuple(engine.data_ranks) if where == "own" else engine.data_ranks, bad, out)
    losses: dict[int, float] = {}
    while engine.num_steps < NUM_STEPS:
        for batch in batches:
            step = engine.num_steps
            if where == "forward" and bad in batch["index"].tolist():
                raise ValueError("no number")
            loss = ((model(batch["x"]) - batch["y"]) ** 2).mean()
            engine.backward(loss)
            engine.step()
            if engine.num_steps > step:
                losses[step] = engine.mean(loss.item())
                engine.log({"loss": losses[step]})
            if engine.num_steps == NUM_STEPS:
                break
    said = {"losses": losses, "step": batches.step, "void": engine.num_void}
    (out / f"member-{member}.json").write_text(json.dumps(said))
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
