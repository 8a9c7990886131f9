"""The communication interface of the library: verbs, memory to send from, and start and end of a communicator.

Most code needs only the verbs, and takes `Collectives`. Code that lays out memory takes `Buffers`. The world, which
creates and closes communicators, has a `Communicator`, which is all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from shardwise.comm.group import Group
from shardwise.comm.shared_buffers import Part, SharedBuffers
from shardwise.comm.watch.journal import Journal
from shardwise.comm.work import Work
from shardwise.plan.mesh import Mesh
from shardwise.system.telemetry import Ledger

Tensor = torch.Tensor
Lines = Callable[[], Iterable[Sequence[int]]]
"""The ranks of the world along every line of a kind; called only if needed."""


class Collectives(Protocol):
    """Collectives over the ranks of a group, and messages from one rank to another.

    Every rank of the group calls, in the same order. Each call returns at once; the tensors it was given must not be
    touched until `wait` returns. All tensors are one-dimensional and contiguous, and their length is a multiple of the
    group's size, except for `broadcast`, `all_to_all` and messages. `subject` says what is sent, such as the name of a
    flat buffer: ranks that pass different ones are reported as contradicting each other. `chunks` are the tensor cut
    into one view per rank, for callers that keep them: cutting takes as long as sending little. Every call raises
    `FaultError` after a fault, and `StateError` once the world is closed.
    """

    ledger: Ledger
    journal: Journal

    def all_gather(self, full: Tensor, group: Group, subject: str, chunks: Sequence[Tensor] | None = None) -> Work:
        """Fill `full` in place. Each rank has written its chunk, the `group.index`-th."""
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

        Elements are sent as `wire` and summed in `out`'s dtype, if that is wider, in the order of the group. `source`
        (and `chunks`, its views) is given away: other ranks may still read it when this rank's work is done.
        """
        ...

    def all_reduce(self, out: Tensor, source: Tensor, group: Group, wire: torch.dtype, subject: str) -> Work:
        """Sum the ranks' `source` into `out` (which may be `source`); bit for bit the same on all of them.

        Each rank's chunk is summed as in `reduce_scatter`; the sums are sent as `wire` again, and rounded to it.
        """
        ...

    def all_to_all(self, arrived: Sequence[Tensor], sent: Sequence[Tensor], group: Group, subject: str) -> Work:
        """Send `sent[i]` to the rank with index i in the group, and fill `arrived[i]` from it.

        Lengths may differ, and empty tensors are not sent; this rank's own entries are left alone.
        """
        ...

    def broadcast(self, tensor: Tensor, root: int, group: Group, subject: str) -> Work:
        """Overwrite `tensor` on all ranks of the group with that of `root` (a rank of the world)."""
        ...

    def send(self, tensor: Tensor, link: Group, subject: str) -> Work:
        """Send `tensor` from the first rank of `link` (see `link_between`), this one, to the last."""
        ...

    def receive(self, tensor: Tensor, link: Group, subject: str) -> Work:
        """Fill `tensor` with what the first rank of `link` sends. Messages of a link arrive in the order of sending."""
        ...

    def synchronize(self) -> None:
        """Before code outside of the library reads what has come: block until what has been waited for is there, and
        raise after a fault: kernels that an abort ends leave garbage, and their waits do not fail."""
        ...

    def exchange(self, message: bytes, group: Group, subject: str) -> list[bytes]:
        """Every rank's message, by place in the group. Blocks. For small things: checks and agreements."""
        ...

    def overlaps_compute(self, group: Group) -> bool:
        """Whether what is started over `group` proceeds while this rank computes; otherwise the rank does most of it
        itself, in `wait`. The same on all ranks of the group."""
        ...

    def reads_own_apart(self, group: Group) -> bool:
        """Whether `reduce_scatter` reads this rank's own summand from `chunks` alone, so that it may lie elsewhere than
        in `source`, even where the sum is to be."""
        ...


class Buffers(Protocol):
    """Memory that collectives can send from without another copy, and memory that ranks share."""

    is_buffer_scarce: bool
    """Whether memory from `buffer` should be freed soon: what is to stay is better kept elsewhere."""
    is_host: bool
    """Whether tensors are in the host's memory, where fresh pages are what costs, and whole buffers may stay."""

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of undefined content that can be sent from without another copy."""
        ...

    def reclaim(self, tensor: Tensor) -> None:
        """Block until no other rank reads `tensor`, a buffer that was given to a collective and waited for."""
        ...

    def rest(self, *, keeps_some: bool) -> None:
        """Between two steps: free the memory that was kept for the next `buffer`, or most of it."""
        ...

    def shared_buffers(self, group: Group, parts: Sequence[Part], lines: Lines) -> SharedBuffers | None:
        """Memory that the ranks of the group read as one, one piece per part.

        `None` on all of them if they share no memory. All ranks of the group call, and those of all `lines` for their
        own line: if one line cannot share, none does, so that all ranks do the same.
        """
        ...


class Communicator(Collectives, Buffers, Protocol):
    """Moves tensors of one kind of memory, from the creation of its groups to its end."""

    def prepare(self, mesh: Mesh) -> None:
        """Create what collectives over the axes of `mesh` need. All ranks of the world call."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Inside, all-gathers over one line may be launched as one, at the end or when the first is waited for."""
        ...

    def transport(self, group: Group) -> str:
        """The name of what carries the group's bytes."""
        ...

    def abort(self) -> None:
        """End every wait of this rank, now and from now on. May be called from any thread."""
        ...

    def close(self) -> None: ...
