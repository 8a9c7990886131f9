"""What a model computes, as a clock prices it: operations, by unit or between the moments of a pass. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.errors import ProgramError
from shardwise.program import Block, Moment

Computing = Literal["product", "attention", "memory"]
Communicating = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send"]
Copying = Literal["evict", "fetch"]
OperationKind = Computing | Communicating | Copying

COMMUNICATING: frozenset[str] = frozenset(get_args(Communicating))
COPYING: frozenset[str] = frozenset(get_args(Copying))


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel, or a few that belong together, or one message.

    - `product`: a matrix product; `shape` is (m, n, k) or (m, n, k, batch) for a batch of m x k times k x n.
    - `attention`: `shape` is (batch x heads, queries, keys, head size).
    - `memory`: whatever only reads and writes memory; `dtype` is that of its result, where it is known.
    - a collective or `send` along the mesh axis `axis`, within the computation (tp, sp, ep). `num_bytes` are those of
      the whole buffer: what all ranks contribute to an `all_gather`, what one rank has before a `reduce_scatter`,
      `all_reduce` or `all_to_all`, and what is in the message of a `send`.
    - `evict`, `fetch`: activations that go to another tier, `axis`, and come back; beside the computation.

    `flops` counts a multiplication and an addition as two. `num_bytes` of what computes are those read and written, and
    `allocated_bytes` the sizes of the blocks of memory that it allocates for its results. Of attention, `is_backward`,
    and `is_causal`: half of the pairs that `flops` counts are left out. `overlaps`: of a message that is sent beside
    what is computed before the same moment. `routed_calls`: how often a function is called through Python beside
    operators, as all of a model are whose sequences are split.
    """

    kind: OperationKind
    shape: tuple[int, ...] = ()
    dtype: str = "-"
    flops: float = 0
    num_bytes: float = 0
    kernels: int = 1
    axis: str = ""
    allocated_bytes: tuple[int, ...] = ()
    is_backward: bool = False
    is_causal: bool = False
    overlaps: bool = False
    routed_calls: int = 0

    @property
    def communicates(self) -> bool:
        return self.kind in COMMUNICATING

    @property
    def copies(self) -> bool:
        return self.kind in COPYING

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return " ".join(word for word in (self.kind, shape, self.dtype if self.dtype != "-" else "", self.axis) if word)


Operations = tuple[Operation, ...]


def product(m: int, n: int, k: int, dtype: str, width: int, batch: int = 1) -> Operation:
    """The product of an m x k and a k x n matrix with elements of `width` bytes, or `batch` of them."""
    moved = batch * width * (m * k + k * n + m * n)
    return Operation("product", (m, n, k) if batch == 1 else (m, n, k, batch), dtype, 2.0 * batch * m * n * k, moved)


def memory_pass(num_bytes: float, kernels: int) -> Operation:
    """Whatever reads and writes `num_bytes` together."""
    return Operation("memory", num_bytes=num_bytes, kernels=kernels)


@dataclass(frozen=True)
class UnitWork:
    """What one use of a unit computes.

    `backward` has the gradients of its inputs, `weights` those of its parameters, which a schedule may put off (ZB-H1);
    whoever does not know them apart puts all into `backward`. `recompute` is what a backward computes again.
    """

    forward: Operations = ()
    backward: Operations = ()
    weights: Operations = ()
    recompute: Operations = ()

    @property
    def flops(self) -> float:
        """Those of the model: without what is computed again."""
        return sum(one.flops for one in (*self.forward, *self.backward, *self.weights))

    def times(self, count: int) -> UnitWork:
        """The work of `count` such layers in one unit."""
        return UnitWork(*(part * count for part in (self.forward, self.backward, self.weights, self.recompute)))

    def __add__(self, other: UnitWork) -> UnitWork:
        return UnitWork(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weights + other.weights,
            self.recompute + other.recompute,
        )


@dataclass(frozen=True)
class Worked:
    """A moment of one pass, and what was computed since the one before.

    `operations` include those that are computed a second time, which `recomputed` has alone, and those for gradients of
    parameters, which `weights` has alone: a schedule may put them off.
    """

    moment: Moment
    operations: Operations = ()
    recomputed: Operations = ()
    weights: Operations = ()
    factors_bytes: int = 0
    """Of what `weights` are computed from, which a schedule keeps as long as it puts them off."""


Work = Mapping[str, UnitWork] | Sequence[Worked]
"""By unit, or as counted between the moments of a pass, in their order and without micro-batches. The second is exact
for units within units and for what is computed outside of any."""


def work_of_blocks(blocks: Sequence[Block], work: Work) -> list[Worked]:
    """For each block of a pass or a schedule, what is computed before its actions.

    Raises `ProgramError`, naming the unit, where the work of one is not known.
    """
    if isinstance(work, Mapping):
        known: dict[tuple[str, str, str], Worked] = {}
        for block in blocks:  # equal work is one object, which is timed once
            moment = block.moment
            key = (moment.edge, moment.phase, moment.unit)
            if key not in known:
                known[key] = _of_unit(moment, work)
        return [known[block.moment.edge, block.moment.phase, block.moment.unit] for block in blocks]
    if len(work) == len(blocks) and all(
        block.moment._replace(micro_batch=None) == one.moment for block, one in zip(blocks, work, strict=True)
    ):
        return list(work)
    return _as_computed(blocks, list(_in_schedule(blocks, work)), work)


def _of_unit(moment: Moment, work: Mapping[str, UnitWork]) -> Worked:
    if moment.edge != "after" or not moment.unit:
        return Worked(moment)
    found = work.get(moment.unit)
    if found is None:
        raise ProgramError(f"The work of unit {moment.unit!r} is not known, so '{moment}' has no time.")
    match moment.phase:
        case "forward":
            return Worked(moment, found.forward)
        case "backward":
            return Worked(moment, (*found.recompute, *found.backward, *found.weights), found.recompute)
        case "backward_input":
            return Worked(moment, (*found.recompute, *found.backward), found.recompute)
        case "backward_weights":
            return Worked(moment, found.weights)
    raise ProgramError(f"What is computed before '{moment}' has no time: no unit computes in that phase.")


def _in_schedule(blocks: Sequence[Block], work: Sequence[Worked]) -> Iterator[Worked]:
    """What was counted in one micro-batch, for each micro-batch of a schedule: by moment, and in the order of its uses
    within the pass."""
    by_moment: dict[Moment, list[Worked]] = {}
    for one in work:
        by_moment.setdefault(_counted_as(one.moment), []).append(one)
    known: dict[tuple[str, ...], Sequence[Worked]] = {}
    """By a moment without its micro-batch: uses of a unit that has several, else what each micro-batch has."""
    used: dict[Moment, int] = {}
    for block in blocks:
        moment = block.moment
        if not moment.unit and moment.micro_batch is None:  # of all micro-batches, each of which has its own
            yield Worked(moment)
            continue
        key = moment.edge, moment.phase, moment.unit
        found = known.get(key)
        if found is None:
            found = known[key] = _uses(moment, by_moment.get(_counted_as(moment)))
        place = 0
        if len(found) > 1:
            place = min(used.get(moment, 0), len(found) - 1)
            used[moment] = place + 1
        yield found[place]


def _uses(moment: Moment, counted: Sequence[Worked] | None) -> Sequence[Worked]:
    """What of a whole pass `counted` is computed before such a `moment`, of a schedule that may split backwards."""
    if counted is None:
        if moment.edge == "after" and moment.unit:
            raise ProgramError(f"What is computed before '{moment}' was not counted, so it has no time.")
        return (Worked(moment),)
    if moment.phase not in _HALVES:
        return counted
    return [_half(Moment(moment.edge, moment.phase, moment.unit), one) for one in counted]


_HALVES = ("backward_input", "backward_weights")


def _counted_as(moment: Moment) -> Moment:
    """As it is in a single pass, with whole backwards."""
    return Moment(moment.edge, "backward" if moment.phase in _HALVES else moment.phase, moment.unit)


def _half(moment: Moment, whole: Worked) -> Worked:
    if moment.phase == "backward_weights":
        return Worked(moment, whole.weights if moment.edge == "after" else ())
    return Worked(moment, without(whole.operations, whole.weights), whole.recomputed)


def _as_computed(blocks: Sequence[Block], found: Sequence[Worked], work: Sequence[Worked]) -> list[Worked]:
    """What is `found` for each of the blocks, in the order in which it is computed. In the first half of a backward
    units end later than in a whole one, as which it was counted, and what is computed until a moment is all that was
    counted by then."""
    if all(block.moment.phase != "backward_input" for block in blocks):
        return list(found)
    places: dict[tuple[str, str], int] = {}  # those of the backward, which comes last
    for place, counted in enumerate(work):
        places[counted.moment.edge, counted.moment.unit] = place
    known: dict[tuple[int, ...], Worked] = {}
    computed, first = list(found), 0
    for number, block in enumerate(blocks):
        moment = block.moment
        if moment.micro_batch is None or moment.phase not in ("backward_input", "backward"):
            first = number + 1
        elif not moment.unit:  # the end of this backward
            half = range(first, number + 1)
            by_place = {at: places.get((blocks[at].moment.edge, blocks[at].moment.unit), -1) for at in half}
            by_place[number] = len(work)
            waiting = sorted(half, key=by_place.__getitem__)
            for at in half:
                now = [found[each] for each in waiting if by_place[each] <= by_place[at]]
                waiting = waiting[len(now) :]
                key = tuple(map(id, now))
                if key not in known:
                    known[key] = _joined(now, blocks[at].moment)
                computed[at] = known[key]
            first = number + 1
    return computed


def _joined(parts: Sequence[Worked], moment: Moment) -> Worked:
    """One after the other, under the name of the last one that is of a unit, before `moment`."""
    ended = [one.moment for one in parts if one.moment.edge == "after" and one.moment.unit]
    operations = tuple(operation for one in parts for operation in one.operations)
    again = tuple(operation for one in parts for operation in one.recomputed)
    return Worked(ended[-1] if ended else moment, operations, again)


def without(operations: Operations, some: Operations) -> Operations:
    """`operations` but for `some` of them."""
    left = list(some)
    others: list[Operation] = []
    for one in operations:
        if one in left:
            left.remove(one)
        else:
            others.append(one)
    return tuple(others)


def flops_of(operations: Iterable[Operation]) -> float:
    return sum(one.flops for one in operations)
