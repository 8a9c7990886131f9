"""The vocabulary of a program: moments and actions, whose text parses back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from shardwise.errors import ProgramError
from shardwise.plan.placement import WIDTH, Dtype, SumOfCodes
from shardwise.program.effects import COMPUTES, EFFECTS, SENDING, Buffer, Effect, Phase, Stream, Subject, Verb

Edge = Literal["before", "during", "after"]

EDGES: frozenset[str] = frozenset(get_args(Edge))
PHASES: frozenset[str] = frozenset(get_args(Phase))
STREAMS: frozenset[str] = frozenset(get_args(Stream))
COPYING: frozenset[str] = frozenset({"fetch", "evict"})
_LEAVING_GRADIENTS = frozenset(phase for phase, effect in COMPUTES.items() if effect.makes == "fresh")
_NEEDING_PARAMS = frozenset(phase for phase, effect in COMPUTES.items() if "full" in effect.reads)
ALL_FLATS = "*"
_TRANSFERS: dict[Buffer, str] = {"full": "param", "sum": "grad", "matrix": "update", "given": "update"}
"""Names in timelines, by the buffer that a transfer fills."""
_MICRO_BATCH = re.compile(r"(?<=\s)#(\d+)\s*$")


class Moment(NamedTuple):
    """A point of a step, such as `before forward h.0`. Without a unit: `after backward` as a whole, or a step.

    In the program of a pipeline's schedule it carries the number of the micro-batch: `before forward h.0 #3`.
    """

    edge: Edge
    phase: Phase
    unit: str = ""
    micro_batch: int | None = None

    def __str__(self) -> str:
        words = [self.edge, self.phase, *([_name(self.unit)] if self.unit else [])]
        return " ".join(words if self.micro_batch is None else [*words, f"#{self.micro_batch}"])

    @classmethod
    def parse(cls, text: str) -> Moment:
        batch = _MICRO_BATCH.search(text)
        match _words(text[: batch.start()] if batch else text):
            case [edge, phase, *unit] if edge in EDGES and phase in PHASES and len(unit) < 2:
                number = int(batch[1]) if batch else None
                return cls(edge, phase, "".join(unit), number)  # type: ignore[arg-type]  # checked above
        raise ProgramError(f"{text!r} is not a moment; one reads like 'before forward h.0' or 'after step'.")

    @property
    def leaves_gradients(self) -> bool:
        """Whether the computation around it leaves a unit's gradients."""
        return self.phase in _LEAVING_GRADIENTS

    @property
    def needs_params(self) -> bool:
        """Whether the computation around it needs the unit whole."""
        return self.phase in _NEEDING_PARAMS


@dataclass(frozen=True, slots=True)
class UnitMoments:
    """The moments of one unit, made once because every pass reports them."""

    before_forward: Moment
    after_forward: Moment
    before_backward: Moment
    after_backward: Moment

    @classmethod
    def of(cls, unit: str, micro_batch: int | None = None, backward: Phase = "backward") -> UnitMoments:
        """`backward` is the phase of the backward moments, where a backward is split in halves."""
        return cls(
            Moment("before", "forward", unit, micro_batch),
            Moment("after", "forward", unit, micro_batch),
            Moment("before", backward, unit, micro_batch),
            Moment("after", backward, unit, micro_batch),
        )


END_OF_BACKWARD = Moment("after", "backward")
"""The end of one micro-batch's backward. In the program of a schedule: of the last one; earlier ones carry their
numbers."""
BEFORE_STEP = Moment("before", "step")
DURING_STEP = Moment("during", "step")
"""When the optimizer gathers what it needs of whole parameters; most optimizers never do."""
AFTER_STEP = Moment("after", "step")


def update_moment(unit: str) -> Moment:
    """When `unit` is updated, where units are not all updated together."""
    return Moment("during", "step", unit)


class Action(NamedTuple):
    """One operation of a rank on one flat buffer. Verb and subject determine its meaning, wherever it stands.

    `subject` is what it acts on, `over` the mesh axis, `dtype` that of the bytes afterwards (of a `gather`: on the
    wire), and `sent_bytes` what this rank sends. Ranks send different amounts in a `collect` or `hand_back`; there it
    is what the busiest rank sends. For a `fetch` or `evict`, `over` is the other tier and `sent_bytes` what is copied
    between it and the device; it is not given for `states`, which are copied between a disk and the host.
    `codes` are the blocks of integers as which elements are sent, such as `int8/256`, and then `dtype` is that of the
    elements, of a `gather` too; `int4/128+bf16` is an all-reduce whose sums are sent in bf16 (`SumOfCodes`).
    """

    verb: Verb
    flat: str
    subject: Subject
    over: str = "-"
    dtype: Dtype | Literal["-"] = "-"
    sent_bytes: int = 0
    stream: Stream = "compute"
    codes: str = ""

    @property
    def effect(self) -> Effect:
        """Its effect on memory."""
        return EFFECTS[self.verb, self.subject]

    @property
    def communicates(self) -> bool:
        return self.verb in SENDING

    @property
    def copies(self) -> bool:
        """Whether it copies bytes from one tier to another."""
        return self.verb in COPYING

    @property
    def transfer(self) -> str:
        """What it moves or waits for, as timelines call it: `h.0 param`."""
        made = self.effect.makes or self.effect.waits
        return f"{self.flat} {_TRANSFERS.get(made, made) if made is not None else ''}"

    def on(self, stream: Stream) -> Action:
        """The same on that stream. (`_replace` takes twice as long.)"""
        return Action(self.verb, self.flat, self.subject, self.over, self.dtype, self.sent_bytes, stream, self.codes)

    def cells(self) -> tuple[str, ...]:
        """Its words as the columns of a printed program."""
        if self.over == "-" and self.dtype == "-":
            return (self.verb, _name(self.flat), self.subject)
        sent = f"{self.sent_bytes} B" if self.communicates or self.copies else ""
        stream = f"@{self.stream}" if self.stream != "compute" else ""
        dtype = f"{self.dtype} as {self.codes}" if self.codes else self.dtype
        return (self.verb, _name(self.flat), self.subject, _name(self.over), dtype, sent, stream)

    def __str__(self) -> str:
        return " ".join(cell for cell in self.cells() if cell)

    @classmethod
    def parse(cls, text: str) -> Action:
        words = _words(text)
        stream = words.pop()[1:] if len(words) > 3 and words[-1].startswith("@") else "compute"
        sent = 0
        if len(words) > 4 and words[-1] == "B" and words[-2].isdecimal():
            sent = int(words[-2])
            words = words[:-2]
        codes = words.pop() if len(words) == 7 and words[5] == "as" and _is_codes(words[0], words[6]) else ""
        words = words[:-1] if codes else words
        if not _is_action(words) or stream not in STREAMS:
            raise ProgramError(
                f"{text.strip()!r} is not an action; one reads like 'gather h.0 param dp bf16 512 B @gather'."
            )
        over, dtype = words[3:] or ("-", "-")
        return cls(words[0], words[1], words[2], over, dtype, sent, stream, codes)  # type: ignore[arg-type]  # checked above


def _is_action(words: list[str]) -> bool:
    """`verb flat subject`, optionally followed by `over dtype`: whether verb and subject, and the dtype, exist."""
    if len(words) not in (3, 5) or (words[0], words[2]) not in EFFECTS:
        return False
    return len(words) == 3 or words[4] == "-" or words[4] in WIDTH


def _is_codes(verb: str, word: str) -> bool:
    try:
        SumOfCodes.parse(verb, word)
    except ValueError:
        return False
    return True


def _name(name: str) -> str:
    """The name of a unit or axis as one word. A name with blanks or quotes, which modules may have, is quoted."""
    is_word = name.isprintable() and not set(' "') & set(name) and name and name[0] != "#"
    return name if is_word else json.dumps(name)


def _words(text: str) -> list[str]:
    words = re.findall(r'"(?:[^"\\]|\\.)*"(?!\S)|\S+', text)
    return [_unquoted(word) if word.startswith('"') else word for word in words]


def _unquoted(word: str) -> str:
    try:
        return str(json.loads(word))
    except json.JSONDecodeError:
        raise ProgramError(f"{word} is not a quoted JSON string.") from None


class Block(NamedTuple):
    """A moment and its actions, in order."""

    moment: Moment
    actions: tuple[Action, ...] = ()


Program = tuple[Block, ...]


def actions_of(program: Iterable[Block]) -> Iterator[Action]:
    """All actions of a program, in order."""
    return (action for block in program for action in block.actions)


def by_flat(actions: Iterable[Action]) -> dict[str, list[Action]]:
    """Actions by their flat buffer, in order."""
    found: dict[str, list[Action]] = {}
    for action in actions:
        found.setdefault(action.flat, []).append(action)
    return found
