"""Error messages about files: which file, which bytes, and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from shardwise.errors import TierError
from shardwise.system.units import format_bytes

_CURES = {
    errno.ENOSPC: "Make room on that disk, or name another folder.",
    errno.EDQUOT: "Your quota there is used up: make room, or name another folder.",
    errno.EIO: "The device reports a fault: see the kernel's log (dmesg), and name a folder on another disk.",
    errno.EROFS: "The file system is mounted read-only: the kernel does so after a fault (dmesg). Name another folder.",
    errno.EACCES: "Name a folder in which you may write.",
    errno.EEXIST: "It is a file: name a folder.",
    errno.ENOTDIR: "Part of that path is a file: name a folder.",
    errno.ENOENT: "Make the folder, or name another one.",
}
OTHERWISE = "Name a folder on another disk."


def io_fault(verb: str, path: Path, start: int, stop: int, error: OSError | EOFError) -> TierError:
    """`verb` is `reading`, `writing` or `copying`; `start` and `stop` are the bytes of `path` that were requested."""
    what = f"{verb.capitalize()} {format_bytes(stop - start)} at byte {start} of {path} failed"
    if isinstance(error, EOFError):
        return TierError(f"{what}: {error}. It was truncated, or the disk has lost a part of it. {OTHERWISE}")
    return TierError(f"{what}: {describe_error(error)}. {_CURES.get(error.errno or 0, OTHERWISE)}")


def folder_fault(what: str, error: OSError) -> TierError:
    return TierError(f"{what}: {describe_error(error)}. {_CURES.get(error.errno or 0, OTHERWISE)}")


def describe_error(error: OSError) -> str:
    """`No space left on device (ENOSPC)`."""
    if error.errno is None:
        return str(error)
    return f"{os.strerror(error.errno)} ({errno.errorcode.get(error.errno, error.errno)})"
