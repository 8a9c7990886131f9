"""What a step takes at least: from what a micro-batch computes and holds between its moments, without a program. Pure.

[Note: least steps] A clock of all actions takes a second for a deep pipeline, and most plans are too slow or too large
by far. So before that, each stage's forward and backward is summed up as the clock prices them alone, and a schedule
takes at least as long as its busiest rank: until its first micro-batch has come through the stages before, all that it
computes, and until its last one has gone back through them. Messages that go on beside it, waits for them, and the
update come on top. Activations are held likewise: those of the micro-batches in flight, and the peak of one beside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.fit.candidates import Load
from shardwise.program import Mark
from shardwise.program.in_flight import held_beside
from shardwise.program.schedule import Schedule


@dataclass(frozen=True)
class Run:
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

    @property
    def seconds(self) -> float:
        return max(run.seconds for run in self.runs)

    def seconds_beside(self, communicating: float, contention: float) -> float:
        """With messages that take so long beside a run of a rank with no less than the average: while both go on, each
        takes `contention` times as long."""
        return max(run.seconds + (contention - 1) * max(0.0, communicating - run.hiding) for run in self.runs)


@dataclass(frozen=True)
class StagePass:
    """One micro-batch in one stage: seconds of its forward and of its backward, of which those for gradients of
    parameters may come later, and of the messages in both. Bytes of activations: at most meanwhile, and between the
    two; without those of stages before it."""

    forward: float
    backward: float
    weights: float
    messages: float
    forward_bytes: int
    backward_bytes: int
    held_bytes: int

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Alone:
    """What a rank computes before a moment, with nothing beside it: seconds, those of its messages, those of gradients
    of parameters, and of the copies to and from another tier that go on beside it."""

    seconds: float
    messages: float = 0.0
    weights: float = 0.0
    evicting: float = 0.0
    fetching: float = 0.0


def stage_passes(
    marks: Sequence[Mark], alone: Sequence[Alone], stage_of: Sequence[int], leaving: Sequence[float]
) -> list[StagePass]:
    """Of each stage, from the record of a whole model, which is in the stage `stage_of` at each mark. `leaving` are the
    seconds in which a backward of each stage puts gradients in their place."""
    num_stages = len(leaving)
    sums = [_Sums() for _ in leaving]
    ends = [0] * (num_stages + 1)
    for mark, one, stage in zip(marks, alone, stage_of, strict=True):
        is_forward = mark.moment.phase == "forward"
        if is_forward:
            ends[stage + 1] = mark.live_bytes
        if mark.moment.unit or num_stages == 1:
            sums[stage].add(mark, one, is_forward=is_forward)
    for stage in range(num_stages):  # a stage without marks of its own ends where the one before does
        ends[stage + 1] = ends[stage + 1] or ends[stage]
    return [
        StagePass(
            max(one.forward, one.evicting - one.longest_evict),
            max(one.backward + left, one.fetching - one.longest_fetch),
            one.weights,
            one.messages + max(0.0, one.evicting - one.longest_evict) + max(0.0, one.fetching - one.longest_fetch),
            max(0, one.forward_bytes - below),
            max(0, one.backward_bytes - below),
            max(0, end - below),
        )
        for one, left, below, end in zip(sums, leaving, ends, ends[1:], strict=False)
    ]


@dataclass
class _Sums:
    """Of one stage. Copies of activations wait for the one before, and all but one end within their pass."""

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0
    messages: float = 0.0
    evicting: float = 0.0
    fetching: float = 0.0
    longest_evict: float = 0.0
    longest_fetch: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0

    def add(self, mark: Mark, one: Alone, *, is_forward: bool) -> None:
        self.messages += one.messages
        if is_forward:
            self.forward += one.seconds
            self.evicting += one.evicting
            self.longest_evict = max(self.longest_evict, one.evicting)
            self.forward_bytes = max(self.forward_bytes, mark.peak_bytes)
        else:
            self.backward += one.seconds
            self.weights += one.weights
            self.fetching += one.fetching
            self.longest_fetch = max(self.longest_fetch, one.fetching)
            self.backward_bytes = max(self.backward_bytes, mark.peak_bytes)


def least_runs(
    schedule: Schedule, passes: Sequence[StagePass], shares: Sequence[float], num_micro_batches: int
) -> list[Run]:
    """Of each rank in a step with `num_micro_batches`, of which `schedule` has the first rounds. `shares` are those of
    the parameters, by rank, compared with the average."""
    num_later = [_weights_behind(row) for row in schedule.rows]
    found = []
    for rank, row in enumerate(schedule.rows):
        own = sorted({op.stage for op in row})
        before = passes[: own[0]]
        there = sum(one.forward for one in before)
        back = sum(one.backward - one.weights for one in before)
        if before:  # the first rank ends last, with what it has put off
            back += num_later[0] * passes[0].weights
        busy = num_micro_batches * sum(passes[stage].seconds for stage in own)
        later = num_later[rank] * passes[own[0]].weights
        seconds = there + max(busy, busy - later + back)
        messages = num_micro_batches * sum(passes[stage].messages for stage in own)
        found.append(Run(seconds, seconds - busy + messages if shares[rank] >= 1 else math.inf))
    return found


def _weights_behind(row: Sequence[tuple[str, int, int]]) -> int:
    """How many second halves of backwards follow the last first half."""
    return next((place for place, op in enumerate(reversed(row)) if op[0] != "W"), 0)


def least_loads(schedule: Schedule, passes: Sequence[StagePass], shares: Sequence[float]) -> tuple[Load, ...]:
    """Of the first rank, which has most micro-batches in flight, and of the last, which has the loss. `shares` are
    those of the parameters, by rank."""
    held = {stage: one.held_bytes for stage, one in enumerate(passes)}
    found = []
    for rank in dict.fromkeys((0, schedule.num_ranks - 1)):
        beside = held_beside(schedule, rank, held, held)
        peaks: Mapping[str, Callable[[StagePass], int]] = {
            "F": lambda one: one.forward_bytes,
            "B": lambda one: one.backward_bytes,
            "I": lambda one: one.held_bytes,
            "W": lambda one: one.held_bytes,
        }
        most = max(others + peaks[kind](passes[stage]) for (kind, stage), others in beside.items())
        found.append(Load(shares[rank], most))
    return tuple(found)
