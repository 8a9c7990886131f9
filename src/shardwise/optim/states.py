"""The states of an optimizer whose parameters are sharded: kept by pieces, and protected from being taken for whole
ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import StateError
from shardwise.optim.piece import GroupsOfPieces

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_keys, dict_values

Tensor = torch.Tensor


def first_states(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> dict[Tensor, dict[str, Any]]:
    """What `optimizer` has to find in its state before the first step on `params`: nothing, except for Adagrad.

    Torch 2.11's makes its states when it is built, for the parameters of that time, and none in a step. Later ones take
    what they find.
    """
    if not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    start = optimizer.defaults["initial_accumulator_value"]
    return {param: {"step": torch.tensor(0.0, device="cpu"), "sum": torch.full_like(param, start)} for param in params}


class StatesOfPieces(defaultdict[Tensor, Any]):
    """`optimizer.state` of an adopted optimizer. The optimizer uses it during a step; other accesses raise
    `StateError`, which says how to get states.

    `names` has the model's parameters by their ids.
    """

    def __init__(self, names: Mapping[int, str], states: Mapping[Tensor, Any], groups: GroupsOfPieces) -> None:
        self._names = names
        self._groups = groups
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

    def __delitem__(self, key: Tensor) -> None:
        self._require_piece(key)
        super().__delitem__(key)

    def pop(self, key: Tensor, *default: Any) -> Any:
        self._require_piece(key)
        return super().pop(key, *default)

    def setdefault(self, key: Tensor, default: Any = None) -> Any:
        self._require_piece(key)
        return super().setdefault(key, default)

    def __iter__(self) -> Iterator[Tensor]:
        self._require_piece(None)
        return super().__iter__()

    def keys(self) -> dict_keys[Tensor, Any]:
        self._require_piece(None)
        return super().keys()

    def values(self) -> dict_values[Tensor, Any]:
        self._require_piece(None)
        return super().values()

    def items(self) -> dict_items[Tensor, Any]:
        self._require_piece(None)
        return super().items()

    def _require_piece(self, key: object) -> None:
        if self._groups.lists_pieces and id(key) not in self._names:
            return
        name = self._names.get(id(key))
        whose = "The optimizer's states are" if name is None else f"The optimizer's state of {name} is"
        kept = next((kept for states in super().values() for kept in states), "exp_avg")
        raise StateError(
            f"{whose} kept by this rank's piece of {'each parameter' if name is None else 'it'}, which is updated in "
            f"its place. As long as the engine is open, optimizer.state_dict() returns the whole on all ranks, as does "
            f"engine.get({name or 'name'!r}, {kept!r}), say, and engine.set() replaces it."
        )

    def __reduce__(self) -> Any:
        self._require_piece(None)
        return defaultdict, (dict, dict(self))
