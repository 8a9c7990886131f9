"""Whether other processes of this host are alive."""

from __future__ import annotations

import os
import select
from pathlib import Path


def host_identity() -> str:
    """Equal for processes that can see each other: same boot of the system, same process namespace, same user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"


class Life:
    """Watches a process by a descriptor that becomes readable when it ends, however it ends."""

    def __init__(self, pid: int) -> None:
        """Where the system has no such descriptors, every process counts as alive."""
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
