"""Reading and writing past the page cache: as fast as the disk, and nothing that others have in the cache is lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from shardwise.tiers.calls import SYSTEM, Calls


def open_direct(path: Path, flags: int, calls: Calls = SYSTEM) -> tuple[int, bool]:
    """A descriptor, and whether it goes past the page cache; through it where the file system refuses the other."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return calls.open(path, flags | direct), bool(direct)
    except OSError as error:
        if error.errno != errno.EINVAL or not direct:
            raise
        return calls.open(path, flags), False


def write_at(handle: int, data: memoryview, offset: int, calls: Calls = SYSTEM) -> bool:
    """All of `data`, whatever parts the system takes it in. False if that had to go through the page cache.

    Some file systems open a file past the cache and then do not write it so, and after a part that ends within a page
    none does: then the descriptor goes through the cache from there on.
    """
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return _all_of(calls.write, handle, data, offset, calls, lambda _: full)


def read_at(handle: int, into: memoryview, offset: int, calls: Calls = SYSTEM) -> bool:
    """Fill `into`. Raises `EOFError` where the file ends before. False as for `write_at`."""
    return _all_of(calls.read, handle, into, offset, calls, lambda at: EOFError(f"it ends at byte {at}"))


def _all_of(
    transfer: Callable[[int, memoryview, int], int],
    handle: int,
    data: memoryview,
    offset: int,
    calls: Calls,
    ended: Callable[[int], Exception],
) -> bool:
    """`transfer` all of `data`, part by part; `ended` says what it means that no more goes, at an offset."""
    was_direct = True
    while data:
        try:
            moved = transfer(handle, data, offset)
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno != errno.EINVAL or not was_direct:
                raise
            calls.use_cache(handle)  # another thread may have been faster
            was_direct = False
            continue
        if moved <= 0:
            raise ended(offset)
        data, offset = data[moved:], offset + moved
    return was_direct
