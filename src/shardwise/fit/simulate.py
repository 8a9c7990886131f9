"""A job of weeks, in seconds: failures at random, restarts or survival as `elastic` does them, checkpoints, slow hosts,
spares and joins; and where the time goes.

Only events are drawn. Between two of them all ranks do the same, so that a hundred thousand ranks cost what one costs,
times how often something happens. Every second of the job is counted once, as useful or as one kind of loss: the sum is
the job's time. A step is useful if it is part of the state in the end.

The interval between checkpoints that costs least is that of Young (1974) and Daly (2006) if a checkpoint only stops the
job and a restart takes no time. `best_interval` tries intervals around it on the same failures.

Randomness is an argument. The failures of a seed do not depend on what the job does about them, so that two ways of
running it are compared under the same ones.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Literal, NamedTuple

from shardwise.errors import ConfigError
from shardwise.fit.failure_rates import Cause, FailureRates, FoundBy
from shardwise.system.even_parts import round_up

Recovery = Literal["restart", "host", "buddy", "copies"]
"""What happens when ranks are lost (docs/elastic.md). `restart`: all ranks restart from the last checkpoint. Otherwise
the others repeat the step, unless what was lost exists nowhere else: `host` has images in the host's memory (the host
must stay), `buddy` also on another host, `copies` has all state on several hosts anyway."""
Loss = Literal[
    "checkpoints", "planned stops", "finding", "restarting", "waiting for ranks", "repeated", "regrouping", "void",
    "fewer ranks", "slow hosts",
]  # fmt: skip
LOSSES: dict[Loss, str] = {
    "checkpoints": "training stands while state is copied",
    "planned stops": "saving, and starting again",
    "finding": "until a failure is noticed",
    "restarting": "all ranks start and read the checkpoint",
    "waiting for ranks": "fewer than the least are left",
    "repeated": "steps since the last whole checkpoint",
    "regrouping": "the others form a new world, or take in a rank",
    "void": "iterations in which ranks were lost or joined",
    "fewer ranks": "steps take longer until replacements have joined",
    "slow hosts": "steps take longer, as all wait for the slowest",
}
FORWARD_SHARE = 1 / 3
"""Of a step's computation: a void iteration runs its forward again, without gradients."""
HOUR = 3600.0
STEP_END = 1e-6
"""Of a step: how far rounding of the clock may be from its end."""
MOST_EVENTS, MOST_STEPS = 2_000_000, 10**12
"""Of a run. A hundred thousand ranks of `llama3-405b` have some 20,000 failures in a year. Checkpoints between which
nothing happens are no events."""
TRIED = tuple(2 ** (power / 2) for power in range(-4, 5))
"""Multiples of Daly's interval."""


@dataclass(frozen=True)
class SlowHosts:
    """Hosts that become slow: how often for each host and hour, by which factor its steps take longer, and for how many
    hours, until it recovers or is replaced."""

    per_host_hour: float = 0.0
    factor: float = 1.3
    hours: float = 1.0


@dataclass(frozen=True)
class Job:
    """A job, and what it does when something happens. Seconds are of the wall clock.

    `checkpoint_stall_seconds`: what a checkpoint adds to a step. `checkpoint_write_seconds`: until it is on the disk,
    in the background; a failure before that goes back to the one before. `spare_ranks`: `None` if there is always one.
    `regroup_seconds`: how long the others stand when ranks are lost. `join_seconds`: until a replacement is ready,
    while the others train; `join_pause_seconds`: how long they stand when it joins. `leave_together`: ranks that leave
    with a lost one, such as a replica's. `numbers`: of how many ranks those train that are left of a single replica
    group, the largest first; empty if all do. `seconds_with`: what a step takes with so many ranks, where that is known
    and not in proportion. `least_ranks`: fewer do not train.
    """

    world_size: int
    ranks_per_host: int
    step_seconds: float
    seconds: float
    recovery: Recovery = "restart"
    checkpoint_interval_seconds: float = 1800.0
    checkpoint_stall_seconds: float = 0.0
    checkpoint_write_seconds: float = 0.0
    load_seconds: float = 0.0
    restart_seconds: float = 300.0
    exit_seconds: float = 0.1
    silence_seconds: float = 15.0
    timeout_seconds: float = 600.0
    regroup_seconds: float = 1.0
    join_seconds: float = 60.0
    join_pause_seconds: float = 1.0
    least_ranks: int = 1
    spare_ranks: int | None = None
    leave_together: int = 1
    numbers: tuple[int, ...] = ()
    seconds_with: Mapping[int, float] = field(default_factory=dict)
    slow: SlowHosts = SlowHosts()

    def __post_init__(self) -> None:
        counts = ("world_size", "ranks_per_host", "least_ranks", "leave_together")
        durations = [name for name in self.__dataclass_fields__ if name.endswith("seconds")]
        for name in (*counts, "step_seconds", "seconds", "checkpoint_interval_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give more than 0.")
        for name in durations:
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; give seconds of at least 0.")
        if self.numbers and (max(self.numbers) != self.world_size or min(self.numbers) > self.least_ranks):
            raise ConfigError(
                f"numbers is {self.numbers}; give numbers from {self.world_size} to {self.least_ranks} ranks, or fewer."
            )
        if self.least_ranks > self.world_size:
            raise ConfigError(f"least_ranks is {self.least_ranks}, but there are {self.world_size} ranks.")
        if self.spare_ranks is not None and self.spare_ranks < 0:
            raise ConfigError(f"spare_ranks is {self.spare_ranks}; give 0 or more, or None if there is always one.")
        slow = self.slow
        if not (slow.per_host_hour >= 0 and slow.factor >= 1 and slow.hours > 0):
            raise ConfigError(f"{slow}: give a rate of at least 0, a factor of at least 1, and hours above 0.")

    def num_training(self, num_ranks: int) -> int:
        """Of `num_ranks` that are there, if they are not too few."""
        return next((number for number in self.numbers if number <= num_ranks), min(self.numbers, default=num_ranks))

    def seconds_of_step(self, num_ranks: int) -> float:
        """With `num_ranks` that are there. The global batch is divided among those that train."""
        num = self.num_training(num_ranks)
        in_proportion = self.step_seconds * self.world_size / num
        return max(self.step_seconds, self.seconds_with.get(num, in_proportion))  # no step is more than a useful one

    @property
    def num_hosts(self) -> int:
        return -(-self.world_size // self.ranks_per_host)

    def found_after(self, found_by: FoundBy) -> float:
        return {"exit": self.exit_seconds, "silence": self.silence_seconds, "timeout": self.timeout_seconds}[found_by]


@dataclass(frozen=True)
class Outcome:
    """What one simulated job did. `losses` and `useful_seconds` add up to `seconds`; `by_cause` has the seconds that
    each cause took, of those losses that have one."""

    seconds: float
    num_steps: int
    useful_seconds: float
    losses: dict[Loss, float]
    by_cause: dict[str, float]
    num_by_cause: dict[str, int]
    num_restarts: int
    num_survived: int
    num_checkpoints: int
    fewest_ranks: int
    course: tuple[tuple[float, int], ...]
    """(seconds, steps that count then), at each failure and at the end."""

    @property
    def goodput(self) -> float:
        """The share of the time that became useful steps at full speed."""
        return self.useful_seconds / self.seconds

    @property
    def num_interruptions(self) -> int:
        return sum(self.num_by_cause.values())


def simulate(job: Job, rates: FailureRates, seed: int) -> Outcome:
    """Run the job once. The same arguments give the same outcome. Raises `ConfigError` for a job in which more happens
    than can be simulated."""
    _check_length(job, rates)
    return replay(job, _failures(job, rates, seed), _slow_starts(job, seed))


def _check_length(job: Job, rates: FailureRates) -> None:
    num_steps = job.seconds / job.step_seconds
    if num_steps > MOST_STEPS:
        raise ConfigError(
            f"step_seconds is {job.step_seconds:g}, so there would be {num_steps:.3g} steps. Give seconds."
        )
    hours = job.seconds / HOUR
    expected = {
        "failures": hours * job.world_size * rates.per_rank_hour,
        "hosts that become slow": hours * job.num_hosts * job.slow.per_host_hour,
    }
    what, most = max(expected.items(), key=lambda item: item[1])
    if most > MOST_EVENTS:
        raise ConfigError(
            f"{most:.3g} {what} are to be expected in {job.seconds / 86400:g} days, and more than {MOST_EVENTS:,} are "
            f"not simulated: it would take hours. Give a shorter job, or fewer of them."
        )


class Failure(NamedTuple):
    """When something happens, why, and where: from 0 to 1, among the places of all ranks."""

    at: float
    cause: Cause
    place: float = 0.0


def replay(job: Job, failures: Iterable[Failure], slow_starts: Iterable[float] = ()) -> Outcome:
    """Run the job with failures at given times, and hosts that become slow at given times."""
    return _Run(job, failures, slow_starts).outcome()


class Interval(NamedTuple):
    """An interval between checkpoints, and the goodput with it, averaged over seeds."""

    seconds: float
    goodput: float


def daly_interval(job: Job, rates: FailureRates) -> float:
    """The interval of Daly (2006, second order) for the failures that make this job restart, at least as long as a
    checkpoint takes to be written; infinity if none does."""
    per_second = sum(_restarts_per_second(job, cause) for cause in rates.causes)
    if not per_second:
        return math.inf
    cost, mean = job.checkpoint_stall_seconds, 1 / per_second
    if cost >= 2 * mean:
        return max(mean, job.checkpoint_write_seconds)
    ratio = cost / (2 * mean)
    daly = math.sqrt(2 * cost * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
    return max(daly, job.checkpoint_write_seconds + cost, job.step_seconds)


def _restarts_per_second(job: Job, cause: Cause) -> float:
    is_survived = cause.takes == "rank" or (cause.takes == "host" and job.recovery in ("buddy", "copies"))
    if cause.planned or (job.recovery != "restart" and is_survived):
        return 0.0
    return cause.per_rank_hour * job.world_size / HOUR


def best_interval(job: Job, rates: FailureRates, seeds: Sequence[int]) -> tuple[Interval, ...]:
    """Goodput with intervals from a quarter of Daly's to four times it, the best one first. One that is longer than the
    job stands for none."""
    daly = min(daly_interval(job, rates), job.seconds)
    shortest = max(job.checkpoint_write_seconds, job.step_seconds)
    tried = sorted({min(max(daly * factor, shortest), job.seconds) for factor in TRIED})
    found = []
    for seconds in tried:
        timed = replace(job, checkpoint_interval_seconds=seconds)
        runs = [simulate(timed, rates, seed).goodput for seed in seeds]
        found.append(Interval(seconds, sum(runs) / len(runs)))
    return tuple(sorted(found, key=lambda one: -one.goodput))


def _failures(job: Job, rates: FailureRates, seed: int) -> Iterator[Failure]:
    """Failures of a full world, in order. One whose place is empty just then is none."""
    random = Random(f"failures {seed}")
    per_second = rates.per_rank_hour * job.world_size / HOUR
    weights = [cause.per_rank_hour for cause in rates.causes]
    at = 0.0
    while per_second:
        at += random.expovariate(per_second)
        if at >= job.seconds:
            return
        yield Failure(at, random.choices(rates.causes, weights)[0], random.random())


def _slow_starts(job: Job, seed: int) -> Iterator[float]:
    random = Random(f"slow hosts {seed}")
    per_second = job.slow.per_host_hour * job.num_hosts / HOUR
    at = 0.0
    while per_second and job.slow.factor > 1:
        at += random.expovariate(per_second)
        if at >= job.seconds:
            return
        yield at


@dataclass
class _Steps:
    """Seconds of steps: at full speed, and what they took longer, by reason."""

    useful: float = 0.0
    fewer: float = 0.0
    slow: float = 0.0

    @property
    def seconds(self) -> float:
        return self.useful + self.fewer + self.slow

    def add(self, other: _Steps) -> None:
        self.useful += other.useful
        self.fewer += other.fewer
        self.slow += other.slow


class _Phase(NamedTuple):
    """A time in which no step is made."""

    loss: Loss
    seconds: float
    cause: str = ""


class _Saved(NamedTuple):
    """A state that a restart goes back to."""

    num_steps: int
    steps: _Steps


@dataclass
class _Run:
    """The state of a job, and its events in order: when, a number, and what to do then."""

    job: Job
    failures: Iterable[Failure]
    slow_starts: Iterable[float]
    now: float = 0.0
    num_steps: int = 0
    share: float = 0.0
    """Of the step under way, that is done."""
    closed: _Steps = field(default_factory=_Steps)
    """All whole steps that count."""
    open: _Steps = field(default_factory=_Steps)
    """The step under way."""
    phases: list[_Phase] = field(default_factory=list)
    losses: dict[Loss, float] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0.0))
    by_cause: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_by_cause: Counter[str] = field(default_factory=Counter)
    num_slow: int = 0
    num_restarts: int = 0
    num_survived: int = 0
    num_checkpoints: int = 0
    course: list[tuple[float, int]] = field(default_factory=list)
    number: int = 0
    attempt: int = 0
    """Events of an earlier attempt (checkpoints under way, joins) do not count."""

    def __post_init__(self) -> None:
        self.ranks = self.fewest = self.job.world_size
        self.coming = 0
        self.free = math.inf if self.job.spare_ranks is None else self.job.spare_ranks
        self.saved = _Saved(0, _Steps())
        self.alone: tuple[int, float] = (-1, 0.0)
        """A host that has the only copy of another's state, until it is copied again."""
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.deferred: list[Callable[[], None]] = []
        """Events for the end of a step, while nobody knows when there is one."""

    def outcome(self) -> Outcome:
        job = self.job
        for failure in self.failures:
            self._push(failure.at, partial(self._on_failure, failure))
        for at in self.slow_starts:
            self._push(at, self._on_slow)
        self._push(job.checkpoint_interval_seconds, partial(self._on_due, self.attempt))
        while self.events and self.events[0][0] < job.seconds:
            at, _, act = heapq.heappop(self.events)
            self._advance(at)
            act()
        self._advance(job.seconds)
        self.course.append((self.now, self.num_steps))
        steps = self.closed
        steps.add(self.open)
        self.losses["fewer ranks"] += steps.fewer
        self.losses["slow hosts"] += steps.slow
        return Outcome(
            job.seconds,
            self.num_steps,
            steps.useful,
            self.losses,
            dict(self.by_cause),
            dict(self.num_by_cause),
            self.num_restarts,
            self.num_survived,
            self.num_checkpoints,
            self.fewest,
            tuple(self.course),
        )

    def _push(self, at: float, act: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.events, (at, self.number, act))

    @property
    def _pace(self) -> float:
        """Seconds of a step just now."""
        slow = self.job.slow.factor if self.num_slow else 1.0
        return self.job.seconds_of_step(self.ranks) * slow

    def _advance(self, at: float) -> None:
        while self.phases and self.now < at:
            phase = self.phases[0]
            passed = min(phase.seconds, at - self.now)
            self.losses[phase.loss] += passed
            if phase.cause:
                self.by_cause[phase.cause] += passed
            self.now += passed
            if passed < phase.seconds:
                self.phases[0] = phase._replace(seconds=phase.seconds - passed)
            else:
                self.phases.pop(0)
        if self.now < at:
            self._train(at)

    def _train(self, at: float) -> None:
        share = self.share + (at - self.now) / self._pace
        whole = math.floor(share + STEP_END)
        if whole:
            self.closed.add(self.open)
            self._count(self.closed, whole - self.share)
            self.open = _Steps()
            self.num_steps += whole
        self._count(self.open, share - (whole or self.share))
        self.share, self.now = share - whole, at

    def _count(self, steps: _Steps, num: float) -> None:
        """Add so many steps at the present pace."""
        useful = num * self.job.step_seconds
        steps.useful += useful
        if self.num_slow or self.ranks < self.job.world_size:
            full = num * self.job.seconds_of_step(self.ranks)
            steps.fewer += full - useful
            steps.slow += num * self._pace - full

    def _step_end(self) -> float:
        """When the step under way ends, if nothing happens; infinity while ranks are waited for."""
        standing = sum(phase.seconds for phase in self.phases)
        return self.now + standing + (1 - self.share) * self._pace

    def _is_step_end(self, act: Callable[[], None]) -> bool:
        """Whether a step ends now, up to rounding of the clock; otherwise `act` is called again when one does."""
        if self._is_waiting:
            self.deferred.append(act)
            return False
        if self.phases or self.share > STEP_END:
            self._push(self._step_end(), act)
            return False
        return True

    @property
    def _is_waiting(self) -> bool:
        return bool(self.phases) and any(phase.loss == "waiting for ranks" for phase in self.phases)

    def _end_waiting(self) -> None:
        """There are enough ranks."""
        self.phases = [phase for phase in self.phases if phase.loss != "waiting for ranks"]
        for act in self.deferred:
            self._push(self.now, act)
        self.deferred.clear()

    # checkpoints

    def _on_due(self, attempt: int) -> None:
        if attempt != self.attempt or not self._is_step_end(partial(self._on_due, attempt)):
            return
        self._repeat_intervals()
        job = self.job
        self._stand(_Phase("checkpoints", job.checkpoint_stall_seconds))
        written = self.now + job.checkpoint_stall_seconds + job.checkpoint_write_seconds
        saved = _Saved(self.num_steps, replace(self.closed))
        self._push(written, partial(self._on_written, attempt, self.num_survived, saved))
        later = self.now + job.checkpoint_stall_seconds + self._pace / 2  # one step is not saved twice
        self._push(max(self.now + job.checkpoint_interval_seconds, written, later), partial(self._on_due, attempt))

    def _repeat_intervals(self) -> None:
        """At the end of a step: pass the intervals in which nothing happens but checkpoints, but for the last ones.

        What is saved in one of them is replaced in the next. Where a checkpoint costs nothing each step is saved, and a
        job of weeks would take two events for each of its steps.
        """
        job, pace = self.job, self._pace
        standing = job.checkpoint_stall_seconds
        between = max(job.checkpoint_interval_seconds - standing, job.checkpoint_write_seconds)
        num_steps = max(1, math.ceil(between / pace - STEP_END))
        seconds = standing + num_steps * pace
        until = min(self.events[0][0], job.seconds) if self.events else job.seconds
        times = max(0, math.floor((until - self.now) / seconds) - 2)
        self._count(self.closed, times * num_steps)
        self.num_steps += times * num_steps
        self.num_checkpoints += times
        self.losses["checkpoints"] += times * standing
        self.now += times * seconds

    def _on_written(self, attempt: int, num_survived: int, saved: _Saved) -> None:
        """It is whole, if all ranks that wrote it are still there."""
        if (attempt, num_survived) == (self.attempt, self.num_survived):
            self.saved = saved
            self.num_checkpoints += 1

    def _stand(self, *phases: _Phase) -> None:
        self.phases += [phase for phase in phases if phase.seconds > 0]

    # failures

    def _on_failure(self, failure: Failure) -> None:
        job, cause = self.job, failure.cause
        place = int(failure.place * job.world_size)
        if place >= self.ranks or (cause.planned and self.phases):
            return  # nobody is there, or the job stands anyway
        self.num_by_cause[cause.name] += 1
        self.course.append((self.now, self.num_steps))
        if cause.planned:
            self._on_stop(cause)
            return
        host = place // job.ranks_per_host
        lost = {"rank": 1, "host": job.ranks_per_host, "job": 0}[cause.takes]
        lost = min(self.ranks, round_up(lost, job.leave_together))
        if cause.repair_hours:
            self._push(self.now + cause.repair_hours * HOUR, partial(self._on_repaired, lost))
        else:
            self.free += lost
        if self.ranks > lost and self._survives(cause, host):
            self._survive(cause, lost)
            if job.recovery == "buddy" and cause.takes == "host":
                self.alone = ((host + 1) % job.num_hosts, self._step_end() + self._pace)
        else:
            self._restart(cause, lost)

    def _survives(self, cause: Cause, host: int) -> bool:
        job = self.job
        is_starting = any(phase.loss in ("restarting", "planned stops") for phase in self.phases)
        if job.recovery == "restart" or cause.takes == "job" or is_starting:
            return False
        if cause.takes == "rank" or job.recovery == "copies":
            return True
        if job.recovery == "host":
            return False
        keeper, until = self.alone
        return host != keeper or self.now >= until

    def _survive(self, cause: Cause, lost: int) -> None:
        """The others repeat the step."""
        job = self.job
        self.num_survived += 1
        self._lose(self.open.seconds, "void", cause.name)
        self.open, self.share = _Steps(), 0.0
        self.phases.clear()
        self.ranks -= lost
        found = _Phase("finding", job.found_after(cause.found_by), cause.name)
        again = _Phase("void", FORWARD_SHARE * job.step_seconds, cause.name)
        self._stand(found, _Phase("regrouping", job.regroup_seconds, cause.name), again)
        self._replace_lost()
        if self.ranks < job.least_ranks:
            self._stand(_Phase("waiting for ranks", math.inf, cause.name))
        self.fewest = min(self.fewest, self.ranks)

    def _replace_lost(self) -> None:
        """Replacements start, as many as there are places."""
        missing = self.job.world_size - self.ranks - self.coming
        starting = int(min(missing, self.free))
        if starting > 0 and self.job.recovery != "restart":
            self.free -= starting
            self.coming += starting
            self._push(self.now + self.job.join_seconds, partial(self._on_join, self.attempt, starting))

    def _on_join(self, attempt: int, num: int) -> None:
        """At the beginning of the others' next iteration, which is void."""
        again = partial(self._on_join, attempt, num)
        if attempt != self.attempt or not (self._is_waiting or self._is_step_end(again)):
            return
        self.coming -= num
        self.ranks += num
        if self._is_waiting and self.ranks >= self.job.least_ranks:
            self._end_waiting()
        void = _Phase("void", FORWARD_SHARE * self.job.step_seconds)
        self._stand(_Phase("regrouping", self.job.join_pause_seconds), void)

    def _restart(self, cause: Cause, lost: int) -> None:
        """All ranks start again from the last whole checkpoint."""
        job = self.job
        self.num_restarts += 1
        again = self.closed.seconds - self.saved.steps.seconds + self.open.seconds
        self._lose(again, "repeated", cause.name)
        self.open, self.share = _Steps(), 0.0
        self.closed, self.num_steps = replace(self.saved.steps), self.saved.num_steps
        self.ranks = max(0, self.ranks - lost)
        self._begin(cause.name, _Phase("finding", job.found_after(cause.found_by), cause.name))

    def _begin(self, cause: str, *before: _Phase, loss: Loss = "restarting") -> None:
        """A new attempt, on all places that are free."""
        job = self.job
        self.attempt += 1
        self.free += self.coming
        self.coming = 0
        self.phases.clear()
        self._fill()
        starting = _Phase(loss, job.restart_seconds + job.load_seconds, cause)
        self._stand(*before)
        if self.ranks < job.least_ranks:
            self._stand(_Phase("waiting for ranks", math.inf, cause))
        self._stand(starting)
        self.fewest = min(self.fewest, max(self.ranks, 1))
        standing = sum(phase.seconds for phase in (*before, starting))
        self._push(self.now + standing + job.checkpoint_interval_seconds, partial(self._on_due, self.attempt))

    def _fill(self) -> None:
        taken = int(min(self.job.world_size - self.ranks, self.free))
        self.ranks += taken
        self.free -= taken

    def _on_repaired(self, num: int) -> None:
        self.free += num
        is_starting = any(phase.loss in ("restarting", "planned stops") for phase in self.phases)
        if not (self._is_waiting and is_starting):
            self._replace_lost()
            return
        self._fill()
        if self.ranks >= self.job.least_ranks:
            self._end_waiting()

    def _on_stop(self, cause: Cause) -> None:
        """Save, end, and start again: nothing is repeated."""
        if not self._is_step_end(partial(self._on_stop, cause)):
            return
        self.num_checkpoints += 1
        self.saved = _Saved(self.num_steps, replace(self.closed))
        saving = self.job.checkpoint_stall_seconds + self.job.checkpoint_write_seconds
        self._begin(cause.name, _Phase("planned stops", saving, cause.name), loss="planned stops")

    def _lose(self, seconds: float, loss: Loss, cause: str) -> None:
        self.losses[loss] += seconds
        self.by_cause[cause] += seconds

    # slow hosts

    def _on_slow(self) -> None:
        self.num_slow += 1
        self._push(self.now + self.job.slow.hours * HOUR, self._on_well)

    def _on_well(self) -> None:
        self.num_slow -= 1
