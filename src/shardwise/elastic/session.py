"""One engine's life in an elastic job: what its loop is told when a rank is lost, and what is done about it.

[Note: iterations] What a loop does from a forward to the step is an *iteration*; they are counted on every rank. Ranks
are never more than one collective apart, but that may be anywhere: when one hears of a fault in the forward of
iteration 8, another may still be in the step of iteration 7, waiting for the word that it is complete. Each tells the
others which iteration it has begun. Those after the last complete step, up to the newest that anybody has begun, are
*void* on all ranks, whether they have begun them or not: so all take the next one together.

In a void iteration a rank runs at its own pace and sends nothing: as in `engine.inference()` parameters are whole,
forwards are run without gradients, backwards and steps change nothing. Random numbers and buffers are put back
afterwards. What ranks ask each other outside of a step (`engine.mean`, `save`) is numbered within its iteration; a rank
that has the answer tells those who were cut off.

[Note: where ranks come in] Where somebody waits to come in, or asks to leave, all have heard it with the last commit,
or when they met after a fault. It is done at the beginning of the next iteration, which is void: of all calls of a loop
the forward of a training step is the one that any loop comes to, whatever it does before its first, so that there a
loop that has just begun and those of the others are at the same place. With the fault itself nobody comes: it may have
met them anywhere, between a step and the next forward or in the middle of an iteration. What it asks the others before,
by `resume`, `any_rank` and the like, is answered by what they have said (`is_arriving`).

[Note: the commit] A step is taken when every rank has said that it has written it. No rank returns from the step
before: so nobody can have gone on with a step that has to be undone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils import _pytree

from shardwise.checkpoint import Loaded
from shardwise.checkpoint.codec import decode, encode
from shardwise.comm.generation import BAD_BATCH, Membership
from shardwise.elastic.arrival import Came
from shardwise.elastic.layouts import Layout
from shardwise.elastic.never_saved import NeverSaved
from shardwise.elastic.plain_steps import PlainSteps
from shardwise.elastic.recovery import Host, Recovery
from shardwise.errors import CommError, ConfigError
from shardwise.micro_batches import LossFunction, mean_loss, micro_batches
from shardwise.precision import Norm
from shardwise.runtime.tolerant import Tolerant
from shardwise.sharded_model import ShardedModel
from shardwise.training import require_whole_step

Result = TypeVar("Result")
_NUM_REMEMBERED = 8
_log = logging.getLogger("shardwise")


class Session(Recovery):
    """Wraps what a loop calls. `close()` it."""

    def __init__(self, host: Host, sharded: ShardedModel, membership: Membership, came: Came | None = None) -> None:
        """`came` is what a rank that has come to others was told by them. All of them lay the model out anew then, and
        this is called in the place of the end of that."""
        super().__init__(host, sharded, membership, came)
        self._num_outside = self._num_micro_batches = 0
        self._must_follow = self._plan.bad_batch == "skip"
        if self._must_follow and membership.folder is not None:
            (membership.folder / BAD_BATCH).write_text("skip")
        self._is_edited = False
        self._came = came
        self.is_arriving = self._world.is_arriving = came is not None
        """Whether this rank has come, and its loop has not asked for data yet: what a loop asks before that, the others
        have asked each other before it came."""
        self._met: CommError | None = None
        """A fault that a backward has met, and nobody has seen to yet."""
        self._model = sharded.model
        self._call: Callable[..., Any] = sharded.model._call_impl
        self._steps = PlainSteps(sharded.optimizer.members if sharded.optimizer is not None else (), self._plain_step)
        self._wrap()
        if came is not None:
            self._hear_of_changes("recovered")
            self._enter_quiet()

    def _before_update(self) -> None:
        self._host.wait_for_copy()
        self._survival.before_change()

    def note_edit(self) -> None:
        """Somebody changes parameters or states by hand."""
        self._is_edited = True

    def renew(self, sharded: ShardedModel) -> None:
        """The same ranks have laid the model out by another plan. All of them call."""
        former = self._layout
        self._num_layouts += 1
        self._sharded, self._plan = sharded, sharded.plan
        self._layout = Layout.of(sharded, self._num_layouts, self._membership.folder)
        self._survival.begin(self._version)
        self._moment.follow(sharded)
        self._wrap()
        self._world.exchange(b"", "images")
        self._complete_label = self._num_layouts
        former.remove()

    def close(self, error: BaseException | None = None) -> None:
        """With an `error`, or where the others go on without this rank, what it has stays: they need it."""
        self._unwrap()
        self._steps.close()
        if error is None and not self._is_left:
            self._leave_quiet()
        for layout in (self._former, self._layout):
            if layout is None or layout.survival is None:
                continue
            if error is None and not self._is_left:
                layout.remove()
            else:
                layout.survival.close(removes=False)

    @property
    def image_bytes(self) -> int:
        """What this rank's images take: what is updated in place, which would lie elsewhere otherwise, and a copy."""
        return sum(one.directory.num_bytes for one in self._survival.images)

    def _wrap(self) -> None:
        """Whoever calls the model calls `_forward`: `Module.__call__` asks for this first. Likewise optimizers."""
        self._model.__dict__["_compiled_call_impl"] = self._forward
        sharded = self._sharded
        sharded.before_update = self._before_update
        sharded.runner.let_report(Tolerant(sharded.runner, self._meet))

    def _unwrap(self) -> None:
        self._model.__dict__.pop("_compiled_call_impl", None)

    def _meet(self, error: CommError) -> None:
        self._met = error

    def _see_to_it(self) -> None:
        """If a backward has met a fault."""
        error, self._met = self._met, None
        if error is not None:
            self._recover(error)

    # -- what a loop calls ------------------------------------------------------------------------------

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not self._is_open:
            self._begin()
        while True:
            self._see_to_it()
            try:
                if not self._is_in_quiet:
                    return self._call(*args, **kwargs)
                grads = torch.is_grad_enabled()
                with torch.no_grad():
                    output = self._call(*args, **kwargs)
                return _with_grads(output) if grads else output
            except CommError as error:
                self._recover(error)

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        self._num_micro_batches += 1
        if self.is_void():
            return
        try:
            self._sharded.backward(loss, weight)
        except CommError as error:
            self._recover(error)
        self._see_to_it()

    def step(self) -> Norm | None:
        """The norm; of a void step it is nan."""
        self._see_to_it()
        if self.is_void():
            if self._num_micro_batches % self._sharded.plan.accumulate:
                return None
            return self._end_void()
        try:
            with self._steps.inside():
                norm = self._sharded.step()
            if norm is None:
                return None
            self._commit()
        except CommError as error:
            self._recover(error)
            if self.is_void():
                return self._end_void()
            norm = self._sharded.progress.gradient_norm
        self._end()
        return norm

    def _plain_step(self, step: Callable[[], Result], *, is_last: bool) -> Result | None:
        """`optimizer.step()` of a loop that knows no engine; the last of several optimizers ends the iteration."""
        self._see_to_it()
        if not self._is_open:  # without a forward since the last step: nothing that could be taken again
            return step()
        result = None
        if not self.is_void():
            try:
                with self._steps.inside():
                    result = step()
                if is_last:
                    self._commit()
            except CommError as error:
                self._recover(error)
        if self.is_void():
            if is_last:
                self._end_void()
        elif is_last:
            self._end()
        return result

    def forward_backward(self, batch: Any, target: Any, loss_fn: LossFunction | None) -> torch.Tensor:
        """See `Engine.forward_backward`."""
        sharded = self._sharded
        require_whole_step(sharded)
        parts = micro_batches(batch, target, sharded.plan.accumulate, sharded.progress.weighing)
        losses = []
        for part in parts:
            loss = part.loss(self._model(*part.args, **part.kwargs), loss_fn)
            self.backward(loss, part.weight)
            losses.append(loss.detach())
        return mean_loss(losses, parts)

    def train(self, batch: Any, target: Any, loss_fn: LossFunction | None) -> torch.Tensor:
        """See `Engine.train_step`. A void step is taken again here, with the batch that it was given."""
        draws = isinstance(batch, Iterator)
        while True:
            progress = self._sharded.progress
            before = progress.num_void
            now = list(islice(batch, self._sharded.plan.accumulate)) if draws else batch
            loss = self.forward_backward(now, target, loss_fn)
            self.step()
            is_followed = progress.weighing.is_used  # by what reads the data, and will read that of the step again
            if progress.num_void == before or (is_followed and not draws):
                return loss

    def clip(self, max_norm: float, norm_type: float) -> Norm:
        self._see_to_it()
        if not self.is_void():
            try:
                return self._sharded.gradients.clip(max_norm, norm_type)
            except CommError as error:
                self._recover(error)
        return math.nan

    def outside(self, work: Callable[[], Result], *, is_small: bool = True) -> Result:
        """A call in which ranks tell each other something, outside of a step; what it returns is remembered for those
        who are cut off from it, if it `is_small`."""
        self._see_to_it()
        place = (self._begun, self._num_outside)
        while True:
            try:
                result = work()
                break
            except CommError as error:
                self._recover(error)
                if place in self._known:
                    result = self._known[place]
                    break
        self._num_outside += 1
        self._results = [*self._results[1 - _NUM_REMEMBERED :], (*place, _encoded(result) if is_small else None)]
        return result

    # -- iterations -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._must_follow and not self._host.can_leave_out():
            raise ConfigError(
                "bad_batch: skip needs to tell what reads the data to go on behind a batch, and no loader with "
                "samples by index follows this engine. Give sw.data.Loader(..., world=engine.data_ranks) a source that "
                "has a length, or leave bad_batch out."
            )
        self._must_follow = False
        self._begun += 1
        self._is_open = True
        self.is_arriving = self._world.is_arriving = False
        if self._came is not None:
            self._moment.bring(self._came.groups, self._came.schedules)
            self._came = None
        self._num_outside = self._num_micro_batches = 0
        while self._changes_wanted:  # what was read is of another dealing: the iteration is void
            self._recover(None)
        if self._is_in_quiet and self._begun > self._void_until:
            self._leave_quiet()
        if self._is_edited:
            self._is_edited = False
            self._survival.settle()
            self._survival.begin(self._version)
        self._num_steps[self._version] = self._sharded.progress.num_steps
        self._moment.restore_schedules()
        self._moment.take()
        if self.is_void():
            self._moment.take_schedules()

    def _end(self) -> None:
        """A step was taken."""
        self._is_open = False

    def loaders_of_others(self) -> list[Any]:
        """Where they stand, as they have told this rank when it came. Told once."""
        return [] if self._came is None else self._came.told.pop("loaders", [])

    def resumed(self, folder: Path) -> Loaded | None:
        """What a rank that has come finds in the place of a checkpoint: its loop has to go on where those of the others
        are, saved or not."""
        state = None if self._came is None else self._came.told["state"]
        num_steps = self._sharded.progress.num_steps
        if state is None:
            return Loaded(folder, num_steps, NeverSaved()) if num_steps else None
        return Loaded(folder, num_steps, decode(state))

    def _end_void(self) -> float:
        self._sharded.zero_grad()
        if self._begun >= self._void_until:
            self._leave_quiet()
        self._moment.restore()
        self._is_open = False
        self._sharded.progress.num_void += 1
        return math.nan

    def _commit(self) -> None:
        """See [Note: the commit]."""
        before, self._version = self._version, self._version + 1
        self._taken_in = {before: self._taken_in[before], self._version: self._begun}
        self._num_steps = {
            before: self._num_steps[before],
            self._version: self._sharded.progress.num_steps,
        }
        self._survival.complete(self._version)
        self._hear_of_changes("commit")
        self._survival.follow(self._version)
        self._membership.step = self._sharded.progress.num_steps


def _with_grads(output: Any) -> Any:
    """So that a backward finds something: it changes nothing."""
    for leaf in _pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.is_leaf:
            leaf.requires_grad_()
    return output


def _encoded(result: Any) -> Any:
    """`None` for what cannot be told."""
    try:
        return {"is": encode(result)}
    except ConfigError:
        return None
