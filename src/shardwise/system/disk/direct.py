"""Reading and writing past the page cache: at the speed of the disk, and without evicting what others have cached."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from shardwise.system.disk.calls import SYSTEM, Calls


def open_direct(path: Path, flags: int, calls: Calls = SYSTEM) -> tuple[int, bool]:
    """Open `path` past the page cache, or through it where the file system refuses that.

    Returns the descriptor, and whether it is direct.
    """
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return calls.open(path, flags | direct), bool(direct)
    except OSError as error:
        if error.errno != errno.EINVAL or not direct:
            raise
        return calls.open(path, flags), False


def write_at(handle: int, data: memoryview, offset: int, calls: Calls = SYSTEM) -> bool:
    """Write all of `data`, in as many parts as the system takes. Returns False if that had to go through the page
    cache.

    Some file systems open a file for direct I/O and then refuse to write that way, and all of them refuse after a part
    that ends within a page. The descriptor goes through the cache from then on.
    """
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return _all_of(calls.write, handle, data, offset, calls, lambda _: full)


def read_at(handle: int, into: memoryview, offset: int, calls: Calls) -> bool:
    """Fill `into`. Raises `EOFError` if the file ends too early. Returns False as `write_at` does."""
    return _all_of(calls.read, handle, into, offset, calls, lambda at: EOFError(f"it ends at byte {at}"))


def _all_of(
    transfer: Callable[[int, memoryview, int], int],
    handle: int,
    data: memoryview,
    offset: int,
    calls: Calls,
    ended: Callable[[int], Exception],
) -> bool:
    """`transfer` all of `data`, part by part. `ended` makes the exception for a transfer of zero bytes at an offset."""
    was_direct = True
    while data:
        try:
            moved = transfer(handle, data, offset)
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno != errno.EINVAL or not was_direct:
                raise
            calls.use_cache(handle)  # another thread may have done this already
            was_direct = False
            continue
        if moved <= 0:
            raise ended(offset)
        data, offset = data[moved:], offset + moved
    return was_direct
