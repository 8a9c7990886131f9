"""Run by `test_gloo.py` on real processes: presets compared with the plain model, over real gloo."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))

from twins import (
    Run,
    adamw,
    assert_as_near,
    assert_same,
    batches,
    engine_step,
    full_params,
    muon_groups,
    plain_run,
)

import shardwise as sw
from shardwise.optim import Muon
from tests.models import Transformer


def main() -> None:
    torch.set_num_threads(1)
    world = sw.World.join()
    torch.manual_seed(world.rank)  # rank 0's values win
    race_muon(world)
    races = Races(world)
    for preset, mesh, precision in cases(world.size):
        races.race(preset, mesh, precision)
        if world.rank == 0:
            print(f"{preset} {mesh} {precision}: same", flush=True)
    world.close()


def cases(size: int) -> list[tuple[str, dict[str, int], str]]:
    two = {"node": 2, "local": size // 2}
    if size == 4:
        return [("hsdp", two, "fp32"), ("hpz", two, "bf16"), ("zero3", {"dp": size}, "fp32"), ("zero1", two, "bf16")]
    names = {"ddp": "bf16", "zero1": "bf16", "zero2": "fp32", "zero3": "bf16", "zero3-kept": "fp32"}
    return [(name, {"dp": size}, precision) for name, precision in names.items()]


class Races:
    """Trainings from rank 0's values. That rank compares them with plain runs, each of which is made once."""

    def __init__(self, world: sw.World) -> None:
        self.world, self.start, self.data = world, Transformer(tied=True), batches(8)
        self.twins: dict[str, list[Run]] = {}

    def race(self, preset: str, mesh: dict[str, int], precision: str) -> None:
        run = self.trained({"preset": preset, "mesh": mesh, "precision": precision})
        if self.world.rank > 0:
            return
        if precision not in self.twins:
            self.twins[precision] = self.plain_runs(precision)
        if precision == "fp32":
            assert_same(run, *self.twins[precision])
        else:
            assert_as_near(run, *self.twins[precision])

    def plain_runs(self, precision: str) -> list[Run]:
        """In bf16 also one that differs by rounding alone; see `assert_as_near`."""
        if precision == "fp32":
            return [plain_run(self.start, self.data)]
        shares = (self.world.size, 1)
        return [plain_run(self.start, self.data, shares=number, dtype=torch.bfloat16) for number in shares]

    def trained(self, plan: dict[str, Any]) -> Run:
        world, model, run = self.world, copy.deepcopy(self.start), Run()
        optimizer = adamw(model)
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
            for x, y in self.data:
                mine = (x.chunk(world.size)[world.rank], y.chunk(world.size)[world.rank])
                run.losses.append(world.mean(engine_step(engine, optimizer, mine).item()))
                run.norms.append(engine.gradient_norm or 0.0)
            run.params = full_params(engine)
        return run


def race_muon(world: sw.World) -> None:
    """Pieces of matrices to their owners and back: messages of any length, over a line of two axes too."""
    torch.manual_seed(0)
    model, data = Transformer(), batches(4)
    twin = plain_run(model, data, muon)
    optimizer = muon(model)
    plan = {"preset": "zero3", "mesh": {"node": 2, "local": world.size // 2}}
    with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
        for step, (x, y) in enumerate(data):
            mine = [part.chunk(world.size)[world.rank] for part in (x, y)]
            loss = world.mean(engine_step(engine, optimizer, (mine[0], mine[1])).item())
            assert abs(loss - twin.losses[step]) <= 1e-5 * loss
        for name, param in full_params(engine).items():
            assert (param - twin.params[name]).abs().max() <= 1e-5, name


def muon(model: torch.nn.Module) -> torch.optim.Optimizer:
    return Muon(muon_groups(model, lr=3e-3, adamw_eps=1e-5), lr=0.01, iterate_in="fp32")


if __name__ == "__main__":
    main()
