"""Moves batches to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from shardwise.system.devices import WITHOUT_STREAMS, RankDevice, Stream, TorchAccelerator


class Transfer:
    """Copies from the host to one device.

    [Note: batches beside the computation] Pinned batches are copied on a separate stream: on the compute stream a copy
    would only begin after everything queued before it. The compute stream waits for the copy, and the allocator is told
    that it will read memory of the other stream.
    """

    def __init__(self, device: RankDevice) -> None:
        self._device = device
        self._stream: Stream | None = None

    @classmethod
    def to(cls, device: torch.device | str | RankDevice) -> Transfer:
        """A device without an index is the current one of this thread, which a world has set to the rank's own."""
        if isinstance(device, RankDevice):
            return cls(device)
        wanted, accelerator = torch.device(device), TorchAccelerator.found()
        if accelerator is None or wanted.type != accelerator.kind:
            return cls(RankDevice(wanted))
        index: int | None = wanted.index
        return cls(RankDevice.of(accelerator, accelerator.current_index() if index is None else index))

    @property
    def leads_off_the_host(self) -> bool:
        """Whether pinning is useful."""
        return self.has_accelerator or self._device.device.type not in WITHOUT_STREAMS

    @property
    def has_accelerator(self) -> bool:
        """Whether the device is an accelerator that torch has found."""
        return self._device.accelerator is not None

    def pinned(self, batch: Any) -> Any:
        """The batch in page-locked memory, for asynchronous copies. May be called from any thread."""
        with self._device.here():
            return on_tensors(batch, Tensor.pin_memory)

    def moved(self, batch: Any) -> Any:
        """The batch on the device, ready for the current stream. For pinned batches the host does not wait."""
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
    """The same tuples, lists, dataclasses and mappings with changed tensors; anything else is kept."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)  # keeps its class, such as BatchEncoding of transformers
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
