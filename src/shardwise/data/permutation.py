"""A shuffle that is computed instead of stored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.data.randomness import Words, keys, scramble
from shardwise.errors import ConfigError

NUM_ROUNDS = 8
LARGEST = 2**62

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Permutation:
    """A keyed bijection on `range(num_items)`: a different one for every seed, epoch and `source`.

    Only eight keys are stored, so a shuffle of 10**12 items costs no memory, and any item `i` can be computed directly.
    The method is the generalised Feistel cipher with cycle walking of Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains": a number below `side * side` is written with two digits, each round adds a keyed hash of one digit
    to the other, and a result that is not below `num_items` is enciphered again. `side` is the square root rounded up,
    so few numbers need a second time.

    It shuffles; it is not meant for secrecy. Raises `ConfigError` unless 1 <= `num_items` <= 2**62.
    """

    num_items: int
    seed: int
    epoch: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.num_items <= LARGEST:
            raise ConfigError(f"A permutation is of 1 to 2**62 items, not of {self.num_items}.")

    def __len__(self) -> int:
        return self.num_items

    def __call__(self, places: Rows) -> Rows:
        """The items at `places`, int64 of any shape, each in `range(num_items)` (else `IndexError`)."""
        found = np.asarray(places, dtype=np.int64)
        if found.size and not (found.min() >= 0 and found.max() < self.num_items):
            raise IndexError(f"A position is outside of range({self.num_items}).")
        found = self._encipher(found.ravel())
        outside = np.flatnonzero(found >= self.num_items)
        while outside.size:
            found[outside] = self._encipher(found[outside])
            outside = outside[found[outside] >= self.num_items]
        return found.reshape(np.shape(places))

    def __getitem__(self, place: int) -> int:
        return int(self(np.array([place]))[0])

    @cached_property
    def _side(self) -> np.uint64:
        return np.uint64(math.isqrt(self.num_items - 1) + 1)

    @cached_property
    def _keys(self) -> Words:
        return keys(NUM_ROUNDS, "permutation", self.seed, self.source, self.epoch)

    def _encipher(self, numbers: Rows) -> Rows:
        side = self._side
        high, low = np.divmod(numbers.astype(np.uint64), side)
        for key in self._keys:
            high, low = low, (high + scramble(low ^ key) % side) % side
        enciphered: Rows = (high * side + low).astype(np.int64)
        return enciphered
