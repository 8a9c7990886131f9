"""Collectives on GPUs and other accelerators, by torch's process groups.

[Note: streams] A collective starts after everything that was queued on the caller's current stream, and `wait` makes
the current stream, not the host, wait for it. Buffers are allocated and freed under that same stream, so memory that is
freed on the host while a kernel still reads it is only reused by work queued behind the kernel. What a collective reads
is read on another stream, so it is held until the wait, casts to the wire's dtype above all. NCCL's works hold it too;
those of other backends need not (in tests whose works did not, `zero1` in bf16 trained on wrong sums, on an H200). All
that holds only for a single stream: memory returns to the stream that it was allocated under, and another stream could
be given it while it is still read. So only the stream of the first collective is accepted. A wait may come from code on
another stream, such as an average of parameters that reads them while an update is being gathered. The first stream
waits all the same, because nobody waits again for what has been waited for once, and the other one waits for the first.
Gathers and reductions have separate communicators and run beside each other, on streams of high priority.

[Note: sums on devices] A backend sums in the dtype that is sent: in bf16 256 + 1 + 1 + 1 makes 256. Where the result is
kept in a wider dtype, chunks are exchanged and then summed in that dtype, as on the CPU; the number of bytes sent is
the same. It takes memory for one chunk more than the program counts (this rank's own). An all-reduce then has two
halves with a sum between them. The second one is launched when the next reduction starts, or when the all-reduce is
waited for, whichever comes first: by then the first half has had a unit's backward to finish.

[Note: lines of a mesh] Torch requires that all ranks create the same groups in the same order, so the record of what
was created must not depend on which lines a rank is on. It is kept by axis, as size and stride, which determine all
lines.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardwise.comm.collectives import Collectives, Lines, Tensor
from shardwise.comm.group import Group, line_of
from shardwise.comm.shared_buffers import Part
from shardwise.comm.transport.process_groups import ProcessGroup, ProcessGroups, TorchWork
from shardwise.comm.watch.journal import Awaited, Entry
from shardwise.comm.work import LinkError, Pending, Work
from shardwise.errors import StateError
from shardwise.plan.mesh import Mesh
from shardwise.system.devices import RankDevice, Stream
from shardwise.system.telemetry import Ledger


class _OneWay(NamedTuple):
    """The communicators of one line."""

    gathers: ProcessGroup
    reductions: ProcessGroup


class DeviceCollectives:
    """A `Communicator` over process groups, two for each line of ranks."""

    is_buffer_scarce = False
    is_host = False

    def __init__(
        self, groups: ProcessGroups, device: RankDevice, host: Collectives, rank: int, world_size: int
    ) -> None:
        """`host` carries messages that are in the host's memory, which need not go through the device."""
        self.ledger = Ledger()
        self.journal = host.journal
        self._host = host
        self._groups = groups
        self._device = device
        self._rank = rank
        self._world_size = world_size
        self._marker = _Marker(device)
        self._lines: dict[str, _OneWay] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}
        """Ranks of each line that has been created."""
        self._made: set[tuple[int, int]] = set()
        """Axes whose lines have been created, each by size and stride; see [Note: lines of a mesh]."""
        self._stream: Stream | None = None
        self._deferred: list[_DeferredGather] | None = None
        """All-gathers deferred inside `together`."""
        self._half_done: weakref.ref[_WideAllReduce] | None = None
        """The last all-reduce whose sums may not be under way yet."""
        self.journal.device_wait = self._marker.awaited

    def prepare(self, mesh: Mesh) -> None:
        with self._device.here():
            for axis in mesh.axes:
                key = mesh.size(axis), mesh.stride(axis)
                if mesh.size(axis) > 1 and key not in self._made:
                    ranks = mesh.group(self._rank, axis)
                    self._ranks[line_of(ranks)] = ranks
                    self._lines[line_of(ranks)] = _OneWay(
                        gathers=self._line(mesh, axis), reductions=self._line(mesh, axis)
                    )
                    self._made.add(key)

    def _line(self, mesh: Mesh, axis: str) -> ProcessGroup:
        """The group of this rank's line along `axis`; the other ranks create theirs in the same calls."""
        lines = mesh.groups(axis)
        if self._groups.can_split:
            return self._groups.split(lines, is_urgent=True)
        made = {ranks: self._groups.new_group(ranks, is_urgent=True) for ranks in lines}
        return made[mesh.group(self._rank, axis)]

    # -- verbs ------------------------------------------------------------------------------------------

    def all_gather(self, full: Tensor, group: Group, subject: str, chunks: Sequence[Tensor] | None = None) -> Work:
        entry = self._enter("gather", group, full.numel(), full.dtype, subject)
        numel = full.numel() // len(group.ranks)
        own = chunks[group.index] if chunks else full.narrow(0, group.index * numel, numel)
        self._count("gather", group, numel, full.dtype)
        by_group = self._line_of(group).gathers
        if self._deferred is None:
            return self._started(entry, group, lambda by: by.all_gather(full, own, by_group), held=(own,))
        deferred = _DeferredGather(full, own, by_group, self._launch)
        self._deferred.append(deferred)
        return self._started(entry, group, lambda _: deferred)

    @contextmanager
    def together(self) -> Iterator[None]:
        """[Note: gathers as one] The gathers of a unit's flat buffers are launched as one kernel per line and dtype;
        with adapters that halves the launches. All ranks defer the same ones, because their programs are the same."""
        self._deferred = []
        try:
            yield
        finally:
            try:
                self._launch()
            finally:
                self._deferred = None

    def _launch(self) -> None:
        """Start the deferred gathers."""
        waiting = self._deferred or []
        if waiting:
            self._deferred = []
        alike: dict[tuple[int, torch.dtype], list[_DeferredGather]] = {}
        for one in waiting:
            alike.setdefault((id(one.by_group), one.full.dtype), []).append(one)
        for some in alike.values():
            fulls, owns, by_group = [one.full for one in some], [one.own for one in some], some[0].by_group
            if len(some) == 1:
                work = self._groups.all_gather(fulls[0], owns[0], by_group)
            else:
                work = _CoalescedWork(self._groups.all_gather_coalesced(fulls, owns, by_group))
            for one in some:
                one.work = work

    def reduce_scatter(
        self,
        out: Tensor,
        source: Tensor,
        group: Group,
        wire: torch.dtype,
        subject: str,
        chunks: Sequence[Tensor] | None = None,  # noqa: ARG002
    ) -> Work:
        entry = self._enter("reduce_scatter", group, source.numel(), wire, subject)
        self._count("reduce_scatter", group, out.numel(), wire)
        self._gather_sums()
        sent, by_group = source.to(wire), self._line_of(group).reductions
        if wire.itemsize < out.dtype.itemsize:
            arrived = torch.empty_like(sent)
            return self._started(
                entry,
                group,
                lambda by: by.swap_chunks(arrived, sent, by_group),
                lambda: _sum_chunks(arrived, out, group),
                held=(sent,),
            )
        summed = out if out.dtype == wire else torch.empty_like(out, dtype=wire)
        return self._started(
            entry,
            group,
            lambda by: by.reduce_scatter(summed, sent, by_group),
            lambda: _copy_unless_same(summed, out),
            held=(sent,),
        )

    def all_reduce(self, out: Tensor, source: Tensor, group: Group, wire: torch.dtype, subject: str) -> Work:
        entry = self._enter("all_reduce", group, source.numel(), wire, subject)
        numel, by_group = out.numel() // len(group.ranks), self._line_of(group).reductions
        self._count("all_reduce", group, 2 * numel, wire)
        self._gather_sums()
        summed = source.to(wire)
        if wire.itemsize < out.dtype.itemsize:
            work = _WideAllReduce(out, summed, group, self._groups, by_group)
            self._half_done = weakref.ref(work)
            return self._marked(work, entry)
        if out.dtype == wire and summed.data_ptr() != out.data_ptr():
            summed = out.copy_(source)
        return self._started(
            entry, group, lambda by: by.all_reduce(summed, by_group), lambda: _copy_unless_same(summed, out)
        )

    def _gather_sums(self) -> None:
        """Launch the second half of the last all-reduce if it is still due: see [Note: sums on devices]."""
        half_done = self._half_done() if self._half_done is not None else None
        if half_done is not None:
            half_done.gather()
        self._half_done = None

    def all_to_all(self, arrived: Sequence[Tensor], sent: Sequence[Tensor], group: Group, subject: str) -> Work:
        """For ranks of several axes this is one over the whole world, in which the other ranks are sent nothing."""
        entry = self._enter("all_to_all", group, 0, sent[0].dtype, subject)  # lengths differ per pair
        self.ledger.called("all_to_all", group.axis)
        for place, tensor in enumerate(sent):
            self.ledger.sent("all_to_all", group.axis, tensor.nbytes if place != group.index else 0)
        line = self._lines.get(group.line)
        inputs, outputs = list(sent), list(arrived)
        inputs[group.index] = outputs[group.index] = sent[group.index][:0]
        if line is None:
            inputs = _spread(inputs, group, self._world_size)
            outputs = _spread(outputs, group, self._world_size)
        by_group = line.gathers if line is not None else self._groups.world()
        return self._started(entry, group, lambda by: by.all_to_all(outputs, inputs, by_group), held=inputs)

    def broadcast(self, tensor: Tensor, root: int, group: Group, subject: str) -> Work:
        entry = self._enter("broadcast", group, tensor.numel(), tensor.dtype, subject)
        self.ledger.called("broadcast", group.axis)
        is_world = len(group.ranks) == self._world_size
        by_group = self._groups.world() if is_world else self._line_of(group).gathers
        return self._started(entry, group, lambda by: by.broadcast(tensor, root, by_group))

    def send(self, tensor: Tensor, link: Group, subject: str) -> Work:
        entry = self._enter("message", link, tensor.numel(), tensor.dtype, subject)
        self.ledger.called("send", link.axis)
        self.ledger.sent("send", link.axis, tensor.nbytes)
        by_group = self._link_group(link)
        return self._started(entry, link, lambda by: by.send(tensor, link.ranks[1], by_group), held=(tensor,))

    def receive(self, tensor: Tensor, link: Group, subject: str) -> Work:
        entry = self._enter("message", link, tensor.numel(), tensor.dtype, subject)
        self.ledger.called("receive", link.axis)
        by_group = self._link_group(link)
        return self._started(entry, link, lambda by: by.receive(tensor, link.ranks[0], by_group))

    def _link_group(self, link: Group) -> ProcessGroup:
        """[Note: both directions] A backend queues the messages between two ranks one behind the other, those of both
        ways together, so two ranks that each begin by sending to the other would wait for ever. Hence each direction
        has its own communicator: towards higher ranks that of gathers, towards lower ranks that of reductions. A link
        joins ranks of one line along an axis."""
        source, target = link.ranks
        lines = [line for line, ranks in self._ranks.items() if source in ranks and target in ranks]
        line = self._lines[min(lines, key=lambda line: len(self._ranks[line]))]
        return line.gathers if source < target else line.reductions

    def exchange(self, message: bytes, group: Group, subject: str) -> list[bytes]:
        return self._host.exchange(message, group, subject)

    def reads_own_apart(self, group: Group) -> bool:  # noqa: ARG002
        return False

    def overlaps_compute(self, group: Group) -> bool:  # noqa: ARG002
        return True  # on streams of their own

    # -- memory -----------------------------------------------------------------------------------------

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device.device)

    def reclaim(self, tensor: Tensor) -> None:
        """What comes next on the stream comes after what was sent."""

    def synchronize(self) -> None:
        """See [Note: garbage after a fault]: the host waits here, because it cannot check after a read of others."""
        self._marker.synchronize()
        self.journal.check(when_closed=False)

    def rest(self, *, keeps_some: bool) -> None:
        """Torch's allocator has its own cache."""

    def shared_buffers(self, group: Group, parts: Sequence[Part], lines: Lines) -> None:
        """Devices share no memory."""

    # -- life -------------------------------------------------------------------------------------------

    def transport(self, group: Group) -> str:  # noqa: ARG002
        return self._groups.backend

    def abort(self) -> None:
        """Kernels that wait for each other end, with garbage: see [Note: garbage after a fault]."""
        with self._device.here():
            self._groups.abort([*self._all_lines(), self._groups.world()])

    def close(self) -> None:
        self.journal.device_wait = None
        lines = self._all_lines()
        self._lines.clear()
        self._made.clear()
        for group in lines:
            self._groups.destroy(group)

    # -- what verbs are made of -------------------------------------------------------------------------

    def _all_lines(self) -> list[ProcessGroup]:
        return [group for line in tuple(self._lines.values()) for group in line]

    def _line_of(self, group: Group) -> _OneWay:
        return self._lines[group.line]

    def _enter(self, verb: str, group: Group, numel: int, dtype: torch.dtype, subject: str) -> Entry:
        """Enter it in the journal, after checking the current stream: see [Note: streams]."""
        if self._device.accelerator is not None:
            stream = self._device.accelerator.current_stream()
            if self._stream is None:
                self._stream = stream
            elif stream != self._stream:
                raise StateError(_OTHER_STREAM)
        return self.journal.enter(verb, group, numel, dtype, subject)

    def _started(
        self,
        entry: Entry,
        group: Group,
        queue: Callable[[ProcessGroups], TorchWork],
        finish: Callable[[], None] | None = None,
        held: Sequence[Tensor] = (),
    ) -> Work:
        return self._marked(Pending([_Queued(queue(self._groups), group, held)], finish), entry)

    def _marked(self, work: Work, entry: Entry) -> Work:
        return _Marked(Awaited(self.journal, entry, work), self._marker, entry, self._on_first_stream)

    @contextmanager
    def _on_first_stream(self) -> Iterator[None]:
        """Inside, the stream of the collectives is the current one; the caller's waits for it afterwards."""
        accelerator, first = self._device.accelerator, self._stream
        current = accelerator.current_stream() if accelerator is not None else None
        if accelerator is None or first is None or current is None or current == first:
            yield
            return
        with accelerator.on(first):
            yield
        current.wait_stream(first)

    def _count(self, verb: str, group: Group, numel: int, dtype: torch.dtype) -> None:
        self.ledger.called(verb, group.axis)
        self.ledger.sent(verb, group.axis, (len(group.ranks) - 1) * numel * dtype.itemsize)


_OTHER_STREAM = (
    "This forward, backward or step runs under another stream than the ones before it, and memory that one of them "
    "frees would be reused by the other while it is still read. Make the engine, and run everything that its model "
    "does, under one stream; other streams are for work outside of the model."
)


@dataclass
class _DeferredGather:
    """An all-gather that is to be launched together with others."""

    full: Tensor
    own: Tensor
    by_group: ProcessGroup
    launch: Callable[[], None]
    work: TorchWork | None = None

    def wait(self) -> None:
        if self.work is None:
            self.launch()
        if self.work is None:
            raise RuntimeError("it could not be launched")
        self.work.wait()


class _CoalescedWork:
    """One launch shared by several gathers: a stream that has waited for one of them has waited for all."""

    def __init__(self, work: TorchWork) -> None:
        self._work: TorchWork | None = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class _Queued:
    """A torch work whose failure is raised as a `LinkError`. It holds what it reads until it has been waited for; see
    [Note: streams]."""

    def __init__(self, work: TorchWork, group: Group, held: Sequence[Tensor]) -> None:
        self._work = work
        self._group = group
        self._held = held

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            peer = self._group.ranks[(self._group.index + 1) % len(self._group.ranks)]
            raise LinkError(peer, f"A collective failed over {self._group.axis}: {error}") from error
        self._held = ()


class _WideAllReduce:
    """An all-reduce that sums in a wider dtype than it sends: chunks are exchanged and summed, the sums gathered."""

    def __init__(
        self, out: Tensor, source: Tensor, group: Group, groups: ProcessGroups, by_group: ProcessGroup
    ) -> None:
        self._out = out
        self._arrived = torch.empty_like(source)
        self._group = group
        self._groups = groups
        self._by_group = by_group
        self._exchanged: _Queued | None = _Queued(
            groups.swap_chunks(self._arrived, source, by_group), group, held=(source,)
        )
        self._gathered: _Queued | None = None
        self._error: LinkError | None = None

    def gather(self) -> None:
        """Sum what the ranks have sent and launch the gather, once. `wait` raises the error, whose action this is."""
        exchanged, self._exchanged = self._exchanged, None
        if exchanged is None:
            return
        try:
            exchanged.wait()
        except LinkError as error:
            self._error = error
            return
        numel = self._out.numel() // len(self._group.ranks)
        own = self._arrived.narrow(0, self._group.index * numel, numel)
        total = torch.empty_like(own, dtype=self._out.dtype)
        _sum_chunks(self._arrived, total, self._group)
        own.copy_(total)  # what travels is rounded, so all ranks keep the rounded sum
        self._gathered = _Queued(self._groups.all_gather(self._arrived, own, self._by_group), self._group, held=(own,))

    def wait(self) -> None:
        self.gather()
        if self._error is not None:
            raise self._error
        if self._gathered is not None:
            self._gathered.wait()
            self._out.copy_(self._arrived)


class _Marker:
    """How far the device has come: an event behind the last collective that the host has waited for.

    [Note: waits on the device] The host runs ahead and never blocks in `wait`. If a rank's event has not completed
    although the host has queued nothing since the last check, the device is waiting for that collective or an earlier
    one.
    """

    def __init__(self, device: RankDevice) -> None:
        self._device = device
        self._accelerator = device.accelerator
        with device.here():
            self._event = self._accelerator.event() if self._accelerator is not None else None
        self._entry: Entry | None = None

    def set(self, entry: Entry) -> None:
        if self._accelerator is not None and self._event is not None:
            self._event.record(self._accelerator.current_stream())
            self._entry = entry

    def synchronize(self) -> None:
        """Block the host until the device has come there."""
        if self._event is not None and self._entry is not None:
            with self._device.here():
                self._event.synchronize()

    def awaited(self) -> Entry | None:
        """Called by the watchdog from its own thread, whose current device is a different one: see
        `system/devices.py`."""
        entry = self._entry
        if entry is None or self._event is None:
            return None
        with self._device.here():
            return None if self._event.query() else entry


class _Marked:
    """A work that is waited for `on_stream`, and then records the marker's event."""

    def __init__(
        self, awaited: Awaited, marker: _Marker, entry: Entry, on_stream: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._awaited = awaited
        self._marker = marker
        self._entry = entry
        self._on_stream = on_stream

    def wait(self) -> None:
        with self._on_stream():
            self._awaited.wait()
            self._marker.set(self._entry)


def _spread(tensors: Sequence[Tensor], group: Group, world_size: int) -> list[Tensor]:
    """The tensors by rank of the world instead of by place in the group; empty ones for ranks outside."""
    by_rank = dict(zip(group.ranks, tensors, strict=True))
    return [by_rank.get(rank, tensors[0][:0]) for rank in range(world_size)]


def _copy_unless_same(arrived: Tensor, out: Tensor) -> None:
    if arrived.data_ptr() != out.data_ptr():
        out.copy_(arrived)


def _sum_chunks(arrived: Tensor, out: Tensor, group: Group) -> None:
    """The sum of all ranks' chunks, in `out`'s dtype: see [Note: sums on devices]."""
    torch.sum(arrived.view(len(group.ranks), -1), dim=0, dtype=out.dtype, out=out)
