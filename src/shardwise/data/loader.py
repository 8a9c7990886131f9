"""The batches of a run, from wherever it is."""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Iterator
from dataclasses import asdict
from threading import Event
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from shardwise.data.feed import Collate, Feed, IndexedFeed, Made, Place, Recipe, StreamFeed, Transform
from shardwise.data.prefetch import Task, run_ahead
from shardwise.data.sampling import Draw, Sampler, Tail, check_rows
from shardwise.data.sources import Catalogue, Stream
from shardwise.data.transfer import moved, pinned
from shardwise.errors import ConfigError, StateError


class Ranks(Protocol):
    """Which rank of how many: a `shardwise.World`, or anything like it."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class Loader:
    """This rank's share of every batch of `batch_rows` rows, from the current step on.

    The batch of step N is a function of `seed` and N; ranks that are given other numbers of peers get other parts
    of the same batches. No rank talks to another.

    `source`       map-style (a length and an index), a `Mixture` of such, or `from_iterable(...)`.
    `batch_rows`   rows of a step over all ranks; a multiple of their number.
    `world`        a `World`, or `(rank, size)`: ranks that shall see the same rows give the same. Default: `RANK`
                   and `WORLD_SIZE` as a launcher sets them, else one rank.
    `shuffle`      another order in every epoch. A stream keeps its own.
    `tail`         the end of an epoch: `"carry"` begins the next epoch in the same batch, no sample is left
                   out or used twice; `"drop"` leaves out what does not fill a batch.
    `steps`        where iteration ends. Default: the end of the current epoch, which the next iteration goes on
                   from; a mixture has no such end and goes on forever.
    `transform`    `transform(sample, generator)`; the `numpy.random.Generator` is seeded by seed, epoch and index.
    `collate`      a list of samples to a batch. Default: torch's `default_collate`.
    `workers`      threads that read ahead; 0 reads when asked. With more than one, `source` is read from several
                   threads at once. `prefetch` is how many batches are ready or being made, at most.
    `device`       where batches are to be. For a GPU they are pinned by the workers and copied without waiting,
                   unless `pin=False`.

    Raises `ConfigError` for what cannot be meant; iteration raises `DataError` if the source, the transform or
    the collation fails, naming source and index, and the same step comes again in the next iteration.
    """

    def __init__(
        self,
        source: Any,
        *,
        batch_rows: int,
        seed: int = 0,
        world: Ranks | tuple[int, int] | None = None,
        shuffle: bool = True,
        tail: Tail = "carry",
        steps: int | None = None,
        transform: Transform | None = None,
        collate: Collate = default_collate,
        workers: int = 1,
        prefetch: int = 2,
        device: torch.device | str | None = None,
        pin: bool | None = None,
    ) -> None:
        self.rank, self.size = _ranks(world)
        check_rows(batch_rows, self.size)
        if workers < 0 or prefetch < 1:
            raise ConfigError(f"workers={workers} and prefetch={prefetch}: give workers of 0 or more, prefetch of 1.")
        self.batch_rows = batch_rows
        self.steps = steps
        self.device = torch.device(device) if device is not None else None
        self._pins = (self.device is not None and self.device.type == "cuda") if pin is None else pin
        self._workers, self._prefetch = workers, prefetch
        self._place = Place()
        self._running: weakref.ref[Generator[Any, None, None]] | None = None
        recipe = Recipe(self.rank, self.size, batch_rows, seed, transform, collate)
        self._identity: dict[str, Any] = {"seed": seed, "batch_rows": batch_rows, "tail": tail}
        self._sampler: Sampler | None = None
        self._rows_per_epoch: int | None = None
        self._feed: Feed
        if isinstance(source, Stream):
            self._feed = StreamFeed(source, tail, recipe)
        else:
            catalogue = Catalogue.of(source, batch_rows, seed, shuffle=shuffle, tail=tail)
            self._sampler = Sampler(catalogue.order, batch_rows)
            self._rows_per_epoch = catalogue.rows_per_epoch
            self._identity |= {"shuffle": shuffle, **catalogue.identity}
            self._feed = IndexedFeed(catalogue, self._sampler, recipe)

    # -- where the run is -------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Batches handed out since the beginning of the run; the next one is the batch of this step."""
        return self._place.step

    @property
    def epoch(self) -> int:
        """The epoch of the first row of the next batch; of a stream, the epoch it was last read in."""
        if self._rows_per_epoch is not None:
            return self.step * self.batch_rows // self._rows_per_epoch
        return self._place.epoch

    def seek(self, step: int) -> None:
        """Go on with the batch of `step`. Costs nothing; a stream cannot do it."""
        if self._sampler is None:
            raise StateError("A stream can only go where it has been before: load_state_dict(state) instead of seek.")
        if step < 0:
            raise ConfigError(f"Steps count from 0; there is no step {step}.")
        self.close()
        self._place = Place(step)

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, for a checkpoint: a few numbers, JSON, the same on every rank.

        Batches read ahead but not handed out count as not read.
        """
        return {**asdict(self._place), "identity": dict(self._identity)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, on any number of ranks. Raises `ConfigError` if the batches would be others."""
        theirs = state["identity"]
        for name in sorted({*theirs, *self._identity}):
            was, now = theirs.get(name), self._identity.get(name)
            if was != now:
                raise ConfigError(
                    f"The state is of a loader with {name}={was!r}, this one has {now!r}, so the batches to come "
                    f"would not be those of that run. Give what it was, or begin without the state."
                )
        self.close()
        self._place = Place(**{name: value for name, value in state.items() if name != "identity"})

    def draw(self, step: int) -> Draw:
        """Which samples are in the whole batch of `step`, on all ranks: to find what was in a bad one."""
        if self._sampler is None:
            raise StateError("Which samples of a stream are in a batch is known only when it is read.")
        return self._sampler.batch(step)

    # -- batches ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of an iteration that is not begun in the middle: `steps`, or those of the current epoch."""
        if self.steps is not None:
            return self.steps
        if self._rows_per_epoch is None:
            raise TypeError("A mixture or a stream has no length; give the loader steps=.")
        return self._first_step(self.epoch + 1) - self._first_step(self.epoch)

    def __iter__(self) -> Iterator[Any]:
        """Batches from the current step on. An iteration that is still going on is ended."""
        self.close()
        running = self._run()
        self._running = weakref.ref(running)  # so that the iteration ends when its user forgets it
        return running

    def close(self) -> None:
        """End the iteration that is going on, and its threads. May be called twice; iterating again is fine."""
        running = self._running() if self._running is not None else None
        if running is not None:
            running.close()
        self._running = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> Generator[Any, None, None]:
        end = self._end()
        workers = self._workers if self._feed.max_workers is None else min(self._workers, self._feed.max_workers)
        begun_in: int | None = None
        ahead = run_ahead(self._tasks(end), workers, self._prefetch)
        try:
            for made in ahead:
                begun_in = made.before.epoch if begun_in is None else begun_in
                if self.steps is None and made.before.epoch != begun_in:
                    self._place = made.before  # a stream tells only now that its epoch has ended
                    return
                batch = moved(made.batch, self.device) if self.device is not None else made.batch
                self._place = made.after
                yield batch
        finally:
            ahead.close()

    def _tasks(self, end: int | None) -> Iterator[Task[Made]]:
        for step, task in enumerate(self._feed.tasks(self._place), start=self.step):
            if end is not None and step >= end:
                return
            yield self._pinning(task) if self._pins else task

    def _pinning(self, task: Task[Made]) -> Task[Made]:
        device = self.device if self.device is not None else torch.device("cuda")

        def make(stop: Event) -> Made:
            made = task(stop)
            return Made(pinned(made.batch, device), made.before, made.after)

        return make

    def _end(self) -> int | None:
        """The step to stop before, if it is known: `steps`, or the first one of the next epoch."""
        if self.steps is not None or self._rows_per_epoch is None:
            return self.steps
        return self._first_step(self.epoch + 1)

    def _first_step(self, epoch: int) -> int:
        """The first step whose first row is in `epoch` or later."""
        assert self._rows_per_epoch is not None
        return -(-epoch * self._rows_per_epoch // self.batch_rows)


def _ranks(world: Ranks | tuple[int, int] | None) -> tuple[int, int]:
    if world is None:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    elif isinstance(world, tuple):
        rank, size = world
    else:
        rank, size = world.rank, world.size
    if not 0 <= rank < size:
        raise ConfigError(f"Rank {rank} is not within {size} ranks; ranks count from 0.")
    return rank, size
