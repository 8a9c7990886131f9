"""The user's own optimizer object, given our pieces to update instead of the model's parameters.

Its groups, hyper-parameters, schedulers and hooks stay as they are, and its groups keep their order: entry i of a
group is this rank's piece (perhaps empty) of the parameter that was entry i. `optimizer.step()` works as always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shardwise.errors import ModelError
from shardwise.optim.company import Company
from shardwise.optim.cooperative import Alone, Cooperative
from shardwise.optim.piece import Piece, pieces_of
from shardwise.storage import Flat

Tensor = torch.Tensor
SCALAR_STATES = frozenset({"step", "mu_product", "eta", "mu"})
"""Those of torch's optimizers that are one number, whatever the parameter's shape: also for one that is a number."""


class AdoptedOptimizer:
    """Ties an optimizer, vetted before, to the trainable flat buffers of one model.

    `before` and `after` are called around every step, whoever asks for it: `engine.step()` or
    `optimizer.step()`. `forget(set_to_none)` is what `zero_grad` means. `company` answers a cooperative optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        flats: Sequence[Flat],
        *,
        before: Callable[[], None],
        after: Callable[[], None],
        forget: Callable[[bool], None],
        company: Company,
    ) -> None:
        self.optimizer = optimizer
        self.pieces = pieces_of(optimizer, flats)
        by_param: dict[Tensor, Piece] = {piece.flat.params[piece.index]: piece for piece in self.pieces}
        kept = {param: _dense(optimizer, param) for param in by_param if optimizer.state.get(param)}
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = [by_param[param].tensor if param in by_param else param for param in group["params"]]
        company.meet(self.pieces)
        if isinstance(optimizer, Cooperative):
            optimizer.peers = company
        for param, entry in kept.items():
            self.put_state(by_param[param], entry)
        self._handles = [
            optimizer.register_step_pre_hook(partial(_before_step, before)),
            optimizer.register_step_post_hook(lambda *_: after()),
            optimizer.register_load_state_dict_pre_hook(lambda _, state: self._cut_state_dict(state)),
        ]
        optimizer.zero_grad = lambda set_to_none=True: forget(set_to_none)  # type: ignore[method-assign]  # undone in release
        optimizer.add_param_group = _refuse_group  # type: ignore[method-assign]  # undone in release

    def offer_gradients(self) -> None:
        """Give each piece its gradient; `None` where no rank has one, so that the optimizer leaves it alone."""
        for piece in self.pieces:
            touched = piece.flat.touched[piece.index] and piece.span.numel > 0
            piece.tensor.grad = piece.flat.due_piece(piece.index) if touched else None

    def withdraw_gradients(self) -> None:
        for piece in self.pieces:
            piece.tensor.grad = None

    @property
    def takes_states_as_they_are(self) -> bool:
        """Whether `put_state` keeps the tensors it is given; a cooperative optimizer may give them another form."""
        return not isinstance(self.optimizer, Cooperative)

    def state_of(self, piece: Piece) -> dict[str, Any]:
        """The state of one piece as the plain optimizer has it: tensors like the piece, and numbers."""
        return _dense(self.optimizer, piece.tensor) if self.optimizer.state.get(piece.tensor) else {}

    def kept_state_of(self, piece: Piece) -> dict[str, Any]:
        """The same with `narrow_keys_of` it as they are kept, for whoever only copies it."""
        if isinstance(self.optimizer, Cooperative) and self.optimizer.state.get(piece.tensor):
            return self.optimizer.kept_state(piece.tensor)
        return self.state_of(piece)

    def narrow_keys_of(self, piece: Piece) -> frozenset[str]:
        """States that this optimizer keeps narrower than the plain one does."""
        return self.optimizer.narrow_keys(piece.tensor) if isinstance(self.optimizer, Cooperative) else frozenset()

    def put_state(self, piece: Piece, state: Mapping[str, Any]) -> None:
        """Take over what `state_of` returns. Tensors of the whole parameter's shape are cut as it was."""
        cut = {key: _cut(key, value, piece) for key, value in state.items()} if piece.span.numel else {}
        if isinstance(self.optimizer, Cooperative):
            self.optimizer.accept_state(piece.tensor, cut)
        else:
            self.optimizer.state[piece.tensor] = cut

    def numbered(self) -> Iterator[tuple[int, Piece]]:
        """Each piece with its number in `state_dict()`: parameters count through the groups."""
        by_tensor = {piece.tensor: piece for piece in self.pieces}
        every = (param for group in self.optimizer.param_groups for param in group["params"])
        for number, param in enumerate(every):
            if param in by_tensor:
                yield number, by_tensor[param]

    def _cut_state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """What `load_state_dict` is to load of a plain optimizer's whole state, or of this rank's own."""
        pieces = dict(self.numbered())
        kept = {
            number: {key: _own(_cut(key, value, pieces[number]), value) for key, value in entry.items()}
            for number, entry in state["state"].items()
            if number in pieces and pieces[number].span.numel
        }
        return {**state, "state": kept}

    def piece_of(self, flat: Flat, index: int) -> Piece | None:
        """The piece of parameter `index` of `flat`; `None` if the optimizer has not got it."""
        return next((piece for piece in self.pieces if piece.flat is flat and piece.index == index), None)

    def state_piece(self, flat: Flat, index: int, key: str) -> Tensor | None:
        """This rank's elements of state `key` of a parameter; `None` if there is no such state here.

        To change it, give it to `write_state`.
        """
        piece = self.piece_of(flat, index)
        value = self.state_of(piece).get(key) if piece is not None else None
        return value if piece is not None and isinstance(value, Tensor) and value.shape == piece.tensor.shape else None

    def write_state(self, flat: Flat, index: int, key: str, value: Tensor) -> None:
        """Replace this rank's elements of state `key`, which is there."""
        piece = self.piece_of(flat, index)
        assert piece is not None
        state = self.state_of(piece)
        self.put_state(piece, {**state, key: value.reshape(-1).to(state[key].dtype, copy=True)})

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
        if isinstance(self.optimizer, Cooperative):
            self.optimizer.peers = Alone()
        for name in ("zero_grad", "add_param_group"):
            self.optimizer.__dict__.pop(name, None)

    def give_back(self) -> None:
        """Unhook, and give the optimizer the model's own parameters again; their states are gone from it."""
        self.release()
        originals: dict[Tensor, Tensor] = {piece.tensor: piece.flat.params[piece.index] for piece in self.pieces}
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = [originals.get(param, param) for param in group["params"]]


def _before_step(
    before: Callable[[], None], optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A closure is called here, before gradients are offered: it is what makes them. The step gets its loss again."""
    bound = dict(zip(("self", "closure"), args, strict=False)) | kwargs
    closure = bound.get("closure")
    if closure is None:
        before()
        return None
    with torch.enable_grad():
        loss = closure()
    before()
    return (optimizer,), {**{key: value for key, value in bound.items() if key != "self"}, "closure": lambda: loss}


def _dense(optimizer: torch.optim.Optimizer, param: Any) -> dict[str, Any]:
    return optimizer.dense_state(param) if isinstance(optimizer, Cooperative) else dict(optimizer.state[param])


def _cut(key: str, value: Any, piece: Piece) -> Any:
    """This rank's elements of a state that has the whole parameter's shape, copied; anything else as it is."""
    if not isinstance(value, Tensor) or (value.dim() == 0 and key in SCALAR_STATES):
        return value
    if tuple(value.shape) == piece.shape != tuple(piece.tensor.shape):
        return value.reshape(-1)[piece.span.start : piece.span.stop].to(piece.tensor.device, copy=True)
    return value


def _own(cut: Any, value: Any) -> Any:
    """`cut`, which must not share its memory with `value`, the caller's."""
    return cut.clone() if isinstance(cut, Tensor) and cut is value else cut


def _refuse_group(param_group: dict[str, Any]) -> None:
    raise ModelError(
        f"A parameter group with {_said(param_group)} was added to an optimizer whose model is sharded already: how "
        f"each parameter is updated is part of the program. Add all groups before shard(), those that come in later "
        f"with lr=0."
    )


def _said(group: Mapping[str, Any]) -> str:
    settings = [f"{key}={value}" for key, value in group.items() if key != "params"]
    return ", ".join(settings) or "the default settings"
