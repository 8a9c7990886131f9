"""A step of Trainer in pipeline stages: all its micro-batches in one schedule.

[Note: the first of a step] Trainer reads all micro-batches of a step before it trains the first. So the first
`training_step` gives them to the engine, which runs the plan's schedule over them, and each reports the loss of its
own micro-batch. Trainer's own `compute_loss` calls the model, and ends there on all stages but the last.

A class with a `compute_loss` or `training_step` of its own (TRL's, say), which may call the model several times and
look at logits beside a loss, trains one micro-batch after the other: each call of the model splits its batch among the
stages, and its whole output is sent to all ranks. A step with fewer micro-batches than others, at the end of an epoch,
or with fewer than there are stages, most of which would wait, trains one after the other too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn

import shardwise as sw

_STEPS = ("compute_loss", "training_step")


def runs_schedules(trainer: Any, mixin: type) -> bool:
    """Whether all steps but short ones run the plan's schedule. `mixin` is our class that `trainer` has."""
    fills_stages = trainer.args.gradient_accumulation_steps >= (trainer.plan.mesh or {}).get("pp", 1)
    return fills_stages and has_plain_steps(trainer, mixin)


def has_plain_steps(trainer: Any, mixin: type) -> bool:
    """Whether losses are computed as in Trainer itself, and not in a class of TRL or of the script's."""
    others = [one for one in type(trainer).__mro__ if one not in (mixin, transformers.Trainer)]
    return not any(name in vars(one) for one in others for name in _STEPS)


class WholeStep:
    """The micro-batches of one step, and their losses."""

    def __init__(self, trainer: Any, batches: Sequence[Any]) -> None:
        self._trainer = trainer
        self._batches = list(batches)
        self._losses: list[torch.Tensor] | None = None
        """Of those that have not been reported."""

    def loss_of_next(self, engine: sw.Engine, model: nn.Module, num_items: Any) -> torch.Tensor:
        """What `training_step` returns for the next micro-batch: its share of the loss that Trainer sums."""
        if self._losses is None:
            self._train(engine, model, num_items)
            self._losses = [loss / len(self._batches) for loss in engine.losses]
        return self._losses.pop(0)

    def _train(self, engine: sw.Engine, model: nn.Module, num_items: Any) -> None:
        """Run forward and backward of all micro-batches."""
        trainer, num = self._trainer, len(self._batches)
        model.train()
        if callable(train := getattr(trainer.optimizer, "train", None)):  # of optimizers without a schedule
            train()
        is_scaled = trainer.loss_is_scaled_for_ga
        if is_scaled is None:
            counts = trainer.model_accepts_loss_kwargs and num_items is not None
            is_scaled = counts or trainer.compute_loss_func is not None

        def compute(inputs: Any) -> torch.Tensor:
            with trainer.compute_loss_context_manager():
                loss: torch.Tensor = trainer.compute_loss(model, dict(inputs), num_items_in_batch=num_items)
            return loss * num if is_scaled else loss  # the engine takes the mean of them

        batches = [trainer._prepare_inputs(batch) for batch in self._batches]
        engine.forward_backward(batches, compute_loss=compute)
