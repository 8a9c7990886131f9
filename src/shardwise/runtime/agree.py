"""What the ranks that share a flat buffer tell each other besides its program. All of them call; everything blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from shardwise.comm import Collectives, Group, sum_small
from shardwise.placement import Axes
from shardwise.storage import Flat

Tensor = torch.Tensor


class Agreement:
    """Over all axes of a flat buffer's table, one after the other."""

    def __init__(self, collectives: Collectives, groups: Mapping[str, Group]) -> None:
        self._collectives = collectives
        self._groups = groups
        self._coordinate = {axis: group.index for axis, group in groups.items()}

    def any_rank(self, flat: Flat, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        for axis in flat.spec.table.axes:
            flag = b"1" in self._collectives.exchange(b"1" if flag else b"0", self._groups[axis], flat.name)
        return flag

    def merged(self, flat: Flat, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The `facts`, anything JSON can hold, of all ranks in one dict; the first one's stay."""
        known = dict(facts)
        for axis in flat.spec.table.axes:
            said = self._collectives.exchange(json.dumps(known).encode(), self._groups[axis], flat.name)
            known = {key: value for message in reversed(said) for key, value in json.loads(message).items()}
        return known

    def mean(self, flat: Flat, values: Tensor) -> Tensor:
        """The mean of every rank's `values`, one-dimensional and of one length and dtype."""
        for axis in flat.spec.table.axes:
            values = sum_small(values, self._collectives, self._groups[axis], flat.name) / len(self._groups[axis].ranks)
        return values

    def broadcast(self, flat: Flat, values: Tensor) -> None:
        """Give all ranks the first one's `values`, one-dimensional and contiguous, in place."""
        for axis in flat.spec.table.axes if values.numel() else ():
            group = self._groups[axis]
            self._collectives.broadcast(values, group.ranks[0], group, flat.name).wait()

    def gather(self, flat: Flat, whole: Tensor, shard: Axes) -> None:
        """Make `whole`, as long as `flat`, of which each rank has filled what `shard` gives it, the same on all."""
        for axis in reversed(flat.spec.table.order):
            if axis in shard:
                shard = tuple(other for other in shard if other != axis)
                span = flat.spec.layout.span(shard, self._coordinate)
                self._collectives.all_gather(whole[span.start : span.stop], self._groups[axis], flat.name).wait()
