"""What a step would take without its slow ranks, links and uneven stages: measured durations, replayed. Pure.

[Note: what a straggler costs] The steps of a window are replayed with the durations that each rank has measured
(`fit/replay.py`), and again with all durations of one rank replaced by the median of its peers. The difference is what
the rank costs. Its peers are all other ranks for what they read and do between steps, and those at the same place along
`pp` for the rest. Each lap is replayed by itself: two ranks that are slow in turns cost something each, though their
means are equal. Two that are equally slow at the same time cost nothing each and something together, so that is said
too.

A rank is named only if it is slow again and again: its own time exceeds that of its peers by more than chance would,
with Student's t over the laps (Student, Biometrika 6, 1908). One long step among fifty is none.

Ranks along one axis wait for a slow link as for each other, but on all of them: the slow link is in the group whose
least waiting rank waits longer than those of other groups along the axis. A pipeline whose stages take different times
has uneven stages, and no straggler.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.errors import ranks_in_words
from shardwise.fit.replay import Replay, Seconds
from shardwise.plan.mesh import STAGE_AXIS
from shardwise.program.places import SPANS
from shardwise.system.telemetry import BETWEEN, DISK, LOADER, Lap
from shardwise.system.units import format_seconds

LEAST_SHARE = 0.02
"""Of a step: what costs less is not named."""
LEAST_STEPS, LEAST_LAPS = 20, 5
"""From how many steps, and messages about them, something is named."""
LEAST_T = 5.0
"""Student's t from which a difference is not chance. With 20 laps 4 in 100,000 equal ranks have it: every window of a
long run compares all of them, so that 3.0 (4 in 1000) would name one every few hours."""
MOST_ALONE = 8
"""How many ranks, those that are latest, are replayed one by one."""
NUM_SKIPPED = 3
"""The first steps record and compile."""
_OF_ALL_STAGES = (LOADER, BETWEEN)
"""Places in which ranks of different stages do the same."""
_COMPUTED = tuple(dict.fromkeys(SPANS.values()))


@dataclass(frozen=True)
class Straggler:
    """What a step takes longer because of some `ranks`: `seconds` of each, and its `share` of the step.

    `kind` is `ranks`, `link` (what collectives along the axis `place` take on these ranks) or `stages` (of a pipeline;
    `ranks` are those that compute longest, and `place` is theirs along `pp`). `often` is the share of laps in which it
    was so.
    """

    kind: str
    ranks: tuple[int, ...]
    place: str
    seconds: float
    share: float
    often: float

    def __str__(self) -> str:
        """Such as `rank 5 costs 210 ms of a step (18%), in its loader`."""
        what = f"{format_seconds(self.seconds)} of a step ({self.share:.0%})"
        if self.kind == "link":
            return f"messages along {self.place} of {_named(self.ranks)} cost {what} more than those of other ranks"
        if self.kind == "stages":
            own = "" if len(self.ranks) > 1 else ", unless its only rank is slow"
            return f"uneven stages cost {what}: {self.place} ({_named(self.ranks)}) computes longest{own}"
        costs = (
            f"{_named(self.ranks)} costs {what}"
            if len(self.ranks) == 1
            else f"{_named(self.ranks)} cost {what} together"
        )
        where = self.place if self.place == DISK else f"in {self.place}"
        return f"{costs}, {where}" + (f", in {self.often:.0%} of steps" if self.often < 0.9 else "")

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ranks": list(self.ranks), "words": str(self)}


def _named(ranks: Sequence[int]) -> str:
    is_row = len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1  # the usual case: a stage, or a line
    return f"ranks {ranks[0]} to {ranks[-1]}" if is_row else ranks_in_words(ranks)


@dataclass(frozen=True)
class LapOfRanks:
    """How all ranks spent the same `num_steps`. `weights` are those of their samples: a rank with more of them may
    compute longer in proportion."""

    laps: Sequence[Lap]
    num_steps: int
    weights: Sequence[float]


def stragglers(window: Sequence[LapOfRanks], replay: Replay) -> list[Straggler]:
    """What the window shows, the most expensive first. See [Note: what a straggler costs]."""
    num_steps = sum(lap.num_steps for lap in window)
    if num_steps < LEAST_STEPS or len(window) < LEAST_LAPS or len(window[0].laps) < 2:
        return []
    return sorted(_Window(window, replay).found(), key=lambda one: -one.seconds)


class _Window:
    """Durations of a window as arrays `[laps, ranks]`, in seconds of a step."""

    def __init__(self, window: Sequence[LapOfRanks], replay: Replay) -> None:
        self._replay, self._mesh = replay, replay.mesh
        self._steps = np.array([lap.num_steps for lap in window], dtype=np.float64)
        steps = self._steps[:, None]
        by_place = [[one.by_place for one in lap.laps] for lap in window]
        waited = [[one.waited for one in lap.laps] for lap in window]
        places = sorted({place for row in by_place for one in row for place in one})
        weights = np.array([[weight or 1.0 for weight in lap.weights] for lap in window])
        self._work = {place: _column(by_place, place) / steps for place in places}
        self._even = {
            place: seconds / weights if place.partition(" ")[0] in _COMPUTED else seconds
            for place, seconds in self._work.items()
        }
        """Durations as they would be with equal numbers of samples: by these ranks are compared."""
        self._weights = weights
        axes = [axis for axis in self._mesh.axes if self._mesh.size(axis) > 1 and axis != STAGE_AXIS]
        self._links = {axis: self._least_of_groups(axis, _column(waited, axis) / steps) for axis in axes}
        taken = sum(max(one.seconds for one in lap.laps) for lap in window)
        self._step_seconds = taken / float(self._steps.sum())
        self._peers = self._medians_of_peers()

    def found(self) -> Iterator[Straggler]:
        yield from self._slow_ranks()
        yield from self._slow_links()
        if self._replay.has_stages:
            yield from self._uneven_stages()

    # -- ranks ------------------------------------------------------------------------------------------

    def _slow_ranks(self) -> Iterator[Straggler]:
        excess = {place: self._even[place] - peers for place, peers in self._peers.items()}
        total = np.sum(list(excess.values()), axis=0)
        by_rank = total.mean(axis=0)
        late = [
            int(rank)
            for rank in np.argsort(-by_rank)
            if by_rank[rank] >= LEAST_SHARE * self._step_seconds and _is_no_chance(total[:, rank])
        ]
        alone = [(rank, self._gain(self._without([rank]), self._links)) for rank in late[:MOST_ALONE]]
        named = [(rank, gain) for rank, gain in alone if self._is_much(gain)]
        for rank, gain in named:
            yield self._of_ranks([rank], gain, excess)
        if len(late) > 1:
            together = self._gain(self._without(late), self._links)
            if self._is_much(together - sum(gain for _, gain in named)):
                yield self._of_ranks(sorted(late), together, excess)

    def _of_ranks(self, ranks: list[int], gain: float, excess: Mapping[str, Seconds]) -> Straggler:
        place = max(excess, key=lambda one: float(excess[one][:, ranks].sum()))
        late = np.sum([excess[one][:, ranks].sum(axis=1) for one in excess], axis=0)
        often = float((late > LEAST_SHARE * self._step_seconds).mean())
        return Straggler("ranks", tuple(ranks), place, gain, gain / self._step_seconds, often)

    def _without(self, ranks: list[int]) -> dict[str, Seconds]:
        """All durations, those of `ranks` replaced by the median of their peers."""
        work = {}
        for place, seconds in self._work.items():
            work[place] = seconds.copy()
            usual = self._peers[place][:, ranks]
            is_computed = place.partition(" ")[0] in _COMPUTED
            work[place][:, ranks] = usual * self._weights[:, ranks] if is_computed else usual
        return work

    def _medians_of_peers(self) -> dict[str, Seconds]:
        """By place, for each rank the median of its peers; its own without any."""
        found = {place: seconds.copy() for place, seconds in self._even.items()}
        for place, seconds in self._even.items():
            everybody = [list(range(self._mesh.world_size))]
            for group in everybody if place in _OF_ALL_STAGES else self._stages():
                if len(group) > 1:
                    found[place][:, group] = _medians_of_others(seconds[:, group])
        return found

    # -- links ------------------------------------------------------------------------------------------

    def _slow_links(self) -> Iterator[Straggler]:
        for axis, waited in self._links.items():
            groups = self._groups(axis)
            if len(groups) < 2:
                continue
            of_groups = np.stack([waited[:, group[0]] for group in groups], axis=1)
            medians = _medians_of_others(of_groups)
            for place, group in enumerate(groups):
                usual = medians[:, place]
                excess = of_groups[:, place] - usual
                if excess.mean() < LEAST_SHARE * self._step_seconds or not _is_no_chance(excess):
                    continue
                repaired = waited.copy()
                repaired[:, group] = usual[:, None]
                gain = self._gain(self._work, {**self._links, axis: repaired})
                if self._is_much(gain):
                    often = float((excess > LEAST_SHARE * self._step_seconds).mean())
                    yield Straggler("link", tuple(group), axis, gain, gain / self._step_seconds, often)

    def _least_of_groups(self, axis: str, waited: Seconds) -> Seconds:
        """For each rank, what that rank of its group along `axis` waits which waits least."""
        found = waited.copy()
        for group in self._groups(axis):
            found[:, group] = waited[:, group].min(axis=1, keepdims=True)
        return found

    def _groups(self, axis: str) -> list[list[int]]:
        """The ranks of each line along `axis`."""
        ranks = np.arange(self._mesh.world_size).reshape(self._mesh.sizes)
        lines = np.moveaxis(ranks, self._mesh.axes.index(axis), -1)
        return [list(map(int, line)) for line in lines.reshape(-1, self._mesh.size(axis))]

    # -- stages -----------------------------------------------------------------------------------------

    def _uneven_stages(self) -> Iterator[Straggler]:
        """Computation at each place along `pp` as its quickest rank has it, against the mean of all."""
        stages = self._stages()
        computed = [place for place in self._even if place.partition(" ")[0] in _COMPUTED]
        if not computed:
            return
        total = np.sum([self._even[place] for place in computed], axis=0)
        typical = np.stack([total[:, stage].min(axis=1) for stage in stages], axis=1)
        mean = typical.mean(axis=1, keepdims=True)
        slowest = int(typical.mean(axis=0).argmax())
        if not _is_no_chance((typical - mean)[:, slowest]):
            return
        work = dict(self._work)
        factors = mean / np.maximum(typical, 1e-12)
        for place in computed:
            work[place] = self._work[place].copy()
            for stage, ranks in enumerate(stages):
                work[place][:, ranks] *= factors[:, stage : stage + 1]
        gain = self._gain(work, self._links)
        if self._is_much(gain):
            often = float((typical.argmax(axis=1) == slowest).mean())
            yield Straggler(
                "stages", tuple(stages[slowest]), f"{STAGE_AXIS} {slowest}", gain, gain / self._step_seconds, often
            )

    def _stages(self) -> list[list[int]]:
        """The ranks at each place along `pp`; all ranks without a pipeline."""
        ranks = np.arange(self._mesh.world_size).reshape(self._mesh.sizes)
        if not self._replay.has_stages:
            return [list(map(int, ranks.reshape(-1)))]
        return [list(map(int, one.reshape(-1))) for one in np.moveaxis(ranks, self._mesh.axes.index(STAGE_AXIS), 0)]

    # -- replays ----------------------------------------------------------------------------------------

    @cached_property
    def _measured(self) -> Seconds:
        """The steps as they were; a window without late ranks does not ask for it."""
        return self._replay.seconds(self._work, self._links)

    def _gain(self, work: Mapping[str, Seconds], links: Mapping[str, Seconds]) -> float:
        """Seconds of a step that are won, the mean of all steps."""
        won = (self._measured - self._replay.seconds(work, links)) * self._steps
        return float(won.sum() / self._steps.sum())

    def _is_much(self, seconds: float) -> bool:
        return seconds >= LEAST_SHARE * self._step_seconds


def _column(rows: Sequence[Sequence[Mapping[str, float]]], name: str) -> Seconds:
    return np.array([[one.get(name, 0.0) for one in row] for row in rows], dtype=np.float64)


def _medians_of_others(values: Seconds) -> Seconds:
    """For each column of `[laps, ranks]` the median of the other ones."""
    num_others = values.shape[1] - 1
    order = values.argsort(axis=1)
    place = order.argsort(axis=1)  # of each rank among all
    ordered = np.take_along_axis(values, order, axis=1)
    low, high = (num_others - 1) // 2, num_others // 2  # of the others; those behind the rank itself are one further
    pair = [np.take_along_axis(ordered, np.where(place > at, at, at + 1), axis=1) for at in (low, high)]
    return np.asarray((pair[0] + pair[1]) / 2)


def _is_no_chance(excess: Seconds) -> bool:
    """Whether what varies from lap to lap is above 0 on the whole."""
    error = float(excess.std(ddof=1)) / math.sqrt(len(excess))
    return float(excess.mean()) > LEAST_T * error


class StragglerWindow:
    """Says after every `num_steps` steps of a run what has cost time in them, and of what to warn. On rank 0."""

    def __init__(self, num_steps: int, share: float) -> None:
        self._num_wanted, self._share = num_steps, share
        self._window: list[LapOfRanks] = []
        self._num_skipped = 0
        self._warned: dict[tuple[str, tuple[int, ...], str], float] = {}

    @property
    def num_steps(self) -> int:
        """Steps of the window so far."""
        return sum(lap.num_steps for lap in self._window)

    @property
    def is_full(self) -> bool:
        return self.num_steps >= self._num_wanted

    @property
    def says_something(self) -> bool:
        """Whether the steps so far are enough to name anything."""
        return self.num_steps >= LEAST_STEPS

    def add(self, lap: LapOfRanks) -> None:
        """Add a lap; the first ones, in which programs are recorded, are left out."""
        if self._num_skipped < NUM_SKIPPED:
            self._num_skipped += lap.num_steps
        else:
            self._window.append(lap)

    def close(self, replay: Replay) -> list[Straggler]:
        """What the window shows; another one begins."""
        window, self._window = self._window, []
        return stragglers(window, replay)

    def news(self, found: Sequence[Straggler]) -> list[Straggler]:
        """Those to warn of: not again, unless it has become twice as much."""
        new = []
        for one in found:
            key = (one.kind, one.ranks, one.place)
            if one.share >= self._share and one.seconds >= 2 * self._warned.get(key, 0.0):
                self._warned[key] = one.seconds
                new.append(one)
        return new
