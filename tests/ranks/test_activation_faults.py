"""A disk error on offloaded activations ends the step with a clear error on every rank; only work since the last
checkpoint is lost. A rehearsal checks the free space before the first step."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelined import batches as pipeline_batches
from pipelined import unsplit
from twins import adamw, batches, train

import shardwise as sw
from shardwise.errors import ModelError, ShardwiseError, StateError, TierError
from shardwise.sharded import activation_disk
from shardwise.system.disk import SystemCalls, TierFolder
from shardwise.testing import run_ranks
from tests.models import Decoder, Transformer
from tests.thorough import sampled, thorough_only

pytestmark = sampled
NUM_BLOCKS = 4
FAULTS = {
    "full when a file is made": ("reserve", errno.ENOSPC, "forward", r"written\. .* cannot be made: No space left"),
    "full when it is written": ("write", errno.ENOSPC, "", r"written\. Writing .* failed: No space left"),
    "broken when it is written": ("write", errno.EIO, "", r"written\. Writing .* failed: Input/output error"),
    "broken when it is read": ("read", errno.EIO, "backward", r"read\. Reading .* failed: Input/output error"),
    "cut short": ("cut", 0, "backward", r"read\. Reading .* failed: .* It was truncated"),
}


class Breaking(SystemCalls):
    """Rank 1's files of activations fail as `verb` and `code` prescribe."""

    def __init__(self) -> None:
        self.verb, self.code = "", 0

    def _fails(self, verb: str, handle: int) -> bool:
        name = os.readlink(f"/proc/self/fd/{handle}")
        return self.verb == verb and "rank-1.activations" in name

    def reserve(self, handle: int, num_bytes: int) -> None:
        if self._fails("reserve", handle):
            raise OSError(self.code, os.strerror(self.code))
        super().reserve(handle, num_bytes)

    def write(self, handle: int, data: memoryview, offset: int) -> int:
        if self._fails("write", handle):
            raise OSError(self.code, os.strerror(self.code))
        return super().write(handle, data, offset)

    def read(self, handle: int, into: memoryview, offset: int) -> int:
        if self._fails("read", handle):
            raise OSError(self.code, os.strerror(self.code))
        if self._fails("cut", handle):
            return 0
        return super().read(handle, into, offset)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_fails_ends_the_step_and_loses_nothing(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's error names the unit and the file; rank 0's names rank 1 and its error. Another job that resumes from
    the checkpoint trains like one without faults."""
    verb, code, when, words = FAULTS[fault]
    disk = Breaking()
    make = TierFolder.__init__

    def made(self: TierFolder, *args: object, **kwargs: object) -> None:
        make(self, *args, **{**kwargs, "calls": disk})  # type: ignore[arg-type]

    monkeypatch.setattr(TierFolder, "__init__", made)
    monkeypatch.setattr(
        "shardwise.runtime.activations.on_disk.BEHIND_BYTES", 1
    )  # so that writes end within the forward
    torch.manual_seed(0)
    model, data = Transformer(num_blocks=NUM_BLOCKS), batches(4, rows=48)
    plan = {"preset": "infinity", "activations": "disk", "disk": str(tmp_path / "scratch")}
    said: dict[int, str] = {}

    def run(breaks: bool) -> Callable[[sw.World], list[float]]:
        replicas = [copy.deepcopy(model) for _ in range(2)]

        def rank(world: sw.World) -> list[float]:
            replica = replicas[world.rank]
            with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
                if engine.resume(tmp_path / f"run-{breaks}") is not None:
                    return train(engine, data[2:])
                losses = train(engine, data[:2])
                engine.save(tmp_path / f"run-{breaks}")
                if breaks:
                    world.barrier()
                    disk.verb, disk.code = verb, code
                    world.barrier()
                    x, y = (part.repeat(2, 1) for part in data[2])  # larger, so that other files are created
                    where = "forward"
                    try:
                        loss = engine(x, y)
                        where = "backward"
                        engine.backward(loss)
                    except ShardwiseError as error:
                        said[world.rank] = str(error)
                        assert world.rank == 0 or when in ("", where)
                        raise
                    raise AssertionError("The step went on.")
                return losses + train(engine, data[2:])

        return rank

    with pytest.raises(TierError, match=rf"The activations of blocks\.\d on a disk could not be {words}"):
        run_ranks(2, run(breaks=True))
    assert "rank-1.activations" in said[1]
    assert "The activations of blocks." in said[0]
    assert "Rank 1 raised TierError" in said[0]
    disk.verb = ""
    assert run_ranks(2, run(breaks=True)) == [losses[2:] for losses in run_ranks(2, run(breaks=False))]


@thorough_only("slow; smaller tests beside it cover the same code")
def test_room_is_asked_for_by_the_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal requires space for all ranks that share the disk, minus what their files occupy already."""
    model, (batch,) = Transformer(), batches(1, rows=48)
    replicas = [copy.deepcopy(model) for _ in range(2)]
    free = {"bytes": 2**40}
    monkeypatch.setattr(SystemCalls, "free_bytes", lambda *_: free["bytes"])

    def rank(world: sw.World) -> None:
        replica = replicas[world.rank]
        plan = {"preset": "zero3", "activations": "disk", "disk": str(tmp_path)}
        with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
            promise = engine.rehearse(batch)
            assert promise.disk is not None
            wanted = promise.disk.activations
            assert wanted > 2**17
            world.barrier()
            free["bytes"] = 2 * wanted - 1
            world.barrier()
            with pytest.raises(TierError, match=r"Activations have no room on the disk: .* 1 B too little"):
                engine.rehearse(batch)
            world.barrier()
            free["bytes"] = 2 * wanted
            world.barrier()
            engine.rehearse(batch)
            engine.backward(engine(*batch))
            engine.step()
            world.barrier()
            free["bytes"] = 2**13
            world.barrier()
            engine.rehearse(batch)

    run_ranks(2, rank)


def wanted_bytes(folder: Path, plan: dict[str, Any], batch: Any) -> int:
    """What the activations of both ranks take on the disk."""
    replicas = [Transformer(num_blocks=NUM_BLOCKS) for _ in range(2)]

    def rank(world: sw.World) -> int:
        replica = replicas[world.rank]
        with sw.shard(replica, {**plan, "disk": str(folder)}, optimizer=adamw(replica), world=world) as engine:
            promise = engine.rehearse(batch)
            return promise.disk.activations if promise.disk is not None else 0

    return sum(run_ranks(2, rank))


ASKED: dict[str, dict[str, Any]] = {
    "forward": {"preset": "zero2"},
    "rule": {"preset": "zero3", "rules": {"some": {"params": ["blocks.1.*"], "activations": "disk"}}},
    "change of plan": {"preset": "zero3"},
    "stages": {"preset": "zero1", "mesh": {"pp": 2, "dp": 1}, "accumulate": 2, "pipeline": {"schedule": "1f1b"}},
}


@pytest.mark.parametrize("case", ASKED)
def test_room_is_asked_for_before_the_first_step(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks raise the same error before anything is written, and train once there is room."""
    model, (batch,) = Transformer(num_blocks=NUM_BLOCKS), batches(1, rows=48)
    plan = {**ASKED[case], **({} if "rules" in ASKED[case] else {"activations": "disk"})}
    wanted = wanted_bytes(tmp_path, plan, tuple(part[:24] for part in batch))  # a micro-batch, or a rank's share
    replicas = [copy.deepcopy(model) for _ in range(2)]
    free = {"bytes": wanted - 1}
    told: dict[int, str] = {}

    def rank(world: sw.World) -> None:
        replica = replicas[world.rank]
        own = {**plan, "disk": str(tmp_path)}
        first = "ddp" if case == "change of plan" else own
        with sw.shard(replica, first, optimizer=adamw(replica), world=world) as engine:
            if case == "change of plan":
                engine.reshard(own)
            step = (lambda: engine.train_step(batch)) if case == "stages" else (lambda: train(engine, [batch]))
            world.barrier()
            monkeypatch.setattr(SystemCalls, "free_bytes", lambda *_: free["bytes"])
            world.barrier()
            with pytest.raises(TierError) as caught:
                step()
            told[world.rank] = str(caught.value)
            assert engine.memory().measured_on_disk["activations"] == 0
            world.barrier()
            free["bytes"] = 2**40
            world.barrier()
            step()
            assert engine.memory().measured_on_disk["activations"] > 0

    run_ranks(2, rank)
    assert told[0] == told[1]
    assert told[0].startswith(f"Activations have no room on the disk: {tmp_path} has ")
    assert "are needed: 1 B too little. Make room there, or name a folder on a larger disk." in told[0]


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("offload", [{"optim": 0.3}, {"optim": 1.0}, {"optim": 0.6, "param": 0.3}])
def test_stages_ask_for_room_once_whatever_share_each_has_on_the_host(
    preset: str, offload: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks whose update runs unit by unit record a step later than others, so the record says nothing of the rest.
    An evaluation is a pass too, and needs no room."""
    model, data = Decoder(), pipeline_batches(3, 8)
    asked: list[int] = []
    ask = activation_disk._ask

    def counted(sharded: Any, *given: Any) -> None:
        asked.append(sharded.world.rank)
        ask(sharded, *given)

    monkeypatch.setattr(activation_disk, "_ask", counted)
    replicas = [copy.deepcopy(model) for _ in range(2)]
    plan = {"preset": preset, "mesh": {"pp": 2, "dp": 1}, "accumulate": 2, "offload": offload}

    def rank(world: sw.World) -> list[float]:
        mine = replicas[world.rank]
        full = {**plan, "activations": "disk", "disk": str(tmp_path)}
        with sw.shard(mine, full, optimizer=adamw(mine), world=world) as engine:
            engine.eval_step(data[0])
            with pytest.raises(StateError, match="has not computed yet"):
                engine.fit_activations(data[0], "1GiB")
            return [engine.train_step(batch).item() for batch in data]

    for losses in run_ranks(2, rank):
        assert losses == pytest.approx(unsplit(model, data).losses, rel=1e-5)
    assert sorted(asked) == [0, 1]


class Unrehearsed(Transformer):
    """Reads a value, which has none in a rehearsal."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        loss: torch.Tensor = super().forward(x, y)
        return loss if float(self.head.weight.sum()) != 0.125 else loss + 1


@thorough_only("a rare case")
def test_a_model_that_cannot_be_rehearsed_trains(tmp_path: Path) -> None:
    replicas = [Unrehearsed() for _ in range(2)]

    def rank(world: sw.World) -> None:
        replica = replicas[world.rank]
        plan = {"preset": "zero2", "activations": "disk", "disk": str(tmp_path)}
        with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
            with pytest.raises(ModelError):
                engine.rehearse(batches(1, rows=48)[0])
            train(engine, batches(1, rows=48))
            assert engine.memory().measured_on_disk["activations"] > 0

    run_ranks(2, rank)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_change_of_plan_moves_activations_elsewhere(tmp_path: Path) -> None:
    """From policy to policy and folder to folder: losses stay the same, and files remain only in the folder in use."""
    model, data = Transformer(), batches(7, rows=36)
    first, second = tmp_path / "first", tmp_path / "second"
    kept = {"preset": "zero3"}
    plans = [
        {"preset": "zero3", "activations": "disk", "disk": str(first)},
        {"preset": "infinity", "activations": "disk", "disk": str(first)},
        {"preset": "infinity", "activations": "offload", "disk": str(second)},
        {"preset": "zero2", "activations": "disk", "disk": str(second)},
        {"preset": "zero3", "activations": "recompute"},
        {"preset": "zero3", "activations": {"policy": "disk", "every": 2}, "disk": str(first)},
    ]

    def run(plans: list[dict[str, Any]]) -> Callable[[sw.World], list[float]]:
        replicas = [copy.deepcopy(model) for _ in range(2)]

        def rank(world: sw.World) -> list[float]:
            replica = replicas[world.rank]
            with sw.shard(replica, kept, optimizer=adamw(replica), world=world) as engine:
                losses = train(engine, data[:1])
                for plan, batch in zip(plans, data[1:], strict=True):
                    engine.reshard(plan)
                    losses += train(engine, [batch])
                    there = engine.memory().measured_on_disk.get("activations", 0)
                    assert (there > 0) == ("disk" in str(plan.get("activations")))
                    used = plan.get("disk")
                    assert all(any(folder.glob("*")) == (str(folder) == used) for folder in (first, second))
                return losses

        return rank

    assert run_ranks(2, run(plans))[0] == pytest.approx(run_ranks(2, run([kept] * len(plans)))[0], abs=1e-6)
