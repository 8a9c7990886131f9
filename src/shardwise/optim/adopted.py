"""The user's own optimizer object, given our pieces to update instead of the model's parameters.

Its groups, hyper-parameters, schedulers and hooks stay as they are, and its groups keep their order: entry i of a
group is this rank's piece (perhaps empty) of the parameter that was entry i. `optimizer.step()` works as always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.placement import Span
from shardwise.storage import Flat

Tensor = torch.Tensor


@dataclass(frozen=True)
class Piece:
    """This rank's elements `span` of one parameter, as the optimizer sees them: flat, in fp32."""

    name: str
    shape: tuple[int, ...]
    span: Span
    tensor: nn.Parameter
    flat: Flat
    index: int


class AdoptedOptimizer:
    """Ties an optimizer, vetted before, to the trainable flat buffers of one model.

    `before` and `after` are called around every step, whoever asks for it: `engine.step()` or
    `optimizer.step()`. `forget` is what `zero_grad` means.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        flats: Sequence[Flat],
        *,
        before: Callable[[], None],
        after: Callable[[], None],
        forget: Callable[[], None],
    ) -> None:
        self.optimizer = optimizer
        self.pieces = _pieces(optimizer, flats)
        by_param: dict[Tensor, Piece] = {piece.flat.params[piece.index]: piece for piece in self.pieces}
        state = dict(optimizer.state)
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = [by_param[param].tensor if param in by_param else param for param in group["params"]]
        for param, entry in state.items():
            optimizer.state[by_param[param].tensor] = _sliced(entry, by_param[param])
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: before()),
            optimizer.register_step_post_hook(lambda *_: after()),
        ]
        optimizer.zero_grad = lambda set_to_none=True: forget()  # type: ignore[method-assign]  # undone in release  # noqa: ARG005

    def offer_gradients(self) -> None:
        """Give each piece its gradient; `None` where no rank has one, so that the optimizer leaves it alone."""
        for piece in self.pieces:
            touched = piece.flat.touched[piece.index] and piece.span.numel > 0
            piece.tensor.grad = piece.flat.due_piece(piece.index) if touched else None

    def withdraw_gradients(self) -> None:
        for piece in self.pieces:
            piece.tensor.grad = None

    def state_of(self, piece: Piece) -> dict[str, Any]:
        """The state of one piece: tensors like the piece, and numbers."""
        return dict(self.optimizer.state.get(piece.tensor, {}))

    def put_state(self, piece: Piece, state: Mapping[str, Any]) -> None:
        """Take over what `state_of` returns."""
        self.optimizer.state[piece.tensor] = dict(state)

    def state_piece(self, flat: Flat, index: int, key: str) -> Tensor | None:
        """This rank's elements of state `key` of a parameter; `None` if there is no such state here."""
        for piece in self.pieces:
            if piece.flat is flat and piece.index == index:
                value = self.optimizer.state.get(piece.tensor, {}).get(key)
                return value if isinstance(value, Tensor) and value.shape == piece.tensor.shape else None
        return None

    def state_bytes(self) -> int:
        """Bytes of the optimizer's own states on this rank."""
        return sum(
            value.nbytes
            for entry in self.optimizer.state.values()
            for value in entry.values()
            if isinstance(value, Tensor)
        )

    def release(self) -> None:
        """Unhook. The optimizer keeps its pieces; the model's parameters are no longer its business."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.optimizer.__dict__.pop("zero_grad", None)

    def give_back(self) -> None:
        """Unhook, and give the optimizer the model's own parameters again; their states are gone from it."""
        self.release()
        originals: dict[Tensor, Tensor] = {piece.tensor: piece.flat.params[piece.index] for piece in self.pieces}
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = [originals.get(param, param) for param in group["params"]]


def _pieces(optimizer: torch.optim.Optimizer, flats: Sequence[Flat]) -> list[Piece]:
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
            pieces.append(Piece(slot.name, slot.shape, span, nn.Parameter(tensor), flat, index))
    return pieces


def _sliced(entry: dict[str, Any], piece: Piece) -> dict[str, Any]:
    """States that were there already: those of the parameter's shape are cut as it was."""

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and tuple(value.shape) == piece.shape and value.dim() > 0:
            return value.reshape(-1)[piece.span.start : piece.span.stop].to(piece.tensor.dtype, copy=True)
        return value

    return {key: cut(value) for key, value in entry.items()}
