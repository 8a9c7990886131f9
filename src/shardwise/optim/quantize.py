"""Block-wise dynamic quantization to 8 bits (arXiv:2110.02861, sections 2 and 3), in plain torch operations.

Each block of `BLOCK` elements is divided by its element of largest magnitude, sign included, so that this one is exact.
The others take the nearest of 256 levels: each further leading zero of a code means a factor of ten down, the remaining
bits a fraction in even steps between 0.1 and 1, so that small numbers keep their relative precision over seven decades.
Blocks are counted from the first element of the whole parameter; a piece may begin or end inside a block, and then has
its own scale for its part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shardwise.program import BLOCK

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Levels:
    """The 256 values of a code, ascending, and the 255 boundaries between them."""

    values: Tensor
    bounds: Tensor
    _elsewhere: dict[torch.device, Levels] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device) -> Levels:
        """The same tables on `device`, copied there once, because the copy waits for the device."""
        if device == self.values.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = Levels(self.values.to(device), self.bounds.to(device))
        return self._elsewhere[device]

    @classmethod
    def dynamic(cls, *, signed: bool) -> Levels:
        """The levels of the dynamic tree data type: 0, 1, and for each exponent the midpoints of even fractions."""
        bits = 6 if signed else 7
        middles = []
        for exponent in range(7):
            edges = np.linspace(0.1, 1, 2 ** (bits - exponent) + 1)
            middles.append((edges[:-1] + edges[1:]) / 2 * 10.0**-exponent)
        positive = np.concatenate(middles)
        values = np.sort(np.concatenate([[0.0, 1.0], positive, *([-positive] if signed else [])]))
        return cls(_as_tensor(values), _as_tensor((values[:-1] + values[1:]) / 2))


def _as_tensor(values: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


SIGNED, UNSIGNED = Levels.dynamic(signed=True), Levels.dynamic(signed=False)


@dataclass(frozen=True)
class Coded:
    """How codes are read by whoever finds them without their optimizer, such as after a rank is lost."""

    scales: str
    """The name of the state with their scales."""
    is_signed: bool
    start: int
    """The number of the first element in its parameter."""

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The values, flat, in fp32."""
        return decode(codes.reshape(-1), scales, self.start, SIGNED if self.is_signed else UNSIGNED)


def encode(values: Tensor, start: int, levels: Levels) -> tuple[Tensor, Tensor]:
    """Codes (uint8, one per element of `values`, which is flat and in fp32) and scales (fp32, one per block touched).

    `start` is the number of the first element in its parameter. Encoding decoded values gives the same codes.
    """
    lead = start % BLOCK
    blocks = _in_blocks(values, lead)
    farthest = blocks.abs().argmax(1, keepdim=True)
    scales = blocks.gather(1, farthest)
    normed = blocks / torch.where(scales == 0, 1, scales)
    codes = torch.bucketize(normed, levels.on(values.device).bounds, out_int32=True).to(torch.uint8)
    return codes.view(-1)[lead : lead + values.numel()], scales.view(-1)


def decode(codes: Tensor, scales: Tensor, start: int, levels: Levels) -> Tensor:
    """The values, flat, in fp32, that `codes` and `scales` represent."""
    lead = start % BLOCK
    values = levels.on(codes.device).values[codes.int()]
    return (_in_blocks(values, lead) * scales[:, None]).view(-1)[lead : lead + codes.numel()]


def _in_blocks(values: Tensor, lead: int) -> Tensor:
    """`values` after `lead` zeros, in rows of one block."""
    num_blocks = -(-(lead + values.numel()) // BLOCK)
    if lead == 0 and values.numel() == num_blocks * BLOCK:
        return values.view(num_blocks, BLOCK)
    padded = values.new_zeros(num_blocks * BLOCK)
    padded[lead : lead + values.numel()] = values
    return padded.view(num_blocks, BLOCK)
