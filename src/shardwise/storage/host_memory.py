"""The host's memory beside one device: where rows of the table on the tier `host` lie, and copies to and from it.

[Note: copies beside the computation] On an accelerator a copy runs on a stream of its own, one for each way, behind all
that the current stream has been given. `wait` makes the current stream wait for it, `land` the host: what has been
evicted may be read there only then, and what is fetched from may be written to only then. Memory for both is pinned, so
that the host does not wait for a copy to begin. On a CPU "device" and "host" are both its memory, in two pools that are
counted apart, and a copy is done at once.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shardwise.devices import Accelerator, Event, RankDevice, Stream
from shardwise.telemetry import ByteMeter
from shardwise.tiers import pages

Tensor = torch.Tensor


class Copy(Protocol):
    """A copy between tiers that has been started."""

    def wait(self) -> None:
        """What is computed from here on comes after it."""
        ...

    def land(self) -> None:
        """Block the host until it is done. May be called twice."""
        ...


class Copied:
    """It is done already."""

    def wait(self) -> None:
        return

    def land(self) -> None:
        return


class _Streamed:
    """One on a stream of its own."""

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
    """Buffers on the host for one rank, which are used again, and copies between them and its device.

    The one owner of pinned memory for rows on the host. `meter` counts what it has taken, as `buffers`.
    """

    def __init__(self, meter: ByteMeter, device: RankDevice | None = None) -> None:
        """`device` is the rank's, if tensors lie there; `None`: they lie in the host's own memory."""
        self._meter = meter.on("host")
        self._device = device
        self._accelerator = device.accelerator if device is not None else None
        self._streams: dict[str, Stream] = {}
        self._free: dict[int, list[tuple[Tensor, Copy]]] = {}
        """Pieces in which nothing lies, by their bytes, each with the copy that was last to read it."""

    # -- memory -----------------------------------------------------------------------------------------

    def zeros(self, numel: int, dtype: torch.dtype, kind: str) -> Tensor:
        """Memory that stays, for a row: counted as `kind`."""
        tensor = self._taken(numel * dtype.itemsize).view(dtype).zero_()
        self._meter.hold(kind, tensor.nbytes)
        return tensor

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of undefined content, until `give_back`."""
        num_bytes = numel * dtype.itemsize
        free = self._free.get(num_bytes)
        if free:
            memory, last = free.pop()
            last.land()
            return memory.view(dtype)
        self._meter.hold("buffers", num_bytes)
        return self._taken(num_bytes).view(dtype)

    def give_back(self, tensor: Tensor, last: Copy | None = None) -> None:
        """Nothing lies in `tensor` any more, of `buffer`; `last` is a copy that may still read it."""
        self._free.setdefault(tensor.nbytes, []).append((tensor.view(torch.uint8), last or Copied()))

    def _taken(self, num_bytes: int) -> Tensor:
        if self._accelerator is not None and num_bytes:
            return pages(num_bytes, self._device)[:num_bytes]
        return torch.empty(num_bytes, dtype=torch.uint8)

    # -- copies -----------------------------------------------------------------------------------------

    def evict(self, out: Tensor, source: Tensor) -> Copy:
        """Start to copy `source`, on the device, into `out`, on the host. Neither may be touched before `wait`."""
        return self._started("evict", out, source)

    def fetch(self, out: Tensor, source: Tensor) -> Copy:
        """Start to copy `source`, on the host, into `out`, on the device. Neither may be touched before `wait`, and
        `source` not be written to before `land`."""
        return self._started("fetch", out, source)

    def _started(self, way: str, out: Tensor, source: Tensor) -> Copy:
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
