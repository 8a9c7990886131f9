"""The other end of a launcher's connection to a host: what the agent there would do is up to the test."""

from __future__ import annotations

import io
import json
import queue
from typing import Any

from shardwise.launch.hosts.host_messages import packed


class FarEnd:
    """A `Carrier` that keeps what the launcher sends, and brings what the host says."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.is_cut = False
        self.stdin, self.stdout, self.stderr = self, self, io.BytesIO()
        self._lines: queue.Queue[bytes] = queue.Queue()

    def say(self, **message: Any) -> None:
        self._lines.put(packed(message))

    def answer(self, order: dict[str, Any]) -> None:
        """To what the launcher has sent: here nothing."""

    def orders(self, *kinds: str) -> list[dict[str, Any]]:
        return [order for order in self.sent if order["do"] in kinds]

    def write(self, block: bytes) -> None:
        order = json.loads(block[1:])
        self.sent.append(order)
        self.answer(order)

    def readline(self, limit: int) -> bytes:
        return self._lines.get()

    def flush(self) -> None: ...
    def close(self) -> None: ...
    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int:
        self._lines.put(b"")
        return 0

    def kill(self) -> None:
        self.is_cut = True
        self._lines.put(b"")
