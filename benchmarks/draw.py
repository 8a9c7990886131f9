"""A race as a picture: time and memory of every engine, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.names import is_ours
from shardwise.errors import ShardwiseError
from shardwise.system.neighbours import BUSY_CORES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, PEER, INK, FAINT = "#2563eb", "#cbd5e1", "#1f2937", "#6b7280"


def draw_races(races: Sequence[dict[str, Any]], note: str, png: Path) -> Path:
    """`races` is the summary of a result. Raises `ShardwiseError` if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ShardwiseError("To draw a result, matplotlib is needed: pip install shardwise[plot]") from error
    drawn = [race for race in races if race["rows"]]
    heights = [0.9 + 0.27 * len(race["rows"]) for race in drawn]
    figure = Figure(figsize=(10, max(1.0, sum(heights))), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(drawn), 2, squeeze=False, height_ratios=heights, sharey="row")
    for race, (left, right) in zip(drawn, grid, strict=True):
        names = [row["engine"] for row in race["rows"]]
        title = f"{race['size']}, {race['dtype']}, {race['ranks']} ranks"
        title += " (shared machine)" if race["others_cores"] > BUSY_CORES else ""
        _bars(left, f"{title}: seconds per step", names, [row["seconds"] for row in race["rows"]], "{:.2f}")
        _whiskers(left, race["rows"])
        peaks = [row["peak_bytes"] / 2**20 for row in race["rows"]]
        _bars(right, "peak memory per rank, MiB", names, peaks, "{:.0f}")
    if note:
        figure.supxlabel(note, fontsize=8, color=FAINT)
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, facecolor="white")
    return png


def _bars(axes: Axes, title: str, names: list[str], values: list[float], form: str) -> None:
    colours = [OURS if is_ours(name) else PEER for name in names]
    bars = axes.barh(names, values, color=colours, height=0.72)
    axes.bar_label(bars, [form.format(value) for value in values], padding=4, fontsize=8, color=INK)
    if not axes.yaxis_inverted():  # both columns share it
        axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.margins(x=0.14)
    axes.tick_params(length=0, labelsize=8, colors=FAINT)
    axes.xaxis.set_visible(False)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)


def _whiskers(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """From the fastest round to the slowest."""
    places = range(len(rows))
    axes.hlines(
        places,
        [row["fastest_seconds"] for row in rows],
        [row["slowest_seconds"] for row in rows],
        color=INK,
        linewidth=0.8,
    )
