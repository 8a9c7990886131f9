"""What an optimizer holds in place of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.errors import StateError
from shardwise.placement import Span
from shardwise.storage import Flat


@dataclass(frozen=True)
class Piece:
    """This rank's elements `span` of one parameter, as the optimizer sees them: flat, in fp32."""

    name: str
    shape: tuple[int, ...]
    span: Span
    tensor: nn.Parameter
    flat: Flat
    index: int


class PieceAtRest(nn.Parameter):
    """The class of a piece's tensor but for the steps, in which it is a plain parameter."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == _GET_GRAD:
            raise StateError(
                "The parameters in an optimizer's groups are this rank's pieces of the model's, and have gradients "
                "only while it takes a step. Take those of model.parameters(); clip by engine.clip_grad_norm_(), or by "
                "torch's function over model.parameters(). A GradScaler finds none either: `precision: fp16` in the "
                "plan scales the loss by itself."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_GET_GRAD = vars(torch._C.TensorBase)["grad"].__get__


def pieces_of(optimizer: torch.optim.Optimizer, flats: Sequence[Flat]) -> list[Piece]:
    """A piece for each parameter of the optimizer, in the order of its groups."""
    homes = {param: (flat, index) for flat in flats for index, param in enumerate(flat.params)}
    pieces = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in homes:  # of an integer dtype: it lies in no flat buffer and has no gradient
                continue
            flat, index = homes[param]
            slot = flat.slots[index]
            if flat.spec.trainable:
                tensor, span = flat.master_piece(index)
            else:  # torch lets a frozen parameter stand in a group, and never updates it
                tensor, span = torch.empty(0, device=flat.device), Span(0, 0)
            pieces.append(Piece(slot.name, slot.shape, span, _at_rest(tensor), flat, index))
    return pieces


def _at_rest(tensor: torch.Tensor) -> nn.Parameter:
    param = nn.Parameter(tensor)
    param.__class__ = PieceAtRest
    return param
