"""The settings of a loader besides its source: how samples are ordered and batched, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.utils.data import default_collate

from shardwise.data.recipe import Collate, Transform
from shardwise.data.sampling import Tail
from shardwise.errors import ConfigError
from shardwise.system.devices import RankDevice
from shardwise.system.flags import require_flag


@dataclass(frozen=True)
class Samples:
    """The order of samples, and how they become a batch.

    `shuffle`      a different order in every epoch. A stream keeps its own order.
    `tail`         the end of an epoch: `"carry"` begins the next epoch in the same batch, so that no sample is left
                   out or used twice; `"drop"` leaves out samples that do not fill a batch.
    `transform`    `transform(sample, generator)`; the `numpy.random.Generator` is seeded by seed, epoch and index.
    `collate`      turns a list of samples into a batch. Default: torch's `default_collate`.

    Raises `ConfigError` for a `shuffle` that is neither `True` nor `False`, and for what is no function.
    """

    shuffle: bool = True
    tail: Tail = "carry"
    transform: Transform | None = None
    collate: Collate = default_collate

    def __post_init__(self) -> None:
        if not isinstance(self.shuffle, bool):
            raise ConfigError(f"Samples(shuffle={self.shuffle!r}): give True or False.")
        for name, function in (("transform", self.transform), ("collate", self.collate)):
            if function is not None and not callable(function):
                raise ConfigError(f"Samples({name}={function!r:.60}) is not a function.")
        if self.collate is None:
            raise ConfigError("Samples(collate=None): leave it out for torch's default_collate.")


@dataclass(frozen=True)
class Workers:
    """How batches are read ahead, and where they are put.

    `number`       of threads; 0 reads on demand. With more than one, the source is read from several threads at
                   once. A stream is read by one.
    `processes`    use processes instead, each with its own copy of the source.
    `prefetch`     steps that are ready or in progress, at most. Default: one more than there are workers.
    `device`       the device of batches. For a GPU, workers pin them and copies are asynchronous, unless
                   `pin=False`.

    Raises `ConfigError` for invalid numbers.
    """

    number: int = 1
    processes: bool = False
    prefetch: int | None = None
    device: torch.device | str | RankDevice | None = None
    pin: bool | None = None

    def __post_init__(self) -> None:
        for name, flag in (("processes", self.processes), ("pin", self.pin)):
            require_flag(f"Workers({name}=", flag)
        if self.number < 0 or self.num_ahead < 1:
            raise ConfigError(
                f"{self.number} workers and a prefetch of {self.num_ahead}: give 0 or more workers, and a prefetch of "
                f"1 or more."
            )
        if self.processes and self.number < 1:
            raise ConfigError("processes=True with 0 workers: give the number of processes, such as Workers(2, True).")

    @property
    def num_ahead(self) -> int:
        """Steps that are ready or in progress, at most."""
        return self.number + 1 if self.prefetch is None else self.prefetch


MOVED = {
    **dict.fromkeys(("shuffle", "tail", "transform", "collate"), "samples=sw.data.Samples({0}=...)"),
    **dict.fromkeys(("processes", "prefetch", "device", "pin"), "workers=sw.data.Workers({0}=...)"),
}
"""Former arguments of `Loader`, and where they are now."""


OF_TORCH = {
    "batch_size": "batch_rows=..., which counts the rows of all ranks and micro-batches",
    "num_workers": "workers=...",
    "collate_fn": "samples=sw.data.Samples(collate=...)",
    "drop_last": "samples=sw.data.Samples(tail='drop')",
    "pin_memory": "workers=sw.data.Workers(device='cuda'), which pins them",
    "prefetch_factor": "workers=sw.data.Workers(prefetch=...)",
    "generator": "seed=...",
    "sampler": "samples=sw.data.Samples(shuffle=...) for the order, and a torch.utils.data.Subset for a choice",
    "batch_sampler": "batch_rows=... and samples=sw.data.Samples(shuffle=...)",
}
"""Arguments of torch's `DataLoader`, and what says the same here."""


def refuse_unknown(names: Mapping[str, object]) -> None:
    """Raise `ConfigError` for former arguments and those of torch's `DataLoader`, and `TypeError` for unknown ones."""
    for name in names:
        if name in OF_TORCH:
            raise ConfigError(f"Loader has no {name}, which is a DataLoader's. Write {OF_TORCH[name]}.")
        if name in MOVED:
            raise ConfigError(f"Loader takes {name} as part of a group now: {MOVED[name].format(name)}.")
        raise TypeError(f"Loader() got an unexpected keyword argument {name!r}")
