"""A number that stays on its device until its value is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


class LateFloat:
    """The root of a sum of squares on a device. It behaves like a float; its first use waits for the device.

    It is not a subclass of `float`: C code such as `json` and `math` would read the value that such a subclass was
    created with. `json` refuses this one; pass it `float(number)`.
    """

    __slots__ = ("_squared", "_value")

    def __init__(self, squared: Tensor) -> None:
        """`squared` has no dimensions and must not be written to any more."""
        self._squared: Tensor | None = squared
        self._value = math.nan

    @property
    def is_known(self) -> bool:
        """Whether the value has been read."""
        return self._squared is None

    def on_device(self) -> Tensor:
        """The number as a tensor without dimensions, for arithmetic that does not wait for the device; once it is
        known, a new tensor on the CPU."""
        return torch.tensor(self._value, device="cpu") if self._squared is None else self._squared.sqrt()

    def __float__(self) -> float:
        if self._squared is not None:
            self._value = root(self._squared.item())
            self._squared = None
        return self._value

    def __repr__(self) -> str:
        return repr(float(self))

    def __format__(self, how: str) -> str:
        return format(float(self), how)

    def __bool__(self) -> bool:
        return bool(float(self))

    def __int__(self) -> int:
        return int(float(self))

    def __hash__(self) -> int:
        return hash(float(self))

    def __round__(self, digits: int | None = None) -> Any:  # an int without digits, as for a float
        return round(float(self), digits)

    def __eq__(self, other: object) -> bool:
        return bool(float(self) == _plain(other))

    def __lt__(self, other: Any) -> bool:
        return bool(float(self) < _plain(other))

    def __le__(self, other: Any) -> bool:
        return bool(float(self) <= _plain(other))

    def __gt__(self, other: Any) -> bool:
        return bool(float(self) > _plain(other))

    def __ge__(self, other: Any) -> bool:
        return bool(float(self) >= _plain(other))

    def __add__(self, other: Any) -> Any:
        return float(self) + _plain(other)

    def __radd__(self, other: Any) -> Any:
        return _plain(other) + float(self)

    def __sub__(self, other: Any) -> Any:
        return float(self) - _plain(other)

    def __rsub__(self, other: Any) -> Any:
        return _plain(other) - float(self)

    def __mul__(self, other: Any) -> Any:
        return float(self) * _plain(other)

    def __rmul__(self, other: Any) -> Any:
        return _plain(other) * float(self)

    def __truediv__(self, other: Any) -> Any:
        return float(self) / _plain(other)

    def __rtruediv__(self, other: Any) -> Any:
        return _plain(other) / float(self)

    def __pow__(self, other: Any) -> Any:
        return float(self) ** _plain(other)

    def __neg__(self) -> float:
        return -float(self)

    def __abs__(self) -> float:
        return abs(float(self))

    def __reduce__(self) -> tuple[Callable[[float], float], tuple[float]]:
        """Copying and pickling give a float."""
        return float, (float(self),)


Norm = float | LateFloat


def root(squared: float) -> float:
    """The root of a sum of squares; NaN if the sum is NaN or was rounded below zero."""
    return math.sqrt(squared) if squared >= 0 else math.nan


def _plain(other: Any) -> Any:
    return float(other) if isinstance(other, LateFloat) else other
