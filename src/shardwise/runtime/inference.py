"""Forwards without gradients, each rank at its own pace: ranks may call anything, any number of times.

[Note: rounds] A unit that is not kept whole is gathered when a rank needs it, and a gather needs all ranks. So
whoever needs one calls a round: every rank says which unit it needs, or that it is through, and all of them gather
what the first rank that needs one has said. A rank that wanted another asks again. A rank that is through
takes part in rounds until all are. No rank has to know what the others run, or how often.

[Note: units that stream] What rests on the host or on a disk is not kept whole, unless somebody asks for that: it would
not be there if it fitted. Rounds are the same for all ranks, so all know what was gathered after the same two units the
last time, and have that on its way while they compute: from the last unit of a token to the first of the next, too.
A gather needs all ranks, and what one of them computes with cannot be gathered behind its back: so with its wish each
rank says what is whole there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from shardwise.comm import World
from shardwise.errors import StateError
from shardwise.runtime.gathering import Gathering
from shardwise.runtime.reach import Reach
from shardwise.storage import Unit

THROUGH, FAILED = b"through", b"failed"


class Inference:
    """What happens instead of a pass while every rank runs by itself. `gather` makes a unit whole, on all ranks."""

    def __init__(self, units: Sequence[Unit], gathering: Gathering, world: World, keep_bytes: int | None):
        self._units = list(units)
        self._numbers = {unit.name: number for number, unit in enumerate(units)}
        self._gathering = gathering
        self._world = world
        self._last: tuple[int, int] = (-1, -1)
        """The units of the last two rounds."""
        self._after: dict[tuple[int, int], int] = {}
        """That of the round after two others."""
        self._on_its_way: Unit | None = None
        self._kept = _kept(units, keep_bytes)
        self._reach: Reach | None = None
        self._is_over = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, ranks run what they like; after it nothing is whole. All ranks enter."""
        failed = True
        try:
            with torch.no_grad():
                self._begin()
                yield
            failed = False
        finally:
            try:
                self._end(failed=failed)
            finally:
                if failed:
                    self._gathering.abandon()
                else:
                    self._gathering.free_all()

    def _begin(self) -> None:
        """Make whole what is kept."""
        for unit in self._units:
            if unit.name in self._kept:
                self._gathering.open(unit)
        if len(self._kept) < len(self._units):
            self._reach = Reach(self._units, self.need)
            self._reach.__enter__()  # type: ignore[no-untyped-call]  # torch's own

    def _end(self, *, failed: bool) -> None:
        """Take part in the others' rounds until all are through."""
        if self._reach is not None:
            self._reach.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
            self._reach = None
        if not failed:
            self.release_all()
        while len(self._kept) < len(self._units) and not self._is_over:
            if failed:
                self._is_over = True
                self._say(FAILED)
            else:
                self._round(None)

    def need(self, unit: Unit) -> None:
        """`unit` is whole when this returns."""
        if torch.is_grad_enabled():
            raise StateError(
                "A module was called with gradients enabled inside engine.inference(), where none can be computed. "
                "Train outside of it."
            )
        wish = self._numbers[unit.name]
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

    def _round(self, wish: int | None) -> None:
        """With the number of the unit that this rank needs; `None`: it is through."""
        said = self._say(THROUGH if wish is None else json.dumps([wish, *self._whole_here()]).encode())
        if FAILED in said:
            self._is_over = True
            raise StateError(
                f"Rank {said.index(FAILED)} left engine.inference() with an error, so its part of the parameters "
                f"cannot be had any more; its own report says why."
            )
        wishes: list[list[int]] = [json.loads(message) for message in said if message != THROUGH]
        if not wishes:
            self._is_over = True
            return
        number = wishes[0][0]
        unit = self._units[number]
        was_whole = _is_whole(unit)
        if self._on_its_way is not unit:
            self._stop_ahead()
            for flat in unit.flats:
                flat.free_full()  # others need our part: it is gathered anew
        self._on_its_way = None
        self._gathering.open(unit)
        if number != wish and not was_whole:
            self.release(unit)
        self._start_ahead(number, {number, *(whole for _, *elsewhere in wishes for whole in elsewhere)})

    def _whole_here(self) -> list[int]:
        """The units of which something is whole, and need not stay."""
        own = ((number, unit) for number, unit in enumerate(self._units) if unit.name not in self._kept)
        return [number for number, unit in own if any(flat.is_whole and not flat.spec.resident for flat in unit.flats)]

    def _start_ahead(self, number: int, whole: set[int]) -> None:
        """Have that on its way which came after the unit of this number, if it streams and is `whole` nowhere."""
        self._after[self._last] = number
        self._last = self._last[1], number
        expected = self._after.get(self._last)
        if expected is None or expected in whole or not _streams(self._units[expected]):
            return
        self._on_its_way = self._units[expected]
        self._gathering.begin(self._on_its_way)

    def _stop_ahead(self) -> None:
        unit, self._on_its_way = self._on_its_way, None
        if unit is not None:
            self._gathering.let_go(unit)


def _kept(units: Sequence[Unit], keep_bytes: int | None) -> set[str]:
    """The units that stay whole: as many as fit into `keep_bytes`, in the model's order; those that always are. Without
    `keep_bytes` all that do not stream."""
    kept, left = set(), keep_bytes
    for unit in units:
        if keep_bytes is None and _streams(unit):
            continue
        needed = sum(flat.spec.full_bytes for flat in unit.flats if not flat.spec.resident)
        if left is None or needed <= left:
            kept.add(unit.name)
            left = None if left is None else left - needed
    return kept


def _streams(unit: Unit) -> bool:
    """Whether parameters of it rest on another tier than the device: see [Note: units that stream]."""
    return any(flat.spec.tier_of("param") != "device" for flat in unit.flats)


def _is_whole(unit: Unit) -> bool:
    return all(flat.is_whole for flat in unit.flats)
