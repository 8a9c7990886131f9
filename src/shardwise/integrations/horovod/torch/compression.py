"""Compression of gradients: the dtype in which they are sent."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


class Compressor:
    """What code that has a compression of its own derives it from. This one sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, and the context that `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class NoneCompressor(Compressor):
    """No compression."""


class _Cast(Compressor):
    dtype = torch.float16

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(cls.dtype), tensor.dtype) if tensor.dtype.is_floating_point else (tensor, None)

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Cast):
    """Casts to fp16. Values above 65,504 overflow."""


class BF16Compressor(_Cast):
    """Casts to bf16, which has the range of fp32. Horovod does not have it."""

    dtype = torch.bfloat16


class Compression:
    """Values for `compression=`. Any object with `compress` and `decompress` works."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
