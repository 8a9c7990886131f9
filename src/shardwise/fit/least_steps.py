"""What a step takes at least: from what a micro-batch computes and holds between its moments, without a program. Pure.

[Note: least steps] A clock of all actions takes a second for a deep pipeline, and most plans are too slow or too large
by far. So before that, each stage's forward and backward is summed up as the clock prices them alone, and a schedule
takes at least as long as its busiest rank: until its first micro-batch has come through the stages before, all that it
computes, and until its last one has gone back through them. Messages that go on beside it, waits for them, and the
update come on top. Activations are held likewise: those of the micro-batches in flight, and the peak of one beside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import ge, mul
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.fit.candidates import Load
from shardwise.program import Mark, Moment
from shardwise.program.schedule import SCHEDULES, Op, OpKind

Numbers = npt.NDArray[Any]


class Run(NamedTuple):
    """A rank's step at least: seconds, during `hiding` of which messages may go on that slow no computation down.
    Where that is infinite, nothing is known of its messages."""

    seconds: float
    hiding: float = math.inf


@dataclass(frozen=True)
class Least:
    """What a step takes at least on some ranks, and what some hold, as far as that is known."""

    runs: tuple[Run, ...]
    loads: tuple[Load, ...] = ()
    is_own: bool = True
    """Whether it is from what was counted of a candidate itself, and not of one that does less."""

    @classmethod
    def of_all(cls, known: Sequence[Least]) -> Least:
        """Where several are known of one step."""
        runs = tuple(run for one in known for run in one.runs)
        return cls(runs, tuple(load for one in known for load in one.loads), any(one.is_own for one in known))

    @property
    def seconds(self) -> float:
        return max(run.seconds for run in self.runs)

    def seconds_beside(self, communicating: float, contention: float) -> float:
        """With messages that take so long beside a run of a rank with no less than the average: while both go on, each
        takes `contention` times as long."""
        return max(run.seconds + (contention - 1) * max(0.0, communicating - run.hiding) for run in self.runs)


class StagePass(NamedTuple):
    """One micro-batch in one stage: seconds of its forward and of its backward, of which those for gradients of
    parameters may come later, and of the messages in both. Bytes of activations: at most meanwhile, between the two,
    and those from which such gradients are computed, which are kept until then; without those of stages before it."""

    forward: float
    backward: float
    weights: float
    messages: float
    forward_bytes: int
    backward_bytes: int
    held_bytes: int
    factors_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def holding(self, *num_bytes: float) -> StagePass:
        """The same with other activations, in the order of `bytes`."""
        return StagePass(*self[:4], *[int(one) if one > 0 else 0 for one in num_bytes])

    @property
    def bytes(self) -> tuple[int, int, int, int]:
        return self.forward_bytes, self.backward_bytes, self.held_bytes, self.factors_bytes


@dataclass(frozen=True)
class Alone:
    """What a rank computes before a moment, with nothing beside it: seconds, those of its messages, those of gradients
    of parameters, and of the copies to and from another tier that go on beside it."""

    seconds: float
    messages: float = 0.0
    weights: float = 0.0
    evicting: float = 0.0
    fetching: float = 0.0


@dataclass(frozen=True)
class Record:
    """What a whole model computes and holds in one micro-batch, by mark: the numbers of `Alone`, bytes at most
    meanwhile and then, and those from which gradients of parameters are computed."""

    moments: tuple[Moment, ...]
    is_forward: Numbers
    is_of_unit: Numbers
    alone: Mapping[str, Numbers]
    peak: Numbers
    live: Numbers
    factors: Numbers

    @classmethod
    def of(cls, marks: Sequence[Mark], factors: Sequence[int]) -> Record:
        """Before anything is priced. `factors` has the last of them by mark."""
        return cls(
            tuple(mark.moment for mark in marks),
            np.array([mark.moment.phase == "forward" for mark in marks]),
            np.array([mark.moment.unit != "" for mark in marks]),
            {},
            np.array([mark.peak_bytes for mark in marks]),
            np.array([mark.live_bytes for mark in marks]),
            np.array(factors),
        )

    def priced(self, alone: Sequence[Alone], places: Numbers) -> Record:
        """With what is computed before each mark: of `alone`, which has what equal blocks do once, the one at its
        place."""
        numbers = {one.name: np.array([getattr(of_mark, one.name) for of_mark in alone]) for one in fields(Alone)}
        return replace(self, alone={name: of_all[places] for name, of_all in numbers.items()})

    def passes(self, stage_of: Numbers, leaving: Sequence[float]) -> list[StagePass]:
        """Of each stage, where the model is in the stage `stage_of` at each mark. `leaving` are the seconds in which a
        backward of each stage puts gradients in their place. Copies of activations wait for the one before, and all but
        one end within their pass."""
        num_stages = len(leaving)
        counts = np.ones_like(self.is_of_unit) if num_stages == 1 else self.is_of_unit
        in_forward, in_backward = counts & self.is_forward, counts & ~self.is_forward

        def total(what: str, where: Numbers) -> Numbers:
            return np.bincount(stage_of[where], self.alone[what][where], num_stages)

        def most(numbers: Numbers, where: Numbers) -> Numbers:
            found = np.zeros(num_stages, numbers.dtype)
            np.maximum.at(found, stage_of[where], numbers[where])
            return found

        evicting = total("evicting", in_forward) - most(self.alone["evicting"], in_forward)
        fetching = total("fetching", in_backward) - most(self.alone["fetching"], in_backward)
        ends = np.zeros(num_stages + 1, self.live.dtype)
        ends[stage_of[self.is_forward] + 1] = self.live[self.is_forward]  # those of a stage's last one
        for stage in range(num_stages):  # a stage without marks of its own ends where the one before does
            ends[stage + 1] = ends[stage + 1] or ends[stage]
        columns = (
            np.maximum(total("seconds", in_forward), evicting),
            np.maximum(total("seconds", in_backward) + np.array(leaving), fetching),
            total("weights", in_backward),
            total("messages", counts) + np.maximum(0.0, evicting) + np.maximum(0.0, fetching),
            np.maximum(0, most(self.peak, in_forward) - ends[:-1]),
            np.maximum(0, most(self.peak, in_backward) - ends[:-1]),
            np.maximum(0, ends[1:] - ends[:-1]),
            np.bincount(stage_of[in_backward], self.factors[in_backward], num_stages).astype(self.live.dtype),
        )
        return [StagePass(*of_stage) for of_stage in zip(*(one.tolist() for one in columns), strict=True)]


@dataclass(frozen=True)
class Order:
    """What bounds need to know of a schedule, which is long: by rank its stages, how many second halves of backwards
    follow the last first half, and how many other micro-batches each of its stages holds at most during an op, and has
    put aside."""

    stages: tuple[tuple[int, ...], ...]
    num_later: tuple[int, ...]
    beside: tuple[Mapping[tuple[OpKind, int], frozenset[tuple[int, ...]]], ...]
    """By kind of op and stage: numbers by stage, in their order, that occur together."""

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, name: str, num_ranks: int, num_micro_batches: int, num_chunks: int) -> Order:
        schedule = SCHEDULES[name].make(num_ranks, num_micro_batches, num_chunks)
        stages = tuple(tuple(range(rank, schedule.num_stages, num_ranks)) for rank in range(num_ranks))
        beside = tuple(map(_held_beside, schedule.rows, stages))
        return cls(stages, tuple(map(_weights_behind, schedule.rows)), beside)

    def runs(self, passes: Sequence[StagePass], shares: Sequence[float], num_micro_batches: int) -> list[Run]:
        """Of each rank in a step with `num_micro_batches`, of which the schedule has the first rounds. `shares` are
        those of the parameters, by rank, compared with the average."""
        there = back = 0.0
        found = []
        for own, num_later, share in zip(self.stages, self.num_later, shares, strict=True):
            first = passes[own[0]]
            behind = self.num_later[0] * passes[0].weights if own[0] else 0.0  # the first rank ends last, with those
            busy = num_micro_batches * sum(passes[stage].seconds for stage in own)
            seconds = there + max(busy, busy - num_later * first.weights + back + behind)
            messages = num_micro_batches * sum(passes[stage].messages for stage in own)
            found.append(Run(seconds, seconds - busy + messages if share >= 1 else math.inf))
            there += first.forward
            back += first.backward - first.weights
        return found

    def loads(
        self, passes: Sequence[StagePass], shares: Sequence[float], messages: Sequence[int] = ()
    ) -> tuple[Load, ...]:
        """Of each rank, but for those with less than another: the first one has most micro-batches in flight, the last
        one the loss, and any may have more layers than others. `messages` are bytes in transit, by rank."""
        found: dict[float, int] = {}
        messages = messages or [0] * len(shares)
        for own, beside, share, sent in zip(self.stages, self.beside, shares, messages, strict=True):
            held = [passes[stage].held_bytes for stage in own] + [passes[stage].factors_bytes for stage in own]
            most = max(
                _PEAKS[kind](passes[stage]) + max(sum(map(mul, numbers, held)) for numbers in every)
                for (kind, stage), every in beside.items()
            )
            found[share] = max(found.get(share, 0), most + sent)
        return tuple(Load(share, most) for share, most in found.items())


_PEAKS: Mapping[OpKind, Callable[[StagePass], int]] = {
    "F": lambda one: one.forward_bytes,
    "B": lambda one: one.backward_bytes,
    "I": lambda one: max(one.held_bytes, one.factors_bytes),
    "W": lambda one: one.factors_bytes,
}


def _held_beside(row: Sequence[Op], stages: Sequence[int]) -> dict[tuple[OpKind, int], frozenset[tuple[int, ...]]]:
    """As `held_beside` in `program/in_flight.py`, in micro-batches: by stage those whose backward has not begun, and
    then those of which a first half has put something aside."""
    numbers, places = [0] * 2 * len(stages), {stage: place for place, stage in enumerate(stages)}
    begun: dict[tuple[int, int], int] = {}
    found: dict[tuple[OpKind, int], set[tuple[int, ...]]] = {}
    for kind, batch, stage in row:
        if (stage, batch) in begun:
            numbers[begun.pop((stage, batch))] -= 1
        found.setdefault((kind, stage), set()).add(tuple(numbers))
        if kind in "FI":
            place = begun[stage, batch] = places[stage] + (len(stages) if kind == "I" else 0)
            numbers[place] += 1
    return {key: frozenset(_most(every)) for key, every in found.items()}


def _most(every: Collection[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those of which no other has at least as many everywhere."""
    return [one for one in every if not any(other != one and all(map(ge, other, one)) for other in every)]


def _weights_behind(row: Sequence[tuple[str, int, int]]) -> int:
    """How many second halves of backwards follow the last first half."""
    return next((place for place, op in enumerate(reversed(row)) if op[0] != "W"), 0)
