"""The states that a step updates first are read from disk while the model computes, and again if they change then."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from twins import Batch, adamw, assert_same, batches, engine_step, plain_run, sharded_run

import shardwise as sw
from shardwise.memory import disk_memory
from shardwise.system.disk import SystemCalls, TierFolder
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer
from tests.thorough import sampled

ON_DISK = {"param": {"tier": "disk"}, "optim": {"tier": "disk"}, "grad": {"tier": "host"}}
Change = Callable[[sw.Engine, torch.optim.Optimizer], None]


def model_of() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


@sampled
@pytest.mark.parametrize("loop", ["engine", "plain", "accumulated"])
def test_a_step_finds_what_it_updates_first_in_memory(loop: str, tmp_path: Path) -> None:
    model, data = model_of(), batches(3, rows=12)
    replicas = [copy.deepcopy(model) for _ in range(2)]

    def rank(world: sw.World) -> None:
        replica = replicas[world.rank]
        optimizer = adamw(replica)
        num = 2 if loop == "accumulated" else 1
        plan = {"preset": "infinity", "disk": str(tmp_path), "accumulate": num}
        with sw.shard(replica, plan, optimizer=optimizer, world=world) as engine:
            disk = inside.disk(engine)
            assert disk is not None
            with torch.no_grad():
                replica(*data[0])
            assert disk._ahead is None, "an evaluation is followed by no step"
            for batch in data:
                for _ in range(num):
                    loss = replica(*batch)
                    ahead = disk._ahead
                    assert ahead is not None
                    assert ahead.rows is disk._rows[0]
                    loss.backward() if loop == "plain" else engine.backward(loss)
                optimizer.step() if loop == "plain" else engine.step(is_last=True)
                optimizer.zero_grad()
                assert disk._ahead is None
                assert disk._pool is not None
                assert disk._pool.num_free == disk._pool.num_buffers

    run_ranks(2, rank)


def halve_params(engine: sw.Engine, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for param in engine.module.parameters():
            param.mul_(0.5)


def clear_momentum(engine: sw.Engine, optimizer: torch.optim.Optimizer) -> None:
    for name, param in engine.module.named_parameters():
        engine.set(name, torch.zeros(param.shape), "exp_avg")


def load_states(engine: sw.Engine, optimizer: torch.optim.Optimizer) -> None:
    found = engine.optimizer_state_dict()
    for state in found["state"].values():
        state["exp_avg"].mul_(3.0)
    engine.load_optimizer_state_dict(found)


def load_params(engine: sw.Engine, optimizer: torch.optim.Optimizer) -> None:
    engine.load_state_dict({name: 0.5 * value for name, value in engine.state_dict().items()})


CHANGES: dict[str, Change] = {
    "params": halve_params,
    "one by one": clear_momentum,
    "states loaded": load_states,
    "params loaded": load_params,
}


@sampled
@pytest.mark.parametrize("rows", [{}, ON_DISK], ids=["states", "params"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_before_the_step_counts(change: str, rows: dict[str, Any], tmp_path: Path) -> None:
    """Changes before or after the backward: results equal those with states on the host, bit by bit."""
    model, data = model_of(), batches(4, rows=12)
    found = {}
    for name, preset in (("host", "zero3-offload"), ("disk", "infinity")):
        on_disk = {"disk": str(tmp_path / "scratch"), "rows": rows} if name == "disk" else {}
        replicas = [copy.deepcopy(model) for _ in range(2)]

        def rank(world: sw.World, preset: str = preset, on_disk: Any = on_disk, replicas: Any = replicas) -> Any:
            replica = replicas[world.rank]
            optimizer = adamw(replica)
            with sw.shard(replica, {"preset": preset, **on_disk}, optimizer=optimizer, world=world) as engine:
                for number, batch in enumerate(data):
                    if number == 2:
                        with torch.enable_grad():
                            replica(*batch)  # the first read has begun, and this graph is dropped
                        CHANGES[change](engine, optimizer)
                    engine.backward(engine(*batch))
                    if number == 3 and change == "one by one":
                        CHANGES[change](engine, optimizer)
                    engine.step()
                return engine.state_dict()

        found[name] = run_ranks(2, rank)[0]
    for name, values in found["host"].items():
        assert torch.equal(found["disk"][name], values), name


class FailingOnce(SystemCalls):
    """A disk whose next `left` reads fail."""

    def __init__(self) -> None:
        self.left = 0

    def read(self, handle: int, into: memoryview, offset: int) -> int:
        if self.left > 0:
            self.left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(handle, into, offset)


def test_a_read_that_failed_ahead_of_its_step_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, data = FailingOnce(), batches(3, rows=12)
    monkeypatch.setattr(disk_memory, "TierFolder", partial(TierFolder, calls=disk))
    model = model_of()
    num_failed: list[bool] = []

    def failing_step(engine: sw.Engine, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
        memory = inside.disk(engine)
        assert memory is not None
        disk.left = 1
        memory.expect_step()
        assert memory._ahead is not None
        memory._ahead.pending.join()
        num_failed.append(memory._ahead.pending.has_failed)
        return engine_step(engine, optimizer, batch)

    run = sharded_run(model, data, "infinity", 1, None, step=failing_step, disk=str(tmp_path))
    assert_same(run, plain_run(model, data))
    assert num_failed == [True] * len(data)
