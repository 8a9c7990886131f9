"""Horovod's collectives for TensorFlow: `import shardwise.integrations.horovod.tensorflow as hvd`.

They work eagerly and within `tf.function`, where a call of the host carries them out (`tf.numpy_function`). Within it
ranks trace in the same order, or give names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from shardwise.integrations.horovod import numpy as by_numpy
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
from shardwise.integrations.horovod.keras import DistributedOptimizer
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.tensorflow_reductions import (
    Compression,
    allgather,
    allreduce,
    call_host,
    grouped_allreduce,
    is_sparse,
)
from shardwise.integrations.horovod.torch.functions import allgather_object, broadcast_object
from shardwise.integrations.horovod.torch.ops import Adasum, Average, Max, Min, Product, Sum

Tensor = Any

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
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
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The `tensor` of `root_rank`. No gradients go through it."""
    label = current_session().name_for("broadcast", name).removeprefix("broadcast.")
    given = tf.convert_to_tensor(tensor)
    return call_host(
        lambda array: [by_numpy.broadcast(array, root_rank, label, process_set)], [given], [given.dtype], [given.shape]
    )[0]


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """`splits[i]` rows go to the i-th rank. Eagerly alone, and no gradients go through it."""
    given = tf.convert_to_tensor(tensor)
    made = by_numpy.alltoall(given.numpy(), None if splits is None else list(splits), name, process_set)
    return tf.convert_to_tensor(made) if splits is None else tuple(map(tf.convert_to_tensor, made))


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the reduction. Eagerly alone, and no gradients go through it."""
    array = tf.convert_to_tensor(tensor).numpy()
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return tf.convert_to_tensor(by_numpy.reducescatter(array, name, op, process_set, **factors))


def broadcast_variables(variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Give all ranks `root_rank`'s values of `variables`, listed in the same order. Eagerly alone."""
    listed = list(variables)
    under_way = [
        by_numpy.broadcast_async(variable.numpy(), root_rank, f"variable.{place}", process_set)
        for place, variable in enumerate(listed)
    ]
    for variable, handle in zip(listed, under_way, strict=True):
        variable.assign(handle.wait())


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` is averaged over the ranks."""

    def __init__(
        self,
        gradtape: Any,
        compression: Any = Compression.none,
        op: int = Average,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self._tape = gradtape
        self._how = {"compression": compression, "op": op, "process_set": process_set}
        self._sparse_as_dense = sparse_as_dense

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **options: Any) -> Any:
        """As the tape's own, averaged; what no source reaches is `None` on all ranks, or an error."""
        grads = self._tape.gradient(target, sources, output_gradients, **options)
        flat = tf.nest.flatten(grads, expand_composites=False)
        if self._sparse_as_dense:
            flat = [tf.convert_to_tensor(one) if is_sparse(one) else one for one in flat]
        return tf.nest.pack_sequence_as(sources, grouped_allreduce(flat, **self._how))
