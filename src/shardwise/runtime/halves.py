"""Backwards in two halves: which gradients of a unit wait for the second, and in which order units are gone through.

[Note: a unit's halves] In the first half of a backward (see [Note: two halves] in `pipeline/weight_grads.py`) linear
layers put aside what their weights' gradients need. What comes of other parameters of the same unit (norms) waits as
it came, beside that: so no memory of a whole flat buffer is taken for it, and the second half brings all gradients of a
unit together, which is reduced then and there, while the next is computed. A unit without such layers (an embedding)
has all of its gradients in the first half, and is reduced in that.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from shardwise.storage import Flat, Unit


@dataclass
class _First:
    """What the first half of one backward has left."""

    closed: dict[str, Unit] = field(default_factory=dict)
    """In the order in which it was through with them, which is the same on all ranks of a stage."""
    kept: dict[str, list[tuple[Flat, int, Tensor]]] = field(default_factory=dict)
    """By unit, gradients of single parameters."""


class Halves:
    """Of one model; without `units` no backward has halves."""

    def __init__(self) -> None:
        self.unit_of: dict[Tensor, str] = {}
        """Of parameters whose gradients come in a second half, the unit that they are in."""
        self.units: frozenset[str] = frozenset()
        """Those units."""
        self.are_second = False
        """Whether a second half is computed."""
        self._now: _First | None = None
        self._waiting: dict[int, _First] = {}

    def foresee(self, units: Iterable[Unit], params: Container[nn.Parameter]) -> None:
        """Gradients of `params` come in a second half."""
        self.unit_of = {param: unit.name for unit in units for param in unit.params if param in params}
        self.units = frozenset(self.unit_of.values())

    @contextmanager
    def first(self, micro_batch: int) -> Iterator[None]:
        """Inside, a backward is a first half."""
        self._now = self._waiting[micro_batch] = _First()
        try:
            yield
        finally:
            self._now = None

    @contextmanager
    def second(self) -> Iterator[None]:
        """Inside, the second half of one unit is computed."""
        self.are_second = True
        try:
            yield
        finally:
            self.are_second = False

    def is_first_of(self, unit: Unit) -> bool:
        """Whether a first half runs that leaves something of `unit`."""
        return self._now is not None and unit.name in self.units

    def keep(self, unit: Unit, flat: Flat, index: int, grad: Tensor) -> bool:
        """Whether a gradient that has come waits for the second half."""
        if self._now is None or unit.name not in self.units:
            return False
        self._now.kept.setdefault(unit.name, []).append((flat, index, grad))
        return True

    def note_closed(self, unit: Unit) -> None:
        """The backward of `unit` has ended, on all ranks alike."""
        if self._now is not None and unit.name in self.units:
            self._now.closed.setdefault(unit.name, unit)

    def take(self, micro_batch: int) -> Iterator[tuple[Unit, Callable[[], None]]]:
        """The units of a second half in their order; with what brings the gradients that have waited."""
        left = self._waiting.pop(micro_batch)
        for name, unit in left.closed.items():
            yield unit, partial(_arrive, left.kept.pop(name, []))

    def forget(self) -> None:
        """Something raised: nothing waits any more."""
        self._now, self.are_second = None, False
        self._waiting.clear()


def _arrive(kept: list[tuple[Flat, int, Tensor]]) -> None:
    for flat, index, grad in kept:
        flat.grads.arrive(index, grad)
