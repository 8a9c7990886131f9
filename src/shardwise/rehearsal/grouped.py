"""Products of groups of rows, as in mixtures of experts: their shapes, and the kernels that stay for them.

[Note: kernels that stay] On a CPU oneDNN compiles a kernel for every shape of a product in bf16 or fp16, and keeps the
latest 1024 (ONEDNN_PRIMITIVE_CACHE_CAPACITY). Measured with torch 2.13: 43 KiB each, whatever the shape, and none in
fp32. The products of one step are always the same, and are within the allowance of a process; but how many tokens an
expert gets is another number in every step, so that with experts all 1024 come to be.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

KERNEL_BYTES = 44 * 2**10
NUM_KERNELS = 1024
ALIGNMENT_BYTES = 16
"""Rows of what torch's kernel returns begin at multiples of this."""


class GroupedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Above a `FakeTensorMode`: answers grouped products in all dtypes, of which torch itself foresees bf16 alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.are_narrow = False
        """Whether there was one in bf16 or fp16."""

    @property
    def kernel_bytes(self) -> int:
        """What kernels for them come to take on a CPU: see [Note: kernels that stay]."""
        has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # likewise
        return num_kept_kernels() * KERNEL_BYTES if self.are_narrow and has_onednn else 0

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
        self.are_narrow |= left.dtype in (torch.bfloat16, torch.float16)
        offs = args[2] if len(args) > 2 else (kwargs or {}).get("offs")
        return _product(left, right, offs)


def num_kept_kernels() -> int:
    """How many kernels oneDNN keeps in this process."""
    told = os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", os.environ.get("DNNL_PRIMITIVE_CACHE_CAPACITY", ""))
    return int(told) if told.isdecimal() else NUM_KERNELS


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
