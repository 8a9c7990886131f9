"""Where the slots of an elastic job with `--autoscale` come from: what a cluster, or a list of hosts, has to offer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from shardwise.launch.places.hosts import Host


class Place(Protocol):
    """Can be asked for another number of slots."""

    @property
    def room(self) -> int | None:
        """The most slots that there are for the job; `None` if only an attempt tells."""
        ...

    def ask(self, num_slots: int, hosts: Collection[str]) -> None:
        """Ask for so many slots in all; `hosts` are those that have ranks or are ready for them. Returns before they
        have come. Called by a thread of its own, and may take seconds. Raises `ShardwiseError` if it is refused."""
        ...


class ListedPlace(Place, Protocol):
    """One whose slots are those of a list of hosts, which the job reads again and again."""

    unit: int
    """The job has a multiple of so many ranks."""
    lost: Callable[[], Collection[str]]
    """Hosts in the list that the job cannot use at the moment."""

    def read(self) -> list[Host]:
        """The hosts to use. Raises `ConfigError`."""
        ...

    def release(self, host: str) -> None:
        """No rank is on a host any more, which was to leave. Must not wait."""
        ...

    def close(self) -> None:
        """The job is over."""
        ...
