"""Predicted steps beside measured ones on the smaller meshes of a job of four ranks, which goes on with two or one of
them where no replica group is whole.

The prediction is that by which an elastic job chooses (`fit/smaller_meshes.py`), and each mesh is measured as a job of
its own, with the same global batch. All ranks share this machine's cores, as they do in the prediction. The machine is
to be calibrated first (`shardwise calibrate`).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from benchmarks.fresh import run_ranks
from benchmarks.machine import header
from benchmarks.planner import rank_correlation
from benchmarks.planner_models import MODELS, ModelSize, rows_of
from benchmarks.planner_plans import OPTIMIZER, PATTERNS
from benchmarks.results_file import write_result
from benchmarks.show import show_figures
from shardwise.fit.calibrate.speed import calibrated_hardware, this_machine
from shardwise.fit.foreseen import updates_of
from shardwise.fit.hardware import Hardware
from shardwise.fit.smaller_meshes import PlainModel
from shardwise.parallel.outline import SmallerMeshes
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.replica_groups import with_fewer_ranks
from shardwise.system.calibration import read_calibration

NUM_RANKS = 4
JOBS = (("tp",), ("pp",), ("sp",), ("pp", "tp"), ("sp", "tp"))
"""The axes along which the ranks of each share the work: four along one, or two along either. The models have no
experts."""
OF_AXIS: dict[str, dict[str, Any]] = {
    "tp": {"tensor": {"plan": PATTERNS}},
    "pp": {"accumulate": 4},
    "sp": {"sequence": {"attention": "ring"}},
}

Values = dict[str, Any]


def main(args: argparse.Namespace, console: Console) -> int:
    hardware = calibrated_hardware(read_calibration(), this_machine()).with_ranks(NUM_RANKS)
    names = ("tiny",) if args.quick else ("narrow", "wide", "long")
    warm, steps = (1, 2) if args.quick else (3, 7)
    rows: list[Values] = []
    result: Values = header(args.note) | {"benchmark": "smaller", "hardware": hardware.model_dump(), "rows": rows}
    for name in names:
        for axes in JOBS:
            found = meshes_of(MODELS[name], axes, hardware)
            for mesh, predicted in found:
                rows.append(row_of(name, axes, mesh, predicted, warm, steps))
                file = write_result(args.out / "smaller.json", result)
    show(rows, console)
    console.print(f"\n{file}", markup=False)
    return 0


def plan_of(axes: Sequence[str], mesh: dict[str, int]) -> Values:
    plan: Values = {"preset": "zero1", "mesh": mesh}
    for axis in axes:
        plan |= OF_AXIS[axis]
    return plan


def meshes_of(size: ModelSize, axes: Sequence[str], hardware: Hardware) -> list[tuple[dict[str, int], float]]:
    """Each mesh of the job, the whole group first, and the seconds that are predicted for a step on it."""
    along_one = 2 if "pp" in axes and size.num_blocks < NUM_RANKS else NUM_RANKS  # a stage has a block
    sizes = {"dp": 1, **({axes[0]: along_one} if len(axes) == 1 else dict.fromkeys(axes, 2))}
    whole = Mesh.of(sizes, math.prod(sizes.values()))
    every = with_fewer_ranks(whole)
    with torch.device("meta"):
        model = size.build()
    plain = PlainModel(model, updates_of(model, OPTIMIZER))
    plan = Plan.model_validate(plan_of(axes, every[0]))
    batch = rows_of(size, 1, size.samples)
    found = []
    for mesh in every:
        only = SmallerMeshes((every[0], mesh))  # the first is the whole group, which is foreseen here too
        on_cpu = hardware.is_processor
        (seconds,) = plain.seconds(batch, plan, whole, only, hardware, on_cpu=on_cpu)
        found.append((mesh, seconds))
    return found


def row_of(name: str, axes: Sequence[str], mesh: dict[str, int], predicted: float, warm: int, steps: int) -> Values:
    plan = plan_of(axes, mesh)
    options = [f"--model={name}", f"--plan={json.dumps(plan)}", f"--rows={MODELS[name].samples}"]
    options += [f"--warm={warm}", f"--steps={steps}"]
    num_ranks = math.prod(mesh.values())
    ranks = run_ranks("benchmarks.planner_rank", options, num_ranks=num_ranks, timeout_seconds=300)
    measured = max(rank["seconds"] for rank in ranks)
    shown = " ".join(f"{axis}={mesh[axis]}" for axis in axes)
    values = {"ranks": num_ranks, "predicted": predicted, "measured": measured}
    return {"model": name, "job": " ".join(axes), "mesh": shown, **values}


def show(rows: Sequence[Values], console: Console) -> None:
    lines = [
        [row["model"], row["mesh"], f"{row['measured'] * 1e3:.0f}", f"{row['predicted'] * 1e3:.0f}"] for row in rows
    ]
    show_figures("smaller meshes", ["model", "mesh", "measured ms", "predicted ms"], lines, console)
    console.print(f"rank correlation over all: {rank_correlation(rows, 'predicted'):.2f}", markup=False)
    jobs = {(row["model"], row["job"]): [one for one in rows if same_job(one, row)] for row in rows}
    right = [agrees(those) for those in jobs.values()]
    console.print(f"the fastest mesh was foreseen for {sum(right)} of {len(right)} jobs", markup=False)


def same_job(one: Values, other: Values) -> bool:
    return (one["model"], one["job"]) == (other["model"], other["job"])


def agrees(rows: Sequence[Values]) -> bool:
    """Whether the smaller mesh that is foreseen to be the fastest is measured to be."""
    fewer = rows[1:]
    return min(fewer, key=lambda row: row["predicted"]) is min(fewer, key=lambda row: row["measured"])
