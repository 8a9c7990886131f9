"""Run by `test_elastic_restarts.py` on real processes: a loop that saves and resumes, as anybody writes it, of
whose ranks one is killed once.

restarting_rank.py OUT PLAN STEPS VICTIM WHERE AT ENGINES

OUT: a folder; PLAN: JSON; AT: a step; ENGINES: how many at a time; WHERE: `loop`, or what all ranks do when one is
killed: `shard`, `edit`, `inference`
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
from shardwise.testing import fail_at, plant


def another(world: sw.World) -> sw.Engine:
    model = torch.nn.Linear(4, 4)
    return sw.shard(model, "zero1", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), world=world)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def befall(engine: sw.Engine, where: str, x: torch.Tensor, *, is_victim: bool) -> None:
    """What happens once, on all ranks, before a forward."""
    if where == "edit":
        name, _ = next(engine.module.named_parameters())
        value = engine.get(name)
        assert value is not None
        engine.set(name, value)
    if where == "inference":
        with engine.inference(keep_bytes=0):
            if is_victim:
                die()
            engine.module(x)
    if is_victim:
        die()


def main(out: Path, plan: str, num_steps: int, victim: int, where: str, at: int, num_engines: int) -> None:
    torch.set_num_threads(1)
    model = model_for(plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: dict[int, float] = {}
    world = sw.World.join()
    if where == "shard" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        plant(fail_at(victim, 0, "*", by=die), world)
    with world, sw.shard(model, json.loads(plan), optimizer=optimizer, world=world) as engine:
        others = [another(engine.world) for _ in range(1, num_engines)]
        resumed = engine.resume(out / "checkpoints")
        first = engine.num_steps
        while engine.num_steps < num_steps:
            step = engine.num_steps
            x, y = batch_of(step, *engine.data_ranks)
            if (step, resumed) == (at, None) and where != "shard":
                befall(engine, where, x, is_victim=engine.world.rank == victim)
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
    main(
        Path(sys.argv[1]),
        sys.argv[2],
        int(sys.argv[3]),
        int(sys.argv[4]),
        sys.argv[5],
        int(sys.argv[6]),
        int(sys.argv[7]),
    )
