"""A line of ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks along one axis, in its order, and this rank's place among them."""

    axis: str
    ranks: tuple[int, ...]
    index: int
