"""Master weights and optimizer states on a disk: updated slice by slice, never whole in memory.

Any elementwise optimizer goes this way: a twin of it, with the same class and settings, takes a step for each slice,
and finds the slice's states in its `state`. What is a number for all elements (Adam's count of steps) is the same for
each slice, and kept in memory. How slices lie and come: [Note: slices on a disk] in `tiers/sliced_file.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.optim.cooperative import Cooperative
from shardwise.optim.host_adam import AdamTensors, HostAdam
from shardwise.optim.probe import twin_of
from shardwise.program import SMALL_NUMEL
from shardwise.telemetry import Timeline
from shardwise.tiers import BufferPool, IoQueue, SlicedFile, TierFolder
from shardwise.tiers.sliced_file import SLICE_NUMEL

Tensor = torch.Tensor
PARAM = "param"
"""The name of the masters beside those of the states."""
TORCHS_ADAMS = (torch.optim.Adam, torch.optim.AdamW)


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

        On the meta device it only says how long it is: `put` it part by part, where it is never whole.

        Raises `ModelError` for an optimizer whose states are not of the parameter's shape and dtype.
        """
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
        timeline: Timeline | None = None,
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

        self.file.update(pool, work, timeline)
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
