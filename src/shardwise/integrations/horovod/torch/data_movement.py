"""All-gather, broadcast and all-to-all of torch tensors, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.ops import Average
from shardwise.integrations.horovod.pending import Handle
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.torch.reductions import allreduce_async, grouped_allreduce_async

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
]

Tensor = torch.Tensor


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start to concatenate the ranks' tensors along the first dimension, whose size may differ between ranks."""
    return current_session().issue_tensors("allgather", name, [tensor], process_set=process_set.number())


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """`allgather_async` of several tensors together."""
    return current_session().issue_tensors(
        "allgather", name, tensors, is_single=False, process_set=process_set.number()
    )


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = current_session().name_for("allgather", name)
        ctx.process_set = process_set
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        gathered: list[Tensor] = grouped_allgather_async(tensors, ctx.name, process_set).wait()
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        name, process_set = f"{ctx.name}.grad", ctx.process_set
        averaged = grouped_allreduce_async(grads, name=name, op=Average, process_set=process_set)
        own_rows = torch.tensor([ctx.rows], device="cpu")
        rows: Tensor = allgather_async(own_rows, f"{ctx.name}.rows", process_set).wait()
        starts = rows[: process_set.rank()].sum(0).tolist()
        own = zip(averaged.wait(), starts, ctx.rows, strict=True)
        return None, None, *(grad[start : start + count] for grad, start, count in own)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """`allgather_async`, blocking and with Horovod's gradient: this rank's rows of the ranks' average."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors together."""
    return list(_AllGather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]  # torch's own


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to copy `root_rank`'s tensor to all ranks. `root_rank` is a rank of the job, not an index in the set."""
    return current_session().issue_tensors(
        "broadcast", name, [tensor], root=int(root_rank), process_set=process_set.number()
    )


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """`broadcast_async`, in place."""
    return current_session().issue_tensors(
        "broadcast",
        name,
        [tensor],
        [tensor.detach()],
        finish=lambda _: tensor,
        root=int(root_rank),
        process_set=process_set.number(),
    )


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.name = current_session().name_for("broadcast", name)
        ctx.root_rank, ctx.process_set = root_rank, process_set
        received: Tensor = broadcast_async(tensor, root_rank, ctx.name, process_set).wait()
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        handle = allreduce_async(grad, name=f"{ctx.name}.grad", op=Average, process_set=ctx.process_set)
        averaged: Tensor = handle.wait()
        is_root = current_session().rank == ctx.root_rank
        return averaged if is_root else torch.zeros_like(averaged), None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """`broadcast_async`, blocking and with Horovod's gradient: the average on the root, zero on the other ranks."""
    received: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]  # torch's own
    return received


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """`broadcast_async_`, blocking."""
    received: Tensor = broadcast_async_(tensor, root_rank, name, process_set).wait()
    return received


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to send `splits[i]` rows of `tensor` to the i-th rank, and to receive the rows that the others send.

    With `splits` the handle returns two tensors: the received rows, and the number of rows from each rank in int32.
    Without it, every rank gets the same number of rows.
    """
    counts = None if splits is None else tuple(int(count) for count in splits)
    return current_session().issue_tensors(
        "alltoall",
        name,
        [tensor],
        finish=(lambda pair: pair[0]) if splits is None else None,
        splits=counts,
        process_set=process_set.number(),
    )


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Tensor, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        ctx.name = current_session().name_for("alltoall", name)
        ctx.process_set = process_set
        received, counts = alltoall_async(tensor, splits, ctx.name, process_set).wait()
        ctx.counts = counts
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        returned, _counts = alltoall_async(grad, ctx.counts, f"{ctx.name}.grad", ctx.process_set).wait()
        return returned, None, None, None


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """`alltoall_async`, blocking and with gradients, which are sent back."""
    if splits is None:
        num_ranks, rows = process_set.size() or 1, tensor.shape[0] if tensor.dim() else 0
        if rows % num_ranks:  # the coordinator raises the error on all ranks
            return alltoall_async(tensor, None, name, process_set).wait()
        return _AllToAll.apply(tensor, [rows // num_ranks] * num_ranks, name, process_set)[0]  # type: ignore[no-untyped-call]  # torch's own
    return _AllToAll.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]  # torch's own
