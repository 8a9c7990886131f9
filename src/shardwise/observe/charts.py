"""Charts as inline SVG: lines over steps, bars, and the timeline of a step. Pure text; all labels are escaped."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH, HEIGHT = 860, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 28
MOST_POINTS = 600
MOST_SPANS = 4000
LEAST_SPREAD = 1e-290
"""Values that are closer together are drawn as equal ones: parts of less than that have no logarithm."""
COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#ca8a04")
Points = Sequence[tuple[float, float]]
Row = tuple[str, Sequence[tuple[str, float]]]


@dataclass(frozen=True)
class Series:
    """One line of a chart: `(x, y)` sorted by x."""

    name: str
    points: Points
    colour: str = COLOURS[0]
    is_faint: bool = False


def line_chart(series: Sequence[Series], *, unit: str, fmt: Callable[[float], str] = "{:.4g}".format) -> str:
    """Lines over steps; `unit` names the y axis, and `fmt` formats its values."""
    kept = [Series(one.name, thinned(one.points), one.colour, one.is_faint) for one in series if one.points]
    if not kept:
        return ""
    xs = [x for one in kept for x, _ in one.points]
    ys = [y for one in kept for _, y in one.points]
    low, high = min(ys), max(ys)
    spread = (high - low) or abs(high)
    spread = spread if spread > LEAST_SPREAD else 1.0
    low, high = low - 0.05 * spread, high + 0.05 * spread
    first, last = min(xs), max(xs)

    def place(x: float, y: float) -> str:
        across = (x - first) / ((last - first) or 1.0) * (WIDTH - LEFT - RIGHT)
        return f"{LEFT + across:.1f},{HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = [_grid(low, high, place, first, fmt), _steps(first, last)]
    for one in kept:
        drawn = " ".join(place(x, y) for x, y in one.points)
        faint = ' stroke-opacity="0.3"' if one.is_faint else ""
        title = f"<title>{escape(one.name)}: {escape(fmt(one.points[-1][1]))} at step {one.points[-1][0]:.0f}</title>"
        if len(one.points) == 1:
            x, _, y = drawn.partition(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{one.colour}">{title}</circle>')
        else:
            line = f'fill="none" stroke="{one.colour}" stroke-width="1.6"{faint}'
            parts.append(f'<polyline points="{drawn}" {line}>{title}</polyline>')
    return f"{legend([(one.name, one.colour) for one in kept if not one.is_faint])}{_svg(HEIGHT, parts, unit)}"


def _grid(low: float, high: float, place: Callable[[float, float], str], x: float, fmt: Callable[[float], str]) -> str:
    lines = []
    for tick in ticks(low, high):
        y = place(x, tick).partition(",")[2]
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" class="grid"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y}" class="tick" text-anchor="end" dy="4">{escape(fmt(tick))}</text>')
    return "".join(lines)


def _steps(first: float, last: float) -> str:
    y = HEIGHT - 8
    ends = ((LEFT, "start", first), (WIDTH - RIGHT, "end", last))
    return "".join(
        f'<text x="{x}" y="{y}" class="tick" text-anchor="{anchor}">step {step:.0f}</text>' for x, anchor, step in ends
    )


def ticks(low: float, high: float, num: int = 4) -> list[float]:
    """Round values between `low` and `high`, about `num` of them."""
    rough = (high - low) / num
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [width * place for place in range(math.ceil(low / width), math.floor(high / width) + 1)]


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points, each the mean of a group of neighbours."""
    if len(points) <= most:
        return points
    edges = [len(points) * place // most for place in range(most + 1)]
    groups = [points[low:high] for low, high in itertools.pairwise(edges)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def bars(rows: Sequence[Row], fmt: Callable[[float], str], *, stacked: bool) -> str:
    """One row per name with its parts, stacked along the row or one below the other."""
    if not rows:
        return ""
    names = list(dict.fromkeys(part for _, parts in rows for part, _ in parts))
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    totals = [sum(v for _, v in parts) if stacked else max((v for _, v in parts), default=0) for _, parts in rows]
    longest, left, thick = max(totals) or 1.0, 150, 14
    drawn, y = [], 6.0
    for name, parts in rows:
        drawn.append(f'<text x="{left - 8}" y="{y + 11:.0f}" class="tick" text-anchor="end">{escape(name)}</text>')
        x = float(left)
        for part, value in parts:
            length = value / longest * (WIDTH - left - 110)
            title = f"<title>{escape(name)}, {escape(part)}: {escape(fmt(value))}</title>"
            drawn.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{length:.1f}" height="{thick}" fill="{colours[part]}">'
                f"{title}</rect>"
            )
            if stacked:
                x += length
            else:
                at = f'x="{x + length + 6:.1f}" y="{y + 11:.1f}"'
                drawn.append(f'<text {at} class="tick">{escape(fmt(value))}</text>')
                y += thick + 2
        y += thick + 6 if stacked else 6
    return f"{legend(list(colours.items()))}{_svg(math.ceil(y), drawn, 'bars')}"


def timeline(events: Sequence[Mapping[str, Any]]) -> str:
    """The spans of a trace from `write_trace`, one band for each rank and track."""
    spans = sorted(_spans(events), key=lambda span: span[2] - span[3])[:MOST_SPANS]  # the longest ones
    if not spans:
        return ""
    start, stop = min(span[2] for span in spans), max(span[3] for span in spans)
    bands = sorted({(rank, track) for rank, track, *_ in spans})
    left, thick = 130, 18
    width = WIDTH - left - RIGHT
    drawn = []
    for place, (rank, track) in enumerate(bands):
        y = 4 + place * (thick + 3)
        drawn.append(f'<text x="{left - 8}" y="{y + 13}" class="tick" text-anchor="end">{rank} {escape(track)}</text>')
        drawn.append(f'<rect x="{left}" y="{y}" width="{width}" height="{thick}" class="band"/>')
    for rank, track, begin, end, name in spans:
        x = left + (begin - start) / ((stop - start) or 1.0) * width
        length = max(0.6, (end - begin) / ((stop - start) or 1.0) * width)
        y = 4 + bands.index((rank, track)) * (thick + 3)
        at = f'x="{x:.2f}" y="{y}" width="{length:.2f}" height="{thick}"'
        label = f"{escape(name)}: {(end - begin) / 1e3:.3f} ms, from {(begin - start) / 1e3:.3f} ms"
        drawn.append(f'<rect {at} fill="{_colour(name)}" fill-opacity="0.75"><title>{label}</title></rect>')
    height = 4 + len(bands) * (thick + 3) + 20
    drawn.append(f'<text x="{left}" y="{height - 6}" class="tick">0 ms</text>')
    end_text = f"{(stop - start) / 1e3:.1f} ms"
    drawn.append(f'<text x="{WIDTH - RIGHT}" y="{height - 6}" class="tick" text-anchor="end">{end_text}</text>')
    kinds = [("forward", _colour("forward")), ("backward", _colour("backward")), ("gather", _colour("gather"))]
    kinds += [("reduce", _colour("reduce")), ("wait", _colour("wait")), ("other", _colour(""))]
    return f"{legend(kinds)}{_svg(height, drawn, 'timeline')}"


def _spans(events: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, float, float, str]]:
    """`(rank, track, begin, end, name)`, from complete events and from pairs of begin and end events."""
    begun: dict[tuple[int, str, str], float] = {}
    spans = []
    for event in events:
        if event.get("ph") not in ("X", "b", "e"):
            continue
        rank, track, name, at = int(event["pid"]), str(event["cat"]), str(event["name"]), float(event["ts"])
        end = at + float(event.get("dur", 0.0))
        if not math.isfinite(end):
            raise ValueError(f"{name!r} is at no time that can be drawn")
        if event["ph"] == "X":
            spans.append((rank, track, at, end, name))
        elif event["ph"] == "b":
            begun[rank, track, name] = at
        elif (rank, track, name) in begun:
            spans.append((rank, track, begun.pop((rank, track, name)), at, name))
    return spans


def _colour(name: str) -> str:
    word = name.partition(" ")[0]
    known = {
        "forward": "#2563eb",
        "backward": "#9333ea",
        "gather": "#16a34a",
        "reduce_scatter": "#ea580c",
        "reduce": "#ea580c",
        "all_reduce": "#ea580c",
        "wait": "#dc2626",
    }
    return known.get(word, "#94a3b8")


def legend(names: Sequence[tuple[str, str]]) -> str:
    """A legend for the colours."""
    items = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in names)
    return f'<p class="legend">{items}</p>' if len(names) > 1 else ""


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    attributes = f'role="img" aria-label="{escape(label)}"'
    return f'<svg viewBox="0 0 {WIDTH} {height}" {attributes}>{"".join(parts)}</svg>'
