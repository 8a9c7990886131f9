"""What turns while a model trains by one plan: hooks, programs, the adopted optimizer, and the step that they take.

The optimizer's own hooks lead here, so a step is the same whoever asks for it: `engine.step()`, `optimizer.step()`, or
a loop that knows nothing of engines. Another plan makes other works (`state.reshard`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from shardwise.access import Access
from shardwise.comm import World
from shardwise.config import Plan
from shardwise.errors import StateError
from shardwise.gradients import Gradients
from shardwise.optim import AdoptedOptimizer, Company, Piece, hyper_digest
from shardwise.precision import LossScaler, Verdict, cast_floating
from shardwise.runtime import NO_COPY, BufferSync, Executor, Runner
from shardwise.sharding import Sharding
from shardwise.storage import torch_dtype
from shardwise.tensors import Owner, Structure


@dataclass
class Progress:
    """How far training has come. It outlives the works of one plan."""

    num_steps: int = 0
    gradient_norm: float | None = None
    scaler: LossScaler | None = None


def scaler_for(plan: Plan) -> LossScaler | None:
    return LossScaler(plan.loss_scale) if plan.precision == "fp16" else None


class Works:
    """Ties one sharded model to its hooks, programs and optimizer, and takes its steps.

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
        self.sharding = sharding
        self.plan, self.mesh, self.table = sharding.plan, sharding.mesh, sharding.table
        self.flats = [flat for unit in sharding.units for flat in unit.flats]
        self.progress = progress
        self.before_change = before_change
        self._num_micro_batches = 0
        self.is_taken_down = False
        self._hooks = ExitStack()
        self._tie(optimizers)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise StateError(NO_COPY)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise StateError(NO_COPY)

    def _tie(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Hooks to programs, programs to collectives, optimizers to their pieces."""
        collectives = self.world.collectives(self.sharding.device)
        collectives.prepare(self.mesh)
        groups = {axis: self.world.group(self.mesh, axis) for axis in self.mesh.axes}
        company = Company(self.flats, collectives, self.mesh, self.world.rank, self._during_step)
        self._buffers = BufferSync(self.model, self.world)
        shares_buffers = self.plan.sync_buffers and self.world.size > 1
        self._verdict = Verdict(self.flats, collectives, groups, self._buffers.has_news if shares_buffers else None)
        executor = Executor(self.flats, collectives, groups)
        executor.provide("verdict", lambda action: self._verdict.sum_over(action.over))
        executor.provide("buffers", lambda _: self._buffers.share())
        executor.provide("norms", company.add_norms)
        executor.provide("update", company.hand_over)
        self.optimizer = self._adopt(optimizers, company) if optimizers else None
        self.runner = Runner(
            self.model,
            self.sharding.units,
            executor,
            partial(self.world.exchange, subject="closings"),
            self.sharding.commons,
            prefetch_bytes=None if self.plan.prefetch_bytes == "auto" else self.plan.prefetch_bytes,
            compile_backend=self.plan.compile,
        )
        self.gradients = Gradients(
            self.flats,
            executor.movers,
            self.runner,
            self._verdict,
            partial(self.world.exchange, subject="norms"),
            lambda: self.progress.scaler,
        )
        self.access = Access(self.model, self.runner, executor.movers, self.optimizer)
        self.owner = Owner(
            self.sharding.units, self.runner, executor.movers, self.access, self.gradients, self.before_change
        )
        self._hooks.callback(self.owner.close)
        self._hooks.callback(Structure(self.model).release)
        self.ledger = collectives.ledger
        self.timeline = executor.timeline
        cast = self.model.register_forward_pre_hook(self._cast_inputs, prepend=True, with_kwargs=True)
        self._hooks.callback(cast.remove)
        self._hooks.callback(self.runner.remove)

    def _adopt(self, optimizers: Sequence[torch.optim.Optimizer], company: Company) -> AdoptedOptimizer:
        adopted = AdoptedOptimizer(
            optimizers,
            self.flats,
            before=self._before_step,
            after=self._after_step,
            forget=self._forget,
            whole=self._whole_state,
            company=company,
        )
        self._hooks.callback(adopted.release)
        return adopted

    def require_optimizer(self) -> AdoptedOptimizer:
        if self.optimizer is None:
            raise StateError(
                "This engine has no optimizer; give one to shard(model, plan, optimizer=...) to take steps."
            )
        return self.optimizer

    def unhook(self) -> None:
        """Leave the model and the optimizer alone from now on. May be called twice, and after `take_down`."""
        self._hooks.close()

    def take_down(self) -> None:
        """Unhook, give the optimizer its parameters back, and let go of the flat buffers.

        What is left is what an engine whose `reshard` fails half-way is described and closed by.
        """
        self.unhook()
        self.owner.release()
        if self.optimizer is not None:
            self.optimizer.give_back()
        self.runner.dissolve()
        for name in self.__dict__.keys() - {"plan", "mesh", "table", "progress", "_hooks"}:
            del self.__dict__[name]
        self.is_taken_down = True

    # -- what a loop asks for ---------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        self.scale(loss / self.plan.accumulate).backward()  # type: ignore[no-untyped-call]  # torch's own
        self._num_micro_batches += 1

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        scaler = self.progress.scaler
        if scaler is None:
            return loss
        scaled = loss * scaler.scale
        scaled.register_hook(lambda _: self.runner.note_scaled())  # type: ignore[no-untyped-call]  # torch's own
        return scaled

    def step(self) -> float | None:
        """The gradient norm; `None` if more micro-batches are to come."""
        if self._num_micro_batches % self.plan.accumulate:
            return None
        for member in self.require_optimizer().members:
            member.step()
        self.zero_grad()
        return self.progress.gradient_norm

    def zero_grad(self, *, keep: bool = False) -> None:
        """Forget all gradients, or with `keep` make them zeros. All ranks call."""
        self._num_micro_batches = 0
        self.gradients.zero(keep=keep)
        if self.optimizer is not None:
            self.optimizer.withdraw_gradients()

    def _forget(self, pieces: Sequence[Piece] | None, set_to_none: bool) -> None:
        """`zero_grad` of one optimizer: of the only one it forgets all gradients, of one of several its own."""
        if pieces is None:
            self.zero_grad(keep=not set_to_none)
        else:
            self.gradients.zero(pieces, keep=not set_to_none)

    def _whole_state(self, member: torch.optim.Optimizer) -> dict[str, Any]:
        """`state_dict()` of one optimizer, as the plain one would return it."""
        return self.access.optimizer_state_dict(member)

    # -- the optimizer's step, whoever asks for it ------------------------------------------------------

    def _before_step(self, member: torch.optim.Optimizer) -> None:
        self.world.journal.mark(hyper_digest(member))  # the next collective will compare
        self.progress.gradient_norm = self.gradients.norm_before_clipping()
        optimizer = self.require_optimizer()
        if not self.gradients.judge():
            optimizer.offer_nothing(member)
            return  # without gradients an optimizer changes nothing
        self.runner.open_params()
        if self.plan.clip_grad_norm is not None:
            self.gradients.clip_by_plan(self.plan.clip_grad_norm)
        self.before_change()
        self.world.journal.check()  # see [Note: garbage after a fault]
        optimizer.offer_gradients(member)

    def _during_step(self) -> None:
        """An optimizer asks for whole parameters. Where no gradient was offered, nobody has anything to say."""
        if self.gradients.is_taken:
            self.runner.during_step()

    def _after_step(self, member: torch.optim.Optimizer) -> None:
        self.require_optimizer().withdraw_gradients()
        if not self.gradients.is_taken:
            self.zero_grad()
            return
        if self._verdict.is_news:
            self.runner.foresee_buffers(self._buffers.learn())
        self.runner.after_step()
        self.gradients.note_step()
        self._num_micro_batches = 0
        if member is self.require_optimizer().members[0]:
            self.progress.num_steps += 1

    def _cast_inputs(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.owner.require_trainable()
        if self.table.compute not in ("bf16", "fp16"):
            return None
        dtype = torch_dtype(self.table.compute)
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)
