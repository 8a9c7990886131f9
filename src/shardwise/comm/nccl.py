"""Collectives on NVIDIA GPUs, by NCCL.

[Note: streams] A collective starts after everything that the caller's current stream has been given, and
`wait` makes the current stream, not the host, wait for it. Every buffer is allocated on that stream, so
memory that is freed on the host while a kernel still reads it is only handed to work queued behind the
kernel. Gathers and reductions have communicators of their own and so run beside each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.comm import compat
from shardwise.comm.collectives import Group, Tensor
from shardwise.comm.work import Pending, Work
from shardwise.mesh import Mesh
from shardwise.telemetry import Ledger


class _Torch:
    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


class Nccl:
    """`Collectives` over NCCL process groups, one per axis line and direction."""

    def __init__(self, world: dist.ProcessGroup, device: torch.device, timeout_seconds: float) -> None:
        self.ledger = Ledger()
        self._world = world
        self._device = device
        self._timeout_seconds = timeout_seconds
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
        chunk = full.chunk(len(group.ranks))[group.index]
        self._count("gather", group, chunk.numel(), chunk.dtype)
        return Pending([_Torch(compat.all_gather_single(full, chunk, self._gathers[group.ranks]))])

    def reduce_scatter(self, out: Tensor, source: Tensor, group: Group, wire: torch.dtype) -> Work:
        self._count("reduce_scatter", group, out.numel(), wire)
        sent = source.to(wire)
        arrived = out if out.dtype == wire else torch.empty_like(out, dtype=wire)
        work = compat.reduce_scatter_single(arrived, sent, self._reductions[group.ranks])
        return Pending([_Torch(work)], lambda: _land(arrived, out))

    def all_reduce(self, out: Tensor, source: Tensor, group: Group, wire: torch.dtype) -> Work:
        self._count("all_reduce", group, 2 * (out.numel() // len(group.ranks)), wire)
        summed = source.to(wire)
        if out.dtype == wire and summed.data_ptr() != out.data_ptr():
            summed = out.copy_(source)
        work = dist.all_reduce(summed, group=self._reductions[group.ranks], async_op=True)
        return Pending([_Torch(work)], lambda: _land(summed, out))

    def all_to_all(self, arrived: Sequence[Tensor], sent: Sequence[Tensor], group: Group) -> Work:
        """Among ranks of several axes it is one of the whole world, in which the others are sent nothing."""
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
        return Pending([_Torch(work)])

    def broadcast(self, tensor: Tensor, root: int, group: Group) -> Work:
        self.ledger.called("broadcast", group.axis)
        work = dist.broadcast(tensor, root, group=self._group_of(group), async_op=True)
        return Pending([_Torch(work)])

    def exchange(self, message: bytes, group: Group) -> list[bytes]:
        messages: list[bytes | None] = [None] * len(group.ranks)
        dist.all_gather_object(messages, message, group=self._group_of(group))
        return [said or b"" for said in messages]

    def close(self) -> None:
        for group in (*self._gathers.values(), *self._reductions.values()):
            dist.destroy_process_group(group)
        self._gathers.clear()
        self._reductions.clear()

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
