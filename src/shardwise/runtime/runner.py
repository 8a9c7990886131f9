"""From events to actions: a step is recorded once, then its program is followed.

[Note: passes] A training pass is the forwards and backwards between two moments at which nothing is open;
an evaluation pass is what one call of the model does without gradients. The first pass of each kind is
executed action by action, waiting for each communication, and recorded. From the second on the program
made from the record is followed, with gathers running ahead. A pass that does not do what was recorded goes
on without look-ahead, still right, and is recorded anew.

[Note: closings] A unit's backward is *closed* (its parameters dropped, its gradients reduced) at the same point
on every rank, though ranks may see it end at different times, or not at all where one of them has not used all
of its parameters (an expert that got no token). That point is where the program says, at the latest before the
next unit's backward opens. While there is no program, the ranks agree before each opening on the units that are
through on any of them. What still arrives afterwards is found by the verdict of the step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.comm import Commons, World
from shardwise.errors import StateError
from shardwise.program import (
    AFTER_STEP,
    BEFORE_STEP,
    DURING_STEP,
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
from shardwise.runtime.compiled import CompiledUnits
from shardwise.runtime.executor import BoundBlock, Executor
from shardwise.runtime.hooks import Hooks, in_backward
from shardwise.runtime.inference import Inference
from shardwise.runtime.reach import Callers, Reach
from shardwise.runtime.script import LONGEST_TRACE, Script
from shardwise.storage import Flat, FullState, Unit
from shardwise.telemetry import UNITS


class Runner:
    """Executes one model's programs as its hooks report events."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        executor: Executor,
        exchange: Callable[[bytes], list[bytes]],
        commons: Sequence[Commons],
        *,
        prefetch_bytes: int | None,
        compile_backend: str | None = None,
    ) -> None:
        self.units = list(units)
        self.num_recordings = 0
        self._by_name = {unit.name: unit for unit in units}
        self._executor = executor
        self._timeline = executor.timeline
        self._exchange = exchange
        self._commons = commons
        self._prefetch_bytes = prefetch_bytes
        self.specs: tuple[UnitSpec, ...] = tuple(unit.spec for unit in units)
        self._gathers = not all(flat.resident for unit in self.specs for flat in unit.flats)
        """Whether parameters come and go. If they do, memory is what is short, and the forward shall have it."""
        self._buffers_bytes = 0
        self.program = self._plan(straight_trace(self.specs))
        """The training step: as foreseen until the first backward is through, then as recorded."""
        self._step = self._bound_step()
        self.reduces = True
        """Whether the passes that begin from here on reduce their gradients; not inside `no_sync`."""
        self._trainings = {reduces: Script(executor.journal) for reduces in (True, False)}
        self._pass_reduces = True
        self._evaluation = Script(executor.journal)
        self._in_pass = False
        self._in_evaluation = False
        self._is_training_root: bool | None = None
        self._open_backwards: set[str] = set()
        self._through: dict[str, Unit] = {}
        """Units whose backward has ended on this rank and is not closed yet, in that order."""
        self._kept: set[str] = set()
        self._lasting: set[str] = set()
        """Units that stay whole until this pass ends, because not all of their uses have been seen."""
        self._inference: Inference | None = None
        self._model = model
        self._callers: Callers | None = None
        self._reach: Reach | None = None
        self._is_wiser = False
        """Whether this pass has taught how to see more, so that the next one is to be recorded."""
        self._known_left: set[str] = set()
        """Units found to end a backward with parameters that have no gradient on some rank. The same on all ranks."""
        self._owes_reductions = False
        self.num_backwards = 0
        """Backwards that have ended, ever."""
        self.num_cut_short = 0
        """Backwards that raised, ever. What such a one has left is forgotten, and what waited beside it with it."""
        self.cut_short_at = -1
        """How many backwards had ended when one was cut short last; -1 if none has been since `forgive`."""
        self.num_unscaled = 0
        """Backwards since `forgive` that were not of a loss that `note_scaled` has been told of."""
        self._is_scaled = False
        self._watched = {True: False, False: False}
        self.hooks = Hooks(model, self.units, self)
        self._compiled = CompiledUnits(model, units, compile_backend) if compile_backend else None

    def remove(self) -> None:
        self.hooks.remove()
        self._stop_watching()
        if self._compiled is not None:
            self._compiled.remove()

    def dissolve(self) -> None:
        """Let go of everything, after `remove`. Hooks and runner know each other, and would keep every flat buffer
        until a garbage collection."""
        self.__dict__.clear()

    # -- events: forward --------------------------------------------------------------------------------

    def enter_root(self) -> None:
        if self._inference is not None:
            return
        self.recover_if_cut_short()
        training = torch.is_grad_enabled()
        self._is_training_root = training
        if not training:
            self._in_evaluation = True
            self._evaluation.begin()
        if not self._watched[training]:
            self._watch()
        else:
            self._stop_watching()
            if self._compiled is not None:
                self._compiled.install()

    def leave_root(self, *, raised: bool) -> None:
        if self._inference is not None:
            self._inference.release_all()
            return
        if raised:
            self._executor.journal.note(sys.exc_info()[1])
            self._recover()
            return
        self._look_away()
        self._is_training_root = None
        self._end_evaluation()

    def before_forward(self, unit: Unit) -> None:
        if self._inference is not None:
            self._inference.need(unit)
            return
        training = self._is_training()
        if training and not self._in_pass:
            self._begin_pass()
        moment = unit.moments.before_forward
        block = self._script(training=training).take(moment)
        self._run(block, moment, unit, training=training)
        self._open(unit)
        if self._timeline.is_on:
            self._timeline.begin(UNITS, f"forward {unit.name}")

    def after_forward(self, unit: Unit, *, opaque: bool) -> None:
        if self._inference is not None:
            self._inference.release(unit)
            return
        if self._timeline.is_on:
            self._timeline.end(UNITS, f"forward {unit.name}")
        if opaque:  # no output could be watched, so its backward cannot be foreseen: it stays whole
            self._kept.add(unit.name)
        training = self._is_training()
        moment = unit.moments.after_forward
        block = self._script(training=training).take(moment)
        if not (training and unit.name in self._kept):
            self._run(block, moment, unit, training=training)
        unit.rest()
        for flat in unit.flats:
            flat.relax()  # of what stays whole until its backward: the loss comes first, when activations are most

    # -- events: backward -------------------------------------------------------------------------------

    def before_backward(self, unit: Unit) -> None:
        if unit.name in self._open_backwards:
            self._open(unit)
            return
        if not self._in_pass:
            self._begin_pass()
        self._open_backwards.add(unit.name)
        moment = unit.moments.before_backward
        self._run(self._arrive_at(moment), moment, unit)
        self._open(unit)
        if self._timeline.is_on:
            self._timeline.begin(UNITS, f"backward {unit.name}")

    def after_backward(self, unit: Unit) -> None:
        """See [Note: closings]."""
        if self._timeline.is_on:
            self._timeline.end(UNITS, f"backward {unit.name}")
        self._open_backwards.discard(unit.name)
        self._kept.discard(unit.name)
        self._through[unit.name] = unit
        while (closing := self._expected_closing()) in self._through:
            self._close_as_planned(closing)

    def end_of_backward(self) -> None:
        """Everything back to rest: reductions done, gathered buffers freed; and learn from what was recorded."""
        block = self._arrive_at(END_OF_BACKWARD)
        for unit in self.units if self._timeline.is_on else ():  # those with parameters that got no gradient
            self._timeline.end(UNITS, f"backward {unit.name}")
        if block is not None:
            block.run()
        self._settle_reductions()
        self.free_all()
        if not self._training.is_finished():
            self._learn()
        self._executor.journal.num_backwards += 1
        self.num_backwards += 1
        self.num_unscaled += not self._is_scaled
        self._in_pass = self._is_wiser = self._is_scaled = False
        for names in (self._open_backwards, self._kept, self._lasting, self._through):
            names.clear()

    # -- what events have in common ---------------------------------------------------------------------

    def _run(self, block: BoundBlock | None, moment: Moment, unit: Unit, *, training: bool = True) -> None:
        """What the program has for `moment`; without one what is due by the table, waited for at once."""
        if self._reach is not None:
            with self._reach.paused():
                self._act(block, moment, unit, training=training)
        else:
            self._act(block, moment, unit, training=training)

    def _act(self, block: BoundBlock | None, moment: Moment, unit: Unit, *, training: bool) -> None:
        if block is not None:
            block.run()
            return
        if moment.edge == "before":
            due = gather_due(unit.spec, moment, training=training)
        else:
            due = drop_due(unit.spec, moment, training=training, reduces=self._pass_reduces)
        if unit.name in self._lasting:
            due = tuple(action for action in due if action.verb != "free")
        self._executor.run(moment, serial(due))

    def _begin_pass(self) -> None:
        self._in_pass = True
        self._pass_reduces = self.reduces
        self._owes_reductions |= not self.reduces
        self._training.begin()

    @property
    def _training(self) -> Script:
        return self._trainings[self._pass_reduces]

    def _is_training(self) -> bool:
        """Whether forwards belong to a training pass: as the root was called, whatever is recomputed inside it."""
        return torch.is_grad_enabled() if self._is_training_root is None else self._is_training_root

    def _script(self, *, training: bool) -> Script:
        return self._training if training else self._evaluation

    def _make_sure(self, unit: Unit) -> None:
        """`unit` is whole when it computes, whatever the program thought."""
        for flat in unit.flats:
            if flat.is_whole:
                continue
            if flat.state is FullState.FLYING:
                self._executor.movers[flat.name].wait_full()
            if flat.state is FullState.ABSENT:
                self._run(None, unit.moments.before_forward, unit)

    def _open(self, unit: Unit) -> None:
        """`unit` is whole, and its parameters are plain ones, while it computes."""
        self._make_sure(unit)
        unit.wake()

    # -- closings -----------------------------------------------------------------------------------------

    def _arrive_at(self, moment: Moment) -> BoundBlock | None:
        """Close what has to be closed before `moment` of a backward; what the program has for it, if it is followed."""
        while closing := self._expected_closing():
            self._close_as_planned(closing)
        if not self._training.expects(moment):
            self._settle_reductions()
            self._close_agreed(and_left=moment == END_OF_BACKWARD)
        return self._training.take(moment)

    def _expected_closing(self) -> str:
        """The unit whose backward the program ends next, before anything else; "" if something else comes next."""
        expected = self._training.expected()
        return expected.closes if expected is not None else ""

    def _close_as_planned(self, name: str) -> None:
        block = self._training.take(self._by_name[name].moments.after_backward)
        is_through = self._is_through(name)
        if not is_through:
            self.hooks.watch_inputs(self._by_name[name])
        else:
            self._by_name[name].rest()
        if block is not None:
            block.run(frees=is_through)

    def _close_agreed(self, *, and_left: bool) -> None:
        """Close, in one order, the units that are through on any rank. All ranks call.

        With `and_left` also those that nobody calls through but that have gradients. All of their parameters
        will not have one next time either, so that then the end of their backward is looked for elsewhere.
        """
        left = [unit.name for unit in self.units if and_left and self._pass_reduces and unit.has_partial_inbox()]
        for name, is_left in self._agree(self._through, left).items():
            unit = self._by_name[name]
            if self._is_through(name):
                unit.rest()
            else:
                self.hooks.watch_inputs(unit)
            if is_left and name not in self._known_left:
                self._known_left.add(name)
                self._is_wiser = True
            moment = unit.moments.after_backward
            self._run(self._training.take(moment), moment, unit)

    def _is_through(self, name: str) -> bool:
        """Whether the unit to be closed is through here too; if not it may still be needed, and stays whole."""
        self._open_backwards.discard(name)
        if self._through.pop(name, None) is not None:
            return True
        self._lasting.add(name)
        return False

    def _agree(self, through: Iterable[str], left: Iterable[str]) -> dict[str, bool]:
        """Every unit that is through or left on any rank, in an order that all share; and whether any has it left."""
        numbers = {unit.name: number for number, unit in enumerate(self.units, start=1)}
        mine = [numbers[name] for name in through] + [-numbers[name] for name in left]
        said = self._exchange(" ".join(map(str, mine)).encode())
        agreed: dict[str, bool] = {}
        for number in map(int, b" ".join(said).split()):
            name = self.units[abs(number) - 1].name
            agreed[name] = agreed.get(name, False) or number < 0
        return agreed

    def _settle_reductions(self) -> None:
        for mover in self._executor.movers.values():
            mover.settle_reduction()

    def make_whole(self, flats: Sequence[Flat]) -> None:
        """Gather `flats` outside of any forward; `free_all` lets them go."""
        wanted = set(flats)
        for unit in self.units:
            if wanted & set(unit.flats):
                self._open(unit)

    def free_all(self) -> None:
        """Let go of everything that is whole and need not be."""
        for unit in self.units:
            for flat in unit.flats:
                flat.rest()
                self._executor.movers[flat.name].wait_full()
                flat.free_full()
                flat.free_held()

    def _end_evaluation(self) -> None:
        if not self._in_evaluation:
            return
        self._in_evaluation = False
        if not self._evaluation.is_finished() and self._evaluation.trace:
            trace = tuple(self._evaluation.trace)
            if len(trace) < LONGEST_TRACE and not self._is_wiser:
                planned = plan_step(self.specs, trace, prefetch_bytes=self._prefetch_bytes, training=False)
                self._evaluation.learn(self._executor.bind(planned.micro_batch))
                self._watched[False] = True
        if not self._in_pass:
            self._is_wiser = False
            self._lasting.clear()
            self.free_all()

    # -- forwards at each rank's own pace ---------------------------------------------------------------

    @contextmanager
    def inference(self, world: World, keep_bytes: int | None) -> Iterator[None]:
        """Inside, ranks run what they like without gradients; see [Note: rounds] in `inference.py`."""
        if self._in_pass or self._inference is not None:
            what = "a forward and its backward" if self._in_pass else "the two ends of another one"
            raise StateError(f"engine.inference() was entered between {what}; finish that first.")
        if self._compiled is not None:  # every length would be compiled anew; training puts it back
            self._compiled.remove()
        inference = Inference(self.units, self._open, world, keep_bytes)
        self._inference = inference
        failed = True
        try:
            with torch.no_grad():
                inference.begin()
                yield
            failed = False
        finally:
            try:
                inference.end(failed=failed)
            finally:
                self._inference = None
                self.free_all()

    # -- learning ---------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Make the program of the pass that has just been recorded."""
        trace = tuple(moment for moment in self._training.trace if moment.unit)
        if self._is_wiser or len(trace) >= LONGEST_TRACE:
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
        if self._owes_reductions:
            self._reduce_left()
        for mover in self._executor.movers.values():
            if mover.waits_where_due:
                mover.keep_due()
        self._step[BEFORE_STEP].run()

    def during_step(self) -> None:
        """What the update needs of whole parameters, if it needs any."""
        if DURING_STEP in self._step:
            self._step[DURING_STEP].run()

    def reduce_unforeseen(self) -> None:
        """Reduce the gradients that the program has left on some rank, and record the next pass. All ranks call."""
        self._reduce_left()
        for script in self._trainings.values():
            script.forget()

    def _reduce_left(self) -> None:
        self._owes_reductions = False
        self._pass_reduces = True
        self._settle_reductions()
        left = [unit.name for unit in self.units if unit.has_partial_inbox()]
        for name in self._agree((), left):
            unit = self._by_name[name]
            self._run(None, unit.moments.after_backward, unit)
        self.free_all()

    def after_step(self) -> None:
        """New parameters to where they rest."""
        self._executor.journal.num_backwards = 0
        self._executor.journal.note(None)
        self.restore_params()
        self._executor.rest(keeps_some=not self._gathers)

    def open_params(self) -> None:
        """Before parameters are written where they rest: no rank reads them any more. All ranks call."""
        for commons in self._commons:
            commons.open()

    @property
    def trace(self) -> Trace:
        """The order in which units are used in one micro-batch."""
        return tuple(block.moment for block in self.program.micro_batch if block.moment.unit)

    def restore_params(self) -> None:
        """Parameters anew from the master weights, which have been written. All ranks call."""
        self._step[AFTER_STEP].run()
        self.close_params()

    def close_params(self) -> None:
        """This rank has written its parameters. All ranks call."""
        for commons in self._commons:
            commons.close()

    def recover_if_cut_short(self) -> None:
        """If a backward raised since the last event: let go of everything, and of all gradients. Not inside of one."""
        if not self.hooks.is_cut_short:
            return
        self._recover()
        for unit in self.units:
            for flat in unit.flats:
                flat.drop_gradients()
        self._owes_reductions = False
        self.num_cut_short += 1
        self.cut_short_at = self.num_backwards

    def forgive(self) -> None:
        """Gradients were zeroed, and whatever was wrong with them is no more."""
        self.cut_short_at = -1
        self.num_unscaled = 0
        staying = [flat for unit in self.units for flat in unit.flats if flat.stays]
        for flat in staying:
            flat.stays = False
        if staying and not self._in_pass:
            self.free_all()

    def note_scaled(self) -> None:
        """The backward that is running is of a scaled loss."""
        self._is_scaled = True

    def _recover(self) -> None:
        """A forward or backward raised: wait for what is on its way, and let go of what is whole."""
        self.hooks.forget()
        self._look_away()
        for mover in self._executor.movers.values():
            mover.abandon()
        self.free_all()
        self._in_pass = self._in_evaluation = self._is_wiser = self._is_scaled = False
        self._is_training_root = None
        for names in (self._open_backwards, self._kept, self._lasting, self._through):
            names.clear()

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
        self._is_wiser = True
        self._kept.add(unit.name)
        self._lasting.add(unit.name)
        if all(site is not known for known in unit.sites):
            unit.sites.append(site)
            num_running = self._callers.num_running(site) if self._callers is not None else 1
            self.hooks.add_site(unit, site, num_running=num_running)
        self._open(unit)

    # -- parameters that are used outside of the modules that own them --------------------------------------

    @property
    def is_computing(self) -> bool:
        """Whether the model's forward, or a backward, is running, or ranks run any method at their own pace."""
        is_inside = self._is_training_root is not None or self._in_evaluation or self._inference is not None
        return is_inside or self.hooks.is_open or in_backward()

    def reach(self, unit: Unit) -> None:
        """A computation reads `unit` without having called it: it is whole, and plain, until that is over."""
        if self._inference is not None:
            self._inference.need(unit)
            unit.wake()
        elif in_backward():
            self._lasting.add(unit.name)
            self._open(unit)
        elif self._callers is None:
            self._watched = {True: False, False: False}  # where it is read from is found in the next pass
            self._is_wiser = True
            self._kept.add(unit.name)
            self._lasting.add(unit.name)
            self._open(unit)
        else:
            self._gather_reached(unit)

    @contextmanager
    def borrowed(self, units: Sequence[Unit]) -> Iterator[None]:
        """Inside, `units` are whole, for whoever reads them between two computations. All ranks enter."""
        absent = [flat for unit in units for flat in unit.flats if not flat.is_whole]
        for unit in units:
            self._make_sure(unit)
        try:
            yield
        finally:
            for flat in absent:
                flat.free_full()

    def await_graph(self, unit: Unit) -> None:
        """A graph is being made by a backward, and may read `unit` in another backward: it stays whole until
        `forgive`."""
        for flat in unit.flats:
            flat.stays = True
