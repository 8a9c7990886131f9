"""DeepSpeed's elastic batch size: one global batch that many numbers of ranks can share evenly.

This follows DeepSpeed's solver, versions 0.1 (any number of ranks) and 0.2 (whole nodes). Candidates are the
micro-batch sizes and their least common multiple, each times the largest highly composite number that stays below the
limit, since those have more divisors than any smaller number. (DeepSpeed also accepts a common multiple above the
limit; we do not.) The candidate that is divisible by the most numbers of ranks wins.

A loader that follows its engine does not need this: it shares any batch among any number of ranks, unevenly where the
number does not divide it. This is for DeepSpeed configs with an `elasticity` section.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.system.even_parts import divisors

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23)


@dataclass(frozen=True)
class Elasticity:
    """The `elasticity` section of a DeepSpeed config, with its defaults."""

    max_train_batch_size: int = 2000
    micro_batch_sizes: tuple[int, ...] = (2, 4, 6)
    min_gpus: int = 1
    max_gpus: int = 10000
    version: float = 0.2
    prefer_larger_batch: bool = True
    num_gpus_per_node: int = 1
    model_parallel_size: int = 1

    def __post_init__(self) -> None:
        sizes = self.micro_batch_sizes
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"elasticity.micro_batch_sizes is {list(sizes)}; give at least one size, each 1 or more.")
        if max(sizes) > self.max_train_batch_size:
            raise ConfigError(
                f"elasticity.micro_batch_sizes has {max(sizes)}, but max_train_batch_size is "
                f"{self.max_train_batch_size}. Give smaller micro-batches, or a larger batch."
            )
        if not 1 <= self.min_gpus <= self.max_gpus:
            raise ConfigError(
                f"elasticity allows {self.min_gpus} to {self.max_gpus} ranks, which is empty; set 1 <= min_gpus <= "
                f"max_gpus."
            )
        if self.version not in (0.1, 0.2):
            raise ConfigError(f"elasticity.version is {self.version}; there are 0.1 and 0.2.")
        if self.model_parallel_size > 1 and self.version < 0.2:
            raise ConfigError("elasticity.model_parallel_size needs version 0.2.")
        if self.num_gpus_per_node % self.model_parallel_size:
            raise ConfigError(
                f"elasticity.num_gpus_per_node is {self.num_gpus_per_node}, which is not a multiple of "
                f"model_parallel_size {self.model_parallel_size}."
            )


@dataclass(frozen=True)
class Shared:
    """The global batch, and the numbers of data-parallel ranks that can share it."""

    batch: int
    ranks: tuple[int, ...]

    def micro_batch(self, num_ranks: int, sizes: Sequence[int], *, prefer_larger: bool = True) -> int:
        """Samples per rank and forward. Raises `ConfigError` for a number of ranks that is not in `ranks`."""
        fitting = [size for size in sizes if self.batch % (num_ranks * size) == 0]
        if num_ranks not in self.ranks or not fitting:
            below = max((count for count in self.ranks if count < num_ranks), default=None)
            above = min((count for count in self.ranks if count > num_ranks), default=None)
            near = " and ".join(str(count) for count in (below, above) if count is not None)
            raise ConfigError(
                f"The elastic batch of {self.batch} cannot be shared by {num_ranks} data-parallel ranks; the nearest "
                f"numbers that can are {near}. Without the elasticity section any number works, with "
                f"sw.data.Loader(..., world=engine.data_ranks)."
            )
        return max(fitting) if prefer_larger else min(fitting)


def elastic_batch(wish: Elasticity, num_ranks: int | None = None) -> Shared:
    """The batch that the most numbers of ranks can share. `num_ranks` is the present number of data-parallel ranks: if
    the batch does not suit it, version 0.2 falls back to the largest batch for just that number."""
    if wish.version < 0.2:
        return _shared(wish, wish.max_train_batch_size, wish.min_gpus, wish.max_gpus)
    each = wish.num_gpus_per_node // wish.model_parallel_size
    least, most = wish.min_gpus // wish.num_gpus_per_node, wish.max_gpus // wish.num_gpus_per_node
    nodes = _shared(wish, wish.max_train_batch_size // each, max(1, least), most)
    found = Shared(nodes.batch * each, tuple(count * each for count in nodes.ranks))
    if num_ranks is None or num_ranks in found.ranks:
        return found
    fitting = [size * num_ranks for size in wish.micro_batch_sizes if size * num_ranks <= wish.max_train_batch_size]
    if not fitting:
        return found
    batches = [wish.max_train_batch_size // least * least for least in fitting]
    return Shared(max(batches) if wish.prefer_larger_batch else min(batches), (num_ranks,))


def _shared(wish: Elasticity, limit: int, least: int, most: int) -> Shared:
    sizes = wish.micro_batch_sizes
    bases = {*sizes, math.lcm(*sizes)}
    candidates = sorted({base * highly_composite(limit // base)[-1] for base in bases if base <= limit})
    best = Shared(0, ())
    for batch in candidates:
        ranks = _sharing(batch, sizes, least, most)
        is_tie = len(ranks) == len(best.ranks)
        is_preferred = (batch > best.batch) == wish.prefer_larger_batch
        if len(ranks) > len(best.ranks) or (is_tie and is_preferred):
            best = Shared(batch, ranks)
    if not best.ranks:
        raise ConfigError(
            f"No batch up to {limit} in micro-batches of {list(sizes)} can be shared by {least} to {most} ranks. "
            f"Raise elasticity.max_train_batch_size, or give smaller micro-batches."
        )
    return best


def _sharing(batch: int, sizes: Sequence[int], least: int, most: int) -> tuple[int, ...]:
    """The numbers of ranks that can share `batch` evenly, in micro-batches of one of the sizes."""
    found: set[int] = set()
    for size in sizes:
        if batch % size == 0:
            found.update(divisors(batch // size))
    return tuple(sorted(count for count in found if least <= count <= most))


def highly_composite(limit: int) -> list[int]:
    """All numbers up to `limit` that have more divisors than any smaller one.

    Such a number is a product of the first primes with exponents that do not grow (Ramanujan 1915).
    """
    found: list[tuple[int, int]] = []

    def extend(index: int, number: int, most: int, num_divisors: int) -> None:
        found.append((number, num_divisors))
        for exponent in range(1, most + 1):
            number *= _PRIMES[index]
            if number > limit or index + 1 == len(_PRIMES):
                return
            extend(index + 1, number, exponent, num_divisors * (exponent + 1))

    extend(0, 1, max(1, limit.bit_length()), 1)
    records, most = [], 0
    for number, num_divisors in sorted(found):
        if num_divisors > most:
            records.append(number)
            most = num_divisors
    return records
