"""Horovod's API for Keras 3 on any backend: `import shardwise.integrations.horovod.keras as hvd`.

```python
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss=...)
model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from shardwise.errors import ConfigError
from shardwise.integrations.horovod import basics, callbacks
from shardwise.integrations.horovod import numpy as numpy_hvd
from shardwise.integrations.horovod.basics import *  # noqa: F403
from shardwise.integrations.horovod.keras_variables import broadcast_variables
from shardwise.integrations.horovod.names import takes_horovods_arguments
from shardwise.integrations.horovod.ops import Average, handle_average_backwards_compatibility
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.torch.functions import allgather_object, broadcast_object
from shardwise.integrations.horovod.torch.reductions import grouped_allreduce_async

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "load_model",
    "reducescatter",
]
__all__ += basics.__all__


class Compression:
    """Values for `compression=`: the dtype in which floating-point gradients are sent."""

    none = None
    fp16 = "float16"
    bf16 = "bfloat16"


class _Distributed:
    """The method that `DistributedOptimizer` adds to the wrapped optimizer's class."""

    _options: dict[str, Any]

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        return super().apply(_reduced(list(grads), **self._options), trainable_variables)  # type: ignore[misc]


@takes_horovods_arguments
def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    op: int = Average,
    backward_passes_per_step: int = 1,
    process_set: ProcessSet = global_process_set,
    *,
    compression: Any = Compression.none,
) -> Any:
    """An optimizer of the same class and options as `optimizer`, on gradients that are averaged over the ranks.

    Gradients are sent as one message. Keras saves it as an optimizer of the wrapped class; `load_model` wraps it again.
    Raises `ConfigError` for `backward_passes_per_step`.
    """
    if backward_passes_per_step != 1:
        raise ConfigError(
            "backward_passes_per_step is not supported. Use Keras's own option of the optimizer: "
            f"gradient_accumulation_steps={backward_passes_per_step}."
        )
    optimizer_class = type(optimizer)
    wrapper_class: Any = type(
        optimizer_class.__name__, (_Distributed, optimizer_class), {"__module__": optimizer_class.__module__}
    )
    wrapper = wrapper_class.from_config(optimizer.get_config())
    wrapper._options = {"op": op, "process_set": process_set, "name": name or "gradients", "compression": compression}
    if optimizer.built:
        wrapper.build(optimizer._trainable_variables)
        for copy, original in zip(wrapper.variables, optimizer.variables, strict=True):
            copy.assign(original)
    return wrapper


def _reduced(grads: list[Any], op: int, process_set: ProcessSet, name: str, compression: Any) -> list[Any]:
    """Reduce gradients of the framework in which Keras computes. `None` stays `None`."""
    present = [index for index, grad in enumerate(grads) if grad is not None]
    sources = [_as_sent(grads[index], compression) for index in present]
    if not sources:
        return grads
    backend = keras.backend.backend()
    reduced: Sequence[Any]
    if backend == "torch":
        sources = [grad.detach() for grad in sources]
        reduced = grouped_allreduce_async(sources, name=name, op=op, process_set=process_set).wait()
    elif backend == "jax":
        from shardwise.integrations.horovod.jax import allreduce as jax_allreduce

        reduced = jax_allreduce(sources, name, op, process_set=process_set)
    else:
        from shardwise.integrations.horovod.tensorflow_reductions import grouped_allreduce as tensorflow_allreduce

        reduced = tensorflow_allreduce(sources, name=name, op=op, process_set=process_set)
    for index, grad in zip(present, reduced, strict=True):
        is_cast = compression is not None and not _is_sparse(grad)
        grads[index] = keras.ops.cast(grad, grads[index].dtype) if is_cast else grad
    return grads


def _as_sent(grad: Any, compression: Any) -> Any:
    is_cast = compression is not None and not _is_sparse(grad) and keras.backend.is_float_dtype(grad.dtype)
    return keras.ops.cast(grad, compression) if is_cast else grad


def _is_sparse(grad: Any) -> bool:
    """Whether it is rows of an embedding, which TensorFlow gives by their indices and which are sent as they are."""
    return hasattr(grad, "dense_shape")


@takes_horovods_arguments
def load_model(
    filepath: Any,
    custom_objects: dict[str, Any] | None = None,
    *,
    compression: Any = Compression.none,
    **options: Any,
) -> Any:
    """`keras.models.load_model`, with the saved optimizer wrapped in `DistributedOptimizer`."""
    model = keras.models.load_model(filepath, custom_objects=custom_objects, **options)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model


@takes_horovods_arguments
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
) -> np.ndarray:
    """Reduce the ranks' values, numbers or arrays; by default, average them."""
    chosen = handle_average_backwards_compatibility(op, average)
    return numpy_hvd.allreduce(np.asarray(value), name, chosen, prescale_factor, postscale_factor)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> np.ndarray:
    """Reduce the ranks' values, and return this rank's rows of the result."""
    return numpy_hvd.reducescatter(np.asarray(value), name, op)


def allgather(value: Any, name: str | None = None) -> np.ndarray:
    """Concatenate the ranks' values along the first axis."""
    return numpy_hvd.allgather(np.asarray(value), name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> np.ndarray:
    """Return `root_rank`'s value on all ranks."""
    return numpy_hvd.broadcast(np.asarray(value), root_rank, name)
