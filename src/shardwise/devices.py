"""The device that a rank computes on, through what torch asks of any kind of accelerator.

[Note: the current device] Torch keeps a current device for every thread: the first one, unless somebody has said
otherwise. What is made on "cuda" lies there, generators are read there, and a thread that only asks whether an event
has come opens a context there, which takes hundreds of megabytes from the rank that owns it. So a world makes its
rank's device the current one, of the thread that joins it, and gives the old one back when it is closed; and threads of
the library say which device they mean (`RankDevice.here`).

What is used is the interface that torch has for all of them (`torch.accelerator`, `torch.Stream`, `torch.Event`): CUDA,
ROCm, XPU and NPUs differ in the name of the backend that moves tensors, which `torch.distributed` knows. What only
NCCL has is in `comm/nccl.py`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from shardwise.errors import ConfigError, ModelError

WITHOUT_STREAMS = "cpu", "meta", "mps"
_VISIBLE = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES"
"""What a launcher sets so that each rank sees one device, which all of them call the first."""


class Event(Protocol):
    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Stream(Protocol):
    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class Accelerator(Protocol):
    """One kind of device. Everything concerns the calling thread."""

    @property
    def kind(self) -> str:
        """What torch calls it: `cuda` (of ROCm too), `xpu`, `npu`."""
        ...

    @property
    def num_devices(self) -> int: ...

    def current_index(self) -> int: ...

    def use(self, index: int) -> None:
        """Make a device the current one."""
        ...

    def identity(self, index: int) -> str:
        """What tells a device of this host from the others, however each process numbers them; `""` if unknown."""
        ...

    def event(self) -> Event: ...

    def current_stream(self) -> Stream: ...

    def new_stream(self) -> Stream:
        """One of its own, of the current device."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Inside, `stream` is the current one."""
        ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """So many bytes of the host's memory, pinned: copies to and from the device need no detour."""
        ...

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between pinned memory of the host and the device on the current stream; nobody waits for it."""
        ...

    def keep_for(self, tensor: torch.Tensor, reader: Stream) -> torch.Tensor:
        """The same tensor, whose memory is used again only when `reader`, another stream than its own, is through."""
        ...

    def rng_state(self) -> torch.Tensor:
        """The state of the current device's generator."""
        ...

    def set_rng_state(self, state: torch.Tensor) -> None: ...

    def lock_pages(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        """Lock pages of the host's memory, so that copies need no detour; returns what unlocks them.

        That waits for the current device first, whose copies may still use them.

        `None` where pages in use cannot be locked: ask torch for pinned memory then.
        """
        ...


class TorchAccelerator:
    """The one that this torch was built for."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._module: Any = torch.get_device_module(kind)

    @classmethod
    def found(cls) -> TorchAccelerator | None:
        """`None` where there is none with streams of its own, or torch was built for the CPU alone."""
        if not torch.accelerator.is_available():
            return None
        device = torch.accelerator.current_accelerator()
        return cls(device.type) if device is not None and device.type not in WITHOUT_STREAMS else None

    @property
    def num_devices(self) -> int:
        return torch.accelerator.device_count()

    def current_index(self) -> int:
        return torch.accelerator.current_device_index()

    def use(self, index: int) -> None:
        torch.accelerator.set_device_index(index)

    def identity(self, index: int) -> str:
        properties = self._module.get_device_properties(index)
        return str(getattr(properties, "uuid", ""))

    def event(self) -> Event:
        return torch.Event(self.kind)

    def current_stream(self) -> Stream:
        return torch.accelerator.current_stream()

    def new_stream(self) -> Stream:
        return torch.Stream(self.kind)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        assert isinstance(stream, torch.Stream)
        return stream

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        out.copy_(source, non_blocking=True)

    def keep_for(self, tensor: torch.Tensor, reader: Stream) -> torch.Tensor:
        if tensor.device.type == self.kind:
            assert isinstance(reader, torch.Stream)
            tensor.record_stream(reader)
        return tensor

    def rng_state(self) -> torch.Tensor:
        state: torch.Tensor = self._module.get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._module.set_rng_state(state)

    def lock_pages(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        """Of the CUDA runtime, and ROCm's, which torch shows under the same names."""
        runtime = self._module.cudart() if hasattr(self._module, "cudart") else None
        if runtime is None or int(runtime.cudaHostRegister(address, num_bytes, 0)) != 0:
            return None

        def unlock() -> None:
            self._module.synchronize()
            runtime.cudaHostUnregister(address)

        return unlock


class RankDevice:
    """The device of one rank: the CPU, or one of the host's accelerators."""

    def __init__(self, device: torch.device, accelerator: Accelerator | None = None, index: int = 0) -> None:
        """`index` is that of `device` among those of `accelerator`."""
        self.device = device
        self.accelerator = accelerator
        self._index = index
        self._before: int | None = None

    @classmethod
    def cpu(cls) -> RankDevice:
        return cls(torch.device("cpu"))

    @classmethod
    def of(cls, accelerator: Accelerator, index: int) -> RankDevice:
        return cls(torch.device(accelerator.kind, index), accelerator, index)

    @property
    def identity(self) -> str:
        """What tells it from all others, whatever each process calls it; `""` for the CPU, which all may share."""
        if self.accelerator is None:
            return ""
        visible = {name: os.environ[name] for name in _VISIBLE if name in os.environ}
        with self.here():  # whoever asks may open a context on the current one
            return self.accelerator.identity(self._index) or f"{socket.gethostname()} {self.device} {visible}"

    def enter(self) -> None:
        """Make it the current device of this thread, until `leave`."""
        if self.accelerator is not None and self._before is None:
            self._before = self.accelerator.current_index()
            self.accelerator.use(self._index)

    def leave(self) -> None:
        """Give the device back that was current before. May be called twice."""
        before, self._before = self._before, None
        if self.accelerator is not None and before is not None:
            self.accelerator.use(before)

    def here(self) -> AbstractContextManager[None]:
        """Inside, it is the current device, of whatever thread calls."""
        if self.accelerator is None:
            return contextlib.nullcontext()
        return _using(self.accelerator, self._index)

    def resolve(self, device: torch.device | str) -> torch.device:
        """`device` with this rank's index where it has none. Raises `ConfigError` for another rank's."""
        wanted = torch.device(device)
        if wanted.type != self.device.type or wanted.type == "cpu":
            return wanted
        index: int | None = wanted.index
        if index is None:
            return self.device
        if index != self.device.index:
            raise ConfigError(
                f"device is {wanted}, but this rank's device is {self.device}. Leave it out, or say "
                f"{wanted.type!r}: that is the rank's own."
            )
        return wanted

    def check(self, device: torch.device, name: str) -> None:
        """Raise `ModelError` if parameter `name` lies on `device`, the accelerator of another rank."""
        if device.type == self.device.type and device.type != "cpu" and device.index not in (None, self.device.index):
            raise ModelError(
                f"Parameter {name} is on {device}, but this rank's device is {self.device}: the models of several "
                f"ranks would lie on one. Make the world before the model, or call model.to({str(self.device)!r})."
            )


@contextmanager
def _using(accelerator: Accelerator, index: int) -> Iterator[None]:
    """Inside, device `index` is the current one of this thread."""
    before = accelerator.current_index()
    accelerator.use(index)
    try:
        yield
    finally:
        accelerator.use(before)
