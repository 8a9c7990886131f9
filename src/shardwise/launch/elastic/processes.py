"""The processes of an elastic job as its rendezvous sees them, and lost members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.comm.members import MemberMessage


@dataclass
class Process:
    """A process, from its start to its end."""

    number: int
    host: str = ""
    """Its host; empty in a job of one host."""
    pid: int = 0
    """As reported by the process; 0 before."""
    is_alive: bool = True
    is_here: bool = False
    """Whether it has connected to the store."""
    is_member: bool = False
    """Whether it is a member of the generation announced last."""
    joined_after: int | None = None
    """The last step when it joined others that were training; `None` for one of the first generation."""
    is_spare: bool = False
    """Whether it was a member, and waits for the rest of a replica group."""
    asks_to_leave: bool = False
    """Whether it leaves as soon as the job can spare it."""
    is_leaving: bool = False
    """Whether it leaves at the next step boundary."""
    is_dying_since: float | None = None
    """When it raised, if it has not ended yet; until then it may still write to files that outlive it."""
    stopped_since: float | None = None
    """When it was first seen that the system has stopped it, if it has not gone on since; looked for while others wait
    for it."""
    is_done: bool = False
    """Whether its script has ended, even if the process has not."""
    has_ended_well: bool = False
    """Whether it has ended with 0."""
    heard: tuple[int, str] = (-1, "")
    """The last announcement that it has read: a generation, and whether that begins or is over."""
    ready: MemberMessage | None = None
    opened: int = -1
    patience_seconds: float = 600

    @property
    def waits(self) -> bool:
        """Whether it waits to join."""
        return self.is_alive and self.is_here and not self.is_member and not self.is_done


@dataclass(frozen=True)
class Loss:
    """A lost member: how it ended, and its rank in the last formed generation."""

    member: int
    rank: int
    text: str
    generation: int
    at: float
    host: str = ""
    """The host, if it was lost as a whole."""


def by_host(members: Sequence[int], processes: Mapping[int, Process]) -> list[int]:
    """`members`, those of a host in a row, hosts in the order of their first members: see `World.local_size`."""
    hosts = list(dict.fromkeys(processes[number].host for number in members))
    return sorted(members, key=lambda number: hosts.index(processes[number].host))


def all_ended_well(processes: Mapping[int, Process]) -> bool:
    """Whether all scripts have ended well. If none has joined before, there was nothing to train."""
    return all(process.has_ended_well for process in processes.values())
