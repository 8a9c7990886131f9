"""The state of the running training pass or evaluation, and counters of backwards.

[Note: passes] A training pass is the forwards and backwards between two moments at which nothing is open; an evaluation
pass is one call of the model without gradients. The first pass of each kind runs action by action, waits for each
communication, and is recorded. From the second on the program made from the record is followed, with gathers running
ahead. A pass that departs from the record goes on without look-ahead, still correct, and is recorded anew.

[Note: a schedule is a pass] Under a pipeline the micro-batches of a step are one pass and follow one program (see
[Note: over the schedule] in `program/whole_schedule.py`); the code that runs the schedule announces each op
(`begin_op`). A step that departs from the record goes on op by op: after each backward all buffers are back at rest.

[Note: awake in a schedule] Parameters that every rank keeps whole need nothing before a use and nothing after it. While
the engine itself runs a schedule, and follows its program, they are plain tensors from their first use to the end: an
eighth of the calls for a block was to wake them and to let them rest. Nothing intercepts a write in between, so writes
are counted. In a call by a loop of one's own they are so while its forwards run, and again while its backwards do: in
between the loop may do what it likes with parameters at rest.
"""

from __future__ import annotations

from collections.abc import Hashable

from shardwise.comm import Journal
from shardwise.memory import Unit
from shardwise.program import END_OF_BACKWARD, FlatSpec, Moment, Phase, UnitMoments
from shardwise.program.schedule import Op
from shardwise.runtime.script import Script


class Pass:
    """One training pass: the running one, or the next."""

    def __init__(self, script: Script, moments: MomentsByUnit, *, reduces: bool) -> None:
        self.script = script
        self.moments = moments
        """Those of the running op, and the end of its backward."""
        self.reduces = reduces
        """Whether its gradients are reduced; not inside `no_sync`."""
        self.op: Op | None = None
        """The running op of a schedule."""
        self.is_last = True
        """Whether no later op adds to the gradients of the running one."""
        self.halved: frozenset[str] = frozenset()
        """Units some of whose gradients come in the second half of a backward, if backwards are split."""
        self.is_running = False
        self.is_scaled = False
        """Whether its backward is that of a scaled loss."""
        self.is_weighed = False
        """Whether its backward is that of a weighted loss."""
        self.must_record_again = False
        """Whether it found new sites, so that the next pass has to be recorded."""
        self.unforeseen: set[str] = set()
        """Units that it found to be used where they had not been foreseen, and will be gathered from now on."""
        self.open: set[str] = set()
        """Units whose backward has begun and not ended on this rank."""
        self.called: set[str] = set()
        """Units that have computed a forward on this rank."""
        self.opened: set[str] = set()
        """Units whose backward has begun on this rank."""
        self.ended: dict[str, Unit] = {}
        """Units whose backward has ended on this rank and is not closed yet, in that order."""
        self.kept: set[str] = set()
        """Units that stay whole after their forward."""
        self.keeps_awake = False
        """Whether parameters that are whole anyway stay plain once they are: see [Note: awake in a schedule]."""
        self.awake: set[str] = set()
        """The units of these."""
        self.first_opened: dict[str, tuple[Unit, int]] = {}
        """Those that could be, by name, each with its write counter when it was first opened."""
        self.lasting: set[str] = set()
        """Units that stay whole until the pass ends, because not all uses of them are known."""

    def reduces_flat(self, spec: FlatSpec) -> bool:
        """Whether the gradients of one flat buffer are reduced behind the running backward."""
        return self.reduces and spec.reduces_in(is_last=self.is_last)

    def end_backward(self) -> None:
        """In a schedule, the backward of one micro-batch has ended."""
        self.is_scaled = self.is_weighed = False
        self.open.clear()
        self.ended.clear()
        self.lasting.clear()

    def note_open(self, unit: Unit) -> None:
        """In a schedule, `unit` is whole and its parameters are plain."""
        if not unit.stays_whole:
            return
        if unit.name not in self.first_opened:
            self.first_opened[unit.name] = unit, unit.num_writes()
        if self.script.is_followed:
            self.awake.add(unit.name)

    def keep(self, unit: Unit) -> None:
        """`unit` is used in an unforeseen way: keep it whole until the pass ends."""
        self.must_record_again = True
        self.unforeseen.add(unit.name)
        self.kept.add(unit.name)
        self.lasting.add(unit.name)

    def has_used(self, unit: Unit) -> bool:
        """Whether this rank may be computing with `unit`, or still be going to, in its backward."""
        return any(unit.name in some for some in (self.called, self.opened, self.kept, self.lasting))


class MomentsByUnit(dict[str, UnitMoments]):
    """The moments of units, by the names of these, in one op of a schedule, or without one. They are made when first
    asked for, because every event does: see [Note: once for each event] in `script.py`."""

    def __init__(self, op: Op | None = None, halved: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._op = op
        self._halved = halved
        self.end_of_backward = END_OF_BACKWARD if op is None else Moment("after", "backward", "", op.micro_batch)

    def __missing__(self, unit: str) -> UnitMoments:
        phase: Phase = "backward"
        if self._op is not None and self._op.kind == "W":
            phase = "backward_weights"
        elif self._op is not None and self._op.kind == "I" and unit in self._halved:
            phase = "backward_input"
        made = self[unit] = UnitMoments.of(unit, None if self._op is None else self._op.micro_batch, phase)
        return made


class Passes:
    """The training passes of one model."""

    def __init__(self, journal: Journal) -> None:
        self.reduces = True
        """Whether passes that begin from now on reduce their gradients."""
        self.owes_reductions = False
        """Whether a pass since the last reduction did not reduce."""
        self.num_backwards = 0
        """Number of backwards that have ended."""
        self.num_cut_short = 0
        """Number of backwards that raised. Their gradients are dropped, with any that were waiting."""
        self.cut_short_at = -1
        """The value of `num_backwards` when a backward last raised; -1 if none has since `clear_faults`."""
        self.num_unscaled = 0
        """Backwards since `clear_faults` whose loss was not declared as scaled."""
        self.must_be_weighed = False
        """Whether losses have to be weighted."""
        self.num_unweighed = 0
        """Backwards since `clear_faults` whose loss was not weighted although it had to be."""
        self.num_calls = 0
        """In a pass over calls of a model in stages: those that have not been sent back."""
        self.num_in_calls = 0
        """The micro-batches of all calls of that pass."""
        self.num_over_calls = 0
        """How many such passes have ended."""
        self._journal = journal
        self._scripts: dict[tuple[str, bool], Script] = {}
        """By kind of pass, and whether gradients are reduced."""
        self._moments = MomentsByUnit()
        self._moments_of_ops: dict[tuple[Op, frozenset[str]], MomentsByUnit] = {}
        """By op, and the units whose backwards are halved."""
        self.current = Pass(self._script(reduces=True), self._moments, reduces=True)

    def begin(self) -> None:
        """Called before every forward or backward: start a pass if none is running."""
        if self.current.is_running:
            return
        self.current.is_running = True
        self._set_reduces(self.reduces)
        self.owes_reductions |= not self.reduces
        self.current.script.begin()

    def begin_schedule(self, halved: frozenset[str], kind: str = "schedule") -> None:
        """The ops until `abandon` are one pass, of some kind. For `halved` see `Pass`."""
        script = self._scripts.setdefault((kind, self.reduces), Script(self._journal))
        self.current = Pass(script, self._moments, reduces=self.reduces)
        self.current.halved = halved
        self.current.keeps_awake = kind == "schedule"  # in calls, while their ops run
        self.current.is_running = True
        script.begin()

    def begin_op(self, op: Op, *, is_last: bool) -> None:
        """`op` runs from here on. `is_last`: none of its kind follows on its stage."""
        current = self.current
        moments = self._moments_of_ops.get((op, current.halved))
        if moments is None:
            moments = self._moments_of_ops[op, current.halved] = MomentsByUnit(op, current.halved)
        current.op, current.moments, current.is_last = op, moments, is_last
        current.reduces = self.reduces and op.kind != "F"
        current.script.begin_op(op)

    def begin_call(self, num: int) -> int:
        """A call with `num` micro-batches begins, in the running pass over calls or in a new one; the number of its
        first one."""
        if not self.num_calls:
            self.begin_schedule(frozenset(), "calls")
        first = self.num_in_calls
        self.num_calls += 1
        self.num_in_calls += num
        return first

    def end_calls(self) -> None:
        """No call of the running pass can be sent back any more."""
        self.num_calls = self.num_in_calls = 0
        self.num_over_calls += 1

    def end(self) -> None:
        """A backward has ended, and with it the pass, unless the pass is a schedule with more of them."""
        self._journal.num_backwards += 1
        self.num_backwards += 1
        self.num_unscaled += not self.current.is_scaled
        self.num_unweighed += self.must_be_weighed and not self.current.is_weighed
        if self.current.op is None:
            self.abandon()
        else:
            self.current.end_backward()

    def abandon(self) -> None:
        """Drop the state of the running pass."""
        self.current = Pass(self._script(reduces=self.reduces), self._moments, reduces=self.reduces)

    def note_scaled(self) -> None:
        """The running backward is that of a scaled loss."""
        self.current.is_scaled = True

    def note_weighed(self) -> None:
        """The running backward is that of a weighted loss."""
        self.current.is_weighed = True

    def note_cut_short(self) -> None:
        """A backward raised, and all gradients were dropped."""
        self.owes_reductions = False
        self.num_cut_short += 1
        self.cut_short_at = self.num_backwards

    def clear_faults(self) -> None:
        """Gradients were zeroed: forget what was wrong with them."""
        self.cut_short_at = -1
        self.num_unscaled = self.num_unweighed = 0

    def finish_reductions(self) -> None:
        """Gradients that passes left unreduced are reduced now."""
        self.owes_reductions = False
        self._set_reduces(True)

    def forget_programs(self) -> None:
        """Record the next pass of either kind."""
        for script in self._scripts.values():
            script.forget()

    def _set_reduces(self, reduces: bool) -> None:
        self.current.reduces = reduces
        self.current.script = self._script(reduces=reduces)

    def _script(self, *, reduces: bool) -> Script:
        return self._scripts.setdefault(("pass", reduces), Script(self._journal))


class Evaluation:
    """One call of the model without gradients: the running one, or the next."""

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

    def forget_programs(self) -> None:
        """Record the next call of each segment."""
        for script in self._scripts.values():
            script.forget()
