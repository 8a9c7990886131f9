"""Checkpoints written in the background from files on disk, while later steps change these files."""

from __future__ import annotations

import copy
import errno
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import adamw, batches, train, work_on_ranks

import shardwise as sw
from shardwise.errors import CheckpointError
from shardwise.memory import DiskRows, disk_memory
from shardwise.system.disk import IoQueue, Pending, SystemCalls, TierFolder
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer
from tests.patience import PATIENCE
from tests.thorough import thorough_only

PLAN: dict[str, Any] = {"preset": "infinity", "precision": "bf16", "rows": {"param": {"tier": "disk"}}}
SAVING = "shardwise checksums"
"""Name of the thread that reads what is written into a checkpoint."""


class HeldSaves:
    """Background saves of two ranks that read nothing before somebody has to wait for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gates = [threading.Event() for _ in range(2)]
        for gate in self._gates:
            gate.set()
        self.waited: list[set[str]] = [set() for _ in range(2)]
        """By rank, the files for which somebody had to wait since the last `save`."""
        read, await_readers = DiskRows.read, DiskRows.await_readers

        def gated(rows: DiskRows, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            if threading.current_thread().name == SAVING:
                assert self._gates[rank_of(rows)].wait(PATIENCE)
            return read(rows, tensor, out)

        def noted(rows: DiskRows) -> None:
            if rows.is_kept:
                self.waited[rank_of(rows)].add(rows.name)
                self._gates[rank_of(rows)].set()
            await_readers(rows)

        monkeypatch.setattr(DiskRows, "read", gated)
        monkeypatch.setattr(DiskRows, "await_readers", noted)

    def save(self, engine: sw.Engine, folder: Path) -> None:
        """In the background; what it is to hold is in `folder`-now."""
        engine.save(folder.with_name(f"{folder.name}-now"))
        self._gates[engine.world.rank].clear()
        self.waited[engine.world.rank].clear()
        engine.save(folder, wait=False)


def rank_of(rows: DiskRows) -> int:
    return int(rows.file.path.name.split(".")[0].rpartition("-")[2])


@thorough_only("many saves")
def test_steps_and_edits_wait_for_what_a_background_save_has_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save reads nothing until another call has to wait for it, so the next step stops at its first write, and so
    do an edit and a change of plan. The checkpoints have the values as of their `save` calls."""
    held = HeldSaves(monkeypatch)
    torch.manual_seed(0)
    model, data = Transformer(), batches(6, rows=12)

    def run(saves: bool) -> Callable[[sw.World], list[float]]:
        replicas = [copy.deepcopy(model) for _ in range(2)]
        plan = {**PLAN, "disk": str(tmp_path / "scratch"), "disk_checksums": saves}

        def rank(world: sw.World) -> list[float]:
            replica = replicas[world.rank]
            with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
                losses = train(engine, data[:2])
                if saves:
                    held.save(engine, tmp_path / "stepped")
                losses += train(engine, data[2:3])
                if saves:
                    assert held.waited[world.rank], "the step changed files that were not saved yet"
                    held.save(engine, tmp_path / "edited")
                    for name in (name for name, _ in model.named_parameters() if name.startswith("blocks.1.")):
                        value = engine.get(name, "exp_avg")
                        assert value is not None
                        engine.set(name, value, "exp_avg")
                    assert held.waited[world.rank]
                    held.save(engine, tmp_path / "moved")
                    engine.reshard({**plan, "rows": {}})
                    assert held.waited[world.rank]
                losses += train(engine, data[3:])
                if saves:
                    engine.wait_for_save()
                    assert engine.resume(tmp_path / "stepped") is not None
                    assert train(engine, data[2:]) == losses[2:]
                return losses

        return rank

    assert run_ranks(2, run(saves=True)) == run_ranks(2, run(saves=False))
    for name in ("stepped", "edited", "moved"):
        now, later = (sorted((tmp_path / which).glob("step-*/*.safetensors")) for which in (f"{name}-now", name))
        assert len(now) == len(later) == 2
        assert [file.read_bytes() for file in now] == [file.read_bytes() for file in later], name


class Breaking(SystemCalls):
    """A disk on which reads for a checkpoint's thread fail while `breaks` is set."""

    breaks = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._asked_by = threading.local()
        start = IoQueue.start

        def noting(queue: IoQueue, requests: Iterable[Callable[[], None]]) -> Pending:
            name = threading.current_thread().name
            return start(queue, [partial(self._do, name, request) for request in requests])

        monkeypatch.setattr(IoQueue, "start", noting)

    def _do(self, name: str, request: Callable[[], None]) -> None:
        self._asked_by.name = name
        request()

    def read(self, handle: int, into: memoryview, offset: int) -> int:
        if self.breaks and self._asked_by.name == SAVING:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(handle, into, offset)


def test_a_background_save_that_cannot_read_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call raises its error. Steps continue, and earlier checkpoints stay."""
    disk = Breaking(monkeypatch)
    monkeypatch.setattr(disk_memory, "TierFolder", partial(TierFolder, calls=disk))
    torch.manual_seed(0)
    replica, data = Transformer(), batches(4, rows=6)

    def rank(world: sw.World) -> None:
        plan = {**PLAN, "disk": str(tmp_path / "scratch")}
        with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
            train(engine, data[:1])
            engine.save(tmp_path / "saved")
            disk.breaks = True
            engine.save(tmp_path / "saved", step=2, wait=False)
            train(engine, data[1:2])
            with pytest.raises(CheckpointError, match=r"Reading .* of .*rows-\d+ failed: Input/output error \(EIO\)"):
                engine.wait_for_save()
            disk.breaks = False
            after = train(engine, data[2:])
            assert [path.name for path in (tmp_path / "saved").glob("step-*")] == ["step-00000001"]
            assert engine.resume(tmp_path / "saved") is not None
            train(engine, data[1:2])
            assert train(engine, data[2:]) == after

    run_ranks(1, rank)


def test_a_background_save_holds_no_states_in_memory(tmp_path: Path) -> None:
    """It stages only what is in memory anyway, and two windows, however large the states are."""
    replica = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)))

    def rank(world: sw.World) -> None:
        plan = {"preset": "infinity", "disk": str(tmp_path / "scratch"), "units": {"class": "Linear"}}
        with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
            replica(torch.ones(1, 1024)).sum().backward()
            engine.step()
            engine.save(tmp_path / "saved", wait=False)
            assert inside.saver(engine)._stage.sized(0)._base is not None
            staged = inside.saver(engine)._stage._memory.numel()
            states = engine.memory().measured_on_disk["optim"]
            assert staged <= 2 * 2**24 + 2**20 < states / 5
            assert staged > 0

    run_ranks(1, rank)


def test_an_edit_behind_a_background_save_is_not_taken_for_one_by_hand(tmp_path: Path) -> None:
    """A rank may have no elements of a small parameter. The checkpoint has the values as of the `save` call."""
    model, data = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(2, 2, 4)
    plan = {"preset": "infinity", "disk": str(tmp_path / "scratch"), "units": {"min_numel": 1000}}

    def work(engine: sw.Engine) -> None:
        mine = engine.module
        for number, x in enumerate(data):
            engine.backward(mine(x).square().mean())
            engine.step()
            before = {name: engine.get(name) for name, _ in mine.named_parameters()}
            engine.save(tmp_path / f"run-{number}", wait=False)
            for name, value in before.items():
                assert value is not None
                engine.set(name, value * 2)
            engine.wait_for_save()
            engine.resume(tmp_path / f"run-{number}")
            for name, value in before.items():
                torch.testing.assert_close(engine.get(name), value, rtol=0, atol=0)

    work_on_ranks(2, work, plan, model)
