"""Messages beside those of the training: large ones, of a thread that runs while this rank computes.

They take the connections that the training has, so a fault that ends its waits ends theirs. Tags of their own keep the
two apart. A connection carries one message after the other, so what is large has to be sent in portions, a few at a
time: the training never waits behind more than those.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from shardwise.comm.group import Group
from shardwise.comm.watch.journal import FIRST_SIDE_TAG, Awaited, Journal
from shardwise.comm.work import Work

if TYPE_CHECKING:
    from shardwise.comm.transport.pairwise import Transport

Tensor = torch.Tensor
_NUM_TAGS = 2**20
COPIES = "copies"
"""What waits for this are told apart by, as others are by the mesh axis."""


class SideChannel:
    """Of one rank, used by one thread. What that does raises `LinkError`, also once the world is cut off."""

    def __init__(self, transport: Transport, everybody: Group, journal: Journal) -> None:
        self.rank, self.size = everybody.index, len(everybody.ranks)
        self._everybody, self._journal = replace(everybody, axis=COPIES), journal
        self._transport = transport
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def send(self, tensor: Tensor, rank: int) -> Work:
        """The receiver expects messages from this rank in the order in which they are sent. `tensor` is contiguous."""
        return self._transport.send(tensor, rank, self._next(self._sent, rank))

    def receive(self, tensor: Tensor, rank: int) -> Work:
        return self._transport.receive(tensor, rank, self._next(self._received, rank))

    def barrier(self, number: int = 0) -> int:
        """Return once all ranks have called, with the largest of their numbers: in rounds, of which each doubles how
        many a rank has heard of (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988)."""
        distance = 1
        while distance < self.size:
            word, heard = torch.tensor([number], device="cpu"), torch.empty(1, dtype=torch.int64, device="cpu")
            arriving = self.receive(heard, (self.rank - distance) % self.size)
            leaving = self.send(word, (self.rank + distance) % self.size)
            arriving.wait()
            leaving.wait()
            number = max(number, int(heard))
            distance *= 2
        return number

    def await_together(self, work: Work, subject: str) -> None:
        """For the thread that computes: wait until the other one has done `work`.

        All ranks call, each for its own, as they do for a collective. So a rank that keeps the others waiting is found,
        and a fault raises here what it raises there.
        """
        entry = self._journal.enter("wait", self._everybody, 0, torch.uint8, subject)
        Awaited(self._journal, entry, work).wait()

    def _next(self, counts: Counter[int], rank: int) -> int:
        """The tag of the next message to or from `rank`."""
        counts[rank] += 1
        return FIRST_SIDE_TAG + counts[rank] % _NUM_TAGS
