"""From one file to another without passing through memory as a whole, where the system can; else piece by piece."""

from __future__ import annotations

import errno
import os

PIECE_BYTES = 2**22
_NOT_HERE = frozenset((errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.ETXTBSY))
"""Between file systems, of kinds that cannot, or forbidden in a container: then it goes through memory."""


def copy_range(source: int, start: int, target: int, at: int, num_bytes: int) -> bool:
    """`num_bytes` from byte `start` of one open file to byte `at` of another; both descriptors stay where they were.

    Whether all of it stayed in the kernel. Raises `EOFError` where the source ends before, and `OSError` as the system
    does. Neither descriptor may be one that goes past the page cache, and what is written to the source must be waited
    for first.
    """
    stayed = True
    while num_bytes:
        moved = _in_kernel(source, start, target, at, num_bytes) if stayed else None
        if moved is None:
            stayed = False
            moved = _through_memory(source, start, target, at, min(num_bytes, PIECE_BYTES))
        if not moved:
            raise EOFError(f"it ends at byte {start}")
        start, at, num_bytes = start + moved, at + moved, num_bytes - moved
    return stayed


def _in_kernel(source: int, start: int, target: int, at: int, num_bytes: int) -> int | None:
    """Bytes that were copied; `None` where it cannot be done so."""
    if not hasattr(os, "copy_file_range"):
        return None
    try:
        return os.copy_file_range(source, target, num_bytes, start, at)
    except OSError as error:
        if error.errno in _NOT_HERE:
            return None
        raise


def _through_memory(source: int, start: int, target: int, at: int, num_bytes: int) -> int:
    """By descriptors through the page cache: a direct one takes no bytes that begin anywhere."""
    piece = memoryview(os.pread(source, num_bytes, start))
    done = 0
    while done < len(piece):
        done += os.pwrite(target, piece[done:], at + done)
    return done
