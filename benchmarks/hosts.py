"""Engines between hosts: bytes over each link beside what was promised, steps, and how much of it is hidden.

Hosts are namespaces of this machine (`namespaces.py`), which takes root. They share its cores, so the model is small
and takes a given time to compute ([Note: paced blocks] in `hosts_rank.py`), and links of 0.1 to 1 Gbit/s are to it what
10 and more are to a model that is a hundred times as large.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.figures import Figures, read_figures
from benchmarks.fresh import RunError, environment
from benchmarks.hosts_names import FREE, Row, Turn, beside, engines_for, faults_of, rows_of
from benchmarks.machine import allocator_settings, header, load_average
from benchmarks.namespaces import Hosts, ended_by_signals, folder_for_all, obstacle
from benchmarks.results_file import write_result
from benchmarks.show import show_figures
from benchmarks.summary import TOLERANCE

RATES: tuple[float, ...] = (FREE, 0.1e9, 1e9)
Shape = tuple[int, int]
"""Hosts, and ranks on each."""
MOST_HOSTS = 100
BLOCK_SECONDS = 0.12
TIMEOUT_SECONDS = 1800


@dataclass(frozen=True)
class Races:
    """A benchmark of engines that take turns, on hosts of one shape after the other."""

    name: str
    shapes: Sequence[Shape]
    quick_shape: Shape
    engines_for: Callable[[int], Sequence[str]]
    """With so many ranks on each host."""
    compared: Callable[[Sequence[Row]], dict[str, Any]]
    """What is recorded beside the rows."""
    show: Callable[[Shape, float, Sequence[Row], Console], None]
    """Rows of a shape and of links with a delay in seconds."""
    faults_of: Callable[[Sequence[Row], bool], Sequence[str]]
    """Sentences for rows, which may be of a quick run."""
    size: str = "hosts"
    block_seconds: float = BLOCK_SECONDS
    """That a block's forward and backward take, so that messages have something to go on behind."""

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """0; 1 if there are faults. Raises `RunError`."""
        why = obstacle()
        if why:
            raise RunError(f"hosts as network namespaces: {why}")
        size, rates, shapes, num_steps, seconds = self.size, RATES, self.shapes, 3, self.block_seconds
        if args.quick:
            size, rates, shapes, num_steps, seconds = "tiny", (FREE, 0.1e9), (self.quick_shape,), 2, 0.01
        rates = (FREE, *(gbit * 1e9 for gbit in args.gbit)) if args.gbit else rates
        delay_seconds = args.delay_ms / 1e3
        result: dict[str, Any] = header(args.note) | {"benchmark": self.name, "size": size, "block_seconds": seconds}
        result |= {"delay_seconds": delay_seconds, "races": []}
        wrong = []
        for num_hosts, num_local in args.hosts or shapes:
            engines = self.engines_for(num_local)
            options = [f"--engines={','.join(engines)}", f"--size={size}", f"--rates={','.join(map(str, rates))}"]
            options += [f"--rounds={args.rounds or (1 if args.quick else 2)}", f"--steps={num_steps}"]
            options += [f"--block-seconds={seconds}"]
            before = load_average()
            ranks = run_on_hosts("benchmarks.hosts_rank", options, num_hosts, num_local, delay_seconds)
            turns = [[Turn(*turn) for turn in rank["turns"]] for rank in ranks]
            rows = rows_of(turns, num_local, ranks[0]["promised"])
            race: dict[str, Any] = {"hosts": num_hosts, "ranks_per_host": num_local, "load_average_before": before}
            race |= {"turns": turns, "rows": [row._asdict() for row in rows]}
            result["races"].append(race | self.compared(rows))
            file = write_result(args.out / f"{self.name}.json", result)
            self.show((num_hosts, num_local), delay_seconds, rows, console)
            wrong += [f"{num_hosts} x {num_local}: {sentence}" for sentence in self.faults_of(rows, args.quick)]
        console.print(f"\n{file}", markup=False)
        for sentence in wrong:
            console.print(sentence, markup=False)
        return 1 if wrong else 0


def main(args: argparse.Namespace, console: Console) -> int:
    """0; 1 if an engine trains otherwise than the others, or sends what it did not say. Raises `RunError`."""
    has_deepspeed = find_spec("deepspeed") is not None
    return Races(
        "hosts",
        shapes=((2, 2), (2, 1), (4, 1)),
        quick_shape=(2, 2),
        engines_for=lambda num_local: engines_for(num_local, has_deepspeed=has_deepspeed),
        compared=lambda rows: {"beside": beside(rows)},
        show=_show,
        faults_of=lambda rows, _: faults_of(rows, TOLERANCE["fp32"]),
    ).run(args, console)


def run_on_hosts(
    module: str, options: Sequence[str], num_hosts: int, num_local: int, delay_seconds: float = 0.0
) -> list[Figures]:
    """What ranks of `python -m module options --out FOLDER` on hosts of their own found, by rank.

    They have their links shaped as they ask for it, by a file `rate` in that folder. Raises `RunError`.
    """
    command = [sys.executable, "-m", module, *options]
    variables = {**environment(on_cpu=True), **allocator_settings(os.environ), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        folder = stack.enter_context(folder_for_all())
        hosts = stack.enter_context(Hosts(num_hosts, delay_seconds))
        log = stack.enter_context((folder / "log").open("wb"))
        processes = [
            hosts.start(host, [*command, "--out", str(folder)], variables, num_ranks=num_local, out=log.fileno())
            for host in range(num_hosts)
        ]
        _attend(processes, hosts, folder)
        figures = read_figures(folder, num_hosts * num_local)
        errors = [each["error"] for each in figures if "error" in each]
        if any(process.returncode for process in processes) or not all(figures):
            said = (folder / "log").read_text(errors="replace").strip().splitlines()
            raise RunError((errors or said[-1:] or ["ranks ended without a word"])[0])
        return figures


def _attend(processes: Sequence[subprocess.Popen[bytes]], hosts: Hosts, folder: Path) -> None:
    """Return when all have ended, or one has failed."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    wish = folder / "rate"
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            time.sleep(5)  # the others say why, too
            return
        if wish.exists():
            rate = float(wish.read_text())
            wish.unlink()
            hosts.shape(rate or None)
            (folder / "rate-done").write_text("")
        if time.monotonic() > deadline:
            raise RunError(f"not done after {TIMEOUT_SECONDS} s")
        time.sleep(0.02)


def shape_of(text: str) -> Shape:
    """`4x2` as hosts and ranks on each; `4` has one rank on each. `ValueError` for anything else."""
    num_hosts, _, num_local = text.partition("x")
    shape = int(num_hosts), int(num_local or 1)
    if not (2 <= shape[0] <= MOST_HOSTS and shape[1] >= 1):
        raise ValueError(f"{text} is not 2 to {MOST_HOSTS} hosts of one rank or more")
    return shape


def _show(shape: Shape, delay_seconds: float, rows: Sequence[Row], console: Console) -> None:
    columns = ["engine", "ms/step", "CPU ms", "MB over a link", "promised", "ranks say", "hidden", "loss"]
    for rate in dict.fromkeys(row.rate for row in rows):
        links = f"links of {rate / 1e9:g} Gbit/s" if rate else "links not shaped"
        links += f", {delay_seconds * 1e3:g} ms" if delay_seconds else ""
        lines = [_line(row) for row in rows if row.rate == rate]
        show_figures(f"{shape[0]} hosts x {shape[1]}, {links}", columns, lines, console)


def _line(row: Row) -> list[str]:
    promised, told = (f"{each / 1e6:.2f}" if each is not None else "" for each in (row.promised_bytes, row.told_bytes))
    hidden = f"{row.hidden:.2f}" if row.hidden is not None else ""
    times = [f"{row.step_seconds * 1e3:.0f}", f"{row.cpu_seconds * 1e3:.0f}"]
    return [row.engine, *times, f"{row.link_bytes / 1e6:.2f}", promised, told, hidden, f"{row.loss:.6f}"]
