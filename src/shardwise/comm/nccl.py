"""Collectives on NVIDIA GPUs, by NCCL.

[Note: streams] A collective starts after everything that the caller's current stream has been given, and
`wait` makes the current stream, not the host, wait for it. Every buffer is allocated on that stream, so
memory that is freed on the host while a kernel still reads it is only handed to work queued behind the
kernel. Gathers and reductions have communicators of their own and so run beside each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardwise.comm import compat
from shardwise.comm.collectives import Tensor
from shardwise.comm.commons import Part
from shardwise.comm.group import Group
from shardwise.comm.journal import Awaited, Entry, Journal
from shardwise.comm.work import LinkError, Pending, Work
from shardwise.mesh import Mesh
from shardwise.telemetry import Ledger


class _Torch:
    def __init__(self, work: dist.Work, group: Group) -> None:
        self._work = work
        self._group = group

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            peer = self._group.ranks[(self._group.index + 1) % len(self._group.ranks)]
            raise LinkError(peer, f"NCCL failed over {self._group.axis}: {error}") from error


class _Marker:
    """How far the device has come: an event behind the last collective that the host has waited for.

    [Note: waits on the device] The host runs ahead and never blocks in `wait`. A rank whose event does not come
    although the host has queued nothing behind it since the last look is waiting, for that collective or one before.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        self._device = device
        self._entry: Entry | None = None

    def set(self, entry: Entry) -> None:
        self._event.record(torch.cuda.current_stream(self._device))
        self._entry = entry

    def awaited(self) -> Entry | None:
        """Asked by the watch, from its own thread."""
        arrived = self._event.query()  # type: ignore[no-untyped-call]  # torch's own
        return None if arrived else self._entry


class _Marked:
    """A work that leaves a mark on the stream once it has been waited for."""

    def __init__(self, awaited: Awaited, marker: _Marker, entry: Entry) -> None:
        self._awaited = awaited
        self._marker = marker
        self._entry = entry

    def wait(self) -> None:
        self._awaited.wait()
        self._marker.set(self._entry)


class Nccl:
    """`Collectives` over NCCL process groups, one per axis line and direction."""

    is_buffer_scarce = False

    def __init__(self, world: dist.ProcessGroup, device: torch.device, journal: Journal) -> None:
        self.ledger = Ledger()
        self.journal = journal
        self._world = world
        self._device = device
        self._marker = _Marker(device)
        journal.device_wait = self._marker.awaited
        self._gathers: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._reductions: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def prepare(self, mesh: Mesh) -> None:
        """All ranks make all lines of all axes, in the same order, as NCCL demands."""
        me = dist.get_rank(self._world)
        for axis in mesh.axes:
            for ranks in mesh.groups(axis):
                if ranks in self._gathers:
                    continue
                pair = [dist.new_group(list(ranks), backend="nccl") for _ in range(2)]
                if me in ranks:
                    self._gathers[ranks], self._reductions[ranks] = pair

    def all_gather(self, full: Tensor, group: Group) -> Work:
        entry = self.journal.enter("gather", group, full.numel(), full.dtype)
        chunk = full.chunk(len(group.ranks))[group.index]
        self._count("gather", group, chunk.numel(), chunk.dtype)
        return self._started(entry, compat.all_gather_single(full, chunk, self._gathers[group.ranks]), group)

    def reduce_scatter(self, out: Tensor, source: Tensor, group: Group, wire: torch.dtype) -> Work:
        entry = self.journal.enter("reduce_scatter", group, source.numel(), wire)
        self._count("reduce_scatter", group, out.numel(), wire)
        sent = source.to(wire)
        arrived = out if out.dtype == wire else torch.empty_like(out, dtype=wire)
        work = compat.reduce_scatter_single(arrived, sent, self._reductions[group.ranks])
        return self._started(entry, work, group, lambda: _land(arrived, out))

    def all_reduce(self, out: Tensor, source: Tensor, group: Group, wire: torch.dtype) -> Work:
        entry = self.journal.enter("all_reduce", group, source.numel(), wire)
        self._count("all_reduce", group, 2 * (out.numel() // len(group.ranks)), wire)
        summed = source.to(wire)
        if out.dtype == wire and summed.data_ptr() != out.data_ptr():
            summed = out.copy_(source)
        work = dist.all_reduce(summed, group=self._reductions[group.ranks], async_op=True)
        return self._started(entry, work, group, lambda: _land(summed, out))

    def all_to_all(self, arrived: Sequence[Tensor], sent: Sequence[Tensor], group: Group) -> Work:
        """Among ranks of several axes it is one of the whole world, in which the others are sent nothing."""
        entry = self.journal.enter("all_to_all", group, 0, sent[0].dtype)  # each pair has a length of its own
        self.ledger.called("all_to_all", group.axis)
        for place, tensor in enumerate(sent):
            self.ledger.sent("all_to_all", group.axis, tensor.nbytes if place != group.index else 0)
        is_line = group.ranks in self._gathers
        inputs, outputs = list(sent), list(arrived)
        inputs[group.index] = outputs[group.index] = sent[group.index][:0]
        if not is_line:
            world_size = dist.get_world_size(self._world)
            inputs, outputs = _spread(inputs, group, world_size), _spread(outputs, group, world_size)
        work = dist.all_to_all(outputs, inputs, group=self._group_of(group), async_op=True)
        return self._started(entry, work, group)

    def broadcast(self, tensor: Tensor, root: int, group: Group) -> Work:
        entry = self.journal.enter("broadcast", group, tensor.numel(), tensor.dtype)
        self.ledger.called("broadcast", group.axis)
        work = dist.broadcast(tensor, root, group=self._group_of(group), async_op=True)
        return self._started(entry, work, group)

    def exchange(self, message: bytes, group: Group) -> list[bytes]:
        entry = self.journal.enter("exchange", group, len(group.ranks), torch.uint8)
        self.journal.waiting = entry
        messages: list[bytes | None] = [None] * len(group.ranks)
        try:
            dist.all_gather_object(messages, message, group=self._group_of(group))
        finally:
            self.journal.waiting = None
        return [said or b"" for said in messages]

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def reclaim(self, tensor: Tensor) -> None:
        """What comes next on the stream comes after what was sent."""

    def rest(self, *, keeps_some: bool) -> None:
        """Torch's allocator keeps what it keeps."""

    def commons(self, group: Group, parts: Sequence[Part]) -> None:
        """GPUs have no memory in common."""

    def transport(self, group: Group) -> str:  # noqa: ARG002
        return "nccl"

    def cut(self) -> None:
        """Kernels that wait for each other end, with garbage; nothing is read of it, since the journal has a letter."""
        for group in (*self._gathers.values(), *self._reductions.values(), self._world):
            group.abort()

    def close(self) -> None:
        for group in (*self._gathers.values(), *self._reductions.values()):
            dist.destroy_process_group(group)
        self._gathers.clear()
        self._reductions.clear()

    def _started(self, entry: Entry, work: dist.Work, group: Group, finish: Callable[[], None] | None = None) -> Work:
        return _Marked(Awaited(self.journal, entry, Pending([_Torch(work, group)], finish)), self._marker, entry)

    def _group_of(self, group: Group) -> dist.ProcessGroup:
        return self._gathers.get(group.ranks, self._world)

    def _count(self, verb: str, group: Group, numel: int, dtype: torch.dtype) -> None:
        self.ledger.called(verb, group.axis)
        self.ledger.sent(verb, group.axis, (len(group.ranks) - 1) * numel * dtype.itemsize)


def _spread(tensors: Sequence[Tensor], group: Group, world_size: int) -> list[Tensor]:
    """By rank of the world what is by place in the group; nothing for ranks outside."""
    by_rank = dict(zip(group.ranks, tensors, strict=True))
    return [by_rank.get(rank, tensors[0][:0]) for rank in range(world_size)]


def _land(arrived: Tensor, out: Tensor) -> None:
    if arrived.data_ptr() != out.data_ptr():
        out.copy_(arrived)
