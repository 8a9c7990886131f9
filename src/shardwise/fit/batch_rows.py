"""The samples of a micro-batch: how many there are, and the same batch with another number of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.errors import ConfigError
from shardwise.runtime.micro_batches import MicroBatch
from shardwise.system.torch_private import tree_leaves, tree_map_only


def rows_of(batch: object) -> int:
    """The samples of a micro-batch: the first dim of its first tensor. Raises `ConfigError` without one."""
    for leaf in _leaves(batch):
        if leaf.dim():
            return leaf.shape[0]
    given = (batch.args, batch.kwargs) if isinstance(batch, MicroBatch) else batch
    opaque = next((one for one in tree_leaves(given) if hasattr(one, "__dict__") and not isinstance(one, type)), None)
    inside = ""
    if opaque is not None:
        inside = (
            f" What a {type(opaque).__name__} holds is not seen: let the model take its tensors, in tuples, lists or "
            f"dicts."
        )
    raise ConfigError(
        f"The batch, of type {type(batch).__name__}, has no tensor with a dim for samples, so its size is unknown. "
        f"Give what the model is called with: a tensor, a tuple of arguments, or a dict of keyword arguments.{inside}"
    )


def with_rows(batch: object, rows: int, rows_now: int, num_parts: int = 1) -> object:
    """The same batch with `rows` samples, and with a part of the tokens along the second dim of tensors."""
    lengths: Sequence[int] = [leaf.shape[1] for leaf in _leaves(batch) if leaf.dim() > 1]
    length = lengths[0] if lengths else 0

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() and tensor.shape[0] == rows_now:
            tensor = (
                tensor.new_empty((rows, *tensor.shape[1:])) if tensor.is_floating_point() else _repeated(tensor, rows)
            )
        if num_parts > 1 and tensor.dim() > 1 and tensor.shape[1] == length:
            tensor = tensor[:, : length // num_parts]
        return tensor

    if isinstance(batch, MicroBatch):
        args, kwargs = tree_map_only(torch.Tensor, resized, (batch.args, batch.kwargs))
        return MicroBatch(args, kwargs)
    return tree_map_only(torch.Tensor, resized, batch)


def _repeated(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Integers are real: models look things up with them."""
    times = -(-rows // tensor.shape[0])
    return tensor.repeat(times, *[1] * (tensor.dim() - 1))[:rows]


def _leaves(batch: object) -> list[torch.Tensor]:
    given = (batch.args, batch.kwargs) if isinstance(batch, MicroBatch) else batch
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
