"""Batches of map-style sources, in which any sample can be read by its index."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from threading import Event
from typing import Any

import numpy as np

from shardwise.data.read_ahead import Abandoned, Task
from shardwise.data.recipe import Made, Place, Recipe
from shardwise.data.sampling import Draw, Sampler, Share
from shardwise.data.sources import Catalogue
from shardwise.errors import DataError, some

MOST_NAMED = 16


class IndexedFeed:
    """Makes each step independently of the others, so that several threads or processes may make them."""

    def __init__(self, catalogue: Catalogue, batch_rows: int, recipe: Recipe) -> None:
        self.sampler = Sampler(catalogue.order, batch_rows)
        self._catalogue = catalogue
        self._recipe = recipe

    def tasks(self, start: Place, share: Share) -> Iterator[Task[Made]]:
        return (partial(self.make, step, share) for step in itertools.count(start.step))

    def make(self, step: int, share: Share, stop: Event) -> Made:
        """A rank's share of the batch of `step`. Raises `DataError`, and `Abandoned` when `stop` is set."""
        draw = self.sampler.rows(step, share.read)
        samples: list[Any] = [None] * len(draw)
        for number in np.unique(draw.source):
            self._read(int(number), draw, samples, (step, share.read.start), stop)
        return Made(self._recipe.collated(samples, step, share), share.counts, Place(step), Place(step + 1))

    def names(self, step: int, rows: range) -> str:
        """The samples in these rows of the batch of `step`, as text: `samples 3, 17, 9 of source`."""
        draw = self.sampler.rows(step, rows)
        found = []
        for number in np.unique(draw.source).tolist():
            indices = draw.index[draw.source == number].tolist()
            found.append(f"samples {some(map(str, indices), MOST_NAMED)} of {self._catalogue.names[number]}")
        return ", ".join(found)

    def _read(self, number: int, draw: Draw, samples: list[Any], at: tuple[int, int], stop: Event) -> None:
        """Fill in the samples of one source; `at` is the step, and the row of its batch where they begin."""
        step, first = at
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
                    f"{first + row} of the batch of step {step}: {type(error).__name__}: {error}"
                ) from error

    def _read_together(self, number: int, indices: list[int], step: int) -> list[Any] | None:
        """The samples read with one call, if the source supports it."""
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
