"""The words of a program: moments at which something is due, and actions. Their text parses back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from shardwise.errors import ProgramError
from shardwise.placement import WIDTH, Dtype, MoveVerb

Verb = MoveVerb | Literal["free", "wait", "agree", "broadcast"]
Stream = Literal["compute", "gather", "reduce"]
Edge = Literal["before", "after"]
Phase = Literal["forward", "backward", "step"]
Subject = Literal["full", "param", "held", "grad", "optim", "verdict", "buffers"]

VERBS: frozenset[str] = frozenset((*get_args(MoveVerb), "free", "wait", "agree", "broadcast"))
SUBJECTS: frozenset[str] = frozenset(get_args(Subject))
STREAMS: frozenset[str] = frozenset(get_args(Stream))
ALL_FLATS = "*"


@dataclass(frozen=True, slots=True)
class Moment:
    """When something is due: `before forward h.0`. Without a unit: `after backward` as a whole, or a step."""

    edge: Edge
    phase: Phase
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.edge} {self.phase} {self.unit}".rstrip()

    @classmethod
    def parse(cls, text: str) -> Moment:
        match text.split():
            case [("before" | "after") as edge, ("forward" | "backward" | "step") as phase, *unit] if len(unit) < 2:
                return cls(edge, phase, "".join(unit))
        raise ProgramError(f"{text!r} is not a moment; one reads like 'before forward h.0' or 'after step'.")


END_OF_BACKWARD = Moment("after", "backward")
BEFORE_STEP = Moment("before", "step")
AFTER_STEP = Moment("after", "step")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that one rank does to one flat buffer.

    `subject` is what it acts on, `over` the mesh axis, `dtype` what the bytes are afterwards, and
    `sent_bytes` what this rank puts on the wire.
    """

    verb: Verb
    flat: str
    subject: Subject
    over: str = "-"
    dtype: Dtype | Literal["-"] = "-"
    sent_bytes: int = 0
    stream: Stream = "compute"

    @property
    def communicates(self) -> bool:
        return self.verb in ("gather", "reduce_scatter", "all_reduce", "agree", "broadcast")

    def on(self, stream: Stream) -> Action:
        return replace(self, stream=stream)

    def cells(self) -> tuple[str, ...]:
        sent = f"{self.sent_bytes} B" if self.communicates else ""
        stream = f"@{self.stream}" if self.stream != "compute" else ""
        if self.over == "-" and self.dtype == "-":
            return (self.verb, self.flat, self.subject)
        return (self.verb, self.flat, self.subject, self.over, self.dtype, sent, stream)

    def __str__(self) -> str:
        return " ".join(cell for cell in self.cells() if cell)

    @classmethod
    def parse(cls, text: str) -> Action:
        words = text.split()
        stream = words.pop()[1:] if len(words) > 3 and words[-1].startswith("@") else "compute"
        sent = 0
        if len(words) > 4 and words[-1] == "B" and words[-2].isdecimal():
            sent = int(words[-2])
            words = words[:-2]
        if not _is_action(words) or stream not in STREAMS:
            raise ProgramError(
                f"{text.strip()!r} is not an action; one reads like 'gather h.0 full dp bf16 512 B @gather'."
            )
        over, dtype = words[3:] or ("-", "-")
        return cls(words[0], words[1], words[2], over, dtype, sent, stream)  # type: ignore[arg-type]  # checked above


def _is_action(words: list[str]) -> bool:
    """`verb flat subject`, with or without `over dtype`, each a word that there is."""
    if len(words) not in (3, 5) or words[0] not in VERBS or words[2] not in SUBJECTS:
        return False
    return len(words) == 3 or words[4] == "-" or words[4] in WIDTH


@dataclass(frozen=True, slots=True)
class Block:
    """A moment and what is due at it, in order."""

    moment: Moment
    actions: tuple[Action, ...] = ()


Program = tuple[Block, ...]
