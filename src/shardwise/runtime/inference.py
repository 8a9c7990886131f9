"""Forwards without gradients, each rank at its own pace: ranks may call anything, any number of times.

[Note: rounds] A unit that is not kept whole is gathered when a rank needs it, and a gather needs all ranks. So
whoever needs one calls a round: every rank says which unit it needs, or that it is through, and all of them gather
what the first rank that needs one has said. A rank that wanted another asks again. A rank that is through
takes part in rounds until all are. No rank has to know what the others run, or how often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.comm import World
from shardwise.errors import StateError
from shardwise.runtime.reach import Reach
from shardwise.storage import Unit

THROUGH, FAILED = b"through", b"failed"


class Inference:
    """What happens instead of a pass while every rank runs by itself. `gather` makes a unit whole, on all ranks."""

    def __init__(self, units: Sequence[Unit], gather: Callable[[Unit], None], world: World, keep_bytes: int | None):
        self._units = list(units)
        self._numbers = {unit.name: number for number, unit in enumerate(units)}
        self._gather = gather
        self._world = world
        self._kept = _kept(units, keep_bytes)
        self._reach: Reach | None = None
        self._is_over = False

    def begin(self) -> None:
        """Make whole what is kept. All ranks call."""
        for unit in self._units:
            if unit.name in self._kept:
                self._gather(unit)
        if len(self._kept) < len(self._units):
            self._reach = Reach(self._units, self.need)
            self._reach.__enter__()  # type: ignore[no-untyped-call]  # torch's own

    def end(self, *, failed: bool) -> None:
        """Take part in the others' rounds until all are through. All ranks call."""
        if self._reach is not None:
            self._reach.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
            self._reach = None
        while len(self._kept) < len(self._units) and not self._is_over:
            if failed:
                self._is_over = True
                self._say(FAILED)
            else:
                self._round(THROUGH)

    def need(self, unit: Unit) -> None:
        """`unit` is whole when this returns."""
        if torch.is_grad_enabled():
            raise StateError(
                "A module was called with gradients enabled inside engine.inference(), where none can be computed. "
                "Train outside of it."
            )
        wish = str(self._numbers[unit.name]).encode()
        while not _is_whole(unit):
            if self._reach is None:
                self._round(wish)
                continue
            with self._reach.paused():
                self._round(wish)

    def release(self, unit: Unit) -> None:
        """`unit` has computed."""
        if unit.name not in self._kept:
            unit.rest()
            for flat in unit.flats:
                flat.free_full()

    def release_all(self) -> None:
        """The model has returned: what modules had reached for may go."""
        for unit in self._units:
            self.release(unit)

    def _say(self, message: bytes) -> list[bytes]:
        """What every rank says, wherever it has come to: one and the same call in the eyes of the watch."""
        return self._world.exchange(message, "inference")

    def _round(self, wish: bytes) -> None:
        said = self._say(wish)
        if FAILED in said:
            self._is_over = True
            raise StateError(
                f"Rank {said.index(FAILED)} left engine.inference() with an error, so its part of the parameters "
                f"cannot be had any more; its own report says why."
            )
        wishes = [message for message in said if message != THROUGH]
        if not wishes:
            self._is_over = True
            return
        unit = self._units[int(wishes[0])]
        was_whole = _is_whole(unit)
        for flat in unit.flats:
            flat.free_full()  # others need our part: it is gathered anew
        self._gather(unit)
        if wishes[0] != wish and not was_whole:
            self.release(unit)


def _kept(units: Sequence[Unit], keep_bytes: int | None) -> set[str]:
    """The units that stay whole: as many as fit into `keep_bytes`, in the model's order; those that always are."""
    kept, left = set(), keep_bytes
    for unit in units:
        needed = sum(flat.spec.full_bytes for flat in unit.flats if not flat.spec.resident)
        if left is None or needed <= left:
            kept.add(unit.name)
            left = None if left is None else left - needed
    return kept


def _is_whole(unit: Unit) -> bool:
    return all(flat.is_whole for flat in unit.flats)
