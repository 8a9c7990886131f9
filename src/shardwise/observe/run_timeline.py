"""A timeline of one step on the ranks, and its program: files that rank 0 writes beside the record."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.comm import World
from shardwise.observe.record import warns_if_unwritable
from shardwise.observe.run_files import PROGRAM, TIMELINE
from shardwise.program import render
from shardwise.sharded.engine_report import describe
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.system.telemetry import Event, write_trace

TIMELINE_STEP = 3
"""The first steps record and compile; this one is typical."""
TIMELINE_RANKS = 8
"""How many ranks are included in the timeline."""


class StepTimeline:
    """Recorded from the end of one step to the end of the next, and gathered after a later one."""

    def __init__(self, folder: Path | None, *, is_made: bool) -> None:
        """Nothing is recorded without a `folder`, or if former ranks have already made a timeline."""
        self._folder = folder
        self._is_done = folder is None or is_made
        self._is_on = False
        self._events: list[Event] | None = None

    @property
    def events(self) -> list[Event]:
        """Those of this rank; empty until they are recorded."""
        return self._events or []

    def note_step(self, sharded: ShardedModel) -> None:
        """Called after every step."""
        if self._is_on:
            self._is_on, self._events = False, sharded.parts.timeline.stop()

    def give_up(self) -> None:
        self._is_on, self._events, self._is_done = False, None, True

    def share(self, sharded: ShardedModel, world: World) -> None:
        """Begin to record, or gather and write. Called between two steps, by all ranks."""
        if self._is_done:
            return
        timeline, step = sharded.parts.timeline, sharded.progress.num_steps
        if self._events is None and not self._is_on and step >= TIMELINE_STEP - 1 and not timeline.is_on:
            timeline.start()
            self._is_on = True
        elif self._events is not None:
            mine = self._events if world.rank < TIMELINE_RANKS else []
            told = world.exchange(json.dumps(mine).encode(), "timeline")
            self._is_done = True
            if world.rank == 0 and self._folder is not None:
                with warns_if_unwritable(self._folder / TIMELINE):
                    write_trace(self._folder / TIMELINE, [json.loads(one) for one in told[:TIMELINE_RANKS]])
                program = sharded.parts.runner.programs.program
                text = f"{describe(sharded)}\n\n{render(program.micro_batch)}{render(program.step)}"
                with warns_if_unwritable(self._folder / PROGRAM):
                    (self._folder / PROGRAM).write_text(text, encoding="utf-8")
