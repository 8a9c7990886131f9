"""Batches under Trainer and Accelerate: ranks along `tp`, `sp` and `pp` get the same batch, all others their own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.accelerator import Accelerator as PlainAccelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import operations, recursively_apply

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

    @property
    def num_processes(self) -> int:
        """See accelerate."""
        return self._share(self._rank)[1] if self._counts_batches_once else self._num_ranks

    @property
    def process_index(self) -> int:
        """See accelerate."""
        return self._share(self._rank)[0] if self._counts_batches_once else self._rank

    @property
    def _rank(self) -> int:
        return int(super().process_index)

    @property
    def _num_ranks(self) -> int:
        return int(super().num_processes)

    def _share(self, rank: int) -> tuple[int, int]:
        return data_share(self.plan, rank, self._num_ranks)

    def _first_ranks(self) -> list[int]:
        """For each distinct batch, the first of the ranks that have it."""
        shares = [self._share(rank)[0] for rank in range(self._num_ranks)]
        return [shares.index(share) for share in range(max(shares) + 1)]

    def _first_peer(self) -> int:
        """The first of the ranks that have this rank's batch."""
        return self._first_ranks()[self._share(self._rank)[0]]

    def draw_alike(self, world: sw.World) -> None:
        """Let ranks that share batches go on with the same random numbers, which collators may draw: those of the rank
        that would have the batch if each had its own. All ranks call."""
        if self.ranks_per_batch > 1:
            states = world.exchange(torch.get_rng_state().numpy().tobytes(), "generators")
            own = states[self._share(self._rank)[0]]
            torch.set_rng_state(torch.frombuffer(bytearray(own), dtype=torch.uint8))

    def of_first_peer(self, value: Any, world: sw.World) -> Any:
        """`value`, plain data, of the first of the ranks that have this rank's batch. All ranks call."""
        return json.loads(world.exchange(json.dumps(value, default=list).encode(), "samples")[self._first_peer()])

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
        with self.counting_batches_once():
            return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """See accelerate. The scheduler steps once per distinct batch of a step."""
        prepared = super().prepare_scheduler(scheduler)
        if self.ranks_per_batch == 1 or self.split_batches or isinstance(prepared, PerBatchScheduler):
            return prepared
        own = PerBatchScheduler(prepared, self.num_processes // self.ranks_per_batch)
        self._schedulers[self._schedulers.index(prepared)] = own
        return own

    def gather_once(self, tensor: Any) -> Any:
        """As `gather`, which includes all ranks, but includes each batch once."""
        with self.counting_batches_once():
            return self.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """See accelerate. Includes each batch once."""
        with self.counting_batches_once():
            return super().gather_for_metrics(input_data, use_gather_object)

    @contextmanager
    def counting_batches_once(self) -> Iterator[None]:
        """Inside, ranks that share a batch count as one process: in `num_processes` and `process_index`, and in what
        `gather` and `gather_object` of accelerate return, also to code that has imported these functions."""
        if self.ranks_per_batch == 1 or self._counts_batches_once:
            yield
            return
        self._counts_batches_once = True
        try:
            with _gathering_from(self._first_ranks(), self._num_ranks):
                yield
        finally:
            self._counts_batches_once = False


@contextmanager
def _gathering_from(ranks: Sequence[int], num_ranks: int) -> Iterator[None]:
    """Inside, `gather` and `gather_object` of accelerate return what is from `ranks`; all `num_ranks` call.

    Others have imported these functions by value, so what they call is replaced.
    """
    gather, gather_object = operations._gpu_gather, operations._gpu_gather_object

    def from_ranks(gathered: torch.Tensor) -> torch.Tensor:
        parts = gathered.chunk(num_ranks)
        return torch.cat([parts[rank] for rank in ranks])

    def objects_from_ranks(given: Any) -> Any:
        parts = gather_object([given])
        if len(ranks) == 1:  # as in one process, where accelerate returns what it is given, of any type
            return parts[ranks[0]]
        return [one for rank in ranks for one in parts[rank]]

    operations._gpu_gather = lambda given: recursively_apply(from_ranks, gather(given))
    operations._gpu_gather_object = objects_from_ranks
    try:
        yield
    finally:
        operations._gpu_gather, operations._gpu_gather_object = gather, gather_object
