"""An engine in an elastic job: what a lost rank means for the training loop.

[Note: iterations] Everything from a forward to its step is an *iteration*; every rank counts them. Ranks are never more
than one collective apart, but when one notices a fault in the forward of iteration 8, another may still be in the step
of iteration 7, waiting to hear that it is complete. So each rank reports which iteration it has begun. Iterations after
the last complete step, up to the newest that any rank has begun, are *void* on all ranks, begun or not. So all ranks
take the next one together. To have split the batch of an iteration over ranks (`split_sequence`) counts as its
beginning: that batch was read for the former world.

In a void iteration a rank runs at its own pace and sends nothing (*quiet mode*): parameters are whole as in
`engine.inference()`, forwards compute no gradients, backwards and steps change nothing. Random numbers and buffers are
restored afterwards. For exchanges outside a step (`engine.mean`, `save`) see `between_steps.py`.

[Note: stages] Of a model in pipeline stages, loops call whole steps only. A fault anywhere in the micro-batches ends
them, and comes out of the schedule; so nothing is caught inside of it, in forwards and in backwards, which are ours,
nor in what a `loss_fn` calls there. No stage can run at its own pace: in a void iteration the model does not run, and
the loss is nan.

[Note: ended elsewhere] A rank may hear in the commit of a step that the step is undone, when others have ended it and
are in a call after it, such as `engine.mean`. That call, and what their loops did before it, they have made with the
step taken. So this rank ends the step as taken too, and the loop hears that it is undone where the others' do: in the
next call.

[Note: where ranks join] The last commit, or regrouping after a fault, tells all ranks whether any wants to join or
leave. They do so at the beginning of the next iteration, which becomes void; if that is void already, of the one after
it, since after a fault some ranks may have begun it before. Every loop reaches the forward of a training step, whatever
it does before, so there a new loop and those of the others are at the same point. No rank joins during recovery from a
fault, since the fault may have hit the others anywhere: between a step and the next forward, or in the middle of an
iteration. What a new rank exchanges before its first forward, by `resume`, `any_rank` and the like, is answered with
what it received when it joined (`is_arriving`).

[Note: the commit] A step is complete when every rank has reported that it has written it, and no rank returns from the
step before that. So no rank can have continued after a step that must be undone, with one exception. Copies to other
hosts are sent during the next step. If a host dies meanwhile, the last step is lost although it has ended on all ranks.
Then its iteration becomes void on all of them, and what it began with is restored.

[Note: reads between steps] Updated parameters may still be gathered when a step returns (see `memory/flat.py`); a
forward that meets a fault then is repeated. So is a single function that reads parameters between steps, such as one
that averages weights: see `_recover_read`. But what was read before it is not read again, so for a loop with such code
the commit waits for the gathers, and a fault is noticed there by all ranks. Whether a loop has such code is not known
before the second commit, so the first one always waits. So do all commits without copies on other hosts (one host, or
`survive: host`): the ranks could not return to the step before if one is lost with its part of an update.

[Note: batches of steps that are undone] A step can be undone after it has ended (see [Note: the commit]). A loop that
follows its engine, by a loader or by `engine.num_steps` and `weigh`, then passes its batch again. For other loops the
last batch that `train_step` was given is kept here, and that step is repeated before anything else.

[Note: changes after a void step] A loop may change parameters after each step: scale weights, put back an average.
After a void step it does that once more, and then again after the repeated one. So from the fault on until the next
iteration begins, what a loop sets is left out. What it has set before the void iteration is kept, in a version of its
own (`Recovery.take_edits`), also where the loop sets it again at the beginning of the repeated one.

[Note: batches of another division] On a smaller mesh along `sp`, a rank computes more tokens of each sample. But in the
iteration that is void, the loop has its part of a batch that was split over more ranks, targets of the same shape, and
perhaps code that joins parts. So until the next split, or the next iteration, that batch is computed by the
`SequenceParallel` that has divided it, though its ranks are gone: in quiet mode only shapes mean anything.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardwise.checkpoint import Loaded
from shardwise.checkpoint.json_codec import decode
from shardwise.comm import World
from shardwise.comm.regrouping import Membership
from shardwise.elastic.arrival import Arrival
from shardwise.elastic.loop_state import seed_all
from shardwise.elastic.plain_steps import PlainSteps
from shardwise.elastic.recovery import Host, Recovery
from shardwise.elastic.survivable import give_up
from shardwise.errors import CommError, ConfigError, CorruptionError, LostStateError, TierError
from shardwise.optim.precision import Norm
from shardwise.parallel.experts.router import routers_of
from shardwise.parallel.sequence import SequenceParallel
from shardwise.plan import Plan
from shardwise.plan.replica_groups import num_groups
from shardwise.runtime.activations import Treatments
from shardwise.runtime.fault_tolerant_backward import Tolerant
from shardwise.runtime.hooks import in_backward
from shardwise.runtime.micro_batches import LossFunction, MicroBatch
from shardwise.sharded.access import refuse_to_arriving
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.sharded.state import reshard
from shardwise.sharded.training import Session
from shardwise.system.data_ranks import HANDED_OUT
from shardwise.system.job_folder import BAD_BATCH
from shardwise.system.torch_private import pytree

Result = TypeVar("Result")
_log = logging.getLogger("shardwise")
_CANNOT_SKIP = (
    "bad_batch: skip needs loaders that can skip a batch, and no loader with samples by index follows this engine. Use "
    "sw.data.Loader(..., world=engine.data_ranks) with a source that has a length, or remove bad_batch."
)


class _AloneError(Exception):
    """In an exchange, this rank has come to run at its own pace: it was a spare, and has joined the others again
    elsewhere, or its iteration has become void."""


@dataclass(frozen=True)
class _Arguments:
    """The arguments of the last step."""

    batch: Any
    target: Any
    loss_fn: LossFunction | None
    iteration: int
    divided_by: SequenceParallel | None


class ElasticSession(Session):
    """Intercepts a loop's calls of model, engine and optimizers. `close()` it."""

    def __init__(
        self, host: Host, sharded: ShardedModel, membership: Membership[World], arrival: Arrival | None
    ) -> None:
        """`arrival` is what a rank that joins has received from the others. They are in a recovery then, whose last
        exchange this call takes part in."""
        super().__init__(sharded)
        self._host = host
        self._model = sharded.model
        self._call: Callable[..., Any] = sharded.model._call_impl
        self.recovery = Recovery(host, self, sharded, membership, arrival)
        self._iterations, self._loop_state = self.recovery.iterations, self.recovery.loop_state
        self._quiet = self.recovery.quiet
        self._arrival = arrival
        self.loaders_of_others = _loaders_of(arrival)
        """Kept until an iteration begins that counts: a script may make the loader with which it trains after others,
        and a rank that was a spare may have had a batch in hand, of where it was then. With that it begins a void
        iteration, so the others hand out again what comes where they are."""
        self.is_arriving = sharded.world.is_arriving = arrival is not None
        self._must_seed = arrival is not None
        """See `_seed`."""
        self._came_back: Arrival | None = None
        """What this rank has received that was a spare. The loop's objects are given it again when an iteration begins
        that counts: the loop, in which steps have jumped, may have taken the others' for its own until then."""
        self._must_follow = False
        """Whether loaders have to be able to skip a batch, which is checked at the next forward."""
        self._membership = membership
        self._tell_of_bad_batches()
        self._shown_steps: int | None = None
        """See [Note: ended elsewhere]."""
        self._is_first_commit, self._reads_params = True, False
        """See [Note: reads between steps]."""
        self._is_at_once = False
        """See `_at_once`."""
        self._divided_by: SequenceParallel | None = None
        self._is_divided_as_before = False
        """See [Note: batches of another division]."""
        self._plain = sharded.parts.sharding.plain
        """See [Note: chosen beforehand] in `mesh_choice.py`."""
        self._noted_fault: CommError | None = None
        """A fault that a backward has noticed, not recovered from yet."""
        self._last: _Arguments | None = None
        """See [Note: batches of steps that are undone]."""
        self._steps = PlainSteps(sharded.optimizers, self._plain_step)
        self.wrap(sharded)
        if arrival is not None:
            self.recovery.join()

    def _answer_calls(self) -> None:
        """See [Note: stages]: only whole steps are repeated."""

    def _tell_of_bad_batches(self) -> None:
        """Let the launcher know whether a batch that fails is skipped."""
        self._must_follow = self.sharded.plan.bad_batch == "skip"
        if (folder := self._membership.folder) is None:
            return
        if self._must_follow:
            (folder / BAD_BATCH).write_text("skip")
        else:
            (folder / BAD_BATCH).unlink(missing_ok=True)

    @property
    def num_steps(self) -> int:
        return super().num_steps if self._shown_steps is None else self._shown_steps

    @property
    def num_void(self) -> int:
        return super().num_void - (self._shown_steps is not None)

    def was_void(self) -> bool:
        return self._iterations.was_void()

    # -- interception ---------------------------------------------------------------------------------------

    def wrap(self, sharded: ShardedModel) -> None:
        """Route calls of the model to `_forward`, through an attribute that `Module.__call__` tries first. Not in a
        pipeline: see [Note: stages]."""
        self.sharded, self._lines = sharded, sharded.lines
        sharded.before_update, sharded.before_settling = self._before_update, self._before_settling
        settles = weakref.WeakMethod(self._before_settling)
        sharded.parts.gradients.before_verdict = lambda: (method := settles()) is not None and method()
        recover = weakref.WeakMethod(self._recover_read)
        sharded.parts.owner.on_fault = lambda error: (method := recover()) is not None and method(error)
        lost = weakref.WeakMethod(self._has_lost_gradients)
        sharded.parts.owner.has_lost_gradients = lambda error: (method := lost()) is not None and method(error)
        broken = weakref.WeakMethod(self._has_lost_backward)
        sharded.parts.owner.has_lost_backward = lambda error: (method := broken()) is not None and method(error)
        repeats, leaves_out = weakref.WeakMethod(self._is_to_repeat), weakref.WeakMethod(self.leaves_out)
        sharded.parts.owner.is_void = lambda: (method := repeats()) is not None and method()
        sharded.parts.owner.leaves_out = lambda change: (method := leaves_out()) is not None and method(change)
        if sharded.parts.pipeline is not None:
            return
        self._model.__dict__["_compiled_call_impl"] = self._forward
        is_void, runner = self._iterations.is_void, sharded.parts.runner
        runner.let_report(Tolerant(runner, self._note_fault, is_void), is_void)
        for line in self._lines:
            line.on_fault = self._note_fault_of_layer
        sharded.begin_factors_when_due()  # a rank may have been lost, or have joined, before this was planned

    def unwrap(self) -> None:
        self._model.__dict__.pop("_compiled_call_impl", None)
        for line in self._lines:  # a loop may still send back what it has computed in this world
            line.fall_silent()

    def _before_update(self) -> None:
        self._host.wait_for_copy()
        self.recovery.survival.before_change()
        self._loop_state.update_begins()

    def _before_settling(self) -> None:
        """The background thread may still be copying what is about to change."""
        self.recovery.survival.await_copies()

    def come_back(self, arrival: Arrival) -> None:
        self._arrival, self.loaders_of_others = arrival, _loaders_of(arrival)
        self.is_arriving = self.recovery.world.is_arriving = self._must_seed = True
        self._came_back = arrival
        self._noted_fault = self._last = self._shown_steps = None
        self._is_first_commit = True

    def seed_anew(self) -> None:
        self._must_seed = True

    def _note_fault(self, error: CommError) -> None:
        self._noted_fault = error

    def _note_fault_of_layer(self, error: CommError) -> None:
        """A split layer has met `error`. See [Note: a fault inside of autograd] in
        `runtime/fault_tolerant_backward.py`."""
        if not in_backward():
            raise error
        self._noted_fault = self._noted_fault or error

    def _handle_noted_fault(self) -> None:
        """Recover, if a backward has noticed a fault."""
        error, self._noted_fault = self._noted_fault, None
        if error is not None:
            self.recovery.recover(error)

    def _recover_read(self, error: CommError) -> bool:
        """Recover, after code of the loop has met `error` when it read a parameter: between two steps, or inside of an
        iteration, which becomes void, such as for a term of the loss."""
        if self._is_at_once or self.recovery.is_left:
            return False
        self._noted_fault = None  # a backward has met the same one
        self._recover_outside(error)
        return True

    def _has_lost_gradients(self, error: CommError | None) -> bool:
        """Whether the gradients of the open iteration are void, because of what its backward has noted, or of an
        `error` that code between backward and step has met when it read one."""
        if self._is_at_once or not self._iterations.is_open or self.recovery.is_left:
            return False
        error, self._noted_fault = self._noted_fault or error, None
        if error is not None:
            self.recovery.recover(error)
        return self._iterations.is_void()

    def _has_lost_backward(self, error: CommError | None) -> bool:
        """Whether a backward that is running is void. Ranks recover behind it."""
        self._noted_fault = self._noted_fault or error
        return self._noted_fault is not None or self._iterations.is_void()

    def _recover_outside(self, error: CommError) -> None:
        self.recovery.recover(error)
        if not self._iterations.is_open:
            self._take_last_again()

    # -- what a loop calls ----------------------------------------------------------------------------------

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not self._iterations.is_open:
            self._begin()
        if self._plain is not None and torch.is_grad_enabled():
            self._before_micro_batches([MicroBatch(args, kwargs)])
        return self.computing(partial(self._call, *args, **kwargs))

    def computing(self, work: Callable[[], Result]) -> Result:
        if self._is_at_once:
            return work()
        while True:
            self._handle_noted_fault()
            grads = torch.is_grad_enabled()
            try:
                with torch.set_grad_enabled(grads and not self._quiet.is_on), self._divided_as_before():
                    output = work()
                break
            except CommError as error:
                self.recovery.recover(error)
        return self._quietly(output, grads=grads) if self._quiet.is_on else output

    def _quietly(self, output: Any, *, grads: bool) -> Any:
        """`output` as a loop may go on with it in a void iteration: a rank that came back in the middle of one takes
        the steps of others for its own, and what is evaluated between two steps is not told to be void. So that is
        nan."""
        is_evaluated = not self._iterations.is_open
        if self._iterations.is_alone or (is_evaluated and self._quiet.is_undefined):
            output = pytree.tree_map_only(torch.Tensor, _without_values, output)
        if grads:
            for router in routers_of(self._model).values():
                if router.loss is not None:
                    router.loss.requires_grad_()
        return _with_grads(output, self._quiet.give_gradients) if grads else output

    def in_iteration(
        self,
        work: Callable[[], Result],
        *,
        void: Callable[[], Result],
        alone: Callable[[], Result] | None = None,
        is_small: bool = True,
    ) -> Result:
        """In a void iteration, as known to all ranks, nothing is sent. Between steps all ranks repeat it."""
        if self._is_at_once:
            return work()
        if not self._iterations.is_open:
            return self.asking(work, alone=alone or void, is_small=is_small)
        self._handle_noted_fault()
        if not self._quiet.is_on:
            try:
                return work()
            except CommError as error:
                self.recovery.recover(error)
        return void()

    def splitting(self, split: Callable[[], Result]) -> Result:
        """The batch is one for the world that it was read in: if a rank is lost, the iteration that it is for is void,
        as if it had begun."""
        if self.sharded.parts.sequence is None:
            self._divided_by = None
            return split()
        self._iterations.is_prepared = not self._iterations.is_open
        while True:
            self._handle_noted_fault()
            self._divided_by = self.sharded.parts.sequence
            try:
                return split()
            except CommError as error:
                self._recover_outside(error)

    @property
    def sequence(self) -> SequenceParallel | None:
        """See [Note: batches of another division]."""
        now, before = self.sharded.parts.sequence, self._divided_by
        is_same = now is not None and before is not None and now.divides_like(before)
        return before if self._quiet.is_on and not is_same else now

    @contextmanager
    def _divided_as_before(self) -> Iterator[None]:
        """Inside, the model computes a batch as it was divided: see [Note: batches of another division]."""
        now, before = self.sharded.parts.sequence, self.sequence
        with ExitStack() as stack:
            if before is not now and not self._is_divided_as_before:  # a model may call the engine
                self._is_divided_as_before = True
                stack.callback(setattr, self, "_is_divided_as_before", False)
                if now is not None:
                    stack.enter_context(now.suspended())
                if before is not None:
                    stack.enter_context(before.reopened())
            yield

    def forward_backward(
        self,
        batch: Any,
        target: Any,
        loss_fn: LossFunction | None,
        compute: Callable[[Any], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """See [Note: stages]."""
        if not self._iterations.is_open:
            self._begin()  # in which a model may get stages, or lose them
        if self.sharded.parts.pipeline is None:
            return super().forward_backward(batch, target, loss_fn, compute)
        if not self._iterations.is_void():
            try:
                with self._at_once():
                    return super().forward_backward(batch, target, loss_fn, compute)
            except CommError as error:
                self.recovery.recover(error)
        self.sharded.progress.micro_steps.are_all_run = True
        return torch.tensor(math.nan, device="cpu")

    def _verify_gradients(self, first: MicroBatch, loss_fn: LossFunction | None) -> None:
        """If a rank is lost meanwhile, the iteration is void, and gradients are verified when it is repeated. Of a
        single rank they are verified again when others have come."""
        if self._iterations.is_void() or self.sharded.world.size == 1:
            return
        try:
            with self._at_once(), self._without_wrong_bits():
                super()._verify_gradients(first, loss_fn)
        except CommError as error:
            self._noted_fault = None  # a backward has met the same one
            self.recovery.recover(error)

    def _before_micro_batches(self, parts: Sequence[MicroBatch]) -> None:
        """Of the first step: see [Note: chosen beforehand] in `mesh_choice.py`."""
        if self._plain is None or self._iterations.is_void():
            return
        from shardwise.elastic.mesh_choice import choose_meshes  # only jobs that have a choice load it

        plain, self._plain = self._plain, None
        self.recovery.propose(choose_meshes(self.sharded, plain, parts[0]))

    def evaluate(self, batch: Any, target: Any, loss_fn: LossFunction | None) -> torch.Tensor:
        """With pipeline stages an exchange between steps, which all ranks repeat."""
        if self.sharded.parts.pipeline is None:
            return super().evaluate(batch, target, loss_fn)
        compute = partial(super().evaluate, batch, target, loss_fn)

        def work() -> torch.Tensor:
            if self._iterations.is_void():
                raise _AloneError
            self._quiet.leave()  # between iterations nobody is at a pace of its own
            with self._at_once():
                return compute()

        return self.asking(work, alone=partial(torch.tensor, math.nan), is_small=False)

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """Inside, calls of the model are not intercepted: what is computed is repeated, or given up, as a whole."""
        self._is_at_once = True
        try:
            yield
        finally:
            self._is_at_once = False

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        if self._iterations.is_void():
            self._quiet.give_gradients()
            return
        try:
            self.sharded.backward(loss, weight)
        except CommError as error:
            self.recovery.recover(error)
        except Exception as error:  # see [Note: recomputed after a fault] in fault_tolerant_backward.py
            if self._noted_fault is None or isinstance(error, TierError):
                raise
        self._handle_noted_fault()

    def step(self, is_last: bool | None = None) -> Norm | None:
        """The gradient norm; nan for a void step."""
        self._handle_noted_fault()
        if self._iterations.is_void():
            if not self.sharded.progress.micro_steps.end(self.sharded.plan.accumulate, is_last=is_last):
                return None
            return self._end_void()
        try:
            with self._steps.inside(), self._without_wrong_bits():
                norm = self.sharded.step(is_last)
            if norm is None:
                return None
            self._commit()
        except CommError as error:
            taken = self.sharded.progress.num_steps
            self.recovery.recover(error)
            if self._iterations.is_void():
                return self._end_void(taken)
            norm = self.sharded.progress.gradient_norm
        self._iterations.end()
        return norm

    @contextmanager
    def _without_wrong_bits(self) -> Iterator[None]:
        """Inside, a rank that has wrong bits leaves, and the others raise the fault from which they recover."""
        try:
            yield
        except CorruptionError as error:
            raise self.recovery.fault_for_others(error) from error

    def _plain_step(self, step: Callable[[], Result], *, is_last: bool) -> Result | None:
        """`optimizer.step()`, called without the engine; the last of several optimizers ends the iteration."""
        self._handle_noted_fault()
        if not self._iterations.is_open:  # no forward since the last step: nothing to repeat
            return step()
        result, taken = None, 0
        if not self._iterations.is_void():
            try:
                with self._steps.inside(), self._without_wrong_bits():
                    result = step()
                if is_last:
                    self._commit()
            except CommError as error:
                taken = self.sharded.progress.num_steps
                self.recovery.recover(error)
        if is_last and self._iterations.is_void():
            self._end_void(taken)
        elif is_last:
            self._iterations.end()
        return result

    def clip(self, max_norm: float, norm_type: float) -> Norm:
        self._handle_noted_fault()
        if not self._iterations.is_void():
            try:
                return self.sharded.parts.gradients.clip(max_norm, norm_type)
            except CommError as error:
                self.recovery.recover(error)
        return math.nan

    def train(self, batch: Any, target: Any, loss_fn: LossFunction | None) -> torch.Tensor:
        """A void step is repeated with the same batch."""
        draws = isinstance(batch, Iterator)
        shown: int | None = None
        while True:
            progress = self.sharded.progress
            before = progress.num_void
            now = list(islice(batch, self.sharded.plan.accumulate)) if draws else batch
            loss = super().train(now, target, loss_fn)
            if self.is_arriving:  # this rank was a spare, and the others are at another batch
                return loss
            is_followed = progress.weighing.is_used  # then the loader reads the step's data again
            if progress.num_void == before:
                self._last = self._remembered(now, target, loss_fn)
                self._shown_steps = shown  # others repeat it in the call after this one: see [Note: ended elsewhere]
                return loss
            if is_followed and not draws:
                return loss
            shown = shown if self._shown_steps is None else self._shown_steps
            self._require_same_division((now, target), self._divided_by)
            self._take_last_again()

    def _take_last_again(self) -> None:
        """Repeat the last step, if it was undone."""
        given = self._last
        if given is None or not self._iterations.is_undone(given.iteration):
            return
        settings = self._loop_state.settings()
        self._require_same_division((given.batch, given.target), given.divided_by)
        while True:
            before = self.sharded.progress.num_void
            super().train(given.batch, given.target, given.loss_fn)
            if self.sharded.progress.num_void == before:
                break
        self._last = replace(given, iteration=self._iterations.begun)
        if settings is not None:  # schedulers have counted that step already, or are about to
            settings.restore()

    def _remembered(self, batch: Any, target: Any, loss_fn: LossFunction | None) -> _Arguments | None:
        """A copy of the arguments, since a loop may refill its batch. `None` if the step cannot be undone, or if the
        loop would pass the batch again."""
        if self.recovery.survival.copies is None or self.sharded.progress.weighing.is_used:
            return None
        copied, target = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, (batch, target))
        self.sharded.progress.split_batches.note_copy(copied, batch)
        return _Arguments(copied, target, loss_fn, self._iterations.begun, self.sharded.parts.sequence)

    def _require_same_division(self, given: object, by: SequenceParallel | None) -> None:
        """Raise `LostStateError` if `given` is this rank's part of a batch, and is to be used again on another number
        of ranks along `sp`, none of which has the whole."""
        now = self.sharded.parts.sequence
        is_other = by is not None and (now is None or not now.divides_like(by))
        if by is not None and is_other and by.batches.sample_of(given) is not None:
            self._membership.gives_up()
            raise LostStateError(
                f"A step is to be repeated on another number of ranks along sp, and train_step has only this rank's "
                f"part of its batch, which was split over {by.line.num_ranks}. Let the loop pass the batch of "
                f"engine.num_steps again (`sw.data.Loader(..., world=engine.data_ranks)`, or engine.weigh), or give a "
                f"model of transformers whole batches, which it splits by itself. Start again from the last checkpoint."
            )

    def _plan_memory(self) -> None:
        """At the first forward instead, where a lost rank can be made up for: see `Recovery.plan_again`."""

    # -- iterations -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._iterations.is_prepared:
            self._divided_by = self.sharded.parts.sequence
        if self._must_follow and not self._host.can_leave_out():
            raise ConfigError(_CANNOT_SKIP)
        self._must_follow = False
        recovery, iterations = self.recovery, self._iterations
        iterations.begin()
        self._loop_state.begin()
        self._shown_steps = None
        self.is_arriving = recovery.world.is_arriving = False
        if self._arrival is not None:
            self._loop_state.load(self._arrival.groups, self._arrival.schedules)
            self._arrival = None
        self.sharded.progress.micro_steps.begin_step()
        recovery.between_steps.begin()
        recovery.take_edits()
        iterations.num_steps[iterations.version] = self.sharded.progress.num_steps  # which a resume has changed
        if recovery.changes_wanted and iterations.begun > iterations.void_until:  # see [Note: where ranks join]
            recovery.recover(None)  # the batch was read for the former world: the iteration is void
        if self.is_arriving:  # again: this rank was a spare meanwhile
            return
        if self._quiet.is_on and iterations.begun > iterations.void_until:
            self._quiet.leave()
        recovery.iteration_begins()
        if not self._quiet.is_on and self.sharded.parts.unfreezing.can_plan:
            recovery.plan_again()
        self._loop_state.restore_settings()
        if self._must_seed and not iterations.is_void():
            self._seed()
        self._loop_state.take(iterations.begun, keeps_last=recovery.survival.copies is not None)
        if iterations.is_void():
            self._loop_state.note_settings()
        else:
            self.loaders_of_others = {}
            if self._came_back is not None:
                self._host.receive(self._came_back)
                self._came_back = None

    def _seed(self) -> None:
        """In the first step that a rank takes with others: the ranks of its replica group, which have all joined with
        it, draw the same random numbers from now on, whatever they have drawn before. If the step is void, its
        repetition begins with them too."""
        self._must_seed = False
        mesh = self.sharded.mesh
        if num_groups(mesh) < mesh.world_size:
            place, num_places = mesh.data_place(self.recovery.world.rank)
            seed_all(self.sharded.progress.num_steps * num_places + place)

    def _commit(self) -> None:
        """See [Note: the commit] and [Note: reads between steps]."""
        self._reads_params = self._reads_params or self.sharded.parts.runner.gathering.was_read
        self.recovery.commit(awaits_updates=self._reads_params or self._is_first_commit)
        self._is_first_commit = False

    def _end_void(self, taken: int = 0) -> Norm | None:
        """`taken` are the steps taken with this one, if it was complete here until it was undone."""
        self.sharded.zero_grad()
        HANDED_OUT.end_void()
        if self._iterations.begun >= self._iterations.void_until:
            self._quiet.leave()
        self._loop_state.restore()
        self._iterations.end()
        self.sharded.progress.num_void += 1
        if not taken or self._iterations.begun > self._iterations.ended_anywhere:
            return math.nan
        self._shown_steps = taken
        return self.sharded.progress.gradient_norm

    # -- between steps --------------------------------------------------------------------------------------

    def asking(
        self, work: Callable[[], Result], *, alone: Callable[[], Result] | None = None, is_small: bool = True
    ) -> Result:
        """Results that are not small: see [Note: large results] in `between_steps.py`."""
        if self.is_arriving and alone is not None:
            return alone()
        self._shown_steps = None
        self._handle_noted_fault()
        confirm = None if is_small else lambda: self.recovery.world.exchange(b"", "read")

        def recover(error: CommError) -> None:
            self._recover_outside(error)
            if self.is_arriving:
                raise _AloneError

        try:
            return self.recovery.between_steps.call(self._iterations.begun, work, confirm, recover)
        except _AloneError:
            return alone() if alone is not None else refuse_to_arriving("this call")

    def leaves_out(self, change: str) -> bool:
        if not self._is_to_repeat():
            return False
        if self.recovery.world.rank == 0:
            _log.warning(
                "%s has no effect after a step that was void, since the loop takes that step again, and then changes "
                "values again. A loop that ends here has made %d steps.",
                change,
                self.num_steps,
            )
        return True

    def _is_to_repeat(self) -> bool:
        """Whether the loop is between a step that was void and the iteration in which it takes that step again."""
        return not self.is_arriving and self._iterations.was_void()

    def before_change(self) -> None:
        if self.is_arriving:
            refuse_to_arriving("a change of values")
        self.recovery.is_edited = True

    def resume(self, folder: Path, read: Callable[[], Loaded | None]) -> Loaded | None:
        """A rank that has joined reads nothing. If one is lost meanwhile, the others read all of it again."""

        def read_between_steps() -> Loaded | None:
            if not self._iterations.is_open:
                self._quiet.leave()  # between iterations nobody is at a pace of its own
            return read()

        def arrived() -> Loaded | None:
            assert self._arrival is not None
            return self._arrival.resumed(folder, self.sharded.progress.num_steps)

        found = self.asking(read_between_steps, alone=arrived, is_small=False)
        self.recovery.is_edited = self.recovery.is_edited or (found is not None and not self.is_arriving)
        return found

    def reshard(self, plan: Plan) -> TierError | None:
        """A rank that has joined has the others' plan."""
        if self.is_arriving:
            return None
        whole, smaller = self.recovery.of_whole_job(plan)
        with self._given_up_at_a_fault():
            self.sharded, lost = reshard(self.sharded, self.recovery.plan_here(whole, smaller), smaller)
        self.recovery.renew(self.sharded, whole)
        self._tell_of_bad_batches()
        return lost

    @contextmanager
    def inference(self, keep_bytes: int | None) -> Iterator[None]:
        with self._given_up_at_a_fault(), super().inference(keep_bytes):
            yield

    def changing(self) -> AbstractContextManager[None]:
        return self._given_up_at_a_fault()

    @contextmanager
    def _given_up_at_a_fault(self) -> Iterator[None]:
        """Inside, nothing is repeated."""
        try:
            yield
        except CommError as error:
            give_up(error, self.recovery.world)
            raise

    def treat(self, plan: Plan, treatments: Treatments) -> None:
        super().treat(plan, treatments)
        self.recovery.note_treatments(plan)

    # -- what it costs, and the end -------------------------------------------------------------------------

    @property
    def bytes_for_survival(self) -> tuple[int, int, int]:
        survival = self.recovery.survival
        return survival.image_bytes, survival.kept_bytes, survival.disk_bytes

    @property
    def cost_of_copies(self) -> dict[str, float]:
        meter = self.recovery.copy_meter
        return asdict(meter) if meter.num_copies else {}

    def finish_updates(self) -> None:
        """If a rank is lost here, the others end: this rank needs nothing more."""
        with suppress(CommError):
            super().finish_updates()

    def close(self, error: BaseException | None = None) -> None:
        self.unwrap()
        self._steps.close()
        self._loop_state.loads.end()
        self.recovery.close(error)


ElasticSession._forward.compiles_nothing = True  # type: ignore[attr-defined]  # for `OuterCompile`


def _loaders_of(arrival: Arrival | None) -> dict[int, Any]:
    every = enumerate(() if arrival is None else arrival.loop["loaders"])
    return {number: decode(state, "loader") for number, state in every if state is not None}


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    """NaN in the place of numbers that mean nothing."""
    return torch.full_like(tensor, math.nan) if tensor.is_floating_point() else tensor


def _with_grads(output: Any, came: Callable[[], None]) -> Any:
    """`output` with `requires_grad`, so that the loop's backward runs; all that it does is to call `came`."""
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.is_leaf:
            leaf.requires_grad_().register_hook(lambda _: came())
    return output
