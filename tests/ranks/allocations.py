"""Counts the bytes that torch allocates: every new storage that an operation of this thread returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Inside `with`, records in `peak_bytes` the largest amount of newly allocated memory alive at once.

    Resizing older storages does not count, nor does memory that torch does not manage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if _is_tensor(tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if _is_tensor(tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        self.peak_bytes = max(self.peak_bytes, self._live_bytes())
        return result

    def _live_bytes(self) -> int:
        alive = {key: storage for key, ref in self._storages.items() if (storage := ref()) is not None}
        self._storages = {key: self._storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())


def profiled_peak(step: Callable[[], object]) -> int:
    """The largest amount that torch's CPU allocator had allocated at once during `step`, minus the amount at its start.

    This includes scratch memory of kernels. `step` is run once before, so that memory that torch keeps is not counted.
    """
    step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
