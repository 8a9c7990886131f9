"""Horovod's collectives for numpy arrays: `import shardwise.integrations.horovod.numpy as hvd`.

As those for torch tensors (`torch/`), without gradients. What is returned is a new array; `allreduce_` and
`broadcast_` write to the one they were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwise.integrations.horovod.arrays import to_numpy, to_torch
from shardwise.integrations.horovod.context import (
    add_process_set,
    barrier,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.errors import HorovodInternalError
from shardwise.integrations.horovod.pending import Handle
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.torch.functions import allgather_object, broadcast_object
from shardwise.integrations.horovod.torch.ops import (
    Adasum,
    Average,
    Max,
    Min,
    Op,
    Product,
    Sum,
    poll,
    scaling_of,
    synchronize,
)

Array = np.ndarray

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def allreduce_async(
    array: Array,
    name: str | None = None,
    op: int = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    scaling = scaling_of(op, None, prescale_factor, postscale_factor)
    return _issue("allreduce", name, array, process_set, **scaling)


def allreduce(
    array: Array,
    name: str | None = None,
    op: int = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """The reduction of every rank's `array`."""
    reduced: Array = allreduce_async(array, name, op, prescale_factor, postscale_factor, process_set).wait()
    return reduced


def allreduce_(array: Array, name: str | None = None, op: int = Average, **options: Any) -> Array:
    """The same, into `array`."""
    array[...] = allreduce(array, name, op, **options)
    return array


def grouped_allreduce(
    arrays: Sequence[Array],
    name: str | None = None,
    op: int = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Several arrays, reduced together."""
    scaling = scaling_of(op, None, prescale_factor, postscale_factor)
    handle = current_session().on_tensors(
        "allreduce", name, [*map(to_torch, arrays)], is_single=False, process_set=process_set.number(), **scaling
    )
    return [to_numpy(one, array.dtype) for one, array in zip(handle.wait(), arrays, strict=True)]


def allgather_async(array: Array, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    return _issue("allgather", name, array, process_set)


def allgather(array: Array, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Every rank's `array`, along the first axis, in which ranks may differ."""
    gathered: Array = allgather_async(array, name, process_set).wait()
    return gathered


def broadcast_async(
    array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    return _issue("broadcast", name, array, process_set, root=root_rank)


def broadcast(
    array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """The `array` of `root_rank`."""
    sent: Array = broadcast_async(array, root_rank, name, process_set).wait()
    return sent


def broadcast_(array: Array, root_rank: int, name: str | None = None, **options: Any) -> Array:
    """The same, into `array`."""
    array[...] = broadcast(array, root_rank, name, **options)
    return array


def alltoall_async(
    array: Array,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    counts = None if splits is None else tuple(int(count) for count in splits)
    dtype = array.dtype

    def finish(both: Any) -> Any:
        return to_numpy(both[0], dtype) if counts is None else (to_numpy(both[0], dtype), both[1].numpy())

    return current_session().on_tensors(
        "alltoall", name, [to_torch(array)], finish=finish, splits=counts, process_set=process_set.number()
    )


def alltoall(
    array: Array,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """`splits[i]` rows go to the i-th rank; with `splits`, what came, and how many rows from each rank."""
    return alltoall_async(array, splits, name, process_set).wait()


def reducescatter_async(
    array: Array,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    if Op(op) is Adasum:
        raise ValueError("Adasum is not an op of reducescatter. Take Average, Sum, Min, Max or Product.")
    scaling = scaling_of(op, None, prescale_factor, postscale_factor)
    return _issue("reducescatter", name, array, process_set, **scaling)


def reducescatter(
    array: Array,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """This rank's rows of the reduction."""
    handle = reducescatter_async(array, name, op, process_set, prescale_factor, postscale_factor)
    scattered: Array = handle.wait()
    return scattered


def _issue(verb: str, name: str | None, array: Array, process_set: ProcessSet, **fields: Any) -> Handle:
    dtype = array.dtype
    return current_session().on_tensors(
        verb,
        name,
        [to_torch(array)],
        finish=lambda one: to_numpy(one, dtype),
        process_set=process_set.number(),
        **fields,
    )
