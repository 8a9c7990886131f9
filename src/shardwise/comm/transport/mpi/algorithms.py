"""Torch's collectives built from MPI messages. Each is a generator of steps: what it yields has to complete first.

Sums are our own, each rank summing its part in the order of ranks. They work in every dtype (MPI has no bfloat16), give
the same bits on all ranks, and for large tensors take less time than MPI's non-blocking ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm.transport.mpi.progress_thread import Requests, Steps
from shardwise.comm.transport.mpi.transport import MOST_BYTES, memory_of, pieces_of
from shardwise.errors import CommError

Tensor = torch.Tensor
_NARROW = (torch.bfloat16, torch.float16)
_ROUNDED = ("SUM", "AVG", "PRODUCT")
_KNOWN = (*_ROUNDED, "MIN", "MAX", "BAND", "BOR", "BXOR")
Parts = Sequence[Tensor | None]
"""One per rank; `None` for a rank to or from which nothing is sent."""


class Line:
    """The ranks of one group, by the group's own numbers, and its communicator."""

    def __init__(self, comm: Any, rank: int, size: int, most_bytes: int = MOST_BYTES) -> None:
        self.comm = comm
        self.rank = rank
        self.size = size
        self.others = [(rank + step) % size for step in range(1, size)]
        self._most_bytes = most_bytes

    def send(self, requests: Requests, tensor: Tensor, rank: int, tag: int) -> None:
        for piece in pieces_of(tensor, self._most_bytes):
            requests.append(self.comm.Isend(memory_of(piece), rank, tag))

    def receive(self, requests: Requests, tensor: Tensor, rank: int, tag: int) -> None:
        for piece in pieces_of(tensor, self._most_bytes):
            requests.expected[len(requests)] = piece.nbytes
            requests.append(self.comm.Irecv(memory_of(piece), rank, tag))

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        dense = _dense(tensor)
        for piece in pieces_of(dense, self._most_bytes):
            yield [self.comm.Ibcast(memory_of(piece), root)]
        land(dense, tensor)

    def barrier(self) -> Steps:
        yield [self.comm.Ibarrier()]

    def swap(self, arrived: Parts, sent: Parts, tag: int) -> Steps:
        """Send `sent[i]` to rank i and receive `arrived[i]` from it; `None` where nothing is sent. This rank's own part
        is copied."""
        outgoing = [one if one is None else _dense(one) for one in sent]
        incoming = [one if one is None else room_for(one) for one in arrived]
        requests = Requests()
        for rank in self.others:
            room = incoming[rank]
            if room is not None:
                self.receive(requests, room, rank, tag)
        for rank in self.others:
            given = outgoing[rank]
            if given is not None:
                self.send(requests, given, rank, tag)
        if requests:
            yield requests
        own, mine = incoming[self.rank], outgoing[self.rank]
        if own is not None and mine is not None:
            own.view(-1).copy_(mine.view(-1))
        for one, room in zip(arrived, incoming, strict=True):
            if one is not None and room is not None:
                land(room, one)

    def reduce_scatter(self, out: Tensor, parts: Sequence[Tensor], op: str, tag: int) -> Steps:
        """This rank's part of the ranks' `parts`, combined. The parts of different ranks may differ in length."""
        own = _dense(parts[self.rank])
        terms = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        yield from self.swap(
            [None if rank == self.rank else term for rank, term in enumerate(terms)],
            [None if rank == self.rank else part for rank, part in enumerate(parts)],
            tag,
        )
        out.detach().copy_(combined(terms, op).view(out.shape))

    def all_reduce(self, tensor: Tensor, op: str, tag: int, root: int | None = None) -> Steps:
        """Result on all ranks, or only on `root`. Uses two tags."""
        flat = _dense(tensor).view(-1)
        parts = flat.tensor_split(self.size)
        total = torch.empty_like(parts[self.rank])
        yield from self.reduce_scatter(total, parts, op, tag)
        takes = root in (None, self.rank)
        yield from self.swap(
            [part if takes and rank != self.rank else None for rank, part in enumerate(parts)],
            [total if root in (None, rank) and rank != self.rank else None for rank in range(self.size)],
            tag + 1,
        )
        if takes:
            parts[self.rank].copy_(total)
            land(flat, tensor)


def combined(terms: Sequence[Tensor], op: str) -> Tensor:
    """All terms combined by one operation, in order; narrow floating-point numbers in fp32, rounded once."""
    first = terms[0]
    total = first.float() if first.dtype in _NARROW and op in _ROUNDED else first.clone()
    for term in terms[1:]:
        match op:
            case "SUM" | "AVG":
                total.add_(term)
            case "PRODUCT":
                total.mul_(term)
            case "MIN":
                total = torch.minimum(total, term)
            case "MAX":
                total = torch.maximum(total, term)
            case "BAND":
                total.bitwise_and_(term)
            case "BOR":
                total.bitwise_or_(term)
            case _:
                total.bitwise_xor_(term)
    if op == "AVG":
        is_whole = not (total.is_floating_point() or total.is_complex())
        total.div_(len(terms), rounding_mode="trunc" if is_whole else None)
    return total


def name_of(op: Any) -> str:
    """For example `"SUM"`. Raises `CommError` for an unsupported operation."""
    kind = getattr(op, "op", op)
    name = str(kind).rpartition(".")[2]
    if name not in _KNOWN:
        raise CommError(f"The mpi4py backend knows no reduction {name}. Known: {', '.join(_KNOWN)}.")
    return name


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous()


def room_for(tensor: Tensor) -> Tensor:
    """The tensor's own memory, if it is contiguous; else new memory."""
    own = tensor.detach()
    return own if own.is_contiguous() else torch.empty_like(own, memory_format=torch.contiguous_format)


def land(dense: Tensor, tensor: Tensor) -> None:
    """Copy `dense` to `tensor`, if it is separate memory."""
    if dense.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.detach().copy_(dense.view(tensor.shape))
