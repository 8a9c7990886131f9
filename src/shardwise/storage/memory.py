"""Of what kind a tensor's memory is."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie in memory as they are: neither sparse nor quantized."""
    return tensor.layout == torch.strided and not tensor.is_quantized


def each_element_once(tensor: Tensor) -> Tensor:
    """A view without the dims along which `tensor` is expanded, cut to one: PyTorch writes to no element twice."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
