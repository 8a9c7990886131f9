"""Random plans of three models for two ranks of this machine, and what is foreseen of each."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.planner_models import MODELS, ModelSize, rows_of
from shardwise.errors import ShardwiseError
from shardwise.fit.batch_rows import with_rows
from shardwise.fit.clock import RankProgram, Timeline, time_ranks
from shardwise.fit.foreseen import count_step, rank_units
from shardwise.fit.hardware import Hardware
from shardwise.plan import Plan
from shardwise.plan.mesh import SEQUENCE_AXIS, Mesh
from shardwise.plan.placement import PRESETS, mesh_for

NUM_RANKS = 2
NUM_PLANS, QUICK_PLANS = 30, 2
NUM_ROUNDS = 3
"""What a process holds depends on how its threads take turns: the same plan's memory differs by up to a tenth."""
NAMES, QUICK_NAMES = ("narrow", "wide", "long"), ("tiny",)
SEED = 2026
"""Not one whose plans anybody looked at while prices were mended."""
PRESETS_TRIED = tuple(name for name, one in PRESETS.items() if len(one.axes) == 1 and name != "infinity")
AXES: tuple[dict[str, int], ...] = ({}, {"tp": 2}, {"pp": 2}, {"sp": 2})
PATTERNS = {"blocks.*.up": "column", "blocks.*.down": "row"}
POLICIES = (None, "recompute", "offload")
OPTIMIZER = "adamw"
WITHIN_BYTES = 0.05
"""The bar of each plan's memory."""

Values = dict[str, Any]


@dataclass(frozen=True)
class Foreseen:
    """The step of a plan. `peak_bytes` are those of the fullest rank, on all tiers but a disk, which on processors are
    one process's memory."""

    programs: Sequence[RankProgram]
    mesh: Mesh
    num_micro_batches: int
    peak_bytes: int

    def timeline(self, hardware: Hardware) -> Timeline:
        return time_ranks(self.programs, hardware, self.mesh, num_micro_batches=self.num_micro_batches)


def foresee(size: ModelSize, values: Values, samples: int, *, on_cpu: bool = True) -> Foreseen:
    """What a plan does, with micro-batches of `samples`. Raises `ShardwiseError` if there cannot be such a plan."""
    plan = Plan.model_validate(values)
    mesh = mesh_for(plan, NUM_RANKS)
    with torch.device("meta"):
        model = size.build()
    kinds = rank_units(model, plan, mesh, optimizer=OPTIMIZER, on_cpu=on_cpu)
    batch = with_rows(rows_of(size, 1, samples), samples, samples, axis_size(mesh, SEQUENCE_AXIS))
    counted = count_step(model, batch, plan, mesh, counts_work=True)
    programs = [kind.program(plan, one) for kind, one in zip(kinds, counted, strict=True)]
    held = [
        program.step.footprint(num_micro_batches=plan.accumulate, activations=one.activations, local_size=NUM_RANKS)
        for program, one in zip(programs, counted, strict=True)
    ]
    return Foreseen(programs, mesh, plan.accumulate, max(one.total + one.host_total for one in held))


def drawn(
    names: Sequence[str], count: int, precisions: Sequence[str | None], seed: int = SEED
) -> Iterator[tuple[str, Values]]:
    """So many different plans that can be had, the same in every run."""
    draw = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        axes = draw.choice(AXES)
        plan: Values = {"preset": draw.choice(PRESETS_TRIED), "accumulate": draw.choice((1, 2, 4))}
        plan |= {"mesh": {"dp": NUM_RANKS // (2 if axes else 1), **axes}}
        plan |= {"tensor": {"plan": PATTERNS}} if "tp" in axes else {}
        policy = draw.choice(POLICIES)
        plan |= {"activations": {"policy": policy}} if policy else {}
        precision = draw.choice(precisions)
        plan |= {"precision": precision} if precision else {}
        model = draw.choice(names)
        key = json.dumps([model, plan], sort_keys=True)
        if key in seen:
            continue
        try:
            foresee(MODELS[model], plan, MODELS[model].samples)
        except ShardwiseError:
            continue
        seen.add(key)
        yield model, plan


def axis_size(mesh: Mesh, axis: str) -> int:
    return mesh.size(axis) if axis in mesh.axes else 1


def errors_of(rows: Sequence[Values], of: str, measured: str = "measured") -> list[float]:
    """Relative errors of the prediction called `of`."""
    return [abs(row[of] / row[measured] - 1) for row in rows]


def within(what: str, bar: float, errors: Sequence[float]) -> str:
    """A line that says of how many plans the error is within the bar, which is met if all of them are."""
    count = sum(error <= bar for error in errors)
    return bar_line(f"{what} within {bar:.0%}: {count} of {len(errors)}", is_met=bool(errors) and count == len(errors))


def bar_line(text: str, *, is_met: bool) -> str:
    return f"{'met' if is_met else 'NOT MET':8}{text}"


def text_of(plan: Values) -> str:
    return json.dumps({key: value for key, value in plan.items() if key != "tensor"})
