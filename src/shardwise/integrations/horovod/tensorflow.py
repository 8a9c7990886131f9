"""Horovod's collectives for TensorFlow: `import shardwise.integrations.horovod.tensorflow as hvd`.

They work eagerly, and within `tf.function` through a host callback (`tf.numpy_function`). There, ranks must trace
collectives in the same order, or name them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from shardwise.errors import ConfigError
from shardwise.integrations.horovod import basics
from shardwise.integrations.horovod import numpy as numpy_hvd
from shardwise.integrations.horovod.basics import *  # noqa: F403
from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.keras import DistributedOptimizer
from shardwise.integrations.horovod.ops import Average, Reduction
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.tensorflow_reductions import (
    Compression,
    all_reduce,
    allgather,
    allreduce,
    call_on_host,
    grouped_allreduce,
    is_sparse,
)
from shardwise.integrations.horovod.torch.functions import allgather_object, broadcast_object

Tensor = Any

__all__ = [
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "grouped_allreduce",
    "reducescatter",
]
__all__ += basics.__all__


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return `root_rank`'s tensor on all ranks. Has no gradient."""
    name = current_session().name_for("broadcast", name)
    source = tf.convert_to_tensor(tensor)

    def on_host(array: Any) -> Any:
        return [numpy_hvd.broadcast(array, root_rank, name, process_set)]

    return call_on_host(on_host, [source], [source.dtype], [source.shape])[0]


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows to the i-th rank, and return the received rows. Only eagerly; has no gradient.

    With `splits`, also return the number of rows from each rank.
    """
    array = _eager_array("alltoall", tensor)
    received = numpy_hvd.alltoall(array, None if splits is None else list(splits), name, process_set)
    return tf.convert_to_tensor(received) if splits is None else tuple(map(tf.convert_to_tensor, received))


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce the ranks' tensors and return this rank's rows. Only eagerly; has no gradient."""
    array = _eager_array("reducescatter", tensor)
    scattered = numpy_hvd.reducescatter(array, name, op, process_set, prescale_factor, postscale_factor)
    return tf.convert_to_tensor(scattered)


def _eager_array(call: str, tensor: Tensor) -> np.ndarray:
    if not tf.executing_eagerly():
        raise ConfigError(f"hvd.{call}() works only eagerly. Call it outside of tf.function.")
    array: np.ndarray = tf.convert_to_tensor(tensor).numpy()
    return array


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


class DistributedGradientTape:
    """Wraps a `tf.GradientTape`: `gradient` averages over the ranks."""

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
