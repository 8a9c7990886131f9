"""Torch's process group functions, as far as collectives on devices need them: one small interface.

Tests replace it by one that acts at once or at the last moment, where a device acts at some time in between.

That tests the order of calls, and nothing about a driver, the time of a kernel, or NCCL itself.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwise.comm import compat

Tensor = torch.Tensor
Ranks = tuple[int, ...]
ProcessGroup = Any
"""Whatever `ProcessGroups` creates; opaque to all other code."""


class TorchWork(Protocol):
    """Work queued on a device."""

    def wait(self) -> object:
        """Make the current stream, not the host, wait for it. Raises `RuntimeError`."""
        ...


class ProcessGroups(Protocol):
    """Tensors are on the rank's device; queued work starts after everything queued on the current stream."""

    backend: str
    """Torch's name of it: `nccl`, `xccl`, `hccl`."""

    @property
    def can_split(self) -> bool:
        """Whether `split` works; the same on all ranks."""
        ...

    def world(self) -> ProcessGroup:
        """The group of all ranks."""
        ...

    def new_group(self, ranks: Ranks, *, is_urgent: bool) -> ProcessGroup:
        """A group of `ranks`. All ranks of the world call, with the same ranks and in the same order of calls."""
        ...

    def split(self, lines: Sequence[Ranks], *, is_urgent: bool) -> ProcessGroup:
        """The group of the line that this rank is on; each rank is on one. All ranks of the world call, with the same
        lines."""
        ...

    def all_gather(self, full: Tensor, own: Tensor, group: ProcessGroup) -> TorchWork: ...

    def all_gather_coalesced(self, fulls: Sequence[Tensor], owns: Sequence[Tensor], group: ProcessGroup) -> TorchWork:
        """Several all-gathers, of any dtypes, launched as one."""
        ...

    def reduce_scatter(self, out: Tensor, source: Tensor, group: ProcessGroup) -> TorchWork: ...

    def all_reduce(self, tensor: Tensor, group: ProcessGroup) -> TorchWork: ...

    def all_to_all(self, arrived: Sequence[Tensor], sent: Sequence[Tensor], group: ProcessGroup) -> TorchWork: ...

    def swap_chunks(self, arrived: Tensor, sent: Tensor, group: ProcessGroup) -> TorchWork:
        """Send chunk i of `sent` to the rank with index i, and receive chunk i of `arrived` from it."""
        ...

    def broadcast(self, tensor: Tensor, root: int, group: ProcessGroup) -> TorchWork: ...

    def send(self, tensor: Tensor, rank: int, group: ProcessGroup) -> TorchWork: ...

    def receive(self, tensor: Tensor, rank: int, group: ProcessGroup) -> TorchWork: ...

    def abort(self, groups: Iterable[ProcessGroup]) -> None:
        """End everything queued on any of them, with undefined content. From any thread."""
        ...

    def destroy(self, group: ProcessGroup) -> None: ...


class TorchGroups:
    """`ProcessGroups` of `torch.distributed`, with any backend. Subclasses add what is particular to a backend."""

    def __init__(self, backend: str, device: torch.device, timeout_seconds: float, world: dist.ProcessGroup) -> None:
        """`world` has all ranks. Groups created here get the same `timeout_seconds`."""
        self.backend = backend
        self._device = device
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._world = world

    @property
    def can_split(self) -> bool:
        return compat.can_split(self._world, self._device)

    def world(self) -> dist.ProcessGroup:
        return self._world

    def new_group(self, ranks: Ranks, *, is_urgent: bool) -> ProcessGroup:
        options = self._options(is_urgent=is_urgent)
        return dist.new_group(list(ranks), timeout=self._timeout, backend=self.backend, pg_options=options)

    def split(self, lines: Sequence[Ranks], *, is_urgent: bool) -> ProcessGroup:
        return compat.split_group(
            self._world,
            [list(ranks) for ranks in lines],
            timeout=self._timeout,
            backend=f"{self._device.type}:{self.backend}",
            options=self._options(is_urgent=is_urgent),
        )

    def _options(self, *, is_urgent: bool) -> Any:  # noqa: ARG002
        """The backend's options for a group; `None` for its defaults."""
        return None

    def all_gather(self, full: Tensor, own: Tensor, group: ProcessGroup) -> TorchWork:
        return compat.all_gather_single(full, own, group)

    def all_gather_coalesced(self, fulls: Sequence[Tensor], owns: Sequence[Tensor], group: ProcessGroup) -> TorchWork:
        return compat.all_gather_coalesced(list(fulls), list(owns), group)

    def reduce_scatter(self, out: Tensor, source: Tensor, group: ProcessGroup) -> TorchWork:
        return compat.reduce_scatter_single(out, source, group)

    def all_reduce(self, tensor: Tensor, group: ProcessGroup) -> TorchWork:
        work: TorchWork = dist.all_reduce(tensor, group=group, async_op=True)
        return work

    def all_to_all(self, arrived: Sequence[Tensor], sent: Sequence[Tensor], group: ProcessGroup) -> TorchWork:
        work: TorchWork = dist.all_to_all(list(arrived), list(sent), group=group, async_op=True)
        return work

    def swap_chunks(self, arrived: Tensor, sent: Tensor, group: ProcessGroup) -> TorchWork:
        work: TorchWork = dist.all_to_all_single(arrived, sent, group=group, async_op=True)
        return work

    def broadcast(self, tensor: Tensor, root: int, group: ProcessGroup) -> TorchWork:
        work: TorchWork = dist.broadcast(tensor, root, group=group, async_op=True)
        return work

    def send(self, tensor: Tensor, rank: int, group: ProcessGroup) -> TorchWork:
        work = dist.isend(tensor, rank, group=group)
        assert work is not None  # this rank is in the group
        return work

    def receive(self, tensor: Tensor, rank: int, group: ProcessGroup) -> TorchWork:
        work = dist.irecv(tensor, rank, group=group)
        assert work is not None
        return work

    def abort(self, groups: Iterable[ProcessGroup]) -> None:
        for group in groups:
            group.abort()

    def destroy(self, group: ProcessGroup) -> None:
        dist.destroy_process_group(group)
