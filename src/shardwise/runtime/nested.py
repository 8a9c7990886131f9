"""The tensors in a module's arguments, outputs and attributes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_WITHOUT_ITEMS = (str, bytes, int, float, nn.Module, Optimizer)
"""A tuple: a union is made anew at each call, which takes longer than asking it, and these are asked for each operation
of a watched forward."""


def named_tensors(args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Tensor]:
    """Every tensor in the arguments of a call, by the argument's name, numbered if an argument has several."""
    named = {}
    for name, value in {**{f"argument {place}": value for place, value in enumerate(args)}, **kwargs}.items():
        found = [value] if isinstance(value, Tensor) else list(tensors_in(value))
        for number, tensor in enumerate(found):
            named[name if len(found) == 1 else f"{name}[{number}]"] = tensor
    return named


def tensors_in(value: object, depth: int = 4) -> Iterator[Tensor]:
    """Every tensor in a nest of tuples, lists, dicts, dataclasses and plain objects, but for those whose class says
    `refers_only = True`: their tensors are those of modules. An optimizer's are its own."""
    if isinstance(value, Tensor):
        yield value
        return
    for item in _items_of(value) if depth else ():
        if isinstance(item, Tensor):  # most are, and need no generator of their own
            yield item
        else:
            yield from tensors_in(item, depth - 1)


def optimizers_in(value: object, depth: int = 4) -> Iterator[Optimizer]:
    """Every optimizer in such a nest: networks of reinforcement learning keep theirs in an attribute."""
    if isinstance(value, Optimizer):
        yield value
        return
    for item in _items_of(value) if depth else ():
        yield from optimizers_in(item, depth - 1)


def _items_of(value: object) -> Iterable[object]:
    if value is None or isinstance(value, _WITHOUT_ITEMS):
        return ()
    if getattr(type(value), "refers_only", False):
        return ()
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set)):
        return value
    if is_dataclass(value):
        return [getattr(value, one.name) for one in fields(value)]
    return list(getattr(value, "__dict__", {}).values())


def with_others(value: object, other: Callable[[Tensor], Tensor], depth: int = 4) -> object:
    """`value` with `other(tensor)` in place of every tensor that `tensors_in` finds. Lists, dicts and objects stay the
    same ones, and are changed."""
    if isinstance(value, Tensor):
        return other(value)
    if depth == 0 or value is None or isinstance(value, _WITHOUT_ITEMS):
        return value
    if isinstance(value, list):
        value[:] = [with_others(item, other, depth - 1) for item in value]
    elif isinstance(value, tuple):
        items = [with_others(item, other, depth - 1) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        kind: Any = type(value)
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    elif isinstance(value, set):
        return {with_others(item, other, depth - 1) for item in value}
    elif isinstance(value, dict):
        for key, item in list(value.items()):
            value[key] = with_others(item, other, depth - 1)
    else:
        names = [one.name for one in fields(value)] if is_dataclass(value) else list(getattr(value, "__dict__", {}))
        for name in names:
            item = getattr(value, name)
            changed = with_others(item, other, depth - 1)
            if changed is not item:
                object.__setattr__(value, name, changed)  # also of a frozen dataclass
    return value


def argument_tensors(value: object) -> Iterator[Tensor]:
    """Every tensor in lists, tuples and mappings, as in a batch, or the arguments and results of an operator."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from argument_tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from argument_tensors(item)
