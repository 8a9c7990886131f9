"""Batches of map-style sources: what has an index can be read anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from threading import Event
from typing import Any

import numpy as np

from shardwise.data.prefetch import Abandoned, Task
from shardwise.data.recipe import Made, Place, Recipe
from shardwise.data.sampling import Draw, Sampler
from shardwise.data.sources import Catalogue
from shardwise.errors import DataError


class IndexedFeed:
    """Makes any step without the others, so that any number of threads or processes may make them."""

    def __init__(self, catalogue: Catalogue, recipe: Recipe) -> None:
        self.sampler = Sampler(catalogue.order, recipe.batch_rows)
        self._catalogue = catalogue
        self._recipe = recipe

    def tasks(self, start: Place) -> Iterator[Task[Made]]:
        return (partial(self.make, step) for step in itertools.count(start.step))

    def make(self, step: int, stop: Event) -> Made:
        """This rank's share of the batch of `step`. Raises `DataError`; `Abandoned` when `stop` is set."""
        recipe = self._recipe
        draw = self.sampler.share(step, recipe.rank, recipe.size)
        samples: list[Any] = [None] * len(draw)
        for number in np.unique(draw.source):
            self._read(int(number), draw, samples, step, stop)
        return Made(recipe.collated(samples, step), Place(step), Place(step + 1))

    def _read(self, number: int, draw: Draw, samples: list[Any], step: int, stop: Event) -> None:
        """Fill in the samples of one source."""
        name, source = self._catalogue.names[number], self._catalogue.sources[number]
        rows = np.flatnonzero(draw.source == number).tolist()
        indices = draw.index[rows].tolist()
        together = self._read_together(number, indices, step)
        for position, (row, index) in enumerate(zip(rows, indices, strict=True)):
            if stop.is_set():
                raise Abandoned
            epoch = int(draw.epoch[row])
            try:
                sample = source[index] if together is None else together[position]
                samples[row] = self._recipe.prepare(sample, name, epoch, index)
            except Exception as error:
                raise DataError(
                    f"{self._catalogue.label(number)} failed at index {index}, in epoch {epoch}, row "
                    f"{self._recipe.first + row} of the batch of step {step}: {type(error).__name__}: {error}"
                ) from error

    def _read_together(self, number: int, indices: list[int], step: int) -> list[Any] | None:
        """The samples in one call, if the source can do that."""
        read = getattr(self._catalogue.sources[number], "__getitems__", None)
        if read is None:
            return None
        label = self._catalogue.label(number)
        try:
            samples = list(read(indices))
        except Exception as error:
            raise DataError(
                f"{label} failed at one of the indices {indices} of the batch of step {step}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if len(samples) != len(indices):
            raise DataError(f"{label} was asked for {len(indices)} samples by __getitems__ and gave {len(samples)}.")
        return samples
