"""Messages between processes over TCP, by gloo."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import torch.distributed as dist

from shardwise.comm.collectives import Tensor
from shardwise.comm.sockets import Sockets
from shardwise.comm.work import LinkError, Work

_REASONS = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe")


class _TorchWork(Protocol):
    def wait(self) -> bool: ...


class _Message:
    """A torch message. It keeps its tensor alive, which gloo does not."""

    def __init__(self, work: _TorchWork, tensor: Tensor, rank: int) -> None:
        self._work = work
        self._tensor = tensor
        self._rank = rank

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _broken(self._rank, error) from error


class GlooTransport:
    """Point-to-point messages of a gloo process group, of any dtype.

    [Note: breaking a wait] gloo has no abort (torch 2.13: `abort()` returns and the wait goes on), a timeout given to
    one wait closes every connection, and a rank that does not communicate with a dead one notices nothing. Shutting
    down its sockets ends a blocked wait within milliseconds. The group is unusable afterwards.
    """

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup, sockets: Sockets) -> None:
        """`sockets` are those that the group has opened."""
        self._group = group
        self._sockets = sockets

    def send(self, tensor: Tensor, rank: int, tag: int) -> Work:
        try:
            return _Message(self._group.send([tensor], rank, tag), tensor, rank)
        except RuntimeError as error:
            raise _broken(rank, error) from error

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Work:
        try:
            return _Message(self._group.recv([tensor], rank, tag), tensor, rank)
        except RuntimeError as error:
            raise _broken(rank, error) from error

    def lost_ranks(self) -> Collection[int]:
        return self._sockets.lost_ranks()

    def closed_ranks(self) -> Collection[int]:
        return self._sockets.closed_ranks()

    def watch_peers(self, rank: int, exchange: Callable[[bytes], list[bytes]]) -> None:
        """Find out which connection leads to which rank. All ranks call; `exchange` returns every rank's message, by
        rank."""
        self._sockets.keep_mirrored(rank, exchange)

    def abort(self) -> None:
        self._sockets.shut_down()

    def close(self) -> None:
        """The process group belongs to the world."""


def _broken(rank: int, error: RuntimeError) -> LinkError:
    """Extracts the reason from gloo's message, which surrounds it with source file names and advice."""
    text = str(error)
    reason = next((words for words in _REASONS if words in text), text.partition("\n")[0])
    return LinkError(rank, f"The connection to rank {rank} broke: {reason}.")
