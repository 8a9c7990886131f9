"""Temporary memory inside operators, which no result of theirs shows: of attention's backward on GPUs.

[Note: attention's backward] FlashAttention-2 sums the gradient of the queries in fp32, in a buffer whose tokens are
rounded up to 128 and widths to 32 (64 above a width of 128), beside one number per token; with fewer heads of keys than
of queries it has the gradients of keys and values for each head of the queries first. A deterministic one has such a
sum for each of several blocks, whose number depends on the card, and is not counted here (`mha_bwd` of torch's
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp). So its bytes follow from the shapes.

Those of the other two kernels do not. cuDNN, which torch prefers from the H100 on (with CUDA 13 and cuDNN 9.15.1 or
later), says what it needs when it has built a plan: a ViT of 1,024 wide, with 64 heads of 16 and 16 rows of 197 tokens,
was promised 1.3 % too little on an H200, whose allocator gave cuDNN 105 MB where FlashAttention would take 35. The
kernel for fp32 and masks takes what its tile sizes ask for. The first rows of `memory` in `benchmarks/device` measure
all three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

ROWS, WIDTH, WIDE_WIDTH, WIDEST_NARROW = 128, 32, 64, 128
FP32_BYTES = 4


def kernel_bytes(func: Callable[..., Any], args: Sequence[Any]) -> int:
    """What `func` allocates beside its results, as far as it is known; 0 otherwise."""
    if func is not torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
        return 0
    query, key = args[1], args[2]
    return flash_backward_bytes(query.shape, key.shape, query.element_size())


def flash_backward_bytes(query: Sequence[int], key: Sequence[int], element_bytes: int) -> int:
    """`query` and `key` have shapes (rows, heads, tokens, width): see [Note: attention's backward]."""
    rows, heads, tokens, width = query
    whole_tokens = _up(tokens, ROWS)
    whole_width = _up(width, WIDTH if width <= WIDEST_NARROW else WIDE_WIDTH)
    sums = rows * heads * whole_tokens * (whole_width + 1) * FP32_BYTES
    of_each_head = 2 * rows * heads * key[2] * _up(width, 8) * element_bytes if key[1] != heads else 0
    return sums + of_each_head


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
