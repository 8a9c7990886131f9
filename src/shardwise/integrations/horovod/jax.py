"""Horovod's collectives for JAX: `import shardwise.integrations.horovod.jax as hvd`. Horovod itself has none.

They work on arrays, on pytrees of them as one message, and within `jax.jit`, where a call of the host carries them out
(`jax.experimental.io_callback`): each rank is a process with devices of its own, whose JAX knows nothing of the others.
Within `jit` ranks trace in the same order, or give names. `allreduce`, `broadcast` and `allgather` have gradients.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.experimental import io_callback

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
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.torch.functions import allgather_object, broadcast_object
from shardwise.integrations.horovod.torch.ops import Adasum, Average, Max, Min, Product, Sum, scaling_of

Array = Any
Tree = Any

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
    "average_gradients",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
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


class _Call(NamedTuple):
    """A collective but for its arrays."""

    verb: str
    name: str
    fields: tuple[tuple[str, Any], ...]


def allreduce(
    tree: Tree,
    name: str | None = None,
    op: int = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tree:
    """Every array of `tree`, reduced over the ranks: all of them in one message. The gradient is reduced likewise."""
    fields = scaling_of(op, None, prescale_factor, postscale_factor)
    return _on_tree(_call("allreduce", name, process_set, **fields), tree)


def broadcast(
    tree: Tree, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tree:
    """`root_rank`'s arrays. The gradient is the ranks' average on the root and zero elsewhere."""
    return _on_tree(_call("broadcast", name, process_set, root=root_rank), tree)


broadcast_parameters = broadcast


def allgather(array: Array, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Every rank's `array`, along the first axis; within `jit` all must have equally many rows.

    The gradient is this rank's rows of the ranks' average.
    """
    return _on_tree(_call("allgather", name, process_set), array)


def average_gradients(
    op: int = Average, name: str = "gradients", process_set: ProcessSet = global_process_set
) -> optax.GradientTransformation:
    """An optax transformation that averages gradients over the ranks, in one message."""

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        return allreduce(updates, name, op, process_set=process_set), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def DistributedOptimizer(  # noqa: N802 (as Horovod names its own)
    optimizer: optax.GradientTransformation,
    op: int = Average,
    name: str = "gradients",
    process_set: ProcessSet = global_process_set,
) -> optax.GradientTransformation:
    """`optimizer` on gradients that are averaged over the ranks. Two in one program need two names."""
    chained: optax.GradientTransformation = optax.chain(average_gradients(op, name, process_set), optimizer)
    return chained


def _call(verb: str, name: str | None, process_set: ProcessSet, **fields: Any) -> _Call:
    label = current_session().name_for(verb, name).removeprefix(f"{verb}.")
    return _Call(verb, label, (*sorted(fields.items()), ("process_set", process_set.number())))


def _on_tree(call: _Call, tree: Tree) -> Tree:
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _differentiable(call, tuple(map(jax.numpy.asarray, leaves))))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call: _Call, leaves: tuple[Array, ...]) -> tuple[Array, ...]:
    return _carried_out(call, leaves)


def _forward(call: _Call, leaves: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple[int, ...]]:
    return _carried_out(call, leaves), tuple(leaf.shape[0] if leaf.ndim else 0 for leaf in leaves)


def _backward(call: _Call, rows: tuple[int, ...], grads: tuple[Array, ...]) -> tuple[tuple[Array, ...]]:
    fields = dict(call.fields)
    numbered = ("process_set", fields["process_set"])
    is_reduced = call.verb == "allreduce"
    scaling = fields if is_reduced else {**scaling_of(Average, None, 1.0, 1.0), "process_set": numbered[1]}
    reduced = _carried_out(_Call("allreduce", f"{call.name}.grad", tuple(sorted(scaling.items()))), grads)
    if call.verb == "broadcast":
        return (tuple(grad if current_session().rank == fields["root"] else 0 * grad for grad in reduced),)
    if call.verb == "allgather":
        ranks = current_session().sets[numbered[1]]
        place = ranks.index(current_session().rank)
        return (tuple(grad[place * count : (place + 1) * count] for grad, count in zip(reduced, rows, strict=True)),)
    return (reduced,)


_differentiable.defvjp(_forward, _backward)


def _carried_out(call: _Call, leaves: tuple[Array, ...]) -> tuple[Array, ...]:
    if not leaves:
        return ()
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return tuple(map(jax.numpy.asarray, _on_host(call, *leaves)))
    num_ranks = len(current_session().sets[dict(call.fields)["process_set"]]) if call.verb == "allgather" else 1
    shapes = [
        jax.ShapeDtypeStruct((leaf.shape[0] * num_ranks, *leaf.shape[1:]) if num_ranks > 1 else leaf.shape, leaf.dtype)
        for leaf in leaves
    ]
    return tuple(io_callback(partial(_on_host, call), tuple(shapes), *leaves))


def _on_host(call: _Call, *leaves: Array) -> tuple[np.ndarray, ...]:
    arrays = [np.asarray(leaf) for leaf in leaves]
    handle = current_session().on_tensors(
        call.verb, call.name, [*map(to_torch, arrays)], is_single=False, **dict(call.fields)
    )
    return tuple(to_numpy(one, array.dtype) for one, array in zip(handle.wait(), arrays, strict=True))
