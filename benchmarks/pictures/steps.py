"""Pictures of a step: when it does what, and how much it holds. Two ranks that send messages to each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from benchmarks.fresh import run_ranks
from benchmarks.pictures.rank import SIZE
from benchmarks.pictures.style import (
    BLUE,
    BUSY,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PALE,
    RED,
    VIOLET,
    area,
    bare,
    box,
    card,
    is_busy,
    plain,
)

MODULE = "benchmarks.pictures.rank"
PATIENCE_SECONDS = 280.0
PRESETS = ("ddp", "zero2", "zero3")
Span = tuple[float, float, str]


def measure_overlap() -> dict[str, Any]:
    busy = is_busy()
    figures = run_ranks(MODULE, ["timeline", "zero3"], num_ranks=2, timeout_seconds=PATIENCE_SECONDS)
    events = [event for event in figures[0]["events"] if event["pid"] == 0 and event["ph"] in "Xbe"]
    return {"busy": busy, "events": events}


def draw_overlap(measured: dict[str, Any]) -> Figure:
    events = measured["events"]
    begun = min(event["ts"] for event in events)
    spans = [(track, (start - begun) / 1e3, (stop - begun) / 1e3, name) for track, start, stop, name in _spans(events)]
    whole = max(stop for _, _, stop, _ in spans)
    drawn = [(*found, start, stop, name) for track, start, stop, name in spans if (found := _drawn_as(track, name))]
    agreed = max(stop for _, _, stop, name in spans if name.startswith("agree "))
    drawn.append(("computes", FAINT, agreed, whole, "update"))
    waited = sum(stop - start for row, _, start, stop, _ in drawn if row == "waits")
    figure = card(
        9.6,
        3.6,
        "A step of zero3 on one of two ranks" + BUSY * measured["busy"],
        f"From engine.timeline(). Messages travel while blocks compute; waiting takes {waited / whole:.0%} of "
        "the step. A bar ends where its result is first needed",
    )
    axes = area(figure, 1.25, 0.62, 8.1, 2.0)
    lanes = dict.fromkeys(ROWS, 0)
    for row, colour, start, stop, name in sorted(drawn, key=lambda one: one[2]):
        lanes[row] += 1
        top, height = ROWS.index(row) - 0.36, 0.72
        if row in ("gathers", "sums"):  # one begins before another is awaited: two lanes
            top, height = top + 0.37 * (lanes[row] % 2), 0.35
        fill = colour if row == "waits" else PALE[colour]
        axes.broken_barh([(start, stop - start)], (top, height), facecolor=fill, edgecolor=colour, linewidth=0.7)
        unit = name.split(" ")[1 if name.startswith(("forward", "backward")) else 0].removeprefix("blocks.")
        if row != "waits" and stop - start > whole * (0.008 + 0.007 * len(unit)):
            size = 7.5 if row == "computes" else 6
            middle = (start + stop) / 2, top + height / 2
            axes.text(*middle, unit, fontsize=size, ha="center", va="center_baseline", color=INK)
    axes.set_yticks(range(len(ROWS)), ROWS, fontsize=8.5)
    axes.set_ylim(len(ROWS) - 0.4, -0.6)
    axes.set_xlim(0, whole)
    plain(axes, "milliseconds", "")
    axes.grid(visible=False)
    _legend(figure, ((BLUE, "forward"), (GREEN, "backward"), (FAINT, "update")), 1.25, 2.72)
    return figure


ROWS = ("computes", "waits", "gathers", "sums")


def _drawn_as(track: str, name: str) -> tuple[str, str] | None:
    """The row and colour of a span; None for what is not drawn."""
    if track == "units":
        around_others = name.split(" ")[-1] in ("positions", "rest")
        return None if around_others else ("computes", BLUE if name.startswith("forward") else GREEN)
    if track == "host":
        return ("waits", RED) if name.startswith(("wait ", "agree ")) else None
    return ("sums", ORANGE) if name.endswith(" grad") else ("gathers", VIOLET)


def _spans(events: list[dict[str, Any]]) -> Iterator[tuple[str, float, float, str]]:
    begun: dict[tuple[str, str], float] = {}
    for event in events:
        key = event["cat"], event["name"]
        if event["ph"] == "X":
            yield event["cat"], event["ts"], event["ts"] + event["dur"], event["name"]
        elif event["ph"] == "b":
            begun[key] = event["ts"]
        else:
            yield event["cat"], begun.pop(key), event["ts"], event["name"]


def measure_memory() -> dict[str, Any]:
    return {
        preset: run_ranks(MODULE, ["memory", preset], num_ranks=2, timeout_seconds=PATIENCE_SECONDS)[0]
        for preset in PRESETS
    }


def draw_memory(measured: dict[str, Any]) -> Figure:
    figure = card(
        9.6,
        4.1,
        "Memory of one rank over a step",
        f"A GPT of {SIZE.params / 1e6:.0f} million parameters in bf16 with AdamW, on two ranks that send messages: "
        "resident memory beyond what the process had before",
    )
    most = max(max(held for _, held in one["samples"]) for one in measured.values()) / 2**20
    most = max(most, *(one["promised"] / 2**20 for one in measured.values()))
    width = 2.72
    for number, (preset, one) in enumerate(measured.items()):
        axes = area(figure, 0.75 + (width + 0.22) * number, 0.68, width, 2.2)
        phases = zip(
            ("forward", "backward", "step"), one["marks"], one["marks"][1:], (BLUE, GREEN, FAINT), strict=False
        )
        for what, start, stop, colour in phases:
            axes.axvspan(start * 1e3, stop * 1e3, facecolor=PALE[colour], alpha=0.6, linewidth=0)
            axes.text((start + stop) / 2 * 1e3, most * 1.13, what, fontsize=7.5, color=colour, ha="center")
        axes.plot(
            [at * 1e3 for at, _ in one["samples"]],
            [held / 2**20 for _, held in one["samples"]],
            color=INK,
            linewidth=1.4,
        )
        axes.axhline(one["promised"] / 2**20, color=RED, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_ylim(0, most * 1.1)
        axes.set_xlim(0, one["marks"][-1] * 1e3)
        plain(axes, "milliseconds", "" if number else "MiB")
        axes.set_title(
            preset, loc="left", fontsize=9.5, color=INK, fontweight="bold", family="DejaVu Sans Mono", pad=20
        )
        if number:
            axes.set_yticklabels([])
    figure.text(0.975, 0.905, "dashed: the peak that engine.rehearse() predicts", fontsize=8.5, color=RED, ha="right")
    return figure


def _legend(figure: Figure, entries: tuple[tuple[str, str], ...], left: float, bottom: float) -> None:
    for number, (colour, what) in enumerate(entries):
        axes = bare(area(figure, left + 1.05 * number, bottom, 1, 0.2))
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 0.2)
        box(axes, (0, 0.03), (0.18, 0.13), colour, rounding=0.02)
        axes.text(0.25, 0.045, what, fontsize=8.5, color=FAINT)
