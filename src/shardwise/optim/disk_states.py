"""Master weights and optimizer states on a disk: updated slice by slice, never whole in memory.

This works for any elementwise optimizer: a twin of it, with the same class and settings, takes a step for each slice,
and finds the slice's states in its `state`. A number for all elements (Adam's step count) is the same for each slice,
and stays in memory. How slices are laid out and read: [Note: slices on a disk] in `system/disk/sliced_file.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwise.optim.disk_check import require_no_counts, state_dtypes
from shardwise.optim.host_adam import TORCHS_ADAMS, AdamTensors, HostAdam
from shardwise.optim.trials import twin_of
from shardwise.system.disk import BufferPool, IoQueue, SlicedFile, TierFolder
from shardwise.system.disk.sliced_file import SLICE_NUMEL
from shardwise.system.telemetry import Timeline

Tensor = torch.Tensor
PARAM = "param"
"""The name of the master weights beside those of the states."""


class DiskStates:
    """Master weights and states of one flat buffer, on a disk, and the optimizer's step over them. `close()` it.

    `optimizer` is any elementwise one, which is only read: its class, and the settings of `group` at each step. The
    numbers are those that it computes on the whole buffer; torch's Adam and AdamW use `adam` if it is given, and then
    have the bits of `fused=True`.
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
        """`master`, flat and in fp32, is written to the disk; the caller may reuse it.

        On the meta device it only gives the length: `put` the values part by part if they are never whole.

        Raises `ModelError` for an optimizer whose states do not have the parameter's shape and dtype, or that counts in
        its group.
        """
        require_no_counts(optimizer, group)
        self._optimizer = optimizer
        dtypes = {PARAM: master.dtype} | state_dtypes(optimizer, group, master.dtype)
        self.file = SlicedFile(folder, name, dtypes, master.numel(), queue, slice_numel=slice_numel)
        self.scalars: dict[str, Any] = {}
        self.has_states = False
        if master.device.type != "meta":
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
        """The size needed for each buffer of a pool; a step takes three."""
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
        timeline: Timeline | None = None,
    ) -> None:
        """One step with `grad`, flat, in host memory and of any dtype, times `scale`. The updated parameters are copied
        to `out`.

        If a disk fails in the middle (`TierError`), some slices are updated and others not: go on from a checkpoint.
        """
        before = dict(self.scalars)
        adam = adam if type(self._optimizer) in TORCHS_ADAMS else None

        def work(index: int, views: dict[str, Tensor]) -> None:
            start, stop = self.file.bounds(index)
            part = None if out is None else out[start:stop]
            if adam is not None:
                self._adam_step(adam, views, grad[start:stop], part, group, before, scale)
            else:
                self._twin_step(views, grad[start:stop], group, before, scale)
                if part is not None:
                    part.copy_(views[PARAM])

        self.file.update(pool, work, timeline)
        self.has_states = True

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements of the master weights or of a state, copied into memory."""
        return self.file.get(key, start, stop)

    def put(self, key: str, value: Tensor, start: int = 0) -> None:
        """Replace elements from `start` on. What is put before the first step is its initial state."""
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
        self.scalars = {"step": torch.tensor(float(step), device="cpu")}

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
