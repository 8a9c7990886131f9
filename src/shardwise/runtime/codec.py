"""What is sent in place of elements, between a mover and the collectives: a codec encodes and decodes one `Wire`.

[Note: rounded once] The rank that has a part encodes it, and every rank decodes what was sent, that rank too: so all
compute with the same values, whatever the format loses. What rests is not touched unless it is a copy of what others
have updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shardwise.comm import Communicator, Group, Work
from shardwise.memory import torch_dtype
from shardwise.plan.placement import Wire
from shardwise.system.telemetry import ByteMeter

Tensor = torch.Tensor


class Codec(Protocol):
    """Encodes elements, and decodes them. Both may be called on any part that a rank owns, and any number of parts."""

    dtype: torch.dtype
    """That of the codes, which are what is sent."""

    def num_codes(self, numel: int) -> int:
        """How many codes `numel` elements make; `Wire.num_bytes` is their size."""
        ...

    def encode(self, elements: Tensor, codes: Tensor) -> None:
        """Fill `codes`."""
        ...

    def decode(self, codes: Tensor, elements: Tensor) -> None:
        """Fill `elements`."""
        ...


class Cast:
    """Elements rounded to a narrower dtype. Non-finite values stay so."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def num_codes(self, numel: int) -> int:
        return numel

    def encode(self, elements: Tensor, codes: Tensor) -> None:
        codes.copy_(elements)

    def decode(self, codes: Tensor, elements: Tensor) -> None:
        elements.copy_(codes)


def codec_for(wire: Wire) -> Codec:
    """The codec of a format. A new format is a class here and what it counts in `plan/placement/wire.py`."""
    return Cast(torch_dtype(wire.dtype))


class EncodedGather:
    """An all-gather whose parts are sent as codes. The work of `Collectives.all_gather`, from its start."""

    def __init__(
        self,
        codec: Codec,
        collectives: Communicator,
        parts: Sequence[Tensor],
        group: Group,
        subject: str,
        meter: ByteMeter,
    ) -> None:
        """`parts` are one per rank of the group, of equal length; the `group.index`-th is filled. `meter` counts the
        codes' bytes."""
        self._codec, self._parts, self._meter = codec, parts, meter
        num_codes = codec.num_codes(parts[0].numel())
        self._codes = collectives.buffer(num_codes * len(parts), codec.dtype)
        self._num_bytes = self._codes.nbytes
        meter.hold("working", self._num_bytes)
        self._chunks = self._codes.chunk(len(parts))
        codec.encode(parts[group.index], self._chunks[group.index])
        self._work: Work | None = collectives.all_gather(self._codes, group, subject, self._chunks)

    def wait(self) -> None:
        """See `Work`: may be called again after it has raised."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        for codes, elements in zip(self._chunks, self._parts, strict=True):
            self._codec.decode(codes, elements)
        del self._codes, self._chunks
        self._meter.drop("working", self._num_bytes)
