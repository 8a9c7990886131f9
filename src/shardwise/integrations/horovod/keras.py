"""Horovod's calls for Keras 3, on any of its backends: `import shardwise.integrations.horovod.keras as hvd`.

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
from shardwise.integrations.horovod import callbacks
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
from shardwise.integrations.horovod.errors import HorovodInternalError
from shardwise.integrations.horovod.keras_variables import broadcast_variables
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.torch.functions import allgather_object, broadcast_object
from shardwise.integrations.horovod.torch.ops import Adasum, Average, Max, Min, Product, Sum
from shardwise.integrations.horovod.torch.reductions import grouped_allreduce_async

__all__ = [
    "Adasum",
    "Average",
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
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


class _Distributed:
    """What `DistributedOptimizer` puts before an optimizer's own `apply`."""

    _how: dict[str, Any]

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        return super().apply(_averaged(list(grads), **self._how), trainable_variables)  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    op: int = Average,
    backward_passes_per_step: int = 1,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer of the same class and options as `optimizer`, on gradients that are averaged over the ranks.

    They travel as one message. A model that is saved with it is loaded with the plain one; `load_model` puts this
    around it. Raises `ConfigError` for `backward_passes_per_step`.
    """
    if backward_passes_per_step != 1:
        raise ConfigError(
            "backward_passes_per_step is Keras's own here: give the optimizer gradient_accumulation_steps="
            f"{backward_passes_per_step}."
        )
    plain = type(optimizer)
    kind: Any = type(plain.__name__, (_Distributed, plain), {"__module__": plain.__module__})
    made = kind.from_config(optimizer.get_config())
    made._how = {"op": op, "process_set": process_set, "name": name or "gradients"}
    if optimizer.built:
        made.build(optimizer._trainable_variables)
        for mine, theirs in zip(made.variables, optimizer.variables, strict=True):
            mine.assign(theirs)
    return made


def _averaged(grads: list[Any], op: int, process_set: ProcessSet, name: str) -> list[Any]:
    """By the framework in which Keras computes; within compiled steps a call of the host does it."""
    present = [place for place, grad in enumerate(grads) if grad is not None]
    given = [grads[place] for place in present]
    backend = keras.backend.backend()
    reduced: Sequence[Any]
    if backend == "torch":
        detached = [grad.detach() for grad in given]
        reduced = grouped_allreduce_async(detached, name=name, op=op, process_set=process_set).wait()
    elif backend == "jax":
        from shardwise.integrations.horovod.jax import allreduce as of_jax

        reduced = of_jax(given, name, op, process_set=process_set)
    else:
        from shardwise.integrations.horovod.tensorflow_reductions import grouped_allreduce as of_tensorflow

        reduced = of_tensorflow(given, name=name, op=op, process_set=process_set)
    for place, one in zip(present, reduced, strict=True):
        grads[place] = one
    return grads


def load_model(filepath: Any, custom_objects: dict[str, Any] | None = None, **options: Any) -> Any:
    """`keras.models.load_model`, with `DistributedOptimizer` around the optimizer that was saved."""
    model = keras.models.load_model(filepath, custom_objects=custom_objects, **options)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer)
    return model


def allreduce(value: Any, name: str | None = None, average: bool | None = None, op: int | None = None) -> np.ndarray:
    """The average of every rank's `value`, a number or an array; the sum with `average=False`."""
    chosen = op if op is not None else (Sum if average is False else Average)
    return by_numpy.allreduce(np.asarray(value), name, chosen)


def allgather(value: Any, name: str | None = None) -> np.ndarray:
    """Every rank's `value`, along the first axis."""
    return by_numpy.allgather(np.asarray(value), name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> np.ndarray:
    """The `value` of `root_rank`."""
    return by_numpy.broadcast(np.asarray(value), root_rank, name)
