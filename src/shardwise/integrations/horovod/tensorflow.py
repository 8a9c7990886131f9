"""Horovod's collectives for TensorFlow: `import shardwise.integrations.horovod.tensorflow as hvd`.

They work eagerly, and within `tf.function` through a host callback (`tf.numpy_function`). There, ranks must trace
collectives in the same order, or name them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from shardwise.errors import ConfigError
from shardwise.integrations.horovod import basics
from shardwise.integrations.horovod import numpy as numpy_hvd
from shardwise.integrations.horovod.basics import *  # noqa: F403
from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.keras import DistributedOptimizer
from shardwise.integrations.horovod.names import takes_horovods_arguments
from shardwise.integrations.horovod.ops import Average, Reduction, handle_average_backwards_compatibility
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.tensorflow_reductions import (
    Compression,
    all_reduce,
    allgather,
    allreduce,
    average,
    call_on_host,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    is_sparse,
    reducescatter,
    shapes_of_rows,
)
from shardwise.integrations.horovod.torch import functions

Tensor = Any
allgather_object = takes_horovods_arguments(functions.allgather_object)
broadcast_object = takes_horovods_arguments(functions.broadcast_object)

__all__ = [
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += basics.__all__


@takes_horovods_arguments
def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return `root_rank`'s tensor on all ranks. The gradient is Horovod's: the average on the root, zero elsewhere."""
    name = current_session().name_for("broadcast", name)

    def on_host(array: Any) -> Any:
        return [numpy_hvd.broadcast(array, root_rank, name, process_set)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def send(source: Tensor) -> tuple[Tensor, Any]:
        def gradient(grad: Tensor) -> Tensor:
            averaged = average([grad], f"{name}.grad", process_set)[0]
            return averaged if current_session().rank == root_rank else tf.zeros_like(averaged)

        return call_on_host(on_host, [source], [source.dtype], [source.shape])[0], gradient

    return send(tf.convert_to_tensor(tensor))


@takes_horovods_arguments
def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows to the i-th rank, and return the received rows. Gradients are sent back.

    With `splits`, also return the number of rows from each rank in int32. Without it, every rank gets the same number
    of rows.
    """
    name = current_session().name_for("alltoall", name)
    counts = tf.zeros([0], tf.int32) if splits is None else tf.cast(splits, tf.int32)
    received, received_counts = _all_to_all(tf.convert_to_tensor(tensor), counts, name, process_set)
    return received if splits is None else (received, received_counts)


def _all_to_all(tensor: Tensor, splits: Tensor, name: str, process_set: ProcessSet) -> tuple[Tensor, Tensor]:
    """The received rows and their numbers; empty `splits` are equal ones."""

    def on_host(array: Any, counts: Any) -> Any:
        num_ranks, rows = process_set.size() or 1, len(array) if array.ndim else 0
        if not counts.size and (not array.ndim or rows % num_ranks):
            numpy_hvd.alltoall(array, None, name, process_set)  # the coordinator raises the error on all ranks
        return list(
            numpy_hvd.alltoall(array, counts if counts.size else [rows // num_ranks] * num_ranks, name, process_set)
        )

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def exchange(source: Tensor) -> tuple[list[Tensor], Any]:
        shapes = [*shapes_of_rows([source]), [None]]
        received, counts = call_on_host(on_host, [source, splits], [source.dtype, tf.int32], shapes)

        def gradient(grad: Tensor, _: Any) -> Tensor:
            return _all_to_all(grad, counts, f"{name}.grad", process_set)[0]

        return [received, counts], gradient

    received, counts = exchange(tensor)
    return received, counts


def _eager_array(call: str, tensor: Tensor) -> np.ndarray:
    if not tf.executing_eagerly():
        raise ConfigError(f"hvd.{call}() works only eagerly. Call it outside of tf.function.")
    array: np.ndarray = tf.convert_to_tensor(tensor).numpy()
    return array


@takes_horovods_arguments
def broadcast_variables(variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Broadcast `root_rank`'s values of `variables`, which all ranks must list in the same order. Only eagerly."""
    variables = list(variables)
    handles = [
        numpy_hvd.broadcast_async(
            _eager_array("broadcast_variables", variable), root_rank, f"variable.{index}", process_set
        )
        for index, variable in enumerate(variables)
    ]
    for variable, handle in zip(variables, handles, strict=True):
        variable.assign(handle.wait())


def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Broadcast `root_rank`'s values of `variables`, and return these. Also within `tf.function`."""
    variables = list(variables)
    name = current_session().name_for("broadcast", name)
    received = [broadcast(one, root_rank, f"{name}.{index}", process_set) for index, one in enumerate(variables)]
    for variable, value in zip(variables, received, strict=True):
        variable.assign(value)
    return variables


@takes_horovods_arguments
def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """`broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def rank_op(name: str | None = None) -> Tensor:
    """This rank, as a tensor."""
    return tf.constant(basics.rank(), tf.int32, name=name)


def local_rank_op(name: str | None = None) -> Tensor:
    """This rank among those of its host, as a tensor."""
    return tf.constant(basics.local_rank(), tf.int32, name=name)


def size_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """The number of ranks in a process set, as a tensor."""
    return tf.constant(len(current_session().sets[process_set_id]), tf.int32, name=name)


def local_size_op(name: str | None = None) -> Tensor:
    """The number of ranks on this host, as a tensor."""
    return tf.constant(basics.local_size(), tf.int32, name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """1 if this rank is in a process set, else 0, as a tensor."""
    return tf.constant(int(basics.rank() in current_session().sets[process_set_id]), tf.int32, name=name)


class DistributedGradientTape:
    """Wraps a `tf.GradientTape`: `gradient` averages over the ranks."""

    @takes_horovods_arguments
    def __init__(
        self,
        gradtape: Any,
        compression: Any = Compression.none,
        op: int = Average,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self._tape = gradtape
        self._compression = compression
        self._reduction = Reduction.of(op, None, 1.0, 1.0, process_set)
        self._sparse_as_dense = sparse_as_dense

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **options: Any) -> Any:
        """The tape's gradients, averaged. A source that does not affect the target must be so on all ranks: `None`."""
        grads = self._tape.gradient(target, sources, output_gradients, **options)
        flat = tf.nest.flatten(grads, expand_composites=False)
        if self._sparse_as_dense:
            flat = [tf.convert_to_tensor(one) if is_sparse(one) else one for one in flat]
        return tf.nest.pack_sequence_as(sources, all_reduce(flat, None, self._compression, self._reduction))
