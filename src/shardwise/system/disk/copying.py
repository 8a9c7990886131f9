"""Copying between files inside the kernel where the system can, and in pieces through memory otherwise."""

from __future__ import annotations

import errno
import os

PIECE_BYTES = 2**22
_NOT_HERE = frozenset((errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.ETXTBSY))
"""The files are on different file systems, on ones that do not support it, or a container forbids it: copy through
memory."""


def copy_range(source: int, start: int, target: int, at: int, num_bytes: int) -> bool:
    """Copy `num_bytes` from byte `start` of one open file to byte `at` of another. File positions do not change.

    Returns whether all of it stayed in the kernel. Raises `EOFError` if the source ends too early, and `OSError` as the
    system does. Neither descriptor may bypass the page cache, and pending writes to the source must be finished first.
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
    """The number of bytes copied; `None` where the kernel cannot do it."""
    if not hasattr(os, "copy_file_range"):
        return None
    try:
        return os.copy_file_range(source, target, num_bytes, start, at)
    except OSError as error:
        if error.errno in _NOT_HERE:
            return None
        raise


def _through_memory(source: int, start: int, target: int, at: int, num_bytes: int) -> int:
    """Both descriptors go through the page cache, because a direct one accepts only aligned offsets."""
    piece = memoryview(os.pread(source, num_bytes, start))
    done = 0
    while done < len(piece):
        done += os.pwrite(target, piece[done:], at + done)
    return done
