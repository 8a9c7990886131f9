"""Page-aligned host memory, as reads and writes past the page cache require."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence

import torch

from shardwise.errors import StateError
from shardwise.system.devices import RankDevice
from shardwise.system.disk.align import PAGE
from shardwise.system.even_parts import round_up
from shardwise.system.units import format_bytes

_ALIGNMENT = 64
"""The alignment of torch's own allocator; kernels are fastest there."""
_LARGE_PAGE_BYTES = 2**21


class Stage:
    """Host memory that grows as needed and is kept. It is page-aligned, and pinned if a device copies into it."""

    def __init__(self, device: RankDevice | None) -> None:
        """With a `device`, the memory is pinned for copies from it."""
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def sized(self, num_bytes: int) -> torch.Tensor:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(
                0, dtype=torch.uint8, device="cpu"
            )  # frees the old memory before the new is allocated
            self._memory = pages(num_bytes, self._device)
        return self._memory[:num_bytes]


def pages(num_bytes: int, device: RankDevice | None = None) -> torch.Tensor:
    """A flat uint8 tensor of at least `num_bytes` in page-aligned host memory, pinned for `device` if one is given.

    [Note: pinned pages] Torch rounds its own pinned memory up to a power of two: an image of 33 GiB would take 64. So
    the pages are locked in place, if the accelerator can do that, and unlocked before they are freed. A finalizer on
    the mapping would run too late, when it is already unmapped; so the finalizer is on its one user, a `ctypes` array.
    """
    size = max(num_bytes, PAGE)
    mapped = (ctypes.c_char * size).from_buffer(private_pages(size))
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    if device is None or device.accelerator is None:
        return memory
    with device.here():
        unlock = device.accelerator.lock_pages(memory.data_ptr(), memory.numel())
        if unlock is None:
            return device.accelerator.pinned(num_bytes)
    weakref.finalize(mapped, _unlock, device, unlock).atexit = False
    return memory


def _unlock(device: RankDevice, unlock: Callable[[], None]) -> None:
    with device.here():
        unlock()


def private_pages(num_bytes: int) -> mmap.mmap:
    """Private memory of this process, in huge pages where available; shared memory gets small pages. Raises `OSError`
    if there is not so much."""
    try:
        mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # says neither what it was nor how much, as torch's allocator does
        wanted = f"{format_bytes(num_bytes)} of this host's memory"
        raise OSError(error.errno, f"{error.strerror}, {wanted}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # kernels without huge pages refuse
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def tensors_in_pages(wanted: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Flat, uninitialized host tensors of the given sizes and dtypes, one after the other in one mapping.

    First writes to fresh memory cost twice as much as writes to warm memory unless its pages are huge, and each of many
    small tensors alone is too small for huge pages. The mapping is freed with the last of the tensors; each has its own
    storage.
    """
    starts, num_bytes = [], 0
    for numel, dtype in wanted:
        starts.append(num_bytes)
        num_bytes += round_up(numel * dtype.itemsize, _ALIGNMENT)
    if num_bytes < _LARGE_PAGE_BYTES:
        return [torch.empty(numel, dtype=dtype, device="cpu") for numel, dtype in wanted]
    mapped = private_pages(num_bytes)
    return [
        torch.frombuffer(mapped, dtype=dtype, count=numel, offset=start)
        if numel
        else torch.empty(0, dtype=dtype, device="cpu")
        for start, (numel, dtype) in zip(starts, wanted, strict=True)
    ]


class BufferPool:
    """Buffers of equal size in one piece of host memory, each page-aligned; they are lent and given back."""

    def __init__(self, num_buffers: int, buffer_bytes: int, device: RankDevice | None = None) -> None:
        """With `device`, the memory is pinned for copies to and from it."""
        self.buffer_bytes = round_up(max(1, buffer_bytes), PAGE)
        self.num_buffers = num_buffers
        self.num_bytes = num_buffers * self.buffer_bytes
        memory = pages(self.num_bytes, device)[: self.num_bytes]
        self._free = list(memory.view(num_buffers, self.buffer_bytes).unbind())
        self._lent: dict[int, torch.Tensor] = {}

    def take(self) -> torch.Tensor:
        """A free buffer: a flat uint8 tensor of `buffer_bytes`. Raises `StateError` if all are lent."""
        if not self._free:
            raise StateError(
                f"All {len(self._lent)} buffers of {format_bytes(self.buffer_bytes)} are lent. Give one back first, or "
                f"make the pool larger."
            )
        buffer = self._free.pop()
        self._lent[buffer.data_ptr()] = buffer
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer, which must not be used any more. Raises `StateError` if it is not lent."""
        lent = self._lent.pop(buffer.data_ptr(), None)
        if lent is None:
            raise StateError("A buffer was given back that is not lent: twice, or to the wrong pool.")
        self._free.append(lent)

    @property
    def num_free(self) -> int:
        return len(self._free)
