"""Several tensors of equal length in one file, cut into slices that are read, updated and written in turn.

[Note: slices on a disk] Everything that one slice needs lies together in the file, each tensor's part page-aligned. So
a slice takes one read and one write. While one slice is updated, the next is read and the previous one written, with
three buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial

import torch

from shardwise.errors import StateError
from shardwise.system.disk.align import layout
from shardwise.system.disk.io_queue import IoQueue
from shardwise.system.disk.page_buffers import BufferPool
from shardwise.system.disk.pending import Pending
from shardwise.system.disk.slices import NUM_BUFFERS, walk
from shardwise.system.disk.tier_folder import TierFolder
from shardwise.system.telemetry import ON_THE_WAY, Timeline

Tensor = torch.Tensor
Move = Callable[[int, Tensor], Pending]
"""Starts a read or a write, given the first byte and the buffer."""
SLICE_NUMEL = 2**20
"""In elements. With AdamW a slice is 12 MiB on disk, which keeps a queue of 8 blocks of 1 MiB busy."""


class SlicedFile:
    """Named tensors of equal length in one file, all cut at the same elements; the parts of a slice lie together."""

    def __init__(
        self,
        folder: TierFolder,
        name: str,
        dtypes: Mapping[str, torch.dtype],
        numel: int,
        queue: IoQueue,
        *,
        slice_numel: int,
    ) -> None:
        """`dtypes` gives the dtype of each tensor, each of `numel` elements. Raises `TierError` if there is no room."""
        self.name = name
        self.dtypes = dict(dtypes)
        self.numel = numel
        self.slice_numel = min(slice_numel, max(1, numel))
        self.num_slices = -(-numel // self.slice_numel)
        regions = layout({key: self.slice_numel * dtype.itemsize for key, dtype in dtypes.items()})
        self._offsets = {key: region.offset for key, region in regions.items()}
        self.stride_bytes = max((region.stop for region in regions.values()), default=0)
        self._file = folder.create(name, self.num_slices * self.stride_bytes, queue)

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return self._file.num_bytes

    def bounds(self, index: int) -> tuple[int, int]:
        """The first element of slice `index`, and the one after its last."""
        return index * self.slice_numel, min(self.numel, (index + 1) * self.slice_numel)

    def views(self, index: int, buffer: Tensor) -> dict[str, Tensor]:
        """Views of slice `index` in a buffer of `stride_bytes`, by name."""
        start, stop = self.bounds(index)
        found = {}
        for key, dtype in self.dtypes.items():
            offset = self._offsets[key]
            found[key] = buffer[offset : offset + (stop - start) * dtype.itemsize].view(dtype)
        return found

    def update(
        self, pool: BufferPool, work: Callable[[int, dict[str, Tensor]], None], timeline: Timeline | None = None
    ) -> None:
        """Read each slice, call `work(index, views)`, which updates the views in place, and write the slice back.

        `timeline` records each transfer and update. Takes three buffers from the pool, or fewer if there are fewer
        slices.
        """
        spans = Timeline() if timeline is None else timeline
        buffers = [pool.take() for _ in range(min(NUM_BUFFERS, max(1, self.num_slices)))]
        parts = [buffer[: self.stride_bytes] for buffer in buffers]

        def move(verb: str, start: Move, index: int, buffer: int) -> Pending:
            name = f"{verb} {self.name} slice {index}"
            spans.begin(ON_THE_WAY, name, bytes=self.stride_bytes)
            pending = start(index * self.stride_bytes, parts[buffer])
            if spans.is_on:
                pending.when_done(lambda: spans.end(ON_THE_WAY, name))
            return pending

        def update(index: int, buffer: int) -> None:
            with spans.span(f"update {self.name} slice {index}") if spans.is_on else nullcontext():
                work(index, self.views(index, parts[buffer]))

        try:
            walk(
                self.num_slices,
                read=partial(move, "read", self._file.read),
                work=update,
                write=partial(move, "write", self._file.write),
                num_buffers=len(buffers),
            )
        finally:
            for buffer in buffers:
                pool.give_back(buffer)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements `start` to `stop` of one tensor, copied into memory."""
        dtype = self.dtypes[key]
        parts = [
            self._file.get(place, place + (last - first) * dtype.itemsize)
            for first, last, place in self._places(key, start, self.numel if stop is None else stop)
        ]
        return torch.cat(parts).view(dtype) if parts else torch.empty(0, dtype=dtype, device="cpu")

    def copy_to(self, key: str, target: int, at: int) -> None:
        """Copy one tensor, contiguous, into another open file from byte `at` on, without bringing it into memory."""
        itemsize = self.dtypes[key].itemsize
        for first, last, place in self._places(key, 0, self.numel):
            self._file.copy_to(target, at + first * itemsize, place, place + (last - first) * itemsize)

    def put(self, key: str, value: Tensor, start: int = 0) -> None:
        """Overwrite the elements from `start` on."""
        flat = value.detach().reshape(-1).to("cpu", self.dtypes[key])
        for first, last, place in self._places(key, start, start + flat.numel()):
            self._file.put(place, flat[first - start : last - start].contiguous().view(torch.uint8))

    def close(self) -> None:
        self._file.close()

    def _places(self, key: str, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Elements `start` to `stop`, slice by slice: first, last, and the byte of the file where they start."""
        if not 0 <= start <= stop <= self.numel:
            raise StateError(f"Elements {start} to {stop} of {key} were asked for; it has {self.numel}.")
        places = []
        while start < stop:
            index, within = divmod(start, self.slice_numel)
            end = min(stop, self.bounds(index)[1])
            offset = self._offsets[key] + within * self.dtypes[key].itemsize
            places.append((start, end, index * self.stride_bytes + offset))
            start = end
        return places
