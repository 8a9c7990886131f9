"""The parts of a loader: its feed, this rank's share, and the device of its batches."""

from __future__ import annotations

import os
from dataclasses import replace
from threading import Event
from typing import Any, Protocol

from shardwise.data.indexed import IndexedFeed
from shardwise.data.read_ahead import Task
from shardwise.data.recipe import Made, Recipe
from shardwise.data.settings import Samples
from shardwise.data.sources import Catalogue, as_stream
from shardwise.data.streaming import StreamFeed
from shardwise.data.to_device import Transfer
from shardwise.errors import ConfigError
from shardwise.system.devices import TorchAccelerator
from shardwise.system.process_rank import process_rank_of


class Ranks(Protocol):
    """A rank and the number of ranks: a `shardwise.World`, or any object like it."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


def feed_of(
    source: Any, batch_rows: int, recipe: Recipe, samples: Samples
) -> tuple[IndexedFeed | StreamFeed, int | None, dict[str, Any]]:
    """The feed that makes the batches, the rows per epoch if known, and the settings that identify this run."""
    stream = as_stream(source)
    if stream is not None:
        return StreamFeed(stream, samples.tail, batch_rows, recipe), None, {"stream": stream.name}
    catalogue = Catalogue.of(source, batch_rows, recipe.seed, shuffle=samples.shuffle, tail=samples.tail)
    identity = {"shuffle": samples.shuffle, **catalogue.identity}
    return IndexedFeed(catalogue, batch_rows, recipe), catalogue.rows_per_epoch, identity


def ranks_of(world: Ranks | tuple[int, int] | None) -> tuple[int, int]:
    if world is None:
        process = process_rank_of(os.environ)
        if process.size is None:
            raise ConfigError(
                f"{process.in_words()} says which rank this is, but not of how many. Give Loader(..., world=world)."
            )
        rank, size = process.rank, process.size
    elif isinstance(world, tuple):
        if len(world) != 2 or not all(isinstance(number, int) for number in world):
            raise ConfigError(f"world is {world!r:.60}; a pair is (rank, size), two whole numbers.")
        rank, size = world
    else:
        if not (hasattr(world, "rank") and hasattr(world, "size")):
            raise ConfigError(f"world is {world!r:.60}; give engine.data_ranks, a World, or a pair (rank, size).")
        if getattr(world, "membership", None) is not None:
            raise ConfigError(
                "In an elastic job the ranks of a World may become fewer or more, and steps are repeated: a loader of "
                "these ranks would lose the batches of void steps. Give Loader(..., world=engine.data_ranks), which "
                "follows the engine, or, if its batches train nothing, world=(world.rank, world.size)."
            )
        rank, size = world.rank, world.size
    if not 0 <= rank < size:
        raise ConfigError(f"Rank {rank} is not within {size} ranks; ranks count from 0.")
    return rank, size


def pinning_of(transfer: Transfer | None, pin: bool | None) -> Transfer | None:
    """The transfer that pins batches; `None` if they are not pinned."""
    is_wanted = pin if pin is not None else transfer is not None and transfer.leads_off_the_host
    if not is_wanted:
        return None
    if transfer is not None and transfer.has_accelerator:
        return transfer
    accelerator = TorchAccelerator.found()
    if accelerator is None:
        raise ConfigError("Pinning is for a GPU, and torch finds none here. Leave out pin=.")
    return Transfer.to(accelerator.kind)


def made_and_pinned(task: Task[Made], transfer: Transfer, stop: Event) -> Made:
    made = task(stop)
    return replace(made, batches=tuple(transfer.pinned(batch) for batch in made.batches))
