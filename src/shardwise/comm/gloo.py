"""Messages between processes over TCP, by gloo."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from shardwise.comm.collectives import Tensor
from shardwise.comm.work import Work
from shardwise.errors import CommError


class _TorchWork(Protocol):
    def wait(self) -> bool: ...


class _Message:
    """A torch message. It keeps its tensor alive, which gloo does not."""

    def __init__(self, work: _TorchWork, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self) -> None:
        self._work.wait()


class GlooTransport:
    """Point-to-point messages of a gloo process group. Any dtype travels."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, tensor: Tensor, rank: int, tag: int) -> Work:
        try:
            return _Message(self._group.send([tensor], rank, tag), tensor)
        except RuntimeError as error:
            raise CommError(f"Rank {rank} cannot be reached: {error}") from error

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Work:
        try:
            return _Message(self._group.recv([tensor], rank, tag), tensor)
        except RuntimeError as error:
            raise CommError(f"Rank {rank} cannot be reached: {error}") from error

    def close(self) -> None:
        """The process group belongs to the world."""
