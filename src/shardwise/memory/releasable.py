"""Memory whose bytes can be freed while tensors over it stay.

[Note: a freed buffer can be read] PyTorch's kernels do not check whether a storage has bytes. A storage resized to
nothing has a null pointer, and code that reads a freed parameter below Python (an extension, a C++ wrapper) crashes the
process. So on Linux a whole buffer is an address range of our own. While it is free, a small file full of NaN is mapped
over it, repeatedly: a stray read gives NaN, and a stray write is lost. To allocate it, fresh pages replace that
mapping.

Allocating, filling and freeing under the launcher's malloc settings, on one core of two: 256 KiB in 0.055 ms, where
`resize_` took 0.021; 4 MiB in 1.0 (1.8), 64 MiB in 75 (92). Memory that malloc would keep for the next allocation is
kept here too, because fresh pages cost several times a copy into warm ones. Small buffers keep their own pages,
overwritten with NaN, up to a limit in total: moving pages away took 130 us of the 1,500 that a block of 16 small
parameters took in forward and backward.

Alternatives change the user's objects: with DeepSpeed `param.data` becomes an empty tensor of shape [0], and FSDP2
replaces the parameter by a subclass. Torch's own guard for a storage, an error instead of the pointer, is private, made
for CUDA graphs, and missing in CPU builds.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import threading
from collections import defaultdict
from typing import Protocol

import torch

from shardwise.system.even_parts import round_up
from shardwise.system.heap import kept_block_bytes

Tensor = torch.Tensor

_PIECE_BYTES = 4 << 20
"""The length of the file of NaN, and so the memory it takes. A process may have 65,530 mappings."""
_LARGE_PAGES_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED, _NO_RESERVE = 0x10, 0x4000
_MAY_MOVE, _MOVE_FIXED, _DONT_UNMAP = 1, 2, 4
_FAILED = ctypes.c_void_p(-1).value


class Releasable(Protocol):
    """A piece of such memory. Undefined at first; free it once all views of it are made."""

    @property
    def tensor(self) -> Tensor:
        """All of it, as uint8."""
        ...

    def allocate(self) -> None:
        """Make it writable, with undefined content."""
        ...

    def free(self) -> None: ...


def releasable(num_bytes: int, device: torch.device) -> Releasable:
    """A range of our own pages where the system supports that, else a storage that is resized."""
    if device.type == "cpu" and num_bytes:
        pages = _pages()
        if pages is not None:
            try:
                return Pages(num_bytes, pages)
            except OSError:  # for instance, too many mappings
                pass
    return Resized(num_bytes, device)


class Resized:
    """A storage resized to nothing while it is free. It must not be read then."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._num_bytes = num_bytes

    def allocate(self) -> None:
        self.tensor.untyped_storage().resize_(self._num_bytes)

    def free(self) -> None:
        self.tensor.untyped_storage().resize_(0)


class Pages:
    """An address range that maps either NaN or memory. See [Note: a freed buffer can be read]."""

    def __init__(self, num_bytes: int, system: _System) -> None:
        """Raises `OSError` if there are not enough addresses or mappings."""
        self._system = system
        self._num_bytes = round_up(num_bytes, mmap.PAGESIZE)
        mapped = mmap.mmap(-1, self._num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        self.tensor = torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes)
        self._address = self.tensor.data_ptr()
        self._is_allocated = self._stays = False
        system.poison(self._address, self._num_bytes)

    def allocate(self) -> None:
        if not (self._is_allocated or self._stays):
            self._system.allocate_at(self._address, self._num_bytes)
        self._is_allocated = True

    def free(self) -> None:
        if not self._is_allocated:
            return
        self._is_allocated = False
        self._stays = self._stays or self._system.may_keep(self._num_bytes)
        if self._stays:
            ctypes.memset(self._address, 0xFF, self._num_bytes)
        else:
            self._system.free_at(self._address, self._num_bytes)

    def __del__(self) -> None:
        if getattr(self, "_stays", False):
            self._system.forget_kept(self._num_bytes)


class _System:
    """The system calls that map something at an address, and memory kept for the next allocation."""

    def __init__(self) -> None:
        """Raises `OSError` or `AttributeError` on an unsupported system."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._mmap, self._mremap = libc.mmap, libc.mremap
        self._madvise, self._munmap = libc.madvise, libc.munmap
        address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._mmap.restype = self._mremap.restype = address
        self._mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
        self._mremap.argtypes = [address, size, size, number, address]
        self._madvise.argtypes = [address, size, number]
        self._munmap.argtypes = [address, size]
        self._file = os.memfd_create("shardwise-nan")
        with open(self._file, "wb", closefd=False) as file:
            file.write(b"\xff" * _PIECE_BYTES)
        self._kept: dict[int, list[int]] = defaultdict(list)
        """Addresses of kept memory, by its number of bytes."""
        self._kept_bytes = self._staying_bytes = 0
        self._lock = threading.Lock()

    def poison(self, address: int, num_bytes: int) -> None:
        """Map NaN over the range. Its previous memory is freed."""
        for start in range(0, num_bytes, _PIECE_BYTES):
            here = min(_PIECE_BYTES, num_bytes - start)
            self._map(address + start, here, mmap.MAP_PRIVATE | _NO_RESERVE, self._file)

    def may_keep(self, num_bytes: int) -> bool:
        """Whether a small range may keep its memory for good: the total is limited to what malloc would keep."""
        keep_below = kept_block_bytes()
        with self._lock:
            stays = num_bytes <= _SMALL_BYTES and self._staying_bytes + num_bytes <= keep_below
            self._staying_bytes += num_bytes if stays else 0
        return stays

    def forget_kept(self, num_bytes: int) -> None:
        with self._lock:
            self._staying_bytes -= num_bytes

    def allocate_at(self, address: int, num_bytes: int) -> None:
        """Map memory of undefined content there."""
        with self._lock:
            kept = self._kept[num_bytes].pop() if self._kept.get(num_bytes) else None
            self._kept_bytes -= num_bytes if kept is not None else 0
        if kept is not None:
            if self._mremap(kept, num_bytes, num_bytes, _MAY_MOVE | _MOVE_FIXED, address) == address:
                return
            self._munmap(kept, num_bytes)
        self._map(address, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        if num_bytes >= _LARGE_PAGES_BYTES:
            self._madvise(address, num_bytes, mmap.MADV_HUGEPAGE)  # as the launcher sets for malloc

    def free_at(self, address: int, num_bytes: int) -> None:
        """Map NaN there again; keep the previous memory if there is little of it."""
        keep_below = kept_block_bytes()
        with self._lock:
            keeps = num_bytes < keep_below and self._kept_bytes + num_bytes <= 2 * keep_below
            self._kept_bytes += num_bytes if keeps else 0
        if keeps:  # keep the addresses reserved meanwhile: another thread may be mapping memory
            moved = self._mremap(address, num_bytes, num_bytes, _MAY_MOVE | _DONT_UNMAP, None)
            with self._lock:
                if moved == _FAILED:
                    self._kept_bytes -= num_bytes
                else:
                    self._kept[num_bytes].append(moved)
        self.poison(address, num_bytes)

    def _map(self, address: int, num_bytes: int, flags: int, file: int) -> None:
        if self._mmap(address, num_bytes, _READ_WRITE, flags | _FIXED, file, 0) != address:
            number = ctypes.get_errno()
            raise OSError(number, f"{num_bytes:,} bytes of memory could not be mapped: {os.strerror(number)}")


_LOOKS = threading.Lock()


def _pages() -> _System | None:
    """The system calls, looked up at first use: one file of NaN per process."""
    with _LOOKS:
        return _system()


@functools.cache
def _system() -> _System | None:
    if sys.platform != "linux":
        return None
    try:
        return _System()
    except (OSError, AttributeError, ValueError):  # an old kernel, another libc, a sandbox, a threshold in words
        return None
