"""Batches of a stream, which can only be read in order: one thread reads it, on every rank, every row.

Dividing its shards among ranks would make batches depend on the number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import partial
from threading import Event
from typing import Any

from shardwise.data.read_ahead import Abandoned, Task
from shardwise.data.recipe import Made, Place, Recipe
from shardwise.data.sampling import Share, Tail, check_tail, too_short
from shardwise.data.sources import Stream
from shardwise.errors import DataError, StateError

_END = object()


class StreamFeed:
    """Cuts a stream into batches. Every rank counts all samples and prepares its own."""

    def __init__(self, stream: Stream, tail: Tail, batch_rows: int, recipe: Recipe) -> None:
        check_tail(tail)
        self._batch_rows = batch_rows
        self._stream = stream
        self._tail = tail
        self._recipe = recipe

    def check_reachable(self, place: Place) -> None:
        """Raise `StateError` if reaching `place` means reading everything before it, unless `skip` allows that."""
        stream = self._stream
        if place.position == 0 or place.source_state is not None or stream.seekable or stream.skip:
            return
        raise StateError(
            f"{stream.name} was left after sample {place.position} of epoch {place.epoch}, and can only be read from "
            f"its beginning. Give it a state_dict() and load_state_dict(state), or from_iterable(factory, "
            f"seekable=True) with a factory(epoch, position), or from_iterable(..., skip=True) to read those "
            f"{place.position} samples again and throw them away."
        )

    def tasks(self, start: Place, share: Share) -> Iterator[Task[Made]]:
        reader = _Reader(self._stream, start)
        while True:
            yield partial(self._make, reader, share)

    def _make(self, reader: _Reader, share: Share, stop: Event) -> Made:
        before, own = reader.place, share.read
        samples: list[Any] = []
        row = 0
        while row < self._batch_rows:
            sample = reader.next(stop)
            if reader.epoch != before.epoch and (row == 0 or self._tail == "drop"):
                if row and before.position == 0:
                    raise DataError(too_short(f"An epoch of {self._stream.name}", row, self._batch_rows))
                before = Place(before.step, reader.epoch)  # the batch begins with the epoch
                samples.clear()
                row = 0
            if row in own:
                samples.append(self._prepared(sample, reader))
            row += 1
        reader.mark(before.step + 1)
        return Made(self._recipe.collated(samples, before.step, share), share.counts, before, reader.place)

    def _prepared(self, sample: Any, reader: _Reader) -> Any:
        index = reader.position - 1
        try:
            return self._recipe.prepare(sample, self._stream.name, reader.epoch, index)
        except Exception as error:
            raise reader.failure(index, error) from error


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
        """The next sample, from the next epoch if this one is at its end."""
        try:
            if self._iterator is None:
                self._iterator = self._open_at_place(stop)
            while not stop.is_set():
                sample = next(self._iterator, _END)
                if sample is not _END:
                    self.position += 1
                    return sample
                self._begin_next_epoch()
        except (DataError, Abandoned):
            raise
        except Exception as error:
            raise self.failure(self.position, error) from error
        raise Abandoned

    def mark(self, step: int) -> None:
        """Record that `step` begins here."""
        state_dict = getattr(self._opened, "state_dict", None)
        state = copy.deepcopy(state_dict()) if state_dict is not None else None
        self.place = Place(step, self.epoch, self.position, state)

    def failure(self, index: int, error: Exception) -> DataError:
        what = f"{type(error).__name__}: {error}"
        return DataError(f"{self._stream.name} failed at index {index}, in epoch {self.epoch}: {what}")

    def _begin_next_epoch(self) -> None:
        if self.position == 0:
            raise DataError(f"{self._stream.name} gave no samples in epoch {self.epoch}: it is empty.")
        self.epoch, self.position = self.epoch + 1, 0
        self._iterator = self._open()

    def _open(self) -> Iterator[Any]:
        self._opened = self._stream.open(self.epoch, self.position)
        return iter(self._opened)

    def _open_at_place(self, stop: Event) -> Iterator[Any]:
        """Open the stream where it was left: by its own state, else by its position, else by skipping samples."""
        if self.place.source_state is not None:
            self._opened = self._stream.open(self.epoch, 0)
            self._opened.load_state_dict(self.place.source_state)  # type: ignore[attr-defined]  # it had state_dict
            return iter(self._opened)
        iterator = self._open()
        if not self._stream.seekable:
            self._skip(iterator, stop)
        return iterator

    def _skip(self, iterator: Iterator[Any], stop: Event) -> None:
        for seen in range(self.position):
            if stop.is_set():
                raise Abandoned
            if next(iterator, _END) is _END:
                raise DataError(
                    f"{self._stream.name} ended after {seen} samples of epoch {self.epoch}, but had given "
                    f"{self.position} before. An epoch must give the same samples every time."
                )
