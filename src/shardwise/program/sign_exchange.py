"""How an update averages what it makes of gradients over the ranks, one bit per element: its messages and their bytes.

[Note: signs of momenta] 1-bit Adam (arXiv:2102.02888) sums no gradients once the variance is frozen: each rank moves
the momentum by its own, and the ranks' momenta are averaged. Of each parameter a rank sends signs and one scale, the
root of the mean square; what that leaves out stays with the rank, and is added to what it sends next time. Each
parameter is cut into one range per rank. A rank gets the signs of its range from all ranks, averages them in the order
of the ranks, compresses the average in the same way, with a residual of its own, and sends it to all. So every rank has
the same average, to the bit.

Ranges end at whole bytes of signs, so the last may be short or empty. What fills its message up is in no scale. A
parameter's ranges and scales do not depend on its unit or flat buffer, and so neither does a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.plan.placement import WIDTH, Span
from shardwise.program.spec import FlatSpec

BITS = 8
"""Signs in one byte."""


@dataclass(frozen=True)
class SignExchange:
    """The exchange of one flat buffer, among all ranks that have copies of it."""

    flat: FlatSpec

    @cached_property
    def num_ranks(self) -> int:
        return math.prod(map(self.flat.mesh.size, self.flat.table.axes))

    @property
    def axis(self) -> str:
        """The mesh axes over which it goes, as one name."""
        return "+".join(self.flat.table.axes)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each parameter that is averaged."""
        return tuple(placed.span.numel for placed in self.flat.updates if placed.update.sends_signs)

    def range_numel(self, numel: int) -> int:
        """Signs of a parameter of `numel` elements in each message, whatever part of them counts."""
        return BITS * math.ceil(numel / (BITS * self.num_ranks))

    def range_of(self, numel: int, place: int) -> Span:
        """The elements that the rank at `place` averages."""
        width = self.range_numel(numel)
        return Span(min(place * width, numel), min((place + 1) * width, numel))

    @property
    def scale_bytes(self) -> int:
        return WIDTH[self.flat.table.optim.dtype]

    @cached_property
    def message_bytes(self) -> int:
        """From one rank to another: of each parameter, the signs of a range, and a scale."""
        return sum(self.range_numel(numel) // BITS + self.scale_bytes for numel in self.numels)

    @property
    def buffer_bytes(self) -> int:
        """The messages to all ranks, or from all."""
        return self.num_ranks * self.message_bytes

    @property
    def sent_bytes(self) -> int:
        """What a rank sends to collect signs, and again to hand back averages."""
        return (self.num_ranks - 1) * self.message_bytes

    @property
    def residual_bytes(self) -> int:
        """What a rank keeps of what it did not send: of whole parameters, and of the averages of its ranges."""
        kept = sum(numel + self.range_numel(numel) for numel in self.numels)
        return kept * WIDTH[self.flat.table.optim.dtype]


def keeps_residuals(flat: FlatSpec) -> bool:
    """Whether its update sends signs, from the first step on or later."""
    sends = any(placed.update.sends_signs for placed in flat.updates)
    return sends and flat.trainable and any(flat.mesh.size(axis) > 1 for axis in flat.table.axes)


def sign_exchanges(flats: Sequence[FlatSpec]) -> dict[str, SignExchange]:
    """The exchanges of a step, by the name of the flat buffer."""
    return {flat.name: SignExchange(flat) for flat in flats if flat.table.summands and keeps_residuals(flat)}


def residual_bytes(flat: FlatSpec) -> int:
    """What a rank keeps of what it did not send, from the first step on, so that a job that fits goes on fitting."""
    return SignExchange(flat).residual_bytes if keeps_residuals(flat) else 0
