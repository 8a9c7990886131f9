"""What kernels of accelerators hold otherwise than those of CPUs, and what they hold that no result of theirs shows.

[Note: other devices] A plan for GPUs is often made on a machine without one. torch without a device's libraries can
make no autograd graph of tensors that claim to be there (their metadata asks for its device guard), so the rehearsal
runs on fake tensors of a CPU, with the memory of an accelerator: blocks of its allocator, and no allowances for a
process and its heap. Most operators are the same on both. `OfAccelerators` has those that are not and are known:
dropout, which keeps its mask in bytes there and noise in the dtype of the input on a CPU; attention with dropout, which
CPUs compute from whole matrices of scores; and products of factors in 8 bits, which CPUs decode (they ask
`as_accelerators_do`). Other kernels that a GPU alone has (attention whose values have other
widths than its keys, convolutions' workspaces) are counted as on a CPU: a machine with a GPU counts them exactly.

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

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwise.system.even_parts import round_up

ROWS, WIDTH, WIDE_WIDTH, WIDEST_NARROW = 128, 32, 64, 128
FP32_BYTES, HALF_BYTES = 4, 2
_FLASH_BACKWARDS = (
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


_elsewhere: ContextVar[bool] = ContextVar("computes as accelerators do", default=False)


def as_accelerators_do() -> bool:
    """Whether this thread rehearses on fake tensors of a CPU what accelerators will compute."""
    return _elsewhere.get()


class OfAccelerators(TorchFunctionMode):
    """Computes on fake tensors of a CPU what accelerators compute otherwise: see [Note: other devices]."""

    def __enter__(self) -> OfAccelerators:
        self._token = _elsewhere.set(True)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's own
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's own
        _elsewhere.reset(self._token)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            return _attention_without_dropout(*args, **kwargs)
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _attention_without_dropout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001  # what is dropped is drawn again in the backward, and takes no memory
    **more: Any,
) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, **more)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if training and 0 < p < 1 and not inplace:
        return torch.native_dropout(input, p, training)[0]
    return functional.dropout(input, p, training, inplace)


def kernel_bytes(func: Callable[..., Any], args: Sequence[Any], *, on_cpu: bool) -> int:
    """What `func` allocates beside its results, as far as it is known; 0 otherwise."""
    if on_cpu or func not in _FLASH_BACKWARDS:
        return 0
    query, key = args[1], args[2]
    if query.element_size() > HALF_BYTES:  # another kernel's, which counts as a CPU's where there is no GPU
        return 0
    return flash_backward_bytes(query.shape, key.shape, query.element_size())


def flash_backward_bytes(query: Sequence[int], key: Sequence[int], element_bytes: int) -> int:
    """`query` and `key` have shapes (rows, heads, tokens, width): see [Note: attention's backward]."""
    rows, heads, tokens, width = query
    whole_tokens = round_up(tokens, ROWS)
    whole_width = round_up(width, WIDTH if width <= WIDEST_NARROW else WIDE_WIDTH)
    sums = rows * heads * whole_tokens * (whole_width + 1) * FP32_BYTES
    of_each_head = 2 * rows * heads * key[2] * round_up(width, 8) * element_bytes if key[1] != heads else 0
    return sums + of_each_head
