"""What a rank keeps of gradients that are sent as factors, from step to step."""

from __future__ import annotations

import torch

from shardwise.memory.dtypes import torch_dtype
from shardwise.program import FlatSpec
from shardwise.system.telemetry import ByteMeter

Tensor = torch.Tensor
KeptFactors = tuple[Tensor, Tensor]
"""Of one parameter: its part of `unsent`, flat, and its second factor."""


class Factors:
    """Of one flat buffer: see [Note: factors] in `program/low_rank.py`.

    `unsent` is as long as the buffer: this rank's gradients, as far as they have not been sent. `cols` has the second
    factor of each matrix, by its index, of shape (columns, rank) and the same on all ranks; zeros before the first
    step.
    """

    def __init__(self, spec: FlatSpec, meter: ByteMeter, device: torch.device) -> None:
        dtype = torch_dtype(spec.table.grad.dtype)
        self.unsent = torch.zeros(spec.numel, dtype=dtype, device=device)
        self.cols = {one.index: torch.zeros(one.cols, one.rank, dtype=dtype, device=device) for one in spec.factored}
        meter.hold("optim", self.unsent.nbytes + sum(cols.nbytes for cols in self.cols.values()))
