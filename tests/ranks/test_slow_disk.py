"""A disk on which each read and write takes long: the numbers stay the same, no rank is taken for hung while the disk
works, and what a step waits for is reported."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from broken_disks import SlowDisk
from twins import batches, train, work_on_ranks

import shardwise as sw
from shardwise.errors import TierError
from shardwise.memory import disk_memory
from shardwise.observe import read_record
from shardwise.observe.run_notes import read_notes
from shardwise.observe.slowness import judge
from shardwise.system.disk import TierFolder
from tests.models import Transformer
from tests.thorough import soak

SLOW_SECONDS, TIMEOUT_SECONDS = 0.5, 1.5
"""A step reads at least five files one after the other: longer than the timeout, and none of them half as long."""


@soak("reads that take half a second, and a timeout of 1.5 s")
@pytest.mark.parametrize("policy", ["keep", "disk"])
def test_a_slow_disk_of_one_rank_is_named_and_no_hang(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(of_one=True)
    monkeypatch.setattr(disk_memory, "TierFolder", partial(TierFolder, calls=disk))
    torch.manual_seed(0)
    model, data = Transformer(), batches(3, rows=48)

    def run(seconds: float) -> list[list[float]]:
        plan = {
            "preset": "infinity",
            "activations": policy,
            "disk": str(tmp_path / "scratch"),
            "run": str(tmp_path / f"run-{seconds}"),
            "slow": {"seconds": 0.5},
        }

        def work(engine: sw.Engine) -> list[float]:
            losses = train(engine, data[:1])
            engine.log({"loss": losses[0]})
            engine.world.barrier()
            disk.seconds = seconds
            losses += train(engine, data[1:])
            engine.log({"loss": losses[-1]})
            engine.world.barrier()
            disk.seconds = 0.0
            return losses

        return work_on_ranks(2, work, plan, model, timeout_seconds=TIMEOUT_SECONDS, patience_seconds=0.4)

    assert run(SLOW_SECONDS) == run(0.0)
    folder = tmp_path / f"run-{SLOW_SECONDS}"
    record = read_record(folder / "record.jsonl")
    ranks = [line for line in record.lines if line["kind"] == "ranks"][-1]["ranks"]
    assert ranks[1]["disk"] > TIMEOUT_SECONDS
    assert ranks[0]["disk"] < SLOW_SECONDS
    assert ranks[0]["waiting"] > TIMEOUT_SECONDS / 2
    others, slow = judge(ranks, {"dp": 2})
    assert slow.is_slow
    assert slow.words.startswith("slow: waits for its disk")
    assert "of a step for rank 1" in others.words
    notes = [note.text for note in read_notes(folder)]
    assert any(note.startswith("rank 1 reads from its disk or writes to it, last seen at") for note in notes), notes
    assert any(note.startswith("rank 1 waits for its disk ") for note in notes), notes


@soak("reads that take 3.75 s, and a timeout of 1.5 s")
def test_a_disk_that_does_nothing_any_more_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(of_one=True)
    monkeypatch.setattr(disk_memory, "TierFolder", partial(TierFolder, calls=disk))
    torch.manual_seed(0)
    model, data = Transformer(), batches(2, rows=12)
    plan = {"preset": "infinity", "disk": str(tmp_path)}

    def work(engine: sw.Engine) -> None:
        train(engine, data[:1])
        engine.world.barrier()
        disk.seconds = 2.5 * TIMEOUT_SECONDS
        engine.world.barrier()
        train(engine, data[1:])

    words = rf"The disk of rank 1 failed in a step\. {tmp_path} has answered nothing for {0.9 * TIMEOUT_SECONDS:g} s"
    with pytest.raises(TierError, match=words):
        work_on_ranks(2, work, plan, model, timeout_seconds=TIMEOUT_SECONDS)
