"""Bytes that live: every storage that an operation makes, from then until nobody has it any more."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE_BLOCK_BYTES = 512
"""Torch's allocators for accelerators hand out multiples of this (kMinBlockSize in c10/cuda/CUDACachingAllocator.h, and
alike for XPU)."""


class LivingBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Inside `with`, counts storages that operations of this thread, and of its backwards, make.

    Those of the `apart` tensors, such as parameters, are not counted. What a kernel takes and gives back while it runs
    is not seen.
    """

    def __init__(self, apart: Iterable[torch.Tensor], granule_bytes: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        strided = [tensor for tensor in apart if tensor.layout is torch.strided]
        self._apart = {tensor.untyped_storage()._cdata: tensor for tensor in strided}
        self._granule_bytes = granule_bytes
        self._bytes: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.live_bytes = 0
        self.peak_bytes = 0

    def count(self, values: object) -> None:
        """Count the storages of all tensors in a nest of tuples, lists and dicts, if they are not counted yet."""
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self._count(tensor.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def take_peak(self) -> int:
        """The most that lived at once since this was last asked."""
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._apart:
            return
        num_bytes = -(-storage.nbytes() // self._granule_bytes) * self._granule_bytes
        self.live_bytes += num_bytes - self._bytes.get(key, 0)  # a storage that is there may have been resized
        self._bytes[key] = num_bytes
        if key not in self._refs:
            self._refs[key] = weakref.ref(storage, partial(self._is_gone, key))

    def _is_gone(self, key: int, _: object) -> None:
        del self._refs[key]
        self.live_bytes -= self._bytes.pop(key)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(result)
        return result
