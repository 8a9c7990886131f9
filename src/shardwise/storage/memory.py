"""Of what kind a tensor's memory is."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie in memory as they are: neither sparse nor quantized."""
    return tensor.layout == torch.strided and not tensor.is_quantized


def on_host(device: torch.device) -> bool:
    """Whether the host can read a number that lies there without waiting for what it has queued."""
    return device.type == "cpu"
