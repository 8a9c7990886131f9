"""The data-parallel group of a rank: the ranks that train the same part of the model on other data. Also groups along
other axes.

Whatever concerns all ranks with the same part of the model goes through it, never through "all ranks": initial values,
buffers, the order of a backward, which rank writes buffers, the divisor of a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from shardwise.comm.group import Group
from shardwise.comm.line import Line
from shardwise.comm.world import World
from shardwise.plan.mesh import Mesh
from shardwise.system.torch_private import FakeTensor


class ExchangeOn(Protocol):
    """An `Exchange` that says what it is about."""

    def __call__(self, message: bytes, subject: str = "message") -> list[bytes]: ...


class DataGroup:
    """The ranks along the replica axes of a mesh: without model axes, all of the world. With `axes`, those along these
    instead."""

    def __init__(self, world: World, mesh: Mesh, axes: Sequence[str] | None = None) -> None:
        along = mesh.replica_axes if axes is None else tuple(axes)
        ranks = mesh.among(world.rank, along)
        self._world = world
        self.group = world.everybody
        self.exchange: ExchangeOn = world.exchange
        """Every rank's message, by place in the group. All ranks of the group call, with the same `subject`; blocks."""
        self._axes = tuple(world.group(mesh, axis) for axis in along if mesh.size(axis) > 1)
        self._lines: tuple[Group, ...] = (self.group,)
        if len(ranks) < world.size:
            self._lines = self._axes
            self.group = Group("+".join(along), ranks, ranks.index(world.rank))
            self.exchange = partial(_exchange, world, self.group)

    @property
    def size(self) -> int:
        return len(self.group.ranks)

    @property
    def index(self) -> int:
        """This rank's position in the group, counted from 0. The first rank does what one does for all."""
        return self.group.index

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def rank_at(self, index: int) -> int:
        """The rank of the world with that index."""
        return self.group.ranks[index]

    def broadcast(self, tensor: torch.Tensor, subject: str) -> None:
        """Overwrite `tensor`, one-dimensional and contiguous, on all ranks of the group with the first one's;
        blocks."""
        collectives = self._world.collectives(tensor.device)
        for group in self._lines:  # one axis after the other, because communicators exist per axis
            collectives.broadcast(tensor, group.ranks[0], group, subject).wait()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `tensor`, in its dtype. All ranks of the group call; on a device the host does not
        wait. In a rehearsal, in which tensors have no values, nothing is sent: what came of it lay in the buffers of
        later messages."""
        if isinstance(tensor, FakeTensor):
            return tensor.clone()
        collectives = self._world.collectives(tensor.device)
        for group in self._axes:
            tensor = Line(collectives, group).sum(tensor)
        return tensor


def _exchange(world: World, group: Group, message: bytes, subject: str = "message") -> list[bytes]:
    return world.collectives(torch.device("cpu")).exchange(message, group, subject)
