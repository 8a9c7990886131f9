"""What members and their launcher write to each other: plain data that survives a trip as text.

[Note: one writer] Agreement between processes of which any may die is hard; to follow one who outlives them all is not.
The launcher alone writes the news, one numbered letter after the other, and everybody reads the same ones in the same
order. A generation is announced ("entering"), and counts once it is said to be "formed": by then all its members have
entered it. If one of them dies before, the letter that follows is "over", which is final for everybody as well.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

SaidKind = Literal["here", "heard", "ready", "opened", "leaving", "whole", "done", "raised"]
NewsKind = Literal["entering", "formed", "over", "wanted", "leave", "out", "bye", "end"]


@dataclass(frozen=True)
class Said:
    """From a member to the launcher.

    `here`: waits to be let in. `heard`: has read that `generation` begins or is over (`text`). `ready`: has left
    `generation` and waits for the next; `text` is the fault, if that is why, and `blames` are members that kept it
    waiting for too long; unless it `lets_in`, nobody new is to come to where it stands. `opened`: has entered it.
    `leaving`: asks to leave. `whole`: if any member is lost, all are to start again. `done`, `raised`: is through
    with the job, or raised `text`. `patience_seconds` is how long others may wait for it.
    """

    kind: SaidKind
    member: int
    generation: int = -1
    step: int = 0
    text: str = ""
    blames: tuple[int, ...] = ()
    patience_seconds: float = 600
    pid: int = 0
    lets_in: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Said:
        plain = json.loads(text)
        return cls(**{**plain, "blames": tuple(plain["blames"])})


@dataclass(frozen=True)
class News:
    """From the launcher to everybody.

    `entering`: the `members` of `generation`, by rank, those of the one that was formed `before`, and the names of the
    members' `hosts`, by rank, if the job has several. `formed`: all of them are there. `over`: it is not to be used any
    more, since the `members` are gone or for what `text` says. `wanted`: somebody waits to come in, or asks to leave.
    `leave`: the `members` are to ask to leave. `out`: the others go on without the `members`. `bye`: the `members` have
    said that they are through. `end`: nobody goes on.
    """

    kind: NewsKind
    generation: int
    members: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    text: str = ""
    hosts: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> News:
        plain = json.loads(text)
        return cls(**{**plain, **{name: tuple(plain[name]) for name in ("members", "before", "hosts")}})


def send_told(told: Sequence[bytes]) -> str:
    """What each rank told the others, by rank, as text."""
    return json.dumps([base64.b85encode(one).decode() for one in told])


def read_told(text: str | bytes) -> tuple[bytes, ...]:
    return tuple(base64.b85decode(one) for one in json.loads(text))
