"""A rank's share of each batch, read and collated: from what has an index, and from what has only a beginning."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

import numpy as np

from shardwise.data.prefetch import Abandoned, Task
from shardwise.data.randomness import sample_generator
from shardwise.data.sampling import Draw, Sampler, Tail
from shardwise.data.sources import Catalogue, Stream, own
from shardwise.errors import DataError

Transform = Callable[[Any, np.random.Generator], Any]
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Place:
    """Where a run is in its data: steps done, and for a stream also samples read. JSON-able by `asdict`."""

    step: int = 0
    epoch: int = 0
    """Of a stream: how often it was begun anew."""
    position: int = 0
    """Of a stream: samples read in this epoch."""
    source_state: Any = None
    """Of a stream that has a `state_dict`: what it said at this position."""


@dataclass(frozen=True)
class Made:
    """One batch, and where a run is before and after it."""

    batch: Any
    before: Place
    after: Place


@dataclass(frozen=True)
class Recipe:
    """What becomes of samples on this rank. The rank's share of a batch are rows `first` up to `last` of it."""

    rank: int
    size: int
    batch_rows: int
    seed: int
    transform: Transform | None
    collate: Collate

    @property
    def first(self) -> int:
        return self.batch_rows // self.size * self.rank

    @property
    def last(self) -> int:
        return self.first + self.batch_rows // self.size

    def prepare(self, sample: Any, source: str, epoch: int, index: int) -> Any:
        """`sample` as the transform leaves it, which draws from a generator of this very sample."""
        if self.transform is None:
            return own(sample)
        return self.transform(own(sample), sample_generator(self.seed, source, epoch, index))


class Feed(Protocol):
    """Makes batches from a place on, each by a task that some thread runs."""

    max_workers: int | None

    def tasks(self, start: Place) -> Iterator[Task[Made]]: ...


class IndexedFeed:
    """Batches of map-style sources. Tasks know nothing of each other, so any number of threads may run them."""

    max_workers = None

    def __init__(self, catalogue: Catalogue, sampler: Sampler, recipe: Recipe) -> None:
        self._catalogue = catalogue
        self._sampler = sampler
        self._recipe = recipe

    def tasks(self, start: Place) -> Iterator[Task[Made]]:
        for step in itertools.count(start.step):
            yield lambda stop, step=step: self._make(step, stop)

    def _make(self, step: int, stop: Event) -> Made:
        recipe = self._recipe
        draw = self._sampler.share(step, recipe.rank, recipe.size)
        samples: list[Any] = [None] * len(draw)
        for number in np.unique(draw.source):
            self._read(int(number), draw, samples, step, stop)
        return Made(_collated(samples, recipe, step), Place(step), Place(step + 1))

    def _read(self, number: int, draw: Draw, samples: list[Any], step: int, stop: Event) -> None:
        """Fill in the samples of one source."""
        name, source = self._catalogue.names[number], self._catalogue.sources[number]
        rows = np.flatnonzero(draw.source == number).tolist()
        indices = draw.index[rows].tolist()
        together = _read_together(source, indices, name, step)
        for position, (row, index) in enumerate(zip(rows, indices, strict=True)):
            if stop.is_set():
                raise Abandoned
            epoch = int(draw.epoch[row])
            try:
                sample = source[index] if together is None else together[position]
                samples[row] = self._recipe.prepare(sample, name, epoch, index)
            except Exception as error:
                raise DataError(
                    f"{name} failed at index {index}, in epoch {epoch}, row {self._recipe.first + row} of the batch "
                    f"of step {step}: {type(error).__name__}: {error}"
                ) from error


class StreamFeed:
    """Batches of a stream: read in order, by one thread, every row by every rank."""

    max_workers = 1

    def __init__(self, stream: Stream, tail: Tail, recipe: Recipe) -> None:
        self._stream = stream
        self._tail = tail
        self._recipe = recipe

    def tasks(self, start: Place) -> Iterator[Task[Made]]:
        reader = _Reader(self._stream, start)
        while True:
            yield lambda stop: self._make(reader, stop)

    def _make(self, reader: _Reader, stop: Event) -> Made:
        recipe, before = self._recipe, reader.place
        samples: list[Any] = []
        row = 0
        while row < recipe.batch_rows:
            sample = reader.next(stop)
            if reader.epoch != before.epoch and (row == 0 or self._tail == "drop"):
                if row and before.position == 0:
                    raise DataError(_too_short(self._stream.name, row, recipe.batch_rows))
                before = Place(before.step, reader.epoch)
                samples.clear()
                row = 0
            if recipe.first <= row < recipe.last:
                samples.append(self._prepared(sample, reader))
            row += 1
        reader.mark(before.step + 1)
        return Made(_collated(samples, recipe, before.step), before, reader.place)

    def _prepared(self, sample: Any, reader: _Reader) -> Any:
        name, index = self._stream.name, reader.position - 1
        try:
            return self._recipe.prepare(sample, name, reader.epoch, index)
        except Exception as error:
            raise DataError(
                f"{name} failed at index {index}, in epoch {reader.epoch}: {type(error).__name__}: {error}"
            ) from error


class _Reader:
    """A stream opened at a place."""

    def __init__(self, stream: Stream, start: Place) -> None:
        self.place = start
        self.epoch = start.epoch
        self.position = start.position
        self._stream = stream
        self._opened: Iterable[Any] = ()
        self._iterator: Iterator[Any] | None = None

    def next(self, stop: Event) -> Any:
        """The next sample, of the next epoch if this one is at its end."""
        name = self._stream.name
        try:
            if self._iterator is None:
                self._iterator = self._open_at_place(stop)
            while not stop.is_set():
                for sample in self._iterator:
                    self.position += 1
                    return sample
                if self.position == 0:
                    raise DataError(f"{name} gave no samples in epoch {self.epoch}.")
                self.epoch, self.position = self.epoch + 1, 0
                self._iterator = self._open()
        except (DataError, Abandoned):
            raise
        except Exception as error:
            raise DataError(
                f"{name} failed at index {self.position}, in epoch {self.epoch}: {type(error).__name__}: {error}"
            ) from error
        raise Abandoned

    def mark(self, step: int) -> None:
        """Say that `step` begins here."""
        state_dict = getattr(self._opened, "state_dict", None)
        state = copy.deepcopy(state_dict()) if state_dict is not None else None
        self.place = Place(step, self.epoch, self.position, state)

    def _open(self) -> Iterator[Any]:
        self._opened = self._stream.factory(self.epoch)
        return iter(self._opened)

    def _open_at_place(self, stop: Event) -> Iterator[Any]:
        """The stream where it was left: by its own state if it has one, else by reading up to there."""
        if self.place.source_state is not None:
            self._opened = self._stream.factory(self.epoch)
            self._opened.load_state_dict(self.place.source_state)  # type: ignore[attr-defined]  # it had state_dict
            return iter(self._opened)
        iterator = self._open()
        for seen in range(self.position):
            if stop.is_set():
                raise Abandoned
            if next(iterator, _END) is _END:
                raise DataError(
                    f"{self._stream.name} ended after {seen} samples of epoch {self.epoch}, but had given "
                    f"{self.position} before. A factory has to give the same samples whenever it is called."
                )
        return iterator


_END = object()


def _too_short(name: str, num_samples: int, batch_rows: int) -> str:
    return (
        f"An epoch of {name} has {num_samples} samples, too few for one batch of {batch_rows} rows, and tail='drop' "
        f"leaves out what does not fill a batch. Use tail='carry' or smaller batches."
    )


def _read_together(source: Any, indices: list[int], name: str, step: int) -> list[Any] | None:
    """The samples in one call, if the source can do that."""
    read = getattr(source, "__getitems__", None)
    if read is None:
        return None
    try:
        return list(read(indices))
    except Exception as error:
        raise DataError(
            f"{name} failed at one of the indices {indices} of the batch of step {step}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _collated(samples: list[Any], recipe: Recipe, step: int) -> Any:
    try:
        return recipe.collate(samples)
    except Exception as error:
        raise DataError(
            f"The {len(samples)} samples of step {step} do not make a batch: {type(error).__name__}: {error}. "
            f"Give them one shape by transform=, or put them together by collate=."
        ) from error
