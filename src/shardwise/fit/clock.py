"""When each action of a step begins and ends: the program that is executed, on a description of hardware. Pure.

[Note: what the clock simulates] One rank for each program: ranks with the same program do the same at the same time,
so that the cost does not grow with data parallelism. A rank has a stream on which it computes and streams beside it;
what orders them is [Note: what orders what] in `program/effects.py`, and actions of one stream run in their order. An
action that is issued begins when its stream is free, a wait joins, and everything else takes time on the stream that
computes. What runs at the same time shares: actions that use one link get equal parts of it, and while communication
runs beside computation both take `contention` times as long. So durations are known only as the simulation proceeds:
each item has the seconds that it would take alone, and rates change when one begins or ends.

[Note: periodic micro-batches] Each micro-batch runs the same program. Once one ends with nothing in flight, all later
ones take exactly what the next takes, and are not simulated one by one.

[Note: messages between stages] A message takes the time of its bytes on the link between the two ranks, from the end of
the op that makes it, beside whatever either does: messages share no links with collectives here. A receiver waits.
Gradients of parameters that several stages have are such messages too, before the norm.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path

from shardwise.errors import ProgramError
from shardwise.fit.hardware import Hardware
from shardwise.fit.operations import COPYING, Operation, Work, Worked, flops_of, work_of_blocks
from shardwise.fit.prices import Cost, Prices
from shardwise.plan.mesh import STAGE_AXIS, Mesh
from shardwise.program import Action, Block, Moment, Program, StepProgram, stay_as_made
from shardwise.program.effects import Effect
from shardwise.program.places import SPANS
from shardwise.program.schedule import Op
from shardwise.system.telemetry import ON_THE_WAY, STAGES, UNITS, write_trace
from shardwise.system.telemetry.timeline import HOST
from shardwise.system.units import format_seconds

COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened on a stream. Times are seconds since the step began.

    `text` is an action's, or of what was computed: `forward h.0`. `axis` is the mesh axis or tier of what is moved.
    `waited_for` is the text of what this had to wait for, during `waited_seconds` before `begin`.
    """

    stream: str
    text: str
    begin: float
    end: float
    axis: str = ""
    moment: str = ""
    waited_for: str = ""
    waited_seconds: float = 0.0


@dataclass(frozen=True)
class RankTimeline:
    """One step of one kind of rank. `rank` is one of them, `busy` and `exposed` are in seconds.

    `busy` is by stream. `exposed` is by mesh axis or tier: how long the computation stood still for it. `flops` are
    those of the model in a step, without recomputation, and `least_seconds` what they would take at the peak rate.
    """

    rank: int
    seconds: float
    events: tuple[Event, ...]
    busy: Mapping[str, float]
    exposed: Mapping[str, float]
    recompute_seconds: float
    update_seconds: float
    flops: float
    least_seconds: float
    num_repeated: int = 0
    """Micro-batches that went exactly as the last one in `events`, and are not in there."""


@dataclass(frozen=True)
class Timeline:
    """A step on all ranks; `ranks` has one of each kind: the stages of a pipeline in order, else a single one."""

    ranks: tuple[RankTimeline, ...]

    @property
    def step_seconds(self) -> float:
        """From one step to the next."""
        return max(one.seconds for one in self.ranks)

    @property
    def events(self) -> tuple[Event, ...]:
        """Those of the first kind of rank."""
        return self.ranks[0].events

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds that the computation waits, by mesh axis or tier; the mean of all ranks."""
        return self._mean(lambda one: one.exposed)

    @property
    def busy(self) -> dict[str, float]:
        """The share of the step in which each stream is busy; the mean of all ranks."""
        return {stream: seconds / self.step_seconds for stream, seconds in self._mean(lambda one: one.busy).items()}

    @property
    def bubble(self) -> float:
        """The share of the ranks' time that they wait for other stages of a pipeline."""
        return self.exposed.get(STAGE_AXIS, 0.0) / self.step_seconds if len(self.ranks) > 1 else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (Chowdhery et al., arXiv:2204.02311): the share of the peak rate that goes into the
        model, recomputation not counted."""
        return sum(one.least_seconds for one in self.ranks) / (len(self.ranks) * self.step_seconds)

    @property
    def computing_seconds(self) -> float:
        """Seconds in which the average rank computes, slowed down by what goes on beside it."""
        return self._mean(lambda one: one.busy).get(COMPUTE, 0.0)

    @property
    def update_seconds(self) -> float:
        """From the end of the last backward to the end of the step."""
        return max(one.update_seconds for one in self.ranks)

    @property
    def recompute_seconds(self) -> float:
        return sum(one.recompute_seconds for one in self.ranks) / len(self.ranks)

    def __str__(self) -> str:
        exposed = (f"{axis} {format_seconds(seconds)}" for axis, seconds in self.exposed.items() if seconds > 0)
        text = f"{format_seconds(self.step_seconds)} a step, MFU {self.mfu:.0%}"
        return f"{text}, waits for {', '.join(exposed)}" if any(self.exposed.values()) else text

    def as_chrome_trace(self) -> list[list[dict[str, object]]]:
        """The events of each kind of rank, in the format and on the tracks of `engine.timeline`."""
        return [list(_traced(one.events)) for one in self.ranks]

    def write(self, path: Path) -> None:
        """Write `as_chrome_trace` to a file for chrome://tracing and ui.perfetto.dev."""
        write_trace(path, self.as_chrome_trace())

    def _mean(self, of: Callable[[RankTimeline], Mapping[str, float]]) -> dict[str, float]:
        total: defaultdict[str, float] = defaultdict(float)
        for one in self.ranks:
            for key, seconds in of(one).items():
                total[key] += seconds / len(self.ranks)
        return total


@dataclass(frozen=True)
class RankProgram:
    """What one kind of rank does in a step.

    In a pipeline `row` are its ops in order, and `message_bytes` by stage those of the activations that it hands over:
    of this rank's stages, and of the stages before them where gradients have other sizes. `stages_of_units` has the
    stages that use each unit, needed where two ops of one micro-batch follow each other.
    """

    step: StepProgram
    work: Work
    rank: int = 0
    row: Sequence[Op] = ()
    message_bytes: Mapping[int, float] = field(default_factory=dict)
    stages_of_units: Mapping[str, Sequence[int]] = field(default_factory=dict)
    holders: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The pipeline ranks that have the parameters of a unit, where several have: an embedding tied to the head."""
    has_budget: bool = False
    """Whether the plan has one of device memory. Then a backward takes no large blocks from the heap of a process."""

    @property
    def backwards_use_heap(self) -> bool:
        """Whether on processors they take large blocks from there, if a forward is what came before: see [Note: blocks
        of a backward] in `system/heap.py`."""
        flats = (flat for unit in self.step.units for flat in unit.flats)
        return not self.has_budget and any(flat.trainable and not stay_as_made(flat) for flat in flats)


def time_ranks(
    programs: Sequence[RankProgram],
    hardware: Hardware,
    mesh: Mesh,
    *,
    num_micro_batches: int = 1,
    num_states: int = 2,
    keeps_events: bool = True,
) -> Timeline:
    """A step of one rank of each stage of a pipeline, in their order, or of one rank for all where there are no stages:
    `micro_batch` as often as gradients are accumulated, then `step`. See [Note: messages between stages].

    `hardware` is given with the ranks of a node (`Hardware.with_ranks`). `num_states` are tensors of a parameter's size
    that the optimizer keeps, for flat buffers that do not say how they are updated. Without `keeps_events` there are
    only sums, in less time. Raises `ProgramError` for an action or a computation without a price, naming it, and
    `ConfigError` for hardware without what the program uses.
    """
    # what a step leaves in flight the next one begins with, so that the second is as all later ones
    num_steps = 1 + any(_leaves_in_flight(one.step) for one in programs)
    ranks = [
        _Rank(one, hardware, mesh, len(programs), num_micro_batches, num_states, num_steps, keeps_events)
        for one in programs
    ]
    for rank in ranks:
        rank.alone = ranks[0].alone
    _run_together(ranks, [one.rank for one in programs], hardware)
    return Timeline(tuple(one.result() for one in ranks))


def _leaves_in_flight(step: StepProgram) -> bool:
    """Whether gathers or writes to a disk may go on behind a step."""
    return any(flat.gathers_behind_step or flat.updates_from_disk for unit in step.units for flat in unit.flats)


# -- ranks together ---------------------------------------------------------------------------------------

_Key = tuple[int, str, int, int]
"""A message: the number of the step, `F` or `B`, micro-batch, and the stage that made it. Of gradients that are added
up: the number of the step, the unit, and the pipeline ranks to and from which they go."""


@dataclass(frozen=True, slots=True)
class _Receive:
    """A rank waits for a message."""

    key: _Key


@dataclass(frozen=True, slots=True)
class _Meet:
    """A rank waits until all have come, at `now`."""

    now: float


_Asked = Generator["_Receive | _Meet", float, None]


def _run_together(ranks: Sequence[_Rank], numbers: Sequence[int], hardware: Hardware) -> None:
    """Run each rank until it needs what another has not sent, until all have ended."""
    arrivals: dict[_Key, float] = {}

    @cache
    def seconds(num_bytes: float, sender: int, receiver: int) -> float:
        return hardware.collective_seconds("send", num_bytes, tuple(sorted((sender, receiver))))

    def send(key: _Key, stage_on: int, now: float, num_bytes: float, sender: int) -> None:
        arrivals[key] = now + seconds(num_bytes, sender, numbers[stage_on % len(numbers)])

    running: list[tuple[_Rank, _Asked]] = []
    for rank in ranks:
        rank.send = send
        running.append((rank, rank.run()))
    asked: list[_Receive | _Meet | None] = []
    for _, program in running:
        asked.append(next(program, None))
    while any(one is not None for one in asked):
        if all(one is None or isinstance(one, _Meet) for one in asked):
            met = max(one.now for one in asked if isinstance(one, _Meet))
            answers: list[float | None] = [None if one is None else met for one in asked]
        else:
            answers = [arrivals.pop(one.key, None) if isinstance(one, _Receive) else None for one in asked]
            if all(answer is None for answer in answers):
                waiting = [
                    f"rank {rank.number} for {one.key}"
                    for (rank, _), one in zip(running, asked, strict=True)
                    if isinstance(one, _Receive)
                ]
                raise ProgramError(f"The pipeline never ends: waiting are {', '.join(waiting)}.")
        for place, answer in enumerate(answers):
            while answer is not None:
                try:
                    following = running[place][1].send(answer)
                except StopIteration:
                    asked[place] = None
                    break
                asked[place] = following
                answer = arrivals.pop(following.key, None) if isinstance(following, _Receive) else None


# -- one rank ---------------------------------------------------------------------------------------------


class _Flight:
    """An action that runs beside the computation. `left` are the seconds that it would still take alone."""

    __slots__ = ("axis", "begin", "end", "left", "moment", "stream", "text", "uses")

    def __init__(self, stream: str, text: str, moment: str, cost: Cost) -> None:
        self.stream, self.text, self.moment = stream, text, moment
        self.left, self.axis = cost.seconds, cost.axis
        self.uses = stream, cost.links
        self.begin: float | None = None
        self.end: float | None = None


_USES = attrgetter("uses")
"""The stream of a flight, and its links."""
_Rates = tuple[float, tuple[float, ...]]
"""How fast the computing stream and each flight go on, compared with alone."""


class _Streams:
    """The streams of one rank in time: see [Note: what the clock simulates]."""

    def __init__(self, contention: float, *, copies_contend: bool) -> None:
        self.now = 0.0
        self.landed: list[_Flight] = []
        self._queues: dict[str, deque[_Flight]] = {}
        self._num_flying = 0
        self._contention = contention
        self._copies_contend = copies_contend
        self._known: dict[object, _Rates] = {}
        """By what goes on, which is the same again and again."""

    @property
    def is_idle(self) -> bool:
        return not self._num_flying

    def issue(self, flight: _Flight) -> None:
        self._num_flying += 1
        self._queues.setdefault(flight.stream, deque()).append(flight)

    def compute(self, seconds: float, links: tuple[str, ...] = ()) -> None:
        """Let the computing stream do what takes `seconds` alone; with `links`, it is communication itself."""
        if not self._num_flying:
            self.now += seconds
        elif seconds > 0:
            self._go_on(seconds, None, links)

    def until(self, flight: _Flight) -> None:
        """Let the computing stream wait for `flight`."""
        if flight.end is None:
            self._go_on(float("inf"), flight, ())

    def sleep_until(self, time: float) -> None:
        """Let the computing stream wait for what comes from elsewhere at `time`."""
        while self.now < time and self._num_flying:
            heads = [queue[0] for queue in self._queues.values() if queue]
            _, rates = self._rates(heads, None)
            step = min(time - self.now, *(head.left / rate for head, rate in zip(heads, rates, strict=True)))
            self._advance(step, heads, rates)
        self.now = max(self.now, time)

    def _go_on(self, left: float, target: _Flight | None, links: tuple[str, ...]) -> None:
        """Until `left` seconds of the computing stream are done, or `target` has landed."""
        computes = target is None
        while True:
            if not self._num_flying:
                if computes:
                    self.now += left
                return
            heads = [queue[0] for queue in self._queues.values() if queue]
            rate, rates = self._rates(heads, links if computes else None)
            step = left / rate if computes else float("inf")
            for head, its in zip(heads, rates, strict=True):
                step = min(step, head.left / its)
            self._advance(step, heads, rates)
            if computes:
                left -= step * rate
                if left <= 1e-15:
                    return
            elif target is not None and target.end is not None:
                return

    def _rates(self, heads: Sequence[_Flight], links: tuple[str, ...] | None) -> _Rates:
        """By how many use their links, and whether the computing stream computes (`links` are `()`), communicates, or
        waits (`None`)."""
        key = links, *map(_USES, heads)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._rates_of(links, *map(_USES, heads))
        return found

    def _rates_of(self, links: tuple[str, ...] | None, *flying: tuple[str, tuple[str, ...]]) -> _Rates:
        users = Counter(link for used in (links or (), *(used for _, used in flying)) for link in used)
        own = 0.0 if links is None else 1.0 / max((users[link] for link in links), default=1)
        rates = [1.0 / max((users[link] for link in used), default=1) for _, used in flying]
        contending = [bool(used) and (self._copies_contend or stream not in COPYING) for stream, used in flying]
        if links == () and self._contention > 1 and any(contending):
            own /= self._contention
            rates = [rate / self._contention if slow else rate for rate, slow in zip(rates, contending, strict=True)]
        return own, tuple(rates)

    def _advance(self, step: float, heads: Sequence[_Flight], rates: Sequence[float]) -> None:
        for head in heads:
            if head.begin is None:
                head.begin = self.now
        self.now += step
        for head, rate in zip(heads, rates, strict=True):
            head.left -= step * rate
            if head.left <= 1e-15:
                head.end = self.now
                self._queues[head.stream].popleft()
                self._num_flying -= 1
                self.landed.append(head)


_Sums = tuple[float, float, float, float, dict[str, float], dict[str, float]]
"""Seconds computed and computed again, FLOPs and their least seconds, and seconds by axis and by stream."""


class _Rank:
    """Runs one rank's program."""

    def __init__(
        self,
        program: RankProgram,
        hardware: Hardware,
        mesh: Mesh,
        num_ranks: int,
        num_micro_batches: int,
        num_states: int,
        num_steps: int,
        keeps_events: bool,
    ) -> None:
        self.program, self.hardware, self.number = program, hardware, program.rank
        self.send: Callable[[_Key, int, float, float, int], None] = _send_nowhere
        self._num_ranks = num_ranks
        self._times = 1 if program.step.is_over_schedule else num_micro_batches
        num_added = max(num_micro_batches, *(1 + op.micro_batch for op in program.row), 1)
        self._prices = Prices(
            program.step, hardware, mesh, rank=program.rank, num_states=num_states, num_micro_batches=num_added
        )
        self._streams = _Streams(hardware.contention, copies_contend=hardware.is_processor)
        self._made: dict[tuple[str, str], _Flight] = {}
        """The latest flight that makes each buffer of each flat buffer."""
        self._evicted: list[_Flight] = []
        self._fetched: list[_Flight] = []
        """Copies of activations that have not been waited for."""
        self._keeps_events = keeps_events
        self._work = work_of_blocks(program.step.micro_batch, program.work)
        self._uses_heap = hardware.is_processor and program.backwards_use_heap
        self._is_behind_forward = True
        """Whether the backward that runs, or the next one, follows a forward at once."""
        self._timed: dict[tuple[int, bool], _Timed] = {}
        """By the identity of what is in `_work`, which lives as long as this, and whether blocks come from the heap."""
        self.alone: dict[object, _Alone] = {}
        """By the identity of operations, which all ranks that are timed together, and have this in common, keep alive:
        equal blocks have the same."""
        self._by_unit = {unit.name: unit for unit in program.step.units}
        stages = max((op.stage for op in program.row), default=0) // num_ranks + 1
        self._last_stage = stages * num_ranks - 1
        self._num_steps = num_steps
        self._number = 0

    def _begin_step(self) -> None:
        self._start = self._streams.now
        self._streams.landed.clear()
        self._events: list[Event] = []
        self._exposed: defaultdict[str, float] = defaultdict(float)
        self._computed = self._recomputed = self._flops = self._least = self._updated = 0.0
        self._repeated: list[tuple[float, dict[str, float]]] = []
        self._num_repeated = 0
        self._stream_seconds: defaultdict[str, float] = defaultdict(float)

    def run(self) -> _Asked:
        """Each step, of which the last counts."""
        for number in range(self._num_steps):
            self._number = number
            self._begin_step()
            yield from self._step()

    def _step(self) -> _Asked:
        step = self.program.step
        work = self._work
        if step.is_over_schedule:
            yield from self._schedule(step.micro_batch, work)
        else:
            yield from self._micro_batches(step.micro_batch, work)
        begun = self._streams.now
        for block in step.step:
            agreed = [place for place, action in enumerate(block.actions) if action.verb == "agree"]
            if block.moment.edge == "before":  # what ranks agree on is the norm of gradients that are complete
                place = agreed[0] if agreed else len(block.actions)
                yield from self._act(block._replace(actions=block.actions[:place]))
                yield from self._add_up(str(block.moment))
                self._compute(self._prices.norm(), "gradient norm", str(block.moment))
                yield from self._act(block._replace(actions=block.actions[place:]))
                continue
            if block.moment.edge == "after":
                self._compute(self._prices.update(), "optimizer", str(block.moment))
            yield from self._act(block)
        self._updated = self._streams.now - begun

    def _micro_batches(self, program: Program, work: Sequence[Worked]) -> _Asked:
        """See [Note: periodic micro-batches]."""
        for number in range(self._times):
            begun, before, was_idle = self._streams.now, self._sums(), self._streams.is_idle and number > 0
            for block, worked in zip(program, work, strict=True):
                self._walk(block, worked)
                if block.actions:
                    yield from self._act(block)
            if was_idle and self._streams.is_idle:
                self._num_repeated = self._times - number - 1
                self._repeat(begun, before)
                return

    def _schedule(self, program: Program, work: Sequence[Worked]) -> _Asked:
        """The ops of a pipeline's row, each after its message, and the message that it makes."""
        place = 0
        for op in self.program.row or ():
            end = self._end_of(op, program, place)
            source = _source_of(op, self._last_stage)
            if source is not None:
                yield from self._receive((self._number, *source), f"wait {op.kind}{op.micro_batch}@{op.stage}")
            begun = self._streams.now
            for block, worked in zip(program[place:end], work[place:end], strict=True):
                self._walk(block, worked)
                if block.actions:
                    yield from self._act(block)
            self._is_behind_forward = op.kind == "F"
            if self._keeps_events:
                self._note(STAGES, f"{op.kind}{op.micro_batch}@{op.stage}", begun)
            place = end
            self._send(op)
        for block, worked in zip(program[place:], work[place:], strict=True):
            self._walk(block, worked)
            yield from self._act(block)

    def _end_of(self, op: Op, program: Program, place: int) -> int:
        """Where the blocks of `op` end, which begin at `place`."""
        stages = self.program.stages_of_units
        while place < len(program):
            moment = program[place].moment
            is_forward = moment.phase == "forward"
            if moment.micro_batch != op.micro_batch or is_forward != (op.kind == "F"):
                return place
            if moment.unit and op.stage not in stages.get(moment.unit, (op.stage,)):
                return place
            place += 1
            if not moment.unit:  # the end of this backward
                return place
        return place

    def _receive(self, key: _Key, text: str) -> _Asked:
        begun = self._streams.now
        arrived = yield _Receive(key)
        self._streams.sleep_until(arrived)
        waited = self._streams.now - begun
        if waited > 0:
            self._exposed[STAGE_AXIS] += waited
            self._note(STAGES, text, begun, STAGE_AXIS)

    def _send(self, op: Op) -> None:
        kind, batch, stage = op
        if kind == "F" and stage < self._last_stage:
            num_bytes = self.program.message_bytes.get(stage)
            to = stage + 1
        elif kind in "BI" and stage:
            num_bytes = self.program.message_bytes.get(stage - 1, self.program.message_bytes.get(stage))
            to = stage - 1
        else:
            return
        if num_bytes is None:
            raise ProgramError(
                f"The message after {kind}{batch}@{stage} has no price: message_bytes says nothing of stage {stage}."
            )
        self.send(
            (self._number, "F" if kind == "F" else "B", batch, stage), to, self._streams.now, num_bytes, self.number
        )

    def _add_up(self, moment: str) -> _Asked:
        """Each rank sends its gradient to all others that have the parameter, and adds up what comes: see [Note: shared
        parameters] in `parallel/pipeline/tied_gradients.py`."""
        line = self._prices.ranks_along(STAGE_AXIS) if self.program.holders else ()
        sums = []
        for unit, holders in self.program.holders.items():
            num_bytes = self._prices.due_bytes(self._by_unit[unit].flats)
            others = [place for place in holders if line[place] != self.number]
            own = line.index(self.number)
            self._compute(self.hardware.flat_seconds(2 * num_bytes), f"copy gradients {unit}", moment)
            for count, place in enumerate(others, start=1):  # one after the other, on one link
                if self._num_ranks > 1:
                    self.send(
                        (self._number, unit, place, own), place, self._streams.now, count * num_bytes, self.number
                    )
                else:
                    pair = tuple(sorted((self.number, line[place])))
                    seconds = self.hardware.collective_seconds("send", num_bytes, pair)
                    cost = Cost(seconds, self.hardware.links_of(pair), STAGE_AXIS)
                    self._communicate(f"exchange gradients {unit}", cost, moment)
            sums.append(
                (unit, [(self._number, unit, own, place) for place in others], (3 * len(others) + 2) * num_bytes)
            )
        for unit, keys, num_bytes in sums:
            for key in keys if self._num_ranks > 1 else ():
                yield from self._receive(key, f"wait gradients {unit}")
            self._compute(self.hardware.flat_seconds(num_bytes), f"add gradients {unit}", moment)

    # -- blocks -----------------------------------------------------------------------------------------

    def _walk(self, block: Block, worked: Worked) -> None:
        """What is computed before a moment of a pass."""
        from_heap = self._uses_heap and self._is_behind_forward and block.moment.phase != "forward"
        key = id(worked), from_heap
        timed = self._timed.get(key)
        if timed is None:
            timed = self._timed[key] = self._time(worked, block.moment, from_heap=from_heap)
        moment = str(block.moment) if self._keeps_events else ""
        if timed.parts and self._fetched:
            self._await_all(self._fetched, moment)
        if timed.fetched:
            self._fetched += self._copied(timed.fetched, "fetch", moment)
        for seconds, links, axis in timed.parts:
            begun = self._streams.now
            self._streams.compute(seconds, links)
            if axis:
                self._exposed[axis] += self._streams.now - begun
            else:
                self._computed += self._streams.now - begun
            if self._keeps_events:
                has_ended = worked.moment.edge == "after" and worked.moment.unit
                text = _text_of(worked.moment if has_ended else block.moment, axis)
                self._note(COMPUTE, text, begun, axis, moment)
        self._flops += timed.flops
        self._least += timed.least
        self._recomputed += timed.recomputed
        if timed.evicted:  # memory of the last unit is freed behind its copy
            self._await_all(self._evicted, moment)
            self._evicted += self._copied(timed.evicted, "evict", moment)

    def _copied(self, costs: Sequence[Cost], verb: str, moment: str) -> list[_Flight]:
        """Issue copies of activations to or from another tier."""
        flights = [_Flight(verb, f"{verb} activations {cost.axis}", moment, cost) for cost in costs]
        for flight, cost in zip(flights, costs, strict=True):
            self._stream_seconds[verb] += cost.seconds
            self._streams.issue(flight)
        return flights

    def _await_all(self, flights: list[_Flight], moment: str) -> None:
        for flight in flights:
            self._await(flight, f"wait {flight.text}", moment)
        flights.clear()

    def _time(self, worked: Worked, moment: Moment, *, from_heap: bool) -> _Timed:
        prices = self._prices
        axes = sorted({one.axis for one in worked.operations if one.communicates})
        spread = [self.hardware.spread_of(prices.ranks_along(axis)) for axis in axes]
        key = id(worked.operations), id(worked.recomputed), from_heap, *axes, *spread
        alone = self.alone.get(key)
        if alone is None:
            alone = self.alone[key] = self._time_alone(worked, from_heap=from_heap)
        seconds = alone.seconds
        if moment.edge == "after" and moment.unit and moment.leaves_gradients:
            seconds += prices.gradients_left(self._by_unit[moment.unit].flats)
        parts: list[tuple[float, tuple[str, ...], str]] = [(seconds, (), "")] if seconds else []
        parts += [
            (moved, self.hardware.links_of(prices.ranks_along(axis)), axis)
            for axis, moved in alone.by_axis.items()
            if moved
        ]
        return _Timed(tuple(parts), alone.flops, alone.least, alone.recomputed, alone.evicted, alone.fetched)

    def _time_alone(self, worked: Worked, *, from_heap: bool) -> _Alone:
        hardware, prices = self.hardware, self._prices
        seconds, by_axis = seconds_alone(worked.operations, hardware, prices.ranks_along, from_heap=from_heap)
        again = hardware.computing_seconds(
            [one for one in worked.recomputed if not one.communicates and not one.copies], from_heap=from_heap
        )
        useful = [one for one in worked.operations if one.flops and not one.communicates and not one.copies]
        least = sum(one.flops / hardware.peak(one.dtype) for one in useful)
        least_again = sum(one.flops / hardware.peak(one.dtype) for one in worked.recomputed if one.flops)
        flops = flops_of(worked.operations) - flops_of(worked.recomputed)
        moved_by = {verb: prices.activations(worked.operations, verb) for verb in COPYING}
        return _Alone(seconds, by_axis, flops, least - least_again, again, moved_by["evict"], moved_by["fetch"])

    def _act(self, block: Block) -> _Asked:
        moment = str(block.moment) if self._keeps_events else ""
        for action in block.actions:
            cost, effect = self._prices.of(action), action.effect
            if effect.waits is not None:
                self._wait(action, effect, moment)
                if cost.computing:
                    self._compute(cost.computing, self._text(action), moment)
            elif action.stream != COMPUTE or action.subject == "states":
                self._compute(cost.computing, self._text(action), moment)
                self._issue(action, effect, cost, moment)
            elif action.over == STAGE_AXIS and self._num_ranks > 1:
                yield from self._meet(action, cost, moment)
            else:
                self._compute(cost.computing, self._text(action), moment)
                self._communicate(self._text(action), cost, moment)

    def _wait(self, action: Action, effect: Effect, moment: str) -> None:
        flight = self._made.get((action.flat, effect.waits or ""))
        if flight is not None and flight.end is None:
            self._await(flight, self._text(action), moment)

    def _await(self, flight: _Flight, text: str, moment: str) -> None:
        begun = self._streams.now
        self._streams.until(flight)
        waited = self._streams.now - begun
        if waited > 0:
            self._exposed[flight.axis] += waited
            self._note(COMPUTE, text, begun, flight.axis, moment, flight.text, waited)

    def _issue(self, action: Action, effect: Effect, cost: Cost, moment: str) -> None:
        stream = action.stream if action.stream != COMPUTE else action.verb
        flight = _Flight(stream, self._text(action), moment, cost)
        self._stream_seconds[stream] += cost.seconds
        self._streams.issue(flight)
        if effect.makes is not None:
            self._made[action.flat, effect.makes] = flight
        if (action.verb, action.subject) == ("fetch", "states"):
            self._await(flight, f"wait {action.transfer}states", moment)

    def _communicate(self, text: str, cost: Cost, moment: str) -> None:
        """Communication that the computing stream does itself."""
        if cost.seconds:
            begun = self._streams.now
            self._streams.compute(cost.seconds, cost.links or ("",))
            self._exposed[cost.axis] += self._streams.now - begun
            self._note(COMPUTE, text, begun, cost.axis, moment)

    def _meet(self, action: Action, cost: Cost, moment: str) -> _Asked:
        begun = self._streams.now
        met = yield _Meet(begun)
        self._streams.sleep_until(met)
        waited = self._streams.now - begun
        self._streams.compute(cost.seconds, cost.links or ("",))
        self._exposed[STAGE_AXIS] += self._streams.now - begun
        others = "other stages" if waited else ""
        self._note(COMPUTE, self._text(action), begun + waited, STAGE_AXIS, moment, others, waited)

    def _compute(self, seconds: float, text: str, moment: str) -> None:
        if seconds:
            begun = self._streams.now
            self._streams.compute(seconds)
            self._computed += self._streams.now - begun
            self._note(COMPUTE, text, begun, "", moment)

    def _text(self, action: Action) -> str:
        return str(action) if self._keeps_events else ""

    def _note(
        self,
        stream: str,
        text: str,
        begun: float,
        axis: str = "",
        moment: str = "",
        waited_for: str = "",
        waited_seconds: float = 0.0,
    ) -> None:
        """Something on a stream that `begun` then and ends now."""
        if self._keeps_events:
            begin, end = begun - self._start, self._streams.now - self._start
            self._events.append(Event(stream, text, begin, end, axis, moment, waited_for, waited_seconds))

    # -- sums -------------------------------------------------------------------------------------------

    def _sums(self) -> _Sums:
        return (
            self._computed,
            self._recomputed,
            self._flops,
            self._least,
            dict(self._exposed),
            dict(self._stream_seconds),
        )

    def _repeat(self, begun: float, before: _Sums) -> None:
        """Count the last micro-batch, which began at `begun` with the sums `before`, as often as it is repeated."""
        more = self._num_repeated
        computed, recomputed, flops, least, exposed, streams = before
        self._computed += more * (self._computed - computed)
        self._recomputed += more * (self._recomputed - recomputed)
        self._flops += more * (self._flops - flops)
        self._least += more * (self._least - least)
        for axis, seconds in list(self._exposed.items()):
            self._exposed[axis] = seconds + more * (seconds - exposed.get(axis, 0.0))
        for stream, seconds in list(self._stream_seconds.items()):
            self._stream_seconds[stream] = seconds + more * (seconds - streams.get(stream, 0.0))
        self._streams.now += more * (self._streams.now - begun)

    def result(self) -> RankTimeline:
        events = list(self._events)
        if self._keeps_events:
            for flight in self._streams.landed:
                begin, end = flight.begin or 0.0, flight.end or 0.0
                events.append(
                    Event(
                        flight.stream, flight.text, begin - self._start, end - self._start, flight.axis, flight.moment
                    )
                )
            events.sort(key=lambda event: event.begin)
        return RankTimeline(
            self.number,
            self._streams.now - self._start,
            tuple(events),
            {COMPUTE: self._computed, **self._stream_seconds},
            {axis: seconds for axis, seconds in self._exposed.items() if seconds},
            self._recomputed,
            self._updated,
            self._flops,
            self._least,
            self._num_repeated,
        )


def seconds_alone(
    operations: Sequence[Operation],
    hardware: Hardware,
    ranks_along: Callable[[str], Sequence[int]],
    *,
    from_heap: bool = False,
) -> tuple[float, dict[str, float]]:
    """What `operations` take with nothing beside them: seconds that they compute, and by axis those in which the
    computing stream waits for their messages. `ranks_along` says which ranks communicate along an axis, `from_heap`
    whence blocks of memory come (`Hardware.block_seconds`)."""
    computing = [one for one in operations if not one.communicates and not one.copies]
    by_axis: defaultdict[str, float] = defaultdict(float)
    beside: defaultdict[str, float] = defaultdict(float)
    for one in operations:
        if one.communicates:
            sums, ranks = beside if one.overlaps else by_axis, ranks_along(one.axis)
            sums[one.axis] += one.kernels * hardware.collective_seconds(one.kind, one.num_bytes, ranks)
    launched = sum(one.kernels for one in operations if one.communicates)
    seconds = hardware.computing_seconds(computing, sum(by_axis.values()), launched, from_heap=from_heap)
    for axis, moved in beside.items():
        hidden = min(seconds, moved)
        seconds += hidden * (hardware.contention - 1)
        by_axis[axis] += moved - hidden
    return seconds, by_axis


@dataclass(frozen=True, slots=True)
class _Alone:
    """Operations, whatever unit they are of: seconds that they compute, and that they wait for messages by axis; sums
    as in `_Timed`."""

    seconds: float
    by_axis: Mapping[str, float]
    flops: float
    least: float
    recomputed: float
    evicted: tuple[Cost, ...]
    fetched: tuple[Cost, ...]


@dataclass(frozen=True, slots=True)
class _Timed:
    """What is computed before a moment: seconds of the computing stream, with the links and the axis of those that are
    communication; and sums."""

    parts: tuple[tuple[float, tuple[str, ...], str], ...]
    flops: float
    least: float
    recomputed: float
    evicted: tuple[Cost, ...] = ()
    fetched: tuple[Cost, ...] = ()


_ACTIVATIONS = ("evict activations", "fetch activations")


def _text_of(moment: Moment, axis: str) -> str:
    """What is computed before `moment`; with `axis`, what is sent along it meanwhile."""
    is_of_unit = moment.edge == "after" and moment.unit
    text = f"{SPANS[moment.phase]} {moment.unit}" if is_of_unit else f"until {moment}"
    return f"{text}, along {axis}" if axis else text


def _send_nowhere(*_: object) -> None:
    raise ProgramError("A rank sends a message, but it is timed alone.")


def _source_of(op: Op, last_stage: int) -> tuple[str, int, int] | None:
    """The message that `op` waits for."""
    kind, batch, stage = op
    if kind == "F":
        return ("F", batch, stage - 1) if stage else None
    return ("B", batch, stage + 1) if kind in "BI" and stage < last_stage else None


def _traced(events: Sequence[Event]) -> Iterator[dict[str, object]]:
    for event in events:
        begin, length = event.begin * 1e6, (event.end - event.begin) * 1e6
        about: dict[str, object] = {"moment": event.moment}
        if event.waited_for:
            about["waited_for"] = event.waited_for
        name, track = event.text, STAGES
        if event.stream == COMPUTE:
            is_of_unit = event.text.partition(" ")[0] in SPANS.values() and not event.axis
            track = UNITS if is_of_unit else HOST
        elif event.stream != STAGES:
            track, about["action"] = ON_THE_WAY, event.text
            name = event.text if event.text.startswith(_ACTIVATIONS) else Action.parse(event.text).transfer
        if track == HOST:
            yield {"ph": "X", "cat": HOST, "name": name, "ts": begin, "dur": length, "args": about}
            continue
        yield {"ph": "b", "cat": track, "name": name, "id": name, "ts": begin, "args": about}
        yield {"ph": "e", "cat": track, "name": name, "id": name, "ts": begin + length}
