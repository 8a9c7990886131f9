"""Sums of tensors in two dtypes."""

from __future__ import annotations

import torch

_SLICE = 2**17
"""Elements that are added at a time."""


def add_to(total: torch.Tensor, summand: torch.Tensor, alpha: float = 1.0) -> None:
    """`total.add_(summand, alpha=alpha)`, to the bit.

    On CPUs torch (2.13) first copies the narrower of two dtypes to the wider one: as much memory as the sum takes, and
    from 32 MiB on, which malloc maps anew each time, 2.1 ns for an element. In slices it is 0.4.
    """
    if total.dtype == summand.dtype or total.numel() <= _SLICE or total.device.type != "cpu":
        total.add_(summand, alpha=alpha)
        return
    num_rows = max(1, _SLICE * len(total) // total.numel())
    for part, added in zip(torch.split(total, num_rows), torch.split(summand, num_rows), strict=True):
        part.add_(added, alpha=alpha)
