"""How one generation of ranks follows another in the same processes, whatever the world is that they have in each.

A process that an elastic launcher starts is a *member*, with a number that is never used again. A *generation* is an
ordered list of members; their places in it are their ranks. All members agree on it, because only the launcher writes
it. After a fault, or when members join or leave, those that are alive form the next generation.

`World` has a membership, and a membership opens worlds: here the type of the world is left open, so that neither needs
the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from shardwise.comm.watch.fault import Fault


class Ranks(Protocol):
    """What a membership needs of the world of a generation."""

    rank: int
    size: int
    generation: int
    members: tuple[int, ...]
    is_newcomer: bool
    is_arriving: bool

    @property
    def fault(self) -> Fault | None: ...

    def break_off(self, fault: Fault) -> None: ...

    def part(self) -> None: ...


W = TypeVar("W", bound=Ranks)
OF_ENGINE = b"engine "
"""How reports of ranks begin that train with an engine."""


@dataclass(frozen=True)
class Regrouped(Generic[W]):
    """A generation that all its members have entered."""

    world: W
    """Of this generation; the old one is closed. `world.members` has the members' numbers, by rank."""
    origins: tuple[int | None, ...]
    """By rank: its rank in the generation before, `None` for a newcomer."""
    lost: tuple[int, ...]
    """Ranks of the generation before that are gone."""
    reports: tuple[bytes, ...]
    """By rank: the report that each passed to `regroup`; `b""` for a newcomer."""

    def note_newcomer(self) -> None:
        """This process is one. If the others have engines, they wait for its own from here on, whatever its script
        calls of the world before that."""
        self.world.is_newcomer = True
        self.world.is_arriving = any(report.startswith(OF_ENGINE) for report in self.reports)


class Membership(Protocol[W]):
    """The membership of one process, by which it goes from one generation to the next. Used by the main thread."""

    @property
    def member(self) -> int:
        """This process's number."""
        ...

    @property
    def folder(self) -> Path | None:
        """A folder in memory, shared by the host's processes, that outlives this process and is removed with the job.

        `None` if there is none.
        """
        ...

    @property
    def arrival(self) -> Regrouped[W] | None:
        """For a newcomer: the generation that `World.join` entered; `None` for a member of the first generation."""
        ...

    @property
    def least(self) -> int:
        """The fewest ranks that the job continues with."""
        ...

    step: int
    """Steps committed so far, for the launcher's reports. Set by the engine."""

    @property
    def most(self) -> int:
        """The most ranks to which the launcher may let the job grow by itself (`--autoscale`); 0 if it does not."""
        ...

    predicted: Mapping[int, float]
    """Seconds of a step by the number of ranks, as far as they are predicted, for the launcher. Set by the run log."""

    num_engines: int
    """Of this process, that are open. Set by them."""
    has_several: bool
    """Whether there has been more than one at a time: then no rank goes on when another is lost, because each engine
    would have to, and to the same step."""

    def changes_wanted(self) -> bool:
        """Whether a process waits to join or a member asks to leave. Sends nothing, and may differ between ranks for a
        moment: ranks must agree on it, in a step's verdict, so that all call `regroup` at the same step boundary."""
        ...

    def leave(self, *, must_go: bool = False) -> None:
        """Ask to leave at the next step boundary at which enough others remain: `changes_wanted` becomes true on all,
        and the `regroup` that follows raises `TurnedAwayError` here, with `has_asked`. From any thread.

        With `must_go` this process ends soon in any case: if the job cannot spare it, all ranks are asked to end.
        """
        ...

    def needs_all(self) -> None:
        """Declare that the training cannot continue without a rank: if one is lost, the launcher restarts all, from the
        last checkpoint."""
        ...

    def gives_up(self, when: str = "") -> None:
        """Declare that a rank was lost, and that this one has nothing to go on from: if nobody else goes on, the
        launcher restarts all, from the last checkpoint. `when` may say what they were doing."""
        ...

    def needs_groups(self, axes: Mapping[str, int], smaller: Sequence[Mapping[str, int]] = ()) -> None:
        """Declare that ranks train in replica groups, on the mesh of a plan's `axes`: a group that loses a rank leaves
        as a whole, and members are ranks in the order of that mesh. If none is left, they train on a `smaller` one
        (`plan.replica_groups.Smaller`)."""
        ...

    def prefers(self, axes: Mapping[str, int], smaller: Sequence[Mapping[str, int]]) -> None:
        """Declare which of the smaller meshes of `needs_groups` are taken, one for each number of ranks, and in which
        order. All members do, once all know it."""
        ...

    def needs_ranks(self, least: int) -> None:
        """Declare that fewer ranks than `least` do not keep to the plan's budget, so that the job needs as many, beside
        what `--elastic` says. Replaces what was declared before."""
        ...

    def tell_pace(self, size: int, step_seconds: float, error: float) -> None:
        """Tell the launcher how long a step of the `size` ranks takes, with a relative standard `error`. If the job
        grows by itself, that decides how many ranks it should have; otherwise nothing is sent. Called by one rank."""
        ...

    def come_back(self) -> Regrouped[W]:
        """On a spare, wait until the launcher has formed a replica group with it, which joins the others. Returns as
        for a newcomer. Raises `TurnedAwayError` if the job ends before."""
        ...

    def regroup(self, world: W, report: bytes, *, lets_in: bool = True) -> Regrouped[W]:
        """Close `world` and enter the next generation. Every living member calls, after a fault, or once all have
        agreed that changes are wanted. `report` is passed on to the others. Starts again if another member dies
        meanwhile: all members have entered the generation that it returns.

        Newcomers are admitted only if all callers pass `lets_in`. Otherwise `changes_wanted` is true from the start of
        the new generation if a process waits to join, or if there are fewer ranks than the job needs. The members
        should then call again soon, from a point where they can let others in.

        Raises `TurnedAwayError` if the others continue without this rank, `SpareError` if they do and it may come back,
        and `CommError` if no rank continues.
        """
        ...

    def end(self, error: BaseException | None) -> None:
        """This process has finished its part of the job, or raised `error`. Called by `World.close`."""
        ...
