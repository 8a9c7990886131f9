"""Predicted steps beside measured ones: random plans of three models on this machine's processors.

Each is measured in several rounds of processes of their own, of whose figures the median counts. The machine is to be
calibrated first (`shardwise calibrate`), while it is as quiet as it will be here. A plan that this number of ranks
cannot have is drawn again. At the end the planner chooses for each model and precision, among all plans that could have
been drawn, one for the step whose rows the fastest drawn plan has, and both are measured. Last come the bars, and
whether they are met.

    shardwise calibrate && python -m benchmarks planner
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from statistics import mean, median

import numpy as np
from rich.console import Console

from benchmarks import planner_memory
from benchmarks.fresh import RunError, run_ranks
from benchmarks.machine import header
from benchmarks.planner_models import MODELS, rows_of
from benchmarks.planner_plans import (
    AXES,
    NAMES,
    NUM_PLANS,
    NUM_RANKS,
    NUM_ROUNDS,
    OPTIMIZER,
    PATTERNS,
    PRESETS_TRIED,
    QUICK_NAMES,
    QUICK_PLANS,
    WITHIN_BYTES,
    Values,
    bar_line,
    drawn,
    errors_of,
    foresee,
    text_of,
    within,
)
from benchmarks.results_file import write_result
from benchmarks.show import show_figures
from shardwise.fit.calibrate.speed import calibrated_hardware, this_machine
from shardwise.fit.candidates import Space
from shardwise.fit.foreseen import updates_of
from shardwise.fit.hardware import Hardware
from shardwise.fit.model_subject import ModelSubject
from shardwise.fit.search import Limits, search
from shardwise.plan import Plan
from shardwise.system.calibration import read_calibration

WITHIN_SECONDS, LEAST_CORRELATION, MOST_SLOWER = 0.15, 0.9, 0.05
"""The other bars: of each plan's time, of the order of all, and of what is chosen beside the fastest plan."""


class Runs:
    """Measures plans, and keeps the rows."""

    def __init__(self, hardware: Hardware, rounds: int, warm: int, steps: int, console: Console) -> None:
        self.hardware = hardware
        self.rows: list[Values] = []
        self.num_failed = 0
        self._rounds = rounds
        self._options = [f"--warm={warm}", f"--steps={steps}"]
        self._console = console

    def row(self, model: str, plan: Values, samples: int) -> Values | None:
        """A plan's predicted and measured step, of micro-batches of `samples`; `None` if it could not be measured."""
        foreseen = foresee(MODELS[model], plan, samples, on_cpu=self.hardware.is_processor)
        options = [f"--model={model}", f"--plan={json.dumps(plan)}", f"--rows={samples}", *self._options]
        try:
            rounds = [self._measured(options) for _ in range(self._rounds)]
        except RunError as error:
            self._console.print(f"{model}, {plan}: {error}", markup=False)
            self.num_failed += 1
            return None
        timeline = foreseen.timeline(self.hardware)
        return {
            "model": model,
            "plan": plan,
            "samples": samples,
            "predicted": timeline.step_seconds,
            "roofline": sum(rank.least_seconds for rank in timeline.ranks) / len(timeline.ranks),
            "measured": median(one["seconds"] for one in rounds),
            "predicted_peak_bytes": foreseen.peak_bytes,
            "peak_bytes": median(one["peak_bytes"] for one in rounds),
            "share_bytes": median(one["share_bytes"] for one in rounds),
            "rounds": rounds,
            "explained": str(timeline),
        }

    @staticmethod
    def _measured(options: Sequence[str]) -> Values:
        """Of the slowest or fullest rank, in processes of their own."""
        ranks = run_ranks("benchmarks.planner_rank", options, num_ranks=NUM_RANKS, timeout_seconds=300)
        return {name: max(rank[name] for rank in ranks) for name in ("seconds", "peak_bytes", "share_bytes")}


def main(args: argparse.Namespace, console: Console) -> int:
    """0; 1 if a plan could not be measured."""
    if args.memory_only:
        return planner_memory.main(args, console)
    hardware = calibrated_hardware(read_calibration(), this_machine()).with_ranks(NUM_RANKS)
    names = QUICK_NAMES if args.quick else NAMES
    num_plans, warm, steps = (QUICK_PLANS, 2, 2) if args.quick else (NUM_PLANS, 3, 7)
    runs = Runs(hardware, args.rounds or (1 if args.quick else NUM_ROUNDS), warm, steps, console)
    rows: list[Values] = []
    chosen: list[Values] = []
    result: Values = header(args.note) | {"benchmark": "planner", "hardware": hardware.model_dump(), "seed": args.seed}
    result |= {"rows": rows, "chosen": chosen}
    for model, plan in drawn(names, num_plans, precisions(hardware), args.seed):
        row = runs.row(model, plan, MODELS[model].samples)
        rows += [] if row is None else [row]
        file = write_result(args.out / "planner.json", result)
    if not rows:
        return 1
    for best in fastest(rows):
        auto = chosen_plan(best, hardware)
        pair = [runs.row(best["model"], plan, samples) for plan, samples in (auto, (best["plan"], best["samples"]))]
        if None not in pair:
            chosen.append({"chosen": pair[0], "best": pair[1]})
        file = write_result(args.out / "planner.json", result)
    _show(rows, console)
    _show_chosen(chosen, console)
    for line in bars(rows, chosen):
        console.print(line, markup=False)
    console.print(f"\n{file}", markup=False)
    return 1 if runs.num_failed else 0


def precisions(hardware: Hardware) -> tuple[str | None, ...]:
    """bf16 too where products of it are faster: elsewhere a processor has no instructions for them."""
    rates = hardware.peak_flops
    return (None, "bf16") if rates.get("bf16", 0.0) > rates["fp32"] else (None,)


def fastest(rows: Sequence[Values]) -> list[Values]:
    """The row that trains the most samples per second, of each model and precision."""
    found: dict[tuple[str, str | None], Values] = {}
    for row in rows:
        key = row["model"], row["plan"].get("precision")
        if key not in found or _sample_seconds(row) < _sample_seconds(found[key]):
            found[key] = row
    return list(found.values())


def num_samples(row: Values) -> int:
    """Of a step, on all ranks."""
    found: int = row["samples"] * row["plan"].get("accumulate", 1) * row["plan"]["mesh"]["dp"]
    return found


def _sample_seconds(row: Values) -> float:
    found: float = row["measured"] / num_samples(row)
    return found


def chosen_plan(best: Values, hardware: Hardware) -> tuple[Values, int]:
    """The fastest plan that the planner finds for as many samples a step as `best` has, and its micro-batch."""
    size = MODELS[best["model"]]
    given = {name: value for name, value in best["plan"].items() if name == "precision"}
    base = Plan.model_validate(given | {"tensor": {"plan": PATTERNS}})
    model = size.build()
    subject = ModelSubject(
        model, rows_of(size, 1, 1), hardware, num_samples(best), base, updates_of(model, OPTIMIZER), num_states=0
    )
    axes = tuple(axis for one in AXES for axis in one)
    space = Space(PRESETS_TRIED, axes, ("keep", "recompute", "offload"), (("1f1b", 1),))
    limits = Limits(hardware.memory_bytes)
    candidate = search(subject, NUM_RANKS, limits, base=base, space=space).best[0].candidate
    plan = candidate.plan(base).model_dump(mode="json", exclude_unset=True)
    plan["mesh"] = dict(candidate.sizes)
    if candidate.size("tp") == 1:
        del plan["tensor"]
    return plan, candidate.rows


def rank_correlation(rows: Sequence[Values], of: str) -> float:
    """Spearman's, of predicted and measured seconds."""
    places = [np.argsort(np.argsort([row[key] for row in rows])) for key in (of, "measured")]
    return float(np.asarray(np.corrcoef(places))[0, 1]) if len(rows) > 2 else 1.0


def bars(rows: Sequence[Values], chosen: Sequence[Values]) -> list[str]:
    """A line for each bar: what was reached, and whether it is met. A plan that could not be measured is in no row."""
    found = [within("memory", WITHIN_BYTES, errors_of(rows, "predicted_peak_bytes", "share_bytes"))]
    found.append(within("time", WITHIN_SECONDS, errors_of(rows, "predicted")))
    correlation = rank_correlation(rows, "predicted")
    text = f"rank correlation of predicted and measured time at least {LEAST_CORRELATION}: {correlation:.2f}"
    found.append(bar_line(text, is_met=correlation >= LEAST_CORRELATION))
    slower = [pair["chosen"]["measured"] / pair["best"]["measured"] - 1 for pair in chosen]
    count = sum(one <= MOST_SLOWER for one in slower)
    text = f"what is chosen at most {MOST_SLOWER:.0%} slower than the fastest drawn plan: {count} of {len(slower)}"
    text += f", at most {max(slower):+.0%}" if slower else ""
    found.append(bar_line(text, is_met=bool(slower) and count == len(slower)))
    return found


def _show(rows: Sequence[Values], console: Console) -> None:
    head = ["model", "plan", "measured ms", "predicted ms", "roofline ms", "error"]
    head += ["resident MiB", "share MiB", "predicted MiB", "error"]
    show_figures("planner", head, [_line(row) for row in rows], console)
    for of in ("predicted", "roofline"):
        errors = errors_of(rows, of)
        console.print(
            f"{of}: median error {median(errors):.1%}, mean {mean(errors):.1%}, at most {max(errors):.1%}, "
            f"rank correlation {rank_correlation(rows, of):.2f}",
            markup=False,
        )
    errors = errors_of(rows, "predicted_peak_bytes", "share_bytes")
    console.print(
        f"memory: median error {median(errors):.1%}, mean {mean(errors):.1%}, at most {max(errors):.1%}", markup=False
    )


def _line(row: Values) -> list[str]:
    return [
        row["model"],
        text_of(row["plan"]),
        *(f"{row[key] * 1e3:.1f}" for key in ("measured", "predicted", "roofline")),
        f"{row['predicted'] / row['measured'] - 1:+.0%}",
        *(f"{row[key] / 2**20:.0f}" for key in ("peak_bytes", "share_bytes", "predicted_peak_bytes")),
        f"{row['predicted_peak_bytes'] / row['share_bytes'] - 1:+.0%}",
    ]


def _show_chosen(chosen: Sequence[Values], console: Console) -> None:
    lines = []
    for pair in chosen:
        auto, best = pair["chosen"], pair["best"]
        seconds = [auto["measured"], auto["predicted"], best["measured"], best["predicted"]]
        lines.append(
            [
                auto["model"],
                f"{text_of(auto['plan'])}, {auto['samples']} samples",
                text_of(best["plan"]),
                *(f"{one * 1e3:.1f}" for one in seconds),
                f"{auto['measured'] / best['measured'] - 1:+.0%}",
            ]
        )
    head = ["model", "chosen", "fastest drawn", "measured ms", "predicted ms", "drawn ms", "predicted ms", "slower"]
    show_figures("planner chooses", head, lines, console)
