"""Tensors that arrive one by one, made into those of another form as soon as all that one of them takes is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
Named = tuple[str, Tensor]


@dataclass(frozen=True)
class Group:
    """The tensors `names`, which `make` turns into tensors with the names, shapes and dtypes of `made` (tensors without
    memory); into none, if `made` is empty. `make` may write to what it is given."""

    names: tuple[str, ...]
    made: Mapping[str, Tensor]
    make: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
    only_renames: bool = False
    """Whether what is made is the one that is given, under another name; or nothing."""


def renamed(name: str, called: str, like: Tensor) -> Group:
    def make(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {called: given[name]}

    return Group((name,), {called: like}, make, only_renames=True)


def dropped(name: str) -> Group:
    def make(_: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}

    return Group((name,), {}, make, only_renames=True)


class Rearrangement:
    """What is made of tensors that arrive in a given order. Each is in at most one of `groups`; those in none pass as
    they are."""

    def __init__(self, groups: Iterable[Group], order: Mapping[str, Tensor]) -> None:
        """`order` has tensors without memory, in the order in which they will arrive."""
        self._group_of = {name: group for group in groups for name in group.names}
        self.made: dict[str, Tensor] = {}
        """What comes out, as tensors without memory, in that order."""
        left = {id(group): set(group.names) for group in self._group_of.values()}
        for name, like in order.items():
            group = self._group_of.get(name)
            if group is None:
                self.made[name] = like
                continue
            left[id(group)].discard(name)
            if not left[id(group)]:
                self.made |= group.made

    def origins(self) -> dict[str, str] | None:
        """By what comes out, which of those that arrive it is; `None` if any is made of others."""
        if not all(group.only_renames for group in self._group_of.values()):
            return None
        renamings = {called: name for name, group in self._group_of.items() for called in group.made}
        return {name: renamings.get(name, name) for name in self.made}

    def of(self, arriving: Iterable[Named]) -> Iterator[Named]:
        """What is made of `arriving`, whose memory is nobody else's. A tensor that waits for others of its group is
        kept as a copy, because as a view it would keep all of its unit."""
        waiting: dict[str, Tensor] = {}
        for name, tensor in arriving:
            group = self._group_of.get(name)
            if group is None:
                yield name, tensor
            elif any(one not in waiting for one in group.names if one != name):
                waiting[name] = tensor.clone()
            else:
                waiting[name] = tensor
                made = group.make({one: waiting.pop(one) for one in group.names})
                for one in group.made:
                    yield one, made[one]
                del made
            del tensor  # its unit is let go before the next is gathered
