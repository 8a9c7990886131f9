"""Steps that `make device` has measured, beside those that the planner predicts: `python -m benchmarks.device.predicted
runs/device/device.json`.

On any machine, because models are only rehearsed: by the profile of the card's name, and by what `shardwise calibrate`
has measured on it. Nothing was fitted on these steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.device.models import ONE_BILLION, TINY, llama, tokens_of
from benchmarks.llama import LlamaSize
from benchmarks.results_file import read_result
from benchmarks.show import show_figures
from shardwise.fit.calibrate.speed import hardware_of_file
from shardwise.fit.clock import RankProgram, time_ranks
from shardwise.fit.foreseen import count_step, rank_units
from shardwise.fit.hardware import Hardware, hardware, profiles
from shardwise.plan import Plan
from shardwise.plan.placement import mesh_for

PLANS: dict[str, dict[str, Any]] = {
    "ours zero3": {"preset": "zero3"},
    "ours ddp": {"preset": "ddp"},
    "ours zero3 selective": {"preset": "zero3", "activations": "selective"},
    "ours zero3 recompute": {"preset": "zero3", "activations": "recompute"},
    "1 B offload": {"preset": "offload"},
    "1 B zero3-offload, parameters on the host too": {"preset": "zero3-offload", "rows": {"param": {"tier": "host"}}},
    "1 B zero3, activations on the host": {"preset": "zero3", "activations": "offload"},
}
"""By the names that rows of `speed` and `offload` begin with; see `VARIANTS` there."""


def program_of(values: Mapping[str, Any], size: LlamaSize) -> tuple[Plan, RankProgram, int]:
    """The plan, the one rank's program with its work, and the bytes that it promises at most on the device."""
    plan = Plan.model_validate({"precision": "bf16", **values})
    mesh = mesh_for(plan, 1)
    with torch.device("meta"):
        model = llama(size, torch.device("meta"))
    (kind,) = rank_units(model, plan, mesh, optimizer="adamw", on_cpu=False)
    batch = {name: value.to("meta") for name, value in tokens_of(size, torch.device("cpu")).items()}
    (counted,) = count_step(model, batch, plan, mesh, counts_work=True, on_cpu=False)
    program = kind.program(plan, counted)
    held = program.step.footprint(num_micro_batches=1, activations=counted.activations)
    return plan, program, held.total


def machines(result: Mapping[str, Any]) -> dict[str, Hardware]:
    """The card's profile by its name, with as much of its host as that machine had, and the calibrated one if that part
    has run."""
    name = (result["machine"]["gpus"] or ["none"])[0].lower().replace("-", " ").split()
    found = {
        one: _on_host(hardware(one), result["machine"]["cores"]) for one in profiles() if one.partition("-")[0] in name
    }
    for row in result["parts"].get("calibrated", {}).get("rows", ()):
        if "calibration" in row:
            found["calibrated"] = hardware_of_file(row["calibration"]["hardware"])
    return {label: one.with_ranks(1) for label, one in found.items()}


def _on_host(machine: Hardware, cores: int) -> Hardware:
    return machine if machine.host is None else machine.model_copy(update={"host": machine.host.with_cores(cores)})


def measured(result: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The plan's name and the row of each step that was measured; of several rounds the last."""
    rows = [row for part in ("speed", "offload") for row in result["parts"].get(part, {}).get("rows", ())]
    for name in PLANS:
        of_name = [row for row in rows if row["name"].partition(", round")[0] == name and "seconds" in row]
        if of_name:
            yield name, of_name[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    result = read_result(parser.parse_args().result)
    size = ONE_BILLION if result["machine"]["gpus"] else TINY
    by = machines(result)
    lines = []
    for name, row in measured(result):
        plan, program, promised = program_of(PLANS[name], size)
        line = [name, f"{row['seconds'] * 1e3:.0f}"]
        for one in by.values():
            seconds = time_ranks([program], one, mesh_for(plan, 1), num_micro_batches=1).step_seconds
            line.append(f"{seconds * 1e3:.0f} ({seconds / row['seconds'] - 1:+.0%})")
        peak = row.get("peak_allocated_bytes")
        lines.append([*line, f"{promised / 2**30:.2f}", f"{peak / 2**30:.2f}" if peak else ""])
    head = ["step", "measured ms", *(f"by {label}, ms" for label in by), "promised GiB", "measured GiB"]
    show_figures("device", head, lines, Console())


if __name__ == "__main__":
    main()
