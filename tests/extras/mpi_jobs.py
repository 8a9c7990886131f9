"""What ranks do that `mpirun` has started: `mpi_jobs.py NAME FOLDER`. Each writes what it found to FOLDER."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.comm import link_between
from shardwise.errors import CommError

PRESETS = ("zero1", "zero3", "hsdp")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


def backend(folder: Path) -> None:
    """Every collective of torch beside what a single process computes from all ranks' tensors."""
    import shardwise.integrations.mpi  # noqa: F401

    dist.init_process_group("mpi4py")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    for number, dtype in enumerate([*DTYPES, *DTYPES]):
        _all_collectives(number, dtype, list(range(size)), None)
    odd = [one for one in range(size) if one != 1]
    groups = [dist.new_group(list(reversed(odd))), dist.new_group([0, 1])]
    for group, members in zip(groups, (odd, [0, 1]), strict=True):
        if rank in members:
            _all_collectives(3, torch.bfloat16, members, group)
    _objects_and_refusals(rank, size)
    _ddp(folder, rank)
    dist.destroy_process_group()
    _tell(folder, rank, "done")


def _all_collectives(number: int, dtype: torch.dtype, members: list[int], group: Any) -> None:
    case = _Case(number, dtype, members, group)
    _reductions(case)
    _with_a_root(case)
    _gathers_and_scatters(case)
    _swaps_and_messages(case)
    dist.barrier(group=group)


class _Case:
    """What each member of a group has drawn, all of it known to all."""

    def __init__(self, number: int, dtype: torch.dtype, members: list[int], group: Any) -> None:
        self.number, self.dtype, self.members, self.group = number, dtype, members, group
        self.size, self.me = len(members), members.index(dist.get_rank())
        self.root = members[number % self.size]
        rng = torch.Generator().manual_seed(number)
        self.shape = [int(torch.randint(1, 9, (), generator=rng)) for _ in range(1 + number % 3)]
        self.every = [_drawn(self.shape, dtype, rng) for _ in range(self.size)]
        self.mine = self.every[self.me].clone()
        if number % 2 and len(self.shape) > 1:  # not contiguous
            self.mine = self.mine.transpose(0, -1).contiguous().transpose(0, -1)
        self.wide = torch.stack(self.every).to(torch.float64 if dtype.is_floating_point else torch.int64)
        self._bound = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-6)

    @property
    def is_root(self) -> bool:
        return dist.get_rank() == self.root

    def same(self, found: Tensor, expected: Tensor, slack: float | None = None) -> None:
        slack = self._bound if slack is None else slack
        torch.testing.assert_close(found.to(self.wide.dtype), expected.to(self.wide.dtype), rtol=slack, atol=slack)


def _reductions(case: _Case) -> None:
    dtype, mine, wide, group = case.dtype, case.mine, case.wide, case.group
    for op, expected in (
        (dist.ReduceOp.SUM, wide.sum(0).to(dtype)),
        (dist.ReduceOp.MAX, wide.amax(0)),
        (dist.ReduceOp.MIN, wide.amin(0)),
        (dist.ReduceOp.PRODUCT, wide.prod(0).to(dtype)),
    ):
        found = mine.clone(memory_format=torch.preserve_format)
        work = dist.all_reduce(found, op, group=group, async_op=True)
        work.wait()
        assert work.is_completed()
        case.same(found, expected)
    found = mine.clone()
    if dtype.is_floating_point:
        dist.all_reduce(found, dist.ReduceOp.AVG, group=group)
        case.same(found, wide.mean(0))
    else:
        dist.all_reduce(found, dist.ReduceOp.BXOR, group=group)
        expected = case.every[0].clone()
        for one in case.every[1:]:
            expected ^= one
        assert torch.equal(found, expected)


def _with_a_root(case: _Case) -> None:
    mine, every, group, root = case.mine, case.every, case.group, case.root
    found = mine.clone() if case.is_root else torch.zeros_like(mine)
    dist.broadcast(found, root, group=group)
    case.same(found, every[case.members.index(root)], 0)
    found = mine.clone()
    dist.reduce(found, root, group=group)
    case.same(found, case.wide.sum(0).to(case.dtype) if case.is_root else mine)
    parts = [torch.zeros_like(every[0]) for _ in range(case.size)] if case.is_root else None
    dist.gather(mine, parts, dst=root, group=group)
    if parts is not None:
        case.same(torch.stack(parts), case.wide, 0)
    out = torch.zeros_like(every[0])
    dist.scatter(out, every if case.is_root else None, src=root, group=group)
    case.same(out, every[case.me], 0)


def _gathers_and_scatters(case: _Case) -> None:
    mine, every, group, me = case.mine, case.every, case.group, case.me
    found_parts = [torch.zeros_like(mine) for _ in range(case.size)]
    dist.all_gather(found_parts, mine, group=group)
    case.same(torch.stack(found_parts), case.wide, 0)
    gathered = torch.zeros(case.size * case.shape[0], *case.shape[1:], dtype=case.dtype)
    _all_gather_single(gathered, mine.contiguous(), group)
    case.same(gathered, torch.cat(every), 0)
    whole = [torch.stack([one + place for place in range(case.size)]).to(case.dtype) for one in every]
    expected = torch.stack(whole)[:, me].to(case.wide.dtype).sum(0).to(case.dtype)
    out = torch.zeros_like(every[0])
    dist.reduce_scatter(out, list(whole[me].unbind()), group=group)
    case.same(out, expected)
    out = torch.zeros_like(every[0])
    _reduce_scatter_single(out.view(-1), whole[me].view(-1), group)
    case.same(out, expected)


def _swaps_and_messages(case: _Case) -> None:
    size, me, number, group = case.size, case.me, case.number, case.group
    lengths = [[(3 * sender + 2 * taker + number) % 5 for taker in range(size)] for sender in range(size)]
    all_sent = [
        _drawn([sum(lengths[one]), 2], case.dtype, torch.Generator().manual_seed(100 * number + one))
        for one in range(size)
    ]
    taken = [lengths[one][me] for one in range(size)]
    arrived = torch.zeros(sum(taken), 2, dtype=case.dtype)
    dist.all_to_all_single(arrived, all_sent[me], taken, lengths[me], group=group)
    case.same(arrived, torch.cat([all_sent[one].split(lengths[one])[me] for one in range(size)]), 0)
    pieces = [torch.zeros(length, 2, dtype=case.dtype) for length in taken]
    dist.all_to_all(pieces, list(all_sent[me].split(lengths[me])), group=group)
    case.same(torch.cat(pieces), arrived, 0)
    right, left = case.members[(me + 1) % size], case.members[(me - 1) % size]
    out = torch.zeros_like(case.every[0])
    works = [dist.irecv(out, left, group=group, tag=number), dist.isend(case.mine, right, group=group, tag=number)]
    for one in works:
        one.wait()
    case.same(out, case.every[(me - 1) % size], 0)


def _all_gather_single(out: Tensor, own: Tensor, group: Any) -> None:
    getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))(out, own, group=group)


def _reduce_scatter_single(out: Tensor, source: Tensor, group: Any) -> None:
    getattr(dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None))(out, source, group=group)


def _drawn(shape: list[int], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    return torch.randint(1, 5, shape, generator=rng).to(dtype)


def _objects_and_refusals(rank: int, size: int) -> None:
    every: list[Any] = [None] * size
    dist.all_gather_object(every, {"rank": rank, "text": "x" * 1000 * rank})
    assert [(one["rank"], len(one["text"])) for one in every] == [(one, 1000 * one) for one in range(size)]
    told = [["from 1"] if rank == 1 else None]
    dist.broadcast_object_list(told, src=1)
    assert told == [["from 1"]]
    for call, words in (
        (lambda: dist.all_reduce(torch.ones(2, device="meta")), "moves dense tensors of the host"),
        (lambda: dist.recv(torch.ones(2)), "a rank that is named"),
    ):
        assert words in _refusal(call)
    if rank < 2:  # a message that is longer or shorter than what is expected
        tensor = torch.ones(3 if rank else 4)
        said = _refusal(lambda: dist.send(tensor, 0, tag=5) if rank else dist.recv(tensor, 1, tag=5))
        assert ("sent 12 bytes, where this one expects 16" in said) == (rank == 0)
    dist.barrier()


def _refusal(call: Callable[[], object]) -> str:
    """What a call raises, in words; `""` if it does not."""
    try:
        call()
    except CommError as error:
        return str(error)
    return ""


def _ddp(folder: Path, rank: int) -> None:
    """The same steps of DDP over this backend and over gloo."""
    states = {}
    for name, group in (("mpi4py", None), ("gloo", dist.new_group(backend="gloo"))):
        torch.manual_seed(0)
        model = DistributedDataParallel(_model(), process_group=group, bucket_cap_mb=0.01)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for batch in _batches(rank, 5):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        states[name] = [parameter.detach().clone() for parameter in model.parameters()]
    for ours, theirs in zip(states["mpi4py"], states["gloo"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def engines(folder: Path) -> None:
    """Losses, norms and parameters of several plans; whether they came by MPI or gloo is the environment's choice."""
    with sw.World.join(timeout_seconds=100) as world:
        every = world.everybody
        collectives = world.collectives(torch.device("cpu"))
        found: dict[str, Any] = {"transport": collectives.transport(every), "local_size": world.local_size}
        _messages(world)
        for preset in PRESETS:
            mesh = {"node": 2, "local": world.size // 2} if preset == "hsdp" else None
            torch.manual_seed(0)
            model = _model()
            plan = {"preset": preset, "clip_grad_norm": 0.5} | ({"mesh": mesh} if mesh else {})
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
                rows = []
                for batch in _batches(world.rank, 5):
                    loss = engine(batch).square().mean()
                    engine.backward(loss)
                    engine.step()
                    rows.append([engine.mean(loss.item()), engine.gradient_norm])
                found[preset] = [rows, [one.tolist() for one in engine.state_dict().values()]]
                if preset == "zero3":
                    engine.save(folder / "checkpoints", step=5)
    _tell(folder, world.rank, found)


def resumed(folder: Path) -> None:
    """The checkpoint of a job that another launcher has started."""
    with sw.World.join(timeout_seconds=100) as world:
        torch.manual_seed(1)
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with sw.shard(model, "zero1", optimizer=optimizer, world=world) as engine:
            engine.resume(folder / "checkpoints")
            _tell(folder, world.rank, [one.tolist() for one in engine.state_dict().values()])


def _messages(world: sw.World) -> None:
    """A long message in many pieces, links in another order, and all_to_all of unequal lengths."""
    collectives = world.collectives(torch.device("cpu"))
    transport = collectives._transport if hasattr(collectives, "_transport") else None
    if transport is not None and hasattr(transport, "_most_bytes"):
        transport._most_bytes = 1000
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    there = link_between("dp", world.rank, right, world.rank, "there")
    here = link_between("dp", left, world.rank, world.rank, "there")
    arrived = [torch.zeros(10_001, dtype=torch.float64) for _ in range(3)]
    works = [collectives.receive(one, here, "message") for one in arrived]
    given = [torch.full((10_001,), world.rank + i, dtype=torch.float64) for i in range(3)]
    works += [collectives.send(one, there, "message") for one in given]
    for work in works:
        work.wait()
    for i, one in enumerate(arrived):
        assert torch.equal(one, torch.full_like(one, left + i))
    sent = [torch.full((world.rank + 2 * taker,), world.rank, dtype=torch.bfloat16) for taker in range(world.size)]
    came = [torch.zeros(sender + 2 * world.rank, dtype=torch.bfloat16) for sender in range(world.size)]
    collectives.all_to_all(came, sent, world.everybody, "lengths").wait()
    for sender, one in enumerate(came):
        assert sender == world.rank or bool((one == sender).all())
    if transport is not None and hasattr(transport, "_most_bytes"):
        transport._most_bytes = 2**30


def faulty(folder: Path) -> None:
    """What FAULT says happens to rank 1 of a world that trains."""
    world = sw.World.join(timeout_seconds=100)
    torch.manual_seed(0)
    model = _model()
    engine = sw.shard(model, "zero3", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), world=world)
    for step, batch in enumerate(_batches(world.rank, 100_000)):
        if step == 3 and world.rank == 1:
            match os.environ["FAULT"]:
                case "raises":
                    raise ValueError("a bad batch")
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "exits":
                    sys.exit(7)
        if step == 3 and world.rank == 0:
            (folder / "trains").touch()
        engine.backward(engine(batch).square().mean())
        engine.step()


def absent(folder: Path) -> None:
    """A collective that one rank does not come to, within the group's timeout."""
    import shardwise.integrations.mpi  # noqa: F401

    dist.init_process_group("mpi4py", timeout=datetime.timedelta(seconds=2))
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(10))
    else:
        time.sleep(20)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 36), nn.Tanh(), nn.Linear(36, 5))


def _batches(rank: int, steps: int) -> Iterator[Tensor]:
    rng = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        yield torch.randn(6, 24, generator=rng)


def _tell(folder: Path, rank: int, found: Any) -> None:
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    job: Callable[[Path], None] = globals()[sys.argv[1]]
    job(Path(sys.argv[2]))
