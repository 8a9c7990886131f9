"""Memory that processes share without giving it a name.

[Note: nothing is left] A `memfd` is a file in no folder. It lives as long as somebody has it open or mapped, so
whatever ends the processes, `kill -9` included, ends it too, and the size of /dev/shm (64 MiB in most containers) is
no limit to it. Another process of the same user opens it as `/proc/PID/fd/N`.
"""

from __future__ import annotations

import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

Tensor = torch.Tensor
PAGE = mmap.PAGESIZE
_SPARSE_BYTES = 2**40
"""The length of every file. Only pages that were written take memory."""
_PRESENT, _SWAPPED, _OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))


def is_possible() -> bool:
    """Whether processes of this system can share memory like this."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and Path("/proc/self/fd").exists()


def whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


class SharedFile:
    """One open `memfd`. Raises `OSError` where the system refuses."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def create(cls) -> SharedFile:
        descriptor = os.memfd_create("shardwise")
        os.ftruncate(descriptor, _SPARSE_BYTES)
        return cls(descriptor)

    @classmethod
    def attach(cls, pid: int, descriptor: int) -> SharedFile:
        """The file that process `pid` knows as `descriptor`."""
        return cls(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))

    def map(self, offset: int, num_bytes: int) -> mmap.mmap:
        """Some of it, to read and write. `offset` and `num_bytes` are of whole pages."""
        return mmap.mmap(self.descriptor, num_bytes, flags=mmap.MAP_SHARED, offset=offset)

    def map_privately(self, offset: int, num_bytes: int) -> mmap.mmap:
        """Some of it, to read; what is written here is seen by nobody else, and hides what others write."""
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        return mmap.mmap(self.descriptor, num_bytes, flags=flags, offset=offset)

    def close(self) -> None:
        """What is mapped stays mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def bytes_of(mapped: mmap.mmap) -> Tensor:
    """The mapping as uint8; it stays as long as a tensor of it does."""
    return torch.frombuffer(mapped, dtype=torch.uint8)


def give_back(mapped: mmap.mmap) -> None:
    """Free the pages of a mapping for all who have them; the next to look finds zeros."""
    with suppress(OSError):  # then they stay, which costs memory and nothing else
        mapped.madvise(mmap.MADV_REMOVE)


def has_own_pages(mapped: mmap.mmap) -> bool:
    """Whether this process has written to a private mapping, so that some of its pages are no longer the file's.

    See proc_pid_pagemap(5). True as well where the system does not tell.
    """
    first = int(np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]) // PAGE
    num_pages = len(mapped) // PAGE
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            entries = np.frombuffer(os.pread(pagemap.fileno(), 8 * num_pages, 8 * first), np.uint64)
    except OSError:
        return True
    is_there, is_files = (entries & (_PRESENT | _SWAPPED)) != 0, (entries & _OF_FILE) != 0
    return len(entries) < num_pages or bool((is_there & ~is_files).any())


def forget(mapped: mmap.mmap) -> None:
    """Take a mapping's pages out of this process: the file keeps them, and what was privately written is gone."""
    mapped.madvise(mmap.MADV_DONTNEED)
