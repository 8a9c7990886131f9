"""A line of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks along one axis, in its order, and this rank's place among them."""

    axis: str
    ranks: tuple[int, ...]
    index: int
    others: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    """Place and rank of the others, beginning with the right-hand neighbour."""

    def __post_init__(self) -> None:
        num_ranks = len(self.ranks)
        places = [(self.index + step) % num_ranks for step in range(1, num_ranks)]
        object.__setattr__(self, "others", tuple((place, self.ranks[place]) for place in places))
