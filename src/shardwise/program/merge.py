"""The path through a model, from what one rank has recorded of it, and from several ranks' own paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

from shardwise.program.action import Moment
from shardwise.program.spec import Trace


def in_order(recorded: Sequence[Moment]) -> Trace:
    """The record, without ends that were premature.

    A program that was followed at first may have closed a backward too early; it was closed again when it had ended,
    and only that counts. Nor does a backward count that was closed because it ended on other ranks, and never began
    here.
    """
    backwards, closed = [], set()
    for moment in reversed(recorded):
        if moment.phase != "forward":
            if moment.edge == "before":
                closed.discard(moment.unit)
            elif moment.unit in closed:
                continue
            else:
                closed.add(moment.unit)
        backwards.append(moment)
    path, opened = [], set()
    for moment in reversed(backwards):
        if moment.phase != "forward" and moment.edge == "before":
            opened.add(moment.unit)
        if moment.unit and (moment.phase == "forward" or moment.unit in opened):
            path.append(moment)
    return tuple(path)


def merged(traces: Sequence[Trace]) -> Trace:
    """A trace that contains each of `traces` in its order, except for ends that another one has later.

    What several have in common is in it once, as far as one order allows that. The same on every rank that has the same
    list.
    """
    whole: Trace = ()
    for trace in dict.fromkeys(traces):
        whole = _joined(whole, trace)
    return in_order(whole)


def extended(trace: Trace, former: Trace) -> Trace:
    """`trace`, and what only `former` has begun."""
    begun, before = (Counter(moment for moment in one if moment.edge == "before") for one in (trace, former))
    return trace if before <= begun else merged([trace, former])


def _joined(one: Trace, other: Trace) -> Trace:
    joined: list[Moment] = []
    for tag, start, stop, other_start, other_stop in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        joined += one[start:stop]
        if tag != "equal":
            joined += other[other_start:other_stop]
    return tuple(joined)
