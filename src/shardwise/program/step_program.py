"""Runs the planning passes in order, from units and a trace to the program that runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from shardwise.plan.mesh import Mesh
from shardwise.program.action import Action, Program, actions_of
from shardwise.program.activations import Activations
from shardwise.program.build import build_pass, build_step
from shardwise.program.check import check, check_step
from shardwise.program.footprint import Footprint, footprint
from shardwise.program.host_bytes import sent_by_hosts
from shardwise.program.matrix_exchange import MatrixExchange, matrix_exchanges
from shardwise.program.prefetch import prefetch
from shardwise.program.spec import Trace, UnitSpec
from shardwise.program.streams import awaited_later, overlap, pipelined_step
from shardwise.program.whole_schedule import build_schedule, is_over_schedule

if TYPE_CHECKING:
    from shardwise.program.outer_step import OuterStep


PrefetchBytes = int | Literal["auto"]
"""How much may be gathered ahead of its use; `"auto"`: as much as the largest unit has, so that the next unit is always
being gathered."""


@dataclass(frozen=True)
class StepProgram:
    """One training step: `micro_batch` as often as gradients are accumulated, then `step`.

    Under a pipeline `micro_batch` is the program of the whole schedule on one rank and runs once; `num_micro_batches`
    in the methods below then makes no difference.
    """

    units: Sequence[UnitSpec]
    micro_batch: Program
    step: Program
    matrix_exchanges: Mapping[str, MatrixExchange] = field(default_factory=dict)
    is_over_schedule: bool = False
    outer_steps: Sequence[OuterStep] = ()
    """With islands: what follows some of the steps. Bytes that are sent or copied in one step do not include it."""

    def _times(self, num_micro_batches: int) -> int:
        """How often `micro_batch` runs in a step."""
        return 1 if self.is_over_schedule else num_micro_batches

    def _counted(self, num_micro_batches: int) -> Iterator[tuple[Action, int]]:
        """Each action, and how often it runs in a step."""
        for program, times in ((self.micro_batch, self._times(num_micro_batches)), (self.step, 1)):
            for action in actions_of(program):
                yield action, times

    def sent_bytes(self, num_micro_batches: int = 1, coordinate: Mapping[str, int] | None = None) -> int:
        """Bytes that the rank at `coordinate` of the mesh sends in one optimizer step.

        Ranks differ only in what whole matrices need; without `coordinate` that is the most of any rank.
        """
        return sum(times * self._sent(action, coordinate) for action, times in self._counted(num_micro_batches))

    def sent_by_axis(self, num_micro_batches: int = 1) -> dict[str, int]:
        """`sent_bytes`, the most of any rank, by mesh axis."""
        sent: dict[str, int] = {}
        for action, times in self._counted(num_micro_batches):
            if self._sent(action):
                sent[action.over] = sent.get(action.over, 0) + times * action.sent_bytes
        return sent

    def sent_by_hosts(self, mesh: Mesh, local_size: int, num_micro_batches: int = 1) -> list[int]:
        """Bytes that leave each host in one optimizer step, with `local_size` ranks on each; see `sent_by_hosts`."""
        per_batch = sent_by_hosts(actions_of(self.micro_batch), mesh, local_size)
        per_step = sent_by_hosts(actions_of(self.step), mesh, local_size)
        times = self._times(num_micro_batches)
        return [times * batch + step for batch, step in zip(per_batch, per_step, strict=True)]

    def footprint(
        self,
        *,
        states_per_param: int = 2,
        num_micro_batches: int = 1,
        coordinate: Mapping[str, int] | None = None,
        activations: Activations | None = None,
        local_size: int = 1,
    ) -> Footprint:
        """Bytes held on each rank; see `footprint`."""
        return footprint(
            self.units,
            self.micro_batch,
            self.step,
            states_per_param=states_per_param,
            num_micro_batches=self._times(num_micro_batches),
            coordinate=coordinate,
            activations=activations,
            outer_steps=self.outer_steps,
            local_size=local_size,
        )

    def copied_bytes(self, num_micro_batches: int = 1) -> dict[str, int]:
        """Bytes copied between this rank's device and lower tiers in one optimizer step, by verb: `fetch` and
        `evict`."""
        copied: dict[str, int] = {}
        for action, times in self._counted(num_micro_batches):
            if action.copies:
                copied[action.verb] = copied.get(action.verb, 0) + times * action.sent_bytes
        return copied

    def _sent(self, action: Action, coordinate: Mapping[str, int] | None = None) -> int:
        """What the rank at `coordinate` sends for it; without one, the most that any rank sends."""
        if action.copies:
            return 0
        if coordinate is None or action.verb not in ("collect", "hand_back") or action.subject != "update":
            return action.sent_bytes
        over = self.matrix_exchanges[action.flat]
        by_range = over.given_bytes if action.verb == "collect" else over.taken_bytes
        return by_range[over.range_of(coordinate)]


def plan_step(
    units: Sequence[UnitSpec],
    trace: Trace,
    *,
    prefetch_bytes: PrefetchBytes = "auto",
    training: bool = True,
    reduces: bool = True,
    buffers_bytes: int = 0,
    checks: bool = True,
) -> StepProgram:
    """Build, prefetch, overlap and check the program of one step: of a micro-batch, or of a pipeline's schedule if the
    trace is of one.

    `training` and `reduces` are those of `build_pass`, `buffers_bytes` that of `build_step`. Raises
    `ProgramError` if the program does not pass its check. Without `checks`, which take a quarter of the time, it is for
    a price alone.
    """
    full_bytes = {flat.name: flat.evenly(flat.full_bytes) for unit in units for flat in unit.flats}
    largest = max((sum(full_bytes[flat.name] for flat in unit.flats) for unit in units), default=0)
    budget = largest if prefetch_bytes == "auto" else prefetch_bytes
    over_schedule = is_over_schedule(trace)
    if over_schedule:
        built = build_schedule(units, trace, reduces=reduces)
    else:
        built = build_pass(units, trace, training=training, reduces=reduces)
    grad_bytes = {flat.name: flat.evenly(flat.grad_bytes) for unit in units for flat in unit.flats}
    micro_batch = overlap(prefetch(built, full_bytes, budget), grad_bytes)
    step = awaited_later(pipelined_step(build_step(units, buffers_bytes=buffers_bytes)), units)
    if checks:
        check(micro_batch, units, reduces=reduces)
        check_step(step, units, buffers_bytes=buffers_bytes)
    flats = [flat for unit in units for flat in unit.flats]
    planned = StepProgram(units, micro_batch, step, matrix_exchanges(flats), over_schedule)
    if all(flat.table.outer is None for flat in flats):
        return planned
    from shardwise.program.outer_step import build_outer  # only plans with islands load it

    return replace(planned, outer_steps=build_outer(units))
