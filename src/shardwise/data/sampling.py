"""Which samples are in the batch of step N: a function of (seed, N), whatever the mesh.

[Note: rows and steps]
The batches of a run form one endless stream of *rows*. Step N is rows `N * batch_rows` up to `(N + 1) * batch_rows`,
and a rank's share of a step is contiguous in it. An *order* computes the sample of a row without the rows before it. So
the only state is the step number: a run resumes anywhere at no cost, on any number of ranks.

Torch's `DistributedSampler` stores the permutation, and divides it by the world size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Protocol, get_args

import numpy as np

from shardwise.data.permutation import Permutation, Rows
from shardwise.errors import ConfigError
from shardwise.system.even_parts import even_sizes, even_start, round_up

Tail = Literal["carry", "drop"]

BLOCK_ROWS = 256


@dataclass(frozen=True)
class Draw:
    """Samples, int64 `[num_rows]` each: number of the source, how many epochs of it came before, index in it."""

    source: Rows
    epoch: Rows
    index: Rows

    def __len__(self) -> int:
        return len(self.index)


class Order(Protocol):
    """Maps rows of the stream to samples."""

    def draw(self, rows: Rows) -> Draw: ...


@dataclass(frozen=True)
class Epochs:
    """One source repeated, reshuffled each time; each epoch uses `rows_per_epoch` of its samples."""

    num_samples: int
    rows_per_epoch: int
    seed: int
    shuffle: bool = True
    name: str = ""

    @classmethod
    def of(cls, num_samples: int, batch_rows: int, seed: int, *, shuffle: bool, tail: Tail, name: str) -> Epochs:
        """`tail="carry"`: an epoch may end in the middle of a batch, and the next one begins there, so that every
        sample is used once per epoch and every batch is full. `tail="drop"`: samples that do not fill a batch at the
        end of an epoch are left out; if shuffled, different ones each time. Raises `ConfigError` if no batch can be
        filled.
        """
        check_tail(tail)
        if num_samples < 1:
            raise ConfigError(f"{name} has no samples. Give a source of at least one.")
        rows = num_samples if tail == "carry" else num_samples // batch_rows * batch_rows
        if rows == 0:
            raise ConfigError(too_short(name, num_samples, batch_rows))
        return cls(num_samples, rows, seed, shuffle, name)

    def draw(self, rows: Rows) -> Draw:
        epochs, places = np.divmod(rows, self.rows_per_epoch)
        return Draw(np.zeros_like(rows), epochs, self._shuffled(epochs, places) if self.shuffle else places)

    def _shuffled(self, epochs: Rows, places: Rows) -> Rows:
        index = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            index[here] = Permutation(self.num_samples, self.seed, int(epoch), self.name)(places[here])
        return index


@dataclass(frozen=True)
class Blend:
    """Several sources in fixed shares, each repeated at its own pace.

    [Note: shares without counting]
    The position of a row in its source depends on how many rows before it came from that source. If sources were drawn
    at random, that count would cost a pass over all rows before. Here it is a formula: of the first `i` rows the first
    source has `floor(i * share)`, of the remaining rows the second has its part in the same way, and so on. So a source
    deviates from its share by less than the number of sources. Rows are shuffled within blocks of 256, so that no rank
    and no batch sees a fixed pattern.
    """

    parts: tuple[Epochs, ...]
    shares: tuple[Fraction, ...]
    """The share of each part; their sum is 1."""
    seed: int

    @classmethod
    def of(cls, parts: Sequence[Epochs], weights: Sequence[float], seed: int) -> Blend:
        for part, weight in zip(parts, weights, strict=True):
            if not (math.isfinite(weight) and weight > 0):
                raise ConfigError(f"The weight of {part.name} is {weight}; weights are positive numbers.")
        exact = [Fraction(weight) for weight in weights]
        return cls(tuple(parts), tuple(weight / sum(exact) for weight in exact), seed)

    def draw(self, rows: Rows) -> Draw:
        source, places = self._assign(rows)
        epoch, index = np.empty_like(rows), np.empty_like(rows)
        for number, part in enumerate(self.parts):
            here = source == number
            drawn = part.draw(places[here])
            epoch[here], index[here] = drawn.epoch, drawn.index
        return Draw(source, epoch, index)

    def counts(self, num_rows: int) -> list[int]:
        """How many of the first `num_rows` rows each source has; exact at multiples of 256."""
        counts, rows, share = [], num_rows, Fraction(1)
        for mine in self.shares:
            part = mine / share
            count = rows * part.numerator // part.denominator
            counts.append(count)
            rows, share = rows - count, share - mine
        return counts

    def _assign(self, rows: Rows) -> tuple[Rows, Rows]:
        """For each row its source, and how many rows of that source came before."""
        source, places = np.empty_like(rows), np.empty_like(rows)
        blocks = rows // BLOCK_ROWS
        for block in np.unique(blocks):
            here = blocks == block
            sources_of_block, places_of_block = self._block(int(block))
            within = rows[here] % BLOCK_ROWS
            source[here], places[here] = sources_of_block[within], places_of_block[within]
        return source, places

    def _block(self, block: int) -> tuple[Rows, Rows]:
        before = self.counts(block * BLOCK_ROWS)
        after = self.counts((block + 1) * BLOCK_ROWS)
        num_each = np.subtract(after, before)
        in_turn = np.repeat(np.arange(len(self.parts)), num_each)
        source = in_turn[Permutation(BLOCK_ROWS, self.seed, block, "blend")(np.arange(BLOCK_ROWS))]
        places = np.empty_like(source)
        for number, start in enumerate(before):
            places[source == number] = start + np.arange(num_each[number])
        return source, places


@dataclass(frozen=True)
class Share:
    """The rows of every batch that belong to one rank, and to each of its micro-batches.

    Ranks have contiguous parts in rank order, and micro-batches contiguous parts of those. If the numbers do not
    divide, the first parts have one row more than the others. If a part has no rows, its rank gets a stand-in, one row
    that does not count, because it has to take part in the step.
    """

    rank: int
    size: int
    batch_rows: int
    accumulate: int = 1

    @property
    def first(self) -> int:
        return self._start(self.rank)

    @property
    def last(self) -> int:
        return self._start(self.rank + 1)

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each micro-batch that count."""
        return tuple(even_sizes(self.last - self.first, self.accumulate))

    @property
    def read(self) -> range:
        """The rows that are read: the rank's own, or a stand-in."""
        if self.first < self.last:
            return range(self.first, self.last)
        row = min(self.first, self.batch_rows - 1)
        return range(row, row + 1)

    @property
    def parts(self) -> tuple[slice, ...]:
        """The slice of each micro-batch in the rows that are read; at least one row."""
        starts = [0, *itertools.accumulate(self.counts)][:-1]
        return tuple(
            slice(start, start + count) if count else slice(0, 1)
            for start, count in zip(starts, self.counts, strict=True)
        )

    def _start(self, rank: int) -> int:
        return even_start(self.batch_rows, self.size, rank)


@dataclass(frozen=True)
class Sampler:
    """The samples of step N, for all ranks and for one."""

    order: Order
    batch_rows: int

    def batch(self, step: int) -> Draw:
        """The whole batch of `step`."""
        return self.share(step, 0, 1)

    def share(self, step: int, rank: int, size: int) -> Draw:
        """The contiguous part of `rank` out of `size`; the parts of all ranks, in order, are the batch."""
        check_rows(self.batch_rows, size)
        share = Share(rank, size, self.batch_rows)
        return self.rows(step, range(share.first, share.last))

    def rows(self, step: int, rows: range) -> Draw:
        """These rows of the batch of `step`."""
        if step < 0:
            raise ConfigError(f"Steps count from 0; there is no step {step}.")
        first = step * self.batch_rows
        return self.order.draw(np.arange(first + rows.start, first + rows.stop, dtype=np.int64))


def check_whole(name: str, value: object, what: str, least: int | None = None) -> None:
    """Raise `ConfigError` for what is no whole number, or less than `least`: otherwise it would be a `TypeError` that
    names nothing, or count as another number."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or (least is not None and value < least):  # type: ignore[operator]  # it is a number then
        bound = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{name} is {value!r:.60}; give a whole number{bound}, {what}.")


def check_numbers(batch_rows: int, num_parts: int) -> None:
    """Raise `ConfigError` for an empty batch or step."""
    check_whole("batch_rows", batch_rows, "of a step over all ranks and micro-batches")
    check_whole("accumulate", num_parts, "of micro-batches")
    if batch_rows < 1:
        raise ConfigError(f"batch_rows={batch_rows} is not a number of rows; a batch has at least one.")
    if num_parts < 1:
        raise ConfigError(f"accumulate={num_parts} is not a number of micro-batches; a step has at least one.")


def check_rows(batch_rows: int, size: int, num_parts: int = 1) -> None:
    """Raise `ConfigError` unless `batch_rows` divide among `size` ranks with `num_parts` micro-batches each."""
    check_numbers(batch_rows, num_parts)
    shares = size * num_parts
    if batch_rows % shares:
        below, above = batch_rows // shares * shares, round_up(batch_rows, shares)
        cure = f"{below} or {above}" if below else f"{above}"
        each = f" with {num_parts} micro-batches each" if num_parts > 1 else ""
        raise ConfigError(
            f"A batch of {batch_rows} rows does not divide among {size} ranks{each}. batch_rows counts the rows of a "
            f"step over all ranks and micro-batches; give {cure}, or Loader(..., world=engine.data_ranks): the engine "
            f"lets every sample count the same."
        )


def too_short(what: str, num_samples: int, batch_rows: int) -> str:
    """Why an epoch, or a source, gives no batch."""
    return (
        f"{what} has {num_samples} samples, too few for one batch of {batch_rows} rows, and tail='drop' leaves out "
        f"what does not fill a batch. Use tail='carry' or smaller batches."
    )


def check_tail(tail: str) -> None:
    if tail not in get_args(Tail):
        raise ConfigError(f"tail={tail!r} is neither 'carry' nor 'drop'.")
