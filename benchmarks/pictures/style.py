"""How all pictures look. They are light cards with a background of their own, so they read the same on a dark page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

INK, FAINT, LINE, CARD = "#1f2937", "#6b7280", "#d1d5db", "#ffffff"
BLUE, ORANGE, GREEN, VIOLET, RED = "#2563eb", "#ea580c", "#059669", "#7c3aed", "#dc2626"
PALE = {BLUE: "#dbeafe", ORANGE: "#ffedd5", GREEN: "#d1fae5", VIOLET: "#ede9fe", RED: "#fee2e2", FAINT: "#f3f4f6"}
MONO = "DejaVu Sans Mono"
BUSY = ", on a machine that has other work"


def is_busy() -> bool:
    """Whether this machine has other work than what is about to be measured, which a picture then says."""
    return os.getloadavg()[0] > (os.cpu_count() or 1)


def card(width: float, height: float, title: str, said: str = "") -> Figure:
    """An empty picture of so many inches, with a title and a line below it that says where it comes from."""
    figure = Figure(figsize=(width, height))
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0)
    edge = 0.03
    figure.add_artist(
        FancyBboxPatch(
            (edge, edge),
            width - 2 * edge,
            height - 2 * edge,
            boxstyle="round,pad=0,rounding_size=0.12",
            transform=figure.dpi_scale_trans,
            facecolor=CARD,
            edgecolor=LINE,
            linewidth=1,
            zorder=-2,
        )
    )
    inch = 1 / height
    figure.text(0.25 / width, 1 - 0.36 * inch, title, fontsize=12, fontweight="bold", color=INK)
    figure.text(0.25 / width, 1 - 0.6 * inch, said, fontsize=8.5, color=FAINT)
    return figure


def area(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at so many inches from the lower left corner."""
    across, up = figure.get_size_inches()
    return figure.add_axes((left / across, bottom / up, width / across, height / up), facecolor="none")


def bare(axes: Axes) -> Axes:
    """Without frame, ticks and numbers."""
    axes.set_axis_off()
    return axes


def plain(axes: Axes, across: str, up: str) -> Axes:
    """Only the lines that help reading."""
    axes.set_xlabel(across, fontsize=8.5, color=FAINT)
    axes.set_ylabel(up, fontsize=8.5, color=FAINT)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, length=0, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    return axes


def box(
    axes: Axes, place: Sequence[float], size: Sequence[float], colour: str, *, pale: bool = True, rounding: float = 0.06
) -> None:
    """A rounded box at (left, bottom) of (width, height), in the units of the axes."""
    axes.add_patch(
        FancyBboxPatch(
            (place[0], place[1]),
            size[0],
            size[1],
            boxstyle=f"round,pad=0,rounding_size={rounding}",
            facecolor=PALE[colour] if pale else colour,
            edgecolor=colour,
            linewidth=0.9,
        )
    )


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "shardwise", "svg.fonttype": "path"}):  # the same every time
        figure.savefig(path, format="svg", transparent=False, facecolor="none", metadata={"Date": None})
