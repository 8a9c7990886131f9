"""Pipelines beside those of `torch.distributed.pipelining` and DeepSpeed; and how long ours wait, beside theory."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.fresh import run_ranks
from benchmarks.machine import header
from benchmarks.pipeline_sizes import PIPELINE_SIZES
from benchmarks.results_file import write_result
from benchmarks.show import show_figures
from benchmarks.summary import TOLERANCE
from benchmarks.turns import Standing, standings
from shardwise.program.schedule import Op, schedule_for, timed

NUM_RANKS = 2
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
TORCH, OURS, APART = "torch", "shardwise", "apart"
DEEPSPEED, OURS_ZERO1 = "deepspeed-1 1f1b", "shardwise-zero1 1f1b"
LOOPS = {"shardwise loop": 1, "shardwise loop of 2": 2}
"""Loops of one's own that call the model: how many calls share the micro-batches of a step."""
WHOLE_STEP = "shardwise step"
"""`engine.forward_backward` of the model of these loops."""
SIZES = ("light", "heavy")
Spans = dict[str, list[float]]
"""By rank and op (`0 F3@1`), when it began and ended, in microseconds."""


def main(args: argparse.Namespace, console: Console) -> int:
    """0; 1 if an engine trains otherwise than the others."""
    sizes, num_rounds, num_steps = (("tiny",), 2, 3) if args.quick else (SIZES, args.rounds or 7, 5)
    held_size = "tiny" if args.quick else "held"
    pairs = [(f"{TORCH} {schedule}", f"{OURS} {schedule}") for schedule in SCHEDULES]
    pairs += [(DEEPSPEED, OURS_ZERO1)] if find_spec("deepspeed") else []
    pairs += [(WHOLE_STEP, loop) for loop in LOOPS]
    engines = list(dict.fromkeys([APART, *(engine for pair in pairs for engine in pair)]))
    result: dict[str, Any] = header(args.note) | {"benchmark": "pipeline", "ranks": NUM_RANKS, "races": []}
    wrong = []
    for size in sizes:
        options = [f"--size={size}", f"--engines={','.join(engines)}", f"--rounds={num_rounds}", f"--steps={num_steps}"]
        ranks = run_ranks("benchmarks.pipeline_rank", options, num_ranks=NUM_RANKS, timeout_seconds=1800)
        rows = standings([rank["turns"] for rank in ranks], engines)
        waits = [waited(name, spans, size) for name, spans in ranks[0]["spans"].items()]
        calls = {name: [rank["calls"][name] for rank in ranks] for name in engines}
        result["races"].append(
            {
                "size": size,
                "turns": [rank["turns"] for rank in ranks],
                "summary": [row._asdict() for row in rows],
                "waits": [wait._asdict() for wait in waits],
                "calls": calls,
            }
        )
        file = write_result(args.out / "pipeline.json", result)
        _show(size, rows, {own: peer for peer, own in pairs}, waits, calls, console)
        wrong += [f"{size}: {sentence}" for sentence in faults_of(rows)]
    result["memory"] = held = [memory_of(engine, held_size) for engine in engines if engine not in (APART, DEEPSPEED)]
    file = write_result(args.out / "pipeline.json", result)
    _show_memory(held_size, held, console)
    console.print(f"\n{file}", markup=False)
    for sentence in wrong:
        console.print(sentence, markup=False)
    return 1 if wrong else 0


def faults_of(rows: Sequence[Standing]) -> list[str]:
    """A sentence for each engine whose loss is not that of the first of torch's."""
    expected = next(row.loss for row in rows if row.engine.startswith(TORCH))
    return [
        f"{row.engine}: the loss is {row.loss:.6f}, that of {TORCH} is {expected:.6f}."
        for row in rows
        if row.engine != APART and abs(row.loss - expected) > TOLERANCE["fp32"] * abs(expected)
    ]


# -- memory -----------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """By rank: the most that a process held, and what the engine had promised; 0 for those that promise nothing."""

    engine: str
    peak_bytes: tuple[int, ...]
    promised_bytes: tuple[int, ...]


def memory_of(engine: str, size: str) -> Held:
    """Of a job of its own, so that nobody else's memory is in it."""
    options = [f"--size={size}", f"--engines={engine}", "--steps=4"]
    ranks = run_ranks("benchmarks.pipeline_rank", options, num_ranks=NUM_RANKS, timeout_seconds=600)
    return Held(engine, *(tuple(rank[key] for rank in ranks) for key in ("peak_bytes", "promised_bytes")))


def _show_memory(size: str, held: Sequence[Held], console: Console) -> None:
    lines = [
        [
            one.engine,
            *(f"{peak / 2**20:.0f}" for peak in one.peak_bytes),
            *(
                f"{peak / most:.2f}" if most else "-"
                for peak, most in zip(one.peak_bytes, one.promised_bytes, strict=True)
            ),
        ]
        for one in held
    ]
    columns = ["peak MiB", *(f"rank {rank}" for rank in range(NUM_RANKS))]
    show_figures(
        f"{size}: memory", [*columns, *(f"rank {rank} / promised" for rank in range(NUM_RANKS))], lines, console
    )


# -- waiting ----------------------------------------------------------------------------------------------


class Waited(NamedTuple):
    """The share of the ranks' time in which they wait: measured; as the schedule has it where each op takes what it
    took at its median, so that stages may differ; and where all are alike and a backward takes as long as two
    forwards."""

    engine: str
    measured: float
    theory: float
    unit_theory: float


def spans_of(events: Sequence[Mapping[str, Any]]) -> Spans:
    """When the ops of a schedule ran, from the events of a timeline."""
    spans: Spans = {}
    for event in events:
        if event.get("cat") == "stages" and not event["name"].startswith("wait "):
            spans.setdefault(f"{event['pid']} {event['name']}", []).append(event["ts"])
    return spans


def waited(engine: str, steps: Sequence[Spans], size: str) -> Waited:
    """`steps` are the spans of each."""
    name = engine.partition(" ")[2]
    num_micro_batches, num_chunks = PIPELINE_SIZES[size].num_micro_batches, 2 if name == "interleaved" else 1
    schedule = schedule_for(name, NUM_RANKS, num_micro_batches, num_chunks)
    took: dict[str, list[float]] = {}
    for spans in steps:
        for on_rank, (start, stop) in spans.items():
            took.setdefault(on_rank.split()[1], []).append(stop - start)

    def cost_of(op: Op) -> float:
        return median(took[f"{op.kind}{op.micro_batch}@{op.stage}"])

    measured = median(bubble_of(spans) for spans in steps)
    return Waited(engine, measured, timed(schedule, cost_of).bubble, timed(schedule).bubble)


def bubble_of(spans: Spans) -> float:
    """From the first op's beginning to the last one's end, the share of the ranks' time in which they run none."""
    first, last = min(start for start, _ in spans.values()), max(stop for _, stop in spans.values())
    busy = sum(stop - start for start, stop in spans.values())
    return 1 - busy / (NUM_RANKS * (last - first))


def _show(
    size: str,
    rows: Sequence[Standing],
    peer_of: Mapping[str, str],
    waits: Sequence[Waited],
    calls: Mapping[str, Sequence[int]],
    console: Console,
) -> None:
    lines = []
    for row in rows:
        peer = peer_of.get(row.engine)
        lines.append(
            [
                row.engine,
                f"{row.step_seconds * 1000:.1f}",
                f"{row.passes_seconds * 1000:.1f}",
                f"{row.over[APART]:.2f}",
                "-" if peer is None else f"{row.over[peer]:.2f}",
                f"{row.cpu_seconds * 1000:.1f}",
                "-" if peer is None else f"{row.cpu_over[peer]:.2f}",
                " ".join(map(str, calls[row.engine])),
                f"{row.loss:.5f}",
            ]
        )
    columns = ["engine", "ms/step", "passes", f"x {APART}", "x peer", "CPU ms", "CPU x peer", "calls by rank", "loss"]
    show_figures(f"{size}, fp32, {NUM_RANKS} stages", columns, lines, console)
    shown = [
        [
            one.engine,
            f"{one.measured:.1%}",
            f"{one.theory:.1%}",
            f"{one.measured / one.theory:.2f}",
            f"{one.unit_theory:.1%}",
        ]
        for one in waits
    ]
    columns = ["waiting", "measured", "by the schedule", "ratio", "backward = 2 forwards"]
    show_figures(f"{size}: the ranks' time in which they wait", columns, shown, console)
