"""The report of a rank about itself: plain data that can be sent as text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from shardwise.system import plain_data

State = Literal["computing", "waiting", "raised", "ended"]
_SHAPE: dict[str, Any] = {
    **dict.fromkeys(("state", "moment", "unit", "doing", "call", "place", "error"), str),
    **dict.fromkeys(("rank", "beat"), int),
    "on_disk": bool,
    "seconds": float,
    "awaited": plain_data.OneOf(None, (str, int, [int])),
    "tracks": {str: (int, [(int, int, str, int, int, [str], str)])},
    "path": (int, int, [(str, str)], str),
}


class Entered(NamedTuple):
    """A collective that a rank has entered: its number along the line, its tag, and its name."""

    number: int
    tag: int
    text: str
    numel: int = 0
    num_backwards: int = 0
    """Since the last optimizer step."""
    marks: tuple[str, ...] = ()
    """What was marked between the previous collective and this one."""
    what: str = ""
    """Outside of a program: its kind and subject, where one library function has several."""


@dataclass(frozen=True)
class Track:
    """How many collectives a rank has entered along one line, and the most recent of them."""

    count: int
    recent: tuple[Entered, ...] = ()

    def find(self, number: int) -> Entered:
        """The collective entered as `number`, if it is remembered."""
        return next(
            (entered for entered in self.recent if entered.number == number), Entered(number, 0, "one forgotten")
        )


class PassPath(NamedTuple):
    """A rank's path through one pass over the model: its last moments, and the number of the first of them."""

    num_passes: int = 0
    start: int = 0
    moments: tuple[tuple[str, str], ...] = ()
    """Each with its unit, or `""`."""
    part: str = ""
    """Which part of the model it has; ranks with another part take other paths."""


@dataclass(frozen=True)
class Status:
    """One rank at one time.

    `beat` counts its reports, `seconds` is how long it has been where it is. `doing` is the action of the program that
    it runs or waits for, `call` the library function that the user called, `place` the line of the user's code.
    `awaited` is the line, the number and the ranks of the collective that it waits for. `on_disk`: whether it has
    waited for its disk since its last collective. `path` is what it has done in its current or last pass over the
    model.
    """

    rank: int
    beat: int = 0
    state: State = "computing"
    moment: str = ""
    unit: str = ""
    doing: str = ""
    call: str = ""
    place: str = ""
    seconds: float = 0.0
    error: str = ""
    on_disk: bool = False
    awaited: tuple[str, int, tuple[int, ...]] | None = None
    tracks: dict[str, Track] = field(default_factory=dict)
    path: PassPath = field(default_factory=PassPath)

    @property
    def has_left(self) -> bool:
        return self.state in ("raised", "ended")

    def count(self, line: str) -> int:
        """How many collectives it has entered along `line`."""
        return self.tracks[line].count if line in self.tracks else 0

    def left(self, error: str) -> Status:
        """The report of the same rank once it is gone, with what it raised or `""`."""
        return replace(self, state="raised" if error else "ended", error=error or self.error, awaited=None)

    def to_json(self) -> str:
        plain = {**self.__dict__, "tracks": {name: (t.count, t.recent) for name, t in self.tracks.items()}}
        return json.dumps(plain, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Status:
        """Raises `ValueError` for anything else."""
        plain = plain_data.read(text, _SHAPE)
        if plain["state"] not in get_args(State):
            raise ValueError(f"{plain['state']!r} is not a state of a rank")
        awaited = plain["awaited"]
        plain["awaited"] = (awaited[0], awaited[1], tuple(awaited[2])) if awaited else None
        plain["tracks"] = {
            name: Track(count, tuple(Entered(*entered)._replace(marks=tuple(entered[5])) for entered in recent))
            for name, (count, recent) in plain["tracks"].items()
        }
        num_passes, start, moments, part = plain["path"]
        plain["path"] = PassPath(num_passes, start, tuple((moment, unit) for moment, unit in moments), part)
        return cls(**plain)

    def __str__(self) -> str:
        """For example `rank 2 waits in 'before forward h.3' for 'gather h.3 param dp fp32 512 B' (train.py:41)`."""
        at = f" ({self.place})" if self.place else ""
        raised = f"; shortly before it raised {self.error}" if self.error and not self.has_left else ""
        match self.state:
            case "waiting" if self.doing:
                return f"rank {self.rank} waits in '{self.moment}' for '{self.doing}'{at}{raised}"
            case "waiting":
                return f"rank {self.rank} waits in {self.call}{at}{raised}"
            case "raised":
                return f"rank {self.rank} raised {self.error}, {self._since()}"
            case "ended":
                return f"rank {self.rank} has ended, {self._since()}"
        does = "reads from its disk or writes to it" if self.on_disk else "computes"
        return f"rank {self.rank} {does}, {self._since()}{at}{raised}"

    def _since(self) -> str:
        return f"last seen at '{self.moment}'" if self.moment else "before its first step"
