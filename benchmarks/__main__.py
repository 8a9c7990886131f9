"""`python -m benchmarks PROGRAM`: what `make bench` and `shardwise bench` run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks import (
    checkpoint,
    collectives,
    commits,
    compiled,
    elastic,
    experts,
    generation,
    growth,
    horovod,
    hosts,
    integrations,
    islands,
    learning,
    mpi,
    overhead,
    pipeline,
    planner,
    smaller_meshes,
    tensor,
    tiers,
    weights,
    wires,
)
from benchmarks.draw import draw_races
from benchmarks.fresh import ROOT, RunError
from benchmarks.names import ENGINE_NAMES
from benchmarks.peers import QUICK, Settings, race, runs_of
from benchmarks.planner_plans import SEED
from benchmarks.results_file import read_result
from benchmarks.show import show_loss_verdict, show_race
from benchmarks.sizes import DTYPES, SIZES
from shardwise.errors import ShardwiseError

PROGRAMS = (
    "peers",
    "collectives",
    "checkpoint",
    "overhead",
    "growth",
    "commits",
    "compile",
    "tensor",
    "pipeline",
    "planner",
    "smaller",
    "experts",
    "elastic",
    "tiers",
    "generation",
    "weights",
    "horovod",
    "integrations",
    "mpi",
    "hosts",
    "islands",
    "wires",
    "learning",
)
RESULTS = ROOT / "runs" / "bench"


def main() -> int:
    """0; 1 if engines did not train the same or a run failed; 2 if a request makes no sense."""
    args = _parser().parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # who follows a log sees every run
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        return int(_PROGRAMS[args.program](args, console))
    except (RunError, ShardwiseError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _peers(args: argparse.Namespace, console: Console) -> int:
    file = args.show or args.out / "peers.json"
    if args.show:
        result = read_result(args.show)
    else:
        result = race(_settings(args), file, args.note, tell=lambda line: console.print(line, markup=False))
    runs, races = runs_of(result), result["summary"]
    for each in races:
        show_race(runs, each, console)
    same = show_loss_verdict(runs, races, console)
    picture = draw_races(races, result["note"], file.with_suffix(".png"))
    console.print(f"\n{file}\n{picture}", markup=False)
    return 0 if same and not any(run.error for run in runs) else 1


def _settings(args: argparse.Namespace) -> Settings:
    chosen = {
        "sizes": args.sizes,
        "dtypes": args.dtypes,
        "engines": args.engines,
        "rounds": args.rounds,
        "warm": args.warm,
        "steps": args.steps,
        "device": args.device,
        "patience_seconds": args.patience,
    }
    given = {name: value for name, value in chosen.items() if value is not None}
    return replace(QUICK if args.quick else Settings(), **given)


_PROGRAMS = {
    "peers": _peers,
    "collectives": collectives.main,
    "checkpoint": checkpoint.main,
    "overhead": overhead.main,
    "growth": growth.main,
    "commits": commits.main,
    "compile": compiled.main,
    "elastic": elastic.main,
    "experts": experts.main,
    "tensor": tensor.main,
    "pipeline": pipeline.main,
    "planner": planner.main,
    "smaller": smaller_meshes.main,
    "tiers": tiers.main,
    "generation": generation.main,
    "weights": weights.main,
    "horovod": horovod.main,
    "integrations": integrations.main,
    "mpi": mpi.main,
    "hosts": hosts.main,
    "islands": islands.main,
    "wires": wires.main,
    "learning": learning.main,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="See docs/benchmarks.md.")
    option = parser.add_argument
    option("program", choices=PROGRAMS)
    option("--quick", action="store_true", help="a minute or two: whether all runs, not how fast")
    option("--out", type=Path, default=RESULTS, metavar="DIR", help="where results go (default: runs/bench)")
    option("--note", default="", metavar="TEXT", help="kept with the result")
    option(
        "--rounds",
        type=_positive,
        metavar="N",
        help="of peers, growth, commits, planner, tiers, generation, integrations: how often (3; commits, "
        "generation 5); of elastic: kills (10), and pairs of jobs (7)",
    )
    saves = parser.add_argument_group("checkpoint, tiers, generation and weights")
    saves.add_argument("--folder", default=".", metavar="DIR", help="where to write, and so which disk (default: here)")
    older = parser.add_argument_group("commits")
    older.add_argument("--against", metavar="COMMIT", help="which this checkout is compared with, in turns")
    between = parser.add_argument_group("hosts and wires")
    between.add_argument(
        "--hosts", type=hosts.shape_of, nargs="+", metavar="N", help="how many, or 2x2 with 2 ranks on each (2x2 2 4)"
    )
    between.add_argument(
        "--gbit", type=_rate, nargs="+", metavar="G", help="rates of links in Gbit/s (0.1 1); of islands one (0.05)"
    )
    between.add_argument("--delay-ms", type=_delay, default=0.0, metavar="MS", help="that each packet takes longer (0)")
    drawn = parser.add_argument_group("planner")
    drawn.add_argument("--memory-only", action="store_true", help="nothing is timed, so other jobs may run; goes on")
    drawn.add_argument("--seed", type=int, default=SEED, metavar="N", help=f"of the drawn plans ({SEED})")
    lost = parser.add_argument_group("elastic")
    lost.add_argument("--parts", type=_some_of(elastic.PARTS), metavar="A", help=f"of {', '.join(elastic.PARTS)} (all)")
    learnt = parser.add_argument_group("learning")
    learnt.add_argument("--variants", type=_some_of(learning.VARIANTS), metavar="A,B", help="of fp8 and wires (all)")
    learnt.add_argument("--seeds", type=_positive, metavar="N", help="pairs of runs, each of a seed of its own (3)")
    learnt.add_argument("--width", type=_positive, metavar="N", help="of blocks, a multiple of 32 (128)")
    learnt.add_argument(
        "--text", type=Path, default=ROOT, metavar="DIR", help="a checkout whose code is learnt (this one)"
    )
    peers = parser.add_argument_group("peers")
    option = peers.add_argument
    option("--sizes", type=_some_of(SIZES), metavar="A,B", help=f"of {', '.join(SIZES)}")
    option("--dtypes", type=_some_of(DTYPES), metavar="A,B", help=f"of {', '.join(DTYPES)}; of tensor too")
    option("--engines", type=_some_of(ENGINE_NAMES), metavar="A,B", help=f"of {', '.join(ENGINE_NAMES)}")
    option("--warm", type=_positive, metavar="N", help="steps before the timed ones (default: 2)")
    option("--steps", type=_positive, metavar="N", help="timed steps a run (default: 4); of learning: all steps (1000)")
    option("--patience", type=_seconds, metavar="S", help="seconds in all to wait for others to be quiet (default: 0)")
    option("--device", choices=["cpu", "cuda"], help="where (default: cpu); cuda needs a GPU for each rank")
    option("--show", type=Path, metavar="JSON", help="print and draw a result that is there, and run nothing")
    return parser


def _some_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """An argument that is a list of known names with commas between them."""
    allowed = tuple(known)

    def names_in(text: str) -> tuple[str, ...]:
        names = tuple(name for name in text.split(",") if name)
        if not names or not set(names) <= set(allowed):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(allowed)}")
        return names

    return names_in


def _rate(text: str) -> float:
    rate = float(text)
    if not 0.001 <= rate <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not from 0.001 to 1000 Gbit/s")
    return rate


def _delay(text: str) -> float:
    delay = float(text)
    if not 0 <= delay <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1000 ms")
    return delay


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds, 0 or more")
    return seconds


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
