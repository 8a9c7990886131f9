"""Callbacks for `fit` of Keras 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from shardwise.integrations.horovod import numpy as by_numpy
from shardwise.integrations.horovod.context import rank, size
from shardwise.integrations.horovod.keras_variables import broadcast_variables


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Give all ranks the model and optimizer of `root_rank` when training begins."""

    def __init__(self, root_rank: int) -> None:
        super().__init__()
        self.root_rank = root_rank

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        seeds = [*self.model.trainable_variables, *self.model.non_trainable_variables]
        broadcast_variables([*seeds, *(optimizer.variables if optimizer is not None else ())], self.root_rank)


class MetricAverageCallback(keras.callbacks.Callback):
    """Average the numbers of an epoch over the ranks. Put it before callbacks that read them."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        names = sorted(name for name, value in (logs or {}).items() if np.isscalar(value))
        if logs and names:
            averaged = by_numpy.allreduce(np.array([float(logs[name]) for name in names]), "metrics")
            logs.update(zip(names, averaged.tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Between two epochs the learning rate is `initial_lr * multiplier(epoch)`; a number is taken for all of them."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Without `staircase` the epoch counts in fractions, by `steps_per_epoch` or what Keras knows of it."""
        super().__init__()
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda _: multiplier
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        if self.staircase:
            self._adjust(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        steps = self.steps_per_epoch or self.params.get("steps")
        if not self.staircase and steps:
            self._adjust(self._epoch + batch / steps)

    def _adjust(self, epoch: float) -> None:
        if epoch >= self.start_epoch and (self.end_epoch is None or epoch < self.end_epoch):
            self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """From `initial_lr / size` to `initial_lr` over `warmup_epochs` (Goyal et al., "Accurate, Large Minibatch SGD")."""

    def __init__(
        self, initial_lr: float, warmup_epochs: int = 5, verbose: int = 0, steps_per_epoch: int | None = None
    ) -> None:
        def multiplier(epoch: float) -> float:
            return 1 / size() * (epoch * (size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr, multiplier, end_epoch=warmup_epochs, staircase=True, steps_per_epoch=steps_per_epoch
        )
        self.verbose = verbose
        self.warmup_epochs = warmup_epochs

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        if epoch == self.warmup_epochs:
            self.model.optimizer.learning_rate = self.initial_lr
            if self.verbose and rank() == 0:
                print(f"The learning rate is {self.initial_lr} from here on.")
