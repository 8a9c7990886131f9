"""Reductions and all-gather of TensorFlow tensors with their gradients, eagerly and within `tf.function`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from shardwise.integrations.horovod import numpy as numpy_hvd
from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.names import takes_horovods_arguments
from shardwise.integrations.horovod.ops import Average, Reduction, Sum
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set

Tensor = Any


class Compression:
    """Values for `compression=`: the dtype in which floating-point gradients are sent."""

    none = None
    fp16 = tf.float16
    bf16 = tf.bfloat16


@takes_horovods_arguments
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


@takes_horovods_arguments
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

    return _listed(reduce(*tensors))


def call_on_host(function: Any, sources: list[Tensor], dtypes: list[Any], shapes: list[Any]) -> list[Tensor]:
    """Call a function of numpy arrays: now if eager, else when the graph is executed."""
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(one) for one in function(*(one.numpy() for one in sources))]
    results = tf.numpy_function(function, sources, dtypes, stateful=True)
    results = _listed(results)
    for one, shape in zip(results, shapes, strict=True):
        one.set_shape(shape)
    return results


@takes_horovods_arguments
def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce the ranks' tensors and return this rank's rows. The gradient is gathered from all ranks."""
    return grouped_reducescatter([tensor], name, op, process_set, prescale_factor, postscale_factor)[0]


@takes_horovods_arguments
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors together."""
    name = current_session().name_for("reducescatter", name)
    reduction = Reduction.of(op, None, prescale_factor, postscale_factor, process_set)

    def on_host(*arrays: Any) -> Any:
        return numpy_hvd.grouped_reducescatter(
            arrays, name, reduction.op, process_set, prescale_factor, postscale_factor
        )

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def scatter(*sources: Tensor) -> tuple[list[Tensor], Any]:
        def gradient(*grads: Tensor) -> list[Tensor]:
            reduction.require_gradient("reducescatter")
            num_summed = (process_set.size() or 1) if reduction.op is Sum else 1
            factor = prescale_factor * postscale_factor * num_summed
            return _gather([grad * tf.cast(factor, grad.dtype) for grad in grads], f"{name}.grad", process_set)

        return call_on_host(on_host, list(sources), [one.dtype for one in sources], shapes_of_rows(sources)), gradient

    return _listed(scatter(*map(tf.convert_to_tensor, tensors)))


@takes_horovods_arguments
def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the ranks' tensors along the first axis, whose size may differ between ranks.

    The gradient is Horovod's: this rank's rows of the ranks' average.
    """
    return grouped_allgather([tensor], name, process_set)[0]


@takes_horovods_arguments
def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors together."""
    name = current_session().name_for("allgather", name)
    return _gather([tf.convert_to_tensor(one) for one in tensors], name, process_set)


def _gather(tensors: list[Tensor], name: str, process_set: ProcessSet) -> list[Tensor]:
    def on_host(*arrays: Any) -> Any:
        return numpy_hvd.grouped_allgather(arrays, name, process_set)

    def starts_on_host(*rows: Any) -> Any:
        """Where this rank's rows begin."""
        of_ranks = numpy_hvd.allgather(np.array([rows]), f"{name}.rows", process_set)
        return list(of_ranks[: process_set.rank()].sum(0, dtype=np.int32))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def gather(*sources: Tensor) -> tuple[list[Tensor], Any]:
        def gradient(*grads: Tensor) -> list[Tensor]:
            averaged = average(list(grads), f"{name}.grad", process_set)
            rows = [tf.shape(one)[0] for one in sources]
            starts = call_on_host(starts_on_host, rows, [tf.int32] * len(rows), [tf.TensorShape([])] * len(rows))
            return [one[start : start + count] for one, start, count in zip(averaged, starts, rows, strict=True)]

        return call_on_host(on_host, list(sources), [one.dtype for one in sources], shapes_of_rows(sources)), gradient

    return _listed(gather(*tensors))


def average(tensors: list[Tensor], name: str, process_set: ProcessSet) -> list[Tensor]:
    """The ranks' averages of dense tensors."""
    return _reduce_dense(tensors, name, Reduction.of(Average, None, 1.0, 1.0, process_set))


def shapes_of_rows(tensors: Sequence[Tensor]) -> list[Any]:
    """Their shapes with any number of rows."""
    return [tf.TensorShape(None) if one.shape.rank is None else [None, *one.shape[1:]] for one in tensors]


def _listed(results: Any) -> list[Tensor]:
    """Several results of a function with a gradient; TensorFlow gives one alone."""
    return list(results) if isinstance(results, list | tuple) else [results]
