"""The kind of a tensor's memory."""

from __future__ import annotations

import torch

from shardwise.system.torch_private import wraps_others

Tensor = torch.Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie in memory as they are: neither sparse, quantized, nested nor those of others inside."""
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested
    return is_plain and not wraps_others(tensor)


def on_host(device: torch.device) -> bool:
    """Whether the host can read a number there without waiting for queued work."""
    return device.type == "cpu"
