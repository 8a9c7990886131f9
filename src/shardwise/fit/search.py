"""Chooses a plan: the fastest, the smallest or the cheapest of those that fit, and says why not its neighbours.

Candidates are pruned by what they take at least, memory and time: first roughly, all of them, and then closely, those
that may be among the best. What is left is evaluated as exactly as `explain` does it, the most promising first: branch
and bound, best first. Galvatron, Alpa and nnScaler search per layer; here a plan is the unit, because its units are
treated alike.

Pure: what a model is, a `Subject` knows.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal, Protocol

from shardwise.errors import CommError, ConfigError, ModelError, ShardwiseError, StateError
from shardwise.fit.candidates import (
    MOST_ROWS,
    ON_DEVICE,
    ON_HOST,
    SCHEDULE,
    SPLITTING,
    Bound,
    Bounds,
    Candidate,
    Size,
    Space,
    Wires,
    arranged,
    candidates,
    sent_in,
)
from shardwise.fit.hardware import Hardware
from shardwise.fit.least_steps import Least
from shardwise.plan import Plan, PolicyName, PrecisionName
from shardwise.plan.mesh import check_num_ranks
from shardwise.plan.placement import PRESETS
from shardwise.plan.placement import preset as preset_named
from shardwise.program.schedule import SCHEDULES
from shardwise.system.units import format_bytes, format_enough, format_seconds

Objective = Literal["time", "memory", "cost"]
OBJECTIVES: dict[Objective, str] = {
    "time": "the shortest step",
    "memory": "the least memory of a device",
    "cost": "the fewest device-seconds, also on a part of the ranks",
}
REFUSALS = (ConfigError, ModelError, CommError, StateError)
"""What `shard` raises for a plan that is impossible. A `ProgramError` is a defect, and stops the search."""
DEVICE_SHARE, HOST_SHARE = 0.92, 0.9
"""Of the memory that there is, unless somebody says how much. The rest is for the driver's context, the libraries'
buffers and fragmentation on a device, and for the system on a host."""
NUM_BEST = 5
MOST_EVALUATED = 60
NUM_RELIEVED = 3
"""Candidates that do not fit, of which a share is put on the host."""
MOST_BYTES = 24
"""That leave a device with an element that is updated on the host: its master weight, two states, gradient, and the
parameter itself, all in fp32, and one more."""
NUM_DESPERATE = 4
"""Where nothing fits, times as many are evaluated before that is believed."""
MARGIN = 1.1
MORE_RANKS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Limits:
    """Bytes allowed: on each device, and of a node's memory for all of its ranks together (`None`: not limited)."""

    device_bytes: int
    host_bytes: int | None = None


@dataclass(frozen=True)
class Evaluated:
    """What a candidate takes, on the fullest of its ranks; `host_bytes` of a node. `parts` are seconds of a step by
    what they go into, and add up to `seconds`. Without `is_exact` they were derived from similar candidates.
    `process_bytes` of a device are there whatever the plan."""

    seconds: float
    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    mfu: float = 0.0
    is_exact: bool = True
    process_bytes: int = 0

    def over(self, limits: Limits) -> tuple[int, int]:
        """How many bytes too much, on a device and on a host; 0 or less if it fits."""
        host = 0 if limits.host_bytes is None else self.host_bytes - limits.host_bytes
        return self.device_bytes - limits.device_bytes, host

    def fits(self, limits: Limits) -> bool:
        return max(self.over(limits)) <= 0


class Subject(Protocol):
    """What is trained, on some hardware, as a search asks about it."""

    hardware: Hardware
    num_rows: int
    """Samples of a step, on all ranks."""

    def size(self, policy: PolicyName, precision: PrecisionName | None) -> Size:
        """Raises `ShardwiseError` for a treatment of activations that the model cannot have."""
        ...

    def blocks_by_rank(self, candidate: Candidate) -> Sequence[int]:
        """How many blocks each rank of its pipeline has. Raises `ShardwiseError` if the model has no such stages."""
        ...

    def check(self, candidate: Candidate) -> None:
        """Raises `ShardwiseError` if the model cannot be split in this way, whatever else the candidate says."""
        ...

    def least(self, candidate: Candidate, *, itself: bool = False) -> Least:
        """At most what `evaluate` finds, in a small part of its time; raises likewise. `itself`: from what is counted
        of this candidate, as `evaluate` needs it, and not of others."""
        ...

    def held(self, candidate: Candidate, enough: int | None = None) -> int:
        """Bytes of a device on some ranks of a pipeline, in a small part of the time of `evaluate`, which finds at
        least as many; raises likewise. No more ranks are looked at once one holds more than `enough`."""
        ...

    def evaluate(self, candidate: Candidate) -> Evaluated:
        """Quickly. Raises `ShardwiseError` for what `shard` would refuse, with its reason."""
        ...

    def timed(self, candidate: Candidate) -> Evaluated:
        """As `evaluate`, without its bytes (0): how long a pipeline's step takes with a few rounds of micro-batches."""
        ...

    def confirm(self, candidate: Candidate) -> Evaluated:
        """As exactly as it can be foreseen; raises likewise."""
        ...

    def relieved(self, candidate: Candidate, limits: Limits) -> Candidate:
        """The same with as little off the device as makes it fit; raises `ShardwiseError` if nothing does."""
        ...


@dataclass(frozen=True)
class Ranked:
    """A candidate that was evaluated."""

    candidate: Candidate
    found: Evaluated

    def cost(self, objective: Objective) -> float:
        """Less is better."""
        return {
            "time": self.found.seconds,
            "memory": float(self.found.device_bytes),
            "cost": self.found.seconds * self.candidate.world_size,
        }[objective]


@dataclass(frozen=True)
class WhyNot:
    """A neighbour of the best candidate, what it would change, and why it was not chosen."""

    what: str
    reason: str
    found: Evaluated | None = None


@dataclass(frozen=True)
class Found:
    """The best candidates, the best one first. `evaluated` are all that were, also those that do not fit; `num_pruned`
    were left out by their bounds, `num_left` were not looked at because enough had been evaluated."""

    best: tuple[Ranked, ...]
    evaluated: tuple[Ranked, ...]
    why_not: tuple[WhyNot, ...]
    refused: Mapping[str, str]
    """Reasons of the checks, by candidate, for some that are impossible."""
    num_candidates: int
    num_pruned: int
    num_left: int
    limits: Limits
    objective: Objective

    @property
    def front(self) -> tuple[Ranked, ...]:
        """Those that fit, of which no other is better in both time and memory, by time."""
        fitting = sorted(
            (one for one in self.evaluated if one.found.fits(self.limits)),
            key=lambda one: (one.found.seconds, one.found.device_bytes),
        )
        front: list[Ranked] = []
        for one in fitting:
            if not front or one.found.device_bytes < front[-1].found.device_bytes:
                front.append(one)
        return tuple(front)


def search(
    subject: Subject,
    world_size: int,
    limits: Limits,
    *,
    base: Plan | None = None,
    space: Space | None = None,
    objective: Objective = "time",
    most_evaluated: int = MOST_EVALUATED,
) -> Found:
    """The best plans for `subject` on `world_size` ranks. `base` says what all of them have in common, the subject's
    precision included.

    Raises `ConfigError` if none fits, with by how much, and what would make one fit; or if none is possible, with the
    reasons; or for numbers of ranks, samples or evaluations that no search ends with.
    """
    check_num_ranks("The number of ranks", world_size)
    if not 1 <= subject.num_rows <= MOST_ROWS:
        raise ConfigError(
            f"The samples of a step are {subject.num_rows}; give 1 to {MOST_ROWS}. Every way to divide them among "
            f"ranks and micro-batches is looked at."
        )
    base, space = base or Plan(), space or Space()
    for name in space.presets or (base.preset,):
        preset_named(name)  # raises for an unknown one
    if most_evaluated < 1:
        raise ConfigError(f"{most_evaluated} candidates are to be evaluated at most; give at least 1.")
    with _collected_by_hand():
        return _Search(subject, world_size, limits, base, space, objective, most_evaluated).run()


_FROZEN_AT_START = gc.get_freeze_count()
"""What the interpreter has frozen itself: nothing in Python 3.11, some hundred objects in 3.12."""


@contextmanager
def _collected_by_hand() -> Iterator[None]:
    """Python's collector leaves alone what is there before a search: a model and the libraries, millions of objects
    that it would walk through time and again, which took a sixth of a search for a Llama of 13 B parameters. And it
    does not run by itself, which would walk through all programs of a search whenever there are a quarter more of them,
    for a twelfth of the time: cycles are left by rehearsals alone, and whoever makes one collects what it leaves."""
    is_ours, was_enabled = gc.get_freeze_count() <= _FROZEN_AT_START, gc.isenabled()
    if is_ours:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        if is_ours:
            gc.unfreeze()


@dataclass
class _Search:
    subject: Subject
    world_size: int
    limits: Limits
    base: Plan
    space: Space
    objective: Objective
    most_evaluated: int
    known: dict[Candidate, Evaluated | ShardwiseError] = field(default_factory=dict)
    splits: dict[tuple[int, ...], ShardwiseError | None] = field(default_factory=dict)
    """Why the model cannot be split so, or `None` if it can."""
    closer: dict[Candidate, Bound] = field(default_factory=dict)
    """Bounds of those that were looked at more closely."""
    held: dict[Candidate, int] = field(default_factory=dict)
    """Bytes of a device on some ranks of pipelines."""
    of_rounds: dict[tuple[Candidate, bool], Evaluated] = field(default_factory=dict)
    """What the first rounds of micro-batches take of those that have more, and whether their bytes are known."""
    outside: set[Candidate] = field(default_factory=set)
    """Neighbours that were evaluated to say why not, and are no candidates: such as presets that were not asked for."""
    refused: dict[str, str] = field(default_factory=dict)
    num_pruned: int = 0
    num_left: int = 0

    def __post_init__(self) -> None:
        self.sizes = _KnownSizes(self.subject, self.base)

    def run(self) -> Found:
        bounded = self._bounded(self._all())
        num_candidates = len(bounded) + self.num_pruned
        fitting = [one for one in bounded if self._may_fit(one[1])]
        self.num_pruned += len(bounded) - len(fitting)
        best = self._exactly(self._relieved(bounded, self._best_of(fitting)), fitting)
        if not best:
            least = self._smallest(bounded)
            if least is None or not least.found.fits(self.limits):
                raise self._nothing_fits(least)
            best = [least]  # what was asked of it before was derived, or others came first until enough were evaluated
        best, why_not = self._beside_neighbours(best, fitting)
        self._count_left(fitting, best)
        evaluated = tuple(Ranked(one, found) for one, found in self.known.items() if isinstance(found, Evaluated))
        return Found(
            tuple(best),
            evaluated,
            why_not,
            self.refused,
            num_candidates,
            self.num_pruned,
            self.num_left,
            self.limits,
            self.objective,
        )

    # -- bounds -----------------------------------------------------------------------------------------

    def _all(self) -> Iterable[Candidate]:
        for size in self._world_sizes():
            yield from self._on(size, self.space)

    def _world_sizes(self) -> list[int]:
        """The numbers of ranks that may be used."""
        sizes = [self.world_size]
        while self.objective == "cost" and sizes[-1] % 2 == 0:
            sizes.append(sizes[-1] // 2)
        return sizes

    def _on(self, world_size: int, space: Space) -> Iterable[Candidate]:
        per_node = self.subject.hardware.ranks_per_node
        num_blocks = self.sizes.num_blocks
        return candidates(world_size, per_node, self.subject.num_rows, num_blocks, self.base, space)

    def _bounded(self, every: Iterable[Candidate]) -> list[tuple[Candidate, Bound]]:
        found = []
        for candidate in every:
            try:
                found.append((candidate, self.sizes.of(candidate)))
            except ShardwiseError as error:
                self.refuse(candidate, error)
        return found

    def refuse(self, candidate: Candidate, error: ShardwiseError) -> None:
        self.num_pruned += 1
        if str(error) not in self.refused.values():
            self.refused[str(candidate)] = str(error)

    def _may_fit(self, bound: Bound) -> bool:
        on_host = self.limits.host_bytes is None or bound.host_bytes <= self.limits.host_bytes
        return bound.device_bytes <= self.limits.device_bytes and on_host

    def look(self, candidate: Candidate, bound: Bound, *, itself: bool = False) -> Bound:
        """A bound as close as it can be without a program, by what is known so far, or of the candidate `itself`: see
        [Note: least steps]."""
        closer = self.closer[candidate] = self._closer(candidate, bound, itself=itself)
        return closer

    def _closer(self, candidate: Candidate, bound: Bound, *, itself: bool) -> Bound:
        known = replace(bound, is_own=True)  # the reason is found when it is evaluated
        if self.why_unsplit(candidate) is not None:
            return known
        try:
            least = self.subject.least(candidate, itself=itself)
        except REFUSALS:
            return known
        seconds = least.seconds_beside(bound.communicating, self.subject.hardware.contention)
        num_bytes = bound.bytes_with(least.loads, grad_waits=candidate.has_gradients_beside)
        is_own = least.is_own
        return replace(bound, seconds=max(bound.seconds, seconds), device_bytes=num_bytes, is_own=is_own)

    def _with_held(self, candidate: Candidate, bound: Bound) -> Bound:
        """`bound` with what some ranks of a pipeline hold: most that are evaluated do not fit, and these alone show
        it."""
        if candidate.size("pp") == 1 or self.why_unsplit(candidate) is not None:
            return bound
        if candidate not in self.held:
            try:
                self.held[candidate] = self.subject.held(candidate.fullest, self.limits.device_bytes)
            except REFUSALS:  # the reason is found when it is evaluated
                return bound
        num_bytes = max(bound.device_bytes, self.held[candidate])
        closer = self.closer[candidate] = replace(bound, device_bytes=num_bytes)
        return closer

    def _with_rounds(self, candidate: Candidate, bound: Bound) -> Bound:
        """`bound` with what two rounds of micro-batches through a pipeline take: each further one adds at least what
        its busiest rank computes."""
        few, fullest = replace(candidate, accumulate=2 * candidate.size("pp")), candidate.fullest
        if fullest == candidate or self.objective == "memory" or self.why_unsplit(candidate) is not None:
            return bound
        try:
            more = self.subject.least(candidate).seconds - self.subject.least(few).seconds
            seconds = self._asked(few, fullest).seconds + more
        except REFUSALS:  # the reason is found when it is evaluated
            return bound
        closer = self.closer[candidate] = replace(bound, seconds=max(bound.seconds, seconds))
        return closer

    def least(self, candidate: Candidate, bound: Bound) -> float:
        """What the objective is at least."""
        return bound.device_bytes if self.objective == "memory" else self.spent(candidate, bound.seconds)

    def spent(self, candidate: Candidate, seconds: float) -> float:
        """Seconds, or device-seconds if these are the objective."""
        return seconds * (candidate.world_size if self.objective == "cost" else 1)

    # -- evaluation -------------------------------------------------------------------------------------

    def why_unsplit(self, candidate: Candidate) -> ShardwiseError | None:
        """Why the model cannot be split as `candidate` splits it; asked once of each way to do so. What cannot be split
        along one axis cannot be split along several."""
        split = candidate.split
        if split not in self.splits:
            reasons = filter(None, map(self.why_unsplit, _axis_by_axis(candidate)))
            self.splits[split] = next(reasons, None) or self._checked(candidate)
        return self.splits[split]

    def _checked(self, candidate: Candidate) -> ShardwiseError | None:
        try:
            self.subject.check(candidate)
        except REFUSALS as error:
            return error
        return None

    def evaluate(self, candidate: Candidate) -> Evaluated | ShardwiseError:
        if candidate not in self.known:
            try:
                self.known[candidate] = self.why_unsplit(candidate) or self._evaluated(candidate)
            except REFUSALS as error:
                self.known[candidate] = error
        return self.known[candidate]

    def _evaluated(self, candidate: Candidate) -> Evaluated:
        """Once a pipeline is full, each further round of micro-batches takes as long as the one before, and all hold as
        much: schedules of many rounds are timed at two and at three, and what the third adds counts for all others.
        What does not fit then is timed once, and its rounds taken for equally long."""
        stages = candidate.size("pp")
        num_rounds = candidate.accumulate / stages
        fullest = candidate.fullest
        if fullest == candidate:
            return self.subject.evaluate(candidate)
        few, more = (replace(candidate, accumulate=count * stages) for count in (2, 3))
        found = self._asked(fullest, fullest)
        if not found.fits(self.limits):
            longer = num_rounds * stages / fullest.accumulate
            parts = {part: longer * num for part, num in found.parts.items()}
            return replace(found, seconds=longer * found.seconds, parts=parts, is_exact=False)
        two, three = (self._asked(one, fullest) for one in (few, more))
        num_more = num_rounds - 3

        def beyond(few: float, more: float) -> float:
            return more + num_more * (more - few)

        seconds = beyond(two.seconds, three.seconds)
        parts = {part: beyond(two.parts.get(part, 0.0), num) for part, num in three.parts.items()}
        mfu = three.mfu * (three.seconds / seconds) * (1 + num_more / 3)
        return replace(found, seconds=seconds, parts=parts, mfu=mfu, is_exact=False)

    def _asked(self, few: Candidate, fullest: Candidate) -> Evaluated:
        """What a few rounds of micro-batches take, asked once: in time, and of the `fullest` also in memory."""
        key = few, few == fullest
        if key not in self.of_rounds:
            self.of_rounds[key] = (self.subject.evaluate if few == fullest else self.subject.timed)(few)
        return self.of_rounds[key]

    def _exactly(self, best: list[Ranked], fitting: Sequence[tuple[Candidate, Bound]]) -> list[Ranked]:
        """The best that fit, of which the first is evaluated exactly. Where that shows that it does not fit, or that
        another may be better, that one is tried next."""
        while best and not best[0].found.is_exact:
            self._confirm(best[0].candidate)
            best = self._known_best() or self._best_of(fitting)
        return best

    def _confirm(self, candidate: Candidate) -> Evaluated | ShardwiseError:
        """As `evaluate`, as exactly as it can be foreseen."""
        try:
            self.known[candidate] = self.subject.confirm(candidate)
        except REFUSALS as error:
            self.known[candidate] = error
        return self.known[candidate]

    def _relieved(self, bounded: Sequence[tuple[Candidate, Bound]], best: list[Ranked]) -> list[Ranked]:
        """The best, after the most promising of each preset that does not fit has been tried with a share of it off the
        device."""
        if not self.space.shares or self.subject.hardware.host is None or self.objective == "memory":
            return best
        by_preset: dict[str, tuple[Candidate, Bound]] = {}
        for candidate, rough in sorted(bounded, key=lambda one: self._guess(*one)):
            found, bound = self.known.get(candidate), self.closer.get(candidate, rough)
            is_large = not found.fits(self.limits) if isinstance(found, Evaluated) else not self._may_fit(bound)
            if is_large and candidate.preset in ON_DEVICE and self.why_unsplit(candidate) is None:
                by_preset.setdefault(candidate.preset, (candidate, bound))
        few = sorted(by_preset.values(), key=lambda one: self._guess(*one))[:NUM_RELIEVED]
        for candidate, bound in few:
            try:
                if not best or self._least_relieved(candidate, bound) < best[0].cost(self.objective):
                    self.evaluate(self.subject.relieved(candidate, self.limits))
            except REFUSALS as error:
                self.refused.setdefault(f"{candidate}, in part on the host", str(error))
        return self._known_best()

    def _least_relieved(self, candidate: Candidate, bound: Bound) -> float:
        """What the objective is at least if the host updates what the device has no room for."""
        found, hardware = self.known.get(candidate), self.subject.hardware
        closer = self.look(candidate, bound)
        device_bytes = found.device_bytes if isinstance(found, Evaluated) else closer.device_bytes
        numel = max(0.0, device_bytes - self.limits.device_bytes) / MOST_BYTES
        return self.spent(candidate, closer.seconds + hardware.host_update_seconds(numel))

    def _known_best(self) -> list[Ranked]:
        climb = _Climb(self)
        for candidate, found in self.known.items():
            if candidate not in self.outside:
                climb.take(candidate, found)
        return climb.best

    def _best_of(self, bounded: Sequence[tuple[Candidate, Bound]]) -> list[Ranked]:
        """The best that fit. Whichever may be the best comes next: it is looked at closely, and when its turn comes
        again and no more is known of it, evaluated; a pipeline after its first rounds. What is slower than the best few
        by its bound never is."""
        climb = _Climb(self)
        for candidate, found in self.known.items():
            climb.take(candidate, found)
        queue = [
            (self._guess(candidate, bound), place, candidate, bound) for place, (candidate, bound) in enumerate(bounded)
        ]
        heapify(queue)
        most, begun = self.most_evaluated, set[Candidate]()
        while queue and climb.num_evaluated + len(begun) < (most if climb.best else NUM_DESPERATE * most):
            _, place, candidate, bound = heappop(queue)
            if candidate in self.known or climb.is_worse(candidate, bound):
                continue
            is_first = candidate not in self.closer
            closer = self.look(candidate, bound)  # more may be known by now
            if not is_first and closer.seconds <= bound.seconds and self._may_fit(closer):
                closer = self.look(candidate, bound, itself=True)
            if not self._may_fit(closer):
                continue
            if is_first or closer.seconds > bound.seconds or not closer.is_own:
                heappush(queue, (self._guess(candidate, closer), place, candidate, closer))
            elif not self._may_fit(held := self._with_held(candidate, closer)):
                climb.num_evaluated += 1
            elif (longer := self._with_rounds(candidate, held)).seconds > closer.seconds:
                begun.add(candidate)
                heappush(queue, (self._guess(candidate, longer), place, candidate, longer))
            else:
                begun.discard(candidate)
                climb.visit(candidate)
        return climb.best

    def _count_left(self, bounded: Sequence[tuple[Candidate, Bound]], best: list[Ranked]) -> None:
        """Those that were not evaluated: pruned by their bounds, or left."""
        climb = _Climb(self, best)
        unknown = [(one, self.closer.get(one, bound)) for one, bound in bounded if one not in self.known]
        self.num_left = sum(self._may_fit(bound) and not climb.is_worse(one, bound) for one, bound in unknown)
        self.num_pruned += len(unknown) - self.num_left

    def _guess(self, candidate: Candidate, bound: Bound) -> float:
        """What the objective may be, for the order in which candidates are tried: it decides nothing else. Messages
        within layers and many small micro-batches cost something that a rough bound does not know; and what fills a
        device to the brim by that seldom fits. What has to be rehearsed may wait for what has been."""
        if self.objective == "memory":
            return bound.device_bytes
        if candidate in self.closer:
            return self.spent(candidate, bound.seconds * (1.0 if bound.is_own else MARGIN))
        within = candidate.size("tp") * candidate.size("sp")
        split = 1 + 0.04 * math.sqrt(within - 1) + 0.01 * math.sqrt(candidate.accumulate)
        brim = 1.5 if MARGIN * bound.device_bytes > self.limits.device_bytes else 1.0
        return self.spent(candidate, bound.seconds * split * brim)

    # -- reasons ----------------------------------------------------------------------------------------

    def _beside_neighbours(
        self, best: list[Ranked], fitting: Sequence[tuple[Candidate, Bound]]
    ) -> tuple[list[Ranked], tuple[WhyNot, ...]]:
        """The best, and why not its neighbours. A neighbour that had been left out because enough were evaluated, and
        turns out to be better, is the best one, with neighbours of its own."""
        inside = {candidate for candidate, _ in fitting}
        while True:
            neighbours = [candidate for _, candidate in self._neighbours(best[0].candidate)]
            self.outside.update(one for one in neighbours if one not in inside and one not in self.known)
            for one in neighbours:
                self.evaluate(one)
            found = self._exactly(self._known_best(), fitting)
            if found[0].candidate == best[0].candidate:
                return found, tuple(self._why_not(found[0]))  # by what those that seemed better really take
            best = found

    def _neighbours(self, best: Candidate) -> Iterable[tuple[str, Candidate]]:
        """What a person would ask about, and what it is called."""
        space = self.space
        if best.offload is not None:
            yield "all on the device", replace(best, offload=None, disk=None)
        wires = ((one, sent_in(one) or "all sent as it is") for one in ((), *space.wires) if one != best.wires)
        others: list[tuple[str, Candidate | None]] = [
            *((preset, self._arranged(best, preset=preset)) for preset in _other_presets(best, space)),
            *((f"{axis} {size}", self._resized(best, axis, size)) for axis, size in _other_sizes(best, space)),
            *((f"{size} ranks", self._arranged(best, world_size=size)) for size in self._other_worlds(best)),
            *((what, self._arranged(best, wires=one)) for one, what in wires),
            *((f"{rows} rows", replace(best, rows=rows)) for rows in _other_rows(best)),
        ]
        for what, other in others:
            fed = None if other is None else self._fed(other)
            if fed is not None:
                is_other = fed.schedule != best.schedule and fed.size("pp") > 1 < best.size("pp")
                yield f"{what}, {fed.schedule}" if is_other else what, fed
        yield from _neighbours(best, space)

    def _other_worlds(self, best: Candidate) -> Iterable[int]:
        """Half and twice as many ranks, where fewer may be used."""
        allowed = self._world_sizes()
        return (size for size in (best.world_size // 2, 2 * best.world_size) if size in allowed)

    def _arranged(
        self,
        best: Candidate,
        *,
        preset: str = "",
        wires: Wires | None = None,
        world_size: int = 0,
        split: Mapping[str, int] = MappingProxyType({}),
    ) -> Candidate | None:
        """The same with another preset, wires, number of ranks or size of an axis, on the mesh that these need; `None`
        where there is none. A mesh of the plan stays as it is."""
        preset, wires = preset or best.preset, best.wires if wires is None else wires
        if self.base.mesh is not None:
            axes = PRESETS[preset].axes
            has_axes = len(axes) == 1 or set(axes) <= set(best.mesh.axes)
            return replace(best, preset=preset, wires=wires) if has_axes and not world_size else None
        per_node, size = self.subject.hardware.ranks_per_node, world_size or best.world_size
        whole_split = {axis: best.size(axis) for axis in SPLITTING} | dict(split)
        sizes = arranged(preset, wires, size, per_node, whole_split)
        return None if sizes is None else replace(best, preset=preset, wires=wires, sizes=sizes)

    def _resized(self, best: Candidate, axis: str, size: int) -> Candidate | None:
        """With `size` ranks along `axis`, if a mesh of the plan has it: there the outermost axis whose ranks read
        different samples has fewer or more."""
        if self.base.mesh is None:
            return self._arranged(best, split={axis: size})
        if axis not in best.mesh.axes:
            return None
        sizes = {**dict(best.sizes), axis: size}
        data = next((one for one in best.mesh.data_axes if one not in SPLITTING), None)
        others = math.prod(num for one, num in sizes.items() if one != data)
        if data is None or best.world_size % others:
            return None
        return replace(best, sizes=tuple({**sizes, data: best.world_size // others}.items()))

    def _fed(self, candidate: Candidate) -> Candidate | None:
        """With as many micro-batches as train all samples of a step, of as many samples as divide what a rank gets; and
        with the usual schedule, if these or the stages are none for its own, which the plan does not say."""
        num_data = math.prod(candidate.mesh.size(axis) for axis in candidate.mesh.data_axes)
        if self.subject.num_rows % num_data:
            return None
        of_rank, stages = self.subject.num_rows // num_data, candidate.size("pp")
        rows = math.gcd(of_rank, candidate.rows)
        fed = replace(candidate, rows=rows, accumulate=of_rank // rows)
        is_taken = fed.parts > 0 or SCHEDULES[fed.schedule].takes(stages, fed.accumulate)
        is_taken &= stages * fed.chunks <= self.sizes.num_blocks
        if stages > 1 and (is_taken or not self.space.schedules):
            return fed
        return replace(fed, schedule=SCHEDULE, chunks=1)

    def _why_not(self, best: Ranked) -> Iterable[WhyNot]:
        for what, candidate in self._neighbours(best.candidate):
            found = self.evaluate(candidate)
            if isinstance(found, ShardwiseError):
                yield WhyNot(what, str(found))
            else:
                reason = why_not(found, best.found, self.limits)
                if candidate.world_size != best.candidate.world_size and found.fits(self.limits):
                    spent = Ranked(candidate, found).cost("cost") / best.cost("cost") - 1
                    reason = f"{spent:+.1%} device-seconds; its step takes {reason}"
                yield WhyNot(what, reason, found)

    def _nothing_fits(self, least: Ranked | None) -> ConfigError:
        """By how much even the one that takes `least`, and what would help."""
        world_size = self.world_size
        if least is None:
            return ConfigError(f"No plan is possible on {world_size} ranks: {self._why_impossible()}")
        device, host = least.found.over(self.limits)
        text = f"No plan fits on {world_size} ranks. The smallest is {least.candidate}: it takes "
        text += f"{format_bytes(least.found.device_bytes)} of a device"
        text += f", {format_bytes(device)} too much" if device > 0 else ""
        if self._leaves_no_room(least):
            beside = format_bytes(least.found.process_bytes)
            text += f" ({beside} are taken beside tensors, by libraries and buffers of matrix products)"
        if least.found.host_bytes:
            text += f", and {format_bytes(least.found.host_bytes)} of a host"
            text += f", {format_bytes(host)} too much" if host > 0 else ""
        return ConfigError(f"{text}. What would do: {', '.join(self._cures(least, device, host))}.")

    def _why_impossible(self) -> str:
        """Some reasons of the checks; and where ranks that all read different samples would not get equally many, so
        that only plans which split the model were left, that as well."""
        reasons = list(self.refused.values())[:3]
        if not reasons or self.subject.num_rows % self.world_size:
            sizes = f" in micro-batches of {' or '.join(map(str, self.space.rows))}" if self.space.rows else ""
            reasons.insert(
                0,
                f"the {self.subject.num_rows} samples of a step cannot be divided among the ranks that read different "
                f"ones{sizes}",
            )
        return "; ".join(reasons)

    def _smallest(
        self, bounded: Sequence[tuple[Candidate, Bound]], most: int = 12, *, to_fit: bool = False
    ) -> Ranked | None:
        """The one that takes least, of those with the least bounds, evaluated exactly: somebody gets devices of what it
        takes. With `to_fit` one that does not fit is of no interest, and may be what was derived."""

        def excess(bound: Bound) -> float:
            host = 0.0 if self.limits.host_bytes is None else max(0.0, bound.host_bytes - self.limits.host_bytes)
            return max(0.0, bound.device_bytes - self.limits.device_bytes) + host

        possible = (
            candidate
            for candidate, _ in sorted(bounded, key=lambda one: (excess(one[1]), one[1].device_bytes))
            if self._can_split(candidate)
        )
        found: list[Ranked] = []
        for candidate in islice(possible, most):
            self._add(found, candidate, self.evaluate(candidate))
        while found:
            least = min(found, key=lambda one: max(0, *one.found.over(self.limits)))
            if least.found.is_exact or (to_fit and not least.found.fits(self.limits)):
                return least
            found.remove(least)
            self._add(found, least.candidate, self._confirm(least.candidate))
        return None

    def _add(self, found: list[Ranked], candidate: Candidate, evaluated: Evaluated | ShardwiseError) -> None:
        """To `found`, or to what is refused."""
        if isinstance(evaluated, Evaluated):
            found.append(Ranked(candidate, evaluated))
        else:
            self.refuse(candidate, evaluated)

    def _can_split(self, candidate: Candidate) -> bool:
        error = self.why_unsplit(candidate)
        if error is not None:
            self.refuse(candidate, error)
        return error is None

    def _cures(self, least: Ranked, device: int, host: int) -> Iterable[str]:
        if device > 0:
            yield f"devices of {format_enough(least.found.device_bytes)}"
        if host > 0:
            yield f"hosts of {format_enough(least.found.host_bytes)}"
        for factor in MORE_RANKS:
            bounded = self._bounded(self._on(self.world_size * factor, self.space))
            more = self._smallest([one for one in bounded if self._may_fit(one[1])], most=6, to_fit=True)
            if more is not None and more.found.fits(self.limits):
                yield f"{more.candidate.world_size} ranks ({more.candidate})"
                break
        tiers = [preset for preset in ON_HOST if preset not in self.space.presets]
        if tiers:
            space = replace(self.space, presets=tuple(tiers))
            there = self._smallest(self._bounded(self._on(self.world_size, space)), most=6, to_fit=True)
            if there is not None and there.found.fits(self.limits):
                yield f"the host's memory ({there.candidate})"
        if not self._leaves_no_room(least):
            yield "smaller micro-batches, or a smaller model"

    def _leaves_no_room(self, least: Ranked) -> bool:
        """Whether no model of any size fits a device."""
        return least.found.process_bytes > self.limits.device_bytes


@dataclass
class _Climb:
    """The best candidates so far."""

    owner: _Search
    best: list[Ranked] = field(default_factory=list)
    num_evaluated: int = 0

    def is_worse(self, candidate: Candidate, bound: Bound) -> bool:
        """Whether it cannot be among the best."""
        return len(self.best) == NUM_BEST and self.owner.least(candidate, bound) >= self.best[-1].cost(
            self.owner.objective
        )

    def visit(self, candidate: Candidate) -> None:
        """Evaluate it."""
        owner = self.owner
        found = owner.evaluate(candidate)
        self.num_evaluated += owner.why_unsplit(candidate) is None
        if isinstance(found, ShardwiseError):
            owner.refuse(candidate, found)
        self.take(candidate, found)

    def take(self, candidate: Candidate, found: Evaluated | ShardwiseError) -> None:
        if isinstance(found, Evaluated) and found.fits(self.owner.limits):
            every = [*self.best, Ranked(candidate, found)]
            self.best = sorted(every, key=lambda one: one.cost(self.owner.objective))[:NUM_BEST]


def _axis_by_axis(candidate: Candidate) -> Iterable[Candidate]:
    """If the model is split along several axes, what splits it along each of them alone."""
    sizes = {axis: candidate.size(axis) for axis in SPLITTING if candidate.size(axis) > 1}
    for axis, size in sizes.items() if len(sizes) > 1 else ():
        data, split = ("dp", candidate.world_size // size), (axis, size)
        order = (split, data) if axis == SPLITTING[0] else (data, split)
        yield replace(candidate, preset=ON_DEVICE[0], sizes=order)


@dataclass
class _KnownSizes:
    """`Bounds` that ask for the size of the model under a treatment when it is first needed."""

    def __init__(self, subject: Subject, base: Plan) -> None:
        self._subject = subject
        self._bounds = Bounds(base, subject.hardware, {}, subject.blocks_by_rank)
        self._refused: dict[tuple[PolicyName, PrecisionName | None], ShardwiseError] = {}

    @property
    def num_blocks(self) -> int:
        return self._subject.size("keep", None).num_blocks

    def of(self, candidate: Candidate) -> Bound:
        key = candidate.policy, candidate.precision
        if key in self._refused:
            raise self._refused[key]
        if key not in self._bounds.size_of:
            try:
                self._bounds.size_of[key] = self._subject.size(*key)
            except ShardwiseError as error:
                self._refused[key] = error
                raise
        return self._bounds.of(candidate)


def why_not(found: Evaluated, best: Evaluated, limits: Limits) -> str:
    """Such as `+14 %, mostly waiting along tp (+120 ms)`, or `3.1 GiB too much on a device`."""
    device, host = found.over(limits)
    if device > 0 or host > 0:
        words = [f"{format_bytes(device)} too much on a device"] if device > 0 else []
        words += [f"{format_bytes(host)} too much on a host"] if host > 0 else []
        return " and ".join(words)
    share = found.seconds / best.seconds - 1
    saved = best.device_bytes - found.device_bytes
    memory = f", {format_bytes(abs(saved))} {'less' if saved > 0 else 'more'} memory" if saved else ""
    changes = {part: found.parts.get(part, 0.0) - best.parts.get(part, 0.0) for part in {**found.parts, **best.parts}}
    most = max(changes, key=lambda part: changes[part], default=None)
    because = ""
    if most is not None and share > 0.001 and changes[most] > 0:
        because = f", mostly {most} (+{format_seconds(changes[most])})"
    return f"{share:+.1%}{because}{memory}"


def _neighbours(best: Candidate, space: Space) -> Iterable[tuple[str, Candidate]]:
    """Those on the same mesh that send the same, with the same micro-batches."""
    for policy in space.activations:
        if policy != best.policy:
            yield f"activations {policy}", replace(best, policy=policy)
    for precision in space.precisions:
        if precision != best.precision:
            yield f"precision {precision}", replace(best, precision=precision)
    if best.size("pp") > 1:
        for schedule, chunks in space.schedules:
            if (schedule, chunks) != (best.schedule, best.chunks):
                yield f"schedule {schedule}", replace(best, schedule=schedule, chunks=chunks)


def _other_presets(best: Candidate, space: Space) -> Iterable[str]:
    """All that update on the device, and of the others those that may be chosen."""
    on_host = (preset for preset in space.presets if preset in ON_HOST and best.offload is None)
    return (preset for preset in (*ON_DEVICE, *on_host) if preset != best.preset)


def _other_sizes(best: Candidate, space: Space) -> Iterable[tuple[str, int]]:
    """Twice and half as many ranks along each axis that may be varied."""
    for axis in ("tp", "pp", "sp", "ep"):
        size = best.size(axis)
        if axis in space.axes:
            yield axis, 2 * size
        if axis in space.axes and size % 2 == 0:
            yield axis, size // 2


def _other_rows(best: Candidate) -> Iterable[int]:
    """Twice and half as many samples of a micro-batch."""
    if best.accumulate % 2 == 0:
        yield 2 * best.rows
    if best.rows % 2 == 0:
        yield best.rows // 2


def as_json(found: Found, plan_of: Callable[[Candidate], Plan]) -> dict[str, Any]:
    """What was found, as JSON values: seconds and bytes."""

    def row(one: Ranked) -> dict[str, Any]:
        return {
            "plan": str(one.candidate),
            "seconds": one.found.seconds,
            "device_bytes": one.found.device_bytes,
            "host_bytes": one.found.host_bytes,
            "disk_bytes": one.found.disk_bytes,
            "mfu": one.found.mfu,
            "parts": dict(one.found.parts),
            "fits": one.found.fits(found.limits),
            "is_exact": one.found.is_exact,
        }

    return {
        "objective": found.objective,
        "best": [row(one) | {"values": plan_of(one.candidate).model_dump(exclude_unset=True)} for one in found.best],
        "why_not": [{"what": one.what, "reason": one.reason} for one in found.why_not],
        "front": [row(one) for one in found.front],
        "evaluated": [row(one) for one in found.evaluated],
        "candidates": found.num_candidates,
        "pruned": found.num_pruned,
        "left": found.num_left,
        "refused": dict(found.refused),
    }
