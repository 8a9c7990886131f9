"""Host memory that begins on a page, as reads and writes past the page cache demand."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence

import torch

from shardwise.devices import RankDevice
from shardwise.errors import StateError
from shardwise.tiers.align import PAGE, up
from shardwise.units import format_bytes

_ALIGNMENT = 64
"""As torch's own allocator aligns: kernels are fastest there."""
_LARGE_PAGE_BYTES = 2**21


class Stage:
    """Host memory that grows as it is asked for, and is kept. It begins on a page; pinned where a device fills it."""

    def __init__(self, device: RankDevice | None = None) -> None:
        """Pinned for copies from `device`, if one is given."""
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    def sized(self, num_bytes: int) -> torch.Tensor:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # lets the old one go before the new one comes
            self._memory = pages(num_bytes, self._device)
        return self._memory[:num_bytes]


def pages(num_bytes: int, device: RankDevice | None = None) -> torch.Tensor:
    """Host memory that begins on a page; pinned for `device`. A flat uint8 tensor of at least `num_bytes`.

    [Note: pinned pages] Torch's own pinned memory is rounded up to a power of two: for an image of 33 GiB, 64. So pages
    are locked where they lie, if the accelerator can do that, and unlocked before they go: that is not when the
    mapping goes, whose end Python tells of when it has come, but when its one user does, an array of `ctypes`.
    """
    size = max(num_bytes, PAGE)
    mapped = (ctypes.c_char * size).from_buffer(_mapped(size))
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


def _mapped(num_bytes: int) -> mmap.mmap:
    """This process's own memory, in large pages where there are some: memory that is shared has small ones."""
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages does without
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def tensors_in_pages(wanted: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Host memory for flat tensors of so many elements, undefined, one after the other in one mapping.

    To fill fresh memory costs twice what filling warm memory does, unless its pages are large, and of many tensors each
    by itself is too small for large pages. It goes when the last of them goes; each has a storage of its own.
    """
    starts, num_bytes = [], 0
    for numel, dtype in wanted:
        starts.append(num_bytes)
        num_bytes += -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    if num_bytes < _LARGE_PAGE_BYTES:
        return [torch.empty(numel, dtype=dtype) for numel, dtype in wanted]
    mapped = _mapped(num_bytes)
    return [
        torch.frombuffer(mapped, dtype=dtype, count=numel, offset=start) if numel else torch.empty(0, dtype=dtype)
        for start, (numel, dtype) in zip(starts, wanted, strict=True)
    ]


class BufferPool:
    """Buffers of one size in one piece of host memory, each on pages of its own, lent and given back."""

    def __init__(self, num_buffers: int, buffer_bytes: int, device: RankDevice | None = None) -> None:
        """Pinned for copies from and to `device`, if one is given."""
        self.buffer_bytes = up(max(1, buffer_bytes))
        self.num_buffers = num_buffers
        self.num_bytes = num_buffers * self.buffer_bytes
        memory = pages(self.num_bytes, device)[: self.num_bytes]
        self._free = list(memory.view(num_buffers, self.buffer_bytes).unbind())
        self._lent: dict[int, torch.Tensor] = {}

    def take(self) -> torch.Tensor:
        """One of them: a flat uint8 tensor of `buffer_bytes`. Raises `StateError` if all are lent."""
        if not self._free:
            raise StateError(
                f"All {len(self._lent)} buffers of {format_bytes(self.buffer_bytes)} are lent. Give one back first, or "
                f"make the pool larger."
            )
        buffer = self._free.pop()
        self._lent[buffer.data_ptr()] = buffer
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Nobody may use it any more. Raises `StateError` for what is not lent."""
        lent = self._lent.pop(buffer.data_ptr(), None)
        if lent is None:
            raise StateError("A buffer was given back that is not lent: twice, or to the wrong pool.")
        self._free.append(lent)

    @property
    def num_free(self) -> int:
        return len(self._free)
