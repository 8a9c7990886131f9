"""Horovod's collectives for JAX: `import shardwise.integrations.horovod.jax as hvd`. Horovod itself has none.

They take arrays, or pytrees as one message, and work within `jax.jit` through a host callback
(`jax.experimental.io_callback`). Each rank is a process with its own devices; its JAX does not know the other ranks.
Within `jit`, ranks must trace collectives in the same order, or name them. `allreduce`, `broadcast` and `allgather`
have gradients.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.experimental import io_callback

from shardwise.integrations.horovod import basics
from shardwise.integrations.horovod.arrays import to_numpy, to_torch
from shardwise.integrations.horovod.basics import *  # noqa: F403
from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.ops import Average, Reduction, no_gradient
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.torch.functions import allgather_object, broadcast_object

Array = Any
Tree = Any

__all__ = [
    "DistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "average_gradients",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
]
__all__ += basics.__all__


class _Call(NamedTuple):
    """A collective without its arrays. Hashable, as JAX requires of static arguments."""

    verb: str
    name: str
    fields: tuple[tuple[str, Any], ...]
    """Fields of the `Request`."""


def allreduce(
    tree: Tree,
    name: str | None = None,
    op: int = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tree:
    """Reduce each array of `tree` over the ranks, all in one message. The gradient is reduced in the same way.

    Only `Average` and `Sum` have gradients.
    """
    reduction = Reduction.of(op, None, prescale_factor, postscale_factor, process_set)
    return _on_tree(_call("allreduce", name, **reduction.fields()), tree)


def broadcast(
    tree: Tree, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tree:
    """Return `root_rank`'s arrays on all ranks. The gradient is the average on the root, zero on the other ranks."""
    return _on_tree(_call("broadcast", name, root=int(root_rank), process_set=process_set.number()), tree)


broadcast_parameters = broadcast


def allgather(array: Array, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Concatenate the ranks' arrays along the first axis. Within `jit`, all must have the same number of rows.

    The gradient is this rank's rows of the average of the ranks' gradients.
    """
    return _on_tree(_call("allgather", name, process_set=process_set.number()), array)


def average_gradients(
    op: int = Average, name: str = "gradients", process_set: ProcessSet = global_process_set
) -> optax.GradientTransformation:
    """An optax transformation that averages gradients over the ranks, in one message."""

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        return allreduce(updates, name, op, process_set=process_set), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def DistributedOptimizer(  # noqa: N802 (Horovod's style)
    optimizer: optax.GradientTransformation,
    op: int = Average,
    name: str = "gradients",
    process_set: ProcessSet = global_process_set,
) -> optax.GradientTransformation:
    """`optimizer` on gradients that are averaged over the ranks. Two optimizers in one program need two names."""
    chained: optax.GradientTransformation = optax.chain(average_gradients(op, name, process_set), optimizer)
    return chained


def _call(verb: str, name: str | None, **fields: Any) -> _Call:
    return _Call(verb, current_session().name_for(verb, name), tuple(sorted(fields.items())))


def _on_tree(call: _Call, tree: Tree) -> Tree:
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _differentiable(call, tuple(map(jax.numpy.asarray, leaves))))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call: _Call, leaves: tuple[Array, ...]) -> tuple[Array, ...]:
    return _execute(call, leaves)


def _forward(call: _Call, leaves: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple[int, ...]]:
    return _execute(call, leaves), tuple(leaf.shape[0] if leaf.ndim else 0 for leaf in leaves)


def _backward(call: _Call, rows: tuple[int, ...], grads: tuple[Array, ...]) -> tuple[tuple[Array, ...]]:
    fields = dict(call.fields)
    if call.verb == "allreduce":
        if fields["op"] not in ("Average", "Sum"):
            raise no_gradient("allreduce", fields["op"])
        reduction = fields
    else:
        reduction = {"op": "Average", "prescale": 1.0, "postscale": 1.0, "process_set": fields["process_set"]}
    reduced = _execute(_Call("allreduce", f"{call.name}.grad", tuple(sorted(reduction.items()))), grads)
    if call.verb == "broadcast":
        is_root = current_session().rank == fields["root"]
        return (reduced if is_root else tuple(map(jax.numpy.zeros_like, reduced)),)
    if call.verb == "allgather":
        starts = _starts(call, rows, grads)
        return (tuple(grad[start : start + n] for grad, start, n in zip(reduced, starts, rows, strict=True)),)
    return (reduced,)


_differentiable.defvjp(_forward, _backward)


def _starts(call: _Call, rows: tuple[int, ...], grads: tuple[Array, ...]) -> list[int]:
    """The index of this rank's first row in each gathered array."""
    process_set = dict(call.fields)["process_set"]
    index = current_session().sets[process_set].index(current_session().rank)
    if any(isinstance(grad, jax.core.Tracer) for grad in grads):
        return [index * count for count in rows]  # within `jit`, all ranks have the same number of rows
    counts = _Call("allgather", f"{call.name}.rows", (("process_set", process_set),))
    (all_rows,) = _on_host(counts, np.array([rows]))
    starts: list[int] = all_rows[:index].sum(0).tolist()
    return starts


def _execute(call: _Call, leaves: tuple[Array, ...]) -> tuple[Array, ...]:
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
    handle = current_session().issue_tensors(
        call.verb, call.name, [*map(to_torch, arrays)], is_single=False, **dict(call.fields)
    )
    return tuple(to_numpy(one, array.dtype) for one, array in zip(handle.wait(), arrays, strict=True))
