"""Messages between processes by MPI."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from shardwise.comm.transport.mpi.library import Session
from shardwise.comm.transport.mpi.progress_thread import Operation, Steps
from shardwise.comm.watch.liveness import Life, host_identity
from shardwise.comm.work import LinkError, Work

Tensor = torch.Tensor
MOST_BYTES = 2**30
"""Limit of one MPI message: counts have 31 bits before MPI 4."""
_NUM_TAGS = 2**24
"""With this many tags, two messages under way between two ranks are not confused."""


class MpiTransport:
    """Point-to-point messages of a communicator of our own, of any dtype.

    A message of more than `MOST_BYTES` is sent as several with one tag, which MPI keeps in order.
    """

    name = "MPI"

    def __init__(self, session: Session, comm: Any) -> None:
        """The transport takes over `comm`. All ranks call."""
        self._session = session
        self._progress = session.progress
        self._most_bytes = MOST_BYTES
        self._lives: dict[int, Life] = {}
        self._is_aborted = threading.Event()
        self._comms, self._num_tags = self._progress.call(lambda: _enough_tags(session, comm))

    def watch_peers(self, rank: int, exchange: Callable[[bytes], list[bytes]]) -> None:
        """Prepare to detect the end of processes on this host. All ranks call; `exchange` returns every rank's
        message."""
        self._session.tells_others = True
        mine = json.dumps([host_identity(), os.getpid()]).encode()
        for other, message in enumerate(exchange(mine)):
            host, pid = json.loads(message)
            if other != rank and host == host_identity():
                self._lives[other] = Life(pid)

    def send(self, tensor: Tensor, rank: int, tag: int) -> Work:
        comm, number = self._route(tag)
        return self._begun(comm.Isend, tensor, rank, number)

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Work:
        comm, number = self._route(tag)
        return self._begun(comm.Irecv, tensor, rank, number)

    def lost_ranks(self) -> Collection[int]:
        return tuple(rank for rank, life in self._lives.items() if life.has_ended())

    def closed_ranks(self) -> Collection[int]:
        return self.lost_ranks()

    def end_lost_waits(self) -> None:
        """Waits look at `abort` themselves."""

    def abort(self) -> None:
        self._is_aborted.set()
        self._session.break_off()

    def close(self) -> None:
        """The communicator is kept: freeing it would be collective."""
        for life in self._lives.values():
            life.close()
        self._lives = {}

    def _route(self, tag: int) -> tuple[Any, int]:
        number = tag % (self._num_tags * len(self._comms))
        return self._comms[number // self._num_tags], number % self._num_tags

    def _begun(self, call: Any, tensor: Tensor, rank: int, tag: int) -> Work:
        pieces = pieces_of(tensor, self._most_bytes)

        def steps() -> Steps:
            yield [call(memory_of(piece), rank, tag) for piece in pieces]

        return _Message(self, self._progress.start(steps(), is_message=True), rank)

    def look(self, rank: int) -> None:
        """Raise `LinkError` if nothing more will come from a rank."""
        if self._is_aborted.is_set():
            raise LinkError(rank, f"Nothing came from rank {rank}.")
        life = self._lives.get(rank)
        if life is not None and life.has_ended():
            raise LinkError(rank, f"The process of rank {rank} has ended.")

    def wait(self, operation: Operation, rank: int) -> None:
        try:
            self._progress.wait(operation, lambda: self.look(rank))
        except RuntimeError as error:  # MPI's exception is one
            reason = str(error).partition("\n")[0]
            raise LinkError(rank, f"The message to or from rank {rank} failed: {reason}.") from error


class _Message:
    __slots__ = ("_operation", "_rank", "_transport")

    def __init__(self, transport: MpiTransport, operation: Operation, rank: int) -> None:
        self._transport = transport
        self._operation = operation
        self._rank = rank

    def wait(self) -> None:
        self._transport.wait(self._operation, self._rank)


def pieces_of(tensor: Tensor, most_bytes: int) -> Sequence[Tensor]:
    """A contiguous tensor as bytes, cut where a message would be too long."""
    flat = tensor.detach().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
    return (flat,) if flat.numel() <= most_bytes else torch.split(flat, most_bytes)


def memory_of(piece: Tensor) -> Any:
    """The bytes of a contiguous CPU tensor, in place, as mpi4py takes them."""
    from mpi4py import MPI

    return MPI.memory.fromaddress(piece.data_ptr(), piece.nbytes)


def _enough_tags(session: Session, comm: Any) -> tuple[list[Any], int]:
    """Communicators that together have enough tags, and the number of tags of each."""
    more = max(0, min(64, _NUM_TAGS // session.num_tags) - 1)
    return [comm, *(comm.Dup() for _ in range(more))], session.num_tags
