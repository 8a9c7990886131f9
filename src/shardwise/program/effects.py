"""What each action does to memory: what it reads, makes, frees and sends, and on which stream.

This is the only place that says so. `check.py` refuses programs by it, `footprint.py` counts bytes by it, `streams.py`
places actions and waits by it, and the runtime has one method per entry. A new verb is a new entry.

[Note: what orders what] Actions on the stream `compute`, and the computation of model and optimizer, run one after the
other. An action on any other stream begins after everything that was on `compute` when it was issued, and may finish at
any time from then until it is waited for. Nothing else is promised, not even the order of two actions on the same such
stream: NCCL has a stream for each process group, and on the CPU most of a collective may run inside its wait. So what
an action of another stream makes must be waited for before anything reads, changes or frees it, and what such an action
reads must not be changed or freed before that wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.plan.placement import MoveVerb

OwnVerb = Literal[
    "free",
    "wait",
    "agree",
    "broadcast",
    "update",
    "collect",
    "orthogonalize",
    "hand_back",
    "project",
    "restore",
    "checksum",
    "compare",
    "subtract",
    "mix",
    "decode",
]
Verb = MoveVerb | OwnVerb
Stream = Literal["compute", "gather", "reduce", "fetch", "evict"]
Phase = Literal["forward", "backward", "backward_input", "backward_weights", "step"]
"""What is computed. `backward_input` and `backward_weights` are the halves of a backward, for schedules that split
it."""
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
    "sums",
    "norms",
    "matrix",
    "update",
    "signs",
    "momentum",
    "checksums",
    "outer",
    "anchor",
]
"""The name in the text of an action: for a transfer, its source or its result; for a wait, what is complete after
it."""
Buffer = Literal[
    "param",
    "full",
    "held",
    "fresh",
    "sum",
    "grad",
    "due",
    "master",
    "outgoing",
    "given",
    "matrix",
    "staging",
    "codes",
    "work",
    "anchor",
    "outer",
    "messages",
    "signs",
    "arrived",
    "averaged",
]
"""Memory of one flat buffer on one rank.

`param` is the range that rests here and `master` what the optimizer updates; `full` is the whole buffer, `held` the
range kept until the backward; `fresh` is what a backward leaves, `sum` the intermediate result of a reduction, `grad`
what waits for the step and `due` what the update reads; `outgoing` is what was updated on the host, cast to the dtype
of the resting parameters. `matrix` stands for the whole matrices that this rank orthogonalizes, `given` for its pieces
of matrices that other ranks do. `staging` is memory for messages, `codes` for parameters as they are sent, if that is
not as they are (`Table.param_wire`); `work` is scratch memory of an update. `signs` are this rank's, by the rank that
averages them, `arrived` the other ranks' for this one to average, and `averaged` what all ranks have averaged.
`anchor` is what islands have in common of what the optimizer updates, `outer` an outer gradient, and `messages` the
memory in which it is sent, beside gradients of later steps: see `outer_step.py`.

The rows of the table give the tier of a buffer: see `tier_of` in `spec.py`.
"""


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of one action. Buffer names refer to the action's own flat buffer.

    `makes` is made from `reads`; if it already exists, in part or from a previous axis, the action continues from it
    instead. Buffers in `consumes` are freed when the action is done, those in `frees` at once. `changes` are written in
    place, where they exist. `scratch` is memory that the action takes; the wait that frees it gives it back, or the
    action itself if there is no such wait.

    A wait completes `waits`; with `keeps`, the same memory becomes that buffer, or is added to it.
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
    """Whether it makes one rank's part of what it reads."""
    sends: bool = False
    stream: Stream = "compute"
    """The stream on which it runs, unless it is waited for at once."""
    awaited: tuple[Subject, Subject] | None = None
    """The subjects of its wait: if another axis follows, and if it is the last."""


def _sum(of: Buffer, to: Subject, *, cuts: bool = False, sends: bool = True) -> Effect:
    """One step from gradients as they are to gradients as they have to be."""
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
    """From the device to the host, the last step of a gradient."""
    return Effect("sum", (of,), (of,), stream="evict", awaited=("sum", to))


def _fetch(of: Buffer, to: Buffer, awaited: tuple[Subject, Subject], consumes: tuple[Buffer, ...] = ()) -> Effect:
    """From the host to the device."""
    return Effect(to, (of,), consumes, stream="fetch", awaited=awaited)


def _gather(of: Buffer, to: Buffer, awaited: tuple[Subject, Subject], consumes: tuple[Buffer, ...] = ()) -> Effect:
    """One axis of an all-gather."""
    return Effect(to, (of,), consumes, scratch=("codes",), sends=True, stream="gather", awaited=awaited)


EFFECTS: dict[tuple[Verb, Subject], Effect] = {
    # parameters, in a pass
    ("gather", "param"): _gather("param", "full", ("range", "full")),
    ("fetch", "param"): _fetch("param", "full", ("range", "full")),
    ("decode", "param"): Effect("full", ("param",)),
    ("gather", "held"): _gather("held", "full", ("range", "full"), consumes=("held",)),
    ("slice", "held"): Effect("held", reads=("full",)),
    ("free", "full"): Effect(frees=("full",)),
    ("wait", "range"): Effect(waits="full", frees=("codes",)),
    ("wait", "full"): Effect(waits="full", frees=("codes",)),
    # gradients, in a pass
    ("reduce_scatter", "grad"): _sum("fresh", "grad", cuts=True),
    ("all_reduce", "grad"): _sum("fresh", "grad"),
    ("project", "grad"): _sum("fresh", "grad"),
    ("restore", "grad"): _sum("fresh", "grad"),
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
    ("agree", "sums"): Effect(reads=("due",), sends=True),
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
    # what an update averages over the ranks itself, one bit per element: see `sign_exchange.py`
    ("collect", "momentum"): Effect(
        "signs",
        reads=("due",),
        scratch=("arrived",),
        sends=True,
        stream="gather",
        awaited=("signs", "signs"),
    ),
    ("wait", "signs"): Effect(waits="signs", frees=("arrived",)),
    ("hand_back", "momentum"): Effect(
        "averaged",
        reads=("signs",),
        frees=("signs",),
        sends=True,
        stream="reduce",
        awaited=("momentum", "momentum"),
    ),
    ("wait", "momentum"): Effect(waits="averaged", frees=("averaged",)),
    # updates that are not one call for all units on the device: a unit's on the host, with its states read from and
    # written to a disk. memory/disk_memory.py reads ahead and writes behind on its own
    ("fetch", "states"): Effect(reads=("master",)),
    ("update", "master"): Effect(reads=("due",), changes=("master",)),
    ("evict", "states"): Effect(reads=("master",)),
    ("cast", "outgoing"): Effect("outgoing", reads=("master",)),
    ("fetch", "outgoing"): _fetch("outgoing", "param", ("updated", "param"), consumes=("outgoing",)),
    ("fetch", "updated"): _fetch("master", "param", ("updated", "param")),
    # parameters, after the update
    ("cast", "param"): Effect(reads=("master",), changes=("param",)),
    ("gather", "updated"): _gather("param", "param", ("updated", "param")),
    ("wait", "updated"): Effect(waits="param", frees=("codes",)),
    ("wait", "param"): Effect(waits="param", frees=("codes",)),
    ("broadcast", "buffers"): Effect(sends=True),
    # in outer steps: see `outer_step.py`
    ("subtract", "outer"): Effect("outer", reads=("anchor", "master")),
    ("all_reduce", "outer"): Effect(
        "outer", reads=("outer",), scratch=("messages",), sends=True, stream="reduce", awaited=("outer", "outer")
    ),
    ("wait", "outer"): Effect(waits="outer", frees=("messages",)),
    ("update", "anchor"): Effect(reads=("outer",), changes=("anchor",), frees=("outer",)),
    ("mix", "master"): Effect(reads=("anchor",), changes=("master",)),
    # in verified steps: see `verification.py`
    ("checksum", "param"): Effect(reads=("param",)),
    ("checksum", "master"): Effect(reads=("master",)),
    ("checksum", "states"): Effect(reads=("master",)),
    ("checksum", "due"): Effect(reads=("due",)),
    ("checksum", "full"): Effect(reads=("full",)),
    ("compare", "checksums"): Effect(sends=True),
}
"""By verb and subject. They determine the effect: an action means the same wherever it stands."""

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
    """Whether a sum is made in the memory of its source. `is_kept`: that memory stays for gradients.

    A sum that is a part of other memory is not left there, because all of that memory would stay allocated.
    """
    return effect.sends and is_same_dtype and (is_kept or not effect.cuts)
