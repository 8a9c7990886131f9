"""The program of outer steps, which bring together what islands have trained apart.

[Note: islands] Between two outer steps parameters, gradients and optimizer states vary along the axis `island`: inside
an island the program of a step is that of its preset, and nothing crosses islands. The *anchor* is the model that they
have in common. In an outer step each island subtracts its master weights from the anchor, the differences are averaged
over the islands as if they were gradients, and an optimizer updates the anchor by them; each island goes on from there.
That is DiLoCo (arXiv:2311.08105), whose outer gradient is this difference.

Streaming DiLoCo (arXiv:2501.18512) is the same for *fragments* of the model, whose outer steps come in turn, so that no
message is larger than one of them. With an overlap, islands go on training while outer gradients are sent, and with
`mix` they keep a share of what they have become since.

Every rank of an island has the anchor of the elements that it updates, so outer gradients go from each rank to those
with the same place in other islands, and are sent once, however many ranks an island has. What is updated reaches the
other ranks of the island as after any update.

An island that loses a rank leaves the job, and the others average over those that are left (`elastic/`). A single one
has outer steps too, of its own outer gradients, so that the anchor and its momentum are there when others join.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.plan.placement.fragment import Fragment
from shardwise.program.action import AFTER_STEP, Action, Block, Program, actions_of
from shardwise.program.build import Actions, build_restore, outer_gradients
from shardwise.program.check import check_outer
from shardwise.program.spec import FlatSpec, UnitSpec
from shardwise.program.streams import pipelined


@dataclass(frozen=True)
class OuterStep:
    """The outer step of one fragment: `begin` sends outer gradients, `settle` makes the new anchor of what has come,
    and `end` lets the island go on from there. Without an overlap all follow on one another."""

    fragment: Fragment
    begin: Block
    settle: Block
    end: Block

    @property
    def program(self) -> Program:
        return self.begin, self.settle, self.end

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends to other islands."""
        return sum(action.sent_bytes for action in self.begin.actions if action.communicates)


def build_outer(units: Sequence[UnitSpec]) -> tuple[OuterStep, ...]:
    """The outer steps of all fragments; none without islands. Raises `ProgramError` if one does not pass its check."""
    trained = [unit for unit in units if unit.trainable]
    outers = (flat.table.outer for unit in trained for flat in unit.flats)
    fragments = next((outer.fragments for outer in outers if outer is not None), ())
    return tuple(_outer_step(fragment, fragment.some_of(trained)) for fragment in fragments)


def _outer_step(fragment: Fragment, units: Sequence[UnitSpec]) -> OuterStep:
    flats = [flat for unit in units for flat in unit.flats if flat.trainable]
    begins = [_begin(flat) for flat in flats]
    settles = [_settle(flat, begin) for flat, begin in zip(flats, begins, strict=True)]
    begin, settle = _joined(begins), _joined(settles)
    if fragment.begins == fragment.ends:  # nothing is computed meanwhile, so two outer gradients at a time are enough
        begin, settle = _one_after_the_other(begins, settles), ()
    mix = tuple(Action("mix", flat.name, "master") for flat in flats)
    blocks = (Block(AFTER_STEP, actions) for actions in (begin, settle, (*mix, *pipelined(build_restore(units)))))
    step = OuterStep(fragment, *blocks)
    check_outer(actions_of(step.program), units)
    return step


def _begin(flat: FlatSpec) -> Actions:
    return tuple(action.on(action.effect.stream) for action in outer_gradients(flat))


def _settle(flat: FlatSpec, begin: Actions) -> Actions:
    is_sent = any(action.communicates for action in begin)  # a single island has nobody to send to
    wait = (Action("wait", flat.name, "outer"),) if is_sent else ()
    return (*wait, Action("update", flat.name, "anchor"))


def _one_after_the_other(begins: Sequence[Actions], settles: Sequence[Actions]) -> Actions:
    """Each flat buffer's sum is under way while the next one's is begun."""
    before: list[Actions] = [(), *settles]
    return _joined([part for pair in zip([*begins, ()], before, strict=True) for part in pair])


def _joined(parts: Sequence[Actions]) -> Actions:
    return tuple(action for part in parts for action in part)


def in_words(steps: Sequence[OuterStep]) -> list[str]:
    """When each fragment has its outer step, of what, and what it sends, for `explain`."""
    every = steps[0].fragment.every
    lines = []
    for step in steps:
        names = list(dict.fromkeys(action.flat for action in step.begin.actions))
        of = f"fragment {step.fragment.number} ({_listed(names)}): " if len(steps) > 1 else ""
        lines.append(f"{of}{step.fragment.in_words()}")
    sent = sum(step.sent_bytes for step in steps)
    lines.append(f"a rank sends {sent} B to other islands in {every} steps, {sent // every} B per step")
    return lines


def _listed(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[: most - 1])}, ... {names[-1]}"
