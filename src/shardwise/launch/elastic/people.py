"""The processes of an elastic job as its council knows them, and those that it has lost."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.comm.members import Said


@dataclass
class Person:
    """A process, from its start to its end."""

    number: int
    pid: int = 0
    """What it has said itself; 0 before."""
    is_alive: bool = True
    is_here: bool = False
    """It has come to the store."""
    is_member: bool = False
    """Of the generation that was announced last."""
    is_leaving: bool = False
    is_dying_since: float | None = None
    """It has raised, and its process has not ended: until then it may write to what outlives it."""
    is_done: bool = False
    """Through with the job, whatever else it does."""
    heard: tuple[int, str] = (-1, "")
    """The last generation of which it has read that it begins, or is over, and which."""
    ready: Said | None = None
    opened: int = -1
    patience_seconds: float = 600

    @property
    def waits(self) -> bool:
        """To be let in."""
        return self.is_alive and self.is_here and not self.is_member and not self.is_done


@dataclass(frozen=True)
class Loss:
    """A member that has died, how, and its rank in the last generation that was formed."""

    member: int
    rank: int
    text: str
    generation: int
    at: float
