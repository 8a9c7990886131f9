"""Collectives made of messages between pairs of ranks: in place, and summed in the wider dtype.

gloo has no reduce-scatter (it does a whole all-reduce and discards most of it), and its all-gather copies twice; built
from point-to-point messages they take a third of the time. Each pair exchanges one message, so a rank sends as much as
in a ring, in one round instead of one per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from shardwise.comm.collectives import Lines, Tensor
from shardwise.comm.group import Group
from shardwise.comm.mixed_sums import add_up, as_sent, keep_sent
from shardwise.comm.shared_buffers import Part
from shardwise.comm.small_messages import exchange
from shardwise.comm.transport.staging import StagingPool
from shardwise.comm.watch.journal import Awaited, Entry, Journal
from shardwise.comm.work import Done, LinkError, Pending, Work
from shardwise.plan.mesh import Mesh
from shardwise.system.telemetry import Ledger


class Transport(Protocol):
    """Messages between two ranks. Messages with equal tags are matched; one that is sent keeps its tensor until waited
    for.

    All methods, and the works that they return, raise `LinkError`.
    """

    name: str
    """Its name for people."""

    def send(self, tensor: Tensor, rank: int, tag: int) -> Work: ...

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Work: ...

    def lost_ranks(self) -> Collection[int]:
        """Ranks whose link is closed at the other end, as far as that shows without sending. From any thread."""
        ...

    def closed_ranks(self) -> Collection[int]:
        """The same, and ranks whose link was closed at this end because it broke. From any thread."""
        ...

    def end_lost_waits(self) -> None:
        """End waits for ranks whose link is closed, should any go on. From any thread, several times a second."""
        ...

    def abort(self) -> None:
        """End every wait of this rank, now and from now on. From any thread."""
        ...

    def close(self) -> None: ...


class Nobody:
    """The transport of a world of one."""

    name = "nothing"

    def send(self, tensor: Tensor, rank: int, tag: int) -> Work:  # noqa: ARG002
        return Done()

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Work:  # noqa: ARG002
        return Done()

    def lost_ranks(self) -> tuple[int, ...]:
        return ()

    def closed_ranks(self) -> tuple[int, ...]:
        return ()

    def end_lost_waits(self) -> None:
        return

    def watch_peers(self, rank: int, exchange: Callable[[bytes], list[bytes]]) -> None:
        """There are no other ranks."""

    def abort(self) -> None:
        return

    def close(self) -> None:
        return


class Pairwise:
    """A `Communicator` over any `Transport`."""

    is_buffer_scarce = False
    is_host = True

    def __init__(self, transport: Transport, journal: Journal) -> None:
        self.ledger = Ledger()
        self.journal = journal
        self._transport = transport
        self._staging = StagingPool()

    def all_gather(self, full: Tensor, group: Group, subject: str, chunks: Sequence[Tensor] | None = None) -> Work:
        self.ledger.called("gather", group.axis)
        return self._gather("gather", full, group, subject, chunks)

    def reduce_scatter(
        self,
        out: Tensor,
        source: Tensor,
        group: Group,
        wire: torch.dtype,
        subject: str,
        chunks: Sequence[Tensor] | None = None,
    ) -> Work:
        self.ledger.called("reduce_scatter", group.axis)
        entry = self.journal.enter("reduce_scatter", group, source.numel(), wire, subject)
        chunks = chunks or source.chunk(len(group.ranks))
        self._count("reduce_scatter", group, chunks[group.index].numel() * wire.itemsize)
        return self._posted(
            entry, group, source.nbytes, lambda: self._scatter_sums(out, chunks, group, wire, entry.tag)
        )

    def all_reduce(self, out: Tensor, source: Tensor, group: Group, wire: torch.dtype, subject: str) -> Work:
        """[Note: sums of two] Two ranks send each other all that they have: as many bytes as if each summed one half
        and sent it back, in one round instead of two, and half the messages, which are what gloo's threads pay for. A
        sum of two is the same in both orders. Where elements are rounded to be sent, the two would round other
        summands.
        """
        self.ledger.called("all_reduce", group.axis)
        entry = self.journal.enter("all_reduce", group, source.numel(), wire, subject)
        tag = entry.tag
        if len(group.ranks) == 2 and source.dtype == out.dtype == wire:
            self._count("all_reduce", group, source.nbytes)
            both = [source, source]
            return self._posted(entry, group, out.nbytes, lambda: self._scatter_sums(out, both, group, wire, tag))
        chunks = out.chunk(len(group.ranks))
        own = chunks[group.index]

        def give_back() -> None:
            sums = as_sent(chunks, group.index, wire)
            Pending(self._swap(group, [sums[group.index]] * len(chunks), sums, tag ^ 1)).wait()
            keep_sent(chunks, sums)

        def post() -> Work:
            partly = self._scatter_sums(own, source.chunk(len(chunks)), group, wire, tag)
            return Pending([partly], give_back)

        self._count("all_reduce", group, 2 * own.numel() * wire.itemsize)
        return self._posted(entry, group, out.nbytes, post)

    def all_to_all(self, arrived: Sequence[Tensor], sent: Sequence[Tensor], group: Group, subject: str) -> Work:
        self.ledger.called("all_to_all", group.axis)
        entry = self.journal.enter("all_to_all", group, 0, sent[0].dtype, subject)  # lengths differ per pair
        tag = entry.tag
        works = [self._send(sent[i], rank, tag) for i, rank in group.others if sent[i].numel()]
        works += [self._receive(arrived[i], rank, tag) for i, rank in group.others if arrived[i].numel()]
        self.ledger.sent("all_to_all", group.axis, sum(sent[i].nbytes for i, _ in group.others))
        return Awaited(self.journal, entry, Pending(works))

    def broadcast(self, tensor: Tensor, root: int, group: Group, subject: str) -> Work:
        self.ledger.called("broadcast", group.axis)
        entry = self.journal.enter("broadcast", group, tensor.numel(), tensor.dtype, subject)
        me = group.ranks[group.index]
        works = []
        if me != root:
            works.append(self._receive(tensor, root, entry.tag))
        else:
            self._count("broadcast", group, tensor.nbytes)
            works += [self._send(tensor, rank, entry.tag) for rank in group.ranks if rank != root]
        return Awaited(self.journal, entry, Pending(works))

    def send(self, tensor: Tensor, link: Group, subject: str) -> Work:
        self.ledger.called("send", link.axis)
        entry = self.journal.enter("message", link, tensor.numel(), tensor.dtype, subject)
        self.ledger.sent("send", link.axis, tensor.nbytes)
        return Awaited(self.journal, entry, self._send(tensor, link.ranks[1], entry.tag))

    def receive(self, tensor: Tensor, link: Group, subject: str) -> Work:
        self.ledger.called("receive", link.axis)
        entry = self.journal.enter("message", link, tensor.numel(), tensor.dtype, subject)
        return Awaited(self.journal, entry, self._receive(tensor, link.ranks[0], entry.tag))

    def exchange(self, message: bytes, group: Group, subject: str) -> list[bytes]:
        return exchange(message, group, lambda full: self._gather("exchange", full, group, subject).wait())

    def reads_own_apart(self, group: Group) -> bool:  # noqa: ARG002
        return False

    def overlaps_compute(self, group: Group) -> bool:  # noqa: ARG002
        return False  # ranks of one host, whose processors do the copying and the sums

    def prepare(self, mesh: Mesh) -> None:
        """Pairs need no groups."""

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")

    def reclaim(self, tensor: Tensor) -> None:
        """What was sent has been copied."""

    def synchronize(self) -> None:
        """A wait returns when it is there, or raises."""

    def rest(self, *, keeps_some: bool) -> None:
        """Nothing is kept."""

    def shared_buffers(self, group: Group, parts: Sequence[Part], lines: Lines) -> None:
        """Pairs share no memory."""

    def is_on_one_host(self, ranks: Sequence[int]) -> bool:  # noqa: ARG002
        """Whether these ranks of the world share memory; called on hosts where some do."""
        return True

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()  # nothing is launched

    def transport(self, group: Group) -> str:  # noqa: ARG002
        return self._transport.name

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _gather(
        self, verb: str, full: Tensor, group: Group, subject: str, chunks: Sequence[Tensor] | None = None
    ) -> Work:
        entry = self.journal.enter(verb, group, full.numel(), full.dtype, subject)
        chunks = chunks or full.chunk(len(group.ranks))
        self._count(verb, group, full.nbytes // len(chunks))
        own = [chunks[group.index]] * len(chunks)
        return self._posted(entry, group, full.nbytes, lambda: Pending(self._swap(group, own, chunks, entry.tag)))

    def _scatter_sums(self, out: Tensor, chunks: Sequence[Tensor], group: Group, wire: torch.dtype, tag: int) -> Work:
        """Every rank sends each other rank the chunk that it sums; sums run in the order of the group. Raises
        `LinkError`."""
        own = chunks[group.index]
        if len(chunks) == 1:
            out.copy_(own)
            return Done()
        sent = chunks
        if own.dtype != wire:
            sent = [chunk.to(wire) if index != group.index else chunk for index, chunk in enumerate(chunks)]
        staging = self._staging.take(len(chunks) - 1, own.numel(), wire)
        arrived = list(staging.chunks)
        arrived.insert(group.index, own)
        messages = self._swap(group, sent, arrived, tag)

        def finish() -> None:
            add_up(out, arrived, group.index)
            arrived.clear()
            self._staging.give_back(staging)

        return Pending(messages, finish)

    def _swap(self, group: Group, sent: Sequence[Tensor], arrived: Sequence[Tensor], tag: int) -> list[Work]:
        """Send `sent[i]` to, and receive `arrived[i]` from, every other rank `i` of the group. Raises `LinkError`.

        Each rank begins with its right-hand neighbour, so that not all ranks send to the same one at once.

        [Note: sends before receives] If the other rank has posted its receive already, gloo (torch 2.13) writes a
        message from the thread that posts it, which holds the connection's lock meanwhile. Its own thread, woken by
        what the other rank sends at that time, does not wait for the lock, but polls until it is free, and takes the
        writer's core where there are no others. A rank that posts its message first is not sent anything before it
        has been written, or is being written by gloo's thread. Eight sums of 1.3 MB on two ranks and two cores, beside
        a load of 10, take 7.7 ms of processor time instead of 14.3 (medians of 12), gloo's own all-reduces 4.5.
        """
        send, receive = self._transport.send, self._transport.receive
        leaving = [send(sent[index], rank, tag) for index, rank in group.others]
        arriving = [receive(arrived[index], rank, tag) for index, rank in group.others]
        return arriving + leaving

    def _posted(self, entry: Entry, group: Group, num_bytes: int, post: Callable[[], Work]) -> Work:  # noqa: ARG002
        """Begin a collective of a tensor of `num_bytes`. `post` posts its first messages, in the thread that calls it,
        and raises `LinkError`."""
        try:
            return Awaited(self.journal, entry, post())
        except LinkError as error:
            raise self.journal.failure(error) from error

    def _count(self, verb: str, group: Group, num_bytes: int) -> None:
        """Count `num_bytes` to each of the other ranks."""
        self.ledger.sent(verb, group.axis, len(group.others) * num_bytes)

    def _send(self, tensor: Tensor, rank: int, tag: int) -> Work:
        try:
            return self._transport.send(tensor, rank, tag)
        except LinkError as error:
            raise self.journal.failure(error) from error

    def _receive(self, tensor: Tensor, rank: int, tag: int) -> Work:
        try:
            return self._transport.receive(tensor, rank, tag)
        except LinkError as error:
            raise self.journal.failure(error) from error
