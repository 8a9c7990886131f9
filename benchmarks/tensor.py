"""Tensor parallelism beside DTensor's, transformers' own, and functions written by hand for the one model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from benchmarks.fresh import run_ranks
from benchmarks.machine import header
from benchmarks.results_file import write_result
from benchmarks.show import show_figures
from benchmarks.sizes import DTYPES
from benchmarks.summary import TOLERANCE
from benchmarks.turns import Standing, standings

NUM_RANKS = 2
MODELS = ("blocks", "transformers")
OURS, WHOLE = "shardwise", "whole"
PEERS = {"blocks": ("dtensor",), "transformers": ("dtensor", "transformers")}
BY_HAND = "by hand"
SIZES = ("narrow", "wide")


def main(args: argparse.Namespace, console: Console) -> int:
    """0; 1 if an engine trains otherwise than the unsplit model."""
    sizes, num_rounds, num_steps = (("tiny",), 2, 3) if args.quick else (SIZES, args.rounds or 7, 5)
    models = MODELS if all(map(find_spec, ("transformers", "accelerate"))) else MODELS[:1]
    result: dict[str, Any] = header(args.note) | {"benchmark": "tensor", "ranks": NUM_RANKS, "races": []}
    wrong = []
    for model, size, dtype in [
        (model, size, dtype) for model in models for size in sizes for dtype in args.dtypes or DTYPES
    ]:
        options = [f"--model={model}", f"--size={size}", f"--dtype={dtype}"]
        options += [f"--rounds={num_rounds}", f"--steps={num_steps}"]
        ranks = run_ranks("benchmarks.tensor_rank", options, num_ranks=NUM_RANKS, timeout_seconds=1200)
        rows = standings([rank["turns"] for rank in ranks], (WHOLE, *PEERS[model], BY_HAND))
        race = {"model": model, "size": size, "dtype": dtype, "turns": [rank["turns"] for rank in ranks]}
        result["races"].append(race | {"summary": [row._asdict() for row in rows]})
        file = write_result(args.out / "tensor.json", result)
        show_figures(f"{model}, {size}, {dtype}, {NUM_RANKS} ranks", _columns(rows), list(map(_line, rows)), console)
        wrong += [f"{model}, {size}, {dtype}: {sentence}" for sentence in faults_of(rows, dtype)]
    console.print(f"\n{file}", markup=False)
    for sentence in wrong:
        console.print(sentence, markup=False)
    return 1 if wrong else 0


def faults_of(rows: Sequence[Standing], dtype: str) -> list[str]:
    """A sentence for each engine whose losses are not those of the unsplit model."""
    expected = next(row.loss for row in rows if row.engine == WHOLE)
    return [
        f"{row.engine}: the loss is {row.loss:.6f}, unsplit it is {expected:.6f}."
        for row in rows
        if abs(row.loss - expected) > TOLERANCE[dtype] * abs(expected)
    ]


def _columns(rows: Sequence[Standing]) -> list[str]:
    ratios = [f"x {other}" for other in rows[0].over]
    return ["engine", "ms/step", "passes", *ratios, "CPU ms", *(f"CPU {ratio}" for ratio in ratios), "loss"]


def _line(row: Standing) -> list[str]:
    times = [f"{seconds * 1000:.1f}" for seconds in (row.step_seconds, row.passes_seconds, row.cpu_seconds)]
    ratios, cpu_ratios = ([f"{ratio:.2f}" for ratio in each.values()] for each in (row.over, row.cpu_over))
    return [row.engine, *times[:2], *ratios, times[2], *cpu_ratios, f"{row.loss:.6f}"]
