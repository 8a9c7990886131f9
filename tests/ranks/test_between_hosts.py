"""Ranks on several hosts: ranks of one host read each other's data in place, data for other hosts crosses the network
once, and results are the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_codes import INT4, INT8, twin_run
from twins import assert_same, batches, engine_step, plain_run, sharded_run

import shardwise as sw
from shardwise.comm import Collectives, Group, ThreadTransport
from shardwise.comm.host_layout import OnHosts
from shardwise.comm.transport.shm.file import is_possible
from shardwise.comm.work import Work
from shardwise.errors import FaultError
from shardwise.program import crossing_bytes, sent_by_hosts
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer
from tests.patience import PATIENCE
from tests.thorough import sampled

Tensor = torch.Tensor
pytestmark = [sampled, pytest.mark.skipif(not is_possible(), reason="this system has no memfd")]
HOSTS = ["aabb", "abab", "aaab", "baab", "aabbcc", "aaabb", "abc"]
CHUNK = 40
CPU = torch.device("cpu")


def summand(rank: int, num_ranks: int) -> Tensor:
    """Integers, so that sums are exact in any order."""
    return torch.randint(-50, 50, (num_ranks * CHUNK,), generator=torch.Generator().manual_seed(rank)).float()


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("lies_open", [True, False], ids=["lent", "copied"])
def test_every_verb_on_every_layout(hosts: str, lies_open: bool) -> None:
    """Collectives that start together, and are waited for in a different order on each rank, have the right results."""
    num_ranks = len(hosts)
    total = sum((summand(rank, num_ranks) for rank in range(num_ranks)), start=torch.zeros(num_ranks * CHUNK))
    whole = torch.arange(num_ranks).repeat_interleave(CHUNK).float()

    def rank(world: sw.World) -> dict[tuple[str, str], int]:
        comm, group, me = world.collectives(CPU), world.everybody, world.rank

        def memory(values: Tensor) -> Tensor:
            return (comm.buffer(values.numel(), values.dtype) if lies_open else torch.empty_like(values)).copy_(values)

        full = memory(torch.where(whole == me, whole, -1))
        apart, everywhere = torch.empty(CHUNK), memory(summand(me, num_ranks))
        in_place = memory(summand(me, num_ranks))
        own = in_place.chunk(num_ranks)[me]
        narrow = torch.empty(num_ranks * CHUNK)
        told = torch.full((CHUNK,), float(me))
        given = [torch.full((2 + place,), float(10 * me + place)) for place in range(num_ranks)]
        dealt = [torch.zeros(2 + me) for _ in range(num_ranks)]
        works = [
            comm.all_gather(full, group, "full"),
            comm.reduce_scatter(apart, memory(summand(me, num_ranks)), group, torch.float32, "apart"),
            comm.reduce_scatter(own, in_place, group, torch.float32, "in place"),
            comm.all_reduce(everywhere, everywhere, group, torch.float32, "everywhere"),
            comm.all_reduce(narrow, memory(summand(me, num_ranks)), group, torch.bfloat16, "narrow"),
            comm.broadcast(told, num_ranks - 1, group, "told"),
            comm.all_to_all(dealt, given, group, "dealt"),
        ]
        for work in works[me % len(works) :] + works[: me % len(works)]:
            work.wait()
        assert torch.equal(full, whole)
        assert torch.equal(apart, total.chunk(num_ranks)[me])
        assert torch.equal(own, apart)
        assert torch.equal(everywhere, total)
        assert torch.equal(told, torch.full((CHUNK,), num_ranks - 1.0))
        assert all((one == 10 * place + me).all() for place, one in enumerate(dealt) if place != me)
        assert world.exchange(str(me).encode() * 40) == [str(place).encode() * 40 for place in range(num_ranks)]
        rounded = total.bfloat16().float()
        assert (narrow - rounded).abs().max() <= rounded.abs().max() * 2**-7
        every = world.exchange(narrow.numpy().tobytes())
        assert all(one == every[0] for one in every)
        return dict(comm.ledger.crossed_bytes)

    crossed = run_ranks(num_ranks, rank, hosts=list(hosts))
    num_hosts = len(set(hosts))
    for host in set(hosts):
        near = [place for place, name in enumerate(hosts) if name == host]
        chunk_bytes = CHUNK * 4
        for verb, times in (("gather", 1), ("reduce_scatter", 2), ("all_reduce", 1.5)):
            left = sum(crossed[place][verb, "world"] for place in near)
            assert left == times * crossing_bytes(verb, chunk_bytes, len(near), num_ranks, num_hosts)


def test_one_copy_crosses() -> None:
    """Per collective, each of two hosts sends half of the tensor (all-reduce: all of it), however many ranks it has."""
    for num_local in (1, 2, 4, 8):
        num_ranks = 2 * num_local
        whole = 64 * num_ranks
        assert crossing_bytes("gather", 64, num_local, num_ranks, 2) == whole // 2
        assert crossing_bytes("reduce_scatter", 64, num_local, num_ranks, 2) == whole // 2
        assert crossing_bytes("all_reduce", 64, num_local, num_ranks, 2) == whole <= 2 * whole * (num_ranks - 1) / 2


@pytest.mark.parametrize("hosts", [*HOSTS, "abbbbcccd"])
def test_each_far_chunk_has_one_carrier(hosts: str) -> None:
    numbers = [hosts.index(host) for host in hosts]
    views = [OnHosts(range(len(hosts)), own, numbers) for own in range(len(hosts))]
    for place, host in enumerate(hosts):
        others = [view for view in views if hosts[view.own] != host]
        carriers = [view.own for view in others if place in view.carried]
        assert sorted(hosts[own] for own in carriers) == sorted(set(hosts) - {host})
        assert sorted(views[place].partners) == sorted(carriers)


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaab"])
@pytest.mark.parametrize("preset", ["zero3", "zero2", "ddp", "hsdp", "zero1", "hpz"])
def test_training_is_the_plain_model_s(model: Transformer, preset: str, hosts: str) -> None:
    """Training equals the plain model's, and exactly the predicted bytes are sent between hosts."""
    data = batches(4)
    mesh = {"node": 2, "local": 2} if preset in ("hsdp", "hpz") else None

    def step(engine: sw.Engine, optimizer: Any, batch: Any) -> Tensor:
        ledger = inside.ledger(engine)
        before = dict(ledger.crossed_bytes)
        loss = engine_step(engine, optimizer, batch)
        after = ledger.crossed_bytes
        steps.setdefault(engine.world.rank, []).append(
            sum(
                after[key] - before.get(key, 0) for key in after if key[0] in ("gather", "reduce_scatter", "all_reduce")
            )
        )
        return loss

    def promised(engine: sw.Engine) -> dict[str, Any]:
        program = inside.program(engine)
        return {"promised": program.sent_by_hosts(engine.mesh, 2)}

    steps: dict[int, list[int]] = {}
    run = sharded_run(model, data, preset, 4, mesh, step=step, after=promised, hosts=list(hosts))
    assert_same(run, plain_run(model, data))
    if hosts == "aabb":
        for host, sent in enumerate(run.extra["promised"]):
            assert steps[2 * host][-1] + steps[2 * host + 1][-1] == sent


@sampled
@pytest.mark.parametrize(
    ("preset", "hosts", "mesh", "wire"),
    [
        ("zero2", "aabb", None, {"param": INT8, "grad": INT4}),
        ("zero3", "aabb", {"node": 2, "local": 2}, {"param": INT8, "grad": INT4}),
        ("ddp", "aabb", None, {"grad": INT4}),
        ("ddp", "aaabbb", None, {"grad": INT8}),
    ],
    ids=["zero2", "zero3-2x2", "ddp", "ddp-in-halves"],
)
def test_codes_between_hosts(model: Transformer, preset: str, hosts: str, mesh: Any, wire: dict[str, Any]) -> None:
    """Values are nearly the twin's: a host sums what is sent whole before others do, and where that rounds otherwise,
    so may a code. As many bytes leave each host as predicted."""
    data, size = batches(3, rows=12), len(hosts) // 2
    sent: dict[int, int] = {}

    def step(engine: sw.Engine, optimizer: Any, batch: Any) -> Tensor:
        ledger = inside.ledger(engine)
        verbs = ("gather", "reduce_scatter", "all_reduce", "all_to_all")
        before = sum(value for key, value in ledger.crossed_bytes.items() if key[0] in verbs)
        loss = engine_step(engine, optimizer, batch)
        after = sum(value for key, value in ledger.crossed_bytes.items() if key[0] in verbs)
        sent[engine.world.rank] = after - before
        return loss

    def promised(engine: sw.Engine) -> dict[str, Any]:
        return {"promised": inside.program(engine).sent_by_hosts(engine.mesh, size)}

    run = sharded_run(model, data, preset, len(hosts), mesh, step=step, after=promised, hosts=list(hosts), wire=wire)
    twin = twin_run(model, data, len(hosts), wire, num_near=2 if mesh else 1)
    assert_same(run, twin, loss=1e-5, norm=1e-4, param=1e-3)
    on_hosts = [sum(sent[rank] for rank in range(first, first + size)) for first in (0, size)]
    assert on_hosts == run.extra["promised"]


def test_a_mesh_over_hosts_prices_each_axis() -> None:
    from shardwise.plan.mesh import Mesh
    from shardwise.program import Action

    mesh = Mesh.of({"node": 2, "local": 2}, 4)
    near = Action("gather", "u", "param", "local", "fp32", 64)
    far = Action("all_reduce", "u", "grad", "node", "fp32", 128)
    assert sent_by_hosts([near], mesh, 2) == [0, 0]
    assert sent_by_hosts([far], mesh, 2) == [256, 256]  # two lines, each rank sends its half twice
    assert sent_by_hosts([near, far], mesh, 1) == [64 + 128] * 4
    assert sent_by_hosts([near, far], mesh, 4) == [0]


def test_a_rank_that_is_gone_ends_what_goes_on_beside() -> None:
    """Threads that forward data for other ranks raise where they are waited for, and all of them end."""
    before = set(threading.enumerate())

    def rank(world: sw.World) -> None:
        comm, group = world.collectives(CPU), world.everybody
        if world.rank == 3:
            world.exchange(b"here")
            raise ValueError("the last one leaves")
        full = torch.zeros(4 * 65_536)
        world.exchange(b"here")
        comm.all_reduce(full, full, group, torch.float32, "sums").wait()

    with pytest.raises((FaultError, ValueError), match="the last one leaves"):
        run_ranks(4, rank, hosts=list("aabb"), patience_seconds=0.2)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("wire", "sent"), [(torch.float32, [65_537 * 4]), (torch.bfloat16, [32_769 * 2, 32_769 * 2])])
def test_two_ranks_send_each_other_all_that_they_sum(
    wire: torch.dtype, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """See [Note: sums of two] in `pairwise.py`, and [Note: who posts] in `background.py`."""
    posted: dict[int, list[tuple[int, str]]] = {0: [], 1: []}
    plain = ThreadTransport.send

    def note(self: ThreadTransport, tensor: Tensor, rank: int, tag: int) -> Work:
        if tensor.nbytes > 1000:
            posted[self._rank].append((tensor.nbytes, threading.current_thread().name))
        work: Work = plain(self, tensor, rank, tag)
        return work

    monkeypatch.setattr(ThreadTransport, "send", note)
    numel = 65_537 + (wire == torch.bfloat16)

    def rank(world: sw.World) -> Tensor:
        source = torch.linspace(world.rank, 1.0, numel)
        out = source if world.rank else torch.empty_like(source)
        world.collectives(CPU).all_reduce(out, source, world.everybody, wire, "sums").wait()
        return out

    group = Group("world", (0, 1), 0)
    first, second = run_ranks(2, rank, hosts=list("ab"))
    assert torch.equal(first, second)
    if wire == torch.float32:
        assert torch.equal(first, torch.linspace(0.0, 1.0, numel) + torch.linspace(1.0, 1.0, numel))
    for me, messages in posted.items():
        assert [num_bytes for num_bytes, _ in messages] == sent
        assert messages[0][1] == f"shardwise-{me} {group.name}, posts"


@pytest.mark.parametrize("numel", [65_536, 64])
def test_another_thread_posts_what_is_large(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """See [Note: who posts] in `background.py`."""
    threads: set[str] = set()
    plain = ThreadTransport.send

    def note(self: ThreadTransport, tensor: Tensor, rank: int, tag: int) -> Work:
        if notes.is_set():
            threads.add(threading.current_thread().name)
        work: Work = plain(self, tensor, rank, tag)
        return work

    monkeypatch.setattr(ThreadTransport, "send", note)
    notes = threading.Event()

    def rank(world: sw.World) -> tuple[Tensor, Tensor]:
        comm, group = world.collectives(CPU), world.everybody
        full, part = torch.zeros(numel), torch.empty(numel // 2)
        full[world.rank * numel // 2 :][: numel // 2] = world.rank + 1.0
        world.barrier()
        notes.set()
        comm.all_gather(full, group, "x").wait()
        comm.reduce_scatter(part, full, group, torch.float32, "x").wait()
        notes.clear()
        return full, part

    expected = torch.tensor([1.0, 2.0]).repeat_interleave(numel // 2)
    for index, (full, part) in enumerate(run_ranks(2, rank, hosts=list("ab"))):
        assert torch.equal(full, expected)
        assert (part == 2 * (index + 1)).all()
    name = Group("world", (0, 1), 0).name
    by_others = {f"shardwise-{rank} {name}, posts" for rank in range(2)}
    assert threads == by_others if numel > 64 else not threads & by_others


def test_lines_do_not_wait_for_each_other() -> None:
    """A sum that waits for a missing rank on one line does not block sums on another line."""
    late = threading.Event()

    def rank(world: sw.World) -> Tensor:
        comm: Collectives = world.collectives(CPU)
        pair = Group("pair", (0, 2), (0, 2).index(world.rank)) if world.rank in (0, 2) else None
        sums = torch.full((4 * 20_000,), world.rank + 1.0)
        if world.rank == 3:
            assert late.wait(PATIENCE)
        work = comm.all_reduce(sums, sums, world.everybody, torch.float32, "all")
        if pair is not None:
            both = torch.full((2 * 20_000,), world.rank + 1.0)
            comm.all_reduce(both, both, pair, torch.float32, "pair").wait()
            assert (both == 4).all()
            if world.rank == 2:
                late.set()
        work.wait()
        return sums

    found: Sequence[Tensor] = run_ranks(4, rank, hosts=list("aabb"))
    assert all((sums == 10).all() for sums in found)
