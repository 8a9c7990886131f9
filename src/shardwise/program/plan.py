"""The passes in their order: what turns units and a trace into the program that runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.program.action import Block, Program
from shardwise.program.build import build_pass, build_step
from shardwise.program.check import check
from shardwise.program.footprint import Footprint, footprint
from shardwise.program.prefetch import prefetch
from shardwise.program.spec import Trace, UnitSpec
from shardwise.program.streams import overlap, pipelined


@dataclass(frozen=True)
class StepProgram:
    """One training step: `micro_batch` as often as gradients are accumulated, then `step`."""

    micro_batch: Program
    step: Program
    footprint: Footprint

    def sent_bytes(self, num_micro_batches: int = 1) -> int:
        """What one rank puts on the wire in one optimizer step."""
        per_batch = sum(action.sent_bytes for block in self.micro_batch for action in block.actions)
        per_step = sum(action.sent_bytes for block in self.step for action in block.actions)
        return num_micro_batches * per_batch + per_step


def plan_step(
    units: Sequence[UnitSpec],
    trace: Trace,
    *,
    prefetch_bytes: int | None = None,
    training: bool = True,
    reduces: bool = True,
    buffers_bytes: int = 0,
    states_per_param: int = 2,
    num_micro_batches: int = 1,
) -> StepProgram:
    """Build, prefetch, overlap and check the program of one step.

    `prefetch_bytes` is how much may lie gathered ahead of its use; `None` means the largest unit, so
    that the next one is always on its way. `training` and `reduces` are those of `build_pass`.
    """
    full_bytes = {flat.name: flat.full_bytes for unit in units for flat in unit.flats}
    largest = max((sum(flat.full_bytes for flat in unit.flats) for unit in units), default=0)
    budget = largest if prefetch_bytes is None else prefetch_bytes
    micro_batch = overlap(prefetch(build_pass(units, trace, training=training, reduces=reduces), full_bytes, budget))
    check(micro_batch, units, reduces=reduces)
    step = tuple(
        Block(block.moment, pipelined(block.actions)) for block in build_step(units, buffers_bytes=buffers_bytes)
    )
    held = footprint(units, micro_batch, step, states_per_param=states_per_param, num_micro_batches=num_micro_batches)
    return StepProgram(micro_batch, step, held)
