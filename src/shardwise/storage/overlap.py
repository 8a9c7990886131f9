"""Tensors of which several elements are one number in memory: expanded ones, windows over a row.

torch refuses to copy into them. What is written here goes to each place in memory once for each element that lies
there, so the values have to agree.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def may_overlap(tensor: Tensor) -> bool:
    """Whether two elements may be one in memory; never false if they are."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride < reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def copy_into(tensor: Tensor, values: Tensor) -> None:
    """`tensor.copy_(values)`, also where elements of `tensor` overlap."""
    if not may_overlap(tensor):
        tensor.copy_(values.view(tensor.shape))
        return
    memory, places = _memory_of(tensor)
    memory[places] = values.reshape(-1).to(tensor.device, tensor.dtype)


def agrees(tensor: Tensor, values: Tensor) -> bool:
    """Whether `tensor` could be exactly `values`: those that would lie in one place are the same, to the bit."""
    memory, places = _memory_of(tensor)
    wanted = values.reshape(-1).to(tensor.device, tensor.dtype)
    tried = torch.empty_like(memory)
    tried[places] = wanted
    return torch.equal(tried[places].view(torch.uint8), wanted.view(torch.uint8))


def _memory_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The memory that a tensor reaches over, flat, and where in it each of its elements lies."""
    reach = 1 + sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    places = torch.arange(reach, device=tensor.device).as_strided(tensor.shape, tensor.stride())
    return tensor.as_strided((reach,), (1,), tensor.storage_offset()), places.reshape(-1)
