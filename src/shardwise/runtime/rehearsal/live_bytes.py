"""Live bytes: every storage that an operation allocates, until it is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shardwise.runtime.rehearsal.kernel_memory import kernel_bytes
from shardwise.system.even_parts import round_up
from shardwise.system.heap import heap_bytes
from shardwise.system.torch_private import (
    FakeTensor,
    UncompiledMode,
    asks_device,
    is_traceable_wrapper_subclass_type,
    storage_id,
    tree_leaves,
)

DEVICE_BLOCK_BYTES = 512
"""Torch's allocators for accelerators round allocations up to multiples of this (kMinBlockSize in
c10/cuda/CUDACachingAllocator.h; XPU's is the same)."""


Before = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]
"""Is told of an operation that is about to run: operator and arguments."""
Heard = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]
"""Is told of one that has run, with its result."""


class LivingBytes(UncompiledMode):
    """Inside `with`, counts storages that are allocated by operations of this thread and of its backwards.

    Storages of the `apart` tensors, such as parameters, are not counted. Temporary memory inside a kernel is counted
    where it is known: see `kernel_memory.py`. Who else follows a rehearsal is told of each operation by this mode,
    because every mode takes a twentieth of a rehearsal's time.
    """

    def __init__(self, apart: Iterable[torch.Tensor], *, on_cpu: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        strided = [tensor for tensor in apart if tensor.layout is torch.strided]
        self._apart = {storage_id(tensor.untyped_storage()): tensor for tensor in strided}
        self._on_cpu = on_cpu
        self._granule_bytes = 1 if on_cpu else DEVICE_BLOCK_BYTES
        self._bytes: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        self.heap_bytes = self.peak_heap_bytes = 0
        """Those in blocks that glibc takes from the heap, on a CPU, and the most of them."""
        self._given: dict[int, int] = {}
        """Bytes of living storages that were handed over: they count elsewhere."""
        self._put_aside: set[int] = set()
        self._gone_aside_bytes = 0
        self.given_bytes = self._peak_kept_bytes = 0
        self.before: Before | None = None
        self.heard: Heard | None = None

    def count(self, values: object) -> None:
        """Count the storages of all tensors in nested tuples, lists and dicts that are not counted yet."""
        for tensor in tree_leaves(values):
            if is_traceable_wrapper_subclass_type(type(tensor)):
                self.count([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
            elif isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self._count(tensor.untyped_storage())
        self._note_peak()

    def hand_over(self, tensor: torch.Tensor) -> int:
        """As `take_kept_peak`; from here on `tensor` is none of them."""
        peak, key = self.take_kept_peak(), storage_id(tensor.untyped_storage())
        if key in self._bytes and key not in self._given:
            self._given[key] = self._bytes[key]
            self.given_bytes += self._bytes[key]
            self._peak_kept_bytes -= self._bytes[key]
        return peak

    def put_aside(self, key: int) -> None:
        """Count the living storage with this identity even when it is gone, as if somebody kept it."""
        if key in self._bytes:
            self._put_aside.add(key)

    @property
    def aside_bytes(self) -> int:
        """Those of all storages that were put aside."""
        return self._gone_aside_bytes + sum(self._bytes[key] for key in self._put_aside)

    def take_kept_peak(self) -> int:
        """The peak, since the last call, of live bytes that were not handed over."""
        peak, self._peak_kept_bytes = self._peak_kept_bytes, self.live_bytes - self.given_bytes
        return peak

    def take_peak(self) -> int:
        """The peak of live bytes since the last call."""
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage_id(storage)
        if key in self._apart:
            return
        num_bytes = round_up(storage.nbytes(), self._granule_bytes)
        before = self._bytes.get(key, 0)  # a known storage may have been resized
        self.live_bytes += num_bytes - before
        self.heap_bytes += self._in_heap(num_bytes) - self._in_heap(before)
        self.peak_heap_bytes = max(self.peak_heap_bytes, self.heap_bytes)
        self._bytes[key] = num_bytes
        if key not in self._refs:
            self._refs[key] = weakref.ref(storage, partial(self._is_gone, key))

    def _is_gone(self, key: int, _: object) -> None:
        del self._refs[key]
        num_bytes = self._bytes.pop(key)
        if key in self._put_aside:
            self._put_aside.remove(key)
            self._gone_aside_bytes += num_bytes
            return
        self.live_bytes -= num_bytes
        self.heap_bytes -= self._in_heap(num_bytes)
        self.given_bytes -= self._given.pop(key, 0)

    def _note_peak(self, temporary_bytes: int = 0) -> None:
        held = self.live_bytes + temporary_bytes
        self.peak_bytes = max(self.peak_bytes, held)
        self._peak_kept_bytes = max(self._peak_kept_bytes, held - self.given_bytes)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if asks_device(func, args):
            return args[0].device
        is_wrapper, kwargs = any(map(is_traceable_wrapper_subclass_type, types)), kwargs or {}
        if self.before is not None:
            self.before(func, args, kwargs)
        if is_wrapper:
            with _Inside(self):
                result = func(*args, **kwargs)
        else:
            result = self.counted(func, args, kwargs)
        if self.heard is not None:
            self.heard(func, args, kwargs, result)
        return result

    def counted(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation of plain tensors, and count what it makes."""
        result = func(*args, **kwargs)
        if type(result) is FakeTensor and result.layout is torch.strided:  # most are
            self._count(result.untyped_storage())
        else:
            self.count(result)
        self._note_peak(kernel_bytes(func, args, on_cpu=self._on_cpu))
        return result

    def _in_heap(self, num_bytes: int) -> int:
        return heap_bytes(num_bytes) if self._on_cpu else 0


class _Inside(UncompiledMode):
    """Counts what a tensor computes with those that it wraps."""

    def __init__(self, living: LivingBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._living = living

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # then it computes with what it wraps, and that is counted
        return self._living.counted(func, args, kwargs or {})
