"""A line of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Exchange = Callable[[bytes], list[bytes]]
"""Exchanges messages between ranks: it is given this one's, and returns those of all, by place."""
_MOST_LISTED = 16


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks along one axis, in its order, and this rank's place among them.

    Create it once and keep it: the constructor takes time proportional to the number of ranks.
    """

    axis: str
    ranks: tuple[int, ...]
    index: int
    is_link: bool = False
    """Whether it is a link for messages from the first rank to the last; see `link_between`."""
    others: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    """Place and rank of the others, beginning with the right-hand neighbour."""
    line: str = field(init=False, repr=False, compare=False)
    """The ranks as a short text, equal only for equal ranks: a key whose hash is computed once."""
    name: str = field(init=False, repr=False, compare=False)
    """The axis and the line, `"dp 0-6/4"`."""

    def __post_init__(self) -> None:
        num_ranks = len(self.ranks)
        places = [(self.index + step) % num_ranks for step in range(1, num_ranks)]
        line = line_of(self.ranks)
        object.__setattr__(self, "others", tuple((place, self.ranks[place]) for place in places))
        object.__setattr__(self, "line", line)
        object.__setattr__(self, "name", f"{self.axis} {line}")


def link_between(axis: str, source: int, target: int, rank: int, name: str) -> Group:
    """The link for messages from `source` to `target`, of which `rank` is one; both are on one line along `axis`.

    It is a line of its own in the journal: other ranks' messages, and those of the other direction, are not counted on
    it.
    """
    return Group(f"{axis}:{name}", (source, target), int(rank == target), is_link=True)


def line_of(ranks: Sequence[int]) -> str:
    """`"0-6/4"`: the first, the last and how many. A list or checksum follows if the ranks are not evenly spaced."""
    first, last, num_ranks = ranks[0], ranks[-1], len(ranks)
    stride = (last - first) // (num_ranks - 1) if num_ranks > 1 else 1
    short = f"{first}-{last}/{num_ranks}"
    if stride and tuple(ranks) == tuple(range(first, last + 1 if stride > 0 else last - 1, stride)):
        return short
    listed = ",".join(map(str, ranks))
    return f"{short}#{listed if num_ranks <= _MOST_LISTED else hashlib.sha256(listed.encode()).hexdigest()}"
