"""Predicted steps beside measured ones: random plans of three models on this machine's processors.

The machine is to be calibrated first (`shardwise calibrate`), while it is as quiet as it will be here. A plan that this
number of ranks cannot have is drawn again.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.fresh import RunError, run_ranks
from benchmarks.machine import header
from benchmarks.planner_models import MODELS, ModelSize, rows_of
from benchmarks.results_file import write_result
from benchmarks.show import show_figures
from shardwise.errors import ShardwiseError
from shardwise.fit.calibrate.speed import calibrated_hardware, this_machine
from shardwise.fit.clock import Timeline, time_ranks
from shardwise.fit.foreseen import Counted, count_step, rank_units
from shardwise.fit.hardware import Hardware
from shardwise.plan import Plan
from shardwise.plan.placement import PRESETS, mesh_for
from shardwise.system.calibration import read_calibration

NUM_RANKS = 2
NUM_PLANS, QUICK_PLANS = 30, 2
SEED = 34
PRESETS_TRIED = tuple(name for name, one in PRESETS.items() if len(one.axes) == 1 and name != "infinity")
AXES: tuple[dict[str, int], ...] = ({}, {"tp": 2}, {"pp": 2}, {"sp": 2})
PATTERNS = {"blocks.*.up": "column", "blocks.*.down": "row"}
POLICIES = (None, "recompute", "offload")


def main(args: argparse.Namespace, console: Console) -> int:
    """0; 1 if a plan could not be measured."""
    hardware = calibrated_hardware(read_calibration(), this_machine()).with_ranks(NUM_RANKS)
    names = ("tiny",) if args.quick else ("narrow", "wide", "long")
    num_plans, warm, steps = (QUICK_PLANS, 2, 2) if args.quick else (NUM_PLANS, 3, 7)
    result: dict[str, Any] = header(args.note) | {"benchmark": "planner", "hardware": hardware.model_dump(), "rows": []}
    failed = 0
    for model, plan in _drawn(names, num_plans, hardware):
        predicted = foreseen(MODELS[model], plan, hardware)
        options = [f"--model={model}", f"--plan={json.dumps(plan)}", f"--warm={warm}", f"--steps={steps}"]
        try:
            ranks = run_ranks("benchmarks.planner_rank", options, num_ranks=NUM_RANKS, timeout_seconds=300)
        except RunError as error:
            console.print(f"{model}, {plan}: {error}", markup=False)
            failed += 1
            continue
        row = {
            "model": model,
            "plan": plan,
            "predicted": predicted.step_seconds,
            "roofline": sum(rank.least_seconds for rank in predicted.ranks) / len(predicted.ranks),
            "measured": max(rank["seconds"] for rank in ranks),
            "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
            "explained": str(predicted),
        }
        result["rows"].append(row)
        file = write_result(args.out / "planner.json", result)
    if not result["rows"]:
        return 1
    _show(result["rows"], console)
    console.print(f"\n{file}", markup=False)
    return 1 if failed else 0


def foreseen(size: ModelSize, values: dict[str, Any], hardware: Hardware) -> Timeline:
    """The predicted step of a plan."""
    plan = Plan.model_validate(values)
    mesh = mesh_for(plan, NUM_RANKS)
    with torch.device("meta"):
        model = size.build()
    kinds = rank_units(model, plan, mesh, optimizer="adamw", on_cpu=hardware.is_processor)
    counted: list[Counted] = count_step(model, rows_of(size, 1), plan, mesh, counts_work=True)
    programs = [kind.program(plan, one) for kind, one in zip(kinds, counted, strict=True)]
    return time_ranks(programs, hardware, mesh, num_micro_batches=plan.accumulate)


def _drawn(names: Sequence[str], count: int, hardware: Hardware) -> Iterator[tuple[str, dict[str, Any]]]:
    """So many different plans that can be had, the same in every run."""
    draw = random.Random(SEED)
    seen: set[str] = set()
    while len(seen) < count:
        axes = draw.choice(AXES)
        plan: dict[str, Any] = {"preset": draw.choice(PRESETS_TRIED), "accumulate": draw.choice((1, 2, 4))}
        plan |= {"mesh": {"dp": NUM_RANKS // (2 if axes else 1), **axes}}
        plan |= {"tensor": {"plan": PATTERNS}} if "tp" in axes else {}
        policy = draw.choice(POLICIES)
        plan |= {"activations": {"policy": policy}} if policy else {}
        model = draw.choice(names)
        key = json.dumps([model, plan], sort_keys=True)
        if key in seen:
            continue
        try:
            foreseen(MODELS[model], plan, hardware)
        except ShardwiseError:
            continue
        seen.add(key)
        yield model, plan


def errors_of(rows: Sequence[dict[str, Any]], of: str) -> list[float]:
    """Relative errors of the prediction called `of`."""
    return [abs(row[of] / row["measured"] - 1) for row in rows]


def rank_correlation(rows: Sequence[dict[str, Any]], of: str) -> float:
    """Spearman's, of predicted and measured seconds."""
    places = [np.argsort(np.argsort([row[key] for row in rows])) for key in (of, "measured")]
    return float(np.asarray(np.corrcoef(places))[0, 1]) if len(rows) > 2 else 1.0


def _show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    lines = [
        [
            row["model"],
            json.dumps({key: value for key, value in row["plan"].items() if key != "tensor"}),
            *(f"{row[key] * 1e3:.1f}" for key in ("measured", "predicted", "roofline")),
            f"{row['predicted'] / row['measured'] - 1:+.0%}",
        ]
        for row in rows
    ]
    show_figures("planner", ["model", "plan", "measured ms", "predicted ms", "roofline ms", "error"], lines, console)
    for of in ("predicted", "roofline"):
        errors = errors_of(rows, of)
        console.print(
            f"{of}: median error {median(errors):.1%}, mean {mean(errors):.1%}, "
            f"rank correlation {rank_correlation(rows, of):.2f}",
            markup=False,
        )
