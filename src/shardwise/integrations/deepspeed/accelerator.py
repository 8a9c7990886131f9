"""The result of DeepSpeed's `get_accelerator()`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from types import ModuleType
from typing import Any, NoReturn

import psutil
import torch

from shardwise.integrations.deepspeed.names import refusal

_TYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variables that choose the devices which processes see; on a CPU DeepSpeed uses CUDA's."""


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
        """The devices of this host; on a CPU the ranks of this host, as far as the environment tells, or 1."""
        if self._name != "cpu":
            return torch.accelerator.device_count()
        return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """Inside, this device is the current one."""
        if self._name == "cpu" or device_index is None:
            return nullcontext()
        return torch.accelerator.device_index(device_index)

    def is_synchronized_device(self) -> bool:
        """Whether operations are done when their call returns."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

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

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        if self._name != "cpu":
            return dict(torch.accelerator.memory_stats(device_index))
        now = self._resident()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": Accelerator._peak_bytes}

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device; on a CPU, of the host."""
        return int(psutil.virtual_memory().total) if self._name == "cpu" else self._free_and_total(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that nobody uses on the device; on a CPU, on the host."""
        return int(psutil.virtual_memory().available) if self._name == "cpu" else self._free_and_total(device_index)[0]

    def _free_and_total(self, device_index: int | None) -> tuple[int, int]:
        free, total = torch.accelerator.get_memory_info(device_index)
        return int(free), int(total)

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

    def initial_seed(self) -> int:
        return int(self._generators().initial_seed())

    def default_generator(self, device_index: int) -> torch.Generator:
        found: torch.Generator = (
            torch.default_generator if self._name == "cpu" else self._generators().default_generators[device_index]
        )
        return found

    def _generators(self) -> Any:
        return torch if self._name == "cpu" else torch.get_device_module(self._name)

    @property
    def Stream(self) -> Any:  # noqa: N802
        """The class of the device's streams; `None` on a CPU."""
        return None if self._name == "cpu" else self._generators().Stream

    @property
    def Event(self) -> Any:  # noqa: N802
        """The class of the device's events; `None` on a CPU."""
        return None if self._name == "cpu" else self._generators().Event

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self._name == "cpu" else self._generators().stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return None if self._name == "cpu" else self._generators().current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        return None if self._name == "cpu" else self._generators().default_stream(device_index)

    def range_push(self, msg: str, domain: object = None, category: object = None) -> None:
        """Begin a range of NVIDIA's profilers; nothing on other devices."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: object = None) -> None:
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """A copy of `tensor` in pinned memory; on a CPU, `tensor` itself."""
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._name != "cpu" and tensor.is_pinned()

    def communication_backend_name(self) -> str:
        return "nccl" if self._name == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        return self._name != "cuda" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def is_triton_supported(self) -> bool:
        return self._name in ("cuda", "xpu")

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes in which models can be trained."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def get_compile_backend(self) -> str:
        return "inductor"

    def set_compile_backend(self, backend: str) -> None:
        """Accepted only if it changes nothing: a plan's `compile` chooses."""
        if backend != "inductor":
            raise ValueError(f"The backend for torch.compile is inductor; {backend!r} is not supported.")

    def export_envs(self) -> list[str]:
        return ["NCCL", "LD_LIBRARY", "PATH"] if self._name == "cuda" else []

    def visible_devices_envs(self) -> list[str]:
        return [_VISIBLE.get(self._name, "CUDA_VISIBLE_DEVICES")]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def __getattr__(self, name: str) -> Any:
        if name in _TYPES:
            return partial(torch.tensor, dtype=_TYPES[name], device=self._name)
        return _refuse(name)


def _refuse(name: str) -> NoReturn:
    full = f"get_accelerator().{name}"
    raise AttributeError(refusal(full) or f"{full} is not supported by shardwise.integrations.deepspeed.")


@cache
def get_accelerator() -> Accelerator:
    return Accelerator()


def is_current_accelerator_supported() -> bool:
    return True
