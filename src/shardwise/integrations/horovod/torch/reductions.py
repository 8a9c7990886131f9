"""All-reduce and reduce-scatter of torch tensors, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.ops import Average, Reduction, Sum
from shardwise.integrations.horovod.pending import Handle
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.torch.compression import Compression

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
]

Tensor = torch.Tensor


def _issue(
    verb: str, tensors: Sequence[Tensor], name: str | None, reduction: Reduction, *, is_single: bool = False
) -> Handle:
    return current_session().issue_tensors(verb, name, tensors, is_single=is_single, **reduction.fields())


def _all_reduce_in_place(
    tensors: Sequence[Tensor], name: str | None, reduction: Reduction, *, is_single: bool = False
) -> Handle:
    return current_session().issue_tensors(
        "allreduce",
        name,
        tensors,
        [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors],
        is_single=is_single,
        finish=lambda _: tensors[0] if is_single else list(tensors),
        **reduction.fields(),
    )


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, reduction: Reduction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = current_session().name_for("allreduce", name)
        ctx.reduction = reduction
        reduced: list[Tensor] = _issue("allreduce", tensors, ctx.name, reduction).wait()
        return tuple(reduced)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.reduction.require_gradient("allreduce")
        return None, None, *_issue("allreduce", grads, f"{ctx.name}.grad", ctx.reduction).wait()


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, reduction: Reduction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = current_session().name_for("reducescatter", name)
        ctx.reduction = reduction
        scattered: list[Tensor] = _issue("reducescatter", tensors, ctx.name, reduction).wait()
        return tuple(scattered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        reduction: Reduction = ctx.reduction
        reduction.require_gradient("reducescatter")
        factor = reduction.prescale * reduction.postscale
        if reduction.op is Sum:
            factor *= reduction.process_set.size() or 1
        gathered = current_session().issue_tensors(
            "allgather",
            f"{ctx.name}.grad",
            [grad * factor if factor != 1 else grad for grad in grads],
            is_single=False,
            process_set=reduction.process_set.number(),
        )
        return None, None, *gathered.wait()


def _apply(
    function: Any, tensors: Sequence[Tensor], name: str | None, reduction: Reduction, compression: Any
) -> list[Tensor]:
    """`function`, one of the two above, of compressed tensors."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    results = function.apply(name, reduction, *(tensor for tensor, _ in compressed))
    return [compression.decompress(one, ctx) for one, (_, ctx) in zip(results, compressed, strict=True)]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce the ranks' tensors; by default, to average them.

    Each tensor is multiplied by `prescale_factor` before the reduction, and the result by `postscale_factor`. Averages
    of integers are rounded towards zero; half-precision values are summed in fp32.
    """
    reduction = Reduction.of(op, average, prescale_factor, postscale_factor, process_set)
    return _issue("allreduce", [tensor], name, reduction, is_single=True)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`allreduce_async`, in place."""
    reduction = Reduction.of(op, average, prescale_factor, postscale_factor, process_set)
    return _all_reduce_in_place([tensor], name, reduction, is_single=True)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`allreduce_async`, blocking and with a gradient, which is reduced in the same way. Only `Average` and `Sum` have
    gradients."""
    reduction = Reduction.of(op, average, prescale_factor, postscale_factor, process_set)
    return _apply(_AllReduce, [tensor], name, reduction, compression)[0]


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`allreduce_async_`, blocking."""
    reduced: Tensor = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()
    return reduced


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce several tensors together, as soon as all ranks have issued all of them."""
    reduction = Reduction.of(op, average, prescale_factor, postscale_factor, process_set)
    return _issue("allreduce", tensors, name, reduction)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`grouped_allreduce_async`, in place."""
    reduction = Reduction.of(op, average, prescale_factor, postscale_factor, process_set)
    return _all_reduce_in_place(tensors, name, reduction)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of several tensors together."""
    reduction = Reduction.of(op, average, prescale_factor, postscale_factor, process_set)
    return _apply(_AllReduce, tensors, name, reduction, compression)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`grouped_allreduce_async_`, blocking."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    reduced: list[Tensor] = handle.wait()
    return reduced


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to sum or average sparse COO tensors, by gathering the ranks' indices and values.

    The handle returns a coalesced sparse tensor. As in Horovod, the handle may be called.
    """
    _, divisor = Reduction.of(op, None, 1.0, 1.0, process_set).sparse_scaling()
    coalesced, shape = tensor.coalesce(), tensor.shape

    def reduce(gathered: list[Tensor]) -> Tensor:
        indices, values = gathered
        return torch.sparse_coo_tensor(
            indices.t(), values / divisor, shape, check_invariants=False, device=values.device
        ).coalesce()

    return current_session().issue_tensors(
        "allgather",
        f"{name}.sparse" if name is not None else None,
        [coalesced.indices().t().contiguous(), coalesced.values()],
        is_single=False,
        finish=reduce,
        process_set=process_set.number(),
    )


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start to reduce the ranks' tensors and to give each rank its rows: the first ranks get one more if needed."""
    reduction = Reduction.of(op, None, prescale_factor, postscale_factor, process_set)
    return _issue("reducescatter", [tensor], name, reduction, is_single=True)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`reducescatter_async` of several tensors together."""
    reduction = Reduction.of(op, None, prescale_factor, postscale_factor, process_set)
    return _issue("reducescatter", tensors, name, reduction)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """`reducescatter_async`, blocking and with Horovod's gradient: the ranks' gradients gathered, for `Sum` times the
    number of ranks."""
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors together."""
    reduction = Reduction.of(op, None, prescale_factor, postscale_factor, process_set)
    return _apply(_ReduceScatter, tensors, name, reduction, compression)
