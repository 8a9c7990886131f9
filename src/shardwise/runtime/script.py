"""A recorded order of moments, the program made from it, and how far the present pass has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.comm import Journal
from shardwise.program import Moment, PassTraces, Trace
from shardwise.program.schedule import Op
from shardwise.runtime.executor import BoundBlock

LONGEST_TRACE = 100_000


class Script:
    """Follows the program of one kind of pass (training or evaluation) as long as events agree with it.

    While they do not, or while there is no program yet, moments are recorded instead.
    """

    def __init__(self, journal: Journal) -> None:
        """`journal` is told how each pass goes: where ranks part, that is what explains it."""
        self._journal = journal
        self.blocks: tuple[BoundBlock, ...] = ()
        self.trace: list[Moment] = []
        self.is_followed = False
        self._next = 0
        self._ops: list[tuple[Op, int]] = []
        """Of a schedule the ops so far, and how long the trace was when each began."""

    def begin(self) -> None:
        """A pass starts: follow the program, if there is one."""
        self.trace = []
        self._journal.begin_pass(self.trace)
        self._next = 0
        self._ops = []
        self.is_followed = bool(self.blocks)

    def begin_op(self, op: Op) -> None:
        """What is recorded from here on is of `op`."""
        self._ops.append((op, len(self.trace)))

    def learn(self, blocks: Sequence[BoundBlock]) -> None:
        self.blocks = tuple(blocks)

    def expected(self) -> BoundBlock | None:
        """What comes next, as long as the program is followed."""
        if self.is_followed and self._next < len(self.blocks):
            return self.blocks[self._next]
        return None

    def expects(self, moment: Moment) -> bool:
        """Whether `moment` is what comes next in the program."""
        expected = self.expected()
        return expected is not None and (expected.moment is moment or expected.moment == moment)

    def forget(self) -> None:
        """The program no longer fits: the next pass is recorded."""
        self.blocks = ()
        self.is_followed = False

    def take(self, moment: Moment) -> BoundBlock | None:
        """The block that is due at `moment`, if that is what comes next; else the pass is recorded from here on."""
        if len(self.trace) < LONGEST_TRACE * max(1, len(self._ops)):
            self.trace.append(moment)
        block = self.expected()
        if block is None or (block.moment is not moment and block.moment != moment):
            self.is_followed = False
            return None
        self._next += 1
        return block

    @property
    def is_too_long(self) -> bool:
        """Whether not all of the pass could be recorded."""
        return len(self.trace) >= LONGEST_TRACE * max(1, len(self._ops))

    def recorded_row(self) -> tuple[Op, ...]:
        """Of a schedule the ops that there were."""
        return tuple(op for op, _ in self._ops)

    def recorded_passes(self) -> PassTraces:
        """Of a schedule the order in which units were used in one op of each kind and stage, the last: by then all was
        seen that there was to see."""
        stops = [start for _, start in self._ops[1:]] + [len(self.trace)]
        return {
            (op.kind, op.stage): tuple(replace(one, micro_batch=None) for one in _in_order(self.trace[start:stop]))
            for (op, start), stop in zip(self._ops, stops, strict=True)
        }

    def recorded(self) -> Trace:
        """The order in which units were used in this pass."""
        return _in_order(self.trace)

    def is_finished(self) -> bool:
        return self.is_followed and self._next == len(self.blocks)


def _in_order(recorded: Sequence[Moment]) -> Trace:
    """What was recorded, without ends.

    Where a program was followed at first, it may have closed a backward too early, which was closed again when it was
    through: only then did it end.
    """
    trace, closed = [], set()
    for moment in reversed(recorded):
        if moment.phase != "forward":
            if moment.edge == "before":
                closed.discard(moment.unit)
            elif moment.unit in closed:
                continue
            else:
                closed.add(moment.unit)
        trace.append(moment)
    return tuple(moment for moment in reversed(trace) if moment.unit)
