"""A model laid out by one plan, with what trains it: hooks, programs, the adopted optimizer, and the steps they take.

The optimizer's own hooks lead here, so a step is the same whatever calls it: `engine.step()`, `optimizer.step()`, or a
loop that knows nothing of engines. Another plan makes another `ShardedModel` (`state.reshard`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.comm import DataGroup, Group, Line, World
from shardwise.comm.weighing import Weighing
from shardwise.errors import StateError
from shardwise.memory import torch_dtype
from shardwise.optim import AdoptedOptimizer, Piece, hyper_digest
from shardwise.optim.precision import LossScaler, Norm, cast_floating
from shardwise.parallel.experts.totals import lines_of_totals
from shardwise.parallel.sequence import SplitBatches, WholeOutputs
from shardwise.plan import Plan
from shardwise.plan.mesh import TENSOR_AXIS
from shardwise.program import Activations
from shardwise.runtime import Inference, NotCopied
from shardwise.runtime.activations import Treatments
from shardwise.runtime.dropped_layers import refuse_dropped_layers
from shardwise.runtime.micro_batches import MicroSteps
from shardwise.sharded.assembly import Parts, assemble, treated
from shardwise.sharded.other_parameters import tell_of_others
from shardwise.sharded.sharding import Sharding
from shardwise.system.data_ranks import HANDED_OUT

_log = logging.getLogger("shardwise")


@dataclass
class Progress:
    """How far training has come. It outlives the `ShardedModel` of one plan."""

    num_steps: int = 0
    gradient_norm: Norm | None = None
    losses: tuple[torch.Tensor, ...] = ()
    """Of the micro-batches of the last step, or evaluation, that was called as a whole."""
    step_losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of the micro-batches of this step, by number, if there are several and they are known."""
    step_rows: tuple[int, ...] = ()
    """The rows of each, if they were cut from one batch."""
    scaler: LossScaler | None = None
    weighing: Weighing = field(default_factory=Weighing)
    micro_steps: MicroSteps = field(default_factory=MicroSteps)
    whole_outputs: WholeOutputs = field(default_factory=WholeOutputs)
    split_batches: SplitBatches = field(default_factory=SplitBatches)
    has_seen_loss: bool = False
    """Whether a loss has been sent back, which was asked for what else it trains."""
    num_void: int = 0
    """How many steps were made void; their batches are to come again."""
    replan: Callable[[], object] = lambda: None
    """Plans memory again, for what has been unfrozen: see [Note: unfrozen later] in `sharded/unfreezing.py`."""
    unread: set[str] = field(default_factory=set)
    """Parameters whose states were in what was loaded last, and not read because they were frozen."""
    on_step: list[Callable[[], None]] = field(default_factory=list)
    """Called after every optimizer step."""

    def note_loss(self, loss: torch.Tensor) -> None:
        """A loop goes back from the loss of a micro-batch."""
        number = self.micro_steps.num_ended
        if number == 0:
            self.step_losses.clear()
        self.step_losses[number], self.step_rows = loss.detach(), ()

    def note_losses(self, losses: Sequence[torch.Tensor], rows: tuple[int, ...]) -> None:
        """Those of all micro-batches of a step, with the rows that each has of one batch, if they are of one."""
        self.losses = tuple(loss.reshape(()) for loss in losses)
        self.step_losses, self.step_rows = dict(enumerate(self.losses)), rows

    def note_step(self) -> None:
        self.num_steps += 1
        self.weighing.begin_step()
        for call in self.on_step:
            call()


def scaler_for(plan: Plan) -> LossScaler | None:
    return LossScaler(plan.loss_scale) if plan.precision == "fp16" else None


class ShardedModel(NotCopied):
    """Connects one sharded model to its hooks, programs and optimizer, and takes its steps.

    It is not the engine, because a change of plan, or a lost rank, replaces it while users hold the engine; and not its
    `parts`, because optimizers step without an engine being called, and their hooks must find somebody who can say that
    the memory has moved on (`parts` then raises) instead of stepping on buffers of an old plan.

    `before_change` is called before a step changes what an optimizer holds.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        sharding: Sharding,
        world: World,
        progress: Progress,
        before_change: Callable[[], None],
    ) -> None:
        self.model = model
        self.world = world
        self.plan, self.mesh, self.table = sharding.plan, sharding.mesh, sharding.table
        self.data_group = DataGroup(world, self.mesh)
        self.peers = DataGroup(world, self.mesh, self.mesh.params_axes)
        """The ranks of an island that list the same parameters, including those that a model axis splits."""
        self.progress = progress
        self.before_change = before_change
        self.before_update = before_change
        """Called instead of `before_change` before a step; all other changes call `before_change`."""
        self.before_settling: Callable[[], object] = lambda: None
        """Called before what islands have in common changes between two steps, by outer gradients that have come."""
        self.rehearsed: tuple[Activations, ...] = ()
        """The activations counted by the latest rehearsal, stage by stage."""
        self.has_asked_for_room = False
        """In a pipeline: whether the ranks have asked whether activations on their disks have room."""
        self.disk = sharding.disk
        """Holds the rows on a disk, if there are any."""
        self.converted = sharding.converted
        """Outlives `parts`: whoever closes the engine makes these modules plain again."""
        self._is_updating = False
        """Whether `before_change` is called for an update, which writes nothing that is frozen."""
        self._has_begun = False
        """Whether `backward` has been called for the current step."""
        self._has_noted_use = self._has_noted_drops = False
        self.has_recomputed = False
        """Whether gradients have been verified by computing them again, in any step."""
        self._num_backwards_before = 0
        self._parts: Parts | None = assemble(model, optimizers, sharding, world, self.data_group, self.peers, self)
        communicates = sharding.experts is not None or self.converted.communicates
        silent = () if self.converted.communicates else self.converted.lines
        self._meets_along = {line.axis for line in self.lines if line.num_ranks > 1 and line not in silent}
        """The axes along which ranks need each other inside of layers; empty once it is known that they skip none.
        Ranks along tp draw the same numbers, unless they split the sequence."""
        if not self.plan.tensor.sequence:
            self._meets_along.discard(TENSOR_AXIS)
        self._weighs_losses = self.parts.pipeline is not None or communicates
        """Whether weights are applied to losses: see [Note: weights] in `comm/weighing.py`."""
        self._weight = 1.0
        self._set_weight(1.0)
        self.weigh()

    # -- what it is made of -----------------------------------------------------------------------------

    @property
    def is_taken_down(self) -> bool:
        return self._parts is None

    @property
    def parts(self) -> Parts:
        if self._parts is None:
            raise StateError(
                "This engine's memory has moved to another plan, so there is nothing left to read here. Begin again "
                "what was begun before reshard()."
            )
        return self._parts

    @property
    def lines(self) -> list[Line]:
        """Along which modules of this rank's model send inside of forwards and backwards."""
        found = [*self.converted.lines]
        split = self.parts.sharding.split
        if split is not None and split.line is not None:
            found.append(split.line)
        if self.parts.sequence is not None:
            found.append(self.parts.sequence.line)
        experts = self.parts.sharding.experts
        if experts is not None and experts.line is not None:
            found.append(experts.line)
        return [*found, *lines_of_totals(self.model)]

    def find_states(self) -> None:
        """After a failed step: let tensors refer to the disk's rows again."""
        for flat in self.parts.flats:
            if flat.rows is not None:
                flat.find_rows()
        if self.parts.optimizer is not None:
            self.parts.optimizer.rows.find_all()

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The user's, which take the steps; none for a model that is not trained."""
        return () if self.parts.optimizer is None else self.parts.optimizer.members

    def require_optimizer(self) -> AdoptedOptimizer:
        if self.parts.optimizer is None:
            raise StateError(
                "This engine has no optimizer; give one to shard(model, plan, optimizer=...) to take steps."
            )
        return self.parts.optimizer

    def unhook(self) -> None:
        """Leave the model and the optimizer alone from now on. May be called twice, and after `take_down`."""
        if self._parts is not None:
            self._parts.hooks.close()

    def take_down(self) -> None:
        """Unhook, give the optimizer its parameters back, and release the flat buffers.

        What remains is enough to describe and close an engine whose `reshard` failed half-way.
        """
        self.unhook()
        parts, self._parts = self.parts, None
        parts.owner.release()
        if parts.optimizer is not None:
            parts.optimizer.give_back()

    # -- what a loop asks for ---------------------------------------------------------------------------

    def refuse_stages(self, what: str, cure: str) -> None:
        """Raise `StateError` if the model is split into pipeline stages, for which `what` is not available."""
        if self.parts.pipeline is not None:
            raise StateError(f"A model that is split into pipeline stages has no {what} in this version. {cure}")

    def treat(self, plan: Plan, treatments: Treatments) -> None:
        """Go on with other treatments of activations, which is all in which `plan` differs. Before the first pass; all
        ranks call."""
        self._parts = parts = treated(self.parts, self.model, self.world, plan, treatments)
        self.plan, self.disk = plan, parts.sharding.disk

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """`weight` overrides the weight of this micro-batch set by `weigh`."""
        if weight is not None and not self._weighs_losses:
            self._set_weight(weight)
        accumulate = self.plan.accumulate
        if accumulate > 1:
            self.progress.note_loss(loss)
        if not self.progress.micro_steps.divides_arriving and (accumulate > 1 or type(loss) is not torch.Tensor):
            loss = loss / accumulate  # other classes are asked whether they are whole
        if self._weighs_losses:
            loss = self._weighed(loss, self.progress.weighing.current if weight is None else weight)
        self._has_begun = True
        if not self.progress.has_seen_loss:
            self.progress.has_seen_loss = True
            if self.mesh.data_place(self.world.rank)[1] > 1:
                tell_of_others(loss)
        self.scale(loss).backward()

    def weigh(self) -> None:
        """Apply the current weight to what comes next."""
        if self._weighs_losses:
            self.parts.runner.passes.must_be_weighed = (
                self.parts.pipeline is None and self.progress.weighing.current != 1.0
            )
        else:
            self._set_weight(self.progress.weighing.current)

    def _set_weight(self, weight: float) -> None:
        share = weight / self.plan.accumulate if self.progress.micro_steps.divides_arriving else weight
        if share != self._weight:
            self._weight = share
            for flat in self.parts.flats:
                flat.grads.weigh(share)

    def divide_arriving(self) -> None:
        """Divide gradients as they arrive from now on: see [Note: micro-steps]."""
        self.progress.micro_steps.divides_arriving = True
        self._set_weight(1.0 if self._weighs_losses else self.progress.weighing.current)

    def _weighed(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        if weight == 1.0:
            return loss
        weighed = loss * weight
        weighed.register_hook(lambda _: self.parts.runner.passes.note_weighed())
        return weighed

    @property
    def is_between_micro_batches(self) -> bool:
        """Whether a loop has begun a step of several micro-batches."""
        done = self.progress.micro_steps
        return self.plan.accumulate > 1 and (self._has_begun or done.num_ended > 0) and not done.are_all_run

    def scaler(self) -> LossScaler | None:
        return self.progress.scaler

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        scaler = self.progress.scaler
        if scaler is None:
            return loss
        scaled = loss * scaler.scale
        scaled.register_hook(lambda _: self.parts.runner.passes.note_scaled())
        return scaled

    def step(self, is_last: bool | None = None) -> Norm | None:
        """The gradient norm; `None` if more micro-batches are to come."""
        self._note_use(by_count=is_last is None)
        if not self.progress.micro_steps.end(self.plan.accumulate, is_last=is_last):
            return None
        optimizer = self.require_optimizer()
        try:
            for member in optimizer.members:
                member.step()
        except BaseException:
            optimizer.updates.withdraw_gradients()  # torch calls no hook after a step that has raised
            raise
        self.zero_grad()
        return self.progress.gradient_norm

    def zero_grad(self, *, keep: bool = False) -> None:
        """Drop all gradients, or with `keep` make them zeros. All ranks call."""
        self.progress.micro_steps.drop(self.plan.accumulate)
        self._note_drops()
        self._has_begun = False
        self.parts.unfreezing.note_zeroed()
        if self.parts.verification is not None:
            self.parts.verification.begin_step()
        self.parts.gradients.zero(keep=keep)
        if self.parts.optimizer is not None:
            self.parts.optimizer.updates.withdraw_gradients()

    def _note_use(self, *, by_count: bool) -> None:
        """Say once what a loop may have meant otherwise; nothing here can tell."""
        num, done = self.plan.accumulate, self.progress.micro_steps
        if num == 1 or self._has_noted_use or done.are_all_run or self.world.rank:
            return
        num_backwards = self.parts.runner.passes.num_backwards - self._num_backwards_before
        self._num_backwards_before += num_backwards
        if num_backwards and not self._has_begun and done.divides_arriving:
            _log.warning(
                "Gradients of every backward are divided by the %d micro-batches of a step, those of loss.backward() "
                "too, as DeepSpeed does. A loop that divides its loss as well divides twice.", num,
            )  # fmt: skip
        elif num_backwards and not self._has_begun:
            _log.warning(
                "The plan's accumulate: %d averages over losses given to engine.backward(loss). loss.backward() adds "
                "gradients up as in plain PyTorch: then a loop has to divide its loss by the number of micro-batches.",
                num,
            )  # fmt: skip
        elif by_count and num_backwards >= num and not done.num_ended:
            _log.warning(
                "engine.step() ends a micro-batch, and a step of this plan has %d (accumulate), so nothing is updated "
                "yet. If the %d backwards before it were all of the step's micro-batches, call "
                "engine.step(is_last=True), or engine.step() after each.", num, num_backwards,
            )  # fmt: skip
        else:
            return
        self._has_noted_use = True

    def _note_drops(self) -> None:
        """Say once that a loop which zeroes gradients before each micro-batch, as plain ones do, takes no step."""
        if self.progress.micro_steps.num_dropped < self.plan.accumulate or self._has_noted_drops:
            return
        self._has_noted_drops = True
        if self.world.rank == 0:
            _log.warning(
                "zero_grad() has dropped the gradients of %d steps in a row before their last micro-batch (accumulate: "
                "%d), so nothing was updated. Call it after each update, not for each micro-batch.",
                self.progress.micro_steps.num_dropped, self.plan.accumulate,
            )  # fmt: skip

    def _begin_step(self) -> None:
        self._has_begun = False
        self.progress.micro_steps.begin_step()

    def forget(self, pieces: Sequence[Piece], set_to_none: bool) -> None:
        """`zero_grad` of the optimizer with these `pieces`. Gradients of others stay, and add up. All are dropped
        together, without having to be reduced, if others have none; and, as ranks of a pipeline do not know which the
        other stages have, by its only optimizer."""
        is_only = len(self.require_optimizer().members) == 1
        if is_only and (self.parts.pipeline is not None or self._are_all(pieces)):
            self.zero_grad(keep=not set_to_none)
            return
        self.parts.unfreezing.note_zeroed(pieces)
        self.parts.gradients.zero(pieces, keep=not set_to_none)
        if is_only:
            self.progress.micro_steps.drop(self.plan.accumulate)
            self.parts.gradients.note_step()  # none will come for what is left

    def _are_all(self, pieces: Sequence[Piece]) -> bool:
        """Whether `pieces`, of one optimizer, are of all parameters that may have gradients."""
        trained = [len(flat.slots) for flat in self.parts.flats if flat.spec.trainable]
        return sum(piece.flat.spec.trainable for piece in pieces) == sum(trained)

    def whole_state(self, member: torch.optim.Optimizer) -> dict[str, Any]:
        """`state_dict()` of one optimizer, as the plain one would return it."""
        self.refuse_stages("optimizer.state_dict()", "Checkpoints have the states: engine.save(folder).")
        return self.parts.access.optimizer_state_dict(member)

    @contextmanager
    def rewritten(self) -> Iterator[None]:
        """Inside, master weights may be changed outside a step. All ranks call."""
        self.parts.runner.step.open_params()
        for flat in self.parts.flats:
            flat.land()
        yield
        self.parts.runner.step.restore_params()

    @contextmanager
    def inference(self, keep_bytes: int | None, members: Group | None = None) -> Iterator[Inference]:
        """See `Engine.inference`, and for `members` `runtime.Inference`. Sequences are whole inside."""
        with ExitStack() as stack, _modes_restored(self.model):
            stack.enter_context(self.converted.suspended())
            if self.parts.sequence is not None:
                stack.enter_context(self.parts.sequence.suspended())
            yield stack.enter_context(self.parts.runner.inference(self.world, keep_bytes, members))

    # -- the optimizer's step, whoever asks for it ------------------------------------------------------

    def before_step(self, member: torch.optim.Optimizer) -> None:
        self.world.journal.clock.work()
        if self.disk is not None:
            self.disk.require_whole()
        if self.parts.pipeline is not None:  # a rank that has read gradients of its modules alone has agreed on them
            self.parts.gradients.agree_on_changes()
        self.world.journal.mark(hyper_digest(member))  # the next collective compares it
        self.parts.runner.end_calls()  # also where gradients have been prepared before
        self.progress.gradient_norm = self.parts.gradients.norm_before_clipping()
        optimizer = self.require_optimizer()
        self.parts.unfreezing.require_memory(member)
        self.parts.owner.require_gradients_kept()
        if not self.parts.gradients.judge():
            optimizer.updates.offer_nothing(member)
            return  # without gradients an optimizer changes nothing
        self.parts.runner.gathering.free_before_update(self.parts.runner.passes.current.kept)
        self.parts.runner.step.open_params()
        if self.plan.clip_grad_norm is not None:
            self.parts.gradients.clip_by_plan(self.plan.clip_grad_norm)
        self._verify(member)
        self._is_updating = True
        try:
            self.before_update()
        finally:
            self._is_updating = False
        self.world.journal.check()  # see [Note: garbage after a fault]
        optimizer.updates.begin(member)
        self.parts.runner.step.update_units()
        optimizer.updates.offer_gradients(member)

    def during_step(self) -> None:
        """An optimizer asks for whole parameters. If no gradient was offered, no rank takes part."""
        if self.parts.gradients.is_taken:
            self.parts.runner.step.during()

    def after_step(self, member: torch.optim.Optimizer) -> None:
        HANDED_OUT.end_step()  # also of one that is left out: the log asks what was not finite
        self.require_optimizer().updates.withdraw_gradients()
        parts = self.parts
        if parts.gradients.is_taken:
            self.require_optimizer().updates.count_writes(member)
            self._end_update()
        else:
            self.zero_grad()
            if parts.outer_steps is None:
                return
            # An island leaves it out alone, and all come together after the same steps: so it counts.
            self.world.journal.num_backwards = 0
        if member is self.require_optimizer().members[0]:
            self.progress.note_step()
            self.world.journal.num_steps += 1
            self._forget_losses_when_due()
        if member is self.require_optimizer().members[-1]:
            self._outer_step()
        self.begin_factors_when_due()
        if parts.verification is not None and self._is_next_verified:
            parts.runner.step.take_checksums()
            parts.verification.note()

    def _end_update(self) -> None:
        parts = self.parts
        if parts.verdict.is_news:
            parts.runner.programs.foresee_buffers(parts.buffers.learn())
        parts.runner.step.after()
        if self.disk is not None:
            self.disk.end_step(self.world)
        parts.gradients.note_step()
        self.converted.note_update()
        self.require_optimizer().find_changed_updates()
        self._begin_step()
        self.world.journal.clock.rest()

    def _forget_losses_when_due(self) -> None:
        """After so many steps, as the plan says, begin error feedback of gradients anew."""
        if self.progress.num_steps % self.plan.wire.feedback.reset == 0:
            for flat in self.parts.flats:
                for losses in flat.losses.values():
                    losses.zero_()

    def _outer_step(self) -> None:
        """Bring islands together, if that is due after the step that all optimizers have taken."""
        outer, num_steps = self.parts.outer_steps, self.progress.num_steps
        if outer is not None and outer.is_due_after(num_steps):
            self.before_update()
            outer.after_step(num_steps)

    def settle_islands(self) -> None:
        """Wait for outer gradients that are on their way, so that nothing is left in messages. All ranks call."""
        outer = self.parts.outer_steps
        if outer is not None and outer.is_on_its_way:
            self.before_settling()
            outer.settle()

    def begin_factors_when_due(self) -> None:
        """After a step, a resume or a change of plan: whether the next step sends gradients as factors, and this plan
        does not yet."""
        asked = self.plan.powersgd
        if asked.rank is not None and 0 < asked.start_step <= self.progress.num_steps:
            self.parts.unfreezing.begin_factors()

    # -- verified steps: docs/verify.md -----------------------------------------------------------------

    @property
    def _is_next_verified(self) -> bool:
        every = self.plan.verify.every
        return every is not None and (self.progress.num_steps + 1) % every == 0

    @property
    def recomputes(self) -> bool:
        """Whether the next step verifies gradients: see `recomputation.py`."""
        return self._recomputes_now and not self.parts.gradients.exist()

    @property
    def _recomputes_now(self) -> bool:
        every = self.plan.verify.gradients
        return every is not None and (self.progress.num_steps + 1) % every == 0

    def _verify(self, member: torch.optim.Optimizer) -> None:
        """Before an update: if the step is a verified one, compare checksums. Raises `CorruptionError` on all ranks."""
        if self._recomputes_now and not self.has_recomputed:
            self.has_recomputed = True
            _log.warning(
                "verify.gradients computes micro-batches of engine.train_step() and engine.forward_backward() again. "
                "This loop computes its loss itself, so its gradients are not verified."
            )
        verification = self.parts.verification
        if verification is None:
            return
        if self._is_next_verified and member is self.require_optimizer().members[0]:
            if self.parts.flats:
                self.parts.runner.step.verify()
            else:
                verification.compare()
        verification.forget(is_update=True)

    def forget_checksums(self) -> None:
        """Call before parameters or states are written other than by an update."""
        if self._parts is not None and self._parts.verification is not None and not self._is_updating:
            self._parts.verification.forget(is_update=False)

    def cast_inputs(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.parts.owner.require_trainable()
        self.parts.owner.require_params_kept()
        if self._meets_along and self.model.training:
            self._require_all_layers()
        self.parts.runner.verifies = self._is_next_verified
        if self.disk is not None:
            self.disk.require_whole()
            if torch.is_grad_enabled():
                self.disk.expect_step()
        if self.table.compute not in ("bf16", "fp16"):
            return None
        dtype = torch_dtype(self.table.compute)
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    def _require_all_layers(self) -> None:
        along = " and ".join(sorted(self._meets_along))
        refuse_dropped_layers(self.model, f"ranks along {along} need each other there, but each skips others")
        self._meets_along.clear()


@contextmanager
def _modes_restored(model: nn.Module) -> Iterator[None]:
    """Afterwards the modules are in training mode, or not, as before: transformers' `generate_batch` leaves a model in
    evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
