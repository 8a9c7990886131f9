"""What gradients are cast to before they travel."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


class NoneCompressor:
    """As they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What travels, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _Cast(NoneCompressor):
    dtype = torch.float16

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(cls.dtype), tensor.dtype) if tensor.dtype.is_floating_point else (tensor, None)

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Cast):
    """Half of fp32's bytes; beyond 65,504 values overflow."""


class BF16Compressor(_Cast):
    """Half of fp32's bytes, and its range. Horovod has none."""

    dtype = torch.bfloat16


class Compression:
    """For `compression=`; any object with `compress` and `decompress` will do."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
