"""Whole tensors of a sharded model: to read, to edit, to export.

Everything here is collective: all ranks call, with the same names. At no time is more than one unit whole, except those
that the caller asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from shardwise.errors import ModelError, StateError, nearest, some, wrong_shape
from shardwise.memory import ANCHOR, MOMENTUM, Flat, part_of, torch_dtype
from shardwise.optim import AdoptedOptimizer
from shardwise.plan.placement import Span
from shardwise.runtime import Agreement, Runner

Tensor = torch.Tensor
PARAM, GRAD = "param", "grad"


def refuse_to_arriving(what: str) -> NoReturn:
    """Raise `StateError`: a rank cannot do that between joining others and its first forward of a step."""
    raise StateError(
        f"This rank has just joined others that are training, and {what} is out of its reach before its first step, in "
        f"which they take part. Do that after the first step, or only `if not engine.world.is_newcomer`."
    )


class Access:
    """Reads and writes whole parameters, gradients and optimizer states by name."""

    def __init__(
        self,
        model: nn.Module,
        runner: Runner,
        flats: Sequence[Flat],
        agreement: Agreement,
        optimizer: AdoptedOptimizer | None,
    ) -> None:
        self._model = model
        self._runner = runner
        self._flats = flats
        self._agreement = agreement
        self._optimizer = optimizer
        self._homes = {slot.name: (flat, index) for flat in flats for index, slot in enumerate(flat.slots)}

    def read(self, name: str, what: str = PARAM) -> Tensor | None:
        """The whole tensor, on every rank; `None` for a gradient or state that no rank has."""
        flat, index = self._home(name)
        part = self.read_part(name, what)
        return None if part is None else self._agreement.assembled(flat, flat.slots[index], part)

    def read_part(self, name: str, what: str = PARAM) -> Tensor | None:
        """`read` for the part that a model axis leaves to this rank and those that share it."""
        self._require_whole()
        flat, index = self._home(name)
        piece = self._piece(flat, index, what)
        whole = self._whole(flat, {index: piece} if piece is not None else {}, self._dtype(flat, what))
        if what != PARAM and not self._exists_anywhere(flat, index, what):
            return None
        slot = flat.slots[index]
        return whole[slot.span.as_slice].view(slot.shape).clone()

    def zeros(self, name: str, what: str) -> Tensor | None:
        """What `read` returns of a gradient that is zero; `None` of a parameter that is not trained."""
        flat, index = self._home(name)
        if not flat.spec.trainable:
            return None
        return torch.zeros(flat.slots[index].whole_shape, dtype=self._dtype(flat, what), device=flat.device)

    def write(self, name: str, value: Tensor, what: str = PARAM) -> None:
        """Overwrite it with `value`, whole and the same on all ranks."""
        flat, index = self._home(name)
        slot = flat.slots[index]
        if what in (ANCHOR, MOMENTUM):
            raise ModelError(f"{what} follows from what islands train; set the parameter, and all islands have it.")
        if tuple(value.shape) != slot.whole_shape:
            raise ModelError(
                f"{name} has shape {list(slot.whole_shape)}, but the new value has {list(value.shape)}. Give the whole "
                f"parameter on every rank, also where each has a part of it."
            )
        value = part_of(value.detach(), slot.box)
        if what != PARAM and not self._exists_anywhere(flat, index, what):
            raise ModelError(f"{name} has no {what} to write to; there is one {_when(what)}.")
        if what == PARAM:
            self._runner.step.open_params()
        piece, span = self._piece(flat, index, what), _span(flat, index)
        if piece is not None and what not in (PARAM, GRAD) and self._optimizer is not None:
            self._optimizer.write_state(flat, index, what, value.reshape(-1)[span.as_slice])
        elif piece is not None:
            flat.put(piece, value.reshape(-1)[span.as_slice])
        if what == PARAM:
            if flat.anchor is not None:
                flat.common_piece(index).copy_(flat.param_piece(index))
            self._runner.step.restore_params()

    def read_here(self, name: str, what: str = PARAM) -> Tensor:
        """`read` without the other ranks, on one that has just joined them and has all parameters whole, in the dtype
        of the forward."""
        flat, index = self._home(name)
        param = flat.params[index]
        if flat.slots[index].is_split:
            refuse_to_arriving(f"the whole of {name}, of which ranks along tp have parts,")
        if what != PARAM or self._dtype(flat, PARAM) != param.dtype:
            refuse_to_arriving(f"the {what} of {name}" if what != PARAM else f"{name} in the optimizer's precision")
        return param.detach().clone()

    def state_dict(self, *, on_rank: bool = True, is_alone: bool = False) -> dict[str, Any]:
        """Every parameter and persistent buffer, whole, on the CPU, under the plain model's names; and copies of what
        modules return from `get_extra_state`.

        Parameters have the precision in which the optimizer keeps them. A rank that passes `on_rank=False` takes part
        and keeps nothing. `is_alone`: see `read_here`.
        """
        self._require_whole()
        params: dict[str, Tensor] = {}
        here = ((name, self.read_here(name)) for name in self.kept_params())
        for name, param in here if is_alone else self.whole_params():
            if on_rank:
                params[name] = param.cpu().clone()
        if not on_rank:
            return {}
        by_tensor: dict[Tensor, str] = {param: name for name, param in self._model.named_parameters()}
        state = self._model.state_dict(keep_vars=True)
        whole: dict[str, Any] = {}
        for name, value in state.items():
            if not isinstance(value, Tensor):
                whole[name] = copy.deepcopy(value)
            elif isinstance(value, nn.Parameter) and by_tensor.get(value) in params:
                whole[name] = params[by_tensor[value]]
            else:
                whole[name] = value.detach().cpu().clone()
        return whole

    def _require_whole(self) -> None:
        """Raise `StateError`, on all ranks, if a disk failed in a step: what is here now is no state of training."""
        for flat in self._flats:
            if flat.disk is not None:
                flat.disk.require_whole()

    def kept_params(self) -> dict[str, Tensor]:
        """The sharded parameters in the order of `whole_params`, as meta tensors: whole, in the dtypes in which they
        are kept."""
        return {
            slot.name: torch.empty(slot.whole_shape, dtype=self._dtype(flat, PARAM), device="meta")
            for flat in self._flats
            for slot in flat.slots
        }

    def whole_params(
        self, dtype: torch.dtype | None = None, unrounded: Collection[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Each sharded parameter by name, whole, in the precision in which the optimizer keeps it. With islands, that
        of the model that they have in common: what each has become since belongs to no other.

        With a narrower `dtype` floating-point parameters are rounded to it before they are sent, which is the same as
        afterwards, except those of units that have one of `unrounded`. What every rank has whole is not sent.

        There is one exchange per unit, so all ranks have to iterate to the end. A tensor is valid until the first one
        of the next unit.
        """
        for flat in self._flats:
            kept = self._dtype(flat, PARAM)
            can_round = kept.is_floating_point and not any(slot.name in unrounded for slot in flat.slots)
            if can_round and dtype is not None and dtype.itemsize < kept.itemsize:
                kept = dtype
            whole = self._whole_param(flat, kept)
            for slot in flat.slots:
                yield slot.name, self._agreement.assembled(flat, slot, whole[slot.span.as_slice])
            del whole  # before the next is gathered

    def _whole_param(self, flat: Flat, dtype: torch.dtype) -> Tensor:
        table = flat.spec.table
        is_exact = torch_dtype(table.compute) == dtype and not table.rounds_params_over(table.optim.shard)
        if flat.spec.resident and flat.anchor is None and is_exact:
            return flat.full.clone()  # whoever keeps it does not see the next update
        return self._whole(flat, {index: flat.common_piece(index) for index in range(len(flat.slots))}, dtype)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load whole values, the same on all ranks, as `state_dict` returns them; see `Engine.load_state_dict`."""
        own = self._model.state_dict(keep_vars=True)
        by_tensor: dict[Tensor, str] = {param: name for name, param in self._model.named_parameters()}
        if strict:
            _check_names(own, state)
        own = {name: value for name, value in own.items() if name in state}
        extra = {name: module for name, module in with_extra_state(self._model) if name in own}
        for name in extra:
            del own[name]
        for name, value in own.items():
            if not isinstance(value, Tensor) or not isinstance(state[name], Tensor):
                kind = type(state[name]).__name__
                raise ModelError(f"The state has {name} as a {kind}; only tensors and modules' extra states are taken.")
            if state[name].is_meta:
                raise ModelError(
                    f"The state has {name} on the meta device, without values. Give one that was read from a file or "
                    f"returned by a model with values."
                )
            shape = self._whole_shape(by_tensor.get(value, name), value)
            if shape != tuple(state[name].shape):
                raise wrong_shape(name, state[name].shape, shape)
        self._runner.step.open_params()
        for name, value in own.items():
            home = self._homes.get(by_tensor.get(value, ""))
            if home is None:
                value.detach().copy_(state[name])
                continue
            piece, span = self._piece(*home, PARAM), _span(*home)
            if piece is not None:
                part = part_of(state[name], home[0].slots[home[1]].box)
                home[0].put(piece, part.reshape(-1)[span.as_slice])
                if home[0].anchor is not None:
                    home[0].common_piece(home[1]).copy_(piece)
        self._runner.step.restore_params()
        for name, module in extra.items():
            module.set_extra_state(copy.deepcopy(state[name]))

    def optimizer_state_dict(
        self, member: torch.optim.Optimizer | None = None, *, on_rank: bool = True
    ) -> dict[str, Any]:
        """What the plain optimizer's `state_dict()` would be: whole states, on the CPU, under the same numbers.

        For `member`, or for all optimizers as one. A rank that passes `on_rank=False` takes part and keeps nothing.
        """
        optimizer = self._optimizer
        if optimizer is None:
            raise StateError("This engine has no optimizer; give one to shard(model, plan, optimizer=...).")
        self._require_whole()
        states: dict[tuple[str, int], dict[str, Any]] = {}
        for flat in self._flats:
            if flat.spec.trainable:
                states |= self._whole_states(flat, optimizer, on_rank=on_rank)
        if not on_rank:
            return {}
        found = {number: states.get((piece.flat.name, piece.index)) for number, piece in optimizer.numbered(member)}
        return {
            "state": {number: state for number, state in found.items() if state},
            "param_groups": optimizer.state_dict_groups(member),
        }

    def _whole_states(
        self, flat: Flat, optimizer: AdoptedOptimizer, *, on_rank: bool
    ) -> dict[tuple[str, int], dict[str, Any]]:
        """The states of one flat buffer's parameters, gathered one key at a time."""
        pieces = {piece.index: piece for piece in optimizer.pieces if piece.flat is flat}
        local = {index: optimizer.state_of(piece) for index, piece in pieces.items()}
        mine = {
            f"{index} {key}": _fact(value, pieces[index].tensor)
            for index, state in local.items()
            for key, value in state.items()
        }
        states: dict[tuple[str, int], dict[str, Any]] = {}
        wholes: dict[str, Tensor] = {}
        facts = self._agreement.merged(flat, mine)
        for name in facts if flat.slots[0].box is None else sorted(facts):  # model axes need a common order
            fact = facts[name]
            index, key = int(name.split(" ", 1)[0]), name.split(" ", 1)[1]
            if fact["is_piece"] and key not in wholes:
                held = {at: state[key] for at, state in local.items() if _is_piece(state.get(key), pieces[at].tensor)}
                whole = self._whole(flat, held, getattr(torch, fact["dtype"]))
                wholes[key] = whole.cpu() if on_rank or flat.slots[0].box is not None else whole.new_empty(0)
            slot = flat.slots[index]
            whole_state = None
            if fact["is_piece"] and (on_rank or slot.box is not None):
                whole_state = self._agreement.assembled(flat, slot, wholes[key][slot.span.as_slice]).clone()
            if on_rank:
                states.setdefault((flat.name, index), {})[key] = _read(fact) if whole_state is None else whole_state
        return states

    @contextmanager
    def gathered(self, names: Sequence[str], *, write: bool, writer: int, puts_back: bool = False) -> Iterator[None]:
        """Inside, the parameters `names` (or all) of the model are whole and may be read and, with `write`, edited.

        On leaving, all ranks take over the edits of rank `writer`. What was not edited keeps its full precision. With
        `puts_back`, edits are undone on each rank.
        """
        homes = [self._home(name) for name in names] or list(self._homes.values())
        for flat, index in homes:
            slot = flat.slots[index]
            if slot.is_split or (write and slot.is_copied):
                raise ModelError(
                    f"gathered() shows parameters in the model's own memory, and of {slot.name} this rank has the part "
                    f"{slot.box} of {list(slot.whole_shape)} there. Use engine.get({slot.name!r}) and engine.set."
                )
        if write and any(flat.anchor is not None for flat, _ in homes):
            raise ModelError(
                "gathered(write=True) takes over a rank's edits within its island. Use engine.set(name, value), on all "
                "ranks."
            )
        wanted = {self._home(name)[0].name for name in names}
        chosen = [flat for flat in self._flats if not names or flat.name in wanted]
        self._runner.gathering.make_whole(chosen)
        before = [flat.full.clone() for flat in chosen] if puts_back else []
        try:
            yield
            for flat, values in zip(chosen, before, strict=puts_back):
                flat.full.copy_(values)
            if write:
                self._runner.step.open_params()
                for flat in chosen:
                    self._take_over(flat, writer)
        finally:
            self._runner.gathering.free_all()
        if write:
            self._runner.step.restore_params()

    def _take_over(self, flat: Flat, writer: int) -> None:
        self._agreement.broadcast(flat, flat.full, writer=writer)
        if flat.master is None:
            flat.land()
            flat.put(flat.param, flat.full[flat.param_span.as_slice])
            return
        flat.land()
        master = flat.loaded(flat.master)
        edited = flat.full[flat.optim_span.as_slice].to(master.device)
        flat.put(flat.master, torch.where(master.to(edited.dtype) == edited, master, edited.to(master.dtype)))

    def _whole_shape(self, name: str, value: Tensor) -> tuple[int, ...]:
        """The shape of the unsplit model's `name`, which is `value` here."""
        home = self._homes.get(name)
        return tuple(value.shape) if home is None else home[0].slots[home[1]].whole_shape

    def _home(self, name: str) -> tuple[Flat, int]:
        home = self._homes.get(name) or self._home_of_tied(name)
        if home is None:
            raise ModelError(f"The model has no parameter {name!r}. {nearest(name, self._homes)}")
        return home

    def _home_of_tied(self, name: str) -> tuple[Flat, int] | None:
        """That of a parameter which has another name before this one, as a head's that is the embedding's."""
        try:
            param = self._model.get_parameter(name)
        except AttributeError:
            return None
        return next((home for home in self._homes.values() if home[0].params[home[1]] is param), None)

    def _piece(self, flat: Flat, index: int, what: str) -> Tensor | None:
        """This rank's elements, in live memory; `None` if there are none of this kind."""
        if what == PARAM:
            return flat.param_piece(index)
        if not flat.spec.trainable:
            return None
        if what == GRAD:
            return flat.grads.due_piece(index) if flat.grads.touched_anywhere[index] else None
        if what in (ANCHOR, MOMENTUM):
            return flat.outer_pieces(index).get(what)
        if self._optimizer is None:
            return None
        return self._optimizer.state_piece(flat, index, what)

    def _exists_anywhere(self, flat: Flat, index: int, what: str) -> bool:
        piece = self._piece(flat, index, what)
        return self._agreement.any_rank(flat, piece is not None and piece.numel() > 0)

    def _dtype(self, flat: Flat, what: str) -> torch.dtype:
        table = flat.spec.table
        is_kept_wide = flat.spec.trainable or what != PARAM
        return torch_dtype(table.optim.dtype if is_kept_wide else table.param.dtype)

    def _whole(self, flat: Flat, pieces: Mapping[int, Tensor], dtype: torch.dtype) -> Tensor:
        """The whole buffer, from every rank's `pieces`; zero where no rank has one."""
        whole = torch.zeros(flat.spec.numel, dtype=dtype, device=flat.device)
        for index, piece in pieces.items():
            start = flat.slots[index].start + _span(flat, index).start
            whole[start : start + piece.numel()].copy_(flat.loaded(piece).reshape(-1))
        place = flat.spec.kept
        self._agreement.gather(flat, whole, place.shard)
        return whole


def with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that keep more than tensors, by the name of that entry in a state dict."""
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{name}._extra_state" if name else "_extra_state", module


def _span(flat: Flat, index: int) -> Span:
    """Which elements of a parameter this rank keeps."""
    slot = flat.slots[index]
    return slot.span.overlap(flat.optim_span if flat.spec.trainable else flat.param_span).within(slot.span)


def _fact(value: Any, piece: Tensor) -> dict[str, Any]:
    """A state as JSON: its dtype if it has the piece's shape, else its value too."""
    if not isinstance(value, Tensor):
        return {"is_piece": False, "dtype": None, "value": value}
    dtype = str(value.dtype).removeprefix("torch.")
    is_piece = _is_piece(value, piece)
    return {"is_piece": is_piece, "dtype": dtype, "value": None if is_piece else value.tolist()}


def _is_piece(value: Any, piece: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == piece.shape


def _read(fact: Mapping[str, Any]) -> Any:
    return (
        fact["value"]
        if fact["dtype"] is None
        else torch.tensor(fact["value"], dtype=getattr(torch, fact["dtype"]), device="cpu")
    )


def _check_names(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    for word, names in (("lacks", set(own) - set(state)), ("has, unlike the model,", set(state) - set(own))):
        if names:
            raise ModelError(
                f"The state {word} {some(sorted(names), 3)}; it is another model's. With strict=False what "
                f"both have is loaded."
            )


def _when(what: str) -> str:
    return "between backward and step" if what == GRAD else "after the optimizer's first step, if it keeps one"
