"""The read-only methods and properties of a `DeepSpeedEngine`: sizes, settings, learning rates, the last step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from shardwise import Engine
from shardwise.errors import StateError
from shardwise.integrations.deepspeed.config import TranslatedConfig
from shardwise.system.process_rank import process_rank_of


class EngineProperties:
    """A base class of `DeepSpeedEngine`, which sets these attributes."""

    shardwise: Engine
    optimizer: torch.optim.Optimizer | None
    micro_steps: int
    _config: TranslatedConfig
    _last_was_skipped: bool
    _last_was_boundary: bool

    @property
    def config(self) -> Mapping[str, Any]:
        """The config. `engine.shardwise.plan` is the plan into which it was translated."""
        return self._config.source

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
    def sequence_parallel_size(self) -> int:
        return int(self._config.value("sequence_parallel_size"))

    @property
    def mp_world_size(self) -> int:
        """The ranks among which layers are split."""
        return self.shardwise.mesh.size("tp") if "tp" in self.shardwise.mesh.axes else 1

    @property
    def sparse_tensor_module_names(self) -> frozenset[str]:
        """With `sparse_gradients`, the weights whose gradients DeepSpeed sends as rows; here they are dense."""
        if not self._config.value("sparse_gradients"):
            return frozenset()
        kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        modules = self.shardwise.module.named_modules()
        return frozenset(f"{name}.weight" for name, module in modules if isinstance(module, kinds))

    seq_dp_world_size = property(lambda self: self.dp_world_size * self.sequence_parallel_size)

    def get_data_parallel_rank(self) -> int:
        return self.shardwise.data_ranks[0]

    def get_model_parallel_rank(self) -> int:
        """This rank's place among those that split layers."""
        return self.shardwise.mesh.coordinate(self.global_rank).get("tp", 0)

    get_tensor_parallel_rank = get_model_parallel_rank

    def autotp_size(self) -> int:
        return self.mp_world_size

    @property
    def is_compiled(self) -> bool:
        """Whether the plan compiles the model."""
        return self.shardwise.plan.compile is not None

    def optimizer_name(self) -> str | None:
        """The config's optimizer, or the class of the one that the script made."""
        named = self._config.optimizer
        if named is not None and self.optimizer is not None:
            return named.name.lower() if named.name.lower() in ("adam", "adamw", "lamb", "lion") else named.name
        return None if self.optimizer is None else type(self.optimizer).__name__

    def postscale_gradients(self) -> bool:
        return not self._config.value("prescale_gradients")

    def zero_cpu_offload(self) -> bool:
        return bool(self._config.value("zero_optimization.offload_optimizer.device") == "cpu")

    zero_use_cpu_optimizer = zero_cpu_offload

    def zero_nvme_offload_optimizer(self) -> bool:
        return bool(self._config.value("zero_optimization.offload_optimizer.device") == "nvme")

    def checkpoint_tag_validation_enabled(self) -> bool:
        return self._config.tag_validation != "ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        return self._config.tag_validation == "fail"

    def loss_scale(self) -> float:
        """The current loss scale; 1 except in fp16."""
        return self.cur_scale

    @property
    def cur_scale(self) -> float:
        """The current loss scale; 1 except in fp16."""
        scaler = self.shardwise.scaler
        return 1.0 if scaler is None else scaler.scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because of an overflow, or of gradients that were not finite."""
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
        return self._last_was_boundary and not self._last_was_skipped

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups
