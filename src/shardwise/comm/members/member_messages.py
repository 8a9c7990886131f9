"""Messages between members and their launcher, as plain data that is sent as JSON.

[Note: one writer] Agreement is hard between processes that may all die, and easy if one process outlives them. So only
the launcher decides. It publishes numbered announcements, which all members read in the same order. A generation is
announced as "entering". It is valid once "formed" is announced: by then all its members have entered it. If a member
dies before that, "over" is announced instead, and is final for all members too.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from shardwise.comm.members.pace import Pace
from shardwise.system import plain_data

MemberMessageKind = Literal[
    "here",
    "heard",
    "ready",
    "opened",
    "leaving",
    "needs_all",
    "gives_up",
    "groups",
    "prefers",
    "least",
    "pace",
    "done",
    "raised",
]
AnnouncementKind = Literal["entering", "formed", "over", "wanted", "leave", "spare", "out", "bye", "end"]

TAKEN_FOR_LOST = (
    "The others took this rank for lost and continue without it. It can return only as a new process, which the "
    "launcher starts if its options allow a replacement."
)

_MEMBER_MESSAGE = {
    **dict.fromkeys(("kind", "text"), str),
    **dict.fromkeys(("member", "generation", "step", "pid"), int),
    "at_fault": [int],
    "cut_off": [int],
    "patience_seconds": float,
    "lets_in": bool,
}
_ANNOUNCEMENT = {
    **dict.fromkeys(("kind", "text"), str),
    "generation": int,
    "members": [int],
    "before": [int],
    "hosts": [str],
}


@dataclass(frozen=True)
class MemberMessage:
    """From a member to the launcher.

    - `here`: waits to be admitted.
    - `heard`: has read the announcement that `generation` begins or is over (`text`).
    - `opened`: has entered `generation`.
    - `ready`: has left `generation` and waits for the next. `text` is the fault, if that is the reason; `at_fault` are
      members that it has waited for in vain; `cut_off` are living members whose messages do not reach each other.
      Without `lets_in` it is at a point where newcomers cannot join.
    - `leaving`: asks to leave as soon as the job can spare it; with a `text`, its process ends soon in any case.
    - `needs_all`: if any member is lost, all must restart.
    - `gives_up`: one was lost, and this member has nothing to go on from; `text` says when, if that matters. If nobody
      goes on, all restart.
    - `groups`: ranks train in replica groups, of which only whole ones go on. `text` has the axes of the plan's mesh,
      and of the smaller ones on which ranks go on where none is whole.
    - `prefers`: which of these are taken, one for each number of ranks, and in which order. Members say it once all of
      them know it, so that it never contradicts what they would do.
    - `least`: fewer ranks than `text` says do not keep to the plan's budget.
    - `pace`: how fast the ranks of `generation` train, from the first of them. `text` has a `Pace`.
    - `done`, `raised`: has finished its part of the job, or raised `text`.

    `patience_seconds` is how long other members may wait for this one.
    """

    kind: MemberMessageKind
    member: int
    generation: int = -1
    step: int = 0
    text: str = ""
    at_fault: tuple[int, ...] = ()
    cut_off: tuple[int, ...] = ()
    patience_seconds: float = 600
    pid: int = 0
    lets_in: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> MemberMessage:
        """Raises `ValueError` for anything else."""
        plain = _read(text, _MEMBER_MESSAGE, get_args(MemberMessageKind))
        if plain["kind"] in ("groups", "prefers"):
            meshes_of_text(plain["text"])
        if plain["kind"] == "least" and not re.fullmatch(r"\d{1,9}", plain["text"]):
            raise ValueError("not a number of ranks")
        if plain["kind"] == "pace":
            Pace.from_text(plain["text"])
        return cls(**{**plain, **{name: tuple(plain[name]) for name in ("at_fault", "cut_off")}})


@dataclass(frozen=True)
class Announcement:
    """From the launcher to all members.

    - `entering`: a new `generation` with its `members`, by rank; the members of the last one that was formed
      (`before`); and the members' `hosts`, by rank, if the job has several.
    - `formed`: all members have entered `generation`.
    - `over`: `generation` must not be used any more, because the `members` are gone or for the reason in `text`.
    - `wanted`: a process waits to join, or a member asks to leave.
    - `leave`: the `members` should ask to leave.
    - `spare`: the others continue without the `members`, which wait for the rest of a replica group.
    - `out`: the others continue without the `members`.
    - `bye`: the launcher knows that the `members` are done.
    - `end`: no rank continues.
    """

    kind: AnnouncementKind
    generation: int
    members: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    text: str = ""
    hosts: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Announcement:
        """Raises `ValueError` for anything else."""
        plain = _read(text, _ANNOUNCEMENT, get_args(AnnouncementKind))
        return cls(**{**plain, **{name: tuple(plain[name]) for name in ("members", "before", "hosts")}})


def meshes_as_text(axes: Mapping[str, int], smaller: Sequence[Mapping[str, int]]) -> str:
    """The axes of the plan's mesh, and of smaller ones, as text."""
    return json.dumps([dict(axes), *map(dict, smaller)])


def meshes_of_text(text: str) -> tuple[dict[str, int], tuple[dict[str, int], ...]]:
    """Raises `ValueError` for anything else."""
    every: list[dict[str, int]] = plain_data.read(text, [{str: int}])
    if not every:
        raise ValueError("there is no mesh")
    return every[0], tuple(every[1:])


def reports_as_text(reports: Sequence[bytes]) -> str:
    """The reports of a generation's members, by rank, as text."""
    return json.dumps([base64.b85encode(one).decode() for one in reports])


def reports_of_text(text: str | bytes) -> tuple[bytes, ...]:
    """Raises `ValueError` for anything else."""
    return tuple(base64.b85decode(one) for one in plain_data.read(text, [str]))


def _read(text: str | bytes, shape: plain_data.Shape, kinds: Sequence[str]) -> dict[str, Any]:
    plain: dict[str, Any] = plain_data.read(text, shape)
    if plain["kind"] not in kinds:
        raise ValueError(f"{plain['kind']!r} is not a kind of message")
    return plain
