"""Memory that processes share without giving it a name.

[Note: nothing is left] A `memfd` is a file in no folder. It lives as long as a process has it open or mapped, so
however the processes end, `kill -9` included, it ends too, and the size of /dev/shm (64 MiB in most containers) does
not limit it. Another process of the same user opens it as `/proc/PID/fd/N`.

[Note: one descriptor] Python's own `mmap` keeps a copy of the descriptor as long as the mapping lives (before 3.13
always). There are two mappings per unit of a model, and many shells allow 1024 descriptors. So memory is mapped by the
C library, and a file has one descriptor, however often it is mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.system.even_parts import round_up

Tensor = torch.Tensor
Mapping = ctypes.Array[ctypes.c_uint8]
"""Bytes of a file in memory, for as long as this or anything made from it lives."""
PAGE = mmap.PAGESIZE
_SPARSE_BYTES = 2**40
"""The length of every file. Only pages that were written take memory."""
_FAILED = ctypes.c_void_p(-1).value
_PRESENT, _SWAPPED, _OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))


def is_possible() -> bool:
    """Whether processes of this system can share memory in this way."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and Path("/proc/self/fd").exists()


def whole_pages(num_bytes: int) -> int:
    return round_up(num_bytes, PAGE)


class SharedFile:
    """One open `memfd`. Raises `OSError` if the system refuses."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def create(cls) -> SharedFile:
        file = cls(os.memfd_create("shardwise"))
        try:
            os.ftruncate(file.descriptor, _SPARSE_BYTES)
        except OSError:  # `ulimit -f` bounds it too
            file.close()
            raise
        return file

    @classmethod
    def attach(cls, pid: int, descriptor: int) -> SharedFile:
        """The file that process `pid` has open as `descriptor`."""
        return cls(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))

    def map(self, offset: int, num_bytes: int) -> Mapping:
        """Map part of it to read and write. `offset` and `num_bytes` are whole pages."""
        return _map(self.descriptor, offset, num_bytes, mmap.MAP_SHARED)

    def map_privately(self, offset: int, num_bytes: int) -> Mapping:
        """Map part of it to read. Writes are seen only by this process, and hide those of others."""
        return _map(self.descriptor, offset, num_bytes, mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0))

    def close(self) -> None:
        """Mappings stay."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def _map(descriptor: int, offset: int, num_bytes: int, flags: int) -> Mapping:
    """See [Note: one descriptor]."""
    address = _c("mmap")(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if address == _FAILED:
        raise _system_error()
    mapped = (ctypes.c_uint8 * num_bytes).from_address(address)
    weakref.finalize(mapped, _c("munmap"), address, num_bytes).atexit = False
    return mapped


def _advise(mapped: Mapping, advice: int, start: int = 0, stop: int | None = None) -> None:
    """About its bytes `start` to `stop`, which are whole pages; by default all of it."""
    num_bytes = (len(mapped) if stop is None else stop) - start
    if _c("madvise")(ctypes.addressof(mapped) + start, num_bytes, advice):
        raise _system_error()


def _system_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


@cache
def _c(name: str) -> Callable[..., Any]:
    """A function of the C library."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_void_p if name == "mmap" else ctypes.c_int
    address, length, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    function.argtypes = {
        "mmap": (address, length, number, number, number, ctypes.c_long),
        "munmap": (address, length),
        "madvise": (address, length, number),
    }[name]
    return function  # type: ignore[no-any-return]


def bytes_of(mapped: Mapping) -> Tensor:
    """The mapping as uint8; it lives as long as a tensor over it."""
    return torch.frombuffer(mapped, dtype=torch.uint8)


def give_back(mapped: Mapping, start: int = 0, stop: int | None = None) -> None:
    """Free the whole pages within bytes `start` to `stop` of a mapping, by default all, for all processes; they read as
    zeros afterwards."""
    first, last = whole_pages(start), (len(mapped) if stop is None else stop) // PAGE * PAGE
    if first < last:
        with suppress(OSError):  # otherwise they stay, which only costs memory
            _advise(mapped, mmap.MADV_REMOVE, first, last)


def has_own_pages(mapped: Mapping) -> bool:
    """Whether this process has written to a private mapping, so that some of its pages are no longer the file's.

    See proc_pid_pagemap(5). Also true if the system does not say.
    """
    first = ctypes.addressof(mapped) // PAGE
    num_pages = len(mapped) // PAGE
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            entries = np.frombuffer(os.pread(pagemap.fileno(), 8 * num_pages, 8 * first), np.uint64)
    except OSError:
        return True
    is_there, is_files = (entries & (_PRESENT | _SWAPPED)) != 0, (entries & _OF_FILE) != 0
    return len(entries) < num_pages or bool((is_there & ~is_files).any())


def forget(mapped: Mapping) -> None:
    """Remove a mapping's pages from this process: the file keeps them, and private writes are lost."""
    _advise(mapped, mmap.MADV_DONTNEED)
