"""Grouped matrix products, as in mixtures of experts: their shapes, and the cached kernels they leave behind; and
whether there are convolutions, which leave some too.

[Note: cached kernels] On a CPU oneDNN compiles a kernel for every shape of a product in bf16 or fp16, and caches the
latest 1024 (ONEDNN_PRIMITIVE_CACHE_CAPACITY). Usually the products of each step are the same, and their kernels are
part of the process allowance; but the number of tokens of an expert differs in every step, so that with experts the
cache fills up. The size of a kernel depends on the processor: with torch 2.13 it is 43 KiB with AVX-512 alone, and 560
to 830 KiB with bf16 instructions, of which half remains even without that cache. So the size is measured on the spot,
once per process, with enough products to give a figure; this takes a tenth of a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from shardwise.runtime.rehearsal.integers import Integers
from shardwise.system.even_parts import round_up

NUM_KERNELS = 1024
LEAST_KERNEL_BYTES = 44 * 2**10
PROBED_ROWS, PROBED_SIZES = range(33, 81), (256, 1024)
"""The probing products: these numbers of rows by a matrix of these sizes."""
CONVOLUTION_BYTES = 9 * 2**20
"""By how much more a process grows whose model has convolutions: 9 MiB for a small Whisper in fp32, torch 2.13."""
ALIGNMENT_BYTES = 16
"""Rows of the output of torch's kernel begin at multiples of this."""


class GroupedProducts(Integers):
    """Above a `FakeTensorMode`: computes shapes of grouped products in all dtypes, of which torch's own fake kernel has
    bf16 only, and else what `Integers` does: every mode takes a twentieth of a rehearsal's time."""

    def __init__(self, floats: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(floats)
        self.narrow: torch.dtype | None = None
        """The dtype of a product in bf16 or fp16, if there was one."""
        self.has_convolved = False

    @property
    def kernel_bytes(self) -> int:
        """The memory of the cached kernels on a CPU: see [Note: cached kernels]. Runs real products, outside of fake
        modes."""
        has_onednn: bool = torch.backends.mkldnn.is_available()
        if not has_onednn:
            return 0
        of_products = 0 if self.narrow is None else num_kept_kernels() * bytes_of_a_kernel(self.narrow)
        return of_products + (CONVOLUTION_BYTES if self.has_convolved else 0)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.has_convolved = True
        if func is not torch.ops.aten._grouped_mm.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        left, right = args[:2]
        if left.dtype in (torch.bfloat16, torch.float16):
            self.narrow = left.dtype
        offs = args[2] if len(args) > 2 else (kwargs or {}).get("offs")
        return _product(left, right, offs)


def num_kept_kernels() -> int:
    """The capacity of oneDNN's cache in this process; below the number of probes, the measured size covers the rest."""
    told = os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", os.environ.get("DNNL_PRIMITIVE_CACHE_CAPACITY", ""))
    return int(told) if told.isdecimal() and int(told) >= len(PROBED_ROWS) else NUM_KERNELS


@cache
def bytes_of_a_kernel(dtype: torch.dtype) -> int:
    """By how much this process grows for a product of another shape."""
    from shardwise.system.process_memory import process_memory  # only needed by rehearsals with experts

    width, height = PROBED_SIZES
    matrix, rows = (torch.ones(size, width, dtype=dtype, device="cpu") for size in (height, PROBED_ROWS.stop))
    out = torch.empty(PROBED_ROWS.stop, height, dtype=dtype, device="cpu")
    torch.mm(rows, matrix.t(), out=out)  # the first one allocates more, such as scratch memory
    before = process_memory().now_bytes
    for num_rows in PROBED_ROWS:
        torch.mm(rows[:num_rows], matrix.t(), out=out[:num_rows])
    return max(LEAST_KERNEL_BYTES, (process_memory().now_bytes - before) // len(PROBED_ROWS))


def _product(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """An empty tensor with the shape and strides of torch's kernel: `left` and `right` have 2 or 3 dimensions each.

    `offs`, of shape (groups,), are the ends of the groups of rows (or of columns).
    """
    num_groups = (offs.shape[0],) if offs is not None else (left.shape[0],)
    batch = num_groups if left.dim() == right.dim() else ()
    width = ALIGNMENT_BYTES // left.element_size()
    shape = (*batch, left.shape[-2], right.shape[-1])
    row = round_up(shape[-1], width)
    return torch.empty_strided(shape, (*(shape[-2] * row for _ in batch), row, 1), dtype=left.dtype, device=left.device)
