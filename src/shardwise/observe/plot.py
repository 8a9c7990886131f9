"""Plots the loss curve of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import ShardwiseError
from shardwise.observe.charts import thinned
from shardwise.observe.record import Record, read_record
from shardwise.system.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = list[tuple[float, float]]

INK = "#1f2937"
FAINT = "#9ca3af"
TRAIN = "#2563eb"
VALIDATION = "#ea580c"
LEVEL = "#6b7280"
MOST_POINTS = 2000
SMOOTHING_SHARE = 25  # a window reaches over a 25th of the run to either side


def plot_loss(record_path: str | Path, png_path: str | Path, levels: Mapping[str, float] | None = None) -> Path:
    """Plot the loss of the record at `record_path` over tokens (over steps if none are recorded); returns `png_path`.

    `levels` are losses to compare with, in nats per token by name, such as that of a simpler model: a line each.

    Raises `ShardwiseError` if matplotlib is not installed or the record has no loss.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ShardwiseError("To draw the loss, matplotlib is needed: pip install shardwise[plot]") from error
    record = read_record(record_path)
    train, validation, unit = _curves(record)
    if not train:
        raise ShardwiseError(f"{record_path} has no step with a loss yet; train first, then draw.")
    figure = Figure(figsize=(9, 5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_curves(axes, train, validation)
    for name, level in (levels or {}).items():
        axes.axhline(level, color=LEVEL, linewidth=1.2, linestyle=(0, (6, 3)), label=f"{name} ({level:.2f})", zorder=1)
    _dress(axes, record, unit)
    png_path = Path(png_path)
    figure.savefig(png_path, facecolor="white")
    return png_path


def smooth(values: list[float]) -> list[float]:
    """The mean over a window around each value. It is narrow at the start, where a loss falls fast."""
    widest = max(1, len(values) // SMOOTHING_SHARE)
    reaches = [min(place, widest) for place in range(len(values))]
    windows = [values[place - reach : place + reach + 1] for place, reach in enumerate(reaches)]
    return [sum(window) / len(window) for window in windows]


def _curves(record: Record) -> tuple[Points, Points, str]:
    """Training and validation loss over the same unit: tokens if every step has them, else steps. Of very many steps,
    neighbours are drawn as their mean."""
    train, validation, unit = _all_points(record)
    return [*thinned(train, MOST_POINTS)], [*thinned(validation, MOST_POINTS)], unit


def _all_points(record: Record) -> tuple[Points, Points, str]:
    train, validation = record.column("loss"), record.column("loss", kind="validation")
    tokens = dict(record.column("tokens"))
    if not all(step in tokens for step, _ in (*train, *validation)):
        return [*train], [*validation], "steps"
    return _over(tokens, train), _over(tokens, validation), "tokens"


def _over(tokens: dict[int, float], points: list[tuple[int, float]]) -> Points:
    return [(tokens[step], loss) for step, loss in points]


def _draw_curves(axes: Axes, train: Points, validation: Points) -> None:
    places, losses = [point[0] for point in train], [point[1] for point in train]
    smoothed = smooth(losses)
    axes.plot(places, losses, color=TRAIN, alpha=0.22, linewidth=1.0)
    axes.plot(places, smoothed, color=TRAIN, linewidth=2.0, label=f"training, smoothed ({smoothed[-1]:.2f})")
    if validation:
        axes.plot(
            [point[0] for point in validation],
            [point[1] for point in validation],
            color=VALIDATION,
            linewidth=1.0,
            linestyle=(0, (2, 2)),
            marker="o",
            markersize=5.5,
            markeredgecolor="white",
            label=f"validation ({validation[-1][1]:.2f})",
            zorder=3,
        )


def _dress(axes: Axes, record: Record, unit: str) -> None:
    """Set title, labels and frame."""
    ranks = record.header["world_size"]
    plan = record.header["plan"]
    told = [str(plan.get("preset", "")), f"{ranks} rank{'s' * (ranks != 1)}", str(plan.get("precision", ""))]
    axes.set_title("Training loss", loc="left", fontsize=15, fontweight="bold", color=INK, pad=24)
    axes.annotate(
        "  ·  ".join(word for word in told if word),
        xy=(0, 1),
        xytext=(0, 8),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=10,
        color=FAINT,
    )
    axes.set_xlabel(unit, color=INK)
    axes.set_ylabel("loss (nats per token)", color=INK)
    axes.xaxis.set_major_formatter(lambda value, _: format_count(value).replace(".0 ", " "))
    axes.set_xlim(left=0)
    axes.margins(x=0.02)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors="#6b7280", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#d1d5db")
    axes.legend(frameon=False, labelcolor=INK)
