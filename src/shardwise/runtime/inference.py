"""Forwards without gradients, each rank at its own pace: ranks may call anything, any number of times.

[Note: rounds] A unit that is not kept whole is gathered when a rank needs it, and a gather needs all ranks. So a rank
that needs a unit starts a round: every rank sends which unit it needs, or that it has finished, and all gather the unit
that the first such rank asked for. A rank that asked for another asks again. A rank that has finished takes part in
rounds until all have. No rank has to know what the others run, or how often.

The alternative, that all call the model equally often (`synced_gpus`), would need to know what the others run.

[Note: units that stream] Parameters that rest on the host or on a disk are not kept whole unless asked for: they are
there because they do not fit. Rounds are the same for all ranks, so all know which unit was gathered after the same two
units the last time, and prefetch it while they compute, also from the last unit of one token to the first of the next.
A unit that some rank is computing with must not be gathered underneath it, so each rank sends with its request which
units are whole there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from shardwise.comm import Group, World
from shardwise.errors import StateError
from shardwise.memory import Unit
from shardwise.runtime.foreign_reads import Reach
from shardwise.runtime.gathering import Gathering

FINISHED, FAILED = b"through", b"failed"


class Inference:
    """Replaces passes while every rank runs by itself."""

    def __init__(
        self, units: Sequence[Unit], gathering: Gathering, world: World, members: Group | None, keep_bytes: int | None
    ):
        """`members` are the ranks that have these units, if not all do: then units can be needed in `rounds` only."""
        self._units = list(units)
        self._numbers = {unit.name: number for number, unit in enumerate(units)}
        self._gathering = gathering
        self._collectives = world.collectives(torch.device("cpu"))
        self._members = members or world.everybody
        self._is_one_span = members is None
        self._last: tuple[int, int] = (-1, -1)
        """The units of the last two rounds."""
        self._after: dict[tuple[int, int], int] = {}
        """By the units of two consecutive rounds, the unit of the next."""
        self._prefetched: Unit | None = None
        self._kept = _kept(units, keep_bytes)
        self._reach: Reach | None = None
        self._has_rounds = False
        """Whether other members wait for this one in rounds, or it for them."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, kept units are whole, and others when they are needed; afterwards nothing is whole. All members
        enter."""
        failed = True
        try:
            with torch.no_grad():
                self._begin()
                with self.rounds() if self._is_one_span else nullcontext():
                    yield
            failed = False
        finally:
            if self._reach is not None:
                self._reach.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
                self._reach = None
            if failed:
                self._gathering.abandon()
            else:
                self._gathering.free_all()

    def _begin(self) -> None:
        """Gather the units that are kept."""
        for unit in self._units:
            if unit.name in self._kept:
                self._gathering.open(unit)
        if len(self._kept) < len(self._units):
            self._reach = Reach(self._units, self.need)
            self._reach.__enter__()  # type: ignore[no-untyped-call]  # torch's own

    @contextmanager
    def rounds(self) -> Iterator[None]:
        """Inside, this rank may need any unit. It leaves together with the other members, and takes part in their
        rounds until then."""
        self._has_rounds = len(self._kept) < len(self._units)
        try:
            yield
        except BaseException:
            if self._has_rounds:
                self._has_rounds = False
                self._exchange(FAILED)
            raise
        self.release_all()
        while self._has_rounds:
            with self._unwatched():
                self._round(None)

    def before_forward(self, unit: Unit) -> None:
        """`unit` computes next. Before rounds begin it may be the model in stages itself, whose call has yet to be
        agreed: what a stage reads of it is gathered then."""
        if self._has_rounds or self._reach is None:
            self.need(unit)

    def need(self, unit: Unit) -> None:
        """Return when `unit` is whole."""
        if torch.is_grad_enabled():
            raise StateError(
                "A module was called with gradients enabled inside engine.inference(), where none can be computed. "
                "Train outside of it."
            )
        wish = self._numbers[unit.name]
        while not _is_whole(unit):
            if not self._has_rounds:
                raise StateError(
                    f"Parameters of {unit.name} are used outside of a call of the model, and in a pipeline those that "
                    f"are not kept are whole only in such calls. Leave engine.inference() first, or give it more "
                    f"keep_bytes."
                )
            with self._unwatched():
                self._round(wish)

    def release(self, unit: Unit) -> None:
        """`unit` has computed."""
        if unit.name not in self._kept:
            unit.rest()
            for flat in unit.flats:
                flat.free_full()

    def release_all(self) -> None:
        """The model has returned: free what modules have reached for."""
        for unit in self._units:
            self.release(unit)

    def _unwatched(self) -> AbstractContextManager[None]:
        return nullcontext() if self._reach is None else self._reach.paused()

    def _exchange(self, message: bytes) -> list[bytes]:
        """Exchange `message` under one name, wherever each rank is, so that the watchdog sees the same call
        everywhere."""
        return self._collectives.exchange(message, self._members, "inference")

    def _round(self, wish: int | None) -> None:
        """One round. `wish` is the number of the unit that this rank needs, `None` if it has finished."""
        messages = self._exchange(FINISHED if wish is None else json.dumps([wish, *self._whole_here()]).encode())
        if FAILED in messages:
            self._has_rounds = False
            rank = self._members.ranks[messages.index(FAILED)]
            raise StateError(
                f"Rank {rank} left engine.inference() with an error, so its part of the parameters is no longer "
                f"available; its own report says why."
            )
        wishes: list[list[int]] = [json.loads(message) for message in messages if message != FINISHED]
        if not wishes:
            self._has_rounds = False
            return
        number = wishes[0][0]
        unit = self._units[number]
        was_whole = _is_whole(unit)
        if self._prefetched is not unit:
            self._cancel_prefetch()
            for flat in unit.flats:
                flat.free_full()  # another rank needs our part, so the unit is gathered again
        self._prefetched = None
        self._gathering.open(unit)
        if number != wish and not was_whole:
            self.release(unit)
        self._start_prefetch(number, {number, *(whole for _, *elsewhere in wishes for whole in elsewhere)})

    def _whole_here(self) -> list[int]:
        """The units of which something is whole and may be freed."""
        own = ((number, unit) for number, unit in enumerate(self._units) if unit.name not in self._kept)
        return [number for number, unit in own if any(flat.is_whole and not flat.spec.resident for flat in unit.flats)]

    def _start_prefetch(self, number: int, whole: set[int]) -> None:
        """Prefetch the unit that followed last time, if it streams and is not in `whole`."""
        self._after[self._last] = number
        self._last = self._last[1], number
        expected = self._after.get(self._last)
        if expected is None or expected in whole or not _streams(self._units[expected]):
            return
        self._prefetched = self._units[expected]
        self._gathering.begin(self._prefetched)

    def _cancel_prefetch(self) -> None:
        unit, self._prefetched = self._prefetched, None
        if unit is not None:
            self._gathering.free(unit)


def keeps_all(units: Sequence[Unit], keep_bytes: int | None) -> bool:
    """Whether all parameters stay whole; see `_kept`."""
    return len(_kept(units, keep_bytes)) == len(units)


def _bytes_to_keep(unit: Unit) -> int:
    return sum(flat.spec.full_bytes for flat in unit.flats if not flat.spec.resident)


def _kept(units: Sequence[Unit], keep_bytes: int | None) -> set[str]:
    """The units that stay whole: in the model's order, as many as fit into `keep_bytes`, and those that always are.
    With `None`, all that do not stream."""
    kept, left = set(), keep_bytes
    for unit in units:
        if keep_bytes is None and _streams(unit):
            continue
        needed = _bytes_to_keep(unit)
        if left is None or needed <= left:
            kept.add(unit.name)
            left = None if left is None else left - needed
    return kept


def _streams(unit: Unit) -> bool:
    """Whether some of its parameters rest on another tier than the device: see [Note: units that stream]."""
    return any(flat.spec.tier_of("param") != "device" for flat in unit.flats)


def _is_whole(unit: Unit) -> bool:
    return all(flat.is_whole for flat in unit.flats)
