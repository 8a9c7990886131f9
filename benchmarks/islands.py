"""Islands and gradients as factors against data parallelism over one slow link, and against what torch and torchft have
of both: tokens a second, and the loss after equal tokens.

Two hosts are namespaces of this machine (`namespaces.py`), which takes root. They share its cores, so the model is
small; a link of 50 Mbit/s is to it what 10 Gbit/s are to one of 500 million parameters.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from benchmarks.fresh import RunError
from benchmarks.hosts import run_on_hosts
from benchmarks.islands_names import OURS, PEERS, TORCHFT
from benchmarks.machine import header, load_average
from benchmarks.namespaces import obstacle
from benchmarks.results_file import write_result
from benchmarks.show import show_figures

RATE, EVERY, BEFORE, STEPS = 50e6, 50, 400, 200
"""Of the link in bit/s; between outer steps; together, before islands part; and then."""
APART, FASTER = 0.02, 10
"""How much larger the loss may be, and how many times the tokens a second that are to be reached."""


def main(args: argparse.Namespace, console: Console) -> int:
    """0; 1 if islands learn less, or are not as much faster as they should be. Raises `RunError`."""
    why = obstacle()
    if why:
        raise RunError(f"hosts as network namespaces: {why}")
    rate = args.gbit[0] * 1e9 if args.gbit else RATE
    engines = [name for name in (*OURS, *PEERS) if name != TORCHFT or find_spec("torchft") is not None]
    size, num_local, every, num_before, num_steps = "hosts", 2, EVERY, BEFORE, STEPS
    if args.quick:
        size, every, num_before, num_steps = "tiny", 10, 20, 40
    options = [f"--engines={','.join(engines)}", f"--size={size}", f"--rate={rate}", f"--every={every}"]
    options += [f"--before={num_before}", f"--steps={num_steps}"]
    before = load_average()
    ranks = run_on_hosts("benchmarks.islands_rank", options, 2, num_local)
    turns: list[dict[str, Any]] = ranks[0]["turns"]
    result = header(args.note) | {"benchmark": "islands", "size": size, "rate": rate, "every": every}
    result |= {"steps_before": num_before, "loss_before": ranks[0]["before"]}
    result |= {"steps": num_steps, "hosts": 2, "ranks_per_host": num_local, "load_average_before": before}
    file = write_result(args.out / "islands.json", result | {"turns": turns})
    plain = turns[0]
    columns = ["engine", "tokens/s", "beside zero1", "ms/step", "KB over the link a step", "loss", "beside zero1"]
    rows = [_line(turn, plain) for turn in turns]
    title = f"2 hosts x {num_local}, a link of {rate / 1e6:g} Mbit/s, outer steps every {every}"
    title += f", loss after {num_before} + {num_steps} ({ranks[0]['before']:.4f} before)"
    show_figures(title, columns, rows, console)
    if TORCHFT not in engines:
        console.print("torchft is not installed, so its DiLoCo was left out.", markup=False)
    console.print(f"\n{file}", markup=False)
    ours = [turn for turn in turns if turn["engine"] in ("islands", "streaming")]
    wrong = [sentence for turn in ours for sentence in _faults(turn, plain)] if not args.quick else []
    for sentence in wrong:
        console.print(sentence, markup=False)
    return 1 if wrong else 0


def _faults(turn: dict[str, Any], plain: dict[str, Any]) -> Iterator[str]:
    if turn["loss"] > plain["loss"] * (1 + APART):
        yield f"{turn['engine']} has learnt less than zero1, by more than {APART:.0%}."
    if turn["tokens_per_second"] < FASTER * plain["tokens_per_second"]:
        yield f"{turn['engine']} has less than {FASTER} times the tokens a second of zero1."


def _line(turn: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    faster, further = turn["tokens_per_second"] / plain["tokens_per_second"], turn["loss"] / plain["loss"] - 1
    timed = [f"{turn['tokens_per_second']:.0f}", f"{faster:.2f}", f"{turn['step_seconds'] * 1e3:.0f}"]
    return [turn["engine"], *timed, f"{turn['link_bytes'] / 1e3:.1f}", f"{turn['loss']:.4f}", f"{further:+.1%}"]
