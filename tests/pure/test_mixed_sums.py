"""Sums of tensors in two dtypes, in slices."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm import add_to, put_scaled


class _Largest(TorchDispatchMode):
    """The most elements that an operator inside gets."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function is torch.ops.aten.add_.Tensor:
            self.numel = max(self.numel, args[0].numel())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("alpha", [1.0, 0.25])
@pytest.mark.parametrize("shape", [(0,), (2**17,), (2**17 + 3,), (700, 300), (3, 2**18)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_sum_in_slices_is_the_sum_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...], alpha: float) -> None:
    """Torch would copy all of a narrower summand to the wider dtype first."""
    numbers = torch.Generator().manual_seed(0)
    total, summand = torch.randn(shape, generator=numbers), torch.randn(shape, generator=numbers).to(dtype)
    expected = total.clone().add_(summand, alpha=alpha)
    with _Largest() as largest:
        add_to(total, summand, alpha=alpha)
    assert torch.equal(total, expected)
    assert dtype == torch.float32 or shape == (3, 2**18) or largest.numel <= 2**17


@pytest.mark.parametrize("shape", [(), (0,), (2**17,), (2**17 + 3,), (700, 300), (3, 2**18)], ids=str)
@pytest.mark.parametrize("scale", [0.5, 1 / 3])
def test_a_product_is_one_of_the_wider_dtype(shape: tuple[int, ...], scale: float) -> None:
    """`torch.mul` into it rounds to bf16 first, in memory as large as the source."""
    source = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    target = torch.empty(shape)
    put_scaled(target, source, scale)
    assert torch.equal(target, source.float() * scale)


def test_what_is_added_need_not_be_contiguous() -> None:
    total, summand = torch.zeros(400, 600), torch.ones(600, 400, dtype=torch.bfloat16).t()
    add_to(total, summand, alpha=0.5)
    assert bool((total == 0.5).all())
