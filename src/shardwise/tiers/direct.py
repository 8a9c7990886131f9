"""Reading and writing past the page cache: as fast as the disk, and nothing that others have in the cache is lost."""

from __future__ import annotations

import errno
import os
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
    was_direct = True
    while data:
        try:
            taken = calls.write(handle, data, offset)
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno != errno.EINVAL or not was_direct:
                raise
            calls.use_cache(handle)  # another thread may have been faster
            was_direct = False
            continue
        if taken <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data, offset = data[taken:], offset + taken
    return was_direct


def read_at(handle: int, into: memoryview, offset: int, calls: Calls = SYSTEM) -> bool:
    """Fill `into`. Raises `EOFError` where the file ends before. False as for `write_at`."""
    was_direct = True
    while into:
        try:
            given = calls.read(handle, into, offset)
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno != errno.EINVAL or not was_direct:
                raise
            calls.use_cache(handle)  # another thread may have been faster
            was_direct = False
            continue
        if given <= 0:
            raise EOFError(f"it ends at byte {offset}")
        into, offset = into[given:], offset + given
    return was_direct
