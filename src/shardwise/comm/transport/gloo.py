"""Messages between processes over TCP, by gloo."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist

from shardwise.comm.collectives import Tensor
from shardwise.comm.transport import gloo_abort
from shardwise.comm.watch.sockets import Sockets
from shardwise.comm.work import LinkError, Work

_CLOSED = "Connection closed by peer"
_REASONS = (_CLOSED, "Connection reset by peer", "Timed out waiting", "Broken pipe")
_FORGOTTEN_SECONDS = 0.2
"""A message that has arrived ends its wait sooner."""
_CLOSING_SECONDS = 1.0
"""gloo's own thread closes a connection that was shut down within milliseconds."""


class _TorchWork(Protocol):
    def wait(self) -> bool: ...


class _Message:
    """A torch message. It keeps its tensor alive, which gloo does not."""

    def __init__(self, work: _TorchWork, tensor: Tensor, rank: int, waits: _Waits) -> None:
        self._work = work
        self._tensor = tensor
        self._rank = rank
        self._waits = waits

    def wait(self) -> None:
        try:
            has_arrived = self._waits.wait(self._work, self._rank)
        except RuntimeError as error:
            raise _broken(self._rank, _reason_in(error)) from error
        if not has_arrived:
            raise _broken(self._rank, _CLOSED)


@dataclass
class _Waits:
    """The waits of this rank in gloo. See [Note: waits that gloo forgets]."""

    is_over: bool = False
    """Whether waits end at once from now on."""
    _begun: dict[int, tuple[_TorchWork, int, float]] = field(default_factory=dict)
    """By the work's id: the work, the rank it is waited for, and since when."""

    def wait(self, work: _TorchWork, rank: int) -> bool:
        """Whether the message has arrived, or was sent; false if the wait was ended."""
        self._begun[id(work)] = work, rank, time.monotonic()  # first: whoever sets `is_over` looks here afterwards
        try:
            return not self.is_over and work.wait()
        finally:
            del self._begun[id(work)]

    def ranks(self, seconds: float = 0.0) -> set[int]:
        """Ranks that have been waited for longer than `seconds`."""
        before = time.monotonic() - seconds
        return {rank for _, rank, since in list(self._begun.values()) if since <= before}

    def end(self, ranks: Collection[int]) -> None:
        """End the waits for `ranks`."""
        for work, rank, _ in list(self._begun.values()):
            if rank in ranks:
                gloo_abort.end_wait(work)


class GlooTransport:
    """Point-to-point messages of a gloo process group, of any dtype.

    [Note: breaking a wait] gloo has no abort (torch 2.13: `abort()` returns and the wait goes on), a timeout given to
    one wait closes every connection, and a rank that does not communicate with a dead one notices nothing. Shutting
    down its sockets ends most blocked waits within milliseconds. The group is unusable afterwards.

    [Note: waits that gloo forgets] When a connection ends, gloo (torch 2.13) wakes whoever waits for a message that has
    not begun to travel. The wait for one that has begun, in either direction, goes on until gloo's own timeout. Such
    waits are ended here, as soon as gloo has closed the connection: then it no longer writes into the tensor.
    """

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup, sockets: Sockets) -> None:
        """`sockets` are those that the group has opened."""
        self._group = group
        self._sockets = sockets
        self._waits = _Waits()

    def send(self, tensor: Tensor, rank: int, tag: int) -> Work:
        try:
            return _Message(self._group.send([tensor], rank, tag), tensor, rank, self._waits)
        except RuntimeError as error:
            raise _broken(rank, _reason_in(error)) from error

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Work:
        try:
            return _Message(self._group.recv([tensor], rank, tag), tensor, rank, self._waits)
        except RuntimeError as error:
            raise _broken(rank, _reason_in(error)) from error

    def lost_ranks(self) -> Collection[int]:
        return self._sockets.lost_ranks()

    def closed_ranks(self) -> Collection[int]:
        return self._sockets.closed_ranks()

    def watch_peers(self, rank: int, exchange: Callable[[bytes], list[bytes]]) -> None:
        """Find out which connection leads to which rank. All ranks call; `exchange` returns every rank's message, by
        rank."""
        self._sockets.keep_mirrored(rank, exchange)

    def end_lost_waits(self) -> None:
        if ranks := self._waits.ranks(_FORGOTTEN_SECONDS):
            self._waits.end(ranks & self._sockets.ranks_closed_here())

    def abort(self) -> None:
        self._waits.is_over = True
        self._sockets.shut_down()
        deadline = time.monotonic() + _CLOSING_SECONDS
        while (ranks := self._waits.ranks()) and time.monotonic() < deadline:
            self._waits.end(ranks & self._sockets.ranks_closed_here())
            time.sleep(0.001)
        self._waits.end(ranks)

    def close(self) -> None:
        """The process group belongs to the world."""


def _broken(rank: int, reason: str) -> LinkError:
    return LinkError(rank, f"The connection to rank {rank} broke: {reason}.")


def _reason_in(error: RuntimeError) -> str:
    """The reason in gloo's message, which surrounds it with source file names and advice."""
    text = str(error)
    return next((words for words in _REASONS if words in text), text.partition("\n")[0])
