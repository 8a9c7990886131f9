"""What a training step does between two updates: micro-batches forward and backward."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from shardwise.errors import StateError
from shardwise.micro_batches import LossFunction, MicroBatch, micro_batches
from shardwise.pipeline import Aside, Pipeline, backward_of_weights
from shardwise.sharded_model import ShardedModel

Tensor = torch.Tensor


def forward_backward(sharded: ShardedModel, batch: Any, target: Any, loss_fn: LossFunction | None) -> Tensor:
    """See `Engine.forward_backward`."""
    if sharded.is_between_micro_batches:
        raise StateError(
            "train_step() runs all micro-batches of a step, but engine.backward() has been called for some of this one "
            "already. Finish those and call engine.step(), or forget them with engine.zero_grad()."
        )
    parts = micro_batches(batch, target, sharded.plan.accumulate)
    if sharded.sequence is not None:
        sharded.sequence.note_micro_batches(batch, parts)
    if sharded.pipeline is not None:
        return _through_stages(sharded, sharded.pipeline, parts, loss_fn)
    return _mean([_trained(sharded, part, loss_fn) for part in parts])


def _through_stages(
    sharded: ShardedModel, pipeline: Pipeline, parts: list[MicroBatch], loss_fn: LossFunction | None
) -> Tensor:
    if sharded.gradients.exist() and sharded.gradients.are_prepared:
        raise StateError(
            "Gradients of a pipeline have been read or clipped, and can get no more now. Take the step, or call "
            "engine.zero_grad(), before the next forward_backward()."
        )
    passes = sharded.runner.passes
    before = passes.reduces
    try:
        mean = pipeline.train(parts, loss_fn, _StageTrainer(sharded, reduces=before), sharded.timeline)
    finally:
        passes.reduces = before
        sharded.runner.begin_segment(())
    if sharded.sequence is not None:
        sharded.sequence.check_was_asked(pipeline.line)
    passes.owes_reductions = True  # what some pass has left is found before the step, so that no verdict is early
    sharded.note_step_complete()
    return mean


class _StageTrainer:
    """What a pipeline asks of the model that it trains.

    Where every rank keeps whole gradients anyway (`ddp`), those of all micro-batches are added up at home, and
    reduced once, in the last backward of each stage; where they are kept in shards, after every backward.
    """

    def __init__(self, sharded: ShardedModel, *, reduces: bool) -> None:
        self._sharded = sharded
        self._reduces = reduces
        self._reduces_each = bool(sharded.table.grad.shard)

    def begin_segment(self, segment: Hashable, *, is_half: bool, is_last_of_stage: bool) -> None:
        runner = self._sharded.runner
        runner.begin_segment(segment)
        runner.passes.reduces = self._reduces and not is_half and (self._reduces_each or is_last_of_stage)

    def backward_of_weights(self, aside: Sequence[Aside]) -> None:
        runner = self._sharded.runner
        if self._sharded.progress.scaler is not None:
            runner.note_scaled()
        runner.passes.begin()  # no unit opens in it
        if aside:
            backward_of_weights(aside)
        else:  # there is no linear layer that is trained; the first half has done everything
            runner.end_of_backward()

    def backward(self, loss: Tensor) -> None:
        self._sharded.backward(loss)

    def backward_through(self, output: Tensor, gradient: Tensor) -> None:
        runner = self._sharded.runner
        if self._sharded.progress.scaler is not None:
            runner.note_scaled()  # the loss, on another stage, was
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        else:  # nothing of this stage is trained; it counts as a backward all the same
            runner.end_of_backward()


def evaluate(sharded: ShardedModel, batch: Any, target: Any, loss_fn: LossFunction | None) -> Tensor:
    """See `Engine.eval_step`."""
    with torch.no_grad():
        parts = micro_batches(batch, target, sharded.plan.accumulate)
        if sharded.sequence is not None:
            sharded.sequence.note_micro_batches(batch, parts)
        if sharded.pipeline is not None:
            return sharded.pipeline.evaluate(parts, loss_fn, sharded.runner.begin_segment)
        return _mean([part.loss(sharded.model(*part.args, **part.kwargs), loss_fn) for part in parts])


def _trained(sharded: ShardedModel, part: MicroBatch, loss_fn: LossFunction | None) -> Tensor:
    loss = part.loss(sharded.model(*part.args, **part.kwargs), loss_fn)
    sharded.backward(loss)
    return loss.detach()


def _mean(losses: list[Tensor]) -> Tensor:
    return (sum(losses[1:], start=losses[0]) / len(losses)).reshape(())
