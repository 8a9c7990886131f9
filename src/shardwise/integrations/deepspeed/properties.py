"""The read-only methods and properties of a `DeepSpeedEngine`: sizes, settings, learning rates, the last step."""

from __future__ import annotations

import os
from typing import Any

import torch

from shardwise import Engine, Plan
from shardwise.errors import StateError
from shardwise.integrations.deepspeed.config import TranslatedConfig
from shardwise.process_rank import process_rank_of


class ThroughputTimer:
    """Counts nothing."""

    def update_epoch_count(self) -> None:
        """Does nothing."""


class EngineProperties:
    """A base class of `DeepSpeedEngine`, which sets these attributes."""

    shardwise: Engine
    optimizer: torch.optim.Optimizer | None
    micro_steps: int
    _config: TranslatedConfig
    _last_was_skipped: bool

    @property
    def config(self) -> Plan:
        """The plan into which the config was translated."""
        return self.shardwise.plan

    @property
    def device(self) -> torch.device:
        return next(self.shardwise.module.parameters()).device

    @property
    def world_size(self) -> int:
        return self.shardwise.world.size

    @property
    def global_rank(self) -> int:
        return self.shardwise.world.rank

    @property
    def local_rank(self) -> int:
        return process_rank_of(os.environ).local_rank

    @property
    def dp_world_size(self) -> int:
        return self._config.num_replicas

    @property
    def tput_timer(self) -> ThroughputTimer:
        """For scripts that count epochs with it. `engine.shardwise.log` records the throughput."""
        return ThroughputTimer()

    @property
    def cur_scale(self) -> float:
        """The current loss scale; 1 except in fp16."""
        scaler = self.shardwise.scaler
        return 1.0 if scaler is None else scaler.scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because of an overflow."""
        return self._last_was_skipped

    def train_batch_size(self) -> int:
        return self._config.global_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._config.micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self._config.accumulate

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Accepted only if it changes nothing."""
        self._require_unchanged("train_batch_size", self.train_batch_size(), train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Accepted only if it changes nothing."""
        name = "train_micro_batch_size_per_gpu"
        self._require_unchanged(name, self.train_micro_batch_size_per_gpu(), micro_batch_size)

    def _require_unchanged(self, name: str, now: int, wanted: int) -> None:
        if wanted != now:
            raise StateError(
                f"{name} is {now} and cannot be changed to {wanted} during training. Save a checkpoint, and load it "
                f"into an engine whose config has {name} {wanted}."
            )

    def get_batch_info(self) -> tuple[int, int, int]:
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def zero_optimization_stage(self) -> int:
        return self._config.stage

    def zero_optimization(self) -> bool:
        return self._config.stage > 0

    def zero_optimization_partition_weights(self) -> bool:
        return self._config.stage == 3

    def zero_optimization_partition_gradients(self) -> bool:
        return self._config.stage >= 2

    def fp16_enabled(self) -> bool:
        return self.shardwise.plan.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.shardwise.plan.precision == "bf16"

    def gradient_clipping(self) -> float:
        return self.shardwise.plan.clip_grad_norm or 0.0

    def dynamic_loss_scale(self) -> bool:
        return self.shardwise.plan.loss_scale.dynamic

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step, before clipping. On a GPU this call waits for it."""
        return self.shardwise.gradient_norm

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups()]

    def get_type(self) -> list[str]:
        return [type(self.optimizer).__name__ for _ in self._groups()]

    def get_mom(self) -> list[Any]:
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated parameters."""
        return self.micro_steps % self._config.accumulate == 0 and not self._last_was_skipped

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups
