"""Error feedback: what codes of gradients have lost, and of which elements a rank keeps it.

[Note: kept losses] A rank keeps what its own codes have lost, so as many elements as it encodes for one collective:
where gradients are summed within each host before they become codes, a host's share of them; elsewhere all. Ranks that
have encoded the same sums keep the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.plan.placement import LOSS_DTYPE, Axes
from shardwise.program.build import reduce_due, step_gradients
from shardwise.program.spec import FlatSpec


@dataclass(frozen=True)
class KeptLosses:
    """What codes of one flat buffer's gradients along `axis` have lost.

    Before they are sent, gradients are sharded over `shard`, and summands over the axes `partial`.
    """

    flat: FlatSpec
    axis: str
    shard: Axes
    partial: Axes

    @property
    def numel(self) -> int:
        """Elements on one rank."""
        return self.flat.num_elements(self.shard)

    @property
    def num_places(self) -> int:
        """How many ranks have different summands of an element, and so have lost something else."""
        return math.prod(map(self.flat.mesh.size, self.partial))

    def place(self, coordinate: Mapping[str, int]) -> int:
        """Which of them the rank at `coordinate` is."""
        place = 0
        for axis in self.partial:
            place = place * self.flat.mesh.size(axis) + coordinate[axis]
        return place

    def is_first(self, coordinate: Mapping[str, int]) -> bool:
        """Whether the rank at `coordinate` is the first of those that keep the same."""
        return not any(
            coordinate[axis] for axis in self.flat.table.axes if axis not in self.shard and axis not in self.partial
        )


def kept_losses(flat: FlatSpec) -> tuple[KeptLosses, ...]:
    """What is kept of one flat buffer, in the order in which its gradients are reduced."""
    codes = flat.table.grad_codes
    if not flat.trainable or codes is None or codes.feedback is None:
        return ()
    kept: list[KeptLosses] = []
    shard: Axes = ()
    partial = flat.table.axes
    for action in (*reduce_due(flat), *step_gradients(flat)):
        if action.codes:
            kept.append(KeptLosses(flat, action.over, shard, partial))
        if action.verb in ("reduce_scatter", "slice"):
            shard = (*shard, action.over)
        partial = tuple(axis for axis in partial if axis != action.over)
    return tuple(kept)


def losses_bytes(flat: FlatSpec) -> int:
    """Bytes on one rank, on the device."""
    return sum(flat.num_bytes(one.shard, LOSS_DTYPE) for one in kept_losses(flat))
