"""Disks on which the files of one rank fail, or are slow."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

from shardwise.system.disk import SystemCalls
from tests.patience import PATIENCE


class DiskOfOne(SystemCalls):
    """Knows which open files of the disk tier are those of rank 1."""

    def __init__(self) -> None:
        self._of_one: set[int] = set()

    def open(self, path: Path, flags: int) -> int:
        handle = super().open(path, flags)
        if "shardwise-rank-1." in path.name:
            self._of_one.add(handle)
        else:
            self._of_one.discard(handle)
        return handle

    def is_of_one(self, handle: int) -> bool:
        return handle in self._of_one


class BreakingOfOne(DiskOfOne):
    """Rank 1's files cannot be read, written or given space to, while `breaks` names that, after `left` such calls."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks, self.left, self.code = "", 0, errno.EIO

    def read(self, handle: int, into: memoryview, offset: int) -> int:
        self._may_break("read", handle)
        return super().read(handle, into, offset)

    def write(self, handle: int, data: memoryview, offset: int) -> int:
        self._may_break("write", handle)
        return super().write(handle, data, offset)

    def reserve(self, handle: int, num_bytes: int) -> None:
        self._may_break("reserve", handle)
        super().reserve(handle, num_bytes)

    def _may_break(self, verb: str, handle: int) -> None:
        if self.breaks == verb and self.is_of_one(handle):
            self.left -= 1
            if self.left < 0:
                raise OSError(self.code, os.strerror(self.code))


class SilentOfOne(DiskOfOne):
    """Rank 1's reads or writes, whichever `verb` names, do not return until the disk `goes_on`, and fail then."""

    def __init__(self) -> None:
        super().__init__()
        self.verb, self.goes_on = "", threading.Event()

    def read(self, handle: int, into: memoryview, offset: int) -> int:
        self._may_stop("read", handle)
        return super().read(handle, into, offset)

    def write(self, handle: int, data: memoryview, offset: int) -> int:
        self._may_stop("write", handle)
        return super().write(handle, data, offset)

    def _may_stop(self, verb: str, handle: int) -> None:
        if self.verb == verb and self.is_of_one(handle):
            assert self.goes_on.wait(PATIENCE)
            raise OSError(errno.EIO, os.strerror(errno.EIO))


class SlowDisk(DiskOfOne):
    """Each read and write of all files, or of rank 1's alone, takes `seconds`."""

    def __init__(self, *, of_one: bool) -> None:
        super().__init__()
        self.seconds = 0.0
        self._is_for_all = not of_one

    def read(self, handle: int, into: memoryview, offset: int) -> int:
        self._take_time(handle)
        return super().read(handle, into, offset)

    def write(self, handle: int, data: memoryview, offset: int) -> int:
        self._take_time(handle)
        return super().write(handle, data, offset)

    def _take_time(self, handle: int) -> None:
        if self.seconds and (self._is_for_all or self.is_of_one(handle)):
            time.sleep(self.seconds)
