"""Views of gathered parameters that somebody reads after the forward that made them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from shardwise.memory import Unit
from shardwise.runtime.nested import tensors_in, with_others
from shardwise.system.torch_private import storage_id


class KeptViews:
    """Copies views of parameters that outlive a forward: what it returns, and what it leaves in attributes of modules.

    The memory of gathered parameters comes and goes, and whoever has such a view reads it later, when it has NaN or,
    where ranks share memory, what another rank may be writing. So they become copies when the forward of the unit ends.
    They have the values of that moment, and pass gradients on, as the views did.

    `looks`: whether all attributes of modules are looked through; otherwise only those in which there was one before.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.looks = False
        self._views: dict[str, Callable[[Tensor], bool]] = {}
        """By unit, what says whether a tensor is a view of its parameters."""
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        """By unit, the attributes in which modules keep views of its parameters."""

    def apart(self, unit: Unit, output: object) -> object:
        """`output` of a forward of `unit` with copies of what is a view of its parameters, as the first rows of a table
        of positions are."""
        if unit.stays_whole:
            return output
        is_view = self._views.get(unit.name) or self._is_view_of(unit)
        if self.looks:
            self._find(unit, is_view)
        for module, name in self._places.get(unit.name, ()):
            kept = module.__dict__.get(name)
            if _has_view(kept, is_view):
                module.__dict__[name] = _copied(kept, is_view)
        return _copied(output, is_view) if _has_view(output, is_view) else output

    def _is_view_of(self, unit: Unit) -> Callable[[Tensor], bool]:
        storages: frozenset[int] | None = None
        if not is_dynamo_compiling():
            storages = frozenset(storage_id(flat.full.untyped_storage()) for flat in unit.flats)

        def is_view(tensor: Tensor) -> bool:
            base = tensor._base
            if base is not None and any(base is param for param in unit.params):
                return True
            if type(tensor) is not Tensor or is_dynamo_compiling() or tensor.layout is not torch.strided:
                return False
            return storages is not None and storage_id(tensor.untyped_storage()) in storages

        if storages is not None:
            self._views[unit.name] = is_view
        return is_view

    def _find(self, unit: Unit, is_view: Callable[[Tensor], bool]) -> None:
        places = self._places.setdefault(unit.name, [])
        for module in self._modules_around(unit):
            for name, value in module.__dict__.items():
                if name in _TORCHS or (module, name) in places:
                    continue
                if isinstance(value, Tensor | list | tuple | dict) and _has_view(value, is_view):
                    places.append((module, name))

    def _modules_around(self, unit: Unit) -> Iterable[nn.Module]:
        """The modules of the unit, and all those that contain it."""
        found = dict.fromkeys(module for site in unit.sites for module in site.modules())
        outer = list(unit.sites)
        while outer:
            parents = [one for one in self._parents.get(outer.pop(), ()) if one not in found]
            found |= dict.fromkeys(parents)
            outer += parents
        return found

    @cached_property
    def _parents(self) -> dict[nn.Module, list[nn.Module]]:
        parents: dict[nn.Module, list[nn.Module]] = {}
        for parent in self._root.modules():
            for child in parent.children():
                parents.setdefault(child, []).append(parent)
        return parents


_TORCHS = frozenset(nn.Module().__dict__)
"""Attributes of every module, as its parameters and hooks."""


def _has_view(value: object, is_view: Callable[[Tensor], bool]) -> bool:
    return is_view(value) if isinstance(value, Tensor) else any(map(is_view, tensors_in(value)))


def _copied(value: Any, is_view: Callable[[Tensor], bool]) -> object:
    return with_others(value, lambda tensor: tensor.clone() if is_view(tensor) else tensor)
