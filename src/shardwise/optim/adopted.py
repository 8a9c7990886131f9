"""The user's own optimizer object, given our pieces to update instead of the model's parameters.

Its groups, hyper-parameters, schedulers and hooks stay as they are, and its groups keep their order: entry i of a
group is this rank's piece (perhaps empty) of the parameter that was entry i. `optimizer.step()` works as always.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ModelError, StateError
from shardwise.optim.company import Company
from shardwise.optim.cooperative import Alone, Cooperative
from shardwise.optim.piece import Piece, PieceAtRest, pieces_of
from shardwise.storage import Flat

Tensor = torch.Tensor
SCALAR_STATES = frozenset({"step", "mu_product", "eta", "mu"})
"""Those of torch's optimizers that are one number, whatever the parameter's shape: also for one that is a number."""


class AdoptedOptimizer:
    """Ties one or several optimizers, vetted before, to the trainable flat buffers of one model.

    `before` and `after` are called around every step with the optimizer that takes it, whoever asks for it:
    `engine.step()` or `optimizer.step()`. `forget(pieces, set_to_none)` is what `zero_grad` of the optimizer that has
    these `pieces` means; with `None` for those that have all. `whole` is what its `state_dict()` returns.
    `company` answers a cooperative optimizer.
    """

    def __init__(
        self,
        members: Sequence[torch.optim.Optimizer],
        flats: Sequence[Flat],
        *,
        before: Callable[[torch.optim.Optimizer], None],
        after: Callable[[torch.optim.Optimizer], None],
        forget: Callable[[Sequence[Piece] | None, bool], None],
        whole: Callable[[torch.optim.Optimizer], dict[str, Any]],
        company: Company,
    ) -> None:
        self.members = tuple(members)
        by_member = {member: pieces_of(member, flats) for member in members}
        self.pieces = [piece for pieces in by_member.values() for piece in pieces]
        self._member_of = {piece.tensor: member for member, pieces in by_member.items() for piece in pieces}
        self._handles: list[RemovableHandle] = []
        company.meet(self.pieces)
        for member, pieces in by_member.items():
            self._adopt(member, pieces, company)
            self._handles += [
                member.register_step_pre_hook(partial(_before_step, partial(before, member))),
                member.register_step_post_hook(lambda member, *_: after(member)),
                member.register_load_state_dict_pre_hook(self._cut_state_dict),
                member.register_load_state_dict_post_hook(self._guard_states),
                member.register_state_dict_post_hook(lambda member, _: whole(member)),
            ]
            only = None if len(self.members) == 1 else pieces
            member.zero_grad = partial(_zero_grad, partial(forget, only))  # type: ignore[method-assign]  # until release
            member.add_param_group = _refuse_group  # type: ignore[method-assign]  # likewise

    def _adopt(self, member: torch.optim.Optimizer, pieces: Sequence[Piece], company: Company) -> None:
        """Put pieces in the place of parameters, and cut the states that there are."""
        by_param: dict[Tensor, Piece] = {piece.flat.params[piece.index]: piece for piece in pieces}
        kept = {param: _dense(member, param) for param in by_param if member.state.get(param)}
        member.state.clear()
        for group in member.param_groups:
            group["params"] = [by_param[param].tensor if param in by_param else param for param in group["params"]]
        if isinstance(member, Cooperative):
            member.peers = company
        for param, entry in kept.items():
            self.put_state(by_param[param], entry)
        self._guard_states(member)

    def _guard_states(self, member: torch.optim.Optimizer) -> None:
        names = {id(piece.flat.params[piece.index]): piece.name for piece in self.pieces}
        member.state = StatesOfPieces(names, member.state)

    # -- all of them as one -----------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """The names of the optimizers' classes: `AdamW`, `Muon+AdamW`."""
        return "+".join(type(member).__name__ for member in self.members)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, one after the other."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def group_owners(self) -> list[torch.optim.Optimizer]:
        """Whose each of `groups` is."""
        return [member for member in self.members for _ in member.param_groups]

    def state_dict_groups(self, member: torch.optim.Optimizer | None = None) -> list[dict[str, Any]]:
        """What the plain `state_dict()` of `member` has under `param_groups`; of all, parameters count through them."""
        groups, start = [], 0
        for group in self.groups if member is None else member.param_groups:
            stop = start + len(group["params"])
            groups.append({**group, "params": list(range(start, stop))})
            start = stop
        return groups

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what the plain optimizers say in `state_dict()`: of several in the form of `state_dict_groups`."""
        start, first = 0, 0
        if len(state["param_groups"]) != len(self.groups):
            raise ModelError(
                f"The state has {len(state['param_groups'])} parameter groups, the engine's optimizers have "
                f"{len(self.groups)}."
            )
        for member in self.members:
            own = state["param_groups"][first : first + len(member.param_groups)]
            numbers = range(start, start + sum(len(group["params"]) for group in own))
            states = {number - start: entry for number, entry in state["state"].items() if number in numbers}
            groups = [{**group, "params": [number - start for number in group["params"]]} for group in own]
            member.load_state_dict({**state, "state": states, "param_groups": groups})
            start, first = numbers.stop, first + len(own)

    # -- the step ---------------------------------------------------------------------------------------

    def offer_gradients(self, member: torch.optim.Optimizer) -> None:
        """Give each piece its gradient; `None` where no rank has one, so that the optimizer leaves it alone."""
        for piece in self.pieces:
            if self._member_of[piece.tensor] is member:
                touched = piece.flat.grads.touched_anywhere[piece.index] and piece.span.numel > 0
                piece.tensor.__class__ = nn.Parameter
                piece.tensor.grad = piece.flat.grads.due_piece(piece.index) if touched else None

    def offer_nothing(self, member: torch.optim.Optimizer) -> None:
        """Let a step of `member` find no gradient at all."""
        for piece in self.pieces:
            if self._member_of[piece.tensor] is member:
                piece.tensor.__class__ = nn.Parameter

    def withdraw_gradients(self) -> None:
        for piece in self.pieces:
            if type(piece.tensor) is nn.Parameter:
                piece.tensor.grad = None
                piece.tensor.__class__ = PieceAtRest

    # -- states -----------------------------------------------------------------------------------------

    @property
    def takes_states_as_they_are(self) -> bool:
        """Whether `put_state` keeps the tensors it is given; a cooperative optimizer may give them another form."""
        return not any(isinstance(member, Cooperative) for member in self.members)

    def state_of(self, piece: Piece) -> dict[str, Any]:
        """The state of one piece as the plain optimizer has it: tensors like the piece, and numbers."""
        member = self._member_of[piece.tensor]
        return _dense(member, piece.tensor) if member.state.get(piece.tensor) else {}

    def kept_state_of(self, piece: Piece) -> dict[str, Any]:
        """The same with `narrow_keys_of` it as they are kept, for whoever only copies it."""
        member = self._member_of[piece.tensor]
        if isinstance(member, Cooperative) and member.state.get(piece.tensor):
            return member.kept_state(piece.tensor)
        return self.state_of(piece)

    def narrow_keys_of(self, piece: Piece) -> frozenset[str]:
        """States that this optimizer keeps narrower than the plain one does."""
        member = self._member_of[piece.tensor]
        return member.narrow_keys(piece.tensor) if isinstance(member, Cooperative) else frozenset()

    def put_state(self, piece: Piece, state: Mapping[str, Any]) -> None:
        """Take over what `state_of` returns. Tensors of the whole parameter's shape are cut as it was."""
        cut = {key: _cut(key, value, piece) for key, value in state.items()} if piece.span.numel else {}
        member = self._member_of[piece.tensor]
        if isinstance(member, Cooperative):
            member.accept_state(piece.tensor, cut)
        else:
            member.state[piece.tensor] = cut

    def numbered(self, member: torch.optim.Optimizer | None = None) -> Iterator[tuple[int, Piece]]:
        """Each piece with its number in the `state_dict()` of `member`, or of all: they count through the groups."""
        by_tensor = {piece.tensor: piece for piece in self.pieces}
        groups = self.groups if member is None else member.param_groups
        for number, param in enumerate(param for group in groups for param in group["params"]):
            if param in by_tensor:
                yield number, by_tensor[param]

    def _cut_state_dict(self, member: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """What `load_state_dict` is to load of a plain optimizer's whole state, or of this rank's own."""
        pieces = dict(self.numbered(member))
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
            for member in self.members
            for entry in member.state.values()
            for value in entry.values()
            if isinstance(value, Tensor)
        )

    def release(self) -> None:
        """Unhook. The optimizer keeps its pieces; the model's parameters are no longer its business."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for member in self.members:
            if isinstance(member, Cooperative):
                member.peers = Alone()
            for name in ("zero_grad", "add_param_group"):
                member.__dict__.pop(name, None)

    def give_back(self) -> None:
        """Unhook, and give the optimizers the model's own parameters again; their states are gone from them."""
        self.release()
        originals: dict[Tensor, Tensor] = {piece.tensor: piece.flat.params[piece.index] for piece in self.pieces}
        for member in self.members:
            member.state = defaultdict(dict)
        for group in self.groups:
            group["params"] = [originals.get(param, param) for param in group["params"]]


class StatesOfPieces(defaultdict[Tensor, Any]):
    """`optimizer.state` of an adopted optimizer. Who asks by a parameter of the model is told where its state is.

    `names` has the model's parameters by their ids.
    """

    def __init__(self, names: Mapping[int, str], states: Mapping[Tensor, Any]) -> None:
        self._names = names
        super().__init__(dict, states)

    def __missing__(self, key: Tensor) -> Any:
        self._require_piece(key)
        return super().__missing__(key)

    def __setitem__(self, key: Tensor, value: Any) -> None:
        self._require_piece(key)
        super().__setitem__(key, value)

    def __contains__(self, key: object) -> bool:
        self._require_piece(key)
        return super().__contains__(key)

    def get(self, key: Tensor, default: Any = None) -> Any:
        self._require_piece(key)
        return super().get(key, default)

    def _require_piece(self, key: object) -> None:
        if id(key) in self._names:
            name = self._names[id(key)]
            raise StateError(
                f"The optimizer's state of {name} is sharded, and kept by this rank's piece of it. "
                f"engine.get({name!r}, 'exp_avg'), say, returns the whole on all ranks, and engine.set() replaces it."
            )

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


def _zero_grad(forget: Callable[[bool], None], set_to_none: bool = True) -> None:
    forget(set_to_none)


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
