"""How samples become batches on one rank, and the position of a run in its data."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from shardwise.data.randomness import sample_generator
from shardwise.data.sampling import Share
from shardwise.errors import ConfigError, DataError

Transform = Callable[[Any, np.random.Generator], Any]
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Place:
    """The position of a run in its data: steps done, and for a stream also samples read. JSON by `asdict`."""

    step: int = 0
    epoch: int = 0
    """Of a stream: the epoch, which counts its restarts."""
    position: int = 0
    """Of a stream: samples read in this epoch."""
    source_state: Any = None
    """Of a stream with a `state_dict`: its state at this position."""


@dataclass(frozen=True)
class Made:
    """A rank's share of one step, one batch for each micro-batch, and the places before and after it.

    `counts` are the rows of each batch that count: all of them, or none for a stand-in.
    """

    batches: tuple[Any, ...]
    counts: tuple[int, ...]
    before: Place
    after: Place


@dataclass(frozen=True)
class Recipe:
    """How samples are prepared, and collated to the batches of a rank's micro-batches."""

    seed: int
    transform: Transform | None
    collate: Collate

    def __post_init__(self) -> None:
        if self.transform is not None and not _takes_two(self.transform):
            raise ConfigError(
                f"transform={self.transform!r} cannot be called with two arguments. It is called as "
                f"transform(sample, generator); for one that draws nothing: transform=lambda sample, _: f(sample)."
            )

    def prepare(self, sample: Any, source: str, epoch: int, index: int) -> Any:
        """`sample` after the transform, which draws from a generator of this sample's own."""
        if self.transform is None:
            return own(sample)
        return self.transform(own(sample), sample_generator(self.seed, source, epoch, index))

    def collated(self, samples: list[Any], step: int, share: Share) -> tuple[Any, ...]:
        """The samples that a rank has read for `step`, collated to its micro-batches."""
        try:
            return tuple(self.collate(samples[part]) for part in share.parts)
        except Exception as error:
            raise DataError(
                f"The {len(samples)} samples of step {step} do not make a batch: {type(error).__name__}: {error}. "
                f"Give them one shape by transform=, or put them together by collate=."
            ) from error


def own(sample: Any) -> Any:
    """A sample that a transform may write to: a copy, not a view of the source, which may be read-only."""
    if isinstance(sample, np.ndarray):
        return np.array(sample)
    if isinstance(sample, Tensor):
        return sample.clone()
    return sample


def _takes_two(transform: Transform) -> bool:
    try:
        inspect.signature(transform).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # some builtins have no signature
        return True
    return True
