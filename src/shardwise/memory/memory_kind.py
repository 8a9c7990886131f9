"""The kind of a tensor's memory."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie in memory as they are: neither sparse nor quantized."""
    return tensor.layout == torch.strided and not tensor.is_quantized


def on_host(device: torch.device) -> bool:
    """Whether the host can read a number there without waiting for queued work."""
    return device.type == "cpu"
