"""The user's own optimizer object, which updates our pieces instead of the model's parameters.

Its groups, hyper-parameters, schedulers and hooks stay as they are, and its groups keep their order. During a step,
entry i of a group is this rank's piece (perhaps empty) of the parameter that is entry i between steps, so whatever a
loop does with `optimizer.param_groups` refers to the model's own parameters. `optimizer.step()` works as always.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ModelError
from shardwise.memory import Flat, part_of
from shardwise.optim.added_groups import GroupAdded, added_group
from shardwise.optim.cooperative import Alone, Cooperative
from shardwise.optim.in_rows import PiecesInRows
from shardwise.optim.piece import GroupsOfPieces, Piece, pieces_of
from shardwise.optim.quantize import Coded
from shardwise.optim.rank_peers import RankPeers
from shardwise.optim.sign_mean import Residual
from shardwise.optim.states import StatesOfPieces, first_states
from shardwise.optim.step_method import ReplacedMethods, StepGuard, is_inside_step
from shardwise.optim.trials import has_modes
from shardwise.optim.updates import Updates
from shardwise.plan.placement import Tier
from shardwise.program import Update

Tensor = torch.Tensor
CALLED_BY_TORCH = {
    **dict.fromkeys(("_among_pieces", "_load", "_state_dict", "_switch"), "a method of the optimizer"),
    "_before_step": "a step",
}
"""See `comm/watch/journal.py`."""
SCALAR_STATES = frozenset({"step", "mu_product", "eta", "mu"})
"""States of torch's optimizers that are a single number for any parameter, even for a parameter that is a number."""
WHOLE_STATES = frozenset({"row_var", "col_var"})
"""States of torch's optimizers that are of rows or columns, even where they have the parameter's shape: never cut, and
the same on all ranks."""


class AdoptedOptimizer:
    """Connects one or several vetted optimizers to the trainable flat buffers of one model.

    `before` and `after` are called around every step with the optimizer that takes it, whether by `engine.step()` or by
    `optimizer.step()`. `forget(pieces, set_to_none)` implements `zero_grad` of the optimizer with these `pieces`.
    `whole` implements `state_dict()`. Inside `rewritten()` master weights may be changed outside a step. `peers` serve
    cooperative optimizers.
    """

    def __init__(
        self,
        members: Sequence[torch.optim.Optimizer],
        flats: Sequence[Flat],
        *,
        before: Callable[[torch.optim.Optimizer], None],
        after: Callable[[torch.optim.Optimizer], None],
        forget: Callable[[Sequence[Piece], bool], None],
        whole: Callable[[torch.optim.Optimizer], dict[str, Any]],
        rewritten: Callable[[], AbstractContextManager[None]],
        peers: RankPeers,
    ) -> None:
        self.members = tuple(members)
        self._groups = {member: GroupsOfPieces(member, pieces_of(member, flats)) for member in members}
        self.pieces = [piece for groups in self._groups.values() for piece in groups.pieces]
        self._member_of = {piece.tensor: member for member, groups in self._groups.items() for piece in groups.pieces}
        self.rows = PiecesInRows(self.pieces, self._member_of)
        self.updates = Updates(self._groups, self.rows, peers)
        self._names = {id(piece.param): piece.name for piece in self.pieces}
        self._flats = flats
        self.added: dict[nn.Parameter, Update] = {}
        """How parameters will be updated whose group was added since the model was sharded; they have no memory yet."""
        self.changed: dict[nn.Parameter, Update] = {}
        """How parameters will be updated that are not updated any more as they were when the model was sharded."""
        self.on_added: Callable[[], object] = lambda: None
        self.before_load: Callable[[], bool] = lambda: False
        """Makes memory for states that are to be loaded; returns whether the optimizer was adopted anew."""
        self._rewritten = rewritten
        self.unread: set[str] = set()
        """Parameters whose states were in what was loaded last, and not read because they are frozen."""
        self._handles: list[RemovableHandle] = []
        self._state_hooks: dict[torch.optim.Optimizer, list[RemovableHandle]] = {}
        self._replaced = {member: ReplacedMethods.of(member) for member in members}
        self._whole = whole
        self._peers = peers
        peers.meet(self.pieces)
        for member, groups in self._groups.items():
            self._adopt(member, groups.pieces, peers)
            self._hook(member, after)
            StepGuard.over(member, partial(before, member), self.updates.withdraw_gradients)
            self._hook_states(member)
            methods = {
                "add_param_group": self._add_group,
                "state_dict": self._state_dict,
                "load_state_dict": self._load,
            }
            if self._replaced[member].is_torchs("zero_grad"):  # what another one does to gradients it may do at rest
                methods["zero_grad"] = partial(self._zero_grad, forget)
            if has_modes(member):
                methods |= {name: partial(self._switch, name) for name in ("train", "eval")}
            for name, method in methods.items():
                self._replaced[member].replace(name, partial(method, member))

    def _adopt(self, member: torch.optim.Optimizer, pieces: Sequence[Piece], peers: RankPeers) -> None:
        """Cut existing states into pieces."""
        by_param: dict[Tensor, Piece] = {piece.param: piece for piece in pieces}
        kept = {param: _dense(member, param) for param in by_param if member.state.get(param)}
        member.state.clear()
        if isinstance(member, Cooperative):
            member.peers = peers
        fresh = [piece.tensor for piece in pieces if piece.param not in kept and piece.span.numel]
        member.state.update(first_states(member, fresh))
        for param, entry in kept.items():
            self.put_state(by_param[param], entry)
        self._guard_states(member)

    def _hook(self, member: torch.optim.Optimizer, after: Callable[[torch.optim.Optimizer], None]) -> None:
        """Make ours the last hook before the step and the first after it, so that other hooks see the model's
        parameters."""
        first = member.register_step_pre_hook(_before_step)
        last = member.register_step_post_hook(lambda member, *_: None if is_inside_step(member) else after(member))
        hooks_after = member._optimizer_step_post_hooks
        for other in [number for number in hooks_after if number != last.id]:
            hooks_after[other] = hooks_after.pop(other)
        self._handles += [first, last]

        register_step_pre_hook = self._replaced[member].before("register_step_pre_hook")

        def register(hook: Any) -> RemovableHandle:
            handle: RemovableHandle = register_step_pre_hook(hook)
            hooks_before = member._optimizer_step_pre_hooks
            hooks_before[first.id] = hooks_before.pop(first.id)
            return handle

        self._replaced[member].replace("register_step_pre_hook", register)

    def _hook_states(self, member: torch.optim.Optimizer) -> None:
        """Make our hooks of `state_dict` and `load_state_dict` the innermost ones, so that other hooks, registered
        before or since, are given whole states: torch advises them to rename and reorder parameters there. They find
        parameters in `param_groups`: around them we list these, and pieces for what the class itself does."""
        for handle in self._state_hooks.get(member, ()):
            handle.remove()
        groups = self._groups

        def list_params(member: torch.optim.Optimizer, _: object = None) -> None:
            groups[member].list_params()

        def list_pieces(member: torch.optim.Optimizer, _: object = None) -> None:
            groups[member].list_pieces()

        def whole(member: torch.optim.Optimizer, _: object) -> dict[str, Any]:
            found = self._whole(member)
            list_params(member)
            return found

        def cut(member: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            list_pieces(member)
            return self._cut_state_dict(member, state)

        def guard(member: torch.optim.Optimizer) -> None:
            self._guard_states(member)
            list_params(member)

        self._state_hooks[member] = [
            member.register_state_dict_pre_hook(list_params, prepend=True),
            member.register_state_dict_pre_hook(list_pieces),
            member.register_state_dict_post_hook(whole, prepend=True),
            member.register_state_dict_post_hook(list_pieces),
            member.register_load_state_dict_pre_hook(list_params, prepend=True),
            member.register_load_state_dict_pre_hook(cut),
            member.register_load_state_dict_post_hook(guard, prepend=True),
            member.register_load_state_dict_post_hook(list_pieces),
        ]

    def _guard_states(self, member: torch.optim.Optimizer) -> None:
        member.state = StatesOfPieces(self._names, member.state, self._groups[member])
        for piece in self._groups[member].pieces:
            self.rows.find(piece, moves=True)

    def _among_pieces(
        self, member: torch.optim.Optimizer, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        with self._groups[member].listed():
            return method(*args, **kwargs)

    def _switch(self, name: str, member: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Let it move parameters to other points, as schedule-free ones do. All ranks call."""
        with self._rewritten():
            return self._among_pieces(member, self._replaced[member].before(name), *args, **kwargs)

    def _zero_grad(
        self, forget: Callable[[Sequence[Piece], bool], None], member: torch.optim.Optimizer, set_to_none: bool = True
    ) -> None:
        forget(self._groups[member].pieces, set_to_none)

    def _state_dict(self, member: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._hook_states(member)
        return self._among_pieces(member, self._replaced[member].before("state_dict"), *args, **kwargs)

    def _load(self, member: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        if self.before_load():
            ReplacedMethods.of(member).current("load_state_dict")(state_dict)  # that of whoever has adopted it now
            return
        self._hook_states(member)
        self._among_pieces(member, self._replaced[member].before("load_state_dict"), state_dict)
        self.find_changed_updates()

    def note_loaded(self, pieces: Iterable[tuple[int, Piece]], has_states: Callable[[int, Piece], bool]) -> None:
        """Remember which of these numbered pieces had states in what was loaded that were not read."""
        for number, piece in pieces:
            self.unread.discard(piece.name)
            if not piece.flat.spec.trainable and has_states(number, piece):
                self.unread.add(piece.name)

    def _add_group(self, member: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        """See [Note: unfrozen later]. Until there is memory, their pieces are empty."""
        add = self._replaced[member].before("add_param_group")
        new: GroupAdded = added_group(member, add, param_group, self._flats, self.pieces, self.members)
        self.pieces += new.pieces
        self._groups[member] = GroupsOfPieces(member, [*self._groups[member].pieces, *new.pieces])
        self._member_of |= {piece.tensor: member for piece in new.pieces}
        self._names |= {id(piece.param): piece.name for piece in new.pieces}
        member.state = dict(dict.items(member.state))  # type: ignore[assignment]  # and not by the guard, which refuses
        self._guard_states(member)
        self.await_memory(new.updates)

    def await_memory(self, updates: Mapping[nn.Parameter, Update]) -> None:
        """Let memory be planned for the states of these parameters, before the next forward."""
        self.added |= updates
        self.on_added()

    def find_changed_updates(self) -> None:
        """After a step, or once states were loaded: let memory be planned again for parameters that are now updated in
        another way. The same on all ranks, because their states are."""
        for member in self.members:
            if not (isinstance(member, Cooperative) and member.changes_update):
                continue
            for piece in self._groups[member].updated:
                update = member.update_of(piece.tensor, self._groups[member].settings_of(piece))
                if piece.flat.spec.updates[piece.index].update != update:
                    self.changed[piece.param] = update
        if self.changed:
            self.on_added()

    @property
    def residuals(self) -> dict[str, Residual]:
        """What this rank has not sent of what it has averaged with others, by parameter."""
        return self._peers.residuals

    def go_on_with(self, residuals: Mapping[str, Residual]) -> None:
        """Take the residuals of an earlier layout, as far as they are of use in this one."""
        self._peers.go_on_with(residuals)

    @property
    def names_added(self) -> set[str]:
        return {self._names[id(param)] for param in (*self.added, *self.changed)}

    @property
    def awaits_memory(self) -> bool:
        """Whether gradients are computed of parameters that were added, and that no step can update yet."""
        return any(flat.spec.trainable and self.added.keys() & set(flat.params) for flat in self._flats)

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
        """The optimizer of each of `groups`."""
        return [member for member in self.members for _ in member.param_groups]

    def state_dict_groups(self, member: torch.optim.Optimizer | None = None) -> list[dict[str, Any]]:
        """The `param_groups` of the plain `state_dict()` of `member`; for all, parameters are numbered
        consecutively."""
        groups, start = [], 0
        for group in self.groups if member is None else member.param_groups:
            stop = start + len(group["params"])
            groups.append({**group, "params": list(range(start, stop))})
            start = stop
        return groups

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what the plain optimizers return from `state_dict()`; for several, in the form of
        `state_dict_groups`."""
        first = 0
        if len(state["param_groups"]) != len(self.groups):
            raise ModelError(
                f"The state has {len(state['param_groups'])} parameter groups, the engine's optimizers have "
                f"{len(self.groups)}. Create the optimizers with the groups that were saved."
            )
        for member in self.members:
            own = state["param_groups"][first : first + len(member.param_groups)]
            states = {key: state["state"][key] for key in _keys_of(own) if key in state["state"]}
            member.load_state_dict({**state, "state": states, "param_groups": own})
            first += len(own)

    # -- states -----------------------------------------------------------------------------------------

    @property
    def takes_states_as_they_are(self) -> bool:
        """Whether `put_state` keeps the tensors it is given; a cooperative optimizer may convert them."""
        return not any(isinstance(member, Cooperative) for member in self.members)

    def state_of(self, piece: Piece) -> dict[str, Any]:
        """The state of one piece as the plain optimizer has it: tensors like the piece, and numbers."""
        member = self._member_of[piece.tensor]
        with self._groups[member].listed():
            return _dense(member, piece.tensor) if member.state.get(piece.tensor) else {}

    def raw_state_of(self, piece: Piece) -> dict[str, Any]:
        """The dict in which the optimizer keeps the state; empty if it has none."""
        kept: dict[Tensor, dict[str, Any]] = self._member_of[piece.tensor].state
        return dict.get(kept, piece.tensor) or {}

    def kept_state_of(self, piece: Piece) -> dict[str, Any]:
        """`state_of` with `narrow_keys_of` it in their storage dtype, for code that only copies it."""
        member = self._member_of[piece.tensor]
        with self._groups[member].listed():
            if isinstance(member, Cooperative) and member.state.get(piece.tensor):
                return member.kept_state(piece.tensor)
            return self.state_of(piece)

    def narrow_keys_of(self, piece: Piece) -> frozenset[str]:
        """States that this optimizer keeps narrower than the plain one does."""
        member = self._member_of[piece.tensor]
        with self._groups[member].listed():
            return member.narrow_keys(piece.tensor) if isinstance(member, Cooperative) else frozenset()

    def coded_keys_of(self, piece: Piece) -> Mapping[str, Coded]:
        """States that this optimizer keeps as codes."""
        member = self._member_of[piece.tensor]
        if not isinstance(member, Cooperative):
            return {}
        with self._groups[member].listed():
            return member.coded_keys(piece.tensor)

    def put_state(self, piece: Piece, state: Mapping[str, Any]) -> None:
        """Load what `state_of` returns. Tensors of the whole parameter's shape are cut to the piece."""
        cut = {key: _slice_of(key, value, piece) for key, value in state.items()} if piece.span.numel else {}
        member = self._member_of[piece.tensor]
        with self._groups[member].listed():
            if isinstance(member, Cooperative):
                member.accept_state(piece.tensor, cut)
            else:
                settings = self._groups[member].settings_of(piece)
                member.state[piece.tensor] = {
                    key: _on_its_device(key, value, piece.tensor.device, settings) for key, value in cut.items()
                }
        self.rows.find(piece, moves=True)

    def numbered(self, member: torch.optim.Optimizer | None = None) -> Iterator[tuple[int, Piece]]:
        """Each piece with its number in the `state_dict()` of `member`, or of all optimizers: numbers count through the
        groups."""
        members = self.members if member is None else (member,)
        entries = (piece for one in members for group in self._groups[one].entries for piece in group)
        for number, piece in enumerate(entries):
            if piece is not None:
                yield number, piece

    def _cut_state_dict(self, member: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The part of a plain optimizer's whole state, or of this rank's own, that `load_state_dict` loads."""
        keys = _keys_of(state["param_groups"])
        numbered = [(number, piece) for number, piece in self.numbered(member) if number < len(keys)]
        self.note_loaded(numbered, lambda number, _: bool(state["state"].get(keys[number])))
        pieces = {keys[number]: piece for number, piece in numbered}
        kept = {
            of: {key: _own(_slice_of(key, value, pieces[of]), value) for key, value in entry.items()}
            for of, entry in state["state"].items()
            if of in pieces and pieces[of].span.numel
        }
        return {**state, "state": kept}

    def piece_of(self, flat: Flat, index: int) -> Piece | None:
        """The piece of parameter `index` of `flat`; `None` if no optimizer has it."""
        return next((piece for piece in self.pieces if piece.flat is flat and piece.index == index), None)

    def state_piece(self, flat: Flat, index: int, key: str) -> Tensor | None:
        """This rank's elements of state `key` of a parameter, flat; `None` if there is no such state here.

        Change it through `write_state`.
        """
        piece = self.piece_of(flat, index)
        value = self.state_of(piece).get(key) if piece is not None else None
        if piece is None or not isinstance(value, Tensor) or value.shape != piece.tensor.shape:
            return None
        return piece.flat_state(value)

    def write_state(self, flat: Flat, index: int, key: str, value: Tensor) -> None:
        """Replace this rank's elements of the existing state `key`."""
        piece = self.piece_of(flat, index)
        assert piece is not None
        state = self.state_of(piece)
        kept = value.reshape(state[key].shape).to(state[key].device, state[key].dtype, copy=True)
        self.put_state(piece, {**state, key: kept})

    def state_bytes(self, tier: Tier = "device") -> int:
        """Bytes of the optimizer's own states on one tier of this rank."""
        below: dict[Tensor, Tier] = {piece.tensor: piece.flat.spec.tier_of("master") for piece in self.pieces}
        kept = sum(residual.num_bytes for residual in self.residuals.values()) if tier == "device" else 0
        return kept + sum(
            value.nbytes
            for member in self.members
            for param, entry in dict.items(member.state)
            for value in entry.values()
            if isinstance(value, Tensor) and below.get(param, "device") == tier
        )

    def release(self) -> None:
        """Unhook. The states of the pieces are kept, but no longer accessible through the optimizer."""
        for handle in (*self._handles, *(handle for hooks in self._state_hooks.values() for handle in hooks)):
            handle.remove()
        self._handles, self._state_hooks = [], {}
        self.updates.close()
        for member in self.members:
            if isinstance(member, Cooperative):
                member.peers = Alone()
            StepGuard.release(member)
            self._replaced[member].release()

    def give_back(self) -> None:
        """Unhook, and leave the optimizers to others, without their states."""
        self.release()
        for member in self.members:
            member.state = defaultdict(dict)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call a closure here, before gradients are offered, because it computes them. The step gets its loss again."""
    if is_inside_step(optimizer):
        return None
    bound = dict(zip(("self", "closure"), args, strict=False)) | kwargs
    closure = bound.get("closure")
    if closure is None:
        StepGuard.call_before(optimizer)
        return None
    with torch.enable_grad():
        loss = closure()
    StepGuard.call_before(optimizer)
    return (optimizer,), {**{key: value for key, value in bound.items() if key != "self"}, "closure": lambda: loss}


def _keys_of(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """By which keys the states of an optimizer's parameters are found in a state dict with these groups, in the order
    of the parameters: numbers in torch's own, names in those of `torch.distributed.checkpoint.state_dict`."""
    return [key for group in groups for key in group["params"]]


def _dense(optimizer: torch.optim.Optimizer, param: Any) -> dict[str, Any]:
    return optimizer.dense_state(param) if isinstance(optimizer, Cooperative) else dict(optimizer.state[param])


def _slice_of(key: str, value: Any, piece: Piece) -> Any:
    """This rank's elements, copied, of a state with the whole parameter's shape; anything else unchanged, except that
    it is moved to the host if the piece is there."""
    if not isinstance(value, Tensor):
        return value
    device = piece.tensor.device
    if piece.flat.spec.updates_below:
        value = value.to(device)
    if value.dim() == 0 and key in SCALAR_STATES:
        return value
    if key in WHOLE_STATES:
        return value.to(device, copy=True)
    if piece.box is not None and piece.box.is_split and tuple(value.shape) == piece.box.shape:
        part = part_of(value, piece.box).reshape(-1)
        return part[piece.span.as_slice].to(device, copy=True)
    if tuple(value.shape) == piece.shape != tuple(piece.tensor.shape):
        return value.reshape(-1)[piece.span.as_slice].to(device, copy=True)
    return value


def _on_its_device(key: str, value: Any, device: torch.device, settings: Mapping[str, Any]) -> Any:
    """A state where `Optimizer.load_state_dict` would put it.

    Everything goes to the parameter's device, except the number of steps: only fused and capturable updates read it
    there (torch's fused kernels refuse one on the host), the others read it on the host.
    """
    stays = key == "step" and not (settings.get("fused") or settings.get("capturable"))
    return value if stays or not isinstance(value, Tensor) else value.to(device)


def _own(cut: Any, value: Any) -> Any:
    """`cut`, copied if it shares its memory with the caller's `value`."""
    return cut.clone() if isinstance(cut, Tensor) and cut is value else cut
