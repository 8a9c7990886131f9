"""A picture of an elastic job that loses a rank."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from benchmarks.elastic import RANKS, Job
from benchmarks.elastic_rank import ROWS
from benchmarks.pictures.style import BLUE, FAINT, ORANGE, PALE, RED, area, card, plain

CALM_SECONDS = 5.0
LOST = 2
"""The rank that is killed."""
BIN_SECONDS = 0.25


def measure_lost_rank() -> dict[str, Any]:
    """Four ranks, of which one is killed and replaced, and then a job in which nothing happens. Each step once."""
    job = Job("shardwise", Path(tempfile.mkdtemp(prefix="shardwise-pictures-")))
    job.start()
    try:
        job.wait("ranks", lambda: _sizes(job) and _sizes(job)[-1] == RANKS)
        _go_on(job, CALM_SECONDS)
        killed = time.time()
        os.kill(_pids(job)[LOST], signal.SIGKILL)
        job.wait("fewer ranks", lambda: RANKS - 1 in _sizes(job))
        job.wait("a replacement", lambda: _sizes(job)[-1] == RANKS)
        _go_on(job, CALM_SECONDS)
    finally:
        job.end()
    steps = _steps(job)
    calm = Job("shardwise", Path(tempfile.mkdtemp(prefix="shardwise-pictures-")), steps=steps[-1]["step"])
    calm.start()
    try:
        calm.wait("the end", lambda: calm.processes[0].poll() is not None)
    finally:
        calm.end()
    calm.look()
    return {"killed": killed, "steps": steps, "calm": [(one["step"], one["loss"]) for one in _steps(calm)]}


def _go_on(job: Job, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.05)
        job.look()


def _steps(job: Job) -> list[dict[str, Any]]:
    """By number, from the rank that committed it first."""
    first: dict[int, dict[str, Any]] = {}
    for line in sorted(job.lines, key=lambda line: line["time"]):
        first.setdefault(line["step"], {name: line[name] for name in ("step", "time", "size", "loss")})
    return [first[step] for step in sorted(first)]


def _sizes(job: Job) -> list[int]:
    return [line["size"] for line in _steps(job)]


def _pids(job: Job) -> list[int]:
    """Of the ranks, by the number of their member."""
    found = {int(path.stem.split("-")[1]): int(path.stem.split("-")[2]) for path in job.folder.glob("member-*.jsonl")}
    return [found[member] for member in sorted(found)]


def draw_lost_rank(measured: dict[str, Any]) -> Figure:
    steps, killed = measured["steps"], measured["killed"]
    times = [one["time"] - killed for one in steps]
    after = next(at for at in times if at > 0 and at > 0.02)
    usual = median(later - earlier for earlier, later in pairwise(times))
    figure = card(
        9.6,
        4.4,
        "Rank 2 of 4 is killed: the others repeat the step, and a new rank joins",
        f"shardwise launch --nproc 4 --elastic 2:4, zero3. From the kill to the next step: {after * 1e3:.0f} ms; "
        f"a step usually takes {usual * 1e3:.0f} ms. No step is lost",
    )
    first, last = (
        -3.5,
        min(times[-1], max(at for one, at in zip(steps, times, strict=True) if one["size"] == RANKS - 1) + 3.5),
    )
    rate = area(figure, 0.85, 2.15, 8.5, 1.5)
    bins = int((last - first) / BIN_SECONDS)
    edges = [first + BIN_SECONDS * number for number in range(bins + 1)]
    rows = [ROWS * sum(low <= at < high for at in times) / BIN_SECONDS for low, high in pairwise(edges)]
    rate.bar(edges[:-1], rows, BIN_SECONDS * 0.9, align="edge", color=PALE[BLUE], edgecolor=BLUE, linewidth=0.5)
    loss = area(figure, 0.85, 0.6, 8.5, 1.25)
    calm = dict(measured["calm"])
    shown = [(at, one) for at, one in zip(times, steps, strict=True) if first <= at <= last]
    loss.plot([at for at, _ in shown], [one["loss"] for _, one in shown], color=BLUE, linewidth=1.6, label="this job")
    loss.plot(
        [at for at, _ in shown],
        [calm.get(one["step"], float("nan")) for _, one in shown],
        color=ORANGE,
        linewidth=1.6,
        linestyle=(0, (2, 3)),
        label="the same steps of a job without a fault",
    )
    loss.legend(frameon=False, fontsize=8, labelcolor=FAINT, loc="upper right", ncols=2, bbox_to_anchor=(1, 1.12))
    joined = next(at for one, at in zip(steps, times, strict=True) if at > after and one["size"] == RANKS)
    for axes in (rate, loss):
        axes.axvline(0, color=RED, linewidth=1.2)
        axes.axvspan(0, joined, facecolor=PALE[RED], alpha=0.5, linewidth=0)
        axes.set_xlim(first, last)
    top = max(rows)
    for at, said, colour in (
        (first / 2, "4 ranks", FAINT),
        (joined / 2, "3 ranks", RED),
        ((joined + last) / 2, "4 ranks", FAINT),
    ):
        rate.text(at, top * 1.06, said, fontsize=8.5, color=colour, ha="center")
    rate.text(0.04, top * 1.2, "kill -9", fontsize=8.5, color=RED, fontweight="bold")
    rate.set_ylim(0, top * 1.2)
    plain(rate, "", "rows per second")
    rate.set_xticklabels([])
    plain(loss, "seconds from the kill", "loss")
    return figure
