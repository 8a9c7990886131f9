"""Identifying a process so that a later one with the same number is not mistaken for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil


@dataclass(frozen=True)
class Holder:
    host: str
    pid: int
    began: float

    @classmethod
    def me(cls) -> Holder:
        return cls(socket.gethostname(), os.getpid(), psutil.Process().create_time())

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Holder:
        """From its JSON fields. Raises `ValueError`, `TypeError` or `KeyError` if they are invalid."""
        return cls(str(fields["host"]), int(fields["pid"]), float(fields["began"]))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_same(self, other: Holder | None) -> bool:
        """Allows a small difference in start time: two observations of one process may differ when the clock is
        adjusted."""
        return (
            other is not None and (self.host, self.pid) == (other.host, other.pid) and abs(self.began - other.began) < 2
        )

    def is_gone(self) -> bool:
        """Whether this process has ended, as far as this process can see."""
        if self.host != socket.gethostname():
            return True
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:  # it has ended, and its parent has not waited
                return True
            return not self.is_same(Holder(self.host, self.pid, process.create_time()))
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False
