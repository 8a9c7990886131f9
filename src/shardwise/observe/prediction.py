"""Predicts the time of a step in the run itself, for its record to have it beside the measured one.

[Note: what a prediction costs] Rank 0 rehearses the batch of its first forward on fake tensors, as `engine.rehearse`
does, before any step; later steps are not touched. Only a run with a record does, on a machine that was calibrated or
whose device has a profile by name, and a failure is a line in the log. What is split within layers, sequences or
experts is rehearsed with rank 0's parts, and what it would send is counted. Of a pipeline, rank 0 rehearses all stages
of the model as it was before it was split. Compiled kernels are not those that are counted, and a loop that calls the
stages itself has its own schedule: there is no prediction for these here.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.comm import World
from shardwise.errors import ModelError
from shardwise.fit.batch_rows import rows_of, with_rows
from shardwise.fit.clock import RankProgram
from shardwise.fit.hardware import Hardware
from shardwise.fit.hardware_here import described_hardware, with_ranks_of
from shardwise.fit.step_time import StepTime, step_time
from shardwise.observe.differences import Difference, compared, seconds_by_action
from shardwise.observe.record import RunRecord, warns_if_unwritable
from shardwise.observe.run_files import PREDICTED
from shardwise.parallel.experts import EXPERT_LOAD
from shardwise.plan.mesh import SEQUENCE_AXIS, Mesh
from shardwise.runtime.micro_batches import MicroBatch
from shardwise.sharded.rehearsed_step import rehearse_step
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.system.own_hooks import hook
from shardwise.system.telemetry import Event, Lap, write_trace

NUM_COMPARED = 10
"""Steps that are compared with the prediction, after the first few."""
_log = logging.getLogger("shardwise")


class Prediction:
    """Of one engine's step. See [Note: what a prediction costs]."""

    def __init__(self, sharded: ShardedModel, world: World) -> None:
        """Nothing is predicted where it is impossible. Call on rank 0."""
        self._sharded = sharded
        self._foreseen: Foreseen | None = None
        self._line: dict[str, Any] = {}
        self._laps: list[Lap] = []
        self.written: tuple[Foreseen, int] | None = None
        """What was foreseen, and for how many micro-batches, since the line about it was written."""
        self._num_steps = self._num_micro_batches = 0
        hardware = None if _is_beyond(sharded) else described_hardware(world)
        if hardware is None:
            return
        self._hardware = with_ranks_of(hardware, world)
        self._hook = sharded.model.register_forward_pre_hook(hook(self._before_forward), prepend=True, with_kwargs=True)
        sharded.parts.hooks.callback(self._hook.remove)

    def _before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self._hook.remove()
        self._num_micro_batches = -self._sharded.parts.runner.passes.num_backwards
        begun = time.perf_counter()
        try:
            called, has_stages = MicroBatch(args, kwargs), self._sharded.parts.pipeline is not None
            foresee = Foreseen.of_stages if has_stages else Foreseen.of
            self._foreseen = foresee(self._sharded, called, self._hardware)
            _log.info("What a step computes was counted in %.1f s.", time.perf_counter() - begun)
        except Exception as error:  # never into a loop that would train without it
            _log.info("The time of a step is not predicted: %s", error)

    def write(self, record: RunRecord | None, step: int, num_steps: int) -> None:
        """At the first log, which is after `num_steps`: write the line, and the timeline beside the record. By now it
        is known how many micro-batches the loop accumulates, whatever the plan says."""
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is None:
            return
        self._num_micro_batches += self._sharded.parts.runner.passes.num_backwards
        num_micro_batches = max(1, round(self._num_micro_batches / num_steps))
        if self._sharded.parts.pipeline is not None:
            num_micro_batches = self._sharded.plan.accumulate  # a schedule has as many
        try:
            self._line, events = foreseen.line(num_micro_batches)
        except Exception as error:  # likewise
            _log.info("The time of a step is not predicted: %s", error)
            return
        self.written = foreseen, num_micro_batches
        if record is None:
            return
        record.write("predicted", step=step, **self._line)
        path = record.path.with_name(PREDICTED)
        with warns_if_unwritable(path):
            write_trace(path, events)

    def compare(self, lap: Lap, num_steps: int, events: list[Event]) -> Difference | None:
        """Count a lap of `num_steps`, and once they are `NUM_COMPARED` return how far they are from the prediction.
        `events` are those of one step."""
        if self._num_steps >= NUM_COMPARED or not self._line:
            return None
        self._laps.append(lap)
        self._num_steps += num_steps
        if self._num_steps < NUM_COMPARED:
            return None
        on_host = self._sharded.parts.sharding.device.type == "cpu"
        measured, row = _a_step(self._laps, self._num_steps)
        return compared(self._line, measured, row, seconds_by_action(events) if on_host else None)


@dataclass(frozen=True)
class Foreseen:
    """What a rank's step does, as far as a rehearsal of one micro-batch tells."""

    programs: tuple[RankProgram, ...]
    """Of this rank, or of one of each stage."""
    hardware: Hardware
    mesh: Mesh

    @classmethod
    def of(cls, sharded: ShardedModel, called: MicroBatch, hardware: Hardware) -> Foreseen:
        """Asks no other rank."""
        treatments = sharded.parts.sharding.treatments
        found = rehearse_step(sharded, _part_of(sharded, called), None, EXPERT_LOAD, treatments, counts_work=True)
        return cls((found.program(sharded),), hardware, sharded.mesh)

    @classmethod
    def of_stages(cls, sharded: ShardedModel, called: MicroBatch, hardware: Hardware) -> Foreseen:
        """The same, of a step that goes through stages. Raises `ModelError` for what is no such step."""
        sharding, passes = sharded.parts.sharding, sharded.parts.runner.passes
        assert sharding.plain is not None, "nothing is predicted without it"
        if passes.num_calls:
            raise ModelError("A loop that calls a model in stages has a schedule of its own.")
        on_cpu = sharding.device.type == "cpu"
        with torch.random.fork_rng([]), sharded.world.journal.unobserved():
            programs = sharding.plain.programs(_part_of(sharded, called), sharded.plan, sharded.mesh, on_cpu=on_cpu)
        return cls(tuple(programs), hardware, sharded.mesh)

    def line(self, num_micro_batches: int) -> tuple[dict[str, Any], list[list[Event]]]:
        """The record's line about a step, and its timeline, in which equal micro-batches are left out."""
        time = self._time(num_micro_batches)
        actions = _actions(time)
        if time.timeline.ranks[0].num_repeated:
            one, two = (Counter(_actions(self._time(number))) for number in (1, 2))
            actions = {name: two[name] + (num_micro_batches - 2) * (two[name] - one[name]) for name in two}
        line = {
            "hardware": self.hardware.name,
            "seconds": time.timeline.step_seconds,
            "mfu": time.timeline.mfu,
            "parts": time.breakdown,
            "actions": actions,
        }
        return line, time.timeline.as_chrome_trace()

    def _time(self, num_micro_batches: int) -> StepTime:
        return step_time(self.programs, self.hardware, self.mesh, num_micro_batches=num_micro_batches)


def _part_of(sharded: ShardedModel, called: MicroBatch) -> object:
    """A rank's part of a micro-batch."""
    sequence = sharded.parts.sequence
    if sequence is None or not sequence.splits(called.args, called.kwargs):
        return called
    rows = rows_of(called)
    return with_rows(called, rows, rows, sharded.mesh.size(SEQUENCE_AXIS))


def _actions(time: StepTime) -> dict[str, float]:
    return seconds_by_action(time.timeline.as_chrome_trace()[0])


def _a_step(laps: Sequence[Lap], num_steps: int) -> tuple[float, dict[str, Any]]:
    """Seconds of a step, and how this rank spent them."""
    waited: Counter[str] = Counter()
    for lap in laps:
        waited.update(lap.waited)
    row = {name: sum(getattr(lap, name) for lap in laps) / num_steps for name in ("computing", "idle", "disk")}
    each = {axis: seconds / num_steps for axis, seconds in waited.items()}
    return sum(lap.seconds for lap in laps) / num_steps, {**row, "waited": each}


def _is_beyond(sharded: ShardedModel) -> bool:
    """Whether there is none: see [Note: what a prediction costs]."""
    has_no_stages = sharded.parts.pipeline is not None and sharded.parts.sharding.plain is None
    return has_no_stages or sharded.plan.compile is not None or sharded.parts.optimizer is None
