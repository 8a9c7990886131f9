"""Products of groups of rows, as in mixtures of experts: their shapes, and the kernels that stay for them.

[Note: kernels that stay] On a CPU oneDNN compiles a kernel for every shape of a product in bf16 or fp16, and keeps the
latest 1024 (ONEDNN_PRIMITIVE_CACHE_CAPACITY). The products of one step are always the same, and are within the
allowance of a process; but how many tokens an expert gets is another number in every step, so that with experts all
1024 come to be. How large one is depends on the processor: with torch 2.13 43 KiB with AVX-512 alone, 560 to 830 where
it has instructions for bf16, of which half stay even without room in that cache. So it is measured where it matters,
once in a process, by as many products as give a figure: a tenth of a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NUM_KERNELS = 1024
LEAST_KERNEL_BYTES = 44 * 2**10
PROBED_ROWS, PROBED_SIZES = range(33, 81), (256, 1024)
"""Products that are done to see what a kernel takes: so many rows by a matrix of these sizes."""
ALIGNMENT_BYTES = 16
"""Rows of what torch's kernel returns begin at multiples of this."""


class GroupedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Above a `FakeTensorMode`: answers grouped products in all dtypes, of which torch itself foresees bf16 alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.narrow: torch.dtype | None = None
        """That of one in bf16 or fp16, if there was any."""

    @property
    def kernel_bytes(self) -> int:
        """What kernels for them come to take on a CPU: see [Note: kernels that stay]. Computes, and not on fakes."""
        has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # likewise
        if self.narrow is None or not has_onednn:
            return 0
        return num_kept_kernels() * bytes_of_a_kernel(self.narrow)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        left, right = args[:2]
        if left.dtype in (torch.bfloat16, torch.float16):
            self.narrow = left.dtype
        offs = args[2] if len(args) > 2 else (kwargs or {}).get("offs")
        return _product(left, right, offs)


def num_kept_kernels() -> int:
    """How many kernels oneDNN keeps in this process; of fewer than are probed what remains has been measured."""
    told = os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", os.environ.get("DNNL_PRIMITIVE_CACHE_CAPACITY", ""))
    return int(told) if told.isdecimal() and int(told) >= len(PROBED_ROWS) else NUM_KERNELS


@cache
def bytes_of_a_kernel(dtype: torch.dtype) -> int:
    """What this process grows by for a product of another shape."""
    from shardwise.monitor import process_memory  # which a job that rehearses no experts need not load

    width, height = PROBED_SIZES
    matrix, rows = (torch.ones(size, width, dtype=dtype) for size in (height, PROBED_ROWS.stop))
    out = torch.empty(PROBED_ROWS.stop, height, dtype=dtype)
    torch.mm(rows, matrix.t(), out=out)  # what the first one brings with it, such as scratch
    before = process_memory().now_bytes
    for num_rows in PROBED_ROWS:
        torch.mm(rows[:num_rows], matrix.t(), out=out[:num_rows])
    return max(LEAST_KERNEL_BYTES, (process_memory().now_bytes - before) // len(PROBED_ROWS))


def _product(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """Empty, with the shape and strides that torch's kernel gives: `left` or `right` or both have 2 dims, or neither.

    `offs`, of shape (groups,), say where each group of rows (or of columns) ends.
    """
    num_groups = (offs.shape[0],) if offs is not None else (left.shape[0],)
    batch = num_groups if left.dim() == right.dim() else ()
    width = ALIGNMENT_BYTES // left.element_size()
    shape = (*batch, left.shape[-2], right.shape[-1])
    row = -(-shape[-1] // width) * width
    return torch.empty_strided(shape, (*(shape[-2] * row for _ in batch), row, 1), dtype=left.dtype, device=left.device)
