"""Grouped matrix products: each group of rows has its own matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from shardwise.parallel.experts.assignment import is_rehearsed
from shardwise.system.even_parts import even_sizes

Tensor = torch.Tensor
_ALIGNMENT_BYTES = 16
"""Torch's kernel requires rows to begin at multiples of this."""


def grouped_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """`rows @ weights[group].T` for rows that are ordered by group, without padding.

    `rows` is `[num_rows, in]`, `weights` `[groups, out, in]`, and `counts` int64 `[groups]` has the number of rows of
    each group, `num_rows` in total. The output is `[num_rows, out]`. It is one kernel if torch has one for the dtype
    and device, otherwise one product per group.
    """
    if _has_kernel(rows, weights):
        ends = counts.cumsum(0).to(torch.int32)
        made: Tensor = functional.grouped_mm(rows, weights.mT, offs=ends)
        return made
    return linear_by_group(rows, weights, counts, functional.linear)


def linear_by_group(
    rows: Tensor, weights: Tensor, counts: Tensor, linear: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """`grouped_linear` with one product per group, `linear`, which is also called for groups without rows."""
    parts = rows.split_with_sizes(even_sizes(rows.shape[0], len(counts)) if is_rehearsed(counts) else counts.tolist())
    return torch.cat([linear(part, weight) for part, weight in zip(parts, weights.unbind(0), strict=True)])


def _has_kernel(rows: Tensor, weights: Tensor) -> bool:
    is_wide = rows.device.type == "cpu" and not torch.compiler.is_compiling()  # torch's fake kernel accepts bf16 only
    kinds = (torch.bfloat16, torch.float32) if is_wide else (torch.bfloat16,)
    widths = (weights.shape[1], weights.shape[2])
    return (
        rows.shape[0] > 0
        and rows.dtype == weights.dtype
        and rows.dtype in kinds
        and all(width * rows.element_size() % _ALIGNMENT_BYTES == 0 for width in widths)
    )
