"""The programs of one model: planned from the model's order until the first backward has ended, then from the
record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.program import (
    AFTER_STEP,
    END_OF_BACKWARD,
    Block,
    Moment,
    StepProgram,
    Trace,
    UnitSpec,
    build_restore,
    pipelined,
    plan_step,
    schedule_trace,
    straight_passes,
    straight_trace,
)
from shardwise.program.schedule import Op
from shardwise.program.step_program import PrefetchBytes
from shardwise.runtime.executor import BoundBlock, Executor
from shardwise.runtime.script import LONGEST_TRACE, Script


class Programs:
    """Plans programs from recorded passes, and binds them to memory and collectives."""

    def __init__(self, specs: Sequence[UnitSpec], executor: Executor, prefetch_bytes: PrefetchBytes) -> None:
        self.specs = tuple(specs)
        self.num_recordings = 0
        self._executor = executor
        self._prefetch_bytes = prefetch_bytes
        self._buffers_bytes = 0
        self.program = self._planned(straight_trace(self.specs))
        """The program of the training step."""
        self.step = self._bound_step()
        self._restore = executor.bind((Block(AFTER_STEP, pipelined(build_restore(self.specs))),))[0]
        self._verification: dict[Moment, BoundBlock] = {}

    @property
    def restore(self) -> BoundBlock:
        """The block that copies master weights back to the parameters."""
        is_of_units = any(moment.unit for moment in self.step)
        return self._restore if is_of_units else self.step[AFTER_STEP]

    @property
    def verification(self) -> dict[Moment, BoundBlock]:
        """The blocks that are added to verified steps; bound when they are first needed."""
        if not self._verification:
            from shardwise.program.verification import build_verification  # only plans that verify load it

            bound = self._executor.bind(build_verification(self.specs))
            self._verification = {block.moment: block for block in bound}
        return self._verification

    def update_units(self) -> None:
        """Run the updates that are done unit by unit."""
        for moment, block in self.step.items():
            if moment.unit:
                block.run()

    @property
    def trace(self) -> Trace:
        """The order in which units are used in one micro-batch, or over a pipeline's schedule."""
        return tuple(block.moment for block in self.program.micro_batch if block.moment != END_OF_BACKWARD)

    def foresee_schedule(self, row: Sequence[Op], stages: Mapping[int, Sequence[UnitSpec]]) -> None:
        """Plan steps over `row` of a pipeline's schedule; `stages` are the units of each stage on this rank."""
        self.program = self._planned(schedule_trace(row, straight_passes(row, stages)))
        self.step = self._bound_step()

    def learn_training(self, script: Script, trace: Trace | None = None, *, reduces: bool) -> bool:
        """Make the program of a pass that goes the way of `trace`, for `script`; without it of the schedule that
        `script` has recorded. False, and no change, if the record is too long."""
        if script.is_too_long:
            return False
        if trace is None:
            trace = schedule_trace(script.recorded_row(), script.recorded_passes())
        planned = self._planned(trace, reduces=reduces)
        if reduces:
            self.program = planned
        script.learn(self._executor.bind(planned.micro_batch))
        self.num_recordings += 1
        return True

    def learn_evaluation(self, script: Script, trace: Trace) -> bool:
        """Make the program of an evaluation that goes the way of `trace`. False also if it used no unit."""
        if not 0 < len(trace) < LONGEST_TRACE:
            return False
        script.learn(self._executor.bind(self._planned(trace, training=False).micro_batch))
        return True

    def foresee_buffers(self, num_bytes: int) -> None:
        """Plan for broadcasting `num_bytes` of rank 0's changed buffers at the end of every step."""
        self._buffers_bytes = num_bytes
        self.program = self._planned(self.trace)
        self.step = self._bound_step()

    def _planned(self, trace: Trace, *, training: bool = True, reduces: bool = True) -> StepProgram:
        return plan_step(
            self.specs,
            trace,
            prefetch_bytes=self._prefetch_bytes,
            training=training,
            reduces=reduces,
            buffers_bytes=self._buffers_bytes,
        )

    def _bound_step(self) -> dict[Moment, BoundBlock]:
        return {block.moment: block for block in self._executor.bind(self.program.step)}
