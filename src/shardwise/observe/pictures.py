"""Pictures of what was planned, as SVG files of their own: bars, a curve below them, points with their front. Pure
text; all labels are escaped."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from shardwise.observe.charts import COLOURS, ticks

WIDTH, LEFT, RIGHT = 860, 190, 190
ROW, TOP, CURVE = 24, 70, 190
INK, FAINT, GRID = "#1f2937", "#6b7280", "#e5e7eb"
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bar:
    """A name, a length, and what is written behind it."""

    name: str
    length: float
    label: str


@dataclass(frozen=True)
class Point:
    """A place, its name, and whether it is on the front: no other one is better in both."""

    x: float
    y: float
    name: str
    is_front: bool = False
    is_possible: bool = True


def bar_picture(title: str, below: str, bars: Sequence[Bar], curve: Points, x_label: str, y_label: str) -> str:
    """Horizontal bars, and below them a curve if it has at least two points."""
    longest = max((bar.length for bar in bars), default=0.0) or 1.0
    parts = []
    for place, bar in enumerate(bars):
        y = TOP + place * ROW
        length = bar.length / longest * (WIDTH - LEFT - RIGHT)
        colour = COLOURS[place % len(COLOURS)]
        parts.append(_text(LEFT - 8, y + 14, bar.name, "end"))
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{max(length, 1):.1f}" height="{ROW - 6}" fill="{colour}"/>')
        parts.append(_text(LEFT + length + 6, y + 14, bar.label, colour=FAINT))
    height = TOP + len(bars) * ROW + 16
    if len(curve) > 1:
        parts.append(_curve(curve, height, x_label, y_label))
        height += CURVE
    return _svg(title, below, height, parts)


def front_picture(title: str, below: str, points: Sequence[Point], x_label: str, y_label: str) -> str:
    """Points, and a line through those on the front."""
    height = 460
    place, axes = _axes([(one.x, one.y) for one in points], TOP, height - 50, x_label, y_label)
    parts = [axes]
    front = sorted((one for one in points if one.is_front), key=lambda one: one.x)
    if len(front) > 1:
        line = " ".join("{:.1f},{:.1f}".format(*place(one.x, one.y)) for one in front)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[1]}" stroke-width="1.5"/>')
    for one in points:
        x, y = place(one.x, one.y)
        colour = COLOURS[1] if one.is_front else COLOURS[0]
        fill = colour if one.is_possible else "white"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{colour}">'
            f"<title>{escape(one.name)}</title></circle>"
        )
        if one.is_front:
            parts.append(_text(x + 7, y - 5, one.name, colour=INK))
    return _svg(title, below, height, parts)


def _curve(curve: Points, top: float, x_label: str, y_label: str) -> str:
    place, axes = _axes(curve, top, top + CURVE - 50, x_label, y_label)
    line = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in curve)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[0]}"/>' for x, y in itertools.starmap(place, curve)
    )
    return f'{axes}<polyline points="{line}" fill="none" stroke="{COLOURS[0]}" stroke-width="1.6"/>{dots}'


def _axes(
    points: Points, top: float, bottom: float, x_label: str, y_label: str
) -> tuple[Callable[[float, float], tuple[float, float]], str]:
    """Where a point lies, and the grid with its ticks."""
    (x_low, x_high), (y_low, y_high) = (_range([point[axis] for point in points]) for axis in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) * (WIDTH - 90 - 150)
        return 90 + across, bottom - (y - y_low) / (y_high - y_low) * (bottom - top)

    parts = []
    for tick in ticks(y_low, y_high):
        y = place(x_low, tick)[1]
        parts.append(f'<line x1="90" x2="{WIDTH - 150}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(_text(82, y + 4, f"{tick:.4g}", "end", FAINT))
    for tick in ticks(x_low, x_high, 6):
        x = place(tick, y_low)[0]
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:.1f}" y2="{bottom + 4:.1f}" stroke="{FAINT}"/>')
        parts.append(_text(x, bottom + 17, f"{tick:.4g}", "middle", FAINT))
    parts.append(_text((90 + WIDTH - 150) / 2, bottom + 34, x_label, "middle", FAINT))
    parts.append(_text(90, top - 8, y_label, "start", FAINT))
    return place, "".join(parts)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    spread = (high - low) or abs(high) or 1.0
    return low - 0.05 * spread, high + 0.05 * spread


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def _svg(title: str, below: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-size="12" '
        f'font-family="system-ui, sans-serif"><rect width="{WIDTH}" height="{height:.0f}" fill="white"/>'
        f'<text x="16" y="26" font-size="16" font-weight="bold" fill="{INK}">{escape(title)}</text>'
        f'<text x="16" y="44" font-size="11" fill="{FAINT}">{escape(below)}</text>{"".join(parts)}</svg>\n'
    )
