"""Sources of samples: anything with a length and an index, mixtures of these, or a stream."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from shardwise.data.sampling import Blend, Epochs, Order, Tail
from shardwise.errors import ConfigError, DataError
from shardwise.system.flags import takes_flags

UNNAMED = "source"


@runtime_checkable
class MapStyle(Protocol):
    """A list, an array, a memmap, a `torch.utils.data.Dataset`, a `datasets.Dataset`: readable at any index.

    If there is a `__getitems__(list of indices)`, it is called instead, once for a rank's share of a batch.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class Mixture:
    """Several map-style sources by name, in shares that hold at every point of the run.

    `weights` need not sum to 1; without them every source has a share in proportion to its length. A source is repeated
    as often as its share requires, reshuffled each time. Raises `ConfigError` if sources and weights have different
    names.
    """

    def __init__(self, sources: Mapping[str, Any], weights: Mapping[str, float] | None = None) -> None:
        if not isinstance(sources, Mapping):
            raise ConfigError(
                f"The sources of a mixture are a {type(sources).__name__}; give a mapping of names to sources, such as "
                f"Mixture({{'web': web, 'code': code}})."
            )
        if not sources:
            raise ConfigError("The mixture has no sources; give at least one.")
        self.sources = {name: _map_style(sources[name], name) for name in sorted(sources)}
        self.weights = {name: float(len(s)) for name, s in self.sources.items()} if weights is None else dict(weights)
        if self.weights.keys() != self.sources.keys():
            raise ConfigError(
                f"The mixture has sources {sorted(self.sources)} but weights for {sorted(self.weights)}. "
                f"Every source needs one weight."
            )


@dataclass(frozen=True)
class Stream:
    """A source with a beginning and an order, but no index; see `from_iterable`."""

    factory: Callable[..., Iterable[Any]]
    name: str
    seekable: bool = False
    skip: bool = False

    def open(self, epoch: int, position: int) -> Iterable[Any]:
        """The samples of `epoch`: from `position` on if the factory supports that, else all."""
        opened = self.factory(epoch, position) if self.seekable else self.factory(epoch)
        if not hasattr(opened, "__iter__"):
            raise DataError(
                f"The factory of {self.name} gave a {type(opened).__name__}, which cannot be iterated over."
            )
        return opened


@takes_flags
def from_iterable(
    factory: Callable[..., Iterable[Any]], *, name: str = "stream", seekable: bool = False, skip: bool = False
) -> Stream:
    """A stream of samples: `factory(epoch)` begins an epoch, and must give the same samples whenever it is called.

    **Every rank reads the whole stream** and prepares only its own rows: so ranks need not communicate, any number of
    them sees the same batches, and the reading cost is multiplied by the number of ranks. A run resumes within an epoch
    in one of these ways:

    - the object that `factory` returns has `state_dict()` and `load_state_dict(state)`, as `datasets.IterableDataset`
      and the loaders of torchdata have: its state is saved with ours, and restored before the first sample is read;
    - `seekable=True`: `factory(epoch, position)` begins at sample `position`;
    - `skip=True`: samples seen before are read again and discarded;
    - otherwise resuming within an epoch raises `StateError`.
    """
    return Stream(factory, name, seekable, skip)


def as_stream(source: Any) -> Stream | None:
    """`source` as a stream; `None` if it has an index.

    An iterable object, such as a `torch.utils.data.IterableDataset`, is restarted by `iter()`, after `set_epoch` if it
    has that. Each epoch is read from a shallow copy, because a loaded position must not outlive the epoch.
    """
    if isinstance(source, Stream):
        return source
    if isinstance(source, Iterator):
        raise ConfigError(
            f"The source is a {type(source).__name__}, which can be read only once. "
            f"Give shardwise.data.from_iterable(factory), so that every epoch can begin anew."
        )
    if isinstance(source, DataLoader):
        _check_samples(source)
    if isinstance(source, Set):
        raise ConfigError("The source is a set, whose order is another one in each process. Give sorted(source).")
    if not isinstance(source, IterableDataset) and (isinstance(source, MapStyle) or not hasattr(source, "__iter__")):
        return None

    def begin(epoch: int) -> Iterable[Any]:
        opened: Iterable[Any] = copy.copy(source)
        if hasattr(opened, "set_epoch"):
            opened.set_epoch(epoch)
        return opened

    return Stream(begin, type(source).__name__)


def _check_samples(loader: DataLoader[Any]) -> None:
    """Raise `ConfigError` for a loader that gives batches, or another order on each rank."""
    if loader.batch_sampler is not None:
        raise ConfigError(
            "The source is a DataLoader, whose items are batches of their own. Give its dataset: "
            "Loader(loader.dataset, batch_rows=...), with the rows of all ranks; or a DataLoader(batch_size=None)."
        )
    if isinstance(loader.sampler, RandomSampler):
        raise ConfigError(
            "The source is a DataLoader that shuffles, differently on each rank. Give its dataset, which is shuffled "
            "here, or a DataLoader(batch_size=None, shuffle=False)."
        )


@dataclass(frozen=True)
class Catalogue:
    """The map-style sources of a run in a fixed order, and the order in which their samples are used."""

    names: tuple[str, ...]
    sources: tuple[MapStyle, ...]
    order: Order
    rows_per_epoch: int | None
    """`None` for a mixture, because its sources end their epochs at different rows."""
    identity: dict[str, Any]
    """The settings on which the batch of step N depends; JSON."""

    def label(self, number: int) -> str:
        """A source's name and class, for errors."""
        return f"{self.names[number]} (a {type(self.sources[number]).__name__})"

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


def _map_style(source: Any, name: str) -> MapStyle:
    if isinstance(source, Stream | IterableDataset):
        raise ConfigError(f"{name} is a stream; a mixture takes map-style sources only, with a length and an index.")
    if isinstance(source, Mapping):
        raise ConfigError(
            f"{name} is a mapping with the keys {sorted(map(str, source))}. Give one of its values, or "
            f"shardwise.data.Mixture(...) of several."
        )
    if isinstance(source, str | bytes):
        raise ConfigError(
            f"{name} is the text {source!r:.60}, whose samples would be its characters. Give what is to be read: a "
            f"dataset, an array, a list; or list(text)."
        )
    if isinstance(source, MapStyle):
        return source
    raise ConfigError(
        f"{name} is of class {type(source).__name__}, which has no __len__ and __getitem__. Give something with a "
        f"length and an index, or shardwise.data.from_iterable(...) for what can only be read from its beginning."
    )
