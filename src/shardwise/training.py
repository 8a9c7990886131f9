"""What a training step does between two updates: micro-batches forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.errors import StateError
from shardwise.micro_batches import LossFunction, MicroBatch, micro_batches
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
    return _mean([_trained(sharded, part, loss_fn) for part in parts])


def evaluate(sharded: ShardedModel, batch: Any, target: Any, loss_fn: LossFunction | None) -> Tensor:
    """See `Engine.eval_step`."""
    with torch.no_grad():
        parts = micro_batches(batch, target, sharded.plan.accumulate)
        return _mean([part.loss(sharded.model(*part.args, **part.kwargs), loss_fn) for part in parts])


def _trained(sharded: ShardedModel, part: MicroBatch, loss_fn: LossFunction | None) -> Tensor:
    loss = part.loss(sharded.model(*part.args, **part.kwargs), loss_fn)
    sharded.backward(loss)
    return loss.detach()


def _mean(losses: list[Tensor]) -> Tensor:
    return (sum(losses[1:], start=losses[0]) / len(losses)).reshape(())
