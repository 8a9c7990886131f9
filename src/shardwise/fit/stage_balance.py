"""How long each stage of a pipeline computes, and where other cuts would make the slowest one faster.

`stages: auto` has no batch, so it balances parameters. With a batch the whole model is rehearsed with every module that
may begin a stage as a unit of its own: embedding and head count by what they compute, and the loss with the last
module. What the model computes between modules counts with the one after it. Seconds are foreseen for any hardware, or
measured on this one, operator by operator.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from torch import nn

from shardwise.fit.few_blocks import FewBlocks, tells_of_all
from shardwise.fit.foreseen import Counted, parts_of
from shardwise.fit.hardware import Hardware
from shardwise.fit.measured_work import CalledOperators, OperatorClock
from shardwise.parallel.conversions import Converted
from shardwise.parallel.pipeline import AXIS, StageLayout, balanced, sequence_of
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.program import Moment
from shardwise.system.units import format_bytes, format_seconds

LEAST_GAIN = 0.01
"""From which share of the slowest stage's time other stages are worth it."""


@dataclass(frozen=True)
class StageCost:
    """What one micro-batch takes in a stage, forward and backward, and what that keeps between the two."""

    modules: tuple[str, ...]
    seconds: float
    saved_bytes: int
    is_measured: bool = False
    """Whether the model's operators were run for it; otherwise the time is foreseen."""

    def __str__(self) -> str:
        how = "measured" if self.is_measured else "predicted"
        return f"{format_seconds(self.seconds)} ({how}), {format_bytes(self.saved_bytes)} kept for the backward"


@dataclass(frozen=True)
class Balance:
    """Stages as they are, and as many others between which the time is divided best."""

    present: tuple[StageCost, ...]
    best: tuple[StageCost, ...]

    @property
    def gain(self) -> float:
        """Which share of the slowest stage's time the others would save."""
        return 1 - max(one.seconds for one in self.best) / max(one.seconds for one in self.present)

    @property
    def is_uneven(self) -> bool:
        """Whether the others would be worth it."""
        return self.gain > LEAST_GAIN

    def __str__(self) -> str:
        lines = [f"stage {number} computes {one} for a micro-batch" for number, one in enumerate(self.present)]
        if self.is_uneven:
            listed = ", ".join(f"[{', '.join(one.modules)}]" for one in self.best)
            lines.append(f"the slowest stage would take {self.gain:.0%} less with pipeline: {{stages: [{listed}]}}")
        return "\n".join(lines) + "\n"


def stage_balance(
    model: nn.Module,
    layout: StageLayout,
    batch: object,
    plan: Plan,
    mesh: Mesh,
    on: Hardware | OperatorClock,
    converted: Converted | None = None,
) -> Balance:
    """The costs of the stages of `model`, which may be on the meta device, with one micro-batch of one rank: foreseen
    on some hardware, or measured by a clock. Raises `ModelError` for a model that cannot be rehearsed, and for one with
    operators that cannot be measured."""
    groups = sequence_of(model)
    names = list(chain(*groups))
    pieces = list(layout.pieces) if set(layout.pieces) - set(names) else names
    pieces = [name for name in pieces if name not in layout.guests]
    if pieces != names:  # listed otherwise than they are found: each by itself
        groups = [[name] for name in pieces]
    seconds, saved = _by_module(model, pieces, batch, plan, mesh, on, converted)

    def costs(stages: Sequence[Sequence[str]]) -> tuple[StageCost, ...]:
        return tuple(
            StageCost(
                tuple(stage),
                sum(seconds[name] for name in stage),
                sum(saved[name] for name in stage),
                is_measured=isinstance(on, OperatorClock),
            )
            for stage in stages
        )

    present = costs([[name for name in stage if name in seconds] for stage in layout.stages])
    of_groups = [sum(seconds[name] for name in group) for group in groups]
    cuts = [0, *balanced(of_groups, layout.num_stages), len(groups)]
    best = costs([list(chain(*groups[start:stop])) for start, stop in pairwise(cuts)])
    return Balance(present, best)


def _by_module(
    model: nn.Module,
    pieces: Sequence[str],
    batch: object,
    plan: Plan,
    mesh: Mesh,
    on: Hardware | OperatorClock,
    converted: Converted | None,
) -> tuple[Counter[str], Counter[str]]:
    """Seconds, and bytes saved for the backward, by module."""
    axes = {axis: mesh.size(axis) for axis in mesh.axes if axis != AXIS} or {"dp": 1}
    alone = Mesh(tuple(axes), tuple(axes.values()))
    plain = plan.model_copy(update={"mesh": axes, "units": "auto", "pipeline": type(plan.pipeline)()})

    def count(split: nn.Module, called: CalledOperators | None = None) -> Counted:
        """Of a model that may have few of its equal blocks."""
        present = dict(split.named_modules())
        each = plain.model_copy(update={"units": tuple(name for name in pieces if name in present)})
        parts = parts_of(split, each, alone, converted=converted, on_cpu=on.is_processor)
        return parts.of_model(split, batch, called or parts.watching())

    if isinstance(on, Hardware):
        counted = None
        if not (converted is not None and converted.modules) and tells_of_all(plain, on_cpu=on.is_processor):
            counted = FewBlocks.of(model).count(count)
        counted = counted or count(copy.deepcopy(model))
        taken = _foreseen(counted, on)
    else:
        called = CalledOperators()
        counted = count(copy.deepcopy(model), called)
        taken = _measured(called, on)
    seconds, saved = Counter[str](dict.fromkeys(pieces, 0)), Counter[str](dict.fromkeys(pieces, 0))
    at = pieces[0]
    for moment, spent in taken:
        at = moment.unit if moment.unit in seconds else at
        seconds[at] += spent  # type: ignore[assignment]  # counts are of any number
    at, before = pieces[0], 0
    for mark in counted.activations.marks:
        at = mark.moment.unit if mark.moment.unit in saved else at
        if mark.moment.phase == "forward" and mark.moment.edge == "after":
            saved[at] += max(0, mark.live_bytes - before)
        before = mark.live_bytes
    return seconds, saved


def _foreseen(counted: Counted, hardware: Hardware) -> Iterator[tuple[Moment, float]]:
    """Seconds before each moment."""
    for worked in counted.worked:
        computing = [one for one in worked.operations if not (one.communicates or one.copies)]
        yield worked.moment, hardware.computing_seconds(computing)


def _measured(called: CalledOperators, clock: OperatorClock) -> Iterator[tuple[Moment, float]]:
    """The same."""
    for moment, calls in called.called:
        yield moment, sum(map(clock.seconds, calls))
