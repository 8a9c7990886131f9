"""Forwards without gradients, each rank at its own pace: ranks may call anything, any number of times.

[Note: rounds] A unit that is not kept whole is gathered when a rank needs it, and a gather needs all ranks. So a rank
that needs a unit starts a round: every rank sends which unit it needs, or that it has finished, and all gather the unit
that the first such rank asked for. A rank that asked for another asks again. A rank that has finished takes part in
rounds until all have. No rank has to know what the others run, or how often.

The alternative, that all call the model equally often (`synced_gpus`), would need to know what the others run.

[Note: runs] A round for each unit would be a message for each unit. So a round agrees on a *run*: the unit that the
first rank asked for, and those that followed it the last time, to the end of the call of the model
(`gather_order.py`). All ranks have the same past, so it need not be sent. Every rank gathers the whole run in its
order, whatever it computes: units that it does not need are freed at once, and before it leaves, also with an error, it
gathers the rest. So the next unit can be prefetched while one computes, and a token takes one message. The last unit of
a run is the first of the next call, and before it computes, ranks agree on the next run. With each round they send what
they had no use for; what nobody used is not in the next run.

A rank that computes with a unit which is due again, because others have asked for it, does not prefetch it, but gathers
it when it next needs another.

[Note: units that stream] Parameters that rest on the host or on a disk are not kept whole unless asked for: they are
there because they do not fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from shardwise.comm import Group, World
from shardwise.errors import StateError
from shardwise.memory import READY, Unit
from shardwise.runtime.executor import BoundBlock
from shardwise.runtime.foreign_reads import Reach
from shardwise.runtime.gather_order import GatherOrder
from shardwise.runtime.gathering import Gathering
from shardwise.system.own_hooks import hook_around

FAILED = b"failed"
_NUM_WATCHED_CALLS = 2
"""After as many calls of the model in which nothing was read past modules, calls are no longer watched: a prompt, and a
token after it."""


class Inference:
    """Replaces passes while every rank runs by itself."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        gathering: Gathering,
        world: World,
        members: Group | None,
        keep_bytes: int | None,
    ) -> None:
        """`members` are the ranks that have these units, if not all do: then units can be needed in `rounds` only."""
        self._model = model
        self._units = list(units)
        self._numbers = {unit.name: number for number, unit in enumerate(units)}
        self._gathering = gathering
        self._collectives = world.collectives(torch.device("cpu"))
        self._members = members or world.everybody
        self._is_one_span = members is None
        self._kept = _kept(units, keep_bytes)
        self._keeps_all = len(self._kept) == len(self._units)
        self._idle: Unit | None = None
        """The unit that has computed last, while it is still whole: freed when another is gathered, or has computed.
        Often it is needed next: a tied head is the first unit of the next token."""
        self._has_rounds = False
        """Whether other members wait for this one in rounds, or it for them."""

        self._beginnings: dict[int, BoundBlock] = {}
        """What starts to gather a unit, by its number: to bind it anew takes longer than to run it."""
        self._order = GatherOrder(len(units), goes_on=self._is_one_span)
        self._run: list[int] = []
        """What was agreed on in the last round."""
        self._is_known = False
        """Whether it was known what follows its first unit."""
        self._num_gathered = 0
        """How many units of the run this rank has gathered."""
        self._unused: list[int] = []
        """The places in the run of units that this rank did not need."""
        self._returned_at: int | None = None
        """How many of the run it had gathered when a call of the model returned."""

        self._depth = 0
        """Calls of the model that are running, one in another."""
        self._reach: Reach | None = None
        """What watches the operations of the running call."""
        self._has_reached = False
        self._num_quiet_calls = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, kept units are whole, and others when they are needed; afterwards nothing is whole. All members
        enter."""
        failed = True
        try:
            with torch.no_grad(), self._calls_noted(), self._pages_kept():
                for unit in self._units:
                    if unit.name in self._kept:
                        self._gathering.open(unit)
                with self.rounds() if self._is_one_span else nullcontext():
                    yield
            failed = False
        finally:
            if failed:
                self._gathering.abandon()
            else:
                self._gathering.free_all()

    @contextmanager
    def _pages_kept(self) -> Iterator[None]:
        """A context in which memory that ranks share stays mapped: nothing is copied from there."""
        flats = [flat for unit in self._units if unit.name not in self._kept for flat in unit.flats]
        for flat in flats:
            flat.keep_pages(kept=True)
        try:
            yield
        finally:
            for flat in flats:
                flat.keep_pages(kept=False)

    @contextmanager
    def rounds(self) -> Iterator[None]:
        """Inside, this rank may need any unit. It leaves together with the other members, and takes part in their
        rounds until then."""
        self._has_rounds = not self._keeps_all
        try:
            yield
        except BaseException:
            if self._has_rounds:
                with self._unwatched():
                    while self._is_due():
                        self._gather_next(None)
                self._has_rounds = False
                self._exchange(FAILED)
            raise
        self._note_return()
        while self._has_rounds:
            with self._unwatched():
                self._round(None)
        self._free_idle()

    # -- events -----------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit) -> None:
        """`unit` computes next. Before rounds begin it may be the model in stages itself, whose call has yet to be
        agreed: what a stage reads of it is gathered then."""
        if self._has_rounds or self._keeps_all:
            self.need(unit)

    def need(self, unit: Unit) -> None:
        """Return when `unit` is whole."""
        if torch.is_grad_enabled():
            raise StateError(
                "A module was called with gradients enabled inside engine.inference(), where none can be computed. "
                "Train outside of it."
            )
        if unit.name in self._kept:
            return
        while not _is_whole(unit):
            if not self._has_rounds:
                raise StateError(
                    f"Parameters of {unit.name} are used outside of a call of the model, and in a pipeline those that "
                    f"are not kept are whole only in such calls. Leave engine.inference() first, or give it more "
                    f"keep_bytes."
                )
            with self._unwatched():
                self._round(self._numbers[unit.name])
        if self._idle is unit:
            self._idle = None
        unit.wake()

    def release(self, unit: Unit) -> None:
        """`unit` has computed."""
        if unit.name not in self._kept:
            self._free_idle()
            unit.rest()
            self._idle = unit

    @contextmanager
    def _calls_noted(self) -> Iterator[None]:
        """A context in which calls of the model are noted, and the first ones watched."""
        wholes = () if self._keeps_all else _wholes(self._model, self._units)
        handles = hook_around(wholes, self._enter_call, self._leave_call, first=True)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter_call(self, *_: object) -> None:
        self._depth += 1
        if self._depth == 1 and self._num_quiet_calls < _NUM_WATCHED_CALLS:
            self._has_reached = False
            self._reach = Reach(self._units, self._reached)
            self._reach.__enter__()  # type: ignore[no-untyped-call]  # torch's own

    def _leave_call(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._reach is not None:
            self._reach.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
            self._reach = None
            self._num_quiet_calls = 0 if self._has_reached else self._num_quiet_calls + 1
        self._note_return()

    def _note_return(self) -> None:
        """Free what modules have reached for."""
        for unit in self._units:
            if unit is not self._idle and unit.name not in self._kept:
                _free(unit)
        if self._returned_at is None:
            self._returned_at = self._num_gathered

    def _reached(self, unit: Unit) -> None:
        self._has_reached = True
        self.need(unit)

    def _unwatched(self) -> AbstractContextManager[None]:
        return nullcontext() if self._reach is None else self._reach.paused()

    # -- rounds -----------------------------------------------------------------------------------------

    def _exchange(self, message: bytes) -> list[bytes]:
        """Exchange `message` under one name, wherever each rank is, so that the watchdog sees the same call
        everywhere."""
        return self._collectives.exchange(message, self._members, "inference")

    def _round(self, wish: int | None) -> None:
        """Gather the next unit of the run; of a new one, if it has ended. `wish` is the number of the unit that this
        rank needs, `None` if it has finished."""
        if not self._is_due():
            self._agree(wish)
        if self._is_due():
            self._gather_next(wish)

    def _is_due(self) -> bool:
        """Whether other members wait for this one in a run, or will."""
        return self._num_gathered < len(self._run)

    def _agree(self, wish: int | None) -> None:
        """Agree on a new run. Afterwards there is one, or all have finished. With `~wish`, this rank has the unit and
        will need those that follow it."""
        messages = self._exchange(json.dumps([wish, self._returned_at, self._unused]).encode())
        if FAILED in messages:
            self._has_rounds = False
            rank = self._members.ranks[messages.index(FAILED)]
            raise StateError(
                f"Rank {rank} left engine.inference() with an error, so its part of the parameters is no longer "
                f"available; its own report says why."
            )
        wishes, returns, unused = zip(*map(json.loads, messages), strict=True)
        returned_at = next((one for one in returns if one is not None), None)
        self._order.note(self._run, set.intersection(*map(set, unused)), returned_at)
        first = next((one for one in wishes if one is not None), None)
        self._has_rounds = first is not None
        following = [] if first is None else self._order.after(max(first, ~first))
        self._is_known = bool(following)
        self._run = following if first is None or first < 0 else [first, *following]
        self._num_gathered, self._unused, self._returned_at = 0, [], None

    def _gather_next(self, wish: int | None) -> None:
        place = self._num_gathered
        unit = self._units[self._run[place]]
        self._num_gathered += 1
        is_used = unit is not self._idle and any(flat.state is READY for flat in unit.flats)
        try:
            self._free_idle()
            for flat in unit.flats:
                flat.free_full()  # other ranks need our part, so a whole unit is gathered again
            self._gathering.open(unit)
            if wish is None or self._run[place] != wish:
                self._unused.append(place)
                if not is_used:
                    _free(unit)
            elif self._is_one_span and self._is_known and not self._is_due():
                self._agree(~wish)  # now, so that the next unit comes while this one computes
            self._prefetch()
        except BaseException:
            self._run = []  # the members raise at this place, too, or nothing can be gathered any more
            raise

    def _prefetch(self) -> None:
        """Start to gather the next unit of the run, unless it is whole here."""
        if not self._is_due():
            return
        number = self._run[self._num_gathered]
        unit = self._units[number]
        if any(flat.state is READY for flat in unit.flats):
            return
        if number not in self._beginnings:
            self._beginnings[number] = self._gathering.beginning(unit)
        self._beginnings[number].run()

    def _free_idle(self) -> None:
        unit, self._idle = self._idle, None
        if unit is not None:
            _free(unit)


def _free(unit: Unit) -> None:
    """Free what is whole of `unit`; what is on its way, or always whole, stays."""
    unit.rest()
    for flat in unit.flats:
        flat.free_full()


def keeps_all(units: Sequence[Unit], keep_bytes: int | None) -> bool:
    """Whether all parameters stay whole; see `_kept`."""
    return len(_kept(units, keep_bytes)) == len(units)


def bytes_inside(units: Sequence[Unit], keep_bytes: int | None) -> int:
    """Bytes of gathered parameters that a rank holds at most while one unit computes, another around it, and the next
    one comes."""
    kept = _kept(units, keep_bytes)
    others = sorted(_bytes_to_keep(unit) for unit in units if unit.name not in kept)
    return sum(_bytes_to_keep(unit) for unit in units if unit.name in kept) + sum(others[-3:])


def _bytes_to_keep(unit: Unit) -> int:
    return sum(flat.spec.full_bytes for flat in unit.flats if not flat.spec.resident)


def _kept(units: Sequence[Unit], keep_bytes: int | None) -> set[str]:
    """The units that stay whole: in the model's order, as many as fit into `keep_bytes`, and those that always are.
    With `None`, all that do not stream."""
    kept, left = set(), keep_bytes
    for unit in units:
        if keep_bytes is None and _streams(unit):
            continue
        needed = sum(flat.spec.evenly(flat.spec.full_bytes) for flat in unit.flats if not flat.spec.resident)
        if left is None or needed <= left:
            kept.add(unit.name)
            left = None if left is None else left - needed
    return kept


def _streams(unit: Unit) -> bool:
    """Whether some of its parameters rest on another tier than the device: see [Note: units that stream]."""
    return any(flat.spec.tier_of("param") != "device" for flat in unit.flats)


def _is_whole(unit: Unit) -> bool:
    return all(flat.is_whole for flat in unit.flats)


def _wholes(model: nn.Module, units: Sequence[Unit]) -> list[nn.Module]:
    """`model`, and the modules in it that have all units: peft's `generate` calls the model that it wraps."""
    sites = {site for unit in units for site in unit.sites}
    found: list[nn.Module] = []
    inner: nn.Module | None = model
    while inner is not None:
        found.append(inner)
        inner = next((child for child in inner.children() if sites.issubset(child.modules())), None)
    return found
