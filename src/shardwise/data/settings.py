"""What a loader is told besides its source: how samples come, and who reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.utils.data import default_collate

from shardwise.data.recipe import Collate, Transform
from shardwise.data.sampling import Tail
from shardwise.devices import RankDevice
from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Samples:
    """In which order samples come, and how they become a batch.

    `shuffle`      another order in every epoch. A stream keeps its own.
    `tail`         the end of an epoch: `"carry"` begins the next epoch in the same batch, no sample is left
                   out or used twice; `"drop"` leaves out what does not fill a batch.
    `transform`    `transform(sample, generator)`; the `numpy.random.Generator` is seeded by seed, epoch and index.
    `collate`      a list of samples to a batch. Default: torch's `default_collate`.
    """

    shuffle: bool = True
    tail: Tail = "carry"
    transform: Transform | None = None
    collate: Collate = default_collate


@dataclass(frozen=True)
class Workers:
    """Who reads ahead, and where batches are put.

    `number`       of threads; 0 reads when asked. With more than one, the source is read from several threads at
                   once. A stream is read by one.
    `processes`    they are processes, each with its own copy of the source.
    `prefetch`     steps that are ready or being made, at most. Default: one more than there are workers.
    `device`       where batches are to be. For a GPU they are pinned by the workers and copied without waiting,
                   unless `pin=False`.

    Raises `ConfigError` for numbers that cannot be meant.
    """

    number: int = 1
    processes: bool = False
    prefetch: int | None = None
    device: torch.device | str | RankDevice | None = None
    pin: bool | None = None

    def __post_init__(self) -> None:
        if self.number < 0 or self.num_ahead < 1:
            raise ConfigError(
                f"{self.number} workers and a prefetch of {self.num_ahead}: give 0 or more workers, and a prefetch of "
                f"1 or more."
            )
        if self.processes and self.number < 1:
            raise ConfigError("processes=True with 0 workers: give the number of processes, such as Workers(2, True).")

    @property
    def num_ahead(self) -> int:
        """Steps that are ready or being made, at most."""
        return self.number + 1 if self.prefetch is None else self.prefetch


MOVED = {
    **dict.fromkeys(("shuffle", "tail", "transform", "collate"), "samples=sw.data.Samples({0}=...)"),
    **dict.fromkeys(("processes", "prefetch", "device", "pin"), "workers=sw.data.Workers({0}=...)"),
}
"""Arguments that `Loader` once took by itself, and where they are now."""


def refuse_unknown(names: Mapping[str, object]) -> None:
    """Raise for arguments that a loader does not take."""
    for name in names:
        if name in MOVED:
            raise ConfigError(f"Loader takes {name} as part of a group now: {MOVED[name].format(name)}.")
        raise TypeError(f"Loader() got an unexpected keyword argument {name!r}")
