"""Averages over ranks of which one bit per element is sent, with what it leaves out: see [Note: signs of momenta] in
`program/sign_exchange.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shardwise.comm import Collectives, Group, Work
from shardwise.memory import Flat
from shardwise.plan.placement import Span
from shardwise.program import BITS, SignExchange

Tensor = torch.Tensor


@dataclass
class Residual:
    """What this rank has not sent of one parameter: of its own values, and of the averages of its range.

    Of use only to the rank at the same `place` among as many ranks. `name` is the parameter's.
    """

    name: str
    place: int
    num_ranks: int
    own: Tensor
    """Flat, of the whole parameter."""
    average: Tensor
    """Flat, of this rank's range."""
    span: Span
    """That range."""

    @classmethod
    def zeros(cls, name: str, exchange: SignExchange, place: int, like: Tensor) -> Residual:
        """For a whole parameter `like`."""
        span = exchange.range_of(like.numel(), place)
        room = like.new_zeros(exchange.range_numel(like.numel()))  # as much on every rank, whatever its range
        return cls(name, place, exchange.num_ranks, like.new_zeros(like.numel()), room[: span.numel], span)

    def fits(self, other: Residual) -> bool:
        """Whether it can take the place of `other`."""
        return (self.place, self.num_ranks, self.own.shape, self.own.dtype) == (
            other.place,
            other.num_ranks,
            other.own.shape,
            other.own.dtype,
        )

    @property
    def num_bytes(self) -> int:
        return self.own.nbytes + self.average.untyped_storage().nbytes()


class SignMean:
    """The averages of one flat buffer in one step.

    `values` are flat, by the index of their parameter, and are replaced by their average over `group`; `residuals` are
    theirs. All ranks have the same parameters, and call the methods in order.
    """

    def __init__(
        self,
        exchange: SignExchange,
        flat: Flat,
        values: Mapping[int, Tensor],
        residuals: Mapping[int, Residual],
        group: Group,
        collectives: Collectives,
    ) -> None:
        self._exchange = exchange
        self._flat = flat
        self._values = dict(sorted(values.items()))
        self._residuals = residuals
        self._group = group
        self._collectives = collectives
        self._messages = self._arrived = self._average = torch.empty(0, device="cpu")
        """One row per rank: to each, or about each one's range; and from each. The average is of this rank's range."""
        self._work: Work | None = None
        self.is_done = False

    def collect(self) -> None:
        """Send to each rank the signs of its range."""
        self._messages = self._rows()
        scales, signs = self._columns(self._messages)
        for index, value in self._values.items():
            compress(self._residuals[index].own.add_(value), scales[index], signs[index])
        self._arrived = self._rows()
        self._send(list(self._messages))

    def hand_back(self) -> None:
        """Send to all ranks the average of this rank's range."""
        signs, self._messages = self._messages, self._rows()
        self._drop(signs)
        self._messages[self._group.index].copy_(self._average)
        self._arrived = self._messages
        self._send([self._messages[self._group.index]] * len(self._group.ranks))

    def wait(self, what: str) -> None:
        """For `signs`, which are averaged then, or for averages."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if what == "signs":
            self._arrived[self._group.index].copy_(self._messages[self._group.index])
            self._average = self._averaged()
            self._drop(self._arrived)
        else:
            self._take_averages()
            self._drop(self._messages)
            self.is_done = True

    def _averaged(self) -> Tensor:
        """This rank's message to all: the signs and the scale of the average of its range, in the order of the
        ranks."""
        message = torch.zeros_like(self._messages[0])
        scales, signs = self._columns(message.view(1, -1))
        from_scales, from_signs = self._columns(self._arrived)
        for index in self._values:
            corrected = self._residuals[index].average
            total = torch.zeros_like(corrected)
            for row in range(len(self._group.ranks)):
                scale = _scale(from_scales[index][row], total.dtype)
                total.add_(expanded(unpack(from_signs[index][row])[: total.numel()], scale))
            compress(corrected.add_(total.div_(len(self._group.ranks))), scales[index], signs[index])
        return message

    def _take_averages(self) -> None:
        scales, signs = self._columns(self._messages)
        for index, value in self._values.items():
            for place in range(len(self._group.ranks)):
                span = self._exchange.range_of(value.numel(), place)
                scale = _scale(scales[index][place], value.dtype)
                value[span.start : span.stop] = expanded(unpack(signs[index][place])[: span.numel], scale)

    # -- messages ---------------------------------------------------------------------------------------

    def _columns(self, rows: Tensor) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """The bytes of each parameter's scale and signs in every row."""
        if not self._values:
            return {}, {}
        scale_bytes = self._exchange.scale_bytes
        sizes = [self._exchange.range_numel(value.numel()) // BITS for value in self._values.values()]
        parts = torch.split(rows, [size for numel in sizes for size in (scale_bytes, numel)], dim=1)
        return dict(zip(self._values, parts[::2], strict=True)), dict(zip(self._values, parts[1::2], strict=True))

    def _rows(self) -> Tensor:
        scale_bytes = self._exchange.scale_bytes
        sizes = [self._exchange.range_numel(value.numel()) // BITS + scale_bytes for value in self._values.values()]
        rows = torch.empty(len(self._group.ranks), sum(sizes), dtype=torch.uint8, device=self._flat.device)
        self._flat.meter.hold("working", rows.nbytes)
        return rows

    def _drop(self, rows: Tensor) -> None:
        self._flat.meter.drop("working", rows.nbytes)

    def _send(self, messages: list[Tensor]) -> None:
        name = self._flat.name
        self._work = self._collectives.all_to_all(list(self._arrived), messages, self._group, name)


def compress(corrected: Tensor, scales: Tensor, signs: Tensor) -> None:
    """Write a flat tensor as bytes, in as many rows as `scales` and `signs` have, and leave in it what they leave out.

    Every row has its scale, the root of its mean square, and one range of its signs; zero is positive. Nothing that is
    not finite is hidden: the scale is infinite or nan then.
    """
    scale = torch.linalg.vector_norm(corrected) / math.sqrt(max(1, corrected.numel()))
    is_positive = corrected >= 0
    padded = is_positive.new_zeros(signs.numel() * BITS)
    padded[: is_positive.numel()] = is_positive
    signs.copy_(pack(padded).view_as(signs))
    scales.copy_(scale.reshape(1).view(torch.uint8))
    corrected.sub_(expanded(is_positive, scale))


def expanded(is_positive: Tensor, scale: Tensor) -> Tensor:
    """The elements that are sent as one sign each. On CPUs a tenth of the time of `torch.where(is_positive, scale,
    -scale)`, whose scalars torch (2.13) takes element by element."""
    return is_positive.view(torch.int8).mul(2).sub_(1).to(scale.dtype).mul_(scale)


_ONES = 0x0101010101010101
_TO_LAST_BYTE = 0x0102040810204080
"""Times eight bytes that are 0 or 1: the last byte of the product has them as bits, the first as its lowest."""
_BIT_OF_EACH = 0x8040201008040201 - 2**64
"""Of eight bytes, the first's lowest bit to the last's highest, as a signed number."""


def pack(bits: Tensor) -> Tensor:
    """Eight bools in each byte, the first in the lowest bit."""
    return bits.view(torch.int64).mul(_TO_LAST_BYTE).bitwise_right_shift_(56).to(torch.uint8)


def unpack(codes: Tensor) -> Tensor:
    """What `pack` was given."""
    return codes.to(torch.int64).mul_(_ONES).bitwise_and_(_BIT_OF_EACH).view(torch.uint8).bool()


def _scale(row: Tensor, dtype: torch.dtype) -> Tensor:
    return row.clone().view(dtype)[0]
