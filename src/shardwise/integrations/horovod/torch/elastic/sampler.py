"""A sampler that leaves out samples that have been processed in this epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from shardwise.integrations.horovod.basics import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides the unprocessed samples of an epoch among the ranks. Pass it to `TorchState(sampler=...)`.

    Call `record_batch` after each batch and `set_epoch` at the end of an epoch. `TorchState` then knows the processed
    samples of all ranks, including lost ones: committed samples are not repeated in this epoch, on any number of ranks.
    As in Horovod, all ranks get the same number of samples, so a few may be repeated to fill the last ones up.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    @property
    def processed_num(self) -> int:
        """How many samples of this epoch have been processed."""
        return len(self.processed_indices)

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`: no sample is processed, and the order is a new one."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that all ranks have processed their batch `batch_idx`, counted from the last `reset`.

        Every rank's batch must have `batch_size` samples. If not, call `record_indices` with this rank's samples.
        """
        size = batch_size * self.num_replicas
        self.record_indices(set(self._padded[batch_idx * size : (batch_idx + 1) * size]))

    def record_indices(self, indices: set[int]) -> None:
        """Record that samples have been processed."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of this rank's batch `batch_idx`."""
        start = batch_idx * batch_size
        return self.indices[start : min(start + batch_size, len(self.indices))]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Divide the unprocessed samples among the current ranks."""
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)  # Horovod's, so that a script reads the same batches
        remaining = [index for index in order if index not in self.processed_indices]
        self.num_replicas, self.rank = size(), rank()
        self.remaining_indices = remaining
        self.num_samples = -(-len(remaining) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        while remaining and len(remaining) < self.total_size:
            remaining = remaining + remaining[: self.total_size - len(remaining)]
        self._padded = remaining
        """The samples of all ranks, in turn."""
        self.indices: list[int] = self._padded[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
