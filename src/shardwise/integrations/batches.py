"""Which ranks get the same batch of a library's data loaders: those along `tp` and `sp`; all others read their own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.accelerator import Accelerator as PlainAccelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply

import shardwise as sw
from shardwise.errors import ConfigError

_AXES = ("tp", "sp")
"""Along these ranks share in a batch."""
_THEIR_AXIS = "tp"
"""What Accelerate calls such an axis."""


def copies_of_a_batch(plan: sw.Plan) -> int:
    """How many ranks, neighbours, are to be given the same batch.

    Raises `ConfigError` for a mesh in which these are no neighbours, or not counted.
    """
    mesh = dict(plan.mesh or {})
    sharing = [axis for axis in _AXES if mesh.get(axis, 1) != 1]
    if not sharing:
        return 1
    first = min(list(mesh).index(axis) for axis in sharing)
    others = [axis for axis in list(mesh)[first:] if axis not in _AXES and mesh[axis] != 1]
    if others or any(mesh[axis] < 1 for axis in sharing):
        listed = ", ".join(f"{axis}: {count}" for axis, count in mesh.items())
        good = ", ".join(f"{axis}: 2" for axis in sharing)
        raise ConfigError(
            f"The mesh is {{{listed}}}, and data is dealt to neighbours: say the size of {' and '.join(sharing)}, and "
            f"put {'them' if len(sharing) > 1 else 'it'} last, such as {{dp: -1, {good}}}."
        )
    return math.prod(mesh[axis] for axis in sharing)


class DealtMesh:
    """What data loaders of Accelerate ask of a device mesh: how many neighbours get the same batch."""

    mesh_dim_names = ("dp_shard", _THEIR_AXIS)

    def __init__(self, num_ranks: int, copies: int) -> None:
        self._sizes = {"dp_shard": num_ranks // copies, _THEIR_AXIS: copies}

    def __getitem__(self, name: str) -> _Axis:
        return _Axis(self._sizes[name])


class _Axis:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


class PerReplica(AcceleratedScheduler):
    """Goes on as often as there are batches in a step: Accelerate's own counts all ranks."""

    def __init__(self, theirs: AcceleratedScheduler, num_batches: int) -> None:
        super().__init__(theirs.scheduler, theirs.optimizers, theirs.step_with_optimizer, split_batches=True)
        self._num_batches = num_batches

    def step(self, *args: Any, **kwargs: Any) -> None:
        is_end = self.gradient_state.sync_gradients and self.step_with_optimizer
        for _ in range(self._num_batches if is_end else 1):
            total = getattr(self.scheduler, "total_steps", None)
            if not is_end or total is None or self.scheduler._step_count <= total:
                super().step(*args, **kwargs)


class DealingAccelerator(PlainAccelerator):
    """Accelerate's `Accelerator`, in whose loaders, schedulers and metrics `copies_of_a_batch` ranks count as one."""

    _schedulers: list[Any]
    copies_of_a_batch = 1
    """Ranks that are given the same batch: the product of the mesh's `tp` and `sp`."""
    _counts_batches_once = False

    def _prepare_device_mesh(self) -> Any:
        if self.copies_of_a_batch == 1:
            return super()._prepare_device_mesh()
        return DealtMesh(self.num_processes, self.copies_of_a_batch)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """See accelerate. Ranks along `tp` and `sp` are given the same batches."""
        is_read_by_one = self.dispatch_batches
        if is_read_by_one is None:
            is_read_by_one = isinstance(data_loader.dataset, torch.utils.data.IterableDataset)
        if self.copies_of_a_batch > 1 and is_read_by_one:
            raise ConfigError(
                "Rank 0 would read all batches and deal them out to single ranks, and those along tp and sp need "
                "the same one. Set dispatch_batches=False, and every rank reads."
            )
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """See accelerate. It goes on as often as there are batches in a step."""
        prepared = super().prepare_scheduler(scheduler)
        if self.copies_of_a_batch == 1 or self.split_batches or isinstance(prepared, PerReplica):
            return prepared
        own = PerReplica(prepared, self.num_processes // self.copies_of_a_batch)
        self._schedulers[self._schedulers.index(prepared)] = own
        return own

    def gather(self, tensor: Any) -> Any:
        """See accelerate: of all ranks, those that have the same batch too."""
        gathered = super().gather(tensor)
        if not self._counts_batches_once:
            return gathered
        return recursively_apply(self._once, gathered)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """See accelerate: each batch once."""
        if self.copies_of_a_batch == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        if use_gather_object:
            raise ConfigError(
                "gather_for_metrics(use_gather_object=True) counts batches of ranks along tp and sp again."
            )
        with self.counting_batches_once():
            return super().gather_for_metrics(input_data)

    @contextmanager
    def counting_batches_once(self) -> Iterator[None]:
        """Inside, `gather` has each batch once, although several ranks are given it."""
        before, self._counts_batches_once = self._counts_batches_once, self.copies_of_a_batch > 1
        try:
            yield
        finally:
            self._counts_batches_once = before

    def _once(self, gathered: torch.Tensor) -> torch.Tensor:
        parts = gathered.chunk(self.num_processes)
        return torch.cat(parts[:: self.copies_of_a_batch])
