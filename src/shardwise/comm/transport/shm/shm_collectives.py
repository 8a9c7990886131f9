"""Collectives in which ranks of one host read each other's memory in place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext

import torch

from shardwise.comm.collectives import Lines, Tensor
from shardwise.comm.group import Group
from shardwise.comm.mixed_sums import add_to
from shardwise.comm.shared_buffers import Part
from shardwise.comm.small_messages import exchange
from shardwise.comm.transport.pairwise import Pairwise
from shardwise.comm.transport.shm.buffers import MappedBuffers
from shardwise.comm.transport.shm.file import SharedFile
from shardwise.comm.transport.shm.neighbours import Neighbours, copy_into
from shardwise.comm.watch.journal import Awaited, Entry, Journal
from shardwise.comm.work import Done, Pending, Work
from shardwise.plan.mesh import Mesh
from shardwise.system.telemetry import Ledger

_ONE_ROUND_BYTES = 1 << 17
"""Up to which a sum of two in one round takes less than in two, of which each reads half as much: half the calls."""


class Shared:
    """A `Communicator` between neighbours; groups that reach beyond this host go by `pairs`.

    What a rank contributes is in a block that the others read: memory from `buffer` is there already, anything else is
    copied once. What it receives it copies, or sums, straight from their blocks.
    """

    is_host = True
    is_buffer_scarce = True  # pages of a file are slow to create, so few are used over and over

    def __init__(self, neighbours: Neighbours, pairs: Pairwise) -> None:
        self._neighbours = neighbours
        self._pairs = pairs
        self.journal: Journal = pairs.journal
        self.ledger: Ledger = pairs.ledger

    def all_gather(self, full: Tensor, group: Group, subject: str, chunks: Sequence[Tensor] | None = None) -> Work:
        if not self._is_near(group):
            return self._pairs.all_gather(full, group, subject, chunks)
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
        if not self._is_near(group):
            return self._pairs.reduce_scatter(out, source, group, wire, subject, chunks)
        self.ledger.called("reduce_scatter", group.axis)
        entry = self.journal.enter("reduce_scatter", group, source.numel(), wire, subject)
        if not source.numel():
            return Done()
        self._offer_summands("reduce_scatter", source, group, wire, entry.tag)
        own = (chunks or source.chunk(len(group.ranks)))[group.index]
        return self._work(entry, lambda: self._add_up(out, own, group, wire, entry.tag))

    def all_reduce(self, out: Tensor, source: Tensor, group: Group, wire: torch.dtype, subject: str) -> Work:
        if not self._is_near(group):
            return self._pairs.all_reduce(out, source, group, wire, subject)
        self.ledger.called("all_reduce", group.axis)
        entry = self.journal.enter("all_reduce", group, source.numel(), wire, subject)
        if not source.numel():
            return Done()
        if len(group.ranks) == 2 and source.nbytes <= _ONE_ROUND_BYTES and source.dtype == out.dtype == wire:
            return self._sum_of_two(out, source, group, entry)
        self._offer_summands("all_reduce", source, group, wire, entry.tag)
        return self._work(entry, lambda: self._sum_everywhere(out, source, group, wire, entry.tag))

    def all_to_all(self, arrived: Sequence[Tensor], sent: Sequence[Tensor], group: Group, subject: str) -> Work:
        if not self._is_near(group):
            return self._pairs.all_to_all(arrived, sent, group, subject)
        self.ledger.called("all_to_all", group.axis)
        entry = self.journal.enter("all_to_all", group, 0, sent[0].dtype, subject)  # lengths differ per pair
        for index, rank in group.others:
            if sent[index].numel():
                self._count("all_to_all", group, sent[index].nbytes)
                self._neighbours.offer(self._copied(sent[index]), entry.tag, [rank], to_one=True)

        def fetch() -> None:
            for index, rank in group.others:
                if arrived[index].numel():
                    self._neighbours.take(rank, entry.tag, copy_into(arrived[index]))

        return self._work(entry, fetch)

    def broadcast(self, tensor: Tensor, root: int, group: Group, subject: str) -> Work:
        if not self._is_near(group):
            return self._pairs.broadcast(tensor, root, group, subject)
        self.ledger.called("broadcast", group.axis)
        entry = self.journal.enter("broadcast", group, tensor.numel(), tensor.dtype, subject)
        if not tensor.numel():
            return Done()
        if group.ranks[group.index] != root:
            return self._work(entry, lambda: self._neighbours.take(root, entry.tag, copy_into(tensor)))
        readers = [rank for rank in group.ranks if rank != root]
        if readers:
            self._count("broadcast", group, len(readers) * tensor.nbytes)
            self._neighbours.offer(self._copied(tensor), entry.tag, readers)
        return Done()

    def send(self, tensor: Tensor, link: Group, subject: str) -> Work:
        """The tensor may be reused at once; the work waits until the receiver has read the copy.

        A stage is meant to be ahead of the next one, so many messages may exist at a time; none waits for memory.
        """
        if not self._is_near(link):
            return self._pairs.send(tensor, link, subject)
        self.ledger.called("send", link.axis)
        entry = self.journal.enter("message", link, tensor.numel(), tensor.dtype, subject)
        if not tensor.numel():
            return Done()
        self._count("send", link, tensor.nbytes)
        copy = self._neighbours.buffer(tensor.nbytes, waits=False).view(tensor.dtype)
        given = self._neighbours.offer(copy.copy_(tensor), entry.tag, [link.ranks[1]], to_one=True)
        return self._work(entry, lambda: self._neighbours.await_readers(given))

    def receive(self, tensor: Tensor, link: Group, subject: str) -> Work:
        if not self._is_near(link):
            return self._pairs.receive(tensor, link, subject)
        self.ledger.called("receive", link.axis)
        entry = self.journal.enter("message", link, tensor.numel(), tensor.dtype, subject)
        if not tensor.numel():
            return Done()
        return self._work(entry, lambda: self._neighbours.take(link.ranks[0], entry.tag, copy_into(tensor)))

    def exchange(self, message: bytes, group: Group, subject: str) -> list[bytes]:
        if not self._is_near(group):
            return self._pairs.exchange(message, group, subject)

        def gather(full: Tensor) -> None:
            self._gather("exchange", full, group, subject).wait()

        return exchange(message, group, gather, lambda head: self._swap(head, group, subject))

    def _swap(self, head: bytes, group: Group, subject: str) -> list[bytes]:
        """What every rank passes, by place. It is in the tables of offers: of two ranks each takes 70 us of processor
        time for that, and 206 for a block of memory and a tensor of it; of four 119, and 310."""
        entry = self.journal.enter("exchange", group, len(group.ranks) * len(head), torch.uint8, subject)
        heads = [head] * len(group.ranks)
        readers = [rank for _, rank in group.others]
        if readers:
            self._count("exchange", group, len(readers) * len(head))
            self._neighbours.tell(head, entry.tag, readers)

            def hear() -> None:
                for index, rank in group.others:
                    heads[index] = self._neighbours.hear(rank, entry.tag)

            self._work(entry, hear).wait()
        return heads

    def overlaps_compute(self, group: Group) -> bool:
        return not self._is_near(group) and self._pairs.overlaps_compute(group)

    def reads_own_apart(self, group: Group) -> bool:
        return self._is_near(group)

    def prepare(self, mesh: Mesh) -> None:
        """Neighbours have met already."""

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._neighbours.buffer(numel * dtype.itemsize).view(dtype)

    def reclaim(self, tensor: Tensor) -> None:
        self._neighbours.reclaim(tensor)

    def synchronize(self) -> None:
        """A wait returns when it is there, or raises."""

    def rest(self, *, keeps_some: bool) -> None:
        self._neighbours.rest(keeps_some=keeps_some)

    def shared_buffers(self, group: Group, parts: Sequence[Part], lines: Lines) -> MappedBuffers | None:
        if len(group.ranks) == 1 or not all(map(self._pairs.is_on_one_host, lines())):
            return None
        return self._meet_in(group, parts)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()  # nothing is launched

    def transport(self, group: Group) -> str:
        return "shared memory" if self._is_near(group) else self._pairs.transport(group)

    def abort(self) -> None:
        self._neighbours.abort()
        self._pairs.abort()

    def close(self) -> None:
        self._pairs.close()  # first: its background threads read what neighbours offer
        self._neighbours.close()

    # -- what verbs are made of -------------------------------------------------------------------------

    def _is_near(self, group: Group) -> bool:
        return self._neighbours.has(group.ranks)

    def _work(self, entry: Entry, wait: Callable[[], None]) -> Work:
        return Awaited(self.journal, entry, Pending((), wait))

    def _count(self, verb: str, group: Group, num_bytes: int) -> None:
        self.ledger.sent(verb, group.axis, num_bytes)

    def _gather(
        self, verb: str, full: Tensor, group: Group, subject: str, chunks: Sequence[Tensor] | None = None
    ) -> Work:
        entry = self.journal.enter(verb, group, full.numel(), full.dtype, subject)
        chunks = chunks or full.chunk(len(group.ranks))
        readers = [rank for _, rank in group.others]
        if not readers or not full.numel():
            return Done()
        own = chunks[group.index]
        self._count(verb, group, len(readers) * own.nbytes)
        is_lent = self._neighbours.is_shared(own)
        offered = self._neighbours.offer(own if is_lent else self._copied(own), entry.tag, readers)

        def fetch() -> None:
            self._fetch(chunks, group, entry.tag, full.dtype)
            if is_lent:  # the caller may overwrite it next
                self._neighbours.await_readers(offered)

        return self._work(entry, fetch)

    def _fetch(self, chunks: Sequence[Tensor], group: Group, tag: int, wire: torch.dtype) -> None:
        for index, rank in group.others:
            self._neighbours.take(rank, tag, copy_into(chunks[index], wire))

    def _offer_summands(self, verb: str, source: Tensor, group: Group, wire: torch.dtype, tag: int) -> None:
        """Offer `source` to the others, as `wire`."""
        readers = [rank for _, rank in group.others]
        if not readers:
            return
        self._count(verb, group, len(readers) * (source.numel() // len(group.ranks)) * wire.itemsize)
        if source.dtype == wire and self._neighbours.is_shared(source):
            self._neighbours.offer(source, tag, readers)
            return
        self._neighbours.offer(self._copied(source, wire), tag, readers)

    def _add_up(self, out: Tensor, own: Tensor, group: Group, wire: torch.dtype, tag: int) -> None:
        """Sum all ranks' summands of this rank's chunk into `out`, in the order of the group; `own` is this rank's
        summand."""
        if len(group.ranks) == 1:
            out.copy_(own)
            return
        if out.data_ptr() == own.data_ptr() and group.index > 1:
            own = own.clone()  # our summand must not be overwritten before its turn
        total = _Sum(out, own, group.index)
        for index, rank in enumerate(group.ranks):
            if index == group.index:
                total.add_own()
            else:
                self._neighbours.take(rank, tag, total.add, lambda given: _chunk(given, wire, group))

    def _sum_of_two(self, out: Tensor, source: Tensor, group: Group, entry: Entry) -> Work:
        """Each of two ranks sums all: [Note: sums of two] in `pairwise.py`. It reads a copy, for the other may make the
        sum in the memory of its own summand."""
        [(_, other)] = group.others
        self._count("all_reduce", group, source.nbytes)
        self._neighbours.offer(self._copied(source), entry.tag, [other])

        def add(given: Tensor) -> None:
            torch.add(source, given.view(source.dtype), out=out)

        return self._work(entry, lambda: self._neighbours.take(other, entry.tag, add))

    def _sum_everywhere(self, out: Tensor, source: Tensor, group: Group, wire: torch.dtype, tag: int) -> None:
        chunks = out.chunk(len(group.ranks))
        own = chunks[group.index]
        self._add_up(own, source.chunk(len(chunks))[group.index], group, wire, tag)
        readers = [rank for _, rank in group.others]
        is_shared = own.dtype == wire and self._neighbours.is_shared(own)
        offered = own if is_shared else self._copied(own, wire)
        if own.dtype != wire:
            own.copy_(offered)  # what is sent is rounded, so all ranks keep the rounded sum
        given = self._neighbours.offer(offered, tag ^ 1, readers)
        self._count("all_reduce", group, len(readers) * own.numel() * wire.itemsize)
        self._fetch(chunks, group, tag ^ 1, wire)
        if is_shared:  # the caller may overwrite `out` next
            self._neighbours.await_readers(given)

    def _copied(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        copy = self.buffer(tensor.numel(), dtype or tensor.dtype)
        copy.copy_(tensor)
        return copy

    def _meet_in(self, group: Group, parts: Sequence[Part]) -> MappedBuffers | None:
        """The first rank of the group creates a file, the others open it; if one cannot, none uses it."""
        mine, refusal, made = None, "", None
        with ExitStack() as opened:  # also where another rank fails meanwhile; mappings need no descriptor
            if group.index == 0:
                try:
                    mine = opened.enter_context(closing(SharedFile.create()))
                except OSError as error:
                    refusal = str(error)
            where = {"pid": os.getpid(), "file": mine.descriptor if mine is not None else -1}
            first = json.loads(self.exchange(json.dumps(where).encode(), group, "shared memory")[0])
            try:
                if first["file"] >= 0:
                    file = mine or opened.enter_context(closing(SharedFile.attach(first["pid"], first["file"])))
                    made = MappedBuffers(group, self._neighbours, self.journal, file, parts)
            except OSError as error:
                refusal = str(error) or "refused"
            is_refused = any(self.exchange(refusal.encode(), group, "shared memory made"))
            return None if is_refused else made


class _Sum:
    """A sum that grows in `out` term by term, in the order of the group; a sum of two has no order.

    This rank's own summand may be `out` itself. If it is one of the first two, it is added together with the first of
    the others.
    """

    def __init__(self, out: Tensor, own: Tensor, index: int) -> None:
        self._out = out
        self._own = own
        self._own_waits = index < 2
        self._is_begun = False

    def add_own(self) -> None:
        if not self._own_waits:
            self.add(self._own)

    def add(self, summand: Tensor) -> None:
        out, own = self._out, self._own
        if self._own_waits and not self._is_begun:
            if out.dtype == own.dtype == summand.dtype:
                torch.add(own, summand, out=out)
            else:
                out.copy_(own)
                add_to(out, summand)
        elif self._is_begun:
            add_to(out, summand)
        else:
            out.copy_(summand)
        self._is_begun = True


def _chunk(given: Tensor, wire: torch.dtype, group: Group) -> Tensor:
    return given.view(wire).chunk(len(group.ranks))[group.index]
