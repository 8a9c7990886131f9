"""Messages between threads of one process: ranks for tests and for a first look, without a process group."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict

from shardwise.comm.collectives import Tensor
from shardwise.comm.work import Done, Work
from shardwise.errors import CommError


class PostOffice:
    """Where all threads of one world leave and find their messages."""

    def __init__(self, timeout_seconds: float = 60) -> None:
        self.timeout_seconds = timeout_seconds
        self.closed = threading.Event()
        self._boxes: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()

    def box(self, sender: int, receiver: int, tag: int) -> queue.SimpleQueue[Tensor]:
        with self._lock:
            return self._boxes[sender, receiver, tag]

    def collect(self, sender: int, receiver: int, tag: int) -> Tensor:
        """The message, once it is there. Raises `CommError` if its sender's world ended, or nothing came."""
        box = self.box(sender, receiver, tag)
        for _ in range(max(1, int(self.timeout_seconds / 0.05))):
            try:
                message = box.get(timeout=0.05)
            except queue.Empty:
                if self.closed.is_set():
                    break
                continue
            with self._lock:
                del self._boxes[sender, receiver, tag]
            return message
        raise CommError(f"Rank {receiver} waited for message {tag} from rank {sender}, and none came.")


class ThreadTransport:
    """One thread's end of a `PostOffice`. A message is copied when it is sent."""

    def __init__(self, office: PostOffice, rank: int) -> None:
        self._office = office
        self._rank = rank

    def send(self, tensor: Tensor, rank: int, tag: int) -> Work:
        self._office.box(self._rank, rank, tag).put(tensor.detach().clone())
        return Done()

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Work:
        return _Expected(self._office, tensor, rank, self._rank, tag)

    def close(self) -> None:
        """The office belongs to whoever made the threads."""


class _Expected:
    def __init__(self, office: PostOffice, tensor: Tensor, sender: int, receiver: int, tag: int) -> None:
        self._office = office
        self._tensor = tensor
        self._route = (sender, receiver, tag)

    def wait(self) -> None:
        self._tensor.detach().copy_(self._office.collect(*self._route))
