"""The batch of one optimizer step as micro-batches, and the loss of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from shardwise.errors import ConfigError, ModelError

Tensor = torch.Tensor
LossFunction = Callable[..., Tensor]
"""Called with the model's output, and the micro-batch's target if there are targets."""


@dataclass(frozen=True)
class MicroBatch:
    """What the model is called with, and what its output is compared with, if that is given apart."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None
    has_target: bool = False

    def loss(self, output: Any, loss_fn: LossFunction | None) -> Tensor:
        """The loss of `output`: what `loss_fn` makes of it, else the output itself, or its `loss`."""
        loss: Any = output
        if loss_fn is not None:
            loss = loss_fn(output, self.target) if self.has_target else loss_fn(output)
        elif isinstance(output, Mapping) or hasattr(output, "loss"):
            loss = output.get("loss") if isinstance(output, Mapping) else output.loss
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            whose = "loss_fn returns" if loss_fn is not None else "The model returns"
            cure = "" if loss_fn is not None else ", or give train_step a loss_fn that makes one of the output"
            raise ModelError(f"{whose} {shown}, but a step needs a loss: a tensor of one element. Return that{cure}.")
        return loss


def micro_batches(batch: Any, target: Any, num: int) -> list[MicroBatch]:
    """`num` micro-batches of `batch`; see `Engine.train_step` for what that may be.

    Raises `ConfigError` for one that cannot be cut evenly, or that has too few.
    """
    inputs = _parts(batch, num, "batch")
    if target is None:
        return [_called_with(part) for part in inputs]
    targets = _parts(target, num, "target")
    return [_called_with(part, one, has_target=True) for part, one in zip(inputs, targets, strict=True)]


def _called_with(part: Any, target: Any = None, *, has_target: bool = False) -> MicroBatch:
    if isinstance(part, Mapping):
        return MicroBatch((), dict(part), target, has_target)
    args = tuple(part) if isinstance(part, tuple | list) and not hasattr(part, "_fields") else (part,)
    return MicroBatch(args, {}, target, has_target)


def _parts(value: Any, num: int, what: str) -> Sequence[Any]:
    if isinstance(value, list | Iterator):
        parts = list(islice(value, num)) if isinstance(value, Iterator) else value
        if len(parts) != num:
            raise ConfigError(
                f"{what} has {len(parts)} micro-batches, but the plan's accumulate is {num}: give as many, or one "
                f"{what} as a tensor, tuple or dict, which is cut along its first dimension."
            )
        return parts
    if num == 1:
        return [value]
    rows = {one.shape[0] if one.dim() else 0 for one in _tensors_in(value)}
    if not rows:
        raise ConfigError(f"{what} has no tensor that could be cut into {num} micro-batches (the plan's accumulate).")
    if len(rows) > 1 or next(iter(rows)) % num or not next(iter(rows)):
        told = " and ".join(map(str, sorted(rows)))
        raise ConfigError(
            f"{what} has tensors of {told} rows, which cannot be cut into {num} even micro-batches (the plan's "
            f"accumulate). Give a multiple of {num} rows, or a list of {num} micro-batches."
        )
    return [_share(value, place, num) for place in range(num)]


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)


def _share(value: Any, place: int, num: int) -> Any:
    """The rows of micro-batch `place`; what is no tensor is every micro-batch's."""
    if isinstance(value, Tensor):
        return value.chunk(num)[place]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_share(item, place, num) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_share(item, place, num) for item in value)
    if isinstance(value, Mapping):
        return {key: _share(item, place, num) for key, item in value.items()}
    return value
