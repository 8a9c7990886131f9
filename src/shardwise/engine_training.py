"""Whole training steps for any plan, with or without a pipeline."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.engine_state import EngineState
from shardwise.micro_batches import LossFunction
from shardwise.training import evaluate, forward_backward


class EngineTraining(EngineState):
    """Part of `Engine`."""

    def train_step(self, batch: Any, target: Any = None, *, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """One optimizer step: the plan's `accumulate` micro-batches forward and backward, then the update.

        `batch` is what the model is called with: a tensor, a tuple of arguments, or a dict of keyword arguments, which
        is cut along the first dimension of its tensors into even micro-batches; or a list or iterator of micro-batches,
        each of those kinds, of which an iterator gives its next `accumulate`. `loss_fn(output)`, or `loss_fn(output,
        target)` where `target` is given and cut like the batch, makes the loss of a micro-batch; without it the loss is
        the model's output, or the output's `loss`.

        Returns the mean loss over the micro-batches, detached, on every rank: of this rank's own data, and under a
        pipeline the same on all its stages (`engine.mean(loss.item())` is that of all data). All ranks call, those of
        one pipeline with the same batch. Clipping, loss scale and schedule are the plan's; the norm is
        `engine.gradient_norm`.

        Raises `ConfigError` for a batch that cannot be cut, and `StateError` in between micro-batches of a loop.
        """
        loss = self.forward_backward(batch, target, loss_fn=loss_fn)
        self._sharded.step()
        return loss

    def forward_backward(self, batch: Any, target: Any = None, *, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """`train_step` without the update, for a loop that looks at the gradients; `engine.step()` takes it then."""
        self._require_open()
        return forward_backward(self._sharded, batch, target, loss_fn)

    def eval_step(self, batch: Any, target: Any = None, *, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """The mean loss of `batch` without gradients, on every rank; arguments and result as of `train_step`.

        The model is called as it is: for dropout and batch norms call `model.eval()` before. All ranks call.
        """
        self._require_open()
        return evaluate(self._sharded, batch, target, loss_fn)
