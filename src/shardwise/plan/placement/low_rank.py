"""Gradients of matrices that are sent as two thin factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LowRank:
    """Which gradients are sent as factors (PowerSGD, arXiv:1905.13727), with torch's conditions.

    `has_begun`: until then they are sent as they are.
    """

    rank: int
    min_rate: float
    seed: int
    has_begun: bool

    def matrix_of(self, shape: Sequence[int]) -> tuple[int, int, int] | None:
        """Rows, columns and columns of each factor of a parameter's gradient; `None` if it is sent as it is."""
        if len(shape) < 2 or not math.prod(shape):
            return None
        rows, cols = shape[0], math.prod(shape[1:])
        rank = min(rows, cols, self.rank)
        return (rows, cols, rank) if (rows + cols) * rank * self.min_rate < rows * cols else None
