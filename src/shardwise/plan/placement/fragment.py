"""When each part of a model has its outer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardwise.plan import Islands

Unit = TypeVar("Unit")


@dataclass(frozen=True)
class Fragment:
    """One `of` several parts of the model, whose outer gradients are sent after every step whose number is `begins`
    modulo `every`, and whose outer step takes effect after those at `ends`: the same steps, or `overlap` later.

    The last fragment's outer step takes effect, without an overlap, at every multiple of `every`. Steps are counted
    from 1.
    """

    number: int
    of: int
    begins: int
    ends: int
    every: int

    def begins_after(self, step: int) -> bool:
        return step % self.every == self.begins % self.every

    def ends_after(self, step: int) -> bool:
        return step % self.every == self.ends % self.every

    def some_of(self, units: Sequence[Unit]) -> list[Unit]:
        """Those of all trained `units` that are in it. They are dealt out in turn, which the paper calls strided."""
        return list(units[self.number :: self.of])

    def in_words(self) -> str:
        """`after steps 50, 150, ...`, and how much later it takes effect."""
        first, second = self.begins, self.begins + self.every
        over = f", takes effect {self.ends - self.begins} later" if self.ends != self.begins else ""
        return f"after steps {first}, {second}, ...{over}"


def fragments_of(islands: Islands) -> tuple[Fragment, ...]:
    """As in streaming DiLoCo (arXiv:2501.18512, algorithm 2), with offsets that divide `every` evenly: so that one
    fragment is on its way at a time."""
    apart = islands.every // islands.fragments
    begins = [(number + 1) * apart for number in range(islands.fragments)]
    return tuple(
        Fragment(number, islands.fragments, at, at + islands.overlap, islands.every) for number, at in enumerate(begins)
    )
