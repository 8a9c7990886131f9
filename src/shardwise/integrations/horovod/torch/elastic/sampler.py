"""Samples of an epoch over ranks, without those that have been seen."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch

from shardwise.integrations.horovod.context import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Shares the samples of an epoch that have not been processed over the ranks; for a state's `sampler=...`.

    Call `record_batch` after each batch and `set_epoch` at the end of an epoch, and `TorchState` keeps all ranks'
    processed samples: after a commit, on however many ranks, none is seen again in this epoch, those of ranks that are
    lost included. As in Horovod, ranks get equally many, so that a few samples come twice where they do not divide.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`: nothing of it is processed, and it has an order of its own."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All ranks' batches number `batch_idx` since `reset` have been processed: their gradients went together.

        On every rank a batch has `batch_size` samples; where it has not, call `record_indices` with this rank's own.
        """
        size = batch_size * self.num_replicas
        self.record_indices(set(self._dealt[batch_idx * size : (batch_idx + 1) * size]))

    def record_indices(self, indices: set[int]) -> None:
        """These have been processed."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of this rank's batch."""
        start = batch_idx * batch_size
        return self.indices[start : min(start + batch_size, len(self.indices))]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Share out what is left, over the ranks that there are now."""
        order = torch.arange(len(self.dataset))
        if self.shuffle:
            order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.seed + self.epoch))
        left = [index for index in order.tolist() if index not in self.processed_indices]
        self.num_replicas, self.rank = size(), rank()
        self.remaining_indices = left
        self.num_samples = -(-len(left) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        while left and len(left) < self.total_size:
            left = left + left[: self.total_size - len(left)]
        self._dealt = left[: self.total_size]
        self.indices: list[int] = self._dealt[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
