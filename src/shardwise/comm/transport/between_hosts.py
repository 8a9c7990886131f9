"""Collectives among ranks on several hosts: shared memory within each host, one copy of everything between two hosts.

See [Note: one copy between hosts] in `comm/host_layout.py` for which rank carries what, [Note: who goes on] in
`background.py`, and [Note: sends before receives] in `pairwise.py`.

[Note: sums over hosts] A chunk is summed over the ranks of each host first, in the order of the group and in the dtype
of the flat sum, then over hosts in the order in which they appear in the group. A host's sum is sent as `wire`. Each
chunk is summed once, on the rank that owns it, so every rank has the same bits. They differ from those of the flat
order as two orders of a sum do, and with a narrow wire by one more rounding of each other host's sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.collectives import Tensor
from shardwise.comm.group import Group
from shardwise.comm.host_layout import OnHosts
from shardwise.comm.mixed_sums import add_to, add_up, as_sent, keep_sent
from shardwise.comm.small_messages import exchange
from shardwise.comm.transport.background import Background
from shardwise.comm.transport.pairwise import Pairwise, Transport
from shardwise.comm.transport.shm.neighbours import Neighbours, copy_into
from shardwise.comm.watch.journal import Awaited, Entry, Journal
from shardwise.comm.work import Pending, Work

_SMALL_BYTES = 2**16
"""What is smaller takes less time among hosts with one rank each than handing it to another thread."""
_SECOND = 1
"""Tag bit for the second half of an all-reduce. Higher bits distinguish chunks that a rank passes on from its own."""


class BetweenHosts(Pairwise):
    """A `Communicator` for groups whose ranks may be on any hosts. For groups within one host `Shared` is faster."""

    def __init__(
        self, transport: Transport, journal: Journal, host_of: Sequence[int], neighbours: Neighbours | None
    ) -> None:
        """`host_of` is the number of each rank's host, the same on all ranks; `neighbours` are this host's, if there
        are any."""
        super().__init__(transport, journal)
        self._host_of = host_of
        self._here = host_of[journal.rank]
        self._neighbours = neighbours
        self._layouts: dict[str, OnHosts] = {}
        self._background = Background(f"shardwise-{journal.rank}")

    def all_gather(self, full: Tensor, group: Group, subject: str, chunks: Sequence[Tensor] | None = None) -> Work:
        on = self._on_hosts(group)
        if not on.is_crowded:
            return super().all_gather(full, group, subject, chunks)
        self.ledger.called("gather", group.axis)
        entry = self.journal.enter("gather", group, full.numel(), full.dtype, subject)
        chunks = chunks or full.chunk(len(group.ranks))
        self._note_gather("gather", on, group, chunks[0].nbytes)
        return self._start(entry, _Gather(self, on, group, chunks, entry.tag).run)

    def reduce_scatter(
        self,
        out: Tensor,
        source: Tensor,
        group: Group,
        wire: torch.dtype,
        subject: str,
        chunks: Sequence[Tensor] | None = None,
    ) -> Work:
        on = self._on_hosts(group)
        if not on.is_crowded:
            return super().reduce_scatter(out, source, group, wire, subject, chunks)
        self.ledger.called("reduce_scatter", group.axis)
        entry = self.journal.enter("reduce_scatter", group, source.numel(), wire, subject)
        self._note_sums("reduce_scatter", on, group, out.numel() * wire.itemsize)
        return self._start(entry, _Sums(self, on, group, out, source, wire, entry.tag).run)

    def all_reduce(self, out: Tensor, source: Tensor, group: Group, wire: torch.dtype, subject: str) -> Work:
        on = self._on_hosts(group)
        if not on.is_crowded:
            return super().all_reduce(out, source, group, wire, subject)
        self.ledger.called("all_reduce", group.axis)
        entry = self.journal.enter("all_reduce", group, source.numel(), wire, subject)
        chunks = out.chunk(len(group.ranks))
        own = chunks[group.index]
        chunk_bytes = own.numel() * wire.itemsize
        self._note_sums("all_reduce", on, group, chunk_bytes)
        self._note_gather("all_reduce", on, group, chunk_bytes)
        sums = _Sums(self, on, group, own, source, wire, entry.tag)
        return self._start(entry, lambda: _reduce_all(sums, chunks, wire))

    def all_to_all(self, arrived: Sequence[Tensor], sent: Sequence[Tensor], group: Group, subject: str) -> Work:
        on, neighbours = self._on_hosts(group), self._neighbours
        self.ledger.crossed("all_to_all", group.axis, sum(sent[index].nbytes for index in on.far))
        if not on.is_crowded or neighbours is None:
            return super().all_to_all(arrived, sent, group, subject)
        self.ledger.called("all_to_all", group.axis)
        entry = self.journal.enter("all_to_all", group, 0, sent[0].dtype, subject)
        self.ledger.sent("all_to_all", group.axis, sum(sent[i].nbytes for i, _ in group.others))
        far = [self._send(sent[i], group.ranks[i], entry.tag) for i in on.far if sent[i].numel()]
        far += [self._receive(arrived[i], group.ranks[i], entry.tag) for i in on.far if arrived[i].numel()]
        for index in on.neighbours:
            if sent[index].numel():
                neighbours.offer(self.lent(sent[index])[0], entry.tag, [group.ranks[index]], to_one=True)

        def fetch() -> None:
            for index in on.neighbours:
                if arrived[index].numel():
                    neighbours.take(group.ranks[index], entry.tag, copy_into(arrived[index]))

        return Awaited(self.journal, entry, Pending(far, fetch))

    def broadcast(self, tensor: Tensor, root: int, group: Group, subject: str) -> Work:
        on = self._on_hosts(group)
        if not on.is_crowded or not tensor.numel():
            return super().broadcast(tensor, root, group, subject)
        self.ledger.called("broadcast", group.axis)
        entry = self.journal.enter("broadcast", group, tensor.numel(), tensor.dtype, subject)
        source = group.ranks.index(root)
        if source == group.index:
            self.ledger.sent("broadcast", group.axis, len(group.others) * tensor.nbytes)
            self.ledger.crossed("broadcast", group.axis, (on.num_hosts - 1) * tensor.nbytes)
        return self._start(entry, lambda: self._hand_out(tensor, source, on, group, entry.tag))

    def exchange(self, message: bytes, group: Group, subject: str) -> list[bytes]:
        on = self._on_hosts(group)
        if not on.is_crowded:
            return super().exchange(message, group, subject)

        def gather(full: Tensor) -> None:
            entry = self.journal.enter("exchange", group, full.numel(), full.dtype, subject)
            chunks = full.chunk(len(group.ranks))
            self._note_gather("exchange", on, group, chunks[0].nbytes)
            # the caller waits at once, so a background thread would gain nothing
            Awaited(self.journal, entry, Pending([], _Gather(self, on, group, chunks, entry.tag).run)).wait()

        return exchange(message, group, gather)

    def overlaps_compute(self, group: Group) -> bool:
        return self._on_hosts(group).num_hosts > 1

    def is_on_one_host(self, ranks: Sequence[int]) -> bool:
        return len({self._host_of[rank] for rank in ranks}) == 1

    def transport(self, group: Group) -> str:
        name = super().transport(group)
        return f"shared memory and {name}" if self._on_hosts(group).is_crowded else name

    def close(self) -> None:
        self._background.close(self._abort_all)
        super().close()

    # -- what the steps of a collective are made of ------------------------------------------------------

    def post(self, tensor: Tensor, rank: int, tag: int) -> Work:
        """Start to send to another host. Like all methods here it may be called from any thread; raises `LinkError`."""
        return self._transport.send(tensor, rank, tag)

    def expect(self, tensor: Tensor, rank: int, tag: int) -> Work:
        return self._transport.receive(tensor, rank, tag)

    def lent(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """The values in memory that neighbours can read, and whether that is the tensor itself."""
        if self.is_shared(tensor):
            return tensor, True
        return self.shared_memory(tensor.numel(), tensor.dtype).copy_(tensor), False

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether neighbours can read `tensor` where it lies."""
        return self._neighbours is not None and self._neighbours.is_shared(tensor)

    def shared_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory that can be offered to neighbours; any memory if there are none."""
        if self._neighbours is None:
            return torch.empty(numel, dtype=dtype, device="cpu")
        return self._neighbours.buffer(numel * dtype.itemsize, waits=False).view(dtype)

    def offer(self, tensor: Tensor, tag: int, group: Group, on: OnHosts) -> int | None:
        """Let all neighbours of the group read `tensor`, which is in shared memory. Returns the offer's number."""
        if self._neighbours is None or not on.neighbours:
            return None
        return self._neighbours.offer(tensor, tag, [group.ranks[index] for index in on.neighbours])

    def take(self, rank: int, tag: int, use: Callable[[Tensor], None]) -> None:
        assert self._neighbours is not None
        self._neighbours.take(rank, tag, use)

    def await_readers(self, number: int | None) -> None:
        if number is not None:
            assert self._neighbours is not None
            self._neighbours.await_readers(number)

    # -- inside -------------------------------------------------------------------------------------------

    def _on_hosts(self, group: Group) -> OnHosts:
        found = self._layouts.get(group.name)
        if found is None:
            found = self._layouts[group.name] = OnHosts(group.ranks, group.index, self._host_of)
        return found

    def _start(self, entry: Entry, steps: Callable[[], None]) -> Work:
        return Awaited(self.journal, entry, self._background.start(entry.line.name, steps))

    def _posted(self, entry: Entry, group: Group, num_bytes: int, post: Callable[[], Work]) -> Work:
        """See [Note: who posts] in `background.py`."""
        if num_bytes < _SMALL_BYTES or self._on_hosts(group).num_hosts == 1:
            return super()._posted(entry, group, num_bytes, post)
        return Awaited(self.journal, entry, self._background.post(group.name, post))

    def _hand_out(self, tensor: Tensor, source: int, on: OnHosts, group: Group, tag: int) -> None:
        """The root sends to its partner on every other host; the first rank of a host to have it gives it to its
        neighbours."""
        first = source if source in on.near else on.carrier(source)
        if first != on.own:
            self.take(group.ranks[first], tag, copy_into(tensor))
            return
        messages = []
        if source == on.own:
            messages = [self.post(tensor, group.ranks[index], tag) for index in on.partners]
        else:
            self.expect(tensor, group.ranks[source], tag).wait()
        if on.neighbours:
            self.offer(self.shared_memory(tensor.numel(), tensor.dtype).copy_(tensor), tag, group, on)
        for message in messages:
            message.wait()

    def _count(self, verb: str, group: Group, num_bytes: int) -> None:
        super()._count(verb, group, num_bytes)
        self.ledger.crossed(verb, group.axis, len(self._on_hosts(group).far) * num_bytes)

    def _note_gather(self, verb: str, on: OnHosts, group: Group, chunk_bytes: int) -> None:
        """A rank's chunk goes to all others, and leaves the host once per other host."""
        self.ledger.sent(verb, group.axis, len(group.others) * chunk_bytes)
        self.ledger.crossed(verb, group.axis, len(on.partners) * chunk_bytes)

    def _note_sums(self, verb: str, on: OnHosts, group: Group, chunk_bytes: int) -> None:
        self.ledger.sent(verb, group.axis, len(group.others) * chunk_bytes)
        self.ledger.crossed(verb, group.axis, len(on.carried) * chunk_bytes)

    def _abort_all(self) -> None:
        if self._neighbours is not None:
            self._neighbours.abort()
        self.abort()


@dataclass
class _Gather:
    """Every chunk is sent once to each other host, and read by the neighbours of the rank that receives it."""

    comm: BetweenHosts
    on: OnHosts
    group: Group
    chunks: Sequence[Tensor]
    """By index in the group; this rank's own is filled."""
    tag: int

    def run(self) -> None:
        own, ranks = self.chunks[self.on.own], self.group.ranks
        if not own.numel():
            return
        landing = {index: self._landing(index) for index in self.on.carried}
        leaving = [self.comm.post(own, ranks[index], self.tag) for index in self.on.partners]
        arriving = [(index, self.comm.expect(landing[index], ranks[index], self.tag)) for index in self.on.carried]
        offered = [self._offer(self.on.own, own, self.tag)]
        for index in self.on.neighbours:
            self.comm.take(ranks[index], self.tag, copy_into(self.chunks[index]))
        for index, message in arriving:
            message.wait()
            offered.append(self._offer(index, landing[index], _passed_on(self.tag, index)))
            if landing[index] is not self.chunks[index]:
                self.chunks[index].copy_(landing[index])
        for index in self.on.far:
            carrier = self.on.carrier(index)
            if carrier != self.on.own:
                self.comm.take(ranks[carrier], _passed_on(self.tag, index), copy_into(self.chunks[index]))
        for message in leaving:
            message.wait()
        for number in offered:  # the caller may overwrite its memory next
            self.comm.await_readers(number)

    def _landing(self, index: int) -> Tensor:
        """Memory for what comes from another host, where neighbours can read it."""
        chunk = self.chunks[index]
        if not self.on.neighbours or self.comm.is_shared(chunk):
            return chunk
        return self.comm.shared_memory(chunk.numel(), chunk.dtype)

    def _offer(self, index: int, tensor: Tensor, tag: int) -> int | None:
        """The offer's number, if `tensor` is the caller's own memory."""
        if not self.on.neighbours:
            return None
        lent, is_itself = self.comm.lent(tensor)
        number = self.comm.offer(lent, tag, self.group, self.on)
        return number if is_itself and tensor is self.chunks[index] else None


@dataclass
class _Sums:
    """Every host sums its ranks' chunks; the partner of a chunk's owner sends the owner that host's sum."""

    comm: BetweenHosts
    on: OnHosts
    group: Group
    out: Tensor
    """This rank's chunk of the sum."""
    source: Tensor
    wire: torch.dtype
    tag: int

    def run(self) -> None:
        on, ranks, chunks = self.on, self.group.ranks, self.source.chunk(len(self.group.ranks))
        if not self.source.numel():
            return
        arrived = [torch.empty(self.out.numel(), dtype=self.wire, device="cpu") for _ in on.partners]
        arriving = [
            self.comm.expect(tensor, ranks[index], self.tag) for tensor, index in zip(arrived, on.partners, strict=True)
        ]
        if on.neighbours:
            is_narrow = self.source.dtype != self.wire
            given = self.source if not is_narrow and self.comm.is_shared(self.source) else None
            if given is None:
                given = self.comm.shared_memory(self.source.numel(), self.wire).copy_(self.source)
            self.comm.offer(given, self.tag, self.group, on)
        sums = self._sums_of_host([*on.carried, on.own], chunks)
        leaving = [
            self.comm.post(total.to(self.wire), ranks[index], self.tag)
            for index, total in zip(on.carried, sums, strict=False)
        ]
        for message in arriving:
            message.wait()
        add_up(self.out, [*arrived[: on.number], sums[-1], *arrived[on.number :]], on.number)
        for message in leaving:
            message.wait()

    def _sums_of_host(self, indices: Sequence[int], chunks: Sequence[Tensor]) -> list[Tensor]:
        """This host's sums of the chunks at `indices`, in the order of the group."""
        if not self.on.neighbours:
            return [chunks[index] for index in indices]
        dtype = torch.promote_types(self.out.dtype, self.wire)
        sums = [torch.empty(self.out.numel(), dtype=dtype, device="cpu") for _ in indices]
        is_begun = False

        def add(summands: Sequence[Tensor]) -> None:
            for total, index in zip(sums, indices, strict=True):
                if is_begun:
                    add_to(total, summands[index])
                else:
                    total.copy_(summands[index])

        for index in self.on.near:
            if index == self.on.own:
                add(chunks)
            else:
                self.comm.take(
                    self.group.ranks[index],
                    self.tag,
                    lambda given: add(given.view(self.wire).chunk(len(self.group.ranks))),
                )
            is_begun = True
        return sums


def _reduce_all(sums: _Sums, chunks: Sequence[Tensor], wire: torch.dtype) -> None:
    """Reduce-scatter, then all-gather of the sums; `chunks` are those of the result."""
    sums.run()
    sent = as_sent(chunks, sums.on.own, wire)
    _Gather(sums.comm, sums.on, sums.group, sent, sums.tag ^ _SECOND).run()
    keep_sent(chunks, sent)


def _passed_on(tag: int, index: int) -> int:
    """The tag under which neighbours find the chunk that came from `index`, on another host."""
    return tag ^ (index + 1) << 1
