"""Functions of a model that refer to it, made to refer to its copy.

Libraries replace the forward of a model by a function that calls the former one (`model.forward = wrapper`, with the
method of before in its closure), and hang functions on modules as hooks. `copy.deepcopy` takes a function as it is: the
copy would compute with the parameters of the original, and leave gradients in them.

Hooks of a loop's own collect what modules return, in a list or a dict of theirs or of the script. Those of a copy get
copies of them: a rehearsal would leave tensors without bytes there, and the loop would find these first.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial, update_wrapper
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_CONTAINERS = frozenset({list, dict, set, deque, defaultdict, OrderedDict})


def rebind(copied: nn.Module, memo: Mapping[int, Any]) -> None:
    """Let functions in the modules of `copied`, and their hooks, use copies of what they refer to. `memo` has them by
    the identity of the original, as `copy.deepcopy` leaves it."""
    for module in copied.modules():
        for held in _holders_of(module):
            for name, value in list(held.items()):
                if isinstance(value, FunctionType | MethodType | partial):
                    bound = _rebound(value, memo, {})
                    held[name] = value if bound is value else Rebound(bound)


def note_empty(model: nn.Module, memo: dict[int, Any]) -> None:
    """Put copies of all empty containers in the modules of `model`, most of them for hooks, into the `memo` of a copy
    that will be made: `copy.deepcopy` would take most of its time for them."""
    for module in model.modules():
        for held in vars(module).values():
            if type(held) in (dict, OrderedDict, list, set) and not held:
                memo.setdefault(id(held), type(held)())


class Rebound:
    """A function of a copied model, which a copy of that model copies too."""

    def __init__(self, function: Callable[..., Any], memo: Mapping[int, Any] | None = None) -> None:
        """With `memo`, the function still refers to the model of which a copy is being made: it is rebound when it is
        called first, because by then all modules have been copied."""
        self._function, self._memo = function, memo
        update_wrapper(self, function)

    @property
    def function(self) -> Callable[..., Any]:
        if self._memo is not None:
            self._function, self._memo = _rebound(self._function, self._memo, {}), None
        return self._function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rebound:
        return Rebound(self.function, memo)


def _holders_of(module: nn.Module) -> Iterator[MutableMapping[Any, Any]]:
    yield module.__dict__
    yield module._forward_pre_hooks
    yield module._forward_hooks


def _rebound(value: Any, memo: Mapping[int, Any], known: dict[int, Any]) -> Any:
    """`value` itself if it refers to nothing that was copied."""
    if isinstance(value, nn.Module | torch.Tensor):
        return memo.get(id(value), value)
    if type(value) in _CONTAINERS:
        return memo[id(value)] if id(value) in memo else known.setdefault(id(value), copy.copy(value))
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = value  # until it is known otherwise: a function may refer to itself
    if isinstance(value, MethodType):
        function, owner = (_rebound(one, memo, known) for one in (value.__func__, value.__self__))
        if function is not value.__func__ or owner is not value.__self__:
            known[id(value)] = MethodType(function, owner)
    elif isinstance(value, partial):
        args = tuple(_rebound(one, memo, known) for one in value.args)
        kwargs = {name: _rebound(one, memo, known) for name, one in value.keywords.items()}
        known[id(value)] = partial(_rebound(value.func, memo, known), *args, **kwargs)
    elif isinstance(value, FunctionType):
        known[id(value)] = _with_cells(value, memo, known)
    return known[id(value)]


def _with_cells(function: FunctionType, memo: Mapping[int, Any], known: dict[int, Any]) -> FunctionType:
    cells = []
    for cell in function.__closure__ or ():
        try:
            held = _rebound(cell.cell_contents, memo, known)
        except ValueError:  # an empty cell
            cells.append(cell)
            continue
        cells.append(cell if held is cell.cell_contents else CellType(held))
    collected = {
        name: _rebound(function.__globals__[name], memo, known)
        for name in function.__code__.co_names
        if type(function.__globals__.get(name)) in _CONTAINERS
    }
    if not collected and all(one is other for one, other in zip(cells, function.__closure__ or (), strict=True)):
        return function
    names = {**function.__globals__, **collected} if collected else function.__globals__
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, tuple(cells) or None)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update({name: _rebound(value, memo, known) for name, value in vars(function).items()})
    return made
