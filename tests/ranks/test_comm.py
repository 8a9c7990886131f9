"""Collectives over pairwise messages and over shared memory: right at every size, with the same bits on every rank."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import shardwise as sw
from shardwise import testing
from shardwise.comm import Collectives, Group, Line, PostOffice, ThreadTransport, link_between
from shardwise.comm.small_messages import SHORT_MESSAGE_BYTES
from shardwise.comm.transport import staging
from shardwise.comm.transport.shm import neighbours
from shardwise.comm.transport.staging import StagingPool
from shardwise.comm.work import Work
from shardwise.errors import ConfigError, FaultError
from shardwise.plan.mesh import Mesh

Tensor = torch.Tensor
RunRanks = Callable[..., list[Any]]
SIZES = [1, 2, 3, 4, 8]
CHUNK = 48


@pytest.fixture(params=[True, False], ids=["shared", "sent"])
def run_ranks(request: pytest.FixtureRequest) -> RunRanks:
    return partial(testing.run_ranks, shares_memory=request.param)


def on_line(run_ranks: RunRanks, num_ranks: int, work: Callable[[Collectives, Group], Tensor]) -> list[Tensor]:
    def rank(world: sw.World) -> Tensor:
        return work(world.collectives(torch.device("cpu")), world.everybody)

    return run_ranks(num_ranks, rank)


def summand(rank: int, num_ranks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_ranks * CHUNK, generator=torch.Generator().manual_seed(rank)).to(dtype)


def total(num_ranks: int, dtype: torch.dtype) -> Tensor:
    return sum((summand(rank, num_ranks, dtype).double() for rank in range(num_ranks)), start=torch.zeros(()).double())


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_all_gather_in_place(run_ranks: RunRanks, num_ranks: int, dtype: torch.dtype) -> None:
    def gather(collectives: Collectives, group: Group) -> Tensor:
        full = torch.zeros(num_ranks * CHUNK, dtype=dtype)
        full.chunk(num_ranks)[group.index].fill_(group.index + 1)
        collectives.all_gather(full, group, "x").wait()
        return full

    for full in on_line(run_ranks, num_ranks, gather):
        assert torch.equal(full, torch.arange(1, num_ranks + 1).repeat_interleave(CHUNK).to(dtype))


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_reduce_scatter_sums_in_the_wide_dtype(
    run_ranks: RunRanks, num_ranks: int, source: torch.dtype, wire: torch.dtype
) -> None:
    def reduce(collectives: Collectives, group: Group) -> Tensor:
        out = torch.empty(CHUNK)
        collectives.reduce_scatter(out, summand(group.index, num_ranks, source), group, wire, "x").wait()
        return out

    reduced = torch.cat(on_line(run_ranks, num_ranks, reduce)).double()
    rounding = 1e-6 if torch.bfloat16 not in (source, wire) or source == wire else 2**-8 * num_ranks
    assert (reduced - total(num_ranks, source)).abs().max() <= rounding * 4


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [True, False])
def test_all_reduce_is_the_same_everywhere(
    run_ranks: RunRanks, num_ranks: int, wire: torch.dtype, in_place: bool
) -> None:
    def reduce(collectives: Collectives, group: Group) -> Tensor:
        source = summand(group.index, num_ranks)
        out = source if in_place else torch.empty_like(source)
        collectives.all_reduce(out, source, group, wire, "x").wait()
        return out

    results = on_line(run_ranks, num_ranks, reduce)
    assert all(torch.equal(result, results[0]) for result in results)
    tolerance = 1e-5 if wire == torch.float32 else 0.1
    assert (results[0].double() - total(num_ranks, torch.float32)).abs().max() <= tolerance


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bytes_count_for_each_rank_that_they_are_sent_to(run_ranks: RunRanks, num_ranks: int) -> None:
    def rank(world: sw.World) -> dict[str, int]:
        collectives, group = world.collectives(torch.device("cpu")), world.everybody
        full, own = torch.zeros(num_ranks * CHUNK), torch.zeros(CHUNK)
        collectives.ledger.clear()
        collectives.all_gather(full, group, "x").wait()
        collectives.reduce_scatter(own, full, group, torch.bfloat16, "x").wait()
        collectives.all_reduce(full, full, group, torch.float32, "x").wait()
        collectives.broadcast(own, 0, group, "x").wait()
        return {verb: num_bytes for (verb, _), num_bytes in collectives.ledger.sent_bytes.items()}

    chunk_bytes = (num_ranks - 1) * CHUNK * 4
    expected = {"gather": chunk_bytes, "reduce_scatter": chunk_bytes // 2, "all_reduce": 2 * chunk_bytes}
    first, *others = run_ranks(num_ranks, rank)
    assert first == {**expected, "broadcast": chunk_bytes}
    assert others == [expected] * (num_ranks - 1)


@pytest.mark.parametrize("sizes", [(3, 1), (2, 2), (0, 4, 1)])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_different_sizes_along_a_line(run_ranks: RunRanks, sizes: tuple[int, ...], dim: int) -> None:
    whole = torch.arange(7.0 * sum(sizes)).view(-1, 7).movedim(0, dim)
    num_ranks = len(sizes)

    def rank(world: sw.World) -> None:
        line = Line(world.collectives(torch.device("cpu")), world.everybody)
        own = whole.split_with_sizes(sizes, dim)[world.rank]
        assert torch.equal(line.concatenate(own, dim, sizes), whole)
        summed = line.sum_part(whole * (world.rank + 1), dim, sizes)
        assert torch.equal(summed, own * sum(range(1, num_ranks + 1)))

    run_ranks(num_ranks, rank)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_all_to_all_of_any_lengths(run_ranks: RunRanks, num_ranks: int) -> None:
    """Rank i sends i * j numbers to rank j; empty tensors are not sent."""

    def rank(world: sw.World) -> int:
        me, collectives = world.rank, world.collectives(torch.device("cpu"))
        sent = [torch.full((me * other,), float(10 * me + other)) for other in range(num_ranks)]
        arrived = [torch.zeros(other * me) for other in range(num_ranks)]
        collectives.all_to_all(arrived, sent, world.everybody, "x").wait()
        for other in range(num_ranks):
            expected = 10 * other + me if other != me else 0  # a rank's own part is left alone
            assert torch.equal(arrived[other], torch.full((other * me,), float(expected)))
        return sum(collectives.ledger.sent_bytes.values())

    for me, sent_bytes in enumerate(run_ranks(num_ranks, rank)):
        assert sent_bytes == 4 * me * (sum(range(num_ranks)) - me)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_broadcast_and_exchange(run_ranks: RunRanks, num_ranks: int) -> None:
    def rank(world: sw.World) -> None:
        tensor = torch.full((5,), float(world.rank))
        world.collectives(tensor.device).broadcast(tensor, num_ranks - 1, world.everybody, "x").wait()
        assert tensor.tolist() == [num_ranks - 1] * 5
        assert world.exchange(b"x" * world.rank) == [b"x" * other for other in range(num_ranks)]
        assert world.exchange(b"") == [b""] * num_ranks
        assert world.mean(float(world.rank)) == (num_ranks - 1) / 2
        assert world.any_rank(world.rank == 0)
        assert not world.any_rank(False)

    run_ranks(num_ranks, rank)


def test_messages_of_any_length_are_exchanged(run_ranks: RunRanks) -> None:
    """Short ones come with their length at once, longer ones in a second message."""
    lengths = [*range(SHORT_MESSAGE_BYTES - 10, SHORT_MESSAGE_BYTES + 3), 1000]

    def rank(world: sw.World) -> None:
        for length in lengths:
            for longest in range(2):
                said = [bytes([65 + place]) * (length if place == longest else 3) for place in range(2)]
                assert world.exchange(said[world.rank]) == said

    run_ranks(2, rank)


def test_messages_of_a_link_arrive_in_the_order_of_sending(run_ranks: RunRanks) -> None:
    """In both directions at once, of any length and dtype, with many sends before the first receive. A tensor may be
    changed once its send was waited for."""
    lengths = [5, 1, 40_000, 0, 7, 40_000, 40_000, 40_000, 3]

    def message(sender: int, number: int) -> Tensor:
        drawn = torch.Generator().manual_seed(10 * sender + number)
        return torch.randn(lengths[number], generator=drawn).to(torch.bfloat16 if number % 2 else torch.float32)

    def rank(world: sw.World) -> bool:
        collectives, other = world.collectives(torch.device("cpu")), 1 - world.rank
        there = link_between("pp", world.rank, other, world.rank, f"{world.rank}>{other}")
        back = link_between("pp", other, world.rank, world.rank, f"{other}>{world.rank}")
        sent = [message(world.rank, number) for number in range(len(lengths))]
        leaving = [collectives.send(tensor, there, "activation") for tensor in sent]
        arrived = [torch.empty_like(message(other, number)) for number in range(len(lengths))]
        coming = [collectives.receive(tensor, back, "activation") for tensor in arrived]
        for work in coming + leaving:
            work.wait()
        for tensor in sent:
            tensor.fill_(-1)
        world.barrier()
        assert collectives.ledger.sent_bytes["send", there.axis] == sum(tensor.nbytes for tensor in sent)
        return all(torch.equal(tensor, message(other, number)) for number, tensor in enumerate(arrived))

    assert run_ranks(2, rank) == [True, True]


def test_messages_of_a_link_go_through_the_memory_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 are on one host, 2 and 3 on another: only messages between hosts use the transport."""

    def host() -> str:
        return "ab"[int(threading.current_thread().name.removeprefix("rank ")) // 2]

    posted: set[tuple[int, int]] = set()
    post = ThreadTransport.send

    def send(self: ThreadTransport, tensor: Tensor, rank: int, tag: int) -> Any:
        if tensor.dtype == torch.float64:
            posted.add((self._rank, rank))
        return post(self, tensor, rank, tag)

    monkeypatch.setattr(neighbours, "host_identity", host)
    monkeypatch.setattr(ThreadTransport, "send", send)

    def rank(world: sw.World) -> None:
        for source, target in ((0, 1), (1, 2), (3, 2)):
            link = link_between("pp", source, target, world.rank, f"{source}>{target}")
            tensor = torch.full((3,), float(world.rank), dtype=torch.float64)
            if world.rank == source:
                world.collectives(torch.device("cpu")).send(tensor, link, "activation").wait()
            elif world.rank == target:
                world.collectives(torch.device("cpu")).receive(tensor, link, "activation").wait()
                assert tensor.tolist() == [source] * 3

    testing.run_ranks(4, rank)
    assert posted == {(1, 2)}


def test_nothing_travels_as_nothing(run_ranks: RunRanks) -> None:
    def rank(world: sw.World) -> int:
        collectives, nothing = world.collectives(torch.device("cpu")), torch.zeros(0)
        collectives.all_gather(nothing, world.everybody, "x").wait()
        collectives.reduce_scatter(nothing, torch.zeros(0), world.everybody, torch.float32, "x").wait()
        collectives.all_reduce(nothing, nothing, world.everybody, torch.bfloat16, "x").wait()
        collectives.broadcast(nothing, 1, world.everybody, "x").wait()
        world.barrier()
        return nothing.numel()

    assert run_ranks(3, rank) == [0, 0, 0]


def test_lines_of_a_mesh_do_not_mix(run_ranks: RunRanks) -> None:
    mesh = Mesh.of({"node": 2, "local": 3}, 6)

    def rank(world: sw.World) -> tuple[list[float], list[float]]:
        collectives = world.collectives(torch.device("cpu"))
        sums = []
        for axis in mesh.axes:
            group = world.group(mesh, axis)
            tensor = torch.full((6,), float(world.rank))
            collectives.all_reduce(tensor, tensor, group, torch.float32, "x").wait()
            sums.append(tensor[:1].tolist())
        return sums[0], sums[1]

    for index, (over_node, over_local) in enumerate(run_ranks(6, rank)):
        assert over_node == [2 * (index % 3) + 3]
        assert over_local == [3.0 if index < 3 else 12.0]


def test_a_message_that_never_comes_is_an_error(run_ranks: RunRanks) -> None:
    def rank(world: sw.World) -> None:
        if world.rank == 0:
            world.barrier()

    with pytest.raises(FaultError, match="Rank 1 has ended") as raised:
        run_ranks(2, rank, patience_seconds=0.2)
    assert raised.value.kind == "ended"
    assert raised.value.ranks == (1,)


def test_a_mesh_must_fit() -> None:
    with pytest.raises(ConfigError, match="makes 6 ranks, but the world has 4"):
        Mesh.of({"node": 2, "local": 3}, 4)


def test_staging_is_used_again_and_takes_little_memory_meanwhile() -> None:
    pool = StagingPool()
    num_large = staging._KEPT_BYTES // 8
    with torch.inference_mode():
        first, large = pool.take(3, 5, torch.float32), pool.take(1, num_large, torch.float32)
    first.chunks[2].fill_(1.0)  # as a training step after an evaluation
    other, last = pool.take(3, 5, torch.float32), pool.take(1, num_large, torch.float32)
    assert other is not first, "two sums may be under way at once"
    for one in (first, large, last):
        pool.give_back(one)
    assert [one.chunks[0].untyped_storage().nbytes() for one in (first, large, last)] == [3 * 5 * 4, num_large * 4, 0]
    assert pool.take(3, 5, torch.bfloat16) is not first
    assert pool.take(3, 5, torch.float32) is first
    for one in (last, large):
        assert pool.take(1, num_large, torch.float32) is one
        assert one.chunks[0].untyped_storage().nbytes() == num_large * 4
    assert pool._kept_bytes == 0
    for number in range(1000):  # of activations, for example
        pool.give_back(pool.take(1, number, torch.float32))
    assert pool._num_unused <= 256
    assert pool._kept_bytes <= staging._KEPT_BYTES


@pytest.mark.parametrize("hosts", ["abc", "aabb"])
def test_ranks_post_what_they_send_before_what_they_receive(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """See [Note: sends before receives]. Sums over hosts of several ranks are made before they can be sent."""
    posted: dict[tuple[int, int], list[str]] = defaultdict(list)

    def noting(verb: str) -> None:
        plain = getattr(ThreadTransport, verb)

        def note(self: ThreadTransport, tensor: Tensor, rank: int, tag: int) -> Work:
            posted[self._rank, tag].append(verb)
            work: Work = plain(self, tensor, rank, tag)
            return work

        monkeypatch.setattr(ThreadTransport, verb, note)

    noting("send")
    noting("receive")
    num_ranks = len(hosts)

    def rank(world: sw.World) -> None:
        comm, group = world.collectives(torch.device("cpu")), world.everybody
        full, part = torch.zeros(num_ranks * 4), torch.zeros(4)
        comm.all_gather(full, group, "x").wait()
        comm.all_to_all([torch.empty(4) for _ in hosts], [part for _ in hosts], group, "x").wait()
        if hosts == "abc":
            comm.reduce_scatter(part, full, group, torch.float32, "x").wait()
            comm.all_reduce(full, full, group, torch.float32, "x").wait()

    testing.run_ranks(num_ranks, rank, hosts=hosts)
    assert len(posted) >= 2 * num_ranks
    for verbs in posted.values():
        assert verbs == sorted(verbs, reverse=True)


class _Seen(TorchFunctionMode):
    """Looks at what is called inside, as checks of a model's forward do."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shares_memory", [True, False])
def test_who_looks_at_a_forward_sees_no_calls_of_collectives_in_it(shares_memory: bool) -> None:
    """They cut and join tensors as models do, and so would be taken for mixing tokens, or features of other ranks."""

    def rank(world: sw.World) -> list[Any]:
        line = Line(world.collectives(torch.device("cpu")), world.everybody)
        numbers, two_rows, shapes = torch.ones(5), torch.ones(2, 64), 2 * [torch.Size([5])]
        with _Seen() as seen:
            line.sum(numbers)
            line.concatenate(two_rows, 1, [64, 64])
            line.sum_part(two_rows, 1, [32, 32])
            line.largest(numbers)
            line.deal([numbers, numbers], shapes)
            line.pass_on(numbers).wait()
            line.all_same(b"word")
            world.any_rank(False)
        assert seen.called == []
        with seen:
            numbers.sum()
        return seen.called

    assert [len(called) for called in testing.run_ranks(2, rank, shares_memory=shares_memory)] == [1, 1]


def test_a_queue_of_threads_is_deleted_before_a_message_is_put_or_not_at_all() -> None:
    """A receiver that has emptied it deletes it, perhaps while the sender has found it and copies its message."""
    office = PostOffice()
    route = (0, 1, 7)

    class Sent:
        def detach(self) -> Tensor:
            office.drop(route)
            return torch.ones(1)

    sent: Any = Sent()
    ThreadTransport(office, 0).send(sent, 1, 7)
    assert office.box(route).qsize() == 1
