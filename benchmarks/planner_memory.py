"""The memory of `planner`'s plans alone: nothing is timed, so it may run beside other jobs.

Each round of a plan, in processes of their own, is a line of a file. A command that is repeated leaves out the rounds
that the file has, so it goes on where it was cut off, or adds rounds. Lines of other plans, of another commit's source
or of other settings of malloc are no rounds of these.

    python -m benchmarks planner --memory-only
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.fresh import RunError, run_ranks
from benchmarks.machine import header
from benchmarks.planner_models import MODELS
from benchmarks.planner_plans import (
    NAMES,
    NUM_PLANS,
    NUM_RANKS,
    NUM_ROUNDS,
    QUICK_NAMES,
    QUICK_PLANS,
    WITHIN_BYTES,
    Values,
    drawn,
    errors_of,
    foresee,
    text_of,
    within,
)
from benchmarks.show import show_figures

WARM = 3
"""Steps, in the last of which memory is as in all that follow."""
PRECISIONS = (None, "bf16")
"""bf16 too where a processor has no instructions for it: it is slower there, and holds as much."""


def main(args: argparse.Namespace, console: Console) -> int:
    """0; 1 if a plan could not be measured."""
    names, num_plans = (QUICK_NAMES, QUICK_PLANS) if args.quick else (NAMES, NUM_PLANS)
    num_rounds = args.rounds or (1 if args.quick else NUM_ROUNDS)
    plans = list(drawn(names, num_plans, PRECISIONS, args.seed))
    found = Rounds(args.out / "planner-memory.jsonl", header(args.note))
    failed = [found.measure(model, plan, number) for number in range(num_rounds) for model, plan in plans]
    for error in filter(None, failed):
        console.print(error, markup=False)
    rows = [row for model, plan in plans if (row := found.row(model, plan))]
    _show(rows, console)
    console.print(within("memory", WITHIN_BYTES, errors_of(rows, "predicted_peak_bytes", "share_bytes")), markup=False)
    console.print(f"\n{found.file}", markup=False)
    return 1 if any(failed) else 0


class Rounds:
    """The lines of a file, to which rounds are added."""

    def __init__(self, file: Path, about: Values) -> None:
        self.file = file
        self._about = {name: about[name] for name in ("commit", "settings", "note")}
        self._lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        file.parent.mkdir(parents=True, exist_ok=True)

    def of(self, model: str, plan: Values) -> list[Values]:
        """Those of a plan."""
        wanted = {"model": model, "plan": plan, "commit": self._about["commit"], "settings": self._about["settings"]}
        return [line for line in self._lines if wanted.items() <= line.items()]

    def measure(self, model: str, plan: Values, number: int) -> str:
        """Run a plan's round of that number if the file lacks it; why it failed, if it did."""
        if len(self.of(model, plan)) > number:
            return ""
        options = [f"--model={model}", f"--plan={json.dumps(plan)}", f"--rows={MODELS[model].samples}"]
        options += [f"--warm={WARM}", "--steps=0"]
        try:
            ranks = run_ranks("benchmarks.planner_rank", options, num_ranks=NUM_RANKS, timeout_seconds=300)
        except RunError as error:
            return f"{model}, {text_of(plan)}: {error}"
        line = {"model": model, "plan": plan, **self._about, "ranks": ranks}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._lines.append(line)
        return ""

    def row(self, model: str, plan: Values) -> Values | None:
        """What is predicted of a plan, and of its fullest rank the median round; `None` without any."""
        held = [max(rank["share_bytes"] for rank in line["ranks"]) for line in self.of(model, plan)]
        if not held:
            return None
        predicted = foresee(MODELS[model], plan, MODELS[model].samples).peak_bytes
        measured = {"share_bytes": median(held), "rounds": held}
        return {"model": model, "plan": plan, "predicted_peak_bytes": predicted, **measured}


def _show(rows: Sequence[Values], console: Console) -> None:
    head = ["model", "plan", "predicted MiB", "measured MiB", "error", "rounds MiB", "spread"]
    lines = []
    for row in rows:
        predicted, measured, rounds = row["predicted_peak_bytes"], row["share_bytes"], row["rounds"]
        lines.append(
            [
                row["model"],
                text_of(row["plan"]),
                f"{predicted / 2**20:.0f}",
                f"{measured / 2**20:.0f}",
                f"{predicted / measured - 1:+.1%}",
                " ".join(f"{one / 2**20:.0f}" for one in sorted(rounds)),
                f"{(max(rounds) - min(rounds)) / measured:.1%}",
            ]
        )
    show_figures("planner, memory", head, lines, console)
