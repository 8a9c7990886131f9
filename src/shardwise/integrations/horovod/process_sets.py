"""Process sets: groups of ranks with their own collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.errors import ConfigError
from shardwise.integrations.horovod.current_session import current_session


class ProcessSet:
    """A group of ranks, to be passed to `init` or `add_process_set`. Until then `process_set_id` is `None`."""

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if not isinstance(ranks_or_comm, Sequence | range | set):
            raise ConfigError("ProcessSet(...) takes a list of ranks. MPI communicators are not supported.")
        self._ranks = sorted({int(rank) for rank in ranks_or_comm})
        self.process_set_id: int | None = None

    @property
    def ranks(self) -> list[int] | None:
        return list(self._ranks)

    def listed_ranks(self) -> list[int]:
        return list(self._ranks)

    def number(self) -> int:
        """The set's id. Raises `ValueError` if it has none."""
        if self.process_set_id is None:
            raise ValueError(f"{self} has not been added. Pass it to hvd.init(process_sets=...) or add_process_set().")
        return self.process_set_id

    def included(self) -> bool:
        """Whether this rank is in the set."""
        return current_session().rank in current_session().sets[self.number()]

    def rank(self) -> int:
        """This rank's index in the set; -1 if it is not in it."""
        return current_session().sets[self.number()].index(current_session().rank) if self.included() else -1

    def size(self) -> int | None:
        """The number of ranks in the set."""
        return len(current_session().sets[self.number()])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessSet):
            return NotImplemented
        return self._ranks == other._ranks and self.process_set_id == other.process_set_id

    def __hash__(self) -> int:
        return hash((tuple(self._ranks), self.process_set_id))

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self._ranks})"


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int] | None:
        return list(current_session().sets[0])


def assign_numbers(process_sets: Sequence[ProcessSet]) -> None:
    """Set the ids of the sets that were passed to `init`."""
    for number, process_set in enumerate(process_sets, start=1):
        process_set.process_set_id = number


global_process_set = _GlobalProcessSet()
"""All ranks."""
