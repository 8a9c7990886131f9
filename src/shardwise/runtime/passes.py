"""What is under way: one training pass or one evaluation, and how many backwards there have been.

[Note: passes] A training pass is the forwards and backwards between two moments at which nothing is open;
an evaluation pass is what one call of the model does without gradients. The first pass of each kind is
executed action by action, waiting for each communication, and recorded. From the second on the program
made from the record is followed, with gathers running ahead. A pass that does not do what was recorded goes
on without look-ahead, still right, and is recorded anew.

[Note: a schedule is a pass] Under a pipeline the micro-batches of a step are one pass, and follow one program (see
[Note: over the schedule] in `program/whole_schedule.py`); whoever runs the schedule says which op begins (`begin_op`).
A step that does not do what was recorded goes on op by op: at the end of each backward everything is back at rest.
"""

from __future__ import annotations

from collections.abc import Hashable

from shardwise.comm import Journal
from shardwise.program import END_OF_BACKWARD, Moment, Phase, UnitMoments
from shardwise.program.schedule import Op
from shardwise.runtime.script import Script
from shardwise.storage import Unit


class Pass:
    """One training pass, or the one to come."""

    def __init__(self, script: Script, *, reduces: bool) -> None:
        self.script = script
        self.reduces = reduces
        """Whether its gradients are reduced; not inside `no_sync`."""
        self.op: Op | None = None
        """Of a schedule what runs now."""
        self.halved: frozenset[str] = frozenset()
        """Units of which some gradients come in the second half of a backward, where backwards have two."""
        self.is_running = False
        self.is_scaled = False
        """Whether its backward is of a scaled loss."""
        self.is_weighed = False
        """Whether its backward is of a loss that was given its weight."""
        self.is_wiser = False
        """Whether it has taught how to see more, so that the next one is to be recorded."""
        self.open: set[str] = set()
        """Units whose backward has begun on this rank and has not ended."""
        self.through: dict[str, Unit] = {}
        """Units whose backward has ended on this rank and is not closed yet, in that order."""
        self.kept: set[str] = set()
        """Units that stay whole after their forward."""
        self.lasting: set[str] = set()
        """Units that stay whole until the pass ends, because not all of their uses have been seen."""

    def moments(self, unit: Unit) -> UnitMoments:
        """Those of `unit` in what runs now."""
        if self.op is None:
            return unit.moments
        phase: Phase = "backward"
        if self.op.kind == "W":
            phase = "backward_weights"
        elif self.op.kind == "I" and unit.name in self.halved:
            phase = "backward_input"
        return unit.moments_of(self.op.micro_batch, phase)

    @property
    def end_of_backward(self) -> Moment:
        """When the backward that runs is through."""
        return END_OF_BACKWARD if self.op is None else Moment("after", "backward", "", self.op.micro_batch)

    def end_backward(self) -> None:
        """Of a schedule: the backward of one micro-batch is through."""
        self.is_scaled = self.is_weighed = False
        self.open.clear()
        self.through.clear()
        self.lasting.clear()

    def keep(self, unit: Unit) -> None:
        """`unit` is used in ways that nobody has foreseen: it stays whole until the pass ends."""
        self.is_wiser = True
        self.kept.add(unit.name)
        self.lasting.add(unit.name)


class Passes:
    """The training passes of one model, one after the other."""

    def __init__(self, journal: Journal) -> None:
        self.reduces = True
        """Whether the passes that begin from here on reduce their gradients."""
        self.owes_reductions = False
        """Whether there has been one since that did not."""
        self.num_backwards = 0
        """Backwards that have ended, ever."""
        self.num_cut_short = 0
        """Backwards that raised, ever. What such a one has left is forgotten, and what waited beside it with it."""
        self.cut_short_at = -1
        """How many backwards had ended when one was cut short last; -1 if none has been since `forgive`."""
        self.num_unscaled = 0
        """Backwards since `forgive` that were not of a loss that was said to be scaled."""
        self.must_be_weighed = False
        """Whether a loss has to be given its weight."""
        self.num_unweighed = 0
        """Backwards since `forgive` of losses that were not, though they had to."""
        self._journal = journal
        self._scripts: dict[tuple[str, bool], Script] = {}
        """By what they are of, and whether gradients are reduced."""
        self.current = Pass(self._script(reduces=True), reduces=True)

    def begin(self) -> None:
        """The first forward or backward of a pass is about to run, if none is running."""
        if self.current.is_running:
            return
        self.current.is_running = True
        self._set_reduces(self.reduces)
        self.owes_reductions |= not self.reduces
        self.current.script.begin()

    def begin_schedule(self, halved: frozenset[str]) -> None:
        """The ops from here to `abandon` are one pass. `halved` is that of `Pass`."""
        script = self._scripts.setdefault(("schedule", self.reduces), Script(self._journal))
        self.current = Pass(script, reduces=self.reduces)
        self.current.halved = halved
        self.current.is_running = True
        script.begin()

    def begin_op(self, op: Op, *, reduces: bool) -> None:
        """What runs from here on is `op`, and reduces gradients or not."""
        self.current.op, self.current.reduces = op, reduces
        self.current.script.begin_op(op)

    def end(self) -> None:
        """A backward is through, and with it the pass, unless there are more of them in it."""
        self._journal.num_backwards += 1
        self.num_backwards += 1
        self.num_unscaled += not self.current.is_scaled
        self.num_unweighed += self.must_be_weighed and not self.current.is_weighed
        if self.current.op is None:
            self.abandon()
        else:
            self.current.end_backward()

    def abandon(self) -> None:
        """What was under way is no more."""
        self.current = Pass(self._script(reduces=self.reduces), reduces=self.reduces)

    def note_scaled(self) -> None:
        """The backward that is running is of a scaled loss."""
        self.current.is_scaled = True

    def note_weighed(self) -> None:
        """The backward that is running is of a loss that was given its weight."""
        self.current.is_weighed = True

    def note_cut_short(self) -> None:
        """A backward raised, and all gradients are gone."""
        self.owes_reductions = False
        self.num_cut_short += 1
        self.cut_short_at = self.num_backwards

    def forgive(self) -> None:
        """Gradients were zeroed, and whatever was wrong with them is no more."""
        self.cut_short_at = -1
        self.num_unscaled = self.num_unweighed = 0

    def finish_reductions(self) -> None:
        """What passes have left unreduced is reduced now."""
        self.owes_reductions = False
        self._set_reduces(True)

    def forget_programs(self) -> None:
        """The next pass of either kind is recorded."""
        for script in self._scripts.values():
            script.forget()

    def _set_reduces(self, reduces: bool) -> None:
        self.current.reduces = reduces
        self.current.script = self._script(reduces=reduces)

    def _script(self, *, reduces: bool) -> Script:
        return self._scripts.setdefault(("pass", reduces), Script(self._journal))


class Evaluation:
    """One call of the model without gradients, or the one to come."""

    def __init__(self, journal: Journal) -> None:
        self.segment: Hashable = ()
        self.is_running = False
        self._journal = journal
        self._scripts: dict[Hashable, Script] = {}

    @property
    def script(self) -> Script:
        return self._scripts.setdefault(self.segment, Script(self._journal))

    def begin(self) -> None:
        self.is_running = True
        self.script.begin()
