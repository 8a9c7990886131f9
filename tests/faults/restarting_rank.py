"""Run by `test_elastic_restarts.py` on real processes: a loop that saves and resumes, as anybody writes it, of
whose ranks one is killed once.

restarting_rank.py OUT PLAN STEPS VICTIM AT ENGINES     OUT: a folder; PLAN: JSON; ENGINES: how many at a time
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from survivor import batch_of, loss_of, model_for  # a file beside this one

import shardwise as sw


def another(world: sw.World) -> sw.Engine:
    model = torch.nn.Linear(4, 4)
    return sw.shard(model, "zero1", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), world=world)


def main(out: Path, plan: str, num_steps: int, victim: int, at: int, num_engines: int) -> None:
    torch.set_num_threads(1)
    model = model_for(plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: dict[int, float] = {}
    with sw.shard(model, json.loads(plan), optimizer=optimizer) as engine:
        others = [another(engine.world) for _ in range(1, num_engines)]
        resumed = engine.resume(out / "checkpoints")
        first = engine.num_steps
        while engine.num_steps < num_steps:
            step = engine.num_steps
            x, y = batch_of(step, *engine.data_ranks)
            if (engine.world.rank, step, resumed) == (victim, at, None):
                os.kill(os.getpid(), signal.SIGKILL)
            loss = loss_of(model(x), y)
            engine.backward(loss)
            engine.step()
            for other in others:
                other.backward(other.module(torch.ones(1, 4)).sum())
                other.step()
            losses[step] = engine.mean(loss.item())
            if engine.num_steps % 2 == 0:
                engine.save(out / "checkpoints")
        for other in others:
            other.close()
        facts = {"first": first, "losses": losses, "size": engine.world.size}
        (out / f"rank-{engine.world.rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))
