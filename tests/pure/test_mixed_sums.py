"""Sums of tensors in two dtypes, in slices."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm.mixed_sums import add_to, add_up, as_sent, keep_sent


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


def test_what_is_added_need_not_be_contiguous() -> None:
    total, summand = torch.zeros(400, 600), torch.ones(600, 400, dtype=torch.bfloat16).t()
    add_to(total, summand, alpha=0.5)
    assert bool((total == 0.5).all())


@pytest.mark.parametrize("own", range(4))
@pytest.mark.parametrize("is_in_place", [True, False])
def test_what_ranks_have_sent_is_added_in_their_order_whichever_is_the_sum_itself(own: int, is_in_place: bool) -> None:
    """Rounding shows the order: what is added to 1 one by one is lost, and what comes before it is not."""
    small = torch.finfo(torch.float32).eps / 2
    for one in range(4):
        summands = [torch.tensor([1.0 if place == one else small]) for place in range(4)]
        total = torch.zeros(1)
        for summand in summands:
            total = total + summand
        out = summands[own] if is_in_place else torch.zeros(1)
        add_up(out, summands, own)
        assert out == total, one


def test_sums_are_kept_as_they_were_sent() -> None:
    chunks = [torch.tensor([1 + 2**-12]), torch.zeros(1)]
    assert as_sent(chunks, 0, torch.float32) is chunks
    sent = as_sent(chunks, 0, torch.bfloat16)
    assert (sent[0].dtype, sent[0].item()) == (torch.bfloat16, 1)
    sent[1].fill_(3)
    keep_sent(chunks, sent)
    assert [chunk.item() for chunk in chunks] == [1, 3]
