"""From events to actions: a step is recorded once, then its program is followed.

[Note: passes] A training pass is the forwards and backwards between two moments at which nothing is open;
an evaluation pass is what one call of the model does without gradients. The first pass of each kind is
executed action by action, waiting for each communication, and recorded. From the second on the program
made from the record is followed, with gathers running ahead. A pass that does not do what was recorded goes
on without look-ahead, still right, and is recorded anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn

from shardwise.program import (
    AFTER_STEP,
    BEFORE_STEP,
    END_OF_BACKWARD,
    Moment,
    StepProgram,
    Trace,
    UnitSpec,
    drop_due,
    gather_due,
    plan_step,
    serial,
    straight_trace,
)
from shardwise.runtime.executor import BoundBlock, Executor
from shardwise.runtime.hooks import Hooks
from shardwise.runtime.reach import Callers, Reach
from shardwise.runtime.script import LONGEST_TRACE, Script
from shardwise.storage import Flat, FullState, Unit


class Runner:
    """Executes one model's programs as its hooks report events."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], executor: Executor, *, prefetch_bytes: int | None
    ) -> None:
        self.units = list(units)
        self.num_recordings = 0
        self._executor = executor
        self._prefetch_bytes = prefetch_bytes
        self.specs: tuple[UnitSpec, ...] = tuple(unit.spec for unit in units)
        self._buffers_bytes = 0
        self.program = self._plan(straight_trace(self.specs))
        """The training step: as foreseen until the first backward is through, then as recorded."""
        self._step = self._bound_step()
        self.reduces = True
        """Whether the passes that begin from here on reduce their gradients; not inside `no_sync`."""
        self._trainings = {True: Script(), False: Script()}
        self._pass_reduces = True
        self._evaluation = Script()
        self._in_pass = False
        self._in_evaluation = False
        self._is_training_root: bool | None = None
        self._open_backwards: set[str] = set()
        self._kept: set[str] = set()
        self._model = model
        self._callers: Callers | None = None
        self._reach: Reach | None = None
        self._reached = False
        self._watched = {True: False, False: False}
        self.hooks = Hooks(model, self.units, self)

    def remove(self) -> None:
        self.hooks.remove()
        self._stop_watching()

    # -- events: forward --------------------------------------------------------------------------------

    def enter_root(self) -> None:
        if self.hooks.is_cut_short:
            self.recover()
        training = torch.is_grad_enabled()
        self._is_training_root = training
        if not training:
            self._in_evaluation = True
            self._evaluation.begin()
        if not self._watched[training]:
            self._watch()
        elif self._watched[not training]:
            self._stop_watching()

    def leave_root(self, *, raised: bool) -> None:
        if raised:
            self.recover()
            return
        self._look_away()
        self._is_training_root = None
        self._end_evaluation()

    def before_forward(self, unit: Unit) -> None:
        training = self._is_training()
        if training and not self._in_pass:
            self._begin_pass()
        moment = Moment("before", "forward", unit.name)
        block = self._script().take(moment)
        self._run(block, moment, unit, training=training)
        self._make_sure(unit)

    def after_forward(self, unit: Unit, *, opaque: bool) -> None:
        if opaque:  # no output could be watched, so its backward cannot be foreseen: it stays whole
            self._kept.add(unit.name)
        moment = Moment("after", "forward", unit.name)
        block = self._script().take(moment)
        if unit.name in self._kept and self._is_training():
            return
        self._run(block, moment, unit, training=self._is_training())

    # -- events: backward -------------------------------------------------------------------------------

    def before_backward(self, unit: Unit) -> None:
        if unit.name in self._open_backwards:
            self._make_sure(unit)
            return
        if not self._in_pass:
            self._begin_pass()
        self._open_backwards.add(unit.name)
        moment = Moment("before", "backward", unit.name)
        self._close_overdue(moment)
        self._run(self._training.take(moment), moment, unit)
        self._make_sure(unit)

    def after_backward(self, unit: Unit) -> None:
        self._open_backwards.discard(unit.name)
        self._kept.discard(unit.name)
        moment = Moment("after", "backward", unit.name)
        self._close_overdue(moment)
        block = self._training.take(moment)
        if block is None:
            self._settle_reductions()
        self._run(block, moment, unit)

    def end_of_backward(self) -> None:
        """Everything back to rest: reductions done, gathered buffers freed; and learn from what was recorded."""
        self._close_overdue(END_OF_BACKWARD)
        expected = self._training.expected()
        if expected is not None and expected.moment == END_OF_BACKWARD:
            self._training.take(END_OF_BACKWARD)
            expected.run()
        followed = self._training.is_finished()
        self._flush()
        if not followed:
            self._learn()
        self._in_pass = False
        self._open_backwards.clear()
        self._kept.clear()

    # -- what events have in common ---------------------------------------------------------------------

    def _run(self, block: BoundBlock | None, moment: Moment, unit: Unit, *, training: bool = True) -> None:
        """What the program has for `moment`; without one what is due by the table, waited for at once."""
        with self._reach.paused() if self._reach is not None else nullcontext():
            if block is not None:
                block.run()
                return
            if moment.edge == "before":
                due = gather_due(unit.spec, moment, training=training)
            else:
                due = drop_due(unit.spec, moment, training=training, reduces=self._pass_reduces)
            self._executor.run(moment, serial(due))

    def _begin_pass(self) -> None:
        self._in_pass = True
        self._pass_reduces = self.reduces
        self._training.begin()

    @property
    def _training(self) -> Script:
        return self._trainings[self._pass_reduces]

    def _is_training(self) -> bool:
        """Whether forwards belong to a training pass: as the root was called, whatever is recomputed inside it."""
        return torch.is_grad_enabled() if self._is_training_root is None else self._is_training_root

    def _script(self) -> Script:
        return self._training if self._is_training() else self._evaluation

    def _make_sure(self, unit: Unit) -> None:
        """`unit` is whole when it computes, whatever the program thought."""
        for flat in unit.flats:
            mover = self._executor.movers[flat.name]
            if flat.state is FullState.FLYING:
                mover.wait_full()
            if flat.state is FullState.ABSENT:
                moment = Moment("before", "forward", unit.name)
                self._run(None, moment, unit)

    def _close_overdue(self, moment: Moment) -> None:
        """Parameters that took no part in this backward have no gradient to wait for.

        Where the program has a unit end its backward before `moment`, it ends it now: other ranks, on which
        every parameter took part, have started that reduction already.
        """
        expected = self._training.expected()
        while (
            expected is not None
            and expected.moment != moment
            and (expected.moment.edge, expected.moment.phase) == ("after", "backward")
            and expected.moment != END_OF_BACKWARD
        ):
            self._open_backwards.discard(expected.moment.unit)
            self._training.take(expected.moment)
            expected.run()
            expected = self._training.expected()

    def _settle_reductions(self) -> None:
        for mover in self._executor.movers.values():
            mover.settle_reduction()

    def _flush(self) -> None:
        """Reduce what the program did not foresee, in an order that all ranks share, and free all that is whole."""
        self._settle_reductions()
        for unit in reversed(self.units) if self._pass_reduces else ():
            if any(flat.has_partial_inbox() for flat in unit.flats):
                self._run(None, Moment("after", "backward", unit.name), unit)
        self.free_all()

    def make_whole(self, flats: Sequence[Flat]) -> None:
        """Gather `flats` outside of any forward; `free_all` lets them go."""
        wanted = set(flats)
        for unit in self.units:
            if wanted & set(unit.flats):
                self._make_sure(unit)

    def free_all(self) -> None:
        """Let go of everything that is whole and need not be."""
        for unit in self.units:
            for flat in unit.flats:
                self._executor.movers[flat.name].wait_full()
                flat.free_full()
                flat.free_held()

    def _end_evaluation(self) -> None:
        if not self._in_evaluation:
            return
        self._in_evaluation = False
        if not self._evaluation.is_finished() and self._evaluation.trace:
            trace = tuple(self._evaluation.trace)
            if len(trace) < LONGEST_TRACE and not self._reached:
                planned = plan_step(self.specs, trace, prefetch_bytes=self._prefetch_bytes, training=False)
                self._evaluation.learn(self._executor.bind(planned.micro_batch))
                self._watched[False] = True
        self._reached = False
        if not self._in_pass:
            self.free_all()

    # -- learning ---------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Make the program of the pass that has just been recorded."""
        trace = tuple(moment for moment in self._training.trace if moment.unit)
        if self._reached or len(trace) >= LONGEST_TRACE:
            self._reached = False
            return
        if self._pass_reduces:
            self.program = self._plan(trace)
            micro_batch = self.program.micro_batch
        else:
            planned = plan_step(self.specs, trace, prefetch_bytes=self._prefetch_bytes, reduces=False)
            micro_batch = planned.micro_batch
        self._training.learn(self._executor.bind(micro_batch))
        self._watched[True] = True
        self.num_recordings += 1

    def _plan(self, trace: Trace) -> StepProgram:
        return plan_step(self.specs, trace, prefetch_bytes=self._prefetch_bytes, buffers_bytes=self._buffers_bytes)

    # -- the optimizer step -----------------------------------------------------------------------------

    def before_step(self) -> None:
        """Gradients to where the optimizer's states are, and the ranks' verdict on them.

        What `no_sync` left behind, with no backward since that reduced it, is reduced first.
        """
        self._pass_reduces = True
        self._flush()
        for mover in self._executor.movers.values():
            if mover.waits_where_due:
                mover.keep_due()
        self._step[BEFORE_STEP].run()

    def after_step(self) -> None:
        """New parameters to where they rest; gradients are used up."""
        self._step[AFTER_STEP].run()
        for unit in self.units:
            for flat in unit.flats:
                flat.drop_gradients()

    @property
    def trace(self) -> Trace:
        """The order in which units are used in one micro-batch."""
        return tuple(block.moment for block in self.program.micro_batch if block.moment.unit)

    def restore_params(self) -> None:
        """Parameters anew from the master weights, which a checkpoint has filled."""
        self._step[AFTER_STEP].run()

    def recover(self) -> None:
        """A forward or backward raised: wait for what is on its way, let go of what is whole, forget gradients."""
        self.hooks.forget()
        self._look_away()
        for mover in self._executor.movers.values():
            mover.abandon()
        self.free_all()
        for unit in self.units:
            for flat in unit.flats:
                flat.drop_gradients()
        self._in_pass = self._in_evaluation = False
        self._is_training_root = None
        self._open_backwards.clear()
        self._kept.clear()

    def foresee_buffers(self, num_bytes: int) -> None:
        """Every step ends with rank 0's changed buffers, `num_bytes` of them, given to all."""
        self._buffers_bytes = num_bytes
        self.program = self._plan(self.trace)
        self._step = self._bound_step()

    def _bound_step(self) -> dict[Moment, BoundBlock]:
        return {block.moment: block for block in self._executor.bind(self.program.step)}

    # -- watching ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look at every operation until the root is left."""
        if self._callers is None:
            self._callers = Callers(self._model)
        if self._reach is None:
            self._reach = Reach(self.units, self._gather_reached)
            self._reach.__enter__()  # type: ignore[no-untyped-call]  # torch's own

    def _look_away(self) -> None:
        if self._reach is not None:
            self._reach.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
            self._reach = None

    def _stop_watching(self) -> None:
        """Nothing has to be found any more. Only while no module runs."""
        self._look_away()
        if self._callers is not None:
            self._callers.remove()
            self._callers = None

    def _gather_reached(self, unit: Unit) -> None:
        """A module reads `unit` without calling it: gather it now, and from the next pass on before that module."""
        caller = self._callers.innermost() if self._callers is not None else None
        site = caller if caller is not None else self._model
        self._reached = True
        self._kept.add(unit.name)
        if all(site is not known for known in unit.sites):
            unit.sites.append(site)
            self.hooks.add_site(unit, site)
        self._make_sure(unit)
