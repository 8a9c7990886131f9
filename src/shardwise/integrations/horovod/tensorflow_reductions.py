"""Reductions and gathers of TensorFlow's tensors, eagerly and within graphs, for `tensorflow` and `keras`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from shardwise.integrations.horovod import numpy as by_numpy
from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.torch.ops import Op, scaling_of

Tensor = Any


class Compression:
    """For `compression=`: the dtype in which floating-point gradients travel."""

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
    """The reduction of every rank's `tensor`; its gradient is reduced likewise. Of `tf.IndexedSlices`, the slices of
    all ranks."""
    options = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return grouped_allreduce([tensor], average, name, compression, op, process_set=process_set, **options)[0]


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
    """Several tensors, reduced together. What is `None` stays so."""
    scaling = scaling_of(op, average, prescale_factor, postscale_factor)
    label = current_session().name_for("allreduce", name).removeprefix("allreduce.")
    found: list[Any] = [
        _reduced_slices(one, scaling["op"], f"{label}.{place}", process_set) if is_sparse(one) else one
        for place, one in enumerate(tensors)
    ]
    dense = [place for place, one in enumerate(tensors) if one is not None and not is_sparse(one)]
    if dense:
        given = [tf.convert_to_tensor(tensors[place]) for place in dense]
        sent = [tf.cast(one, compression) if compression and one.dtype.is_floating else one for one in given]
        for place, before, after in zip(dense, given, _reduced(sent, label, scaling, process_set), strict=True):
            found[place] = tf.cast(after, before.dtype)
    return found


def is_sparse(tensor: Any) -> bool:
    return isinstance(tensor, tf.IndexedSlices)


def _reduced_slices(slices: Any, op: str, name: str, process_set: ProcessSet) -> Any:
    if op not in ("Sum", "Average"):
        raise ValueError(f"IndexedSlices can be summed or averaged, not reduced by {op}.")
    values = allgather(slices.values, f"{name}.values", process_set)
    if op == "Average":
        values = values / tf.cast(process_set.size(), values.dtype)
    return tf.IndexedSlices(values, allgather(slices.indices, f"{name}.indices", process_set), slices.dense_shape)


def _reduced(tensors: list[Tensor], name: str, scaling: dict[str, Any], process_set: ProcessSet) -> list[Tensor]:
    op, factors = Op[scaling["op"]], (scaling["prescale"], scaling["postscale"])

    def on_host(*arrays: Any) -> Any:
        return by_numpy.grouped_allreduce(arrays, name, op, *factors, process_set)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce(*given: Tensor) -> tuple[list[Tensor], Any]:
        made = call_host(on_host, list(given), [one.dtype for one in given], [one.shape for one in given])
        return made, lambda *grads: _reduced(list(grads), f"{name}.grad", scaling, process_set)

    made: list[Tensor] = reduce(*tensors)
    return list(made) if isinstance(made, list | tuple) else [made]


def call_host(function: Any, given: list[Tensor], dtypes: list[Any], shapes: list[Any]) -> list[Tensor]:
    """`function` of numpy arrays, now or when the graph comes to it."""
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(one) for one in function(*(one.numpy() for one in given))]
    made = tf.numpy_function(function, given, dtypes, stateful=True)
    listed = list(made) if isinstance(made, list | tuple) else [made]
    for one, shape in zip(listed, shapes, strict=True):
        one.set_shape(shape)
    return listed


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Every rank's `tensor`, along the first axis, in which ranks may differ. No gradients go through it."""
    label = current_session().name_for("allgather", name).removeprefix("allgather.")
    given = tf.convert_to_tensor(tensor)
    shape = tf.TensorShape([None, *given.shape[1:]])
    return call_host(lambda array: [by_numpy.allgather(array, label, process_set)], [given], [given.dtype], [shape])[0]
