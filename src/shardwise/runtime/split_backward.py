"""Backwards in two halves: which gradients of a unit wait for the second half, and the order of the units.

[Note: a unit's halves] In the first half of a backward (see [Note: two halves] in `parallel/pipeline/weight_grads.py`)
linear layers store what their weight gradients need. Gradients of other parameters of the same unit (norms) are kept
beside that as they came, so that no whole flat buffer is allocated for them. The second half then produces all
gradients of a unit together, and reduces them while the next unit is computed. A unit without such layers (an
embedding) gets all of its gradients in the first half, and is reduced there.

Two flat buffers for each unit would double the collectives, and a whole buffer that waits took a stage's gradients once
for each of up to p micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from shardwise.memory import Flat, Unit


@dataclass
class _First:
    """What the first half of one backward leaves."""

    closed: dict[str, Unit] = field(default_factory=dict)
    """Units in the order in which the first half closed them, the same on all ranks of a stage."""
    kept: dict[str, list[tuple[Flat, int, Tensor]]] = field(default_factory=dict)
    """By unit: gradients of single parameters."""


class Halves:
    """The split backwards of one model. While `units` is empty, backwards are not split."""

    def __init__(self) -> None:
        self.unit_of: dict[Tensor, str] = {}
        """The unit of each parameter whose gradient comes in a second half."""
        self.units: frozenset[str] = frozenset()
        """Those units."""
        self.are_second = False
        """Whether a second half is running."""
        self._now: _First | None = None
        self._waiting: dict[int, _First] = {}

    def foresee(self, units: Iterable[Unit], params: Container[nn.Parameter]) -> None:
        """Declare that gradients of `params` come in a second half."""
        self.unit_of = {param: unit.name for unit in units for param in unit.params if param in params}
        self.units = frozenset(self.unit_of.values())

    @contextmanager
    def first(self, micro_batch: int) -> Iterator[None]:
        """Inside, the backward of `micro_batch` runs its first half."""
        self._now = self._waiting[micro_batch] = _First()
        try:
            yield
        finally:
            self._now = None

    @contextmanager
    def second(self) -> Iterator[None]:
        """Inside, the second half of one unit runs."""
        self.are_second = True
        try:
            yield
        finally:
            self.are_second = False

    def is_first_of(self, unit: Unit) -> bool:
        """Whether a first half is running that postpones gradients of `unit`."""
        return self._now is not None and unit.name in self.units

    def keep(self, unit: Unit, flat: Flat, index: int, grad: Tensor) -> bool:
        """Postpone a gradient to the second half. False if it is not postponed."""
        if self._now is None or unit.name not in self.units:
            return False
        self._now.kept.setdefault(unit.name, []).append((flat, index, grad))
        return True

    def note_closed(self, unit: Unit) -> None:
        """The backward of `unit` has been closed, on all ranks alike."""
        if self._now is not None and unit.name in self.units:
            self._now.closed.setdefault(unit.name, unit)

    def take(self, micro_batch: int) -> Iterator[tuple[Unit, Callable[[], None]]]:
        """The units of a second half in order, each with a call that delivers its postponed gradients."""
        left = self._waiting.pop(micro_batch)
        for name, unit in left.closed.items():
            yield unit, partial(_arrive, left.kept.pop(name, []))

    def forget(self) -> None:
        """Drop all postponed gradients, after an exception."""
        self._now, self.are_second = None, False
        self._waiting.clear()


def _arrive(kept: list[tuple[Flat, int, Tensor]]) -> None:
    for flat, index, grad in kept:
        flat.grads.arrive(index, grad)
