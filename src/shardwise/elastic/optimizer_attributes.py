"""What optimizers count or estimate in attributes of their own, and not in states or in settings of their groups. It is
undone with the update that has changed it, and sent to ranks that join.

[Note: what is noted] Numbers, text, small tensors, and containers of them, are copied before each update. Of large
tensors only a change is seen: they belong into `optimizer.state`, where images and checkpoints have them. Other objects
are not looked into.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint import encode
from shardwise.checkpoint.json_codec import decode
from shardwise.errors import ConfigError, LostStateError, StateError
from shardwise.optim import Cooperative
from shardwise.optim.probe import KNOWN

Tensor = torch.Tensor
_LARGE = 1000
"""Tensors with more elements are not copied."""
_OF_SCHEDULERS = frozenset({"_opt_called", "_step_count"})
_CONTAINERS = (list, tuple, set, dict, deque)
Told = dict[str, Any]
"""Of one optimizer: `values` by name, encoded, and the names of those that are `lost` because they cannot be sent."""


class _LargeError(Exception):
    """A value is not copied."""


@dataclass(frozen=True)
class Attributes:
    """Of one optimizer, as they were."""

    optimizer: torch.optim.Optimizer
    names: frozenset[str]
    copies: dict[str, Any]
    large: dict[str, list[tuple[Tensor, int]]]
    """Of attributes with large tensors, all tensors, and how often each had been written to."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Attributes:
        own = _own(optimizer)
        copies: dict[str, Any] = {}
        large: dict[str, list[tuple[Tensor, int]]] = {}
        for name, value in own.items():
            try:
                copies[name] = _copied(value)
            except _LargeError:
                large[name] = [(one, one._version) for one in _tensors_in(value)]
        return cls(optimizer, frozenset(own), copies, large)

    def restore(self) -> None:
        """Raises `LostStateError` for an attribute with large tensors that have changed."""
        now = Attributes.of(self.optimizer)
        changed = self.changed(now)
        if lost := sorted(changed & self.large.keys()):
            raise LostStateError(
                f"A step has to be undone in which {type(self.optimizer).__name__} has changed tensors in attributes "
                f"of its own ({', '.join(lost)}), and nobody has a copy of them. Let it keep them in its state, by "
                f"parameter. Start again from the last checkpoint."
            )
        own = vars(self.optimizer)
        for name in changed:
            if name in self.names:
                own[name] = _copied(self.copies[name])
            else:
                del own[name]

    def changed(self, now: Attributes) -> set[str]:
        """The names of those that are other ones in `now`, or only there."""
        both = self.names & now.names
        changed = {name for name in both if not _is_same(self.copies.get(name), now.copies.get(name))}
        changed |= {name for name in both if not _are_untouched(self.large.get(name), now.large.get(name))}
        return changed | (self.names ^ now.names)


class ChangedAttributes:
    """Which attributes of `optimizers` have changed since training began, so that ranks that join need them.

    `heard` are those that this rank has received when it joined.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], heard: Sequence[Told] = ()) -> None:
        self._last = [Attributes.of(optimizer) for optimizer in optimizers]
        self._names: list[set[str]] = [set() for _ in optimizers]
        self.hear(heard)

    def hear(self, told: Sequence[Told]) -> None:
        for names, one in zip(self._names, told, strict=False):
            names |= one["values"].keys()

    def note(self) -> list[Attributes]:
        """Those of each optimizer as they are now."""
        now = [Attributes.of(last.optimizer) for last in self._last]
        for names, last, one in zip(self._names, self._last, now, strict=True):
            names |= last.changed(one)
        self._last = now
        return now

    def told(self) -> list[Told]:
        """For each optimizer, for ranks that join."""
        return [_told(now, names) for now, names in zip(self.note(), self._names, strict=True)]


def _told(now: Attributes, names: set[str]) -> Told:
    values: dict[str, Any] = {}
    lost: list[str] = []
    for name in sorted(names & now.names):
        try:
            values[name] = encode(now.copies[name], name)
        except (KeyError, ConfigError):  # it has a large tensor, or a value of a kind that is not sent
            lost.append(name)
    return {"values": values, "lost": lost}


def take_over(optimizers: Iterable[torch.optim.Optimizer], told: Iterable[Told]) -> None:
    """On a rank that joins: take the others' values. Raises `StateError` for what they could not send."""
    for optimizer, one in zip(optimizers, told, strict=True):
        if lost := one["lost"]:
            raise StateError(
                f"This rank has joined ranks that train already, and their {type(optimizer).__name__} keeps in "
                f"attributes of its own what cannot be sent ({', '.join(lost)}). They go on without it. Let it keep "
                f"that in its state, by parameter."
            )
        vars(optimizer).update({name: decode(value, name) for name, value in one["values"].items()})


def _own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What it has besides what every optimizer of torch has. Cooperative ones begin again by themselves."""
    if type(optimizer) in KNOWN or isinstance(optimizer, Cooperative):
        return {}
    of_torch = {"defaults", "state", "param_groups", *_OF_SCHEDULERS}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in of_torch and not name.endswith("_hooks") and _is_noted(value)
    }


def _is_noted(value: Any) -> bool:
    """See [Note: what is noted]."""
    if isinstance(value, nn.Parameter):
        return False
    return isinstance(value, Tensor | bool | int | float | complex | str | bytes | None) or (
        type(value) in _CONTAINERS and all(map(_is_noted, _values_in(value)))
    )


def _values_in(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() > _LARGE:
            raise _LargeError
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copied(one) for key, one in value.items()}
    if type(value) is deque:
        return deque(map(_copied, value), value.maxlen)
    return type(value)(map(_copied, value)) if type(value) in _CONTAINERS else value


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value) in _CONTAINERS:
        for one in _values_in(value):
            yield from _tensors_in(one)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if type(one) in (list, tuple, deque):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if type(one) is dict:
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    return bool(one == other)


def _are_untouched(before: list[tuple[Tensor, int]] | None, now: list[tuple[Tensor, int]] | None) -> bool:
    if before is None or now is None:
        return before is now
    pairs = zip(before, now, strict=False)
    return len(before) == len(now) and all(one is other and was == by for (one, was), (other, by) in pairs)
