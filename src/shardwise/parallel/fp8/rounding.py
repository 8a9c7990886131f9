"""Matrices rounded to 8 bits with scales, and their products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from shardwise.parallel.fp8.recipes import Rounding, ScaleRule
from shardwise.runtime.rehearsal.kernel_memory import as_accelerators_do

Tensor = torch.Tensor
_TINY = 1e-12
"""In the place of a largest element of 0, as in torchao, so that codes are equal to its."""
_BIAS = 127
_INNER = 16
"""Kernels contract multiples of it."""


@dataclass(frozen=True)
class Rounded:
    """A matrix in blocks: `codes` is `[row blocks, rows, column blocks, columns]`, and so is `scale`, fp32, with one
    element for each block. An element of the matrix is its code divided by its scale."""

    codes: Tensor
    scale: Tensor
    shape: tuple[int, int]

    @property
    def has_one_or_by_rows(self) -> bool:
        """Whether there is one scale, or one for each row."""
        return self.scale.shape[2] == 1 and self.scale.shape[0] in (1, self.shape[0])

    def wide(self) -> Tensor:
        """The matrix in fp32, which rounds nothing more."""
        return self._matrix(self.codes.to(torch.float32) / self.scale)

    def narrow(self) -> Tensor:
        """The codes as a matrix."""
        return self._matrix(self.codes)

    def _matrix(self, blocks: Tensor) -> Tensor:
        rows, columns = self.shape
        return blocks.flatten(2, 3).flatten(0, 1)[:rows, :columns]


def rounded(
    matrix: Tensor, rounding: Rounding, rule: ScaleRule, largest: Callable[[Tensor], Tensor] | None = None
) -> Rounded:
    """`matrix`, two-dimensional and not empty, in 8 bits. `largest` gives the largest of the absolute values that ranks
    have found for the same blocks.

    What is not finite stays so for whoever decodes it, which is how overflows are found: its block has a scale that is
    not finite, or 0. The cast alone would not do: torch makes 448 of infinity in e4m3 since version 2.12.
    """
    rows, columns = matrix.shape
    block_rows, block_columns = rounding.rows or rows, rounding.contracted or columns
    if columns % block_columns or rows % block_rows:
        matrix = functional.pad(matrix, (0, -columns % block_columns, 0, -rows % block_rows))
    blocks = torch.unflatten(torch.unflatten(matrix, 1, (-1, block_columns)), 0, (-1, block_rows))
    amax = blocks.abs().amax((1, 3), keepdim=True)
    if largest is not None:
        amax = largest(amax)
    scale = _scale(amax, rounding.dtype, rule)
    limit = torch.finfo(rounding.dtype).max
    scaled = (blocks.to(torch.float32) * scale).clamp(-limit, limit)
    return Rounded(scaled.to(rounding.dtype), scale, (rows, columns))


def _scale(amax: Tensor, dtype: torch.dtype, rule: ScaleRule) -> Tensor:
    """The factors, fp32, by which blocks with these largest elements become codes."""
    limit = torch.finfo(dtype).max
    if rule == "e8m0":
        return _scale_of_exponent(amax.to(torch.float32) / limit)
    # In fp64, because compiled and uncompiled divisions differ in fp32 (as in torchao).
    scale = (limit / amax.to(torch.float64).clamp(min=_TINY)).to(torch.float32)
    return torch.exp2(torch.floor(torch.log2(scale))) if rule == "power_of_two" else scale


def _scale_of_exponent(wanted: Tensor) -> Tensor:
    """Rounded up to powers of two whose exponents have 8 bits, inverted (RCEIL of the cuBLAS documentation)."""
    exponent = torch.log2(wanted).ceil().clamp(-_BIAS, _BIAS)
    finite = torch.where(exponent == -_BIAS, 1.0, torch.exp2(-exponent))
    return torch.where(wanted.isnan(), wanted, torch.where(wanted.isinf(), 2.0**-_BIAS, finite))


def product(left: Rounded, right: Rounded, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """`left @ right.T` in `dtype`. Codes are multiplied as they are where the device can; on CPUs they are decoded and
    multiplied in fp32, which gives the same sums but for their order. `fast`: with sums of fewer bits."""
    is_rehearsed = not torch.compiler.is_compiling() and as_accelerators_do()
    if left.codes.device.type == "cpu" and not is_rehearsed:
        return torch.mm(left.wide(), right.wide().t()).to(dtype)
    return scaled_product(left, right, dtype, fast=fast)


def scaled_product(left: Rounded, right: Rounded, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """`left @ right.T` by a kernel for 8 bits, if scales are of whole matrices or of rows. For other blocks only shapes
    are meaningful: of those, rehearsals alone come here, and GPUs have the kernels of `kernels.py`."""
    if not (left.has_one_or_by_rows and right.has_one_or_by_rows):
        left, right = _with_one_scale(left), _with_one_scale(right)
    by_rows = left.scale.numel() > 1 or right.scale.numel() > 1
    inverse_left, inverse_right = left.scale.reciprocal(), right.scale.reciprocal()
    codes_left, codes_right = _aligned(left.narrow()), _aligned(right.narrow())
    one = functional.ScalingType.RowWise if by_rows and fast else functional.ScalingType.TensorWise
    if by_rows:
        inverse_left = inverse_left.view(-1, 1).expand(left.shape[0], 1).contiguous()
        inverse_right = inverse_right.view(1, -1).expand(1, right.shape[0]).contiguous()
    # With exact sums the kernel for rows is slow (torchao's `addmm_float8_unwrapped` says so): sum codes with the other
    # one, and scale the sums.
    after = inverse_left * inverse_right if by_rows and not fast else None
    unit = inverse_left.new_ones(())
    made: Tensor = functional.scaled_mm(
        codes_left,
        codes_right.t(),
        scale_a=(inverse_left if by_rows else inverse_left.view(())) if after is None else unit,
        scale_recipe_a=one,
        scale_b=(inverse_right if by_rows else inverse_right.view(())) if after is None else unit,
        scale_recipe_b=one,
        output_dtype=torch.bfloat16 if by_rows else dtype,  # that for rows makes nothing else
        use_fast_accum=fast,
    )
    return (made if after is None else made * after).to(dtype)


def _with_one_scale(one: Rounded) -> Rounded:
    return Rounded(one.codes, one.scale.new_ones(1, 1, 1, 1), one.shape)


def _aligned(codes: Tensor) -> Tensor:
    """With rows that lie one after another, and zeros up to a multiple of what a kernel contracts."""
    beyond = -codes.shape[1] % _INNER
    if beyond:  # of bytes: torch pads no fp8
        return functional.pad(codes.contiguous().view(torch.uint8), (0, beyond)).view(codes.dtype)
    return codes.contiguous()
