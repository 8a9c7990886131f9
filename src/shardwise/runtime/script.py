"""A recorded order of moments, the program made from it, and the position of the current pass in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from itertools import takewhile

from shardwise.comm import Journal
from shardwise.program import Moment, PassTraces, Trace, in_order
from shardwise.program.schedule import Op
from shardwise.runtime.executor import BoundBlock

LONGEST_TRACE = 100_000


class Script:
    """Follows the program of one kind of pass (training or evaluation) as long as events agree with it.

    While they do not, or while there is no program yet, moments are recorded instead.
    """

    def __init__(self, journal: Journal) -> None:
        """Each pass is noted in `journal`, which explains where ranks diverge."""
        self._journal = journal
        self.blocks: tuple[BoundBlock, ...] = ()
        self.trace: list[Moment] = []
        self.is_followed = False
        self.unlearned: Trace = ()
        """What passes were recorded to do of which no program was made, because there was something new in them."""
        self._next = 0
        self._returns: list[int] = []
        """The lengths of the trace when the model returned."""
        self._ends_with_return = False
        """Whether the recorded pass had one forward, which ended when the model returned."""
        self._ops: list[tuple[Op, int]] = []
        """The ops of a schedule so far, each with the length of the trace when it began."""

    def begin(self) -> None:
        """A pass starts: follow the program, if there is one."""
        self.trace = []
        self._journal.begin_pass(self.trace)
        self._next = 0
        self._returns = []
        self._ops = []
        self.is_followed = bool(self.blocks)

    def begin_op(self, op: Op) -> None:
        """Moments recorded from here on belong to `op`."""
        self._ops.append((op, len(self.trace)))

    def learn(self, blocks: Sequence[BoundBlock]) -> None:
        self.blocks = tuple(blocks)
        self.unlearned = ()
        num_forward = max((at for at, moment in enumerate(self.trace, start=1) if moment.phase == "forward"), default=0)
        self._ends_with_return = len(self._returns) == 1 and num_forward <= self._returns[0]

    def closing(self) -> str:
        """The unit whose backward the program closes next; "" if something else comes first."""
        if self.is_followed and self._next < len(self.blocks):
            return self.blocks[self._next].closes
        return ""

    def advance_to_end(self, ended: Container[str]) -> BoundBlock | None:
        """The next block, if the backward of one of the units `ended` ends there; else None, and nothing has changed.

        Its moment is of the running op, for each op ends with a moment of its own.
        """
        number, blocks = self._next, self.blocks
        if not self.is_followed or number == len(blocks):
            return None
        block = blocks[number]
        if block.closes not in ended:
            return None
        self._next = number + 1
        moment, journal = block.moment, self._journal
        self.trace.append(moment)
        journal.moment = moment
        journal.clock.reach(block.place)
        return block

    def expects(self, moment: Moment) -> bool:
        """Whether `moment` comes next in the program."""
        return self.is_followed and self._next < len(self.blocks) and self.blocks[self._next].moment == moment

    def left_out(self, moment: Moment) -> Sequence[BoundBlock]:
        """The blocks before that of `moment`, if the program has it later.

        This rank has left out what they are for, and others may have computed it; so it runs them, and goes on with the
        program. In a schedule, whose ops every rank takes, nothing is left out. Nor is the end of a forward in which
        this rank still is, and which would free what it computes with: a loop that called a model's modules one by one
        may call the model next, whose own parameters are needed from its first module to its last.
        """
        if not self.is_followed or self._ops:
            return ()
        for index in range(self._next, len(self.blocks)):
            if self.blocks[index].moment == moment:
                between = self.blocks[self._next : index]
                return () if self._has_end_of_open_forward(between) else between
        return ()

    def _has_end_of_open_forward(self, blocks: Sequence[BoundBlock]) -> bool:
        ends = {
            block.moment.unit for block in blocks if (block.moment.phase, block.moment.edge) == ("forward", "after")
        }
        if not ends:
            return False
        depth = Counter(one.unit for one in self.trace if one.phase == "forward" and one.edge == "before")
        depth.subtract(one.unit for one in self.trace if one.phase == "forward" and one.edge == "after")
        return any(depth[unit] > 0 for unit in ends)

    def returned(self) -> Sequence[BoundBlock]:
        """The model has returned. The blocks of its forward that are still to come, if the program is followed: of what
        this rank has left out."""
        self._returns.append(len(self.trace))
        if not self.is_followed or self._ops or not self._ends_with_return:
            return ()
        left = self.blocks[self._next :]
        return tuple(takewhile(lambda block: block.moment.phase == "forward", left))

    def leave(self) -> None:
        """What comes next is not in the program: record the pass from here on."""
        self.is_followed = False

    def forget(self) -> None:
        """The program no longer fits: the next pass is recorded."""
        self.blocks = ()
        self.is_followed = False

    def advance(self, moment: Moment) -> BoundBlock | None:
        """The block for `moment`, if the program is followed and has it next; else None, and nothing has changed.

        [Note: once for each event] This comes first at every event of every unit, several hundred times in a step. In
        stages of a few milliseconds each call of a Python function counts: they were most of what a step took beyond
        torch's own pipelines.
        """
        number, blocks = self._next, self.blocks
        if not self.is_followed or number == len(blocks):
            return None
        block = blocks[number]
        if block.moment is not moment:
            if block.moment != moment:
                return None
            block.moment = moment  # one object from now on, which need not be compared
        self._next = number + 1
        self.trace.append(moment)
        journal = self._journal
        journal.moment = moment
        journal.clock.reach(block.place)
        return block

    def take(self, moment: Moment) -> BoundBlock | None:
        """The block for `moment`, if that comes next; else None, and the pass is recorded from here on."""
        block = self.advance(moment)
        if block is None:
            self.is_followed = False
            if len(self.trace) < LONGEST_TRACE * max(1, len(self._ops)):
                self.trace.append(moment)
        return block

    @property
    def is_too_long(self) -> bool:
        """Whether the record of the pass was cut off."""
        return len(self.trace) >= LONGEST_TRACE * max(1, len(self._ops))

    def recorded_row(self) -> tuple[Op, ...]:
        """The ops of the recorded schedule."""
        return tuple(op for op, _ in self._ops)

    def recorded_passes(self) -> PassTraces:
        """The order in which units are used in an op, by kind and stage: of the last op of each, when all uses had been
        seen."""
        stops = [start for _, start in self._ops[1:]] + [len(self.trace)]
        return {
            (op.kind, op.stage): tuple(one._replace(micro_batch=None) for one in in_order(self.trace[start:stop]))
            for (op, start), stop in zip(self._ops, stops, strict=True)
        }

    def recorded(self) -> Trace:
        """The order in which units were used in this pass."""
        return in_order(self.trace)

    def is_finished(self) -> bool:
        return self.is_followed and self._next == len(self.blocks)
