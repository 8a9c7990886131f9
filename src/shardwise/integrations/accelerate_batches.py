"""Batches under Trainer and Accelerate: ranks along `tp`, `sp` and `pp` get the same batch, all others their own."""

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
from shardwise.integrations.plans import data_share

AXES = ("tp", "sp", "pp")
"""The axes along which ranks share a batch."""


def ranks_per_batch(plan: sw.Plan) -> int:
    """The number of ranks that get the same batch. Raises `ConfigError` for a mesh in which it is not given."""
    mesh = dict(plan.mesh or {})
    unknown = [axis for axis in AXES if mesh.get(axis, 1) < 1]
    if unknown:
        listed = ", ".join(f"{axis}: {count}" for axis, count in mesh.items())
        raise ConfigError(
            f"The mesh is {{{listed}}}, but how many ranks share a batch has to be given. Set the size of "
            f"{' and '.join(unknown)}, and let a data axis take the rest, such as {{dp: -1, {unknown[0]}: 2}}."
        )
    return math.prod(mesh.get(axis, 1) for axis in AXES)


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
    plan: sw.Plan
    ranks_per_batch = 1
    """The number of ranks that get the same batch: the product of the mesh's `tp`, `sp` and `pp`."""
    _counts_batches_once = False
    _reads_shares = False
    """Whether a rank's share of the batches counts as its number among processes."""

    @property
    def num_processes(self) -> int:
        """See accelerate."""
        return self._share(self._rank)[1] if self._reads_shares else int(super().num_processes)

    @property
    def process_index(self) -> int:
        """See accelerate."""
        return self._share(self._rank)[0] if self._reads_shares else self._rank

    @property
    def _rank(self) -> int:
        return int(super().process_index)

    def _share(self, rank: int) -> tuple[int, int]:
        return data_share(self.plan, rank, int(super().num_processes))

    def draw_alike(self, world: sw.World) -> None:
        """Let ranks that share batches go on with the random numbers of the first of them, from which collators may
        draw. All ranks call."""
        if self.ranks_per_batch > 1:
            states = world.exchange(torch.get_rng_state().numpy().tobytes(), "generators")
            own = self._share(self._rank)[0]
            first = next(state for rank, state in enumerate(states) if self._share(rank)[0] == own)
            torch.set_rng_state(torch.frombuffer(bytearray(first), dtype=torch.uint8))

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """See accelerate. Ranks along `tp`, `sp` and `pp` get the same batches."""
        is_read_by_one = self.dispatch_batches
        if is_read_by_one is None:
            is_read_by_one = isinstance(data_loader.dataset, torch.utils.data.IterableDataset)
        if self.ranks_per_batch > 1 and is_read_by_one:
            raise ConfigError(
                "With dispatch_batches, rank 0 reads all batches and sends a different one to each rank, but ranks "
                "along tp, sp and pp need the same one. Set dispatch_batches=False, so that each rank reads."
            )
        self._reads_shares = self.ranks_per_batch > 1
        try:
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        finally:
            self._reads_shares = False

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

    def gather_once(self, tensor: Any) -> Any:
        """As `gather`, but includes each batch once."""
        with self.counting_batches_once():
            return self.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """See accelerate. Includes each batch once."""
        if self.ranks_per_batch == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        if use_gather_object:
            raise ConfigError(
                "gather_for_metrics(use_gather_object=True) would count batches that ranks along tp, sp and pp "
                "share several times. Leave use_gather_object out."
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
        of_share = {self._share(rank)[0]: part for rank, part in reversed(list(enumerate(parts)))}
        return torch.cat([of_share[share] for share in range(len(of_share))])
