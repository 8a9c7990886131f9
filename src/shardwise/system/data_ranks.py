"""A rank's share of every batch, and the interfaces by which it follows changes of the ranks."""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


class Reader(Protocol):
    """A loader that hands out batches and can save its position."""

    def state_after(self, num_steps: int) -> dict[str, Any]:
        """Its position once the engine has taken `num_steps` steps that count: a few numbers, JSON."""
        ...

    @property
    def can_leave_out(self) -> bool:
        """Whether it can continue after a batch that it has not read."""
        ...

    def leave_out(self, num_steps: int) -> None:
        """Skip the bad batch handed out after `num_steps` steps, once that step was made void."""
        ...

    def staying(self) -> AbstractContextManager[None]:
        """Inside, it stays where it is, whatever it is given to load: `go_where` says where it is to go."""
        ...

    def is_like(self, state: Any) -> bool:
        """Whether it is of a reader with the same batches."""
        ...

    def go_where(self, state: Any) -> None:
        """On a joining rank, continue at the position of the others' reader, unless the position was set explicitly."""
        ...


class Follows(Protocol):
    """What a loader needs of its engine before each batch."""

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
        """How often steps were made void, whose batches come again."""
        ...

    def follow(self, reader: Reader) -> None:
        """Let `reader` follow from now on. All ranks must call, in the same order."""
        ...

    def begin_to_read(self) -> None:
        """Called before a batch is handed out. On a joining rank, readers move to the position of the others."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Inside, this rank waits for its loader."""
        ...

    def weigh(self, samples: int, of: float) -> None:
        """This rank has `samples` of the `of` samples that all ranks have in the next micro-batch."""
        ...


@dataclass(frozen=True)
class Part:
    """A micro-batch of a step, of which there are `of`; `rows` are those of each, if one batch was cut into them."""

    number: int
    of: int
    rows: tuple[int, ...] = ()


class Names(Protocol):
    """A loader that can name the samples it has handed out."""

    def named(self, steps: range, part: Part | None = None) -> str: ...


class HandedOut(threading.local):
    """What each thread was last given to train on; per thread, because ranks may be threads."""

    def __init__(self) -> None:
        self._loader: weakref.ref[Names] | None = None
        self._steps = range(0)
        """Those of the loader's batches since the last optimizer step."""
        self._of_step: tuple[weakref.ref[Names] | None, range] = self._loader, self._steps
        self._has_ended = False
        """Whether no batch was handed out since the last optimizer step, or void one."""

    def note(self, loader: Names, step: int) -> None:
        goes_on = not self._has_ended and self._loader is not None and self._loader() is loader
        if self._loader is None or self._loader() is not loader:
            self._loader = weakref.ref(loader)
        self._steps = range(min(self._steps.start, step) if goes_on else step, step + 1)
        self._has_ended = False

    def end_step(self) -> None:
        """An optimizer step was taken with what was handed out before; what comes now may be for an evaluation."""
        self._of_step, self._has_ended = (self._loader, self._steps), True

    def end_void(self) -> None:
        """What was handed out since the last step has trained nothing, and another batch may come."""
        self._has_ended = True

    def text(self) -> str:
        """The samples of the last batch as text; empty if unknown."""
        return self._named(self._loader, self._steps[-1:])

    def of_step(self, part: Part | None = None) -> str:
        """Those of the last optimizer step, of all its batches or of a part; empty if unknown."""
        return self._named(*self._of_step, part)

    @staticmethod
    def _named(known: weakref.ref[Names] | None, steps: range, part: Part | None = None) -> str:
        loader = known() if known is not None else None
        return loader.named(steps, part) if loader is not None and steps else ""


HANDED_OUT = HandedOut()


class DataRanks(tuple[int, int]):
    """A rank and a number of ranks, as a plain pair, with a reference to the engine that updates them."""

    _engine: weakref.ref[Any]

    @classmethod
    def of(cls, ranks: tuple[int, int], engine: Follows) -> DataRanks:
        pair = cls(ranks)
        pair._engine = weakref.ref(engine)
        return pair

    @property
    def engine(self) -> Follows | None:
        """`None` if the engine is gone."""
        engine: Follows | None = self._engine()
        return engine

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)
