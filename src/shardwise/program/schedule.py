"""Pipeline schedules: which rank computes which stage of which micro-batch, and in which order.

A model is split into `num_stages` stages over `num_ranks` ranks: stage `s` is on rank `s % num_ranks`. A micro-batch
goes forward through all stages and backward through them again. A schedule gives the order on each rank, not the times:
a rank starts its next op as soon as the inputs have arrived. `timed` computes when that is.

Its text parses back, and has a line for each rank:

    1f1b: 2 ranks, 2 stages, 3 micro-batches
    rank 0: F0 F1 B0 F2 B1 B2
    rank 1: F0 B0 F1 B1 F2 B2

`F2` is the forward of micro-batch 2, `B2` its backward. Where a rank has several stages the stage follows: `F2@3`. A
backward in two parts is `I2`, the gradient of the stage's input, for which the previous stage waits, and `W2`, the
gradients of its parameters, for which no stage waits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, cast

from shardwise.errors import ConfigError, ProgramError, nearest
from shardwise.plan import Pipeline, Plan

OpKind = Literal["F", "B", "I", "W"]
UNIT_COSTS: Mapping[OpKind, float] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""A backward takes about twice its forward: gradients of the input, and of the parameters."""
_FORWARD_BACKWARD: tuple[OpKind, OpKind] = ("F", "B")
_OP = re.compile(r"([FBIW])(\d+)(?:@(\d+))?")
_HEAD = re.compile(r"(\S+): (\d+) ranks, (\d+) stages, (\d+) micro-batches")


class Op(NamedTuple):
    """One forward or backward of one micro-batch through one stage."""

    kind: OpKind
    micro_batch: int
    stage: int


@dataclass(frozen=True)
class Schedule:
    """The order of ops on every rank; `rows[rank]` are those of one."""

    name: str
    num_ranks: int
    num_stages: int
    num_micro_batches: int
    rows: tuple[tuple[Op, ...], ...]

    def __str__(self) -> str:
        counts = f"{self.num_ranks} ranks, {self.num_stages} stages, {self.num_micro_batches} micro-batches"
        rows = (f"rank {rank}: " + " ".join(map(self.text_of, row)) for rank, row in enumerate(self.rows))
        return "\n".join((f"{self.name}: {counts}", *rows)) + "\n"

    def text_of(self, op: Op) -> str:
        """`F2`, or `F2@3` where ranks have several stages."""
        at = f"@{op.stage}" if self.num_stages > self.num_ranks else ""
        return f"{op.kind}{op.micro_batch}{at}"


def parse_schedule(text: str) -> Schedule:
    """The schedule that `str` printed. Raises `ProgramError` for other text; does not check the schedule as `timed`
    does."""
    head, *lines = text.strip().splitlines() or [""]
    found = _HEAD.fullmatch(head.strip())
    if found is None:
        raise ProgramError(
            f"{head!r} is not the head of a schedule, such as '1f1b: 2 ranks, 2 stages, 4 micro-batches'."
        )
    name, (num_ranks, num_stages, num_micro_batches) = found[1], map(int, found.groups()[1:])
    rows = []
    for rank, line in enumerate(lines):
        start, _, ops = line.partition(":")
        if start.strip() != f"rank {rank}":
            raise ProgramError(f"Line {rank + 2} of the schedule is {line!r}; it should begin with 'rank {rank}:'.")
        rows.append(tuple(_parsed(word, rank) for word in ops.split()))
    return Schedule(name, num_ranks, num_stages, num_micro_batches, tuple(rows))


def _parsed(word: str, rank: int) -> Op:
    found = _OP.fullmatch(word)
    if found is None:
        raise ProgramError(f"{word!r} is not an op of a schedule, such as F0, B3 or F2@5.")
    return Op(cast(OpKind, found[1]), int(found[2]), rank if found[3] is None else int(found[3]))


# -- the schedules ----------------------------------------------------------------------------------------


def gpipe(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """All forwards, then all backwards (Huang et al., arXiv:1811.06965). Holds every micro-batch's activations."""
    _require_one_chunk("gpipe", num_chunks)
    rows = tuple(
        tuple(Op(kind, batch, rank) for kind in _FORWARD_BACKWARD for batch in range(num_micro_batches))
        for rank in range(num_ranks)
    )
    return Schedule("gpipe", num_ranks, num_ranks, num_micro_batches, rows)


def one_f_one_b(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """Forwards and backwards in turn once the pipeline is full (Narayanan et al., PipeDream-Flush, arXiv:2006.09503).
    As long as GPipe, but rank r holds the activations of at most `num_ranks - r` micro-batches."""
    _require_one_chunk("1f1b", num_chunks)
    rows = []
    for rank in range(num_ranks):
        forwards = [Op("F", batch, rank) for batch in range(num_micro_batches)]
        backwards = [Op("B", batch, rank) for batch in range(num_micro_batches)]
        rows.append(_in_turn(forwards, backwards, num_ranks - rank - 1))
    return Schedule("1f1b", num_ranks, num_ranks, num_micro_batches, tuple(rows))


def interleaved(num_ranks: int, num_micro_batches: int, num_chunks: int = 2) -> Schedule:
    """1F1B with `num_chunks` stages on every rank, assigned round-robin (Narayanan et al., arXiv:2104.04473).

    The bubble is divided by `num_chunks`, the number of messages multiplied by it. Micro-batches go in equal rounds of
    `num_ranks` or more (as in torch's `ScheduleInterleaved1F1B`); fewer than that are one round.
    """
    num_rounds = max(1, num_micro_batches // num_ranks)
    if num_micro_batches % num_rounds:
        raise ConfigError(
            f"The interleaved schedule takes micro-batches in equal rounds of {num_ranks} or more, one for each "
            f"pipeline rank, but accumulate is {num_micro_batches}. Make it a multiple of {num_ranks}, or take "
            f"schedule 1f1b."
        )
    size = num_micro_batches // num_rounds
    rows = []
    for rank in range(num_ranks):
        rounds = range(0, num_micro_batches, size)
        inside = [(chunk, first + place) for first in rounds for chunk in range(num_chunks) for place in range(size)]
        forwards = [Op("F", batch, chunk * num_ranks + rank) for chunk, batch in inside]
        backwards = [Op("B", batch, (num_chunks - 1 - chunk) * num_ranks + rank) for chunk, batch in inside]
        ahead = (num_ranks - rank - 1) * 2 + (num_chunks - 1) * size
        rows.append(_in_turn(forwards, backwards, ahead if num_chunks > 1 else num_ranks - rank - 1))
    return Schedule("interleaved", num_ranks, num_chunks * num_ranks, num_micro_batches, tuple(rows))


def zero_bubble(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """ZB-H1 (Qi et al., arXiv:2401.10241): 1F1B with each backward in two parts.

    A stage first computes the gradient of its input (`I`) and sends it. Rank r computes the gradients of its parameters
    (`W`) r micro-batches later, so that every rank holds the activations of `num_ranks` micro-batches, as rank 0 does
    under 1F1B, and no rank waits for weight gradients. With equal costs the bubble is a third of that of 1F1B.

    On rank 0, whose input's gradient nobody awaits, the two follow each other, and are one backward (`B`): to put
    weight gradients aside takes time of its own, 18 of 305 ms in a stage of four small blocks.
    """
    _require_one_chunk("zb-h1", num_chunks)
    rows = []
    for rank in range(num_ranks):
        ahead = min(num_ranks - rank, num_micro_batches)
        row = [Op("F", batch, rank) for batch in range(ahead)]
        for batch in range(num_micro_batches):
            row.append(Op("I" if rank else "B", batch, rank))
            row += [Op("W", batch - rank, rank)] if 0 < rank <= batch else []
            row += [Op("F", batch + ahead, rank)] if batch + ahead < num_micro_batches else []
        row += [Op("W", batch, rank) for batch in range(max(0, num_micro_batches - rank), num_micro_batches)]
        rows.append(tuple(row))
    return Schedule("zb-h1", num_ranks, num_ranks, num_micro_batches, tuple(rows))


@dataclass(frozen=True)
class Kind:
    """A schedule by name: how it is made, and what a search has to know before it makes one.

    `chunks` are the stages on each rank with which it is worth trying: none of a schedule that is as long as another
    one, and holds more. `waits` is the least time that a rank waits in a step for each other rank of the pipeline, as a
    share of the forward and backward of a micro-batch through one of its stages.
    """

    make: Callable[..., Schedule]
    chunks: tuple[int, ...]
    waits: float
    has_rounds: bool = False
    """Micro-batches go in rounds of as many as there are ranks; others are not worth trying."""
    usual_chunks: int = 1
    """The stages on each rank if a plan does not say."""
    fills_first: bool = False
    """Whether all forwards of a step come before its first backward."""
    splits_backward: bool = False
    """Whether gradients of parameters are computed apart from those of a stage's input."""

    def takes(self, num_ranks: int, num_micro_batches: int) -> bool:
        return not self.has_rounds or num_micro_batches % num_ranks == 0


SCHEDULES: Mapping[str, Kind] = {
    "gpipe": Kind(gpipe, (), 1, fills_first=True),
    "1f1b": Kind(one_f_one_b, (1,), 1),
    "interleaved": Kind(interleaved, (2,), 1, has_rounds=True, usual_chunks=2),
    "zb-h1": Kind(zero_bubble, (1,), 1 / 3, splits_backward=True),
}


@lru_cache(maxsize=64)
def schedule_for(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """The schedule called `name`, checked. Raises `ConfigError` for an unknown one, or for sizes that it cannot
    have."""
    if name not in SCHEDULES:
        raise ConfigError(f"There is no pipeline schedule {name!r}. {nearest(name, SCHEDULES)}")
    schedule = SCHEDULES[name].make(num_ranks, num_micro_batches, num_chunks)
    timed(schedule)
    return schedule


def schedule_of(plan: Plan, num_ranks: int) -> Schedule:
    """The schedule that a plan asks for, on `num_ranks` pipeline ranks."""
    return schedule_for(plan.pipeline.schedule, num_ranks, plan.accumulate, chunks_of(plan.pipeline))


def chunks_of(asked: Pipeline) -> int:
    """The stages on each rank that a plan asks for, or gets without asking."""
    return asked.virtual_stages or SCHEDULES[asked.schedule].usual_chunks


def schedule_of_calls(num_ranks: int, num_stages: int, num_calls: int, num_parts: int = 1) -> Schedule:
    """What calls of the model by a loop run, each followed by its backward. A call has `num_parts` micro-batches: all
    of them go through a stage before the next of the same rank, and back through them in the opposite order."""
    rows = []
    for rank in range(num_ranks):
        there = range(rank, num_stages, num_ranks)
        calls = (range(first, first + num_parts) for first in range(0, num_calls * num_parts, num_parts))
        row = [
            Op(kind, batch, stage)
            for call in calls
            for kind in _FORWARD_BACKWARD
            for stage in (there if kind == "F" else reversed(there))
            for batch in call
        ]
        rows.append(tuple(row))
    return Schedule("calls", num_ranks, num_stages, num_calls * num_parts, tuple(rows))


def _require_one_chunk(name: str, num_chunks: int) -> None:
    if num_chunks != 1:
        raise ConfigError(
            f"The schedule {name} has one stage for each rank, but virtual_stages is {num_chunks}. Leave it out, or "
            f"take schedule interleaved."
        )


def _in_turn(forwards: Sequence[Op], backwards: Sequence[Op], num_ahead: int) -> tuple[Op, ...]:
    """`num_ahead` forwards, then forwards and backwards in turn, then the remaining backwards."""
    ahead = min(num_ahead, len(forwards))
    steady = [op for pair in zip(forwards[ahead:], backwards, strict=False) for op in pair]
    return (*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :])


# -- what follows from a schedule -------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """When each op of a schedule runs if messages take no time: `spans[rank]`, as (op, start, stop)."""

    spans: tuple[tuple[tuple[Op, float, float], ...], ...]

    @property
    def length(self) -> float:
        return max(stop for row in self.spans for _, _, stop in row)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time that they spend waiting."""
        busy = sum(stop - start for row in self.spans for _, start, stop in row)
        return 1 - busy / (len(self.spans) * self.length)


def unit_cost(op: Op) -> float:
    return UNIT_COSTS[op.kind]


def timed(schedule: Schedule, cost_of: Callable[[Op], float] = unit_cost) -> Timing:
    """Simulate a schedule, with every op as early as possible and messages that take no time.

    Raises `ProgramError`, naming op and rank, unless every stage runs the forward and backward of each micro-batch
    once, on its own rank and after its inputs, and no rank waits for ever.
    """
    _check_counts(schedule)
    ends: dict[Op, float] = {}
    spans: list[list[tuple[Op, float, float]]] = [[] for _ in schedule.rows]
    free = [0.0] * len(schedule.rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while len(spans[rank]) < len(row):
                op = row[len(spans[rank])]
                needs = [_end_of(need, ends) for need in _needs(op, schedule)]
                if any(end is None for end in needs):
                    break
                start = max([free[rank], *(end for end in needs if end is not None)])
                free[rank] = ends[op] = start + cost_of(op)
                spans[rank].append((op, start, free[rank]))
                moved = True
    for rank, row in enumerate(schedule.rows):
        if len(spans[rank]) < len(row):
            op = row[len(spans[rank])]
            missing = [schedule.text_of(need) for need in _needs(op, schedule) if _end_of(need, ends) is None]
            raise ProgramError(
                f"The schedule {schedule.name} never ends: rank {rank} waits for {', '.join(missing)} before "
                f"{schedule.text_of(op)}, which never comes."
            )
    return Timing(tuple(map(tuple, spans)))


def _needs(op: Op, schedule: Schedule) -> list[Op]:
    """The ops that must precede `op`. A `B` among them may be an `I` in the schedule."""
    kind, batch, stage = op
    if kind == "F":
        return [Op("F", batch, stage - 1)] if stage else []
    if kind == "W":
        return [Op("I", batch, stage)]
    after = [Op("B", batch, stage + 1)] if stage + 1 < schedule.num_stages else []
    return [Op("F", batch, stage), *after]


def _end_of(op: Op, ends: Mapping[Op, float]) -> float | None:
    end = ends.get(op)
    return ends.get(op._replace(kind="I")) if end is None and op.kind == "B" else end


def _check_counts(schedule: Schedule) -> None:
    if len(schedule.rows) != schedule.num_ranks:
        raise ProgramError(
            f"The schedule {schedule.name} has {len(schedule.rows)} rows for {schedule.num_ranks} ranks."
        )
    seen: set[Op] = set()
    for rank, row in enumerate(schedule.rows):
        for op in row:
            text = schedule.text_of(op)
            is_known = op.stage < schedule.num_stages and op.micro_batch < schedule.num_micro_batches
            if not is_known or op.stage % schedule.num_ranks != rank:
                raise ProgramError(f"{schedule.name}: rank {rank} has {text}, which is not its own.")
            if op in seen:
                raise ProgramError(f"{schedule.name}: rank {rank} has {text} twice.")
            seen.add(op)
    for stage in range(schedule.num_stages):
        for batch in range(schedule.num_micro_batches):
            kinds = {kind for kind in UNIT_COSTS if Op(kind, batch, stage) in seen}
            if kinds not in ({"F", "B"}, {"F", "I", "W"}):
                raise ProgramError(
                    f"{schedule.name}: stage {stage} has {', '.join(sorted(kinds)) or 'nothing'} of micro-batch "
                    f"{batch}; it needs F and B, or F, I and W."
                )


def most_in_flight(schedule: Schedule, rank: int) -> int:
    """The most forwards of `rank` that wait for their backward, whose activations it holds."""
    most = now = 0
    for op in schedule.rows[rank]:
        now += {"F": 1, "B": -1, "I": 0, "W": -1}[op.kind]
        most = max(most, now)
    return most


def picture(schedule: Schedule) -> str:
    """The schedule as a grid: a line for each rank, a column for each unit of time, dots where it waits."""
    timing = timed(schedule)
    width = max(len(schedule.text_of(op)) for row in schedule.rows for op in row) + 1
    lines = []
    for rank, row in enumerate(timing.spans):
        cells = ["."] * round(timing.length)
        for op, start, stop in row:
            cells[round(start) : round(stop)] = [schedule.text_of(op)] * (round(stop) - round(start))
        lines.append(f"rank {rank} |" + "".join(cell.rjust(width) for cell in cells))
    return "\n".join(lines) + "\n"
