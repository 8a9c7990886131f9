"""On one GPU: attention by torch's fused kernel, part by part, is that of tiles. Skipped without a GPU."""

from __future__ import annotations

import pytest
import torch

from shardwise.parallel.sequence import Layout, Visibility, Weighing, fused, ring_attention

Tensor = torch.Tensor
pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [True, False])
def test_fused_attention_is_that_of_tiles(dtype: torch.dtype, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, heads = 256, (4, 2, 2)
    tensors = [torch.randn(2, num, tokens, 64, device="cuda", dtype=dtype) for num in heads]

    def attended() -> list[Tensor]:
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        made = ring_attention(*inputs, Layout(tokens, 1), None, Visibility(is_causal), Weighing(0.125))
        return [made, *torch.autograd.grad(made, inputs, torch.ones_like(made))]

    by_kernel = attended()
    monkeypatch.setattr(fused, "is_fused", lambda *_: False)
    for one, other in zip(by_kernel, attended(), strict=True):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)
