"""Generations of a world: who its members are, and how one generation follows another in the same processes.

A process that an elastic launcher starts is a *member*, by a number that is never used again. A *generation* is an
ordered list of members, whose places in it are their ranks; all of them agree on it, since one alone (the launcher)
writes it down. After a fault, or when somebody comes or leaves, the members that live make the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shardwise.job_folder import BAD_BATCH, LEFT_OUT, RECORD_PATH

if TYPE_CHECKING:
    from shardwise.comm.world import World

__all__ = ["BAD_BATCH", "LEFT_OUT", "RECORD_PATH", "Membership", "Regrouped"]


@dataclass(frozen=True)
class Regrouped:
    """A generation that all its members have entered."""

    world: World
    """Of this generation; the old one is closed. `world.members` has the members' numbers, by rank."""
    origins: tuple[int | None, ...]
    """By rank: the rank it had in the generation before, `None` for one that has come."""
    lost: tuple[int, ...]
    """Ranks of the generation before that are gone."""
    said: tuple[bytes, ...]
    """By rank: what each told the others; `b""` from one that has come."""


class Membership(Protocol):
    """That of one process: how it goes from one generation to the next. Used by the thread that computes."""

    @property
    def member(self) -> int:
        """This process's number."""
        ...

    @property
    def folder(self) -> Path | None:
        """A folder in memory that outlives this process and goes with the job, the same for all of this host.

        `None` where there is none.
        """
        ...

    @property
    def arrival(self) -> Regrouped | None:
        """For one that came later: the generation that `World.join` entered; `None` for a member of the first."""
        ...

    step: int
    """Steps committed so far, for the letters of the launcher. Whoever trains sets it."""

    def changes_wanted(self) -> bool:
        """Whether somebody waits to come in or asks to leave. Sends nothing, and may differ between ranks for a moment:
        it has to ride on a verdict, so that all call `regroup` at the same step boundary."""
        ...

    def leave(self) -> None:
        """Ask to leave at the next step boundary: `changes_wanted` becomes true on all, and the `regroup` that follows
        raises `TurnedAwayError` here, with `has_asked`. From any thread."""
        ...

    def needs_all(self) -> None:
        """What this rank trains cannot lose a rank: if one is lost, the launcher is to start all again, from the last
        checkpoint."""
        ...

    def regroup(self, world: World, told: bytes, *, lets_in: bool = True) -> Regrouped:
        """Close `world` and enter the next generation. Every member that lives calls, after a fault, or where all have
        heard that changes are wanted. Begins anew when another one dies meanwhile: what it returns, all its members
        have entered.

        Unless all that call let others in, nobody comes with that generation: `changes_wanted` is true from its
        beginning if somebody waits, or if they are fewer than the job needs. They are to call again soon then, where
        they do let others in.

        Raises `TurnedAwayError` if the others go on without this rank, and `CommError` if nobody goes on.
        """
        ...

    def end(self, error: BaseException | None) -> None:
        """This process is through with the job, or raised `error`. `World.close` calls it."""
        ...
