"""What each action does to memory: what it reads, makes, frees and sends, and on which stream.

It is said here and nowhere else. `check.py` refuses a program by it, `footprint.py` counts bytes by it, `streams.py`
places actions and their waits by it, and the runtime has one method for each entry. Another verb is another entry.

[Note: what orders what] Actions of the stream `compute`, and the computation of model and optimizer, come one after
the other. An action on any other stream begins after all that was on `compute` when it was issued, and is done at the
earliest at once, at the latest when it is waited for. Nothing else is promised, for two actions of one such stream
neither: NCCL has a stream for each process group, and on the CPU most of a collective may run inside its wait.
So whatever is made by an action of another stream has to be waited for before anything reads, changes or frees it, and
what such an action reads may be neither changed nor freed before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.placement import MoveVerb

OwnVerb = Literal["free", "wait", "agree", "broadcast", "update", "collect", "orthogonalize", "hand_back"]
Verb = MoveVerb | OwnVerb
Stream = Literal["compute", "gather", "reduce", "fetch", "evict"]
Phase = Literal["forward", "backward", "backward_input", "backward_weights", "step"]
"""What is computed. `backward_input` and `backward_weights` are the halves of a backward, where a schedule has them."""
Subject = Literal[
    "full",
    "range",
    "param",
    "updated",
    "held",
    "sum",
    "grad",
    "due",
    "master",
    "states",
    "outgoing",
    "verdict",
    "buffers",
    "norms",
    "matrix",
    "update",
]
"""What the text of an action names: for what is sent, where it comes from or what it comes to; for a wait, what is
complete after it."""
Buffer = Literal[
    "param", "full", "held", "fresh", "sum", "grad", "due", "master", "outgoing", "given", "matrix", "staging", "work"
]
"""Memory of one flat buffer on one rank.

`param` is the range that rests here and `master` what the optimizer updates; `full` is the whole buffer, `held` what
is kept of it until the backward; `fresh` is what a backward leaves, `sum` what a reduction has come to so far, `grad`
what waits for the step and `due` what the update reads; `outgoing` is what has been updated on the host, in the dtype
in which parameters rest. `matrix` stands for the whole matrices that this rank works out, `given` for its pieces of
those that others do. `staging` is what messages are made of, `work` what an update takes besides.

On which tier a buffer lies is said by the rows of the table: see `tier_of` in `spec.py`.
"""


@dataclass(frozen=True, slots=True)
class Effect:
    """What one action does. Names of buffers are those of the action's own flat buffer.

    `makes` is made of `reads`; where it is there already, in part or from an axis before, the action goes on with
    that instead. What of it is in `consumes` is of no use once the action is done, and its memory goes then. What is
    in `frees` goes at once. `changes` are written to in place, where they are there. `scratch` is memory that it
    takes; it goes with the wait that frees it, or at once where there is none.

    A wait ends what is under way to make `waits`; with `keeps` that is the same memory from then on, or added to it.
    """

    makes: Buffer | None = None
    reads: tuple[Buffer, ...] = ()
    consumes: tuple[Buffer, ...] = ()
    changes: tuple[Buffer, ...] = ()
    scratch: tuple[Buffer, ...] = ()
    frees: tuple[Buffer, ...] = ()
    waits: Buffer | None = None
    keeps: Buffer | None = None
    cuts: bool = False
    """Whether what it makes is one rank's part of what it reads."""
    sends: bool = False
    stream: Stream = "compute"
    """On which it runs where it is not waited for at once."""
    awaited: tuple[Subject, Subject] | None = None
    """The subjects of its wait: where another axis is to follow, and where it is the last."""


def _sum(of: Buffer, to: Subject, *, cuts: bool = False, sends: bool = True) -> Effect:
    """One step from what gradients are to what they are to be."""
    return Effect(
        makes="sum",
        reads=(of,),
        consumes=(of,),
        cuts=cuts,
        sends=sends,
        scratch=("staging",) if sends else (),
        stream="reduce" if sends else "compute",
        awaited=("sum", to),
    )


def _evict(of: Buffer, to: Subject) -> Effect:
    """From the device to the host, at the end of what else is done to a gradient."""
    return Effect("sum", (of,), (of,), stream="evict", awaited=("sum", to))


def _fetch(of: Buffer, to: Buffer, awaited: tuple[Subject, Subject], consumes: tuple[Buffer, ...] = ()) -> Effect:
    """From the host to the device."""
    return Effect(to, (of,), consumes, stream="fetch", awaited=awaited)


def _gather(of: Buffer, to: Buffer, awaited: tuple[Subject, Subject], consumes: tuple[Buffer, ...] = ()) -> Effect:
    """One axis of an all-gather."""
    return Effect(to, (of,), consumes, sends=True, stream="gather", awaited=awaited)


EFFECTS: dict[tuple[Verb, Subject], Effect] = {
    # parameters, in a pass
    ("gather", "param"): _gather("param", "full", ("range", "full")),
    ("fetch", "param"): _fetch("param", "full", ("range", "full")),
    ("gather", "held"): _gather("held", "full", ("range", "full"), consumes=("held",)),
    ("slice", "held"): Effect("held", reads=("full",)),
    ("free", "full"): Effect(frees=("full",)),
    ("wait", "range"): Effect(waits="full"),
    ("wait", "full"): Effect(waits="full"),
    # gradients, in a pass
    ("reduce_scatter", "grad"): _sum("fresh", "grad", cuts=True),
    ("all_reduce", "grad"): _sum("fresh", "grad"),
    ("cast", "grad"): _sum("fresh", "grad", sends=False),
    ("evict", "grad"): _evict("fresh", "grad"),
    ("wait", "sum"): Effect(waits="sum", frees=("staging",)),
    ("wait", "grad"): Effect(waits="sum", keeps="grad", frees=("staging",)),
    # gradients, in the step
    ("reduce_scatter", "due"): _sum("grad", "due", cuts=True),
    ("all_reduce", "due"): _sum("grad", "due"),
    ("slice", "due"): _sum("grad", "due", cuts=True, sends=False),
    ("cast", "due"): _sum("grad", "due", sends=False),
    ("evict", "due"): _evict("grad", "due"),
    ("wait", "due"): Effect(waits="sum", keeps="due", frees=("staging",)),
    ("agree", "verdict"): Effect(reads=("due",), sends=True),
    # what an update needs of whole parameters
    ("agree", "norms"): Effect(reads=("due",), sends=True),
    ("collect", "update"): Effect(
        "matrix",
        reads=("due",),
        scratch=("given", "staging"),
        sends=True,
        stream="gather",
        awaited=("matrix", "matrix"),
    ),
    ("wait", "matrix"): Effect(waits="matrix", frees=("staging",)),
    ("orthogonalize", "update"): Effect(reads=("due",), changes=("matrix",), scratch=("work",)),
    ("hand_back", "update"): Effect(
        "given",
        reads=("matrix",),
        scratch=("staging",),
        frees=("matrix",),
        sends=True,
        stream="reduce",
        awaited=("update", "update"),
    ),
    ("wait", "update"): Effect(waits="given", frees=("staging", "given")),
    # the update, where it is not one for all on the device: a unit's on the host, around it its states from a disk.
    # Reading ahead and writing behind are the disk's own: see storage/disk_memory.py
    ("fetch", "states"): Effect(reads=("master",)),
    ("update", "master"): Effect(reads=("due",), changes=("master",)),
    ("evict", "states"): Effect(reads=("master",)),
    ("cast", "outgoing"): Effect("outgoing", reads=("master",)),
    ("fetch", "outgoing"): _fetch("outgoing", "param", ("updated", "param"), consumes=("outgoing",)),
    ("fetch", "updated"): _fetch("master", "param", ("updated", "param")),
    # parameters, after the update
    ("cast", "param"): Effect(reads=("master",), changes=("param",)),
    ("gather", "updated"): _gather("param", "param", ("updated", "param")),
    ("wait", "updated"): Effect(waits="param"),
    ("wait", "param"): Effect(waits="param"),
    ("broadcast", "buffers"): Effect(sends=True),
}
"""By verb and subject, which say everything: no action means another thing at another place."""

COMPUTES: dict[Phase, Effect] = {
    "forward": Effect(reads=("full",)),
    "backward": Effect("fresh", reads=("full",)),
    "backward_input": Effect(reads=("full",)),
    "backward_weights": Effect("fresh"),
    "step": Effect(reads=("due",), changes=("master",)),
}
"""What is computed between the moments `before` and `after` of a phase: by a unit, or in the step by the optimizer."""
SENDING: frozenset[str] = frozenset(verb for (verb, _), effect in EFFECTS.items() if effect.sends)


def adds_in_place(effect: Effect, *, is_same_dtype: bool, is_kept: bool) -> bool:
    """Whether a sum is made where what is summed lies. `is_kept`: in memory that stays for gradients.

    A part of other memory is not left there, or all of it would stay.
    """
    return effect.sends and is_same_dtype and (is_kept or not effect.cuts)
