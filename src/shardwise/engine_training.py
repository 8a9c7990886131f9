"""Whole training steps for any plan, with or without a pipeline."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.comm import World
from shardwise.config import Plan, Profile
from shardwise.engine_sequences import EngineSequences
from shardwise.micro_batches import LossFunction
from shardwise.sharded_model import ShardedModel
from shardwise.state import trained_as_before
from shardwise.training import evaluate, forward_backward

if TYPE_CHECKING:
    from shardwise.comm.generation import Membership
    from shardwise.elastic.arrival import Arrival
    from shardwise.elastic.session import Session
    from shardwise.run_log import RunLog

PROFILE_VARIABLE = "SHARDWISE_PROFILE"


def open_log(plan: Plan, world: World, *, always: bool = False) -> RunLog | None:
    """The run log that `plan` asks for, or `None`; its modules are imported only if it does.

    Raises `ConfigError` for a log that cannot be opened.
    """
    asks = plan.run is not None or plan.trackers is not None or plan.profile != Profile()
    if not (asks or always or os.environ.get(PROFILE_VARIABLE)):
        return None
    log: RunLog = importlib.import_module("shardwise.run_log").RunLog(plan, world)
    return log


def arrive(
    model: nn.Module,
    plan: Plan,
    optimizers: Sequence[torch.optim.Optimizer],
    world: World,
    before_change: Callable[[], None],
) -> tuple[ShardedModel, Arrival]:
    """This rank's sharded model, filled with the values of the ranks that train in `world`."""
    module = importlib.import_module("shardwise.elastic.arrival")
    arrived: tuple[ShardedModel, Arrival] = module.arrive(model, plan, optimizers, world, before_change)
    return arrived


def open_session(
    engine: EngineTraining, sharded: ShardedModel, membership: Membership | None, arrival: Arrival | None = None
) -> Session | None:
    """The session that survives lost ranks, in a job that can; its modules are imported only then."""
    plan = sharded.plan
    if membership is None and plan.survive not in ("host", "buddy") and plan.bad_batch == "stop":
        return None
    can_go_on: bool = importlib.import_module("shardwise.elastic.losing").survives(sharded, membership)
    if not can_go_on:
        return None
    module = importlib.import_module("shardwise.elastic.session")
    session: Session = module.Session(engine, sharded, membership, arrival)
    return session


class EngineTraining(EngineSequences):
    """Part of `Engine`."""

    def _replan(self) -> None:
        """See [Note: unfrozen later] in `unfreezing.py`. All ranks call."""
        sharded = self._sharded
        if self._is_open and sharded.unfreezing.can_plan:
            sharded.refuse_stages("memory for what was frozen in shard()", "Unfreeze it, and add groups, before.")
            sharded.unfreezing.check(sharded.peers)
            dropped = sharded.unfreezing.used_gradients()
            sharded.zero_grad()
            with trained_as_before(sharded.flats):
                self.reshard(sharded.sharding.plan_to_fit)
            self._sharded.unfreezing.note_dropped(dropped)

    def train_step(self, batch: Any, target: Any = None, *, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """One optimizer step: the plan's `accumulate` micro-batches forward and backward, then the update.

        `batch` is what the model is called with: a tensor, a tuple of arguments, or a dict of keyword arguments. Its
        tensors are split along their first dimension into even micro-batches. It may also be a list or iterator of
        micro-batches of these kinds; of an iterator the next `accumulate` are taken. `loss_fn(output)`, or
        `loss_fn(output, target)` if `target` is given, which is split like the batch, computes the loss of a
        micro-batch; without it the loss is the model's output, or the output's `loss`.

        Returns the mean loss over the micro-batches, a detached scalar, on every rank: that of this rank's own data,
        and under a pipeline the same on all its stages (`engine.mean(loss.item())` is the mean over all data). All
        ranks call; those of one pipeline pass the same batch. Clipping, loss scale and schedule are the plan's; the
        norm is `engine.gradient_norm`.

        Raises `ConfigError` for a batch that cannot be split, and `StateError` between the micro-batches of a loop.
        """
        self._require_open()
        if self._session is not None:  # which plans memory again where a lost rank can be made up for
            return self._session.train(batch, target, loss_fn)
        self._replan()
        loss = forward_backward(self._sharded, batch, target, loss_fn)
        self._sharded.step()
        return loss

    def forward_backward(self, batch: Any, target: Any = None, *, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """`train_step` without the update, for a loop that inspects the gradients; `engine.step()` then takes the
        step."""
        self._require_open()
        if self._session is not None:
            return self._session.forward_backward(batch, target, loss_fn)
        self._replan()
        return forward_backward(self._sharded, batch, target, loss_fn)

    def eval_step(self, batch: Any, target: Any = None, *, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """The mean loss of `batch` without gradients, a scalar on every rank; arguments and result as in `train_step`.

        The model is called in its current mode: for dropout and batch norms call `model.eval()` before. All ranks call.
        """
        self._require_open()
        return evaluate(self._sharded, batch, target, loss_fn)

    def log(
        self,
        values: Mapping[str, Any],
        *,
        kind: str = "step",
        tokens: int = 0,
        samples: int = 0,
        mean: bool = True,
    ) -> dict[str, float]:
        """Log `values` of the step that was just taken: numbers, or tensors of one element, such as a loss.

        All ranks call, with the same names, after each step or now and then; returns the means over all ranks. With
        `run` in the plan rank 0 writes them into the record of the run, with the learning rate, the gradient norm, the
        seconds of a step and how each rank spent them, and passes them to the plan's `trackers`. `tokens` and `samples`
        count what this rank's batches had since the last call; throughput is computed from them. Another `kind`, such
        as `"validation"`, gets lines of its own. Values of a void iteration (`num_void`) are not written. A rank that
        has joined others, and not yet begun an iteration, sends nothing and gets its own numbers back.

        With `mean=False` the values of rank 0 are written as they are, for a loop that has combined them itself: other
        ranks may pass different ones, or none, and each gets its own back. A line of another kind then sends nothing,
        and rank 0 may call alone.

        Raises `ConfigError` for a value that is not a number, or for names that differ from rank to rank.
        """
        self._require_open()
        if self._run_log is None:
            self._run_log = open_log(self._sharded.plan, self.world, always=True)
            assert self._run_log is not None
            self._run_log.follow(self._sharded)
        log, session = self._run_log, self._session
        if session is not None and session.is_arriving:  # the others have exchanged theirs already, and gone on
            return log.numbers_of(values)
        is_void = session.was_void if session is not None else bool
        if not mean and kind != "step":
            return log.note(values, kind, is_void)
        return log.log(values, kind, tokens, samples, self._asking, is_void, mean=mean)

    def can_leave_out(self) -> bool:
        """Whether every loader that follows the engine can skip a batch; if only some could, they would get out of
        step."""
        readers = [reader for known in self._readers if (reader := known()) is not None]
        return bool(readers) and all(reader.can_leave_out for reader in readers)

    def leave_out(self, num_steps: int) -> None:
        """Make loaders skip the batch of the step after `num_steps`."""
        for known in self._readers:
            if (reader := known()) is not None:
                reader.leave_out(num_steps)
