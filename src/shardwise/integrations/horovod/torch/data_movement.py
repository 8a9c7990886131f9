"""All-gather, broadcast and all-to-all of torch tensors, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.pending import Handle
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.torch.ops import Average
from shardwise.integrations.horovod.torch.reductions import allreduce_async, grouped_allreduce_async

Tensor = torch.Tensor


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Every rank's `tensor`, along the first dim, in which ranks may differ."""
    return current_session().on_tensors("allgather", name, [tensor], process_set=process_set.number())


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    return current_session().on_tensors("allgather", name, tensors, is_single=False, process_set=process_set.number())


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = current_session().name_for("allgather", name).removeprefix("allgather.")
        ctx.process_set = process_set
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        gathered: list[Tensor] = grouped_allgather_async(tensors, ctx.name, process_set).wait()
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        name, process_set = f"{ctx.name}.grad", ctx.process_set
        averaged = grouped_allreduce_async(grads, name=name, op=Average, process_set=process_set)
        before = torch.tensor([ctx.rows])
        rows: Tensor = allgather_async(before, f"{ctx.name}.rows", process_set).wait()
        starts = rows[: process_set.rank()].sum(0).tolist()
        parts = zip(averaged.wait(), starts, ctx.rows, strict=True)
        return None, None, *(grad[start : start + count] for grad, start, count in parts)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """As `allgather_async`, waited for. Its gradient is this rank's rows of the ranks' average, as Horovod's is."""
    (gathered,) = _AllGather.apply(name, process_set, tensor)  # type: ignore[no-untyped-call]
    result: Tensor = gathered
    return result


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    return list(_AllGather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """The `tensor` that `root_rank`, a rank of the whole job, has."""
    return current_session().on_tensors("broadcast", name, [tensor], root=root_rank, process_set=process_set.number())


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """The same, into `tensor`."""
    return current_session().on_tensors(
        "broadcast",
        name,
        [tensor],
        [tensor.detach()],
        finish=lambda _: tensor,
        root=root_rank,
        process_set=process_set.number(),
    )


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.name = current_session().name_for("broadcast", name).removeprefix("broadcast.")
        ctx.root_rank, ctx.process_set = root_rank, process_set
        sent: Tensor = broadcast_async(tensor, root_rank, ctx.name, process_set).wait()
        return sent

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        handle = allreduce_async(grad, name=f"{ctx.name}.grad", op=Average, process_set=ctx.process_set)
        averaged: Tensor = handle.wait()
        return averaged if current_session().rank == ctx.root_rank else averaged * 0, None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As `broadcast_async`, waited for. Its gradient is the ranks' average on the root, and zero elsewhere."""
    sent: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return sent


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As `broadcast_async_`, waited for."""
    sent: Tensor = broadcast_async_(tensor, root_rank, name, process_set).wait()
    return sent


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Send `splits[i]` rows of `tensor` to the i-th rank, and get what the others send to this one.

    With `splits` the result is a pair: what was received, and how many rows from each rank, int32. Without, rows are
    sent equally.
    """
    counts = None if splits is None else tuple(int(count) for count in splits)
    return current_session().on_tensors(
        "alltoall",
        name,
        [tensor],
        finish=(lambda both: both[0]) if splits is None else None,
        splits=counts,
        process_set=process_set.number(),
    )


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Tensor, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        ctx.name = current_session().name_for("alltoall", name).removeprefix("alltoall.")
        ctx.process_set = process_set
        received, counts = alltoall_async(tensor, splits, ctx.name, process_set).wait()
        ctx.counts = counts
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        back, _counts = alltoall_async(grad, ctx.counts, f"{ctx.name}.grad", ctx.process_set).wait()
        return back, None, None, None


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As `alltoall_async`, waited for. Gradients go back the way that rows came."""
    if splits is None:
        num_ranks, rows = process_set.size() or 1, tensor.shape[0] if tensor.dim() else 0
        if rows % num_ranks:  # the coordinator raises the error on all ranks
            return alltoall_async(tensor, None, name, process_set).wait()
        return _AllToAll.apply(tensor, [rows // num_ranks] * num_ranks, name, process_set)[0]  # type: ignore[no-untyped-call]
    return _AllToAll.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
