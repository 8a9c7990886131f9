"""Dicts of foreign files, with checks of the types of their items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shardwise.errors import CheckpointError

Kind = TypeVar("Kind")
Tensor = torch.Tensor


@dataclass(frozen=True)
class CheckedDict:
    """A dict in the file `where`. Missing items and items of another type raise `CheckpointError`."""

    values: Mapping[Any, Any]
    where: str

    @classmethod
    def of(cls, value: Any, where: str, what: str = "its content") -> CheckedDict:
        return cls(expected(value, dict, where, what), where)

    def __contains__(self, key: object) -> bool:
        return self.values.get(key) is not None

    def get(self, key: Any, kind: type[Kind]) -> Kind:
        return expected(self.values.get(key), kind, self.where, str(key))

    def inner(self, key: Any) -> CheckedDict:
        return CheckedDict(self.get(key, dict), self.where)

    def inner_or_empty(self, key: Any) -> CheckedDict:
        """The dict under `key`; empty if it is missing or `None`."""
        return self.inner(key) if key in self else CheckedDict({}, self.where)

    def tensors(self, key: Any) -> dict[str, Tensor]:
        """Names and tensors under `key`, without its other entries; empty if it is missing."""
        items = self.inner_or_empty(key).values.items()
        return {name: one for name, one in items if isinstance(name, str) and isinstance(one, Tensor)}

    def count(self, key: Any) -> int:
        """A number that is not negative."""
        number = self.get(key, int)
        if isinstance(number, bool) or number < 0:
            raise CheckpointError(f"{self.where} is damaged: its {key} is {number}.")
        return number

    def each(self, key: Any, kind: type[Kind]) -> list[Kind]:
        """The items of the list or tuple under `key`."""
        listed = self.values.get(key)
        if not isinstance(listed, list | tuple):
            expected(listed, list, self.where, str(key))
        return [expected(item, kind, self.where, f"an item of {key}") for item in listed or ()]

    def names(self, key: Any) -> list[str]:
        """The texts in the list under `key`; empty if it is missing."""
        return self.each(key, str) if key in self else []


def expected(value: Any, kind: type[Kind], where: str, what: str) -> Kind:
    """`value`, if it is a `kind`; else raises `CheckpointError`."""
    if value is None:
        raise CheckpointError(f"{where} is damaged, or was written by another program: {what} is missing.")
    if not isinstance(value, kind):
        raise CheckpointError(
            f"{where} is damaged, or was written by another program: {what} is a {type(value).__name__} instead of a "
            f"{kind.__name__}."
        )
    return value


def at(items: list[Kind], index: int, where: str, what: str) -> Kind:
    """`items[index]`, if it exists; else raises `CheckpointError`."""
    if not 0 <= index < len(items):
        raise CheckpointError(f"{where} is damaged: it has {len(items)} {what}, and number {index} is needed.")
    return items[index]


def shapes_in(named: CheckedDict) -> dict[str, tuple[int, ...]]:
    """Names and shapes, if `named` has nothing else."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in named.values.items():
        if not isinstance(name, str) or not isinstance(shape, tuple | list):
            raise CheckpointError(f"{named.where} is damaged: it has no shape for {name!a:.200}.")
        if len(shape) > 64 or not all(type(one) is int and 0 <= one < 2**62 for one in shape):
            raise CheckpointError(f"{named.where} is damaged: {name!a:.200} has a shape that no tensor can have.")
        shapes[name] = tuple(shape)
    return shapes
