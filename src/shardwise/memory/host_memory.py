"""The host's memory beside one device: the rows of the table on the tier `host`, and copies to and from it.

[Note: copies beside the computation] On an accelerator a copy runs on its own stream, one per direction, after
everything that was queued on the current stream. `wait` makes the current stream wait for it, `land` the host: what was
evicted may be read on the host only after `land`, and the source of a fetch may be overwritten only after it. Memory
for both is pinned, so that the host does not wait for a copy to begin. On a CPU "device" and "host" are the same
memory, in two pools that are counted separately, and a copy is done at once.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shardwise.system.devices import Accelerator, Event, RankDevice, Stream
from shardwise.system.disk import pages
from shardwise.system.telemetry import ByteMeter

Tensor = torch.Tensor


class Copy(Protocol):
    """A started copy between tiers."""

    def wait(self) -> None:
        """Order what is computed from here on after it."""
        ...

    def land(self) -> None:
        """Block the host until it is done. May be called twice."""
        ...


class Copied:
    """A copy that is done already."""

    def wait(self) -> None:
        return

    def land(self) -> None:
        return


class _Streamed:
    """A copy on a stream of its own."""

    def __init__(self, accelerator: Accelerator, event: Event) -> None:
        self._accelerator = accelerator
        self._event: Event | None = event

    def wait(self) -> None:
        if self._event is not None:
            self._accelerator.current_stream().wait_event(self._event)

    def land(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None


class HostMemory:
    """Reusable buffers on the host for one rank, and copies between them and its device.

    It owns all pinned memory for rows on the host. `meter` counts what it has allocated, as `buffers`.
    """

    def __init__(self, meter: ByteMeter, device: RankDevice | None) -> None:
        """`device` is the rank's, if tensors lie there; `None` if they lie in the host's own memory."""
        self._meter = meter.on("host")
        self._device = device
        self._accelerator = device.accelerator if device is not None else None
        self._streams: dict[str, Stream] = {}
        self._free: dict[int, list[tuple[Tensor, Copy]]] = {}
        """Free pieces by their bytes, each with the last copy to read it."""

    @property
    def is_beside_a_device(self) -> bool:
        """Whether tensors lie in another memory, from and to which copies go."""
        return self._accelerator is not None

    # -- memory -----------------------------------------------------------------------------------------

    def zeros(self, numel: int, dtype: torch.dtype, kind: str) -> Tensor:
        """Permanent memory for a row, counted as `kind`."""
        tensor = self._allocate(numel * dtype.itemsize).view(dtype).zero_()
        self._meter.hold(kind, tensor.nbytes)
        return tensor

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of undefined content, to be returned by `give_back`."""
        num_bytes = numel * dtype.itemsize
        free = self._free.get(num_bytes)
        if free:
            memory, last = free.pop()
            last.land()
            return memory.view(dtype)
        self._meter.hold("buffers", num_bytes)
        return self._allocate(num_bytes).view(dtype)

    def give_back(self, tensor: Tensor, last: Copy | None = None) -> None:
        """Return `tensor`, which came from `buffer`; `last` is a copy that may still read it."""
        self._free.setdefault(tensor.nbytes, []).append((tensor.view(torch.uint8), last or Copied()))

    def _allocate(self, num_bytes: int) -> Tensor:
        if self._accelerator is not None and num_bytes:
            return pages(num_bytes, self._device)[:num_bytes]
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    # -- copies -----------------------------------------------------------------------------------------

    def evict(self, out: Tensor, source: Tensor) -> Copy:
        """Start to copy `source`, on the device, into `out`, on the host. Neither may be touched before `wait`."""
        return self._start("evict", out, source)

    def fetch(self, out: Tensor, source: Tensor) -> Copy:
        """Start to copy `source`, on the host, into `out`, on the device. Neither may be touched before `wait`, and
        `source` must not be written before `land`."""
        return self._start("fetch", out, source)

    def _start(self, way: str, out: Tensor, source: Tensor) -> Copy:
        accelerator = self._accelerator
        if accelerator is None:
            out.copy_(source)
            return Copied()
        stream = self._streams.get(way)
        if stream is None:
            stream = self._streams[way] = accelerator.new_stream()
        stream.wait_stream(accelerator.current_stream())
        with accelerator.on(stream):
            accelerator.copy(out, source)
            event = accelerator.event()
            event.record(stream)
        return _Streamed(accelerator, event)
