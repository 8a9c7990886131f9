"""An engine in an elastic job: what a lost rank means for the training loop.

[Note: iterations] Everything from a forward to its step is an *iteration*; every rank counts them. Ranks are never more
than one collective apart, but when one notices a fault in the forward of iteration 8, another may still be in the step
of iteration 7, waiting to hear that it is complete. So each rank reports which iteration it has begun. Iterations after
the last complete step, up to the newest that any rank has begun, are *void* on all ranks, begun or not. So all ranks
take the next one together.

In a void iteration a rank runs at its own pace and sends nothing (*quiet mode*): parameters are whole as in
`engine.inference()`, forwards compute no gradients, backwards and steps change nothing. Random numbers and buffers are
restored afterwards. For exchanges outside a step (`engine.mean`, `save`) see `outside.py`.

[Note: ended elsewhere] A rank may hear in the commit of a step that the step is undone, when others have ended it and
are in a call after it, such as `engine.mean`. That call, and what their loops did before it, they have made with the
step taken. So this rank ends the step as taken too, and the loop hears that it is undone where the others' do: in the
next call.

[Note: where ranks join] The last commit, or regrouping after a fault, tells all ranks whether any wants to join or
leave. They do so at the beginning of the next iteration, which becomes void. Every loop reaches the forward of a
training step, whatever it does before, so there a new loop and those of the others are at the same point. No rank joins
during recovery from a fault, since the fault may have hit the others anywhere: between a step and the next forward, or
in the middle of an iteration. What a new rank exchanges before its first forward, by `resume`, `any_rank` and the like,
is answered with what it received when it joined (`is_arriving`).

[Note: the commit] A step is complete when every rank has reported that it has written it, and no rank returns from the
step before that. So no rank can have continued after a step that must be undone, with one exception. Copies to other
hosts are sent during the next step. If a host dies meanwhile, the last step is lost although it has ended on all ranks.
Then its iteration becomes void on all of them, and what it began with is restored.

[Note: reads between steps] Updated parameters may still be gathered when a step returns (see `storage/updated.py`); a
forward that meets a fault then is repeated. So is a single function that reads parameters between steps, such as one
that averages weights: see `_recover_read`. But what was read before it is not read again, so for a loop with such code
the commit waits for the gathers, and a fault is noticed there by all ranks. Whether a loop has such code is not known
before the second commit, so the first one always waits. So do all commits without copies on other hosts (one host, or
`survive: host`): the ranks could not return to the step before if one is lost with its part of an update.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils import _pytree

from shardwise.access import refuse_to_arriving
from shardwise.checkpoint import Loaded
from shardwise.checkpoint.codec import decode
from shardwise.comm.generation import BAD_BATCH, Membership
from shardwise.elastic.arrival import Arrival
from shardwise.elastic.image_space import warn_if_scarce, why_no_space
from shardwise.elastic.never_saved import NeverSaved
from shardwise.elastic.plain_steps import PlainSteps
from shardwise.elastic.recovery import Host, Recovery, Replanned
from shardwise.elastic.whole_steps import WholeSteps
from shardwise.errors import CommError, ConfigError
from shardwise.micro_batches import LossFunction
from shardwise.precision import Norm
from shardwise.runtime.tolerant import Tolerant
from shardwise.sharded_model import ShardedModel
from shardwise.state import Former
from shardwise.training import Session

Result = TypeVar("Result")
_log = logging.getLogger("shardwise")
_CANNOT_SKIP = (
    "bad_batch: skip needs loaders that can skip a batch, and no loader with samples by index follows this engine. Use "
    "sw.data.Loader(..., world=engine.data_ranks) with a source that has a length, or remove bad_batch."
)


class ElasticSession(Recovery, Session):
    """Intercepts a loop's calls of model, engine and optimizers. `close()` it."""

    def __init__(
        self, host: Host, sharded: ShardedModel, membership: Membership, arrival: Arrival | None = None
    ) -> None:
        """`arrival` is what a rank that joins has received from the others. They are in a recovery then, whose last
        exchange this call takes part in."""
        super().__init__(host, sharded, membership, arrival)
        self._shown_steps: int | None = None
        """See [Note: ended elsewhere]."""
        self._must_follow = self.plan.bad_batch == "skip"
        if self._must_follow and membership.folder is not None:
            (membership.folder / BAD_BATCH).write_text("skip")
        self._reads_params = False
        self._is_first_commit = True
        self._whole_steps = WholeSteps(self)
        self._arrival = arrival
        self.is_arriving = self._world.is_arriving = arrival is not None
        """Whether this rank has joined, and not begun an iteration yet. The others made the exchanges of that part of
        the loop before it joined."""
        self._noted_fault: CommError | None = None
        """A fault that a backward has noticed, not recovered from yet."""
        self._model = sharded.model
        self._call: Callable[..., Any] = sharded.model._call_impl
        self._steps = PlainSteps(sharded.optimizer.members if sharded.optimizer is not None else (), self._plain_step)
        self._wrap()
        if arrival is not None:
            self._share_change_wishes("recovered")
            self._quiet.enter(self.sharded)

    def _before_update(self) -> None:
        self._host.wait_for_copy()
        self._survival.before_change()

    def before_change(self) -> None:
        if self.is_arriving:
            refuse_to_arriving("a change of values")
        self._is_edited = True

    @property
    def num_steps(self) -> int:
        return self.sharded.progress.num_steps if self._shown_steps is None else self._shown_steps

    @property
    def cost_of_copies(self) -> dict[str, float]:
        return asdict(self.copy_meter) if self.copy_meter.num_copies else {}

    def finish_updates(self) -> None:
        """If a rank is lost here, the others end: this rank needs nothing more."""
        with suppress(CommError):
            super().finish_updates()

    def close(self, error: BaseException | None = None) -> None:
        """With an `error`, or if the others continue without this rank, its images stay: the others need them. So they
        do until all ranks have closed."""
        self._unwrap()
        self._steps.close()
        if error is None and not self._is_left:
            self._quiet.leave()
        for layout in (self._former, self._layout):
            if layout is None or layout.survival is None:
                continue
            if error is None and not self._is_left:
                layout.leave(self._world)
            else:
                layout.survival.close(removes=False)

    def _wrap(self) -> None:
        """Route calls of the model to `_forward`, through an attribute that `Module.__call__` tries first."""
        self._model.__dict__["_compiled_call_impl"] = self._forward
        sharded = self.sharded
        sharded.before_update = self._before_update
        sharded.runner.let_report(Tolerant(sharded.runner, self._note_fault))
        recover = weakref.WeakMethod(self._recover_read)
        sharded.parts.owner.on_fault = lambda error: (method := recover()) is not None and method(error)

    def _unwrap(self) -> None:
        self._model.__dict__.pop("_compiled_call_impl", None)

    def _note_fault(self, error: CommError) -> None:
        self._noted_fault = error

    def _handle_noted_fault(self) -> None:
        """Recover, if a backward has noticed a fault."""
        error, self._noted_fault = self._noted_fault, None
        if error is not None:
            self._recover(error)

    def _recover_read(self, error: CommError) -> bool:
        """Recover, after code between two steps has met `error` when it read a parameter. Inside an iteration it must
        raise: what it has computed so far would be of another."""
        if self._is_open or self._is_left:
            return False
        self._recover_outside(error)
        return True

    # -- what a loop calls ------------------------------------------------------------------------------

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not self._is_open:
            self._begin()
        while True:
            self._handle_noted_fault()
            try:
                if not self._quiet.is_on:
                    return self._call(*args, **kwargs)
                grads = torch.is_grad_enabled()
                with torch.no_grad():
                    output = self._call(*args, **kwargs)
                return _with_grads(output) if grads else output
            except CommError as error:
                self._recover(error)

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        if self.is_void():
            return
        try:
            self.sharded.backward(loss, weight)
        except CommError as error:
            self._recover(error)
        self._handle_noted_fault()

    def step(self, is_last: bool | None = None) -> Norm | None:
        """The gradient norm; nan for a void step."""
        self._handle_noted_fault()
        if self.is_void():
            if not self.progress.micro_steps.end(self.plan.accumulate, is_last=is_last):
                return None
            return self._end_void()
        try:
            with self._steps.inside():
                norm = self.sharded.step(is_last)
            if norm is None:
                return None
            self._commit()
        except CommError as error:
            taken = self.sharded.progress.num_steps
            self._recover(error)
            if self.is_void():
                return self._end_void(taken)
            norm = self.sharded.progress.gradient_norm
        self._end()
        return norm

    def _plain_step(self, step: Callable[[], Result], *, is_last: bool) -> Result | None:
        """`optimizer.step()`, called without the engine; the last of several optimizers ends the iteration."""
        self._handle_noted_fault()
        if not self._is_open:  # no forward since the last step: nothing to repeat
            return step()
        result, taken = None, 0
        if not self.is_void():
            try:
                with self._steps.inside():
                    result = step()
                if is_last:
                    self._commit()
            except CommError as error:
                taken = self.sharded.progress.num_steps
                self._recover(error)
        if is_last:
            self._end_void(taken) if self.is_void() else self._end()
        return result

    def _plan_memory(self) -> None:
        """At the first forward instead, where a lost rank can be made up for: see `_plan_again`."""

    def train(self, batch: Any, target: Any, loss_fn: LossFunction | None) -> torch.Tensor:
        """A void step is repeated with the same batch."""
        return self._whole_steps.train(batch, target, loss_fn)

    def clip(self, max_norm: float, norm_type: float) -> Norm:
        self._handle_noted_fault()
        if not self.is_void():
            try:
                return self.sharded.gradients.clip(max_norm, norm_type)
            except CommError as error:
                self._recover(error)
        return math.nan

    def asking(
        self, work: Callable[[], Result], *, alone: Callable[[], Result] | None = None, is_small: bool = True
    ) -> Result:
        """Results that are not small: see [Note: large results] in `outside.py`."""
        if self.is_arriving and alone is not None:
            return alone()
        self._shown_steps = None
        self._handle_noted_fault()
        confirm = None if is_small else lambda: self._world.exchange(b"", "read")
        return self._outside.call(self._begun, work, confirm, self._recover_outside)

    def _recover_outside(self, error: CommError) -> None:
        self._recover(error)
        if not self._is_open:
            self._whole_steps.take_again()

    # -- iterations -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._must_follow and not self._host.can_leave_out():
            raise ConfigError(_CANNOT_SKIP)
        self._must_follow = False
        self._begun += 1
        self._is_open, self._shown_steps = True, None
        self.is_arriving = self._world.is_arriving = False
        if self._arrival is not None:
            self.loop_state.load(self._arrival.groups, self._arrival.schedules)
            self._arrival = None
        self.progress.micro_steps.begin_step()
        self._outside.begin()
        self._take_edits()
        while self._changes_wanted:  # the batch was read for the former world: the iteration is void
            self._recover(None)
        if self._quiet.is_on and self._begun > self._void_until:
            self._quiet.leave()
        if not self._quiet.is_on and self.sharded.unfreezing.can_plan:
            self._plan_again()
        self._num_steps[self._version] = self.sharded.progress.num_steps
        self.loop_state.restore_settings()
        self.loop_state.take(self._begun, keeps_last=self._survival.copies is not None)
        if self.is_void():
            self.loop_state.note_settings()

    def _plan_again(self) -> None:
        """Plan memory for what was unfrozen. If a rank is lost meanwhile, the others recover, and plan later."""
        sharded = self.sharded
        try:
            self._survival.await_copies()  # then the images have all of the layout that is given up
            self._replanned = Replanned(self._layout.label, Former.of(sharded))
            sharded.progress.replan()
        except CommError as error:
            if sharded.is_taken_down and self.sharded is sharded:
                assert self._replanned is not None
                self._former_model, self._layout.flats = self._replanned.model, []
            self._recover(error)
        self._replanned = None

    def _take_edits(self) -> None:
        """Give values changed by hand a version of their own, so that copies from before are not taken for them."""
        if not self._is_edited:
            return
        try:
            self._survival.await_copies()
            if self._survival.copies is not None:
                self._next_version(self._iterations[self._version])
            self._survival.begin(self._version)
        except CommError as error:
            self._recover(error)
        self._is_edited = False

    def _end(self) -> None:
        """End an iteration whose step is complete."""
        self._is_open = False

    def loaders_of_others(self) -> list[Any]:
        return [] if self._arrival is None else self._arrival.loop.pop("loaders", [])

    def resume(self, folder: Path, read: Callable[[], Loaded | None]) -> Loaded | None:
        """On a rank that has joined, its loop continues where those of the others are, whether they have saved or
        not."""
        if not self.is_arriving:
            found = read()
            self._is_edited = self._is_edited or found is not None
            return found
        state = None if self._arrival is None else self._arrival.loop["state"]
        num_steps = self.sharded.progress.num_steps
        if state is None:
            return Loaded(folder, num_steps, NeverSaved()) if num_steps else None
        return Loaded(folder, num_steps, decode(state))

    def _end_void(self, taken: int = 0) -> Norm | None:
        """`taken` are the steps taken with this one, if it was complete here until it was undone."""
        self.sharded.zero_grad()
        if self._begun >= self._void_until:
            self._quiet.leave()
        self.loop_state.restore()
        self._is_open = False
        self.sharded.progress.num_void += 1
        if not taken or self._begun > self._ended_anywhere:
            return math.nan
        self._shown_steps = taken
        return self.sharded.progress.gradient_norm

    def _commit(self) -> None:
        """See [Note: the commit] and [Note: reads between steps]."""
        gathering = self.sharded.runner.gathering
        self._reads_params = self._reads_params or gathering.was_read
        if self._reads_params or self._is_first_commit or self._survival.copies is None:
            gathering.await_updates()
        self._is_first_commit = False
        self._survival.await_copies()
        self._next_version(self._begun)
        images = self._survival.image
        refusal = why_no_space(lambda: self._survival.complete(self._version))
        self._share_change_wishes("commit", refusal)
        if self._survival.image is not images:
            warn_if_scarce(self._layout.folder, self._world)
        self._survival.follow(self._version)
        self._membership.step = self.sharded.progress.num_steps

    def _next_version(self, iteration: int) -> None:
        """Count a new version of the state, produced by `iteration`; only the version before can be returned to."""
        before, self._version = self._version, self._version + 1
        self._iterations = {before: self._iterations[before], self._version: iteration}
        self._num_steps = {before: self._num_steps[before], self._version: self.sharded.progress.num_steps}


ElasticSession._forward.compiles_nothing = True  # type: ignore[attr-defined]  # for `OuterCompile`


def _with_grads(output: Any) -> Any:
    """`output` with `requires_grad`, so that the loop's backward runs; it changes nothing."""
    for leaf in _pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.is_leaf:
            leaf.requires_grad_()
    return output
