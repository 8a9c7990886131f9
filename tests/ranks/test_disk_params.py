"""Parameters kept on disk: read ahead of their use, and never written while frozen. A disk error in a forward or
backward raises on all ranks."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import adamw, batches, train

import shardwise as sw
from shardwise.errors import TierError
from shardwise.memory import DiskMemory
from shardwise.memory.disk_reads import DiskReads
from shardwise.system.disk import BufferPool, DiskFile, IoQueue
from shardwise.system.disk.calls import SystemCalls
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer
from tests.thorough import sampled

DISK, HOST = {"tier": "disk"}, {"tier": "host"}
ON_DISK = {"param": DISK, "optim": DISK, "grad": HOST}
ON_HOST = {"param": HOST, "optim": HOST, "grad": HOST}


class WithNorms(Transformer):
    """A tied Transformer with buffers that change in a forward, an unused parameter, and frozen blocks."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.statistics = nn.BatchNorm1d(6)
        self.blocks[0].register_parameter("unused", nn.Parameter(torch.ones(3)))
        for block in (self.blocks[1], self.blocks[2].up):
            block.requires_grad_(False)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.statistics(self.blocks[2](self.blocks[1](self.blocks[0](self.tokens(x)))))))


def trained(model: nn.Module, plan: dict[str, Any], num_ranks: int) -> list[tuple[list[float], dict[str, Any], Any]]:
    replicas = [copy.deepcopy(model) for _ in range(num_ranks)]

    def rank(world: sw.World) -> tuple[list[float], dict[str, Any], Any]:
        replica = replicas[world.rank]
        trainable = [param for param in replica.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=3e-3, eps=1e-5)
        with sw.shard(replica, plan, optimizer=optimizer, world=world) as engine:
            losses = train(engine, batches(4, rows=12)[:3])
            with torch.no_grad():
                engine(*batches(1, rows=12)[0])
            at_rest = [float(param.detach().float().sum()) for param in engine.module.parameters()]
            losses += train(engine, batches(4, rows=12)[3:])
            return losses + at_rest, engine.state_dict(), engine.memory()

    return run_ranks(num_ranks, rank)


@sampled
@pytest.mark.parametrize(("num_ranks", "precision"), [(2, "bf16"), (1, "fp32")])
def test_frozen_tied_and_unused_ones_and_buffers(
    num_ranks: int, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit-identical to the host in place of the disk. Files of frozen parameters are never written in training."""
    written: set[str] = set()
    write = DiskFile.write

    def noted(self: DiskFile, start: int, data: torch.Tensor) -> Any:
        written.add(self.path.name)
        return write(self, start, data)

    monkeypatch.setattr(DiskFile, "write", noted)
    torch.manual_seed(0)
    model = WithNorms()
    plan = {"preset": "zero3", "precision": precision, "accumulate": 1, "clip_grad_norm": 0.5}
    plan["rules"] = {"statistics": {"params": ["statistics.*"], "precision": "fp32"}}
    on_host = trained(model, {**plan, "rows": ON_HOST}, num_ranks)[0]
    on_disk = trained(model, {**plan, "rows": ON_DISK, "disk": str(tmp_path)}, num_ranks)[0]
    assert on_disk[0] == on_host[0]
    for name, values in on_host[1].items():
        assert torch.equal(on_disk[1][name], values), name
    memory = on_disk[2]
    assert memory.measured_on_disk == memory.promised_on_disk
    assert memory.measured_on_host == memory.promised_on_host
    assert memory.promised["param"] == memory.measured["param"] == 0
    num_files, num_frozen = len(model.blocks) + 2 + 1, 2  # the root's own, the rule's; blocks 1 and 2 have frozen ones
    assert len(written) <= num_ranks * (num_files + num_frozen - num_frozen)


def test_nearly_everything_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second pass on, nearly all units are read ahead, in forward and backward."""
    found: list[bool] = []
    fetch = DiskReads.fetch

    def noted(self: DiskReads, key: Any, *rest: Any) -> Any:
        found.append(key in self._ahead)
        return fetch(self, key, *rest)

    monkeypatch.setattr(DiskReads, "fetch", noted)
    model = Transformer(num_blocks=8)
    plan = {"preset": "zero3", "rows": ON_DISK, "disk": str(tmp_path), "accumulate": 2}
    with sw.shard(model, plan, optimizer=adamw(model)) as engine:
        for batch in batches(4):
            engine.backward(engine(*batch))
            engine.step()
        found.clear()
        for batch in batches(4):
            engine.backward(engine(*batch))
            engine.step()
    assert len(found) >= 4 * 2 * 8
    assert found.count(False) <= 2 * 2 * 2, "of two steps of two micro-batches"


def test_what_follows_is_learned_and_what_changes_is_read_anew(tmp_path: Path) -> None:
    """Units a to d are used forward and backward. They are read ahead in the order of the last pass, and after an
    update the new values are read."""
    queue = IoQueue()
    contents = dict.fromkeys("abcd", 0)
    reads = DiskReads(lambda: BufferPool(3, 4096))
    files = {}
    for name in contents:
        files[name] = DiskFile(tmp_path / name, 4096, queue)
        reads.register(name, lambda buffer, name=name: files[name].read(0, buffer))
    hits: list[bool] = []
    seen: list[int] = []

    def use(name: str) -> None:
        hits.append(name in reads._ahead)
        out = torch.zeros(1, dtype=torch.uint8)

        def copy(buffer: torch.Tensor) -> Any:
            out.copy_(buffer[:1])
            return Landed()

        reads.fetch(name, name, copy).wait()
        seen.append(int(out))
        assert out.item() == contents[name]

    for number in range(3):
        hits.clear()
        for name in "abcdcba":
            use(name)
        for name in contents:  # an update
            reads.forget(name)
            contents[name] = number + 1
            files[name].put(0, torch.full((1,), number + 1, dtype=torch.uint8))
    assert hits == [False] + [True] * 6
    assert seen[-7:] == [2] * 7
    for file in files.values():
        file.close()
    queue.close()


class Landed:
    def wait(self) -> None:
        return

    def land(self) -> None:
        return


def rank_of(handle: int) -> int:
    """The rank that the file belongs to, from its name."""
    prefix = Path(os.readlink(f"/proc/self/fd/{handle}")).name.partition(".")[0]
    return int(prefix.rpartition("-")[2])


@sampled
@pytest.mark.parametrize("when", ["forward", "backward", "inference"])
def test_a_disk_that_fails_in_a_pass_raises_on_all_ranks(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 cannot read. Both ranks name the unit and the file. Once the disk works again, training continues."""
    fails = [False]
    read = SystemCalls.read

    def failing(self: SystemCalls, handle: int, into: memoryview, offset: int) -> int:
        if fails[0] and rank_of(handle) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, handle, into, offset)

    monkeypatch.setattr(SystemCalls, "read", failing)
    torch.manual_seed(0)
    model, data = Transformer(num_blocks=6), batches(4, rows=12)

    def run(breaks: bool) -> Callable[[sw.World], list[float]]:
        replicas = [copy.deepcopy(model) for _ in range(2)]

        def broken(engine: sw.Engine, world: sw.World) -> None:
            loss = engine(*data[0]) if when == "backward" else torch.zeros(())

            def infer() -> None:
                with engine.inference(0):
                    engine.module.logits(data[0][0])

            calls = {"forward": lambda: engine(*data[0]), "backward": lambda: engine.backward(loss), "inference": infer}
            world.barrier()
            fails[0] = True
            world.barrier()
            with pytest.raises(TierError, match=r"What rests of the parameters of \S+ on a disk could not") as caught:
                calls[when]()
            assert "-1.rows-" in str(caught.value), "the file"
            assert "EIO" in str(caught.value)
            world.barrier()
            fails[0] = False
            world.barrier()
            engine.zero_grad()

        def rank(world: sw.World) -> list[float]:
            replica = replicas[world.rank]
            plan = {"preset": "zero3", "rows": ON_DISK, "disk": str(tmp_path / f"{when}-{breaks}")}
            with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
                losses = train(engine, data[:2])
                if breaks:
                    broken(engine, world)
                return losses + train(engine, data[2:])

        return rank

    assert run_ranks(2, run(breaks=True)) == run_ranks(2, run(breaks=False))


def test_without_an_optimizer_frozen_parameters_take_their_own_bytes(tmp_path: Path) -> None:
    model = Transformer().requires_grad_(False)
    x, y = batches(1)[0]
    expected = model(x, y)
    with sw.shard(model, {"preset": "zero3", "rows": ON_DISK, "disk": str(tmp_path)}) as engine:
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(engine(x, y), expected)
        memory = engine.memory()
        assert memory.measured_on_disk == memory.promised_on_disk
        numel = sum(param.numel() for param in model.parameters())
        assert 4 * numel <= memory.promised_on_disk["param"] <= 4 * numel * 1.2
        assert memory.promised_on_disk["optim"] == 0
        assert isinstance(inside.disk(engine), DiskMemory)
