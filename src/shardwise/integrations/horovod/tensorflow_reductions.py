"""Reductions and all-gather of TensorFlow tensors, eagerly and within `tf.function`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from shardwise.integrations.horovod import numpy as numpy_hvd
from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.ops import Reduction
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set

Tensor = Any


class Compression:
    """Values for `compression=`: the dtype in which floating-point gradients are sent."""

    none = None
    fp16 = tf.float16
    bf16 = tf.bfloat16


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
    """Reduce the ranks' tensors; by default, average them. The gradient is reduced in the same way.

    `tf.IndexedSlices` are gathered. Only `Average` and `Sum` have gradients.
    """
    reduction = Reduction.of(op, average, prescale_factor, postscale_factor, process_set)
    return all_reduce([tensor], name, compression, reduction)[0]


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
    """`allreduce` of several tensors together. `None` stays `None`."""
    reduction = Reduction.of(op, average, prescale_factor, postscale_factor, process_set)
    return all_reduce(tensors, name, compression, reduction)


def all_reduce(tensors: Sequence[Tensor], name: str | None, compression: Any, reduction: Reduction) -> list[Tensor]:
    """See `grouped_allreduce`."""
    name = current_session().name_for("allreduce", name)
    reduced: list[Any] = [
        _reduce_slices(one, f"{name}.{index}", reduction) if is_sparse(one) else one
        for index, one in enumerate(tensors)
    ]
    dense = [index for index, one in enumerate(tensors) if one is not None and not is_sparse(one)]
    if dense:
        sources = [tf.convert_to_tensor(tensors[index]) for index in dense]
        sent = [tf.cast(one, compression) if compression and one.dtype.is_floating else one for one in sources]
        for index, source, result in zip(dense, sources, _reduce_dense(sent, name, reduction), strict=True):
            reduced[index] = tf.cast(result, source.dtype)
    return reduced


def is_sparse(tensor: Any) -> bool:
    return isinstance(tensor, tf.IndexedSlices)


def _reduce_slices(slices: Any, name: str, reduction: Reduction) -> Any:
    factor, divisor = reduction.sparse_scaling()
    values = allgather(slices.values, f"{name}.values", reduction.process_set)
    if factor != 1:
        values = values * tf.cast(factor, values.dtype)
    if divisor != 1:
        values = values / tf.cast(divisor, values.dtype)
    indices = allgather(slices.indices, f"{name}.indices", reduction.process_set)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _reduce_dense(tensors: list[Tensor], name: str, reduction: Reduction) -> list[Tensor]:
    def on_host(*arrays: Any) -> Any:
        return numpy_hvd.grouped_allreduce(
            arrays, name, reduction.op, reduction.prescale, reduction.postscale, reduction.process_set
        )

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce(*sources: Tensor) -> tuple[list[Tensor], Any]:
        def gradient(*grads: Tensor) -> list[Tensor]:
            reduction.require_gradient("allreduce")
            return _reduce_dense(list(grads), f"{name}.grad", reduction)

        shapes = [one.shape for one in sources]
        return call_on_host(on_host, list(sources), [one.dtype for one in sources], shapes), gradient

    reduced: Any = reduce(*tensors)
    return list(reduced) if isinstance(reduced, list | tuple) else [reduced]


def call_on_host(function: Any, sources: list[Tensor], dtypes: list[Any], shapes: list[Any]) -> list[Tensor]:
    """Call a function of numpy arrays: now if eager, else when the graph is executed."""
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(one) for one in function(*(one.numpy() for one in sources))]
    results = tf.numpy_function(function, sources, dtypes, stateful=True)
    results = list(results) if isinstance(results, list | tuple) else [results]
    for one, shape in zip(results, shapes, strict=True):
        one.set_shape(shape)
    return results


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the ranks' tensors along the first axis, whose size may differ between ranks. Has no gradient."""
    name = current_session().name_for("allgather", name)
    source = tf.convert_to_tensor(tensor)
    shape = tf.TensorShape([None, *source.shape[1:]])

    def on_host(array: Any) -> Any:
        return [numpy_hvd.allgather(array, name, process_set)]

    return call_on_host(on_host, [source], [source.dtype], [shape])[0]
