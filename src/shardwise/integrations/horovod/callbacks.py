"""Horovod's callbacks for Keras 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from shardwise.errors import ConfigError
from shardwise.integrations.horovod import numpy as numpy_hvd
from shardwise.integrations.horovod.basics import rank, size
from shardwise.integrations.horovod.keras_variables import broadcast_variables


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcast `root_rank`'s model and optimizer when training begins. `device` is ignored."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        variables = [*self.model.trainable_variables, *self.model.non_trainable_variables]
        broadcast_variables([*variables, *(optimizer.variables if optimizer is not None else ())], self.root_rank)


class MetricAverageCallback(keras.callbacks.Callback):
    """Average the metrics of an epoch over the ranks. List it before callbacks that read them. `device` is ignored."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        names = sorted(name for name, value in (logs or {}).items() if np.isscalar(value))
        if logs and names:
            averaged = numpy_hvd.allreduce(np.array([float(logs[name]) for name in names]), "metrics")
            logs.update(zip(names, averaged.tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Set the learning rate to `initial_lr * multiplier(epoch)` from `start_epoch` until before `end_epoch`.

    A number as `multiplier` is an exponential decay, as in Horovod: `multiplier ** (epoch - start_epoch)`.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = False,
        steps_per_epoch: int | None = None,
    ) -> None:
        """With `staircase` the rate changes at the first batch of an epoch; else at each batch, and `epoch` is a
        fraction. Raises `ConfigError` for `momentum_correction`.
        """
        super().__init__()
        if momentum_correction:
            raise ConfigError("momentum_correction is not supported: Keras 3 compiles the momentum as a constant.")
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ConfigError(
                    f"Keras does not know the number of steps in an epoch. Pass it: "
                    f"{type(self).__name__}(steps_per_epoch=...)."
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._set_rate(self._epoch)
        elif not self.staircase:
            self._set_rate(self._epoch + batch / (self.steps_per_epoch or 1))

    def _set_rate(self, epoch: float) -> None:
        if hasattr(self.model, "jax_state_sync"):  # else the JAX backend's next step would not read the variable
            self.model.jax_state_sync()
        self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate at each batch, from `initial_lr / size` to `initial_lr` at the end of `warmup_epochs`.

    From Goyal et al., "Accurate, Large Minibatch SGD", 2017.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = False,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            epoch += 1 / (self.steps_per_epoch or 1)  # so that the last batch has initial_lr
            return 1 / size() * (epoch * (size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose
        self.warmup_epochs = warmup_epochs

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if epoch == self.warmup_epochs - 1 and self.verbose and rank() == 0:
            print(f"Epoch {epoch + 1}: the learning rate is {self.initial_lr} from now on.")
