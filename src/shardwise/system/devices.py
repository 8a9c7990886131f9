"""The device of a rank, through torch's interface for all kinds of accelerators.

[Note: the current device] Torch keeps a current device for every thread, by default the first one. Tensors made on
"cuda" are allocated there, generators are read there, and a thread that only queries an event opens a context there,
which takes hundreds of megabytes from the rank that owns the device. So a world makes its rank's device the current one
of the thread that joins it, and restores the old one when it is closed; threads of the library name their device
(`RankDevice.here`).

Only torch's common interface is used (`torch.accelerator`, `torch.Stream`, `torch.Event`): CUDA, ROCm, XPU and NPUs
differ in the name of the communication backend, which `torch.distributed` knows. What is specific to NCCL is in
`comm/transport/nccl.py`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from shardwise.errors import ConfigError, ModelError

WITHOUT_STREAMS = "cpu", "meta", "mps"
_VISIBLE = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES"
"""Variables by which a launcher restricts each rank to one device, which every rank then calls the first."""
_PRODUCT_SIZE = 256
_PRODUCT_SECONDS = 0.02
_measuring = threading.Lock()


class Event(Protocol):
    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Stream(Protocol):
    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class Accelerator(Protocol):
    """One kind of device. All methods apply to the calling thread."""

    @property
    def kind(self) -> str:
        """Torch's name: `cuda` (also for ROCm), `xpu`, `npu`."""
        ...

    @property
    def num_devices(self) -> int: ...

    def current_index(self) -> int: ...

    def use(self, index: int) -> None:
        """Make a device the current one."""
        ...

    def identity(self, index: int) -> str:
        """Identifies a device among those of the host, however each process numbers them; `""` if unknown."""
        ...

    def memory_bytes(self, index: int) -> int | None:
        """The memory of a device, in bytes; `None` if that is unknown."""
        ...

    def event(self) -> Event: ...

    def current_stream(self) -> Stream: ...

    def new_stream(self) -> Stream:
        """A new stream of the current device."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """A context in which `stream` is the current one."""
        ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Pinned host memory of `num_bytes`, so that copies to and from the device need no staging."""
        ...

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Copy asynchronously between pinned host memory and the device, on the current stream."""
        ...

    def keep_for(self, tensor: torch.Tensor, reader: Stream) -> torch.Tensor:
        """Keep the memory of `tensor` from being reused until `reader`, a stream other than its own, has finished;
        returns it."""
        ...

    def rng_state(self) -> torch.Tensor:
        """The state of the current device's generator."""
        ...

    def set_rng_state(self, state: torch.Tensor) -> None: ...

    def lock_pages(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        """Pin existing pages of host memory, so that copies need no staging; returns a function that unpins them.

        That function first synchronizes with the current device, whose copies may still use them.

        `None` if allocated pages cannot be pinned; then allocate pinned memory with torch instead.
        """
        ...


class TorchAccelerator:
    """The accelerator that this torch was built for."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._module: Any = torch.get_device_module(kind)

    @classmethod
    def found(cls) -> TorchAccelerator | None:
        """`None` if there is none with streams, or torch was built for the CPU only."""
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

    def memory_bytes(self, index: int) -> int | None:
        total = getattr(self._module.get_device_properties(index), "total_memory", None)
        return None if total is None else int(total)

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
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")

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
        """By the CUDA runtime, or ROCm's, which torch exposes under the same names."""
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
        """`index` is that of `device` among the accelerator's devices."""
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
        """Identifies the device among all others, independent of its index in a process; `""` for the CPU, which may be
        shared."""
        if self.accelerator is None:
            return ""
        visible = {name: os.environ[name] for name in _VISIBLE if name in os.environ}
        with self.here():  # the query may open a context on the current device
            return self.accelerator.identity(self._index) or f"{socket.gethostname()} {self.device} {visible}"

    @property
    def memory_bytes(self) -> int | None:
        """The memory of the accelerator, in bytes; `None` for the CPU, and if it is unknown."""
        if self.accelerator is None:
            return None
        with self.here():
            return self.accelerator.memory_bytes(self._index)

    def enter(self) -> None:
        """Make it the current device of this thread, until `leave`."""
        if self.accelerator is not None and self._before is None:
            self._before = self.accelerator.current_index()
            self.accelerator.use(self._index)

    def leave(self) -> None:
        """Restore the previous current device. May be called twice."""
        before, self._before = self._before, None
        if self.accelerator is not None and before is not None:
            self.accelerator.use(before)

    def here(self) -> AbstractContextManager[None]:
        """A context in which it is the current device of the calling thread."""
        if self.accelerator is None:
            return contextlib.nullcontext()
        return _using(self.accelerator, self._index)

    def resolve(self, device: torch.device | str) -> torch.device:
        """`device`, with this rank's index if it has none. Raises `ConfigError` for another rank's device."""
        wanted = torch.device(device)
        if wanted.type != self.device.type or wanted.type == "cpu":
            return wanted
        index: int | None = wanted.index
        if index is None:
            return self.device
        if index != self.device.index:
            raise ConfigError(
                f"device is {wanted}, but this rank's device is {self.device}. Leave it out, or give "
                f"{wanted.type!r}: that is the rank's own."
            )
        return wanted

    def check(self, device: torch.device, name: str) -> None:
        """Raise `ModelError` if parameter `name` is on `device`, the accelerator of another rank."""
        if device.type == self.device.type and device.type != "cpu" and device.index not in (None, self.device.index):
            raise ModelError(
                f"Parameter {name} is on {device}, but this rank's device is {self.device}: the models of several "
                f"ranks would lie on one. Make the world before the model, or call model.to({str(self.device)!r})."
            )


@contextmanager
def _using(accelerator: Accelerator, index: int) -> Iterator[None]:
    """A context in which device `index` is the current one of this thread."""
    before = accelerator.current_index()
    accelerator.use(index)
    try:
        yield
    finally:
        accelerator.use(before)


def count_gpus() -> int:
    """The number of GPUs or other accelerators that torch sees; creates no context on any of them."""
    found = TorchAccelerator.found()
    return found.num_devices if found is not None else 0


def device_kind() -> str | None:
    """Torch's name for the kind of accelerator that it sees here, such as `cuda`; None if it sees none."""
    found = TorchAccelerator.found()
    return found.kind if found is not None and found.num_devices else None


@functools.cache
def bf16_ratio() -> float:
    """How many times as long as in fp32 a product of matrices takes in bf16 on this processor. Takes 0.1 s at most on
    those that are slow at it.

    A processor without bf16 instructions converts each element before it multiplies: with AVX2 it took 45 times as
    long, with AVX-512 alone 5 times, 1.7 times with its bf16, and 0.2 times with AMX (torch 2.13). Its flags do not
    tell: oneDNN may be told to use fewer (ONEDNN_MAX_CPU_ISA). So it is measured.

    Counts this thread's own time, without helpers, for which it would wait, and takes the shortest of several tries, so
    that a loaded machine gives the same.
    """
    with _measuring:  # ranks may be threads, and the number of threads is the process's
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            fp32, bf16 = (_seconds(dtype) for dtype in (torch.float32, torch.bfloat16))
        finally:
            torch.set_num_threads(num_threads)
    return bf16 / fp32


def _seconds(dtype: torch.dtype) -> float:
    matrix = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=dtype, device="cpu")
    times: list[float] = []
    with torch.no_grad():
        matrix @ matrix  # prepares kernels
        while len(times) < 2 or sum(times) < _PRODUCT_SECONDS:
            started = time.thread_time()
            matrix @ matrix
            times.append(max(time.thread_time() - started, 1e-6))
    return min(times)
