"""All-reduce and reduce-scatter of torch tensors, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.pending import Handle
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.torch.compression import Compression
from shardwise.integrations.horovod.torch.ops import Adasum, Average, Op, Sum, scaling_of

Tensor = torch.Tensor


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`postscale_factor` times the reduction of every rank's `prescale_factor` times `tensor`; its average, by default.

    Averages of whole numbers are rounded towards zero, halves are summed in fp32.
    """
    scaling = scaling_of(op, average, prescale_factor, postscale_factor)
    return current_session().on_tensors("allreduce", name, [tensor], process_set=process_set.number(), **scaling)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """The same, into `tensor`."""
    scaling = scaling_of(op, average, prescale_factor, postscale_factor)
    return _in_place([tensor], name, process_set, scaling, is_single=True)


def _in_place(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, scaling: dict[str, Any], *, is_single: bool
) -> Handle:
    return current_session().on_tensors(
        "allreduce",
        name,
        tensors,
        [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors],
        is_single=is_single,
        finish=lambda _: tensors[0] if is_single else list(tensors),
        process_set=process_set.number(),
        **scaling,
    )


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options = options
        ctx.name = current_session().name_for("allreduce", options["name"]).removeprefix("allreduce.")
        ctx.process_set = options["process_set"]
        result: list[Tensor] = (
            current_session()
            .on_tensors(
                "allreduce",
                ctx.name,
                tensors,
                is_single=False,
                process_set=ctx.process_set.number(),
                **options["scaling"],
            )
            .wait()
        )
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        summed = current_session().on_tensors(
            "allreduce",
            f"{ctx.name}.grad",
            grads,
            is_single=False,
            process_set=ctx.process_set.number(),
            **ctx.options["scaling"],
        )
        return None, *summed.wait()


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
    """As `allreduce_async`, waited for; its gradient is reduced in the same way."""
    sent, context = compression.compress(tensor)
    scaling = scaling_of(op, average, prescale_factor, postscale_factor)
    (reduced,) = _AllReduce.apply({"name": name, "process_set": process_set, "scaling": scaling}, sent)  # type: ignore[no-untyped-call]
    result: Tensor = compression.decompress(reduced, context)
    return result


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As `allreduce_async_`, waited for."""
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
    """Several tensors, reduced together: none before all of them have been issued by all ranks."""
    scaling = scaling_of(op, average, prescale_factor, postscale_factor)
    return current_session().on_tensors(
        "allreduce", name, tensors, is_single=False, process_set=process_set.number(), **scaling
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """The same, into `tensors`."""
    scaling = scaling_of(op, average, prescale_factor, postscale_factor)
    return _in_place(tensors, name, process_set, scaling, is_single=False)


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
    """As `grouped_allreduce_async`, waited for, with gradients."""
    sent, contexts = zip(*map(compression.compress, tensors), strict=True)
    scaling = scaling_of(op, average, prescale_factor, postscale_factor)
    reduced = _AllReduce.apply({"name": name, "process_set": process_set, "scaling": scaling}, *sent)  # type: ignore[no-untyped-call]
    return [compression.decompress(one, context) for one, context in zip(reduced, contexts, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As `grouped_allreduce_async_`, waited for."""
    reduced: list[Tensor] = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()
    return reduced


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Handle:
    """Sum or average a sparse COO tensor, by gathering the ranks' indices and values.

    The handle gives a sparse tensor, coalesced; it may also be called.
    """
    if Op(op) not in (Average, Sum):
        raise ValueError(f"A sparse tensor can be summed or averaged, not reduced by {Op(op).name}.")
    given = tensor.coalesce()
    shape, divisor = tensor.shape, (process_set.size() or 1) if Op(op) is Average else 1

    def put_together(parts: list[Tensor]) -> Tensor:
        indices, values = parts
        return torch.sparse_coo_tensor(indices.t(), values / divisor, shape, check_invariants=False).coalesce()

    return current_session().on_tensors(
        "allgather",
        f"{name}.sparse" if name is not None else None,
        [given.indices().t().contiguous(), given.values()],
        is_single=False,
        finish=put_together,
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
    """This rank's rows of the reduction: equally many on all, the first ranks one more where need be."""
    return grouped_reducescatter_async(
        [tensor], name, op, process_set, prescale_factor, postscale_factor, is_single=True
    )


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    is_single: bool = False,
) -> Handle:
    if Op(op) is Adasum:
        raise ValueError("Adasum is not an op of reducescatter. Take Average, Sum, Min, Max or Product.")
    scaling = scaling_of(op, None, prescale_factor, postscale_factor)
    return current_session().on_tensors(
        "reducescatter", name, tensors, is_single=is_single, process_set=process_set.number(), **scaling
    )


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options = options
        ctx.name = current_session().name_for("reducescatter", options["name"]).removeprefix("reducescatter.")
        handle = grouped_reducescatter_async(tensors, ctx.name, *options["rest"])
        scattered: list[Tensor] = handle.wait()
        return tuple(scattered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        op, process_set, prescale, postscale = ctx.options["rest"]
        factor = prescale * postscale * ((process_set.size() or 1) if Op(op) is Sum else 1)
        sent = [grad * factor if factor != 1 else grad for grad in grads]
        gathered = current_session().on_tensors(
            "allgather", f"{ctx.name}.grad", sent, is_single=False, process_set=process_set.number()
        )
        return None, *gathered.wait()


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """As `reducescatter_async`, waited for, with Horovod's gradient: gathered, and for `Sum` times the ranks."""
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
    sent, contexts = zip(*map(compression.compress, tensors), strict=True)
    options = {"name": name, "rest": (op, process_set, prescale_factor, postscale_factor)}
    scattered = _ReduceScatter.apply(options, *sent)  # type: ignore[no-untyped-call]
    return [compression.decompress(one, context) for one, context in zip(scattered, contexts, strict=True)]
