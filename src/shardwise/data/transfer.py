"""Batches on their way to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from shardwise.devices import WITHOUT_STREAMS, RankDevice, Stream, TorchAccelerator


class Transfer:
    """From the host to one device.

    [Note: batches beside the computation] What is pinned is copied under a stream of its own: under the one that
    computes, the copy would only begin when all that was queued before it has been done. The one that computes waits
    for it, and the allocator is told that it will read what lies in memory of the other's.
    """

    def __init__(self, device: RankDevice) -> None:
        self._device = device
        self._stream: Stream | None = None

    @classmethod
    def to(cls, device: torch.device | str | RankDevice) -> Transfer:
        """A device without a number is the current one of this thread, which a world has made the rank's own."""
        if isinstance(device, RankDevice):
            return cls(device)
        wanted, accelerator = torch.device(device), TorchAccelerator.found()
        if accelerator is None or wanted.type != accelerator.kind:
            return cls(RankDevice(wanted))
        index: int | None = wanted.index
        return cls(RankDevice.of(accelerator, accelerator.current_index() if index is None else index))

    @property
    def leads_off_the_host(self) -> bool:
        """Whether pinning is of use."""
        return self.has_accelerator or self._device.device.type not in WITHOUT_STREAMS

    @property
    def has_accelerator(self) -> bool:
        """Whether the device is there."""
        return self._device.accelerator is not None

    def pinned(self, batch: Any) -> Any:
        """The batch in page-locked memory, from which a device copies while the host goes on. From any thread."""
        with self._device.here():
            return on_tensors(batch, Tensor.pin_memory)

    def moved(self, batch: Any) -> Any:
        """The batch on the device, for the current stream to read. Of what is pinned the host does not wait."""
        accelerator = self._device.accelerator
        if accelerator is None:
            return on_tensors(batch, self._copied)
        with self._device.here():
            if self._stream is None:
                self._stream = accelerator.new_stream()
            reader = accelerator.current_stream()
            with accelerator.on(self._stream):
                there = on_tensors(batch, self._copied)
            reader.wait_stream(self._stream)
            on_tensors(there, lambda tensor: accelerator.keep_for(tensor, reader))
        return there

    def _copied(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device.device, non_blocking=tensor.is_pinned())


def on_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tuples, lists, dataclasses and mappings around changed tensors; anything else stays as it is."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)  # of its own class: a BatchEncoding of transformers stays one
        changed.update({key: on_tensors(value, change) for key, value in batch.items()})
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(on_tensors(value, change) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(on_tensors(value, change) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: on_tensors(getattr(batch, name), change) for name in fields})
    return batch
