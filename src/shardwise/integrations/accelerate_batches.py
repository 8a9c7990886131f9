"""Batches under Trainer and Accelerate: ranks along `tp` and `sp` get the same batch, all others get their own."""

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
"""The axes along which ranks share a batch."""
_THEIR_AXIS = "tp"
"""Accelerate's name for such an axis."""


def ranks_per_batch(plan: sw.Plan) -> int:
    """The number of neighbouring ranks that get the same batch.

    Raises `ConfigError` for a mesh in which these ranks are not neighbours, or whose sizes are not given.
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
            f"The mesh is {{{listed}}}, but ranks that share a batch must be neighbours. Set the size of "
            f"{' and '.join(sharing)}, and put {'them' if len(sharing) > 1 else 'it'} last, such as {{dp: -1, {good}}}."
        )
    return math.prod(mesh[axis] for axis in sharing)


class BatchMesh:
    """A stand-in for a device mesh, from which Accelerate's data loaders read how many ranks share a batch."""

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


class PerBatchScheduler(AcceleratedScheduler):
    """Steps once per distinct batch of a step. Accelerate's own steps once per rank."""

    def __init__(self, theirs: AcceleratedScheduler, num_batches: int) -> None:
        super().__init__(theirs.scheduler, theirs.optimizers, theirs.step_with_optimizer, split_batches=True)
        self._num_batches = num_batches

    def step(self, *args: Any, **kwargs: Any) -> None:
        is_end = self.gradient_state.sync_gradients and self.step_with_optimizer
        for _ in range(self._num_batches if is_end else 1):
            total = getattr(self.scheduler, "total_steps", None)
            if not is_end or total is None or self.scheduler._step_count <= total:
                super().step(*args, **kwargs)


class BatchSharingAccelerator(PlainAccelerator):
    """The part of our `Accelerator` whose loaders, schedulers and metrics count `ranks_per_batch` ranks as one."""

    _schedulers: list[Any]
    ranks_per_batch = 1
    """The number of ranks that get the same batch: the product of the mesh's `tp` and `sp`."""
    _counts_batches_once = False

    def _prepare_device_mesh(self) -> Any:
        if self.ranks_per_batch == 1:
            return super()._prepare_device_mesh()
        return BatchMesh(self.num_processes, self.ranks_per_batch)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """See accelerate. Ranks along `tp` and `sp` get the same batches."""
        is_read_by_one = self.dispatch_batches
        if is_read_by_one is None:
            is_read_by_one = isinstance(data_loader.dataset, torch.utils.data.IterableDataset)
        if self.ranks_per_batch > 1 and is_read_by_one:
            raise ConfigError(
                "With dispatch_batches, rank 0 reads all batches and sends a different one to each rank, but ranks "
                "along tp and sp need the same one. Set dispatch_batches=False, so that each rank reads."
            )
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """See accelerate. The scheduler steps once per distinct batch of a step."""
        prepared = super().prepare_scheduler(scheduler)
        if self.ranks_per_batch == 1 or self.split_batches or isinstance(prepared, PerBatchScheduler):
            return prepared
        own = PerBatchScheduler(prepared, self.num_processes // self.ranks_per_batch)
        self._schedulers[self._schedulers.index(prepared)] = own
        return own

    def gather(self, tensor: Any) -> Any:
        """See accelerate. Includes all ranks, so a shared batch appears several times."""
        gathered = super().gather(tensor)
        if not self._counts_batches_once:
            return gathered
        return recursively_apply(self._once, gathered)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """See accelerate. Includes each batch once."""
        if self.ranks_per_batch == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        if use_gather_object:
            raise ConfigError(
                "gather_for_metrics(use_gather_object=True) would count batches that ranks along tp and sp share "
                "several times. Leave use_gather_object out."
            )
        with self.counting_batches_once():
            return super().gather_for_metrics(input_data)

    @contextmanager
    def counting_batches_once(self) -> Iterator[None]:
        """Inside, `gather` includes each batch once, although several ranks have it."""
        before, self._counts_batches_once = self._counts_batches_once, self.ranks_per_batch > 1
        try:
            yield
        finally:
            self._counts_batches_once = before

    def _once(self, gathered: torch.Tensor) -> torch.Tensor:
        parts = gathered.chunk(self.num_processes)
        return torch.cat(parts[:: self.ranks_per_batch])
