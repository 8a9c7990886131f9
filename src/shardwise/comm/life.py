"""Whether other processes of this host still live."""

from __future__ import annotations

import os
import select
from pathlib import Path


def host_identity() -> str:
    """Equal where one process can see the other: one boot of one system, one view of its processes, one user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped, by a signal or by somebody who traces it. False where the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in ("T", "t")


class Life:
    """That of a process, by a descriptor that becomes readable when it ends, however it ends."""

    def __init__(self, pid: int) -> None:
        """Where the system has no such descriptors, every process seems to live."""
        try:
            self._descriptor: int | None = os.pidfd_open(pid)
        except (AttributeError, OSError):
            self._descriptor = None

    def has_ended(self) -> bool:
        if self._descriptor is None:
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
