"""A step once more on all ranks, with durations that they have measured: how long would it take if some were others?

The clock (`clock.py`) prices a program for one rank of each kind. A replay has every rank, with its own durations, and
no prices: a rank's own work takes what it took, and what it waits for others follows from the program.

[Note: what a replay knows] The time of a place is divided evenly among its occurrences in a step. A collective begins
when the last rank of its group comes to it, and one that was issued ahead is joined where the program waits for it.
Its own time is what even the rank of its group that waits least has waited along that axis, so what was hidden behind
computation takes no time here. A step begins on all ranks together, because `log` is a meeting of all. Module-level
messages (`tp`, `sp`, `ep`) meet once after each unit. In a pipeline, ops follow its schedule; messages between stages
take no time of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ProgramError
from shardwise.plan.mesh import MODEL_AXES, STAGE_AXIS, Mesh
from shardwise.program import Action, Program, StepProgram
from shardwise.program.places import MOVES, OPTIMIZER, place_before
from shardwise.program.schedule import Op, Schedule
from shardwise.system.telemetry import LOADER

MOST_MICRO_BATCHES = 2
"""Of a step that accumulates, as many are replayed; all of its time is divided among them."""
Seconds = NDArray[np.float64]
Kind = Literal["work", "meet", "issue", "join", "send", "receive"]


@dataclass(frozen=True, slots=True)
class Event:
    """What a rank does next: work at the place `name`, wait for all along `axis`, or issue and join a collective along
    `axis`, send and receive a message, which have names."""

    kind: Kind
    name: str = ""
    axis: str = ""


Script = tuple[Event, ...]
MEET_STAGES = Event("meet", axis=STAGE_AXIS)


def script_of(step: StepProgram, mesh: Mesh, num_micro_batches: int = 1) -> Script:
    """What each rank does in a step, without a pipeline."""
    inside = [axis for axis in mesh.axes if axis in MODEL_AXES and axis != STAGE_AXIS and mesh.size(axis) > 1]
    events: list[Event] = []
    for _ in range(min(max(1, num_micro_batches), MOST_MICRO_BATCHES)):
        events.append(Event("work", LOADER))
        events += _of_program(step.micro_batch, mesh, inside)
    events += _of_program(step.step, mesh, inside)
    return tuple(events)


def scripts_of(schedule: Schedule, mesh: Mesh) -> tuple[Script, ...]:
    """What the ranks of each place along `pp` do in a step: their ops, then a meeting of all, and the update."""
    inside = [axis for axis in mesh.axes if axis in MODEL_AXES and axis != STAGE_AXIS and mesh.size(axis) > 1]
    scripts = []
    for row in schedule.rows:
        events = [Event("work", LOADER)]
        for op in row:
            source, made = _messages(op, schedule.num_stages)
            events += [Event("receive", source)] if source else []
            events.append(Event("work", {"F": "forward", "W": "weights"}.get(op.kind, "backward")))
            events += [Event("meet", axis=axis) for axis in inside]
            events += [Event("send", made)] if made else []
        events += [Event("meet", axis=axis) for axis in mesh.axes if axis != STAGE_AXIS and mesh.size(axis) > 1]
        events += [MEET_STAGES, Event("work", OPTIMIZER)]
        scripts.append(tuple(events))
    return tuple(scripts)


def _of_program(program: Program, mesh: Mesh, inside: Sequence[str]) -> list[Event]:
    events: list[Event] = []
    for block in program:
        events.append(Event("work", place_before(block.moment)))
        if block.moment.edge == "after" and block.moment.unit:
            events += [Event("meet", axis=axis) for axis in inside]
        for action in block.actions:
            events += _of_action(action, mesh)
        events += [Event("work", MOVES)] if block.actions else []
    return events


def _of_action(action: Action, mesh: Mesh) -> list[Event]:
    effect = action.effect
    if effect.waits is not None:
        return [Event("join", f"{action.flat} {effect.waits}")]
    if not effect.sends or action.over not in mesh.axes:
        return []
    if action.stream == "compute":
        return [Event("meet", axis=action.over)]
    return [Event("issue", f"{action.flat} {effect.makes}", action.over)]


def _messages(op: Op, num_stages: int) -> tuple[str, str]:
    """The message that an op waits for, and the one that it makes; empty if there is none."""
    last = num_stages - 1
    if op.kind == "F":
        source = f"F{op.micro_batch}@{op.stage - 1}" if op.stage else ""
        return source, f"F{op.micro_batch}@{op.stage}" if op.stage < last else ""
    if op.kind == "W":
        return "", ""
    source = f"B{op.micro_batch}@{op.stage + 1}" if op.stage < last else ""
    return source, f"B{op.micro_batch}@{op.stage}" if op.stage else ""


class Replay:
    """Replays steps of one job. Pure."""

    def __init__(self, scripts: Sequence[Script], mesh: Mesh) -> None:
        """One script for all ranks, or one for each place along `pp`. Raises `ProgramError` for another number."""
        num_places = mesh.degree(STAGE_AXIS)
        if len(scripts) not in (1, num_places):
            raise ProgramError(f"A mesh with {num_places} pipeline ranks takes as many scripts, not {len(scripts)}.")
        self.mesh = mesh
        self._scripts = list(scripts)

    @property
    def has_stages(self) -> bool:
        return len(self._scripts) > 1

    def seconds(self, work: Mapping[str, Seconds], links: Mapping[str, Seconds]) -> Seconds:
        """How long each of some steps takes, `[steps]`. `work` is each rank's own, by place, and `links` what
        collectives take by themselves, by axis: seconds of a step, `[steps, ranks]`, ranks as the mesh numbers them."""
        ranks = []
        for place, script in enumerate(self._scripts):
            own = {name: self._at(place, values) for name, values in work.items()}
            between = {axis: self._at(place, values) for axis, values in links.items()}
            ranks.append(_Ranks(script, self._axes, own, between))
        sent: dict[str, Seconds] = {}
        while not all(one.has_ended for one in ranks):
            has_moved = [one.run(sent) for one in ranks]
            if all(one.meets_stages for one in ranks):
                last = np.max([one.now for one in ranks], axis=0)
                for one in ranks:
                    one.meet_stages(last)
            elif not any(has_moved):
                raise ProgramError("The schedule never ends: every rank waits for a message that none sends.")
        ends = np.stack([one.now.reshape(len(one.now), -1).max(axis=1) for one in ranks])
        return np.asarray(ends.max(axis=0))

    @property
    def _axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.mesh.axes if not (self.has_stages and axis == STAGE_AXIS))

    def _at(self, place: int, values: Seconds) -> Seconds:
        """Of `[steps, ranks]` those at `place` along `pp`, `[steps, *sizes of the other axes]`."""
        by_axis = np.asarray(values, dtype=np.float64).reshape(len(values), *self.mesh.sizes)
        if not self.has_stages:
            return by_axis
        return np.asarray(by_axis.take(place, axis=1 + self.mesh.axes.index(STAGE_AXIS)))


class _Ranks:
    """The ranks that follow one script, each with its own time."""

    def __init__(
        self, script: Script, axes: Sequence[str], work: Mapping[str, Seconds], links: Mapping[str, Seconds]
    ) -> None:
        self._script, self._axes = script, axes
        names = Counter(event.name for event in script if event.kind == "work")
        self._work: dict[str, Seconds] = {}
        first = np.zeros_like(next(iter(work.values())))
        for place, seconds in work.items():
            name = next((one for one in (place, place.partition(" ")[0]) if one in names), "")
            if not name:  # what has no place of its own in the script comes first
                first += seconds
            else:
                self._work[name] = self._work.get(name, 0.0) + seconds / names[name]
        number = Counter(event.axis for event in script)
        self._links = {axis: seconds / number[axis] for axis, seconds in links.items() if number[axis]}
        self.now = first
        self._place = 0
        self._flights: dict[str, tuple[str, Seconds]] = {}

    @property
    def has_ended(self) -> bool:
        return self._place == len(self._script)

    @property
    def meets_stages(self) -> bool:
        """Whether the ranks wait for those of all other stages."""
        return not self.has_ended and self._script[self._place] == MEET_STAGES

    def meet_stages(self, last: Seconds) -> None:
        self.now = last.copy()
        self._place += 1

    def run(self, sent: dict[str, Seconds]) -> bool:
        """Go on until a message is missing, or all stages meet. Whether anything was done."""
        begun = self._place
        while not self.has_ended and not self.meets_stages:
            event = self._script[self._place]
            match event.kind:
                case "work":
                    if event.name in self._work:
                        self.now = self.now + self._work[event.name]
                case "meet":
                    self.now = self._last(event.axis) + self._links.get(event.axis, 0.0)
                case "issue":
                    self._flights[event.name] = event.axis, self._last(event.axis)
                case "join" if event.name in self._flights:
                    axis, last = self._flights.pop(event.name)
                    self.now = np.maximum(self.now, last) + self._links.get(axis, 0.0)
                case "send":
                    sent[event.name] = self.now
                case "receive":
                    if event.name not in sent:
                        break
                    self.now = np.maximum(self.now, sent[event.name])
            self._place += 1
        return self._place > begun

    def _last(self, axis: str) -> Seconds:
        """When the last rank of each group along `axis` has come here."""
        return np.asarray(self.now.max(axis=1 + self._axes.index(axis), keepdims=True))
