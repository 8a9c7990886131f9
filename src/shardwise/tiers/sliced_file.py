"""Several tensors of one length in one file, cut into slices that are read, changed and written in turn.

[Note: slices on a disk] All that one slice needs lies together in the file, each tensor's part on pages of its own. So
a slice is one stretch to read and one to write, and while one is worked on the next is read and the last one is
written, through three buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial

import torch

from shardwise.errors import StateError
from shardwise.telemetry import ON_THE_WAY, Timeline
from shardwise.tiers.align import layout
from shardwise.tiers.buffers import BufferPool
from shardwise.tiers.folder import TierFolder
from shardwise.tiers.io_queue import IoQueue
from shardwise.tiers.pending import Pending
from shardwise.tiers.slices import NUM_BUFFERS, walk

Tensor = torch.Tensor
Move = Callable[[int, Tensor], Pending]
"""Starts a read or a write: the byte where it begins, and the buffer."""
SLICE_NUMEL = 2**20
"""Elements. With AdamW a slice is 12 MiB on the disk, so a queue of 8 blocks of 1 MiB is kept busy."""


class SlicedFile:
    """Tensors of one length and several names in one file, cut alike into slices that lie together."""

    def __init__(
        self,
        folder: TierFolder,
        name: str,
        dtypes: Mapping[str, torch.dtype],
        numel: int,
        queue: IoQueue,
        *,
        slice_numel: int = SLICE_NUMEL,
        checksums: bool = False,
    ) -> None:
        """Each of `dtypes` has `numel` elements. Raises `TierError` where there is no room."""
        self.name = name
        self.dtypes = dict(dtypes)
        self.numel = numel
        self.slice_numel = min(slice_numel, max(1, numel))
        self.num_slices = -(-numel // self.slice_numel)
        regions = layout({key: self.slice_numel * dtype.itemsize for key, dtype in dtypes.items()})
        self._offsets = {key: region.offset for key, region in regions.items()}
        self.stride_bytes = max((region.stop for region in regions.values()), default=0)
        self._file = folder.create(name, self.num_slices * self.stride_bytes, queue, checksums=checksums)

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk."""
        return self._file.num_bytes

    def bounds(self, index: int) -> tuple[int, int]:
        """The elements of slice `index`."""
        return index * self.slice_numel, min(self.numel, (index + 1) * self.slice_numel)

    def views(self, index: int, buffer: Tensor) -> dict[str, Tensor]:
        """What a buffer of `stride_bytes` holds of slice `index`, by name."""
        start, stop = self.bounds(index)
        found = {}
        for key, dtype in self.dtypes.items():
            offset = self._offsets[key]
            found[key] = buffer[offset : offset + (stop - start) * dtype.itemsize].view(dtype)
        return found

    def update(
        self, pool: BufferPool, work: Callable[[int, dict[str, Tensor]], None], timeline: Timeline | None = None
    ) -> None:
        """For each slice `work(index, views)`, which changes them in place, between a read and a write.

        `timeline` is told of each. Three buffers of the pool are used, fewer if there are fewer slices.
        """
        told = Timeline() if timeline is None else timeline
        buffers = [pool.take() for _ in range(min(NUM_BUFFERS, max(1, self.num_slices)))]
        parts = [buffer[: self.stride_bytes] for buffer in buffers]

        def move(verb: str, start: Move, index: int, buffer: int) -> Pending:
            name = f"{verb} {self.name} slice {index}"
            told.begin(ON_THE_WAY, name, bytes=self.stride_bytes)
            pending = start(index * self.stride_bytes, parts[buffer])
            if told.is_on:
                pending.when_done(lambda: told.end(ON_THE_WAY, name))
            return pending

        def update(index: int, buffer: int) -> None:
            with told.span(f"update {self.name} slice {index}") if told.is_on else nullcontext():
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
        return torch.cat(parts).view(dtype) if parts else torch.empty(0, dtype=dtype)

    def copy_to(self, key: str, target: int, at: int) -> None:
        """Copy one tensor into another open file from byte `at` on, as it would lie in memory, without being there."""
        itemsize = self.dtypes[key].itemsize
        for first, last, place in self._places(key, 0, self.numel):
            self._file.copy_to(target, at + first * itemsize, place, place + (last - first) * itemsize)

    def put(self, key: str, value: Tensor, start: int = 0) -> None:
        """Replace elements from `start` on."""
        flat = value.detach().reshape(-1).to("cpu", self.dtypes[key])
        for first, last, place in self._places(key, start, start + flat.numel()):
            self._file.put(place, flat[first - start : last - start].contiguous().view(torch.uint8))

    def close(self) -> None:
        self._file.close()

    def _places(self, key: str, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Elements `start` to `stop`, slice by slice: first, last, and the byte of the file where they begin."""
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
