"""Master weights and optimizer states on a disk: updated slice by slice, never whole in memory.

[Note: slices on a disk] All that one slice needs lies together in the file: its masters, then each of its states, on
pages. So a slice is one stretch to read and one to write, and while one is updated the next is read and the last one is
written, through three buffers. Any elementwise optimizer goes this way: a twin of it, with the same class and settings,
takes a step for each slice, which finds the slice's states in the twin's `state`. What is a number for all elements
(Adam's count of steps) is the same for each slice, and kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError, StateError
from shardwise.optim.cooperative import Cooperative
from shardwise.optim.host_adam import AdamTensors, HostAdam
from shardwise.optim.probe import twin_of
from shardwise.program import SMALL_NUMEL
from shardwise.tiers import BufferPool, IoQueue, TierFolder, layout, walk

Tensor = torch.Tensor
SLICE_NUMEL = 2**20
"""Elements. With AdamW a slice is 12 MiB on the disk, so a queue of 8 blocks of 1 MiB is kept busy."""
PARAM = "param"
"""The name of the masters beside those of the states."""
TORCHS_ADAMS = (torch.optim.Adam, torch.optim.AdamW)


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

    def update(self, pool: BufferPool, work: Callable[[int, dict[str, Tensor]], None], num_buffers: int = 3) -> None:
        """For each slice `work(index, views)`, which changes them in place, between a read and a write."""
        buffers = [pool.take() for _ in range(min(num_buffers, max(1, self.num_slices)))]
        parts = [buffer[: self.stride_bytes] for buffer in buffers]
        try:
            walk(
                self.num_slices,
                read=lambda index, buffer: self._file.read(index * self.stride_bytes, parts[buffer]),
                work=lambda index, buffer: work(index, self.views(index, parts[buffer])),
                write=lambda index, buffer: self._file.write(index * self.stride_bytes, parts[buffer]),
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


class DiskStates:
    """Masters and states of one flat buffer, on a disk, and the optimizer's step over them. `close()` it.

    `optimizer` is any elementwise one, which is only read: its class, and the settings of `group` at each step. The
    numbers are those that it computes on the whole buffer; torch's Adam and AdamW go through `adam` if it is given, and
    then have the bits of `fused=True`.
    """

    def __init__(
        self,
        folder: TierFolder,
        name: str,
        master: Tensor,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        queue: IoQueue,
        *,
        slice_numel: int = SLICE_NUMEL,
    ) -> None:
        """`master`, flat and in fp32, is written to the disk, and is the caller's again.

        Raises `ModelError` for an optimizer whose states are not of the parameter's shape and dtype.
        """
        self._optimizer = optimizer
        dtypes = {PARAM: master.dtype} | state_dtypes(optimizer, group, master.dtype)
        self.file = SlicedFile(folder, name, dtypes, master.numel(), queue, slice_numel=slice_numel)
        self.scalars: dict[str, Any] = {}
        self.has_states = False
        self.put(PARAM, master)

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk."""
        return self.file.num_bytes

    @property
    def keys(self) -> list[str]:
        """`param`, and the names of the states that have its shape."""
        return list(self.file.dtypes)

    @property
    def buffer_bytes(self) -> int:
        """What each of a pool's buffers has to hold, of which a step takes three."""
        return self.file.stride_bytes

    @torch.no_grad()
    def step(
        self,
        grad: Tensor,
        group: Mapping[str, Any],
        pool: BufferPool,
        *,
        out: Tensor | None = None,
        scale: float = 1.0,
        adam: HostAdam | None = None,
    ) -> None:
        """One step with `grad`, flat, in host memory and of any dtype, times `scale`; `out` is given the parameters.

        If a disk fails in the middle (`TierError`), some slices are updated and others not: go on from a checkpoint.
        """
        before = dict(self.scalars)
        is_adam = adam is not None and type(self._optimizer) in TORCHS_ADAMS

        def work(index: int, views: dict[str, Tensor]) -> None:
            start, stop = self.file.bounds(index)
            part = None if out is None else out[start:stop]
            if is_adam and adam is not None:
                self._adam_step(adam, views, grad[start:stop], part, group, before, scale)
            else:
                self._twin_step(views, grad[start:stop], group, before, scale)
                if part is not None:
                    part.copy_(views[PARAM])

        self.file.update(pool, work)
        self.has_states = True

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements of the masters or of a state, copied into memory."""
        return self.file.get(key, start, stop)

    def put(self, key: str, value: Tensor, start: int = 0) -> None:
        """Replace elements from `start` on. What is put before the first step is what that begins with."""
        self.file.put(key, value, start)
        self.has_states |= key != PARAM

    def close(self) -> None:
        self.file.close()

    def _adam_step(
        self,
        adam: HostAdam,
        views: dict[str, Tensor],
        grad: Tensor,
        out: Tensor | None,
        group: Mapping[str, Any],
        before: Mapping[str, Any],
        scale: float,
    ) -> None:
        step = int(before.get("step", 0)) + 1
        if not self.has_states:
            for key, view in views.items():
                if key != PARAM:
                    view.zero_()
        moments = views["exp_avg"], views["exp_avg_sq"], views.get("max_exp_avg_sq")
        adam.update([AdamTensors(views[PARAM], grad, *moments, out)], group, step=step, scale=scale)
        self.scalars = {"step": torch.tensor(float(step))}

    def _twin_step(
        self,
        views: dict[str, Tensor],
        grad: Tensor,
        group: Mapping[str, Any],
        before: Mapping[str, Any],
        scale: float,
    ) -> None:
        param = nn.Parameter(views[PARAM])
        wide = grad.to(param.dtype)
        param.grad = wide if scale == 1 else wide * scale
        twin = twin_of(self._optimizer, group, [param])
        if self.has_states:
            numbers = {key: value.clone() if isinstance(value, Tensor) else value for key, value in before.items()}
            twin.state[param] = numbers | {key: view for key, view in views.items() if key != PARAM}
        type(twin).step(twin)
        state = twin.state[param]
        for key, view in views.items():
            kept = state.get(key)
            if key != PARAM and isinstance(kept, Tensor) and kept.data_ptr() != view.data_ptr():
                view.copy_(kept)
        self.scalars = {key: value for key, value in state.items() if key not in views}


def state_dtypes(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """The states that `optimizer` keeps in the shape of a parameter of `dtype`, by name.

    Raises `ModelError` for one that keeps others, or looks at more than each element.
    """
    name = type(optimizer).__name__
    param = nn.Parameter(torch.linspace(-1, 1, 2 * SMALL_NUMEL, dtype=dtype))  # enough to be kept narrow, if any is
    if isinstance(optimizer, Cooperative):
        update = optimizer.update_of(param, group)
        if update.needs_norm or update.matrix:
            raise ModelError(f"{name} looks at whole parameters, and on a disk they are updated slice by slice.")
    twin = twin_of(optimizer, group, [param])
    param.grad = torch.ones_like(param)
    type(twin).step(twin)
    kept = {key: value for key, value in twin.state[param].items() if isinstance(value, Tensor) and value.dim()}
    for key, value in kept.items():
        if value.shape != param.shape or value.dtype != dtype:
            raise ModelError(
                f"{name} keeps {key} as {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)} for a "
                f"parameter of {param.numel()} elements. States on a disk have the parameter's shape and dtype: "
                f"use state_dtype='fp32'."
            )
    return {key: value.dtype for key, value in kept.items()}
