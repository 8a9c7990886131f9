"""Serializes objects between a loader and its worker processes.

[Note: bytes, not shared memory]
torch's own way puts every tensor into shared memory and sends a file descriptor. Then a finished batch is lost if its
worker dies before it is fetched, a container with a small /dev/shm kills workers by SIGBUS, and many small tensors
exhaust the descriptors. A copy through a pipe costs the waiting thread a memcpy, and has none of these problems.
"""

from __future__ import annotations

import io
import mmap
import pickle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def packed(value: Any) -> bytes:
    """`value` as bytes. A memory-mapped array is sent as the name of its file, and mapped again."""
    stream = io.BytesIO()
    _Packer(stream, protocol=5).dump(value)
    return stream.getvalue()


def unpacked(message: bytes) -> Any:
    return pickle.loads(message)


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided:
            flat = value.detach().contiguous().view(-1).view(torch.uint8)
            return _tensor, (flat.numpy(), value.dtype, tuple(value.shape))
        if isinstance(value, np.memmap) and value.filename is not None and _is_whole(value.base):
            order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
            return np.memmap, (value.filename, value.dtype, value.mode, value.offset, value.shape, order)
        return NotImplemented


def _is_whole(base: object) -> bool:
    """Whether an array with this base is the mapping itself; a slice of one has the same `offset` as the whole."""
    return isinstance(base, mmap.mmap)


def _tensor(flat: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(flat).view(dtype).view(shape)
