"""Enumerations and small classes of DeepSpeed that scripts import, with its names and values."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.integrations.deepspeed.config import read_config
from shardwise.integrations.deepspeed.fields import FIELDS, SECTION_NAMES
from shardwise.integrations.deepspeed.names import SETTINGS


class ZeroStageEnum(IntEnum):
    """`zero_optimization.stage`."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(StrEnum):
    """`device` of an `offload_*` section."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """What `engine.offload_states` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroParamStatus(Enum):
    """The status of parameters with a `ds_id`. Parameters have none here."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class DeepSpeedConfig:
    """A config that is read and checked, as `initialize` does. Raises `ConfigError`.

    Other attributes are fields of the config without a section, by their names or those that DeepSpeed gives them.
    """

    def __init__(
        self, config: Mapping[str, Any] | str | Path, mpu: object | None = None, mesh_device: object | None = None
    ) -> None:
        """`mpu` and `mesh_device` have no effect: sizes follow from the config and the number of ranks."""
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        read = read_config(config, world_size=self.world_size, may_sum=True)
        self.translated = read
        self.train_batch_size = read.global_batch
        self.train_micro_batch_size_per_gpu = read.micro_batch
        self.gradient_accumulation_steps = read.accumulate
        self.steps_per_print = read.steps_per_print
        self.zero_optimization_stage = read.stage
        self.zero_enabled = read.stage > 0
        self.gradient_clipping = read.value("gradient_clipping")
        self.fp16_enabled: bool = read.value("fp16.enabled")
        self.bfloat16_enabled: bool = read.value("bf16.enabled")
        self.optimizer_name = None if read.optimizer is None else read.optimizer.name
        self.optimizer_params = None if read.optimizer is None else dict(read.optimizer.params)
        self.scheduler_name = None if read.scheduler is None else read.scheduler.name
        self.scheduler_params = None if read.scheduler is None else dict(read.scheduler.params)
        self.monitor_config = read.monitors

    def __getattr__(self, name: str) -> Any:
        path = SETTINGS.get(name, name)
        if path not in FIELDS or path in SECTION_NAMES:
            raise AttributeError(
                f"DeepSpeedConfig.{name} is not supported by shardwise: use .translated.value(PATH), such as "
                f"'zero_optimization.stage', which gives a field's value or default."
            )
        return self.translated.value(path)

    def print(self, name: str) -> None:
        """Print what the config becomes: the plan, and notes on fields."""
        print(f"{name}: {self.translated.plan}\n{self.translated.report()}")
