"""What the kernel keeps of files in memory: what is there, and what should be."""

from __future__ import annotations

import contextlib
import os

PROBED_BYTES = 2**20
"""One byte of each so many is asked for, to tell whether all of them are there."""


def has_all(handle: int, start: int, stop: int) -> bool:
    """Whether bytes `start` to `stop` of a file can be read without the disk, as far as samples tell.

    Linux says so, of its own file systems; of others the answer is no.
    """
    places = [*range(start, stop, PROBED_BYTES), max(start, stop - 1)]
    return hasattr(os, "RWF_NOWAIT") and all(_has(handle, place) for place in places)


def _has(handle: int, place: int) -> bool:
    try:
        return os.preadv(handle, [bytearray(1)], place, os.RWF_NOWAIT) == 1
    except OSError:  # it is not there, or its file system does not say
        return False


def announce(handle: int, start: int, stop: int) -> None:
    """Bytes `start` to `stop` of a file will be read soon."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # from a file system that takes no advice
            os.posix_fadvise(handle, start, stop - start, os.POSIX_FADV_WILLNEED)
