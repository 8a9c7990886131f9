"""Codes of integers in one pass over memory, on GPUs: the arithmetic of `Blocks` and `FedBack` in `codec.py`.

Torch's operators read and write what a block needs about ten times. Division and rounding are IEEE's here too, and
products are not fused with sums but where torch fuses them, so that ranks with and without these kernels make the same
codes. Unlike torch's operators, a kernel runs on the current device of its thread, which need not be that of its
tensors: a thread has the first one until it says otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
_TILE = 2048
"""Elements of one program, in whole blocks."""


@triton.jit
def _rounded(values):
    """To the nearest integer, halves to even, below 2**22: what is added leaves no bits for a fraction."""
    return (values + 12582912.0) - 12582912.0


@triton.jit
def _as(values, dtype: tl.constexpr):
    """In another dtype, halves to even. To bf16 by bits, because Triton's interpreter cuts them off."""
    if dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(values != values, 0x7FC0, rounded)  # some nans would overflow
        cast = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        cast = values.to(dtype)
    return cast


@triton.jit
def _encode(
    elements,
    integers,
    scales,
    losses,
    num_blocks,
    kept_share,
    lost_share,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    FEEDS_BACK: tl.constexpr,
):
    """Some blocks, as rows of two halves."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)
    there = (row < num_blocks)[:, None] & (column >= 0)[None, :]
    at_low = row[:, None] * (2 * HALF) + column[None, :]
    at_high = at_low + HALF
    low = tl.load(elements + at_low, mask=there, other=0.0).to(tl.float32)
    high = tl.load(elements + at_high, mask=there, other=0.0).to(tl.float32)
    if FEEDS_BACK:
        kept_low = tl.load(losses + at_low, mask=there, other=0.0).to(tl.float32)
        kept_high = tl.load(losses + at_high, mask=there, other=0.0).to(tl.float32)
        low += kept_low
        high += kept_high
    largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    odd = tl.max(((low - low) != 0.0).to(tl.int32), 1) + tl.max(((high - high) != 0.0).to(tl.int32), 1)
    exact = tl.div_rn(largest, tl.full([ROWS], 2 ** (BITS - 1) - 1, tl.float32))
    scale = _as(tl.where(odd > 0, float("nan"), exact), tl.bfloat16)  # see [Note: what is not finite] in `codec.py`
    tl.store(scales + row, scale, mask=row < num_blocks)
    wide = scale.to(tl.float32)[:, None]
    divisor = tl.broadcast_to(wide + 1.1754943508222875e-38, [ROWS, HALF])  # the smallest normal number
    low_code = _rounded(tl.div_rn(low, divisor))
    high_code = _rounded(tl.div_rn(high, divisor))
    is_finite = (odd == 0)[:, None]
    low_code = tl.where(is_finite, low_code, 0.0)
    high_code = tl.where(is_finite, high_code, 0.0)
    if BITS == 8:
        tl.store(integers + at_low, low_code.to(tl.int8).to(tl.uint8, bitcast=True), mask=there)
        tl.store(integers + at_high, high_code.to(tl.int8).to(tl.uint8, bitcast=True), mask=there)
    else:
        packed = (low_code + 8.0 + (high_code + 8.0) * 16.0).to(tl.int32).to(tl.uint8)
        tl.store(integers + row[:, None] * HALF + column[None, :], packed, mask=there)
    if FEEDS_BACK:
        lost_low = tl.fma(kept_low, kept_share, (low - low_code * wide) * lost_share)  # as torch's `add` with `alpha`
        lost_high = tl.fma(kept_high, kept_share, (high - high_code * wide) * lost_share)
        tl.store(losses + at_low, _as(tl.where(is_finite, lost_low, 0.0), tl.bfloat16), mask=there)
        tl.store(losses + at_high, _as(tl.where(is_finite, lost_high, 0.0), tl.bfloat16), mask=there)


@triton.jit
def _decode(
    elements,
    integers,
    scales,
    num_blocks,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    ADDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)
    there = (row < num_blocks)[:, None] & (column >= 0)[None, :]
    at_low = row[:, None] * (2 * HALF) + column[None, :]
    at_high = at_low + HALF
    wide = tl.load(scales + row, mask=row < num_blocks, other=0.0).to(tl.float32)[:, None]
    if BITS == 8:
        low = tl.load(integers + at_low, mask=there, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        high = tl.load(integers + at_high, mask=there, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        packed = tl.load(integers + row[:, None] * HALF + column[None, :], mask=there, other=0).to(tl.int32)
        low = ((packed & 15) - 8).to(tl.float32)
        high = ((packed >> 4) - 8).to(tl.float32)
    low *= wide
    high *= wide
    if ADDS:
        low += tl.load(elements + at_low, mask=there, other=0.0).to(tl.float32)
        high += tl.load(elements + at_high, mask=there, other=0.0).to(tl.float32)
    tl.store(elements + at_low, _as(low, elements.dtype.element_ty), mask=there)
    tl.store(elements + at_high, _as(high, elements.dtype.element_ty), mask=there)


def encode(
    elements: Tensor, integers: Tensor, scales: Tensor, block: int, losses: Tensor | None = None, beta: float = 0.0
) -> None:
    """Fill `integers`, of uint8, and `scales`, of bf16, from `elements`, flat. With `losses`, as many in bf16, elements
    and these are encoded together, and they then follow what is lost."""
    if not elements.numel():
        return
    grid, shape = _over(elements, block)
    kept = elements if losses is None else losses
    bits = 8 * integers.numel() // elements.numel()
    with torch.cuda.device_of(elements):
        _encode[grid](
            elements,
            integers,
            scales,
            kept,
            scales.numel(),
            beta,
            1 - beta,  # a kernel would subtract in fp32 (Triton's interpreter in fp64): another last bit
            BITS=bits,
            FEEDS_BACK=losses is not None,
            **shape,
            enable_fp_fusion=False,
        )


def decode(elements: Tensor, integers: Tensor, scales: Tensor, block: int, *, adds: bool) -> None:
    """Fill `elements`, flat, or add to them."""
    if not elements.numel():
        return
    grid, shape = _over(elements, block)
    bits = 8 * integers.numel() // elements.numel()
    with torch.cuda.device_of(elements):
        _decode[grid](elements, integers, scales, scales.numel(), BITS=bits, ADDS=adds, **shape, enable_fp_fusion=False)


def _over(elements: Tensor, block: int) -> tuple[Any, dict[str, int]]:
    """Programs, and blocks and half the elements of each of these that one has."""
    rows = max(1, _TILE // block)
    return (triton.cdiv(elements.numel() // block, rows),), {"HALF": block // 2, "ROWS": rows}
