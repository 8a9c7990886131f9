"""Which share of every batch a rank reads, and who knows when that changes."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol


class Reader(Protocol):
    """What hands out batches, and can say where it stands."""

    def state_after(self, num_steps: int) -> dict[str, Any]:
        """Where it goes on once the engine has taken `num_steps` steps that count: a few numbers, JSON."""
        ...

    @property
    def can_leave_out(self) -> bool:
        """Whether it can go on behind a batch that it has not read."""
        ...

    def leave_out(self, num_steps: int) -> None:
        """The batch handed out after `num_steps` steps is bad: once that step was made void, go on behind it."""
        ...

    def go_where(self, state: Any) -> None:
        """Go on where the reader of others does, to whom this rank has come, unless somebody has said where."""
        ...


class Follows(Protocol):
    """What a loader asks of its engine before each batch."""

    @property
    def data_ranks(self) -> tuple[int, int]:
        """Which share of every batch this rank reads now, and of how many."""
        ...

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken that count."""
        ...

    @property
    def num_void(self) -> int:
        """How often steps were made void: their batches are to come again."""
        ...

    def follow(self, reader: Reader) -> None:
        """`reader` asks from now on. On all ranks in the same order."""
        ...

    def begin_to_read(self) -> None:
        """A batch is about to be handed out. On a rank that has come to others, readers go where theirs are."""
        ...

    def weigh(self, samples: int, of: float) -> None:
        """This rank has `samples` of the `of` that all ranks have in the next micro-batch."""
        ...


class Names(Protocol):
    """Who can say which samples it has handed out."""

    def named(self, step: int) -> str: ...


class HandedOut(threading.local):
    """Of each thread, since ranks may be threads: what it was given to train on last."""

    def __init__(self) -> None:
        self._loader: weakref.ref[Names] | None = None
        self._step = -1

    def note(self, loader: Names, step: int) -> None:
        if self._loader is None or self._loader() is not loader:
            self._loader = weakref.ref(loader)
        self._step = step

    def text(self) -> str:
        """In words; empty if nothing is known."""
        loader = self._loader() if self._loader is not None else None
        return loader.named(self._step) if loader is not None else ""


HANDED_OUT = HandedOut()


class DataRanks(tuple[int, int]):
    """A rank and a number of ranks, as a plain pair; with who knows them when they have changed."""

    _engine: weakref.ref[Any]

    @classmethod
    def of(cls, ranks: tuple[int, int], engine: Follows) -> DataRanks:
        pair = cls(ranks)
        pair._engine = weakref.ref(engine)
        return pair

    @property
    def engine(self) -> Follows | None:
        """`None` if it is gone."""
        engine: Follows | None = self._engine()
        return engine

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)
