"""Tensors some of whose elements share memory: expanded ones, windows over a row.

torch refuses to copy into them. Here each address is written once per element that lies there, so the values have to
agree.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def may_overlap(tensor: Tensor) -> bool:
    """Whether two elements may share memory. Never false if they do."""
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
    memory, offsets = _memory_of(tensor)
    memory[offsets] = values.reshape(-1).to(tensor.device, tensor.dtype)


def agrees(tensor: Tensor, values: Tensor) -> bool:
    """Whether `tensor` could hold exactly `values`: elements that share an address are equal to the bit."""
    memory, offsets = _memory_of(tensor)
    wanted = values.reshape(-1).to(tensor.device, tensor.dtype)
    tried = torch.empty_like(memory)
    tried[offsets] = wanted
    return torch.equal(tried[offsets].view(torch.uint8), wanted.view(torch.uint8))


def _memory_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The memory that a tensor spans, flat, and the position in it of each of its elements."""
    reach = 1 + sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    offsets = torch.arange(reach, device=tensor.device).as_strided(tensor.shape, tensor.stride())
    return tensor.as_strided((reach,), (1,), tensor.storage_offset()), offsets.reshape(-1)
