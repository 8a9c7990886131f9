"""The result of DeepSpeed's `get_accelerator()`."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

import psutil
import torch


class Accelerator:
    """Any accelerator that torch supports, or the CPU."""

    _name = "cpu"
    _peak_bytes = 0

    def __init__(self) -> None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._name = "cpu" if device is None else device.type

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(None if self._name == "cpu" else self.current_device())

    def current_device(self) -> int:
        return 0 if self._name == "cpu" else torch.accelerator.current_device_index()

    def set_device(self, device_index: int) -> None:
        if self._name != "cpu":
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        return 1 if self._name == "cpu" else torch.accelerator.device_count()

    def is_available(self) -> bool:
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        if self._name != "cpu":
            torch.accelerator.synchronize()

    def empty_cache(self) -> None:
        if self._name != "cpu":
            torch.accelerator.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors on the device; on a CPU, of the whole process, as in DeepSpeed."""
        return self._resident() if self._name == "cpu" else torch.accelerator.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The peak of `memory_allocated`; on a CPU, the most that a call has returned."""
        if self._name != "cpu":
            return torch.accelerator.max_memory_allocated(device_index)
        self._resident()
        return Accelerator._peak_bytes

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self._resident() if self._name == "cpu" else torch.accelerator.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        is_cpu = self._name == "cpu"
        return self.max_memory_allocated() if is_cpu else torch.accelerator.max_memory_reserved(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._name == "cpu":
            Accelerator._peak_bytes = 0
        else:
            torch.accelerator.reset_peak_memory_stats(device_index)

    def _resident(self) -> int:
        now = int(psutil.Process().memory_info().rss)
        Accelerator._peak_bytes = max(Accelerator._peak_bytes, now)
        return now

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of this rank's device."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def random(self) -> ModuleType:
        return torch.random

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The state of the generator of this rank's device."""
        state: torch.Tensor = self._generators().get_rng_state()
        return state

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        self._generators().set_rng_state(new_state)

    def _generators(self) -> Any:
        return torch if self._name == "cpu" else torch.get_device_module(self._name)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """A copy of `tensor` in pinned memory; on a CPU, `tensor` itself."""
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def communication_backend_name(self) -> str:
        return "nccl" if self._name == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        return self._name != "cuda" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"get_accelerator().{name} is not supported by shardwise.integrations.deepspeed.")
