"""Horovod's collectives for numpy arrays: `import shardwise.integrations.horovod.numpy as hvd`.

They are those for torch tensors (`torch/`) without gradients. They return new arrays; `allreduce_` and `broadcast_`
write to the given array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwise.integrations.horovod import basics
from shardwise.integrations.horovod.arrays import to_numpy, to_torch
from shardwise.integrations.horovod.basics import *  # noqa: F403
from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.ops import Average, Reduction, poll, synchronize
from shardwise.integrations.horovod.pending import Handle
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.torch.functions import allgather_object, broadcast_object

Array = np.ndarray

__all__ = [
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_object",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]
__all__ += basics.__all__


def allreduce_async(
    array: Array,
    name: str | None = None,
    op: int = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    reduction = Reduction.of(op, None, prescale_factor, postscale_factor, process_set)
    return _issue("allreduce", name, array, **reduction.fields())


def allreduce(
    array: Array,
    name: str | None = None,
    op: int = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Reduce the ranks' arrays; by default, average them."""
    reduced: Array = allreduce_async(array, name, op, prescale_factor, postscale_factor, process_set).wait()
    return reduced


def allreduce_(array: Array, name: str | None = None, op: int = Average, **options: Any) -> Array:
    """`allreduce`, in place."""
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
    """`allreduce` of several arrays together."""
    reduction = Reduction.of(op, None, prescale_factor, postscale_factor, process_set)
    return _issue_group("allreduce", name, arrays, **reduction.fields())


def allgather_async(array: Array, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    return _issue("allgather", name, array, process_set=process_set.number())


def allgather(array: Array, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Concatenate the ranks' arrays along the first axis, whose size may differ between ranks."""
    gathered: Array = allgather_async(array, name, process_set).wait()
    return gathered


def grouped_allgather(
    arrays: Sequence[Array], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """`allgather` of several arrays together."""
    return _issue_group("allgather", name, arrays, process_set=process_set.number())


def broadcast_async(
    array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    return _issue("broadcast", name, array, process_set=process_set.number(), root=int(root_rank))


def broadcast(
    array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Return `root_rank`'s array on all ranks."""
    received: Array = broadcast_async(array, root_rank, name, process_set).wait()
    return received


def broadcast_(array: Array, root_rank: int, name: str | None = None, **options: Any) -> Array:
    """`broadcast`, in place."""
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

    def finish(pair: Any) -> Any:
        return to_numpy(pair[0], dtype) if counts is None else (to_numpy(pair[0], dtype), pair[1].numpy())

    return current_session().issue_tensors(
        "alltoall", name, [to_torch(array)], finish=finish, splits=counts, process_set=process_set.number()
    )


def alltoall(
    array: Array,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows to the i-th rank, and return the received rows.

    With `splits`, also return the number of rows from each rank. Without it, every rank gets the same number of rows.
    """
    return alltoall_async(array, splits, name, process_set).wait()


def reducescatter_async(
    array: Array,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    reduction = Reduction.of(op, None, prescale_factor, postscale_factor, process_set)
    return _issue("reducescatter", name, array, **reduction.fields())


def reducescatter(
    array: Array,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduce the ranks' arrays and return this rank's rows: the first ranks get one more if needed."""
    handle = reducescatter_async(array, name, op, process_set, prescale_factor, postscale_factor)
    scattered: Array = handle.wait()
    return scattered


def grouped_reducescatter(
    arrays: Sequence[Array],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """`reducescatter` of several arrays together."""
    reduction = Reduction.of(op, None, prescale_factor, postscale_factor, process_set)
    return _issue_group("reducescatter", name, arrays, **reduction.fields())


def _issue_group(verb: str, name: str | None, arrays: Sequence[Array], **fields: Any) -> list[Array]:
    handle = current_session().issue_tensors(verb, name, [*map(to_torch, arrays)], is_single=False, **fields)
    return [to_numpy(one, array.dtype) for one, array in zip(handle.wait(), arrays, strict=True)]


def _issue(verb: str, name: str | None, array: Array, **fields: Any) -> Handle:
    dtype = array.dtype
    return current_session().issue_tensors(
        verb, name, [to_torch(array)], finish=lambda result: to_numpy(result, dtype), **fields
    )
