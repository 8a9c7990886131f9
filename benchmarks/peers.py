"""The race: every engine on the same model, data, optimizer and micro-batch, in fresh processes, interleaved."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.fresh import RunError, run_ranks
from benchmarks.machine import header
from benchmarks.names import ALONE, ENGINE_NAMES, REFERENCE, needs
from benchmarks.patience import Patience
from benchmarks.results_file import write_result
from benchmarks.schedule import interleaved
from benchmarks.sizes import SIZES
from benchmarks.summary import Run, others_cores_of, races_of, ratios_of, rows_of
from shardwise.system.neighbours import BUSY_CORES, Neighbours

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """Which races, how often, and how long each run is."""

    sizes: tuple[str, ...] = ("small", "tall", "ranks4")
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    engines: tuple[str, ...] = ENGINE_NAMES
    rounds: int = 3
    warm: int = 2
    steps: int = 4
    device: str = "cpu"
    timeout_seconds: float = 300
    patience_seconds: float = 0


QUICK = Settings(sizes=("tiny",), dtypes=("fp32",), rounds=2, steps=8)


def race(settings: Settings, file: Path, note: str, tell: Tell) -> dict[str, Any]:
    """Run everything; the result, which is in `file` after each run already."""
    engines = [engine for engine in settings.engines if _is_installed(engine, tell)]
    result = header(note) | {"benchmark": "peers", "run": asdict(settings), "runs": []}
    runs: list[Run] = []
    patience = Patience(settings.patience_seconds)
    for size in settings.sizes:
        for dtype in settings.dtypes:
            turns = [(0, REFERENCE), *interleaved(engines, settings.rounds)]
            for number, engine in turns:
                run = _run_in_calm(settings, size, dtype, engine, number, patience)
                tell(f"{size} {dtype} round {number + 1} of {settings.rounds}: {engine:16} {_said(run)}")
                runs.append(run)
                result |= {"runs": [asdict(each) for each in runs], "summary": summary_of(runs)}
                write_result(file, result)
    return result


def runs_of(result: dict[str, Any]) -> list[Run]:
    """The runs of a result that was read from a file."""
    return [Run(**{**run, "ranks": tuple(run["ranks"])}) for run in result["runs"]]


def summary_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [
        {
            "size": size,
            "dtype": dtype,
            "ranks": SIZES[size].num_ranks,
            "params": SIZES[size].params,
            "others_cores": others_cores_of([run for run in runs if (run.size, run.dtype) == (size, dtype)]),
            "rows": [asdict(row) for row in rows_of(runs, size, dtype)],
            "ratios": [asdict(ratio) for ratio in ratios_of(runs, size, dtype)],
        }
        for size, dtype in races_of(runs)
    ]


def _is_installed(engine: str, tell: Tell) -> bool:
    if importlib.util.find_spec(needs(engine)) is not None:
        return True
    tell(f"{engine} is left out: {needs(engine)} is not installed here; `make bench` installs it.")
    return False


def _run_in_calm(settings: Settings, size: str, dtype: str, engine: str, number: int, patience: Patience) -> Run:
    """A run that others did not disturb, as far as patience goes."""
    while True:
        patience.wait_for_calm()
        start = time.monotonic()
        run = _run(settings, size, dtype, engine, number)
        if run.others_cores <= BUSY_CORES or not patience.allows_another(time.monotonic() - start):
            return run


def _run(settings: Settings, size: str, dtype: str, engine: str, number: int) -> Run:
    options = {
        "engine": engine,
        "size": size,
        "dtype": dtype,
        "device": settings.device,
        "warm": settings.warm,
        "steps": settings.steps,
    }
    neighbours = Neighbours()
    try:
        ranks = run_ranks(
            "benchmarks.worker",
            [f"--{name}={value}" for name, value in options.items()],
            num_ranks=1 if engine in ALONE else SIZES[size].num_ranks,
            timeout_seconds=settings.timeout_seconds,
            on_cpu=settings.device == "cpu",
        )
    except RunError as error:
        return Run(size, dtype, engine, number, error=str(error), others_cores=neighbours.cores())
    return Run(size, dtype, engine, number, ranks=tuple(ranks), others_cores=neighbours.cores())


def _said(run: Run) -> str:
    if run.error:
        return run.error
    others = f", others busy on {run.others_cores:.1f} cores" if run.others_cores > BUSY_CORES else ""
    return f"{run.seconds * 1000:8.1f} ms, {run.peak_bytes / 2**20:7.1f} MiB, loss {run.loss:.5f}{others}"
