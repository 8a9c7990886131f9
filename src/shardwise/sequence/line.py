"""The ranks that share in one sequence, and what they send each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardwise.comm import Collectives, Group, Work

Tensor = torch.Tensor


class Line:
    """The ranks along the sequence axis of a mesh, this one among them. All of them call every method, in one order."""

    def __init__(self, collectives: Collectives, group: Group) -> None:
        self._collectives = collectives
        self._group = group

    @property
    def num_ranks(self) -> int:
        return len(self._group.ranks)

    @property
    def place(self) -> int:
        """This rank's, counted from 0."""
        return self._group.index

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the world, by place."""
        return self._group.ranks

    @property
    def axis(self) -> str:
        return self._group.axis

    def tell(self, message: bytes) -> list[bytes]:
        """Everybody's message, by place; blocks."""
        return self._collectives.exchange(message, self._group, "sequence")

    def deal(self, sent: Sequence[Tensor], like: Sequence[torch.Size]) -> list[Tensor]:
        """Send `sent[i]`, one-dimensional, to place i; what came from place i, with the elements of shape `like[i]`.

        Returns when all has come. This rank's own is handed back as it is.
        """
        arrived = [sent[place].new_empty(math.prod(shape)) for place, shape in enumerate(like)]
        arrived[self.place] = sent[self.place]
        self._collectives.all_to_all(arrived, sent, self._group, "attention").wait()
        return arrived

    def pass_on(self, sent: Tensor) -> Passing:
        """Send `sent`, one-dimensional, to the next rank, and receive as much from the one before, meanwhile."""
        nothing = sent.new_empty(0)
        outgoing, incoming = [nothing] * self.num_ranks, [nothing] * self.num_ranks
        arrived = torch.empty_like(sent)
        outgoing[(self.place + 1) % self.num_ranks] = sent
        incoming[(self.place - 1) % self.num_ranks] = arrived
        return Passing(self._collectives.all_to_all(incoming, outgoing, self._group, "attention"), sent, arrived)

    def total(self, value: Tensor) -> Tensor:
        """The sum of every rank's `value`, a whole number in a tensor without dimensions; the same on all of them."""
        padded = value.new_zeros(self.num_ranks)
        padded[0] = value
        self._collectives.all_reduce(padded, padded, self._group, padded.dtype, "sequence").wait()
        return padded[0]


class Passing:
    """Something on its way around the ring."""

    def __init__(self, work: Work, sent: Tensor, arrived: Tensor) -> None:
        self._work = work
        self._sent: Tensor | None = sent  # it may not go before it has left
        self._arrived = arrived

    def wait(self) -> Tensor:
        """What has come."""
        self._work.wait()
        self._sent = None
        return self._arrived
