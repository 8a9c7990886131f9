"""What the rest of the library asks of communication: verbs, memory to send from, and a life from start to end.

Most code needs the verbs alone, and says so by taking `Collectives`. Who lays out memory asks for `Buffers`. The world,
which makes and ends them, has a `Communicator`, which is all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from shardwise.comm.group import Group
from shardwise.comm.journal import Journal
from shardwise.comm.shared_buffers import Part, SharedBuffers
from shardwise.comm.work import Work
from shardwise.mesh import Mesh
from shardwise.telemetry import Ledger

Tensor = torch.Tensor
Lines = Callable[[], Iterable[Sequence[int]]]
"""Ranks of the world along every line of a kind; asked for where it matters."""


class Collectives(Protocol):
    """Collectives over the ranks of a group, and messages from one rank to another.

    Every rank of the group calls, in the same order. Each call returns at once; the tensors it was given
    belong to it until `wait` returns. All tensors are one-dimensional and contiguous, and their length is
    a multiple of the group's size, except for `broadcast`, `all_to_all` and messages. `subject` says what is sent, such
    as the name of a flat buffer: ranks that name different ones are told that they contradict each other. `chunks` are
    what a tensor is for each rank of the group, for callers who keep them: to cut takes as long as to send little.
    """

    ledger: Ledger
    journal: Journal

    def all_gather(self, full: Tensor, group: Group, subject: str, chunks: Sequence[Tensor] | None = None) -> Work:
        """Fill `full` in place: each rank has put its chunk, the `group.index`-th, where it belongs."""
        ...

    def reduce_scatter(
        self,
        out: Tensor,
        source: Tensor,
        group: Group,
        wire: torch.dtype,
        subject: str,
        chunks: Sequence[Tensor] | None = None,
    ) -> Work:
        """Sum the ranks' `source` and leave this rank's chunk of it in `out`, in `out`'s dtype.

        Elements travel as `wire` and are summed in `out`'s dtype, in the order of the group, where that is wider.
        `source`, of which `chunks` are, is given away: others may still read it when this rank's work is done.
        """
        ...

    def all_reduce(self, out: Tensor, source: Tensor, group: Group, wire: torch.dtype, subject: str) -> Work:
        """Sum the ranks' `source` into `out` (which may be `source`); bit for bit the same on all of them.

        Each rank's chunk is summed as by `reduce_scatter`; the sums travel as `wire` again, and are rounded to it.
        """
        ...

    def all_to_all(self, arrived: Sequence[Tensor], sent: Sequence[Tensor], group: Group, subject: str) -> Work:
        """Send `sent[i]` to the rank at place i of the group, and fill `arrived[i]` from it.

        Lengths may differ, and what has no elements does not travel; what this rank would send itself is left alone.
        """
        ...

    def broadcast(self, tensor: Tensor, root: int, group: Group, subject: str) -> Work:
        """Give all ranks of the group what the rank `root` (a rank of the world) has, in place."""
        ...

    def send(self, tensor: Tensor, link: Group, subject: str) -> Work:
        """Give the last rank of `link` (see `link_between`) this first one's `tensor`."""
        ...

    def receive(self, tensor: Tensor, link: Group, subject: str) -> Work:
        """Fill `tensor` with what the first rank of `link` sends. Messages of a link arrive in the order of sending."""
        ...

    def exchange(self, message: bytes, group: Group, subject: str) -> list[bytes]:
        """Everybody's message, by place in the group. Blocks. For small things: checks and agreements."""
        ...


class Buffers(Protocol):
    """Memory that collectives can send from without another copy, and memory that ranks have in common."""

    is_buffer_scarce: bool
    """Whether memory of `buffer` should go soon: what is to stay is better kept elsewhere."""
    is_host: bool
    """Whether tensors lie in the host's memory, where fresh pages are what costs, and whole buffers may stay."""

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of undefined content that can be sent from without another copy."""
        ...

    def reclaim(self, tensor: Tensor) -> None:
        """Blocks until no other rank reads `tensor`, a buffer that was given to a collective and waited for."""
        ...

    def rest(self, *, keeps_some: bool) -> None:
        """Between two steps: let go of the memory that was kept for the next `buffer`, or of most of it."""
        ...

    def shared_buffers(self, group: Group, parts: Sequence[Part], lines: Lines) -> SharedBuffers | None:
        """Memory that the ranks of the group read as one, each piece as long as the part says.

        `None` on all of them where they have none. All ranks of the group call, and those of all `lines` for their own:
        where one of these cannot share, none does, so that all ranks do the same.
        """
        ...


class Communicator(Collectives, Buffers, Protocol):
    """What moves tensors of one kind of memory, from the making of its groups to its end."""

    def prepare(self, mesh: Mesh) -> None:
        """Make what collectives over the axes of `mesh` need. All ranks of the world call."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Inside, all-gathers over one line may be launched as one, at the end or when the first is waited for."""
        ...

    def transport(self, group: Group) -> str:
        """By what the group's bytes travel, in words."""
        ...

    def cut(self) -> None:
        """End every wait of this rank, now and from now on. From any thread."""
        ...

    def close(self) -> None: ...
