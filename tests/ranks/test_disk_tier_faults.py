"""What cannot be kept on disk is refused before anything changes. A disk error loses only the work since the last
checkpoint."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_disks import BreakingOfOne
from torch import nn
from twins import MakeOptimizer, adamw, batches, train

import shardwise as sw
from shardwise.checkpoint import TrainingState, checkpoints_in
from shardwise.errors import CheckpointError, ModelError, ShardwiseError, StateError, TierError
from shardwise.memory import DiskMemory, disk_memory
from shardwise.system.calibration import Calibration, DiskFigures, write_calibration
from shardwise.system.disk import SystemCalls, TierFolder
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer
from tests.thorough import sampled, thorough_only


def bf16_states(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.AdamW(model.parameters(), state_dtype="bf16")


def int8_states(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.AdamW(model.parameters(), state_dtype="int8")


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.Lamb(model.parameters())


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.Muon(
        [{"params": [param for param in model.parameters() if param.dim() == 2], "use_muon": True, "lr": 0.02}]
    )


REFUSED: dict[str, tuple[dict[str, Any], MakeOptimizer, str]] = {
    "no folder": ({"disk": None}, adamw, "names no folder for them. Give it one on a local disk"),
    "grad": ({"rows": {"grad": {"tier": "disk"}}}, adamw, "Row 'grad' is placed on tier 'disk', where parameters and"),
    "param": (
        {"preset": "zero2", "rows": {"param": {"tier": "disk"}, "optim": {"tier": "disk"}}},
        adamw,
        "Row 'param' rests on the disk as copy in fp32 and 'optim' on the disk as shard.dp. in fp32, but updated",
    ),
    "bf16": ({}, bf16_states, r"tokens.weight has its states on a disk. AdamW keeps exp_avg as bfloat16"),
    "int8": ({}, int8_states, r"tokens.weight has its states on a disk. AdamW keeps exp_avg as uint8"),
    "lamb": ({}, lamb, "norms of whole parameters of tokens.weight, whose states the plan has on a disk"),
    "muon": ({}, muon, "whose states the plan has on a disk"),
    "offload": ({"offload": {"optim": 0.5}}, adamw, "the plan's rows have the states of all units on the disk"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_built_is_refused_before_anything_changes(case: str, tmp_path: Path) -> None:
    edits, make_optimizer, words = REFUSED[case]
    plan = {"preset": "infinity", "disk": str(tmp_path / "scratch"), **edits}
    replicas = [Transformer() for _ in range(2)]

    def rank(world: sw.World) -> str:
        replica = replicas[world.rank]
        optimizer = make_optimizer(replica)
        values = {name: param.detach().clone() for name, param in replica.named_parameters()}
        with pytest.raises(ShardwiseError, match=words) as caught:
            sw.shard(replica, plan, optimizer=optimizer, world=world)
        for name, param in replica.named_parameters():
            assert torch.equal(param, values[name]), name
        assert optimizer.param_groups[0]["params"]
        return str(caught.value)

    assert len(set(run_ranks(2, rank))) == 1
    assert not list(tmp_path.glob("scratch/*"))


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_folder_of_another_job_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """Whether its ranks have the same numbers as ours or others."""
    for number in (1, 8):
        other = TierFolder(tmp_path, rank=number, job="another")
        told = refusals(str(tmp_path))
        assert told[0] == told[1]
        assert f"{tmp_path} is being used by process {os.getpid()}" in told[0]
        assert [path.name for path in tmp_path.iterdir()] == [f"shardwise-rank-{number}.lock"]
        other.close()
    assert not list(tmp_path.iterdir())


def test_a_second_engine_in_the_folder_of_the_first(tmp_path: Path) -> None:
    first, second = Transformer(), Transformer()

    def rank(world: sw.World) -> None:
        plan = {"preset": "infinity", "disk": str(tmp_path)}
        with sw.shard(first, plan, optimizer=adamw(first), world=world):
            with pytest.raises(TierError, match=r"which is this one\. Close the engine that has it"):
                sw.shard(second, plan, optimizer=adamw(second), world=world)
            with sw.shard(second, {**plan, "disk": str(tmp_path / "its own")}, optimizer=adamw(second), world=world):
                pass

    run_ranks(1, rank)


@pytest.mark.parametrize(
    ("folder", "words"), [("", "an empty text"), ("$NOT_SET_HERE/run", "not all of its variables are set")]
)
def test_a_name_that_is_no_folder_is_refused_on_all_ranks(folder: str, words: str) -> None:
    told = refusals(folder)
    assert told[0] == told[1]
    assert words in told[0]


def test_a_calibration_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    figures = DiskFigures(1e9, 1e9, 0, 2**20, True, "")
    path = write_calibration(Calibration("here", {str(tmp_path): figures}))
    told = refusals(str(tmp_path / "scratch"))
    assert str(path) in told[0]


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_relative_folder_and_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra, for one, changes the working directory. The folder stays the same, for new files and for a new plan."""
    monkeypatch.chdir(tmp_path)
    replica, data = Transformer(), batches(3, rows=12)
    plan = {"preset": "infinity", "disk": "scratch", "activations": "disk"}

    def rank(world: sw.World) -> None:
        with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
            (tmp_path / "elsewhere").mkdir()
            os.chdir(tmp_path / "elsewhere")
            train(engine, data[:2])
            engine.reshard({**plan, "clip_grad_norm": 1.0})
            train(engine, data[2:])
            assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["shardwise-rank-0.lock"]
        assert not list((tmp_path / "scratch").iterdir())
        assert not list((tmp_path / "elsewhere").iterdir())

    run_ranks(1, rank)


def test_a_disk_with_too_little_room_is_refused_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def check_room(self: TierFolder, num_bytes: int) -> None:
        asked.append(num_bytes)
        if self._prefix.endswith("1"):
            raise TierError(f"{self.folder} has too little room.")

    monkeypatch.setattr(TierFolder, "check_room", check_room)
    told = refusals(str(tmp_path))
    assert told[0] == told[1] == f"{tmp_path} has too little room."
    numel = sum(param.numel() for param in Transformer().parameters())
    assert all(3 * 4 * numel <= num_bytes <= 3 * 4 * numel * 1.5 for num_bytes in asked), "for both ranks together"


def refusals(scratch: str) -> list[str]:
    replicas = [Transformer() for _ in range(2)]

    def rank(world: sw.World) -> str:
        replica = replicas[world.rank]
        with pytest.raises(TierError) as caught:
            sw.shard(replica, {"preset": "infinity", "disk": scratch}, optimizer=adamw(replica), world=world)
        assert replica(*batches(1)[0]).isfinite()
        return str(caught.value)

    return run_ranks(2, rank)


def test_a_disk_that_fails_in_a_step_loses_nothing_that_a_checkpoint_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third unit cannot be read once, on both ranks. The half-updated state cannot be saved; after a resume,
    training continues as if nothing had happened."""
    model, data = Transformer(), batches(4, rows=12)
    fails, fetch = [False, False], DiskMemory.fetch

    def failing(self: DiskMemory, rows: Any) -> None:
        rank = int(self.folder._prefix.rpartition("-")[2])
        if fails[rank] and self._rows.index(rows) == 2:
            raise TierError("reading failed: Input/output error.")
        fetch(self, rows)

    monkeypatch.setattr(DiskMemory, "fetch", failing)

    def run(breaks: bool) -> Callable[[sw.World], list[float]]:
        replicas = [copy.deepcopy(model) for _ in range(2)]

        def rank(world: sw.World) -> list[float]:
            replica, name = replicas[world.rank], f"run-{breaks}"
            plan = {"preset": "infinity", "disk": str(tmp_path / "scratch")}
            with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
                train(engine, data[:2])
                engine.save(tmp_path / name)
                if breaks:
                    fails[world.rank] = True
                    with pytest.raises(TierError, match="reading failed"):
                        train(engine, data[2:3])
                    with pytest.raises(StateError, match=r"A step failed .* Go on from the last checkpoint"):
                        engine.save(tmp_path / name)
                    with pytest.raises(StateError, match=r"A step failed"):
                        train(engine, data[3:])
                    fails[world.rank] = False
                    assert engine.resume(tmp_path / name) is not None
                return train(engine, data[2:])

        return rank

    assert run_ranks(2, run(breaks=True)) == run_ranks(2, run(breaks=False))


ONE_FAILS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "first write": ("write", 0, {}),
    "later write": ("write", 3, {}),
    "read": ("read", 2, {}),
    "zero2": ("write", 1, {"preset": "zero2", "rows": {"grad": {"tier": "host"}, "optim": {"tier": "disk"}}}),
    "params": ("write", 0, {"rows": {"param": {"tier": "disk"}}}),
    "clipped bf16": ("write", 1, {"precision": "bf16", "clip_grad_norm": 0.1}),
}


@sampled
@pytest.mark.parametrize("case", ONE_FAILS)
def test_all_ranks_learn_at_the_end_of_a_step_that_the_disk_of_one_failed(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After that step no rank can save, read or compute. After a resume on all ranks, training continues as if nothing
    had happened."""
    verb, left, edits = ONE_FAILS[case]
    disk = BreakingOfOne()
    monkeypatch.setattr(disk_memory, "TierFolder", partial(TierFolder, calls=disk))
    torch.manual_seed(0)
    model, data = Transformer(), batches(4, rows=12)

    def run(breaks: bool) -> Callable[[sw.World], list[float]]:
        replicas = [copy.deepcopy(model) for _ in range(2)]

        def rank(world: sw.World) -> list[float]:
            replica, saved = replicas[world.rank], tmp_path / f"run-{breaks}"
            plan = {"preset": "infinity", "disk": str(tmp_path / "scratch"), **edits}
            with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
                train(engine, data[:2])
                engine.save(saved)
                if breaks:
                    loss = engine(*data[2])
                    engine.backward(loss)
                    world.barrier()
                    disk.breaks, disk.left = verb, left
                    world.barrier()
                    with pytest.raises(
                        TierError, match=rf"disk of rank 1 failed in a step\. {verb[:4].title()}.*rank-1\.rows-\d"
                    ) as caught:
                        engine.step()
                    assert "EIO" in str(caught.value)
                    assert "engine.resume(), on all ranks" in str(caught.value)
                    disk.breaks = ""
                    works: list[Callable[[], object]] = [
                        lambda: engine.save(saved, step=3),
                        engine.state_dict,
                        engine.optimizer_state_dict,
                        lambda: engine.get("head.weight"),
                        lambda: engine(*data[3]),
                        lambda: engine.reshard("zero3"),
                    ]
                    for work in works:
                        with pytest.raises(StateError, match=r"A step failed .* Go on from the last checkpoint"):
                            work()
                    assert list(checkpoints_in(saved)) == [2]
                    assert engine.resume(saved) is not None
                return train(engine, data[2:])

        return rank

    assert run_ranks(2, run(breaks=True)) == run_ranks(2, run(breaks=False))


def test_without_an_optimizer_masters_alone_are_there(tmp_path: Path) -> None:
    def rank(world: sw.World) -> dict[str, int]:
        with sw.shard(Transformer(), {"preset": "infinity", "disk": str(tmp_path)}, world=world) as engine:
            report = engine.memory()
            assert report.measured_on_disk == report.promised_on_disk
            return report.measured_on_disk

    numel = sum(param.numel() for param in Transformer().parameters())
    assert 4 * numel <= run_ranks(1, rank)[0]["optim"] <= 4 * numel * 1.5
    with pytest.raises(ModelError):
        sw.shard(Transformer(), {"preset": "infinity", "disk": str(tmp_path)}, optimizer=lamb(Transformer()))


class Breaking(SystemCalls):
    """A disk on which every read, or every write, fails while `breaks` is set."""

    def __init__(self) -> None:
        self.breaks = ""

    def read(self, handle: int, into: memoryview, offset: int) -> int:
        if self.breaks == "read":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(handle, into, offset)

    def write(self, handle: int, data: memoryview, offset: int) -> int:
        if self.breaks == "write":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(handle, data, offset)


def test_a_disk_that_fails_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading or writing states raises a clear error. The process survives, and the values are unchanged."""
    disk = Breaking()
    monkeypatch.setattr(disk_memory, "TierFolder", partial(TierFolder, calls=disk))
    data = batches(2, rows=12)
    replica = Transformer()

    def rank(world: sw.World) -> None:
        plan = {"preset": "infinity", "disk": str(tmp_path / "scratch"), "precision": "bf16"}
        with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
            train(engine, data[:1])
            engine.save(tmp_path / "saved")
            before = engine.state_dict()
            disk.breaks = "read"
            for work in (
                lambda: engine.get("head.weight", "exp_avg"),
                engine.state_dict,
                engine.optimizer_state_dict,
            ):
                with pytest.raises(TierError, match=r"Reading .* of .*rows-\d+ failed: Input/output error \(EIO\)"):
                    work()
            with pytest.raises(CheckpointError, match=r"rank 0 reports: .*Input/output error"):
                engine.save(tmp_path / "saved", step=2)
            assert list(checkpoints_in(tmp_path / "saved")) == [1]
            disk.breaks = "write"
            with pytest.raises(TierError, match=r"Writing .* failed: Input/output error"):
                engine.set("head.weight", torch.zeros_like(before["head.weight"]), "exp_avg")
            disk.breaks = ""
            for name, value in engine.state_dict().items():
                assert torch.equal(value, before[name]), name
            assert engine.resume(tmp_path / "saved") is not None
            train(engine, data[1:])

    run_ranks(1, rank)


def test_a_change_of_plan_that_fails_leaves_the_new_folder_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that was opened for the new plan is unlocked at once, not when the engine is closed."""

    def fails(*_: object) -> None:
        raise RuntimeError("the move failed")

    def rank(world: sw.World) -> None:
        replica = replicas[world.rank]
        with sw.shard(replica, "zero3", optimizer=adamw(replica), world=world) as engine:
            train(engine, batches(1, rows=12))
            monkeypatch.setattr(TrainingState, "move_into", fails)
            with pytest.raises(RuntimeError, match="the move failed"):
                engine.reshard({"preset": "infinity", "disk": str(tmp_path)})
            assert not (tmp_path / f"shardwise-rank-{world.rank}.lock").exists()

    replicas = [Transformer() for _ in range(2)]
    run_ranks(2, rank)
    assert not list(tmp_path.iterdir())


def test_a_byte_that_has_changed_on_the_disk_is_found(tmp_path: Path) -> None:
    """A read between steps and the next step both detect it; resuming from a checkpoint repairs it."""
    replica, data = Transformer(), batches(4, rows=6)

    def rank(world: sw.World) -> None:
        plan = {"preset": "infinity", "disk": str(tmp_path / "scratch"), "disk_checksums": True}
        with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
            train(engine, data[:2])
            engine.save(tmp_path / "saved")
            unit = next(unit for unit in inside.units(engine) if unit.spec.name == "blocks.1")
            rows = unit.flats[0].rows
            assert rows is not None
            handle = rows.file.descriptor()
            file = os.open(f"/proc/self/fd/{handle}", os.O_RDWR)
            byte = os.pread(file, 1, 1000)
            os.pwrite(file, bytes([byte[0] ^ 4]), 1000)
            os.fsync(file)
            os.close(file)
            with pytest.raises(TierError, match=r"at byte 0 of .*rows-\d+ are not what was written there"):
                engine.optimizer_state_dict()
            with pytest.raises(TierError, match="the checksum differs"):
                train(engine, data[2:3])
            assert engine.resume(tmp_path / "saved") is not None
            train(engine, data[2:])

    run_ranks(1, rank)


@pytest.mark.parametrize("use", ["forward", "generation"])
def test_a_byte_of_a_parameter_that_has_changed_on_the_disk_is_found(use: str, tmp_path: Path) -> None:
    """Parameters are read without the states behind them in the same file, and checked alone."""
    replica, data = Transformer(), batches(3, rows=6)

    def rank(world: sw.World) -> None:
        rows = {"param": {"tier": "disk"}}
        plan = {"preset": "infinity", "rows": rows, "disk": str(tmp_path / "scratch"), "disk_checksums": True}
        with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
            train(engine, data[:2])
            unit = next(unit for unit in inside.units(engine) if unit.spec.name == "blocks.1")
            on_disk = unit.flats[0].rows
            assert on_disk is not None
            assert 0 < on_disk.resting_bytes < min(on_disk.file.num_bytes, on_disk.file.queue.block_bytes)
            file = os.open(f"/proc/self/fd/{on_disk.file.descriptor()}", os.O_RDWR)
            byte = os.pread(file, 1, 1000)
            os.pwrite(file, bytes([byte[0] ^ 4]), 1000)
            os.fsync(file)
            os.close(file)
            reading = engine.inference() if use == "generation" else nullcontext()
            with pytest.raises(TierError, match=r"at byte 0 of .*rows-\d+ are not what was written there"), reading:
                engine(*data[2])

    run_ranks(1, rank)
