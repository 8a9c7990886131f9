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

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.elastic import RANKS, Job
from benchmarks.elastic_rank import ROWS
from benchmarks.pictures.style import BLUE, BUSY, FAINT, ORANGE, PALE, RED, area, card, is_busy, plain

CALM_SECONDS = 5.0
LOST = 2
"""The rank that is killed."""
NUM_BINS = 60


def measure_lost_rank() -> dict[str, Any]:
    """Four ranks, of which one is killed and replaced, and then a job in which nothing happens. Each step once."""
    busy = is_busy()
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
    return {
        "killed": killed,
        "busy": busy,
        "steps": steps,
        "calm": [(one["step"], one["loss"]) for one in _steps(calm)],
    }


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
    steps = [{**step, "at": step["time"] - measured["killed"]} for step in measured["steps"]]
    after = next(step["at"] for step in steps if step["size"] < RANKS)
    joined = next(step["at"] for step in steps if step["at"] > after and step["size"] == RANKS)
    usual = median(later["at"] - earlier["at"] for earlier, later in pairwise(steps))
    figure = card(
        9.6,
        4.5,
        f"Rank {LOST} of {RANKS} is killed: the others repeat the step, and a new rank joins",
        f"shardwise launch --nproc 4 --elastic 2:4, zero3. From the kill to the next step: {after * 1e3:.0f} ms; "
        f"a step usually takes {usual * 1e3:.0f} ms" + BUSY * measured["busy"],
    )
    first, last = max(steps[0]["at"], -0.4 * joined), min(steps[-1]["at"], 1.4 * joined)
    shown = [step for step in steps if first <= step["at"] <= last]
    rate, loss = area(figure, 0.85, 2.15, 8.5, 1.5), area(figure, 0.85, 0.6, 8.5, 1.25)
    top = _draw_rate(rate, [step["at"] for step in shown], first, last)
    for middle, said, colour in (
        (first / 2, f"{RANKS} ranks", FAINT),
        (joined / 2, f"{RANKS - 1} ranks", RED),
        ((joined + last) / 2, f"{RANKS} ranks", FAINT),
    ):
        rate.text(middle, top * 1.08, said, fontsize=8.5, color=colour, ha="center")
    rate.text(0, top * 1.23, " kill -9", fontsize=8.5, color=RED, fontweight="bold")
    calm = dict(measured["calm"])
    at = [step["at"] for step in shown]
    loss.plot(at, [step["loss"] for step in shown], color=BLUE, linewidth=1.6, label="this job")
    other: dict[str, Any] = {
        "color": ORANGE,
        "linewidth": 1.6,
        "linestyle": (0, (2, 3)),
        "label": "a job without a fault",
    }
    loss.plot(at, [calm.get(step["step"], float("nan")) for step in shown], **other)
    loss.legend(frameon=False, fontsize=8, labelcolor=FAINT, loc="upper right", ncols=2, bbox_to_anchor=(1, 1.15))
    for axes in (rate, loss):
        axes.axvline(0, color=RED, linewidth=1.2)
        axes.axvspan(0, joined, facecolor=PALE[RED], alpha=0.5, linewidth=0, zorder=0)
        axes.set_xlim(first, last)
    rate.set_ylim(0, top * 1.2)
    plain(rate, "", "rows per second").set_xticklabels([])
    plain(loss, "seconds from the kill", "loss")
    return figure


def _draw_rate(axes: Axes, ends: list[float], first: float, last: float) -> float:
    """Rows per second from the times at which steps ended, in bins that begin or end with the kill; returns the
    most."""
    width = (last - first) / NUM_BINS
    edges = [width * number for number in range(int(first / width), int(last / width) + 1)]
    rows = [ROWS * sum(low <= at < high for at in ends) / width for low, high in pairwise(edges)]
    axes.bar(edges[:-1], rows, width * 0.88, align="edge", color=PALE[BLUE], edgecolor=BLUE, linewidth=0.5)
    return max(rows)
