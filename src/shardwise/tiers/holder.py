"""A process, named so that another one with the same number is not taken for it."""

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
    def read(cls, said: Mapping[str, Any]) -> Holder:
        """From its fields in JSON. Raises `ValueError`, `TypeError` or `KeyError` if they are none."""
        return cls(str(said["host"]), int(said["pid"]), float(said["began"]))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_same(self, other: Holder | None) -> bool:
        """Two looks at one process may differ a little in when it began: clocks are set."""
        return (
            other is not None and (self.host, self.pid) == (other.host, other.pid) and abs(self.began - other.began) < 2
        )

    def is_gone(self) -> bool:
        """Whether this process has ended, as far as can be seen from here."""
        if self.host != socket.gethostname():
            return True
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:  # it has ended, and nobody has asked how
                return True
            return not self.is_same(Holder(self.host, self.pid, process.create_time()))
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False
