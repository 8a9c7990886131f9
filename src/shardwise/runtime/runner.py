"""Turns events into actions: a step is recorded once, then its program is followed.

The state of passes is in `passes.py`, gathers in `gathering.py`, ends of unit backwards in `post_backward.py`, units
read by other modules in `watch_reads.py`, programs in `programs.py`, and the step in `step.py`. This module says what
each event sets off, in order.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from shardwise.comm import ExchangeOn, Group, SharedBuffers, World
from shardwise.errors import ModelError, StateError
from shardwise.memory import Unit
from shardwise.program import END_OF_BACKWARD, FlatSpec, Moment, UnitSpec
from shardwise.program.schedule import Op
from shardwise.program.step_program import PrefetchBytes
from shardwise.runtime.compiled import CompiledUnits
from shardwise.runtime.dropped_layers import dropped_layers
from shardwise.runtime.executor import Executor
from shardwise.runtime.gathering import Gathering
from shardwise.runtime.hooks import Hooks, Listener, changed_inside, in_backward
from shardwise.runtime.no_grad_forwards import Inference
from shardwise.runtime.passes import Evaluation, Passes
from shardwise.runtime.paths import Paths
from shardwise.runtime.post_backward import PostBackward
from shardwise.runtime.programs import Programs
from shardwise.runtime.split_backward import Halves
from shardwise.runtime.step import Step
from shardwise.runtime.watch_reads import Watching
from shardwise.system.heap import BackwardHeap, FreeHeap
from shardwise.system.telemetry import UNITS
from shardwise.system.torch_private import computes_without_values, num_calls, outside_modes


@dataclass(frozen=True)
class Settings:
    """The part of a plan that concerns how programs run."""

    prefetch_bytes: PrefetchBytes
    compile_backend: str | None = None
    paths_differ: bool = False
    """Whether ranks call different modules; see [Note: different paths] in `paths.py`."""
    if_forward_communicates: str = ""
    """A warning for the first forward that calls collectives of torch's."""


class Runner:
    """Executes the programs of one model as its hooks report events."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        executor: Executor,
        exchange: ExchangeOn,
        shared_buffers: Sequence[SharedBuffers],
        settings: Settings,
        heap: FreeHeap | BackwardHeap | None = None,
    ) -> None:
        self.units = list(units)
        self._model = model
        self.passes = Passes(executor.journal)
        self.programs = Programs([unit.spec for unit in units], executor, settings.prefetch_bytes)
        self.gathering = Gathering(units, executor)
        for grads in (one for unit in self.units for one in unit.trained_grads):
            grads.are_left = partial(_are_left, weakref.ref(self.passes), grads.spec)
        self._journal = executor.journal
        self._timeline = executor.timeline
        self.heap = heap if isinstance(heap, FreeHeap) else None
        """Of which free pages are returned, or `None` if this is not done."""
        self._backward_heap = heap if isinstance(heap, BackwardHeap) else None
        self._evaluation = Evaluation(executor.journal)
        self._is_training_root: bool | None = None
        """Whether the running call of the model had gradients enabled; `None` between calls."""
        self._inference: Inference | None = None
        self.verifies = False
        """Whether passes are of a verified step."""
        self.halves = Halves()
        self._hooks = Hooks(model, self.units, self, self.halves)
        self._gathers = any(not flat.spec.resident for unit in self.units for flat in unit.flats)
        # Apart, so that a rank that has ended an evaluation does not meet one that asks for a unit.
        closings, paths = partial(exchange, subject="closings"), partial(exchange, subject="paths")
        self._post_backward = PostBackward(self.passes, self.gathering, self._hooks, self.halves, closings)

        def drops_layers() -> bool:
            return model.training and bool(dropped_layers(model))

        self._paths = Paths(self.passes, self._evaluation, self._post_backward, self.programs, paths, drops_layers)
        self._paths.may_differ = settings.paths_differ
        to_say = settings.if_forward_communicates
        self._watching = Watching(model, self.gathering, self._hooks, self.passes, self._paths, to_say)
        self.step = Step(executor, self.programs, self.passes, self.gathering, self._post_backward, shared_buffers)
        backend = settings.compile_backend
        self._compiled = CompiledUnits(model, units, backend) if backend else None

    def remove(self) -> None:
        self._end_backward_heap()
        self.gathering.abandon_updates()
        self._hooks.remove()
        self._watching.stop()
        if self._compiled is not None:
            self._compiled.remove()

    def let_report(self, listener: Listener, is_void: Callable[[], bool]) -> None:
        """Send the hooks' events to `listener`, which forwards them to this runner. See `Hooks.report_to`."""
        self._hooks.report_to(listener, is_void)

    # -- events: the model ------------------------------------------------------------------------------

    def enter_root(self) -> None:
        is_traced = is_dynamo_compiling()
        if not is_traced:
            self._require_values()
            self._journal.require_usable()
        if self._inference is not None:
            return
        self.recover_if_cut_short()
        if self._is_training_root is not None and num_calls(self._model) == 1:  # the call before this one is no more
            self._recover()
        if not is_traced:  # the clock cannot be
            self._journal.clock.work()
            self._end_backward_heap()
        training = torch.is_grad_enabled()
        self._is_training_root = training
        if not training:
            self._evaluation.begin()
        if not self._watching.has_seen(training=training):
            self._watching.start()
            return
        self._watching.stop()
        if self._compiled is not None:
            self._compiled.install()

    def _require_values(self) -> None:
        """Of parameters that are whole here shapes can be computed, too, once those on their way have come."""
        if not computes_without_values():
            return
        if self._gathers:
            raise StateError(
                "A sharded model was called on fake tensors, or traced by make_fx, and its parameters cannot be "
                "gathered there. engine.rehearse(batch) computes shapes and memory; trace a plain model that has "
                "loaded engine.state_dict()."
            )
        with outside_modes():
            self.gathering.await_updates()

    def leave_root(self, *, raised: bool) -> None:
        if self._inference is not None:
            return
        if raised:
            self._journal.note(sys.exc_info()[1])
            self._recover()
            return
        try:
            self._watching.require_in_place()
        except ModelError as error:
            self._journal.note(error)
            self._recover()
            raise
        self._watching.pause()
        if self._is_training_root and self.passes.current.is_running:
            self._paths.end_forward(training=True)
            if self.heap is not None and not is_dynamo_compiling():
                self.heap.after_forward()
            if self._backward_heap is not None and not is_dynamo_compiling():
                self._backward_heap.begin()
        self._is_training_root = None
        if self._evaluation.is_running:
            self._end_evaluation()

    def _end_evaluation(self) -> None:
        self._paths.end_forward(training=False)
        if not is_dynamo_compiling():
            self._journal.clock.rest()
        self._evaluation.is_running = False
        if self._paths.learn_evaluation():
            self._watching.note_seen(training=False)
        if not (current := self.passes.current).is_running:
            current.must_record_again = False
            current.lasting.clear()
            self.gathering.free_all()

    # -- events: a unit's forward -----------------------------------------------------------------------

    def before_forward(self, unit: Unit) -> None:
        if self._inference is not None:
            self._inference.before_forward(unit)
            return
        current, training = self.passes.current, self._is_training_root
        if training is None:  # else as the root was called, whatever is recomputed inside it
            training = torch.is_grad_enabled()
        name = unit.name
        if training:
            if not current.is_running:
                self.passes.begin()
            current.called.add(name)
            moment, script = current.moments[name].before_forward, current.script
        else:
            moment, script = unit.moments.before_forward, self._evaluation.script
        block = script.advance(moment) or self._paths.come_to(moment, unit, training=training)
        if block is None or self.gathering.watcher is not None:
            self.gathering.run(block, moment, unit, self.passes.current, training=training)
        elif block.acts:  # here and below: see [Note: once for each event]
            block.act()
        if name not in current.awake:
            self.gathering.open(unit)
            if current.keeps_awake:
                current.note_open(unit)
        if self.verifies and training:
            self._verify(unit.moments.before_forward)
        if self._timeline.is_on:
            self._timeline.begin(UNITS, f"forward {unit.name}")
        if self._is_training_root is None:
            self._watching.enter_alone(unit, training=training)

    def forward_raised(self, unit: Unit) -> None:
        self._watching.leave_alone(unit, raised=True)

    def after_forward(self, unit: Unit, *, opaque: bool) -> None:
        if self._inference is not None:
            self._inference.release(unit)
            return
        if self._timeline.is_on:
            self._timeline.end(UNITS, f"forward {unit.name}")
        current = self.passes.current
        if opaque:  # no output could be watched, so the start of its backward will not be seen: keep it whole
            current.kept.add(unit.name)
        training = self._is_training_root
        if training is None:
            training = torch.is_grad_enabled()
            self._watching.leave_alone(unit, raised=False)
        name = unit.name
        if training:
            moment, script = current.moments[name].after_forward, current.script
        else:
            moment, script = unit.moments.after_forward, self._evaluation.script
        block = script.advance(moment) or self._paths.come_to(moment, unit, training=training)
        if not (training and name in current.kept):
            if block is None or self.gathering.watcher is not None:
                self.gathering.run(block, moment, unit, current, training=training)
            elif block.acts:
                block.act()
        for flat in () if name in current.awake else unit.flats:
            flat.guard.rest()
            if flat.shared is not None:  # pages of what stays whole until its backward: activations peak at the loss
                flat.relax()

    # -- events: a backward -----------------------------------------------------------------------------

    def before_backward(self, unit: Unit) -> None:
        current, name = self.passes.current, unit.name
        if name in current.open:
            self._paths.need(unit, training=True, is_backward=True)
            self.gathering.open(unit)
            return
        if not current.is_running:
            self.passes.begin()
        current.opened.add(name)
        moment = current.moments[name].before_backward
        block = current.script.advance(moment) or self._post_backward.arrive_at(moment, unit)
        current.open.add(name)  # only now: its use before this one may have been closed just above
        if block is None or self.gathering.watcher is not None:
            self.gathering.run(block, moment, unit, current)
        elif block.acts:
            block.act()
        if name not in current.awake:
            self.gathering.open(unit)
            if current.keeps_awake:
                current.note_open(unit)
        if self.verifies:
            self._verify(unit.moments.before_backward)
        if self._timeline.is_on:
            self._timeline.begin(UNITS, f"backward {unit.name}")

    def _verify(self, moment: Moment) -> None:
        """Take checksums of what was gathered for `moment`."""
        block = self.programs.verification.get(moment)
        if block is not None and not is_dynamo_compiling():
            with self.gathering.unwatched():
                block.run()

    def after_backward(self, unit: Unit) -> None:
        if self.halves.are_second:
            return
        if self._timeline.is_on:
            self._timeline.end(UNITS, f"backward {unit.name}")
        self._post_backward.note_ended(unit)

    def end_of_backward(self) -> None:
        """Bring everything back to rest, or within a schedule only what the program does not count on, and learn from
        the recording."""
        current = self.passes.current
        if self.halves.are_second:
            return
        block = self._post_backward.arrive_at(current.moments.end_of_backward)
        for unit in self.units if self._timeline.is_on else ():  # those with parameters that got no gradient
            self._timeline.end(UNITS, f"backward {unit.name}")
        if block is not None:
            block.act()
        if current.op is not None and current.script.is_followed:
            self.gathering.free_owed(current.awake)
        else:
            self.gathering.come_to_rest()
            current.awake.clear()
        if current.op is not None:
            self.gathering.expect_gradients()
        if current.op is None and self._paths.learn(current, reduces=current.reduces):
            self._watching.note_seen(training=True)
        self.passes.end()
        self._journal.clock.rest()
        self._end_backward_heap()

    def await_graph(self, unit: Unit) -> None:
        """A backward is building a graph that may read `unit` in another backward: keep it whole until
        `clear_faults`."""
        for flat in unit.flats:
            flat.stays = True

    def await_end(self, unit: Unit) -> None:
        """The last read of the frozen parameters of `unit` in this pass cannot be detected: keep them until it ends."""
        for flat in unit.flats:
            flat.lasts = not flat.spec.trainable

    @contextmanager
    def probing(self, probe: Callable[[Unit], None]) -> Iterator[None]:
        """Inside, a forward and backward leave nothing: `probe` takes each unit's gradients where its backward ends.
        Before the passes of a step; all ranks enter."""
        passes = self.passes
        before, passes.reduces = passes.reduces, False
        owes, self._post_backward.probe = passes.owes_reductions, probe
        try:
            yield
            for unit in self.units:  # what came after the end of its unit's backward
                probe(unit)
        finally:
            passes.reduces, passes.owes_reductions, self._post_backward.probe = before, owes, None
            passes.num_backwards -= 1

    # -- several micro-batches as one pass --------------------------------------------------------------

    def foresee_schedule(
        self, row: Sequence[Op], stages: Mapping[int, Sequence[UnitSpec]], halved: set[nn.Parameter] | None
    ) -> None:
        """Plan steps over `row` of a pipeline's schedule. `stages` are the units of each stage of this rank. `halved`
        are the parameters whose gradients come in the second half of a backward, if backwards are split: a unit's first
        half then ends, and the unit may be freed, when the gradients of its inputs have been computed."""
        self.programs.foresee_schedule(row, stages)
        if halved is not None:
            self.halves.foresee(self.units, halved)
            for unit in self.units:
                self._hooks.watch_inputs(unit)

    def begin_evaluation_of(self, stage: Hashable) -> None:
        """Evaluations from here on are of this stage of a pipeline, which has its own program."""
        self._evaluation.segment = stage

    @contextmanager
    def over_schedule(self) -> Iterator[None]:
        """Inside, the ops of a pipeline's schedule run, announced by `passes.begin_op`: see
        [Note: a schedule is a pass] in `passes.py`."""
        self.end_calls()
        self.recover_if_cut_short()
        self.passes.begin_schedule(self.halves.units)
        self._hooks.lets_sum = not self.halves.units
        try:
            yield
            self._require_unwritten()
        except BaseException:
            self.fail_schedule()
            raise
        finally:
            self._hooks.lets_sum = False
            for unit in self.units:
                for grads in unit.trained_grads:
                    grads.end_sums()
        self._end_schedule(is_complete=True)

    def _require_unwritten(self) -> None:
        """Raise `ModelError` if code that a schedule ran, such as its loss, has written to parameters: once they stay
        awake, nothing intercepts that."""
        for unit, num_writes in self.passes.current.first_opened.values():
            if unit.num_writes() != num_writes:
                raise changed_inside(unit.name)

    def begin_call(self, num: int) -> int:
        """A call of a model in stages begins, with `num` micro-batches, whose ops are announced by `passes.begin_op`;
        the number of the first one. Calls that wait for their backwards are one pass, as a schedule is."""
        self.recover_if_cut_short()
        first = self.passes.begin_call(num)
        self.passes.current.keeps_awake = True
        return first

    def end_ops_of_call(self) -> None:
        """The forwards of a call have run, or its backward has: the loop goes on, with parameters at rest."""
        current = self.passes.current
        self._require_unwritten()
        for unit in self.units if current.awake else ():
            if unit.name in current.awake:
                unit.rest()
        current.awake.clear()
        current.first_opened.clear()
        current.keeps_awake = False

    def begin_backward_of_call(self) -> None:
        """The gradients of a call's outputs have come."""
        self.passes.current.keeps_awake = True

    def end_call(self) -> None:
        """The backward of a call has ended, or the call needs none."""
        self.end_ops_of_call()
        self.passes.num_calls -= 1
        if not self.passes.num_calls:
            self.passes.end_calls()
            self._end_schedule(is_complete=True)

    def end_calls(self) -> None:
        """Calls that have not been sent back will not be."""
        self._end_backward_heap()
        if self.passes.num_calls:
            self.passes.end_calls()
            self._end_schedule(is_complete=False)

    def fail_schedule(self) -> None:
        """An op of a schedule, or of a call, has raised."""
        if self.passes.num_calls:
            self.passes.end_calls()
        if self._hooks.has_begun_backward:
            self._recover_from_backward()
        else:
            self._recover()

    def _end_schedule(self, *, is_complete: bool) -> None:
        """All ops of a schedule have run, or of its forwards some were in vain, and nothing is learned."""
        current = self.passes.current
        block = self._post_backward.arrive_at(END_OF_BACKWARD)
        if block is not None:
            block.act()
        self.gathering.come_to_rest()
        if is_complete and self._paths.learn(current, reduces=self.passes.reduces):
            self._watching.note_seen(training=True)
        self.passes.abandon()

    def backward_through(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """The backward of a stage, from the gradients of what it has put out."""
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        else:  # nothing of this stage is trained, but it still counts as a backward
            self.end_of_backward()

    def backward_of_weights(self, compute: Callable[[Unit], None]) -> None:
        """The second half of a backward: see `PostBackward.close_weights`."""
        self._post_backward.close_weights(compute, self._timeline)
        self.end_of_backward()

    # -- when something raised --------------------------------------------------------------------------

    def recover_if_cut_short(self) -> None:
        """If a backward has raised since the last event: free everything, and drop all gradients."""
        if self._hooks.is_cut_short:
            self._recover_from_backward()

    def recover_if_left(self) -> None:
        """The same between computations; also after Ctrl-C in a forward, of which no hook is told: see `num_calls`."""
        self._end_backward_heap()  # a backward may raise before it comes to a unit
        self.recover_if_cut_short()
        if self._is_training_root is not None or self._hooks.is_open:
            self._recover()

    def _recover_from_backward(self) -> None:
        self._recover()
        self.gathering.drop_gradients()
        self.passes.note_cut_short()

    def _recover(self) -> None:
        """A forward or backward raised: reset to a state in which nothing runs and nothing is gathered."""
        self._hooks.forget()
        self._post_backward.rounds.forget()
        self.halves.forget()
        self._watching.forget()
        self.gathering.abandon()
        self.passes.abandon()
        self._evaluation.is_running = False
        self._is_training_root = None
        self._end_backward_heap()

    def _end_backward_heap(self) -> None:
        if self._backward_heap is not None:
            self._backward_heap.end()

    def clear_faults(self) -> None:
        """Gradients were zeroed: forget what was wrong with them."""
        self.passes.clear_faults()
        if self.gathering.forget_graphs() and not self.passes.current.is_running:
            self.gathering.free_all()

    # -- forwards at each rank's own pace ---------------------------------------------------------------

    @contextmanager
    def inference(self, world: World, keep_bytes: int | None, members: Group | None) -> Iterator[Inference]:
        """Inside, ranks run what they like without gradients: see [Note: rounds] in `no_grad_forwards.py`."""
        is_between = self.passes.current.is_running
        if is_between or self._inference is not None:
            where = "between a forward and its backward" if is_between else "inside another engine.inference()"
            raise StateError(f"engine.inference() was entered {where}; finish that first.")
        if self._compiled is not None:  # every sequence length would be compiled anew; training installs it again
            self._compiled.remove()
        self.gathering.await_updates()
        self._inference = Inference(self._model, self.units, self.gathering, world, members, keep_bytes)
        try:
            with self._inference.running():
                yield self._inference
        finally:
            self._inference = None
            if self._hooks.is_open:  # Ctrl-C has ended a forward
                self._recover()

    # -- parameters that are used outside of the modules that own them ----------------------------------

    @property
    def is_computing(self) -> bool:
        """Whether a forward or backward of the model is running, or `inference` is active."""
        is_inside = self._is_training_root is not None or self._evaluation.is_running or self._inference is not None
        return is_inside or self._hooks.is_open or in_backward()

    def reach(self, unit: Unit) -> None:
        """A computation reads `unit` without calling it: keep it gathered and plain until that computation ends."""
        if self._inference is not None:
            self._inference.need(unit)
        elif in_backward():
            self.passes.current.lasting.add(unit.name)
            self._paths.need(unit, training=True, is_backward=True)
            self.gathering.open(unit)
        else:
            self._watching.gather_reached(unit)


def _are_left(passes: weakref.ref[Passes], spec: FlatSpec) -> bool:
    """Weakly, because programs refer to flat buffers, which would wait in a ring for garbage collection."""
    running = passes()
    return running is not None and not running.current.reduces_flat(spec)
