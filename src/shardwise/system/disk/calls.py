"""The system calls of the tiers, in one place, so that tests can simulate a disk that is full, slow or broken."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Protocol


class Calls(Protocol):
    """Each method raises `OSError`, as `os` does. Reads and writes may transfer fewer bytes than asked, and return how
    many."""

    def open(self, path: Path, flags: int) -> int: ...

    def read(self, handle: int, into: memoryview, offset: int) -> int: ...

    def write(self, handle: int, data: memoryview, offset: int) -> int: ...

    def use_cache(self, handle: int) -> None:
        """Send later reads and writes of this handle through the page cache."""
        ...

    def reserve(self, handle: int, num_bytes: int) -> None:
        """Allocate disk space for the first `num_bytes` of a file."""
        ...

    def free_bytes(self, folder: Path) -> int: ...


class SystemCalls:
    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o666)

    def read(self, handle: int, into: memoryview, offset: int) -> int:
        return os.preadv(handle, [into], offset)

    def write(self, handle: int, data: memoryview, offset: int) -> int:
        return os.pwrite(handle, data, offset)  # for one buffer the same as pwritev, and available on every Unix

    def use_cache(self, handle: int) -> None:
        flags = fcntl.fcntl(handle, fcntl.F_GETFL)
        fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))

    def reserve(self, handle: int, num_bytes: int) -> None:
        if num_bytes:
            os.posix_fallocate(handle, 0, num_bytes)

    def free_bytes(self, folder: Path) -> int:
        return shutil.disk_usage(folder).free


SYSTEM = SystemCalls()
