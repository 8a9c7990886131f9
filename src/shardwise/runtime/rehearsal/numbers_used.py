"""The numbers with which a rehearsed forward computes.

[Note: numbers of samples] A function that depends on how many samples or tokens there are is right for all of them
alone, not for a part: `x / len(x)`, a capacity of so many tokens, `h / mask.sum()`, `h * math.log(h.shape[1])`. No
shape tells. So a forward is rehearsed with another number of them, and the numbers are compared with which operators
compute: they are the same if they do not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from shardwise.runtime.nested import argument_tensors
from shardwise.system.torch_functions import bound, operator_name
from shardwise.system.torch_private import UncompiledMode, tree_leaves

Tensor = torch.Tensor


class NumbersUsed(UncompiledMode):
    """Notes the numbers with which operators compute what is no integer: see [Note: numbers of samples]."""

    def __init__(self, size: int = 1) -> None:
        """Of what has a dimension of `size`, or of a multiple of it: a sum over all tokens may be divided by their
        number, as a mean is."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._size = size
        self._noted: list[tuple[str, tuple[float, ...]]] = []

    def __torch_dispatch__(
        self,
        func: Any,  # an operator
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(one.is_floating_point() and self._is_counted(one) for one in argument_tensors(result)):
            self._noted.append((operator_name(func), tuple(_numbers_in(func, args, kwargs))))
        return result

    def _is_counted(self, tensor: Tensor) -> bool:
        return self._size == 1 or any(one and one % self._size == 0 for one in tensor.shape)

    def difference(self, other: NumbersUsed) -> str:
        """The first operator that another forward has computed with other numbers; "" if there is none, or if that
        forward took another path."""
        if [name for name, _ in self._noted] != [name for name, _ in other._noted]:
            return ""
        pairs = zip(self._noted, other._noted, strict=True)
        return next((name for (name, one), (_, another) in pairs if one != another), "")


def _numbers_in(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[float]:
    """The numbers in the arguments of an operator that are neither sizes nor places, as such and in tensors."""
    computing = _computing(func)
    for argument, value in bound(func, args, kwargs):
        if type(value) in (int, float) and argument.name in computing:
            yield value
        for tensor in tree_leaves(value) if isinstance(value, Tensor | list | tuple) else ():
            if type(tensor) is Tensor and tensor.numel() == 1 and not tensor.is_meta:  # a fake one has no value
                yield tensor.item()


@lru_cache(None)
def _computing(operator: Any) -> frozenset[str]:
    """The arguments of an operator that may be numbers with which it computes."""
    kinds = ("Tensor", "number", "float")
    return frozenset(one.name for one in operator._schema.arguments if any(kind in str(one.type) for kind in kinds))
