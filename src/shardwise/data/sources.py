"""Where samples come from: anything with a length and an index, several of them, or a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shardwise.data.sampling import Blend, Epochs, Order, Tail
from shardwise.errors import ConfigError

UNNAMED = "source"


@runtime_checkable
class MapStyle(Protocol):
    """A list, an array, a memmap, a `torch.utils.data.Dataset`, a `datasets.Dataset`: read at any index.

    `__getitems__(list of indices)`, where there is one, is called instead: one call for a rank's share of a batch.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class Mixture:
    """Several map-style sources by name, in shares that hold at every point of the run.

    `weights` need not sum to 1; without them every source has the share of its length. A source is gone through
    as often as its share demands, shuffled anew each time. Raises `ConfigError` for names that do not match.
    """

    def __init__(self, sources: Mapping[str, Any], weights: Mapping[str, float] | None = None) -> None:
        if not sources:
            raise ConfigError("A mixture of no sources has no samples.")
        self.sources = {name: _map_style(source, name) for name, source in sources.items()}
        self.weights = {name: float(len(s)) for name, s in self.sources.items()} if weights is None else dict(weights)
        if self.weights.keys() != self.sources.keys():
            raise ConfigError(
                f"The mixture has sources {sorted(self.sources)} but weights for {sorted(self.weights)}. "
                f"Every source needs one weight."
            )

    def __len__(self) -> int:
        return sum(len(source) for source in self.sources.values())


@dataclass(frozen=True)
class Stream:
    """What can only be read from its beginning; see `from_iterable`."""

    factory: Callable[[int], Iterable[Any]]
    name: str


def from_iterable(factory: Callable[[int], Iterable[Any]], *, name: str = "stream") -> Stream:
    """A stream of samples: `factory(epoch)` begins it anew, and is the same every time it is called.

    The position is a count, so the state is O(1), but **every rank reads the whole stream** and keeps its rows,
    and **resuming reads and throws away** what was seen in the epoch. What `factory` returns may spare that: if
    it has `state_dict()` and `load_state_dict(state)`, as `datasets.IterableDataset` and torchdata's loaders have,
    its state is kept with ours, and is given back to it before the first sample is asked for.
    """
    return Stream(factory, name)


@dataclass(frozen=True)
class Catalogue:
    """The map-style sources of a run in a fixed order, and the order in which their samples are used."""

    names: tuple[str, ...]
    sources: tuple[MapStyle, ...]
    order: Order
    rows_per_epoch: int | None
    """`None` for a mixture: its sources end their epochs at different rows."""
    identity: dict[str, Any]
    """What must be the same for the batch of step N to be the same; JSON."""

    @classmethod
    def of(cls, source: Any, batch_rows: int, seed: int, *, shuffle: bool, tail: Tail) -> Catalogue:
        if isinstance(source, Mixture):
            return cls._of_mixture(source, batch_rows, seed, shuffle=shuffle, tail=tail)
        single = _map_style(source, UNNAMED)
        epochs = Epochs.of(len(single), batch_rows, seed, shuffle=shuffle, tail=tail, name=UNNAMED)
        identity = {"samples": {UNNAMED: len(single)}}
        return cls((UNNAMED,), (single,), epochs, epochs.rows_per_epoch, identity)

    @classmethod
    def _of_mixture(cls, mixture: Mixture, batch_rows: int, seed: int, *, shuffle: bool, tail: Tail) -> Catalogue:
        if tail != "carry":
            raise ConfigError(
                f"A mixture cannot have tail={tail!r}: its sources end their epochs in the middle of batches. "
                f"Use tail='carry'."
            )
        lengths = {name: len(source) for name, source in mixture.sources.items()}
        parts = [
            Epochs.of(length, batch_rows, seed, shuffle=shuffle, tail=tail, name=name)
            for name, length in lengths.items()
        ]
        weights = [mixture.weights[name] for name in lengths]
        blend = Blend.of(parts, weights, seed)
        identity = {"samples": lengths, "weights": dict(zip(lengths, map(float, weights), strict=True))}
        return cls(tuple(lengths), tuple(mixture.sources.values()), blend, None, identity)


def own(sample: Any) -> Any:
    """A numpy sample that a transform may write to: not a window on the source, which may even be read-only."""
    return np.array(sample) if isinstance(sample, np.ndarray) else sample


def _map_style(source: Any, name: str) -> MapStyle:
    if isinstance(source, Stream):
        raise ConfigError(f"{name} is a stream; a mixture has map-style sources only, with a length and an index.")
    if isinstance(source, MapStyle):
        return source
    raise ConfigError(
        f"{name} is of class {type(source).__name__}, which has no __len__ and __getitem__. Give something with a "
        f"length and an index, or shardwise.data.from_iterable(...) for what can only be read from its beginning."
    )
