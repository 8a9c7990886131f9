"""A run as one self-contained HTML page: no network, no script, no other file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.observe.charts import COLOURS, Series, bars, line_chart, thinned, timeline
from shardwise.observe.differences import BETWEEN, DISK, Difference, along, predicted_parts
from shardwise.observe.lines import Line
from shardwise.observe.plot import smooth
from shardwise.observe.run_files import PROGRAM, TIMELINE
from shardwise.observe.run_view import RunView, most_of_all_ranks
from shardwise.observe.slowness import chosen, others
from shardwise.system.printable import printable
from shardwise.system.safe_files import read_own_bytes
from shardwise.system.units import format_bytes, format_count, format_seconds

MOST_RANKS = 64
MOST_NOTES = 200
MOST_BYTES, MOST_CHARS = 2**27, 2**21
"""Of a file that is read into the page, and of a text that is shown on it."""
LARGEST = 1e290
"""Values beyond it are not drawn: their sums would not be finite."""
STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #fff; margin: 2rem auto; max-width: 900px;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
.dim, .tick { color: #6b7280; fill: #6b7280; } .tick { font-size: 11px; }
.grid { stroke: #e5e7eb; } .band { fill: #f3f4f6; }
.state { display: inline-block; padding: .1rem .6rem; border-radius: 1rem; background: #e0f2fe; }
.failed, .crashed { background: #fee2e2; } .silent { background: #fef9c3; }
.legend span { margin-right: 1rem; font-size: 12px; } .legend i { display: inline-block; width: 10px; height: 10px;
  margin-right: .3rem; }
svg { width: 100%; height: auto; } table { border-collapse: collapse; font-size: 13px; }
td, th { padding: .15rem .8rem .15rem 0; text-align: right; } td:first-child, th:first-child { text-align: left; }
td.words { text-align: left; } tr.slow td { color: #b91c1c; }
pre { background: #f9fafb; padding: .8rem; overflow-x: auto; font-size: 12px; line-height: 1.35; }
.error { color: #b91c1c; } .warning { color: #92400e; } .note { white-space: pre-wrap; margin: .3rem 0; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The page's content security policy: a browser may load nothing."""


def html_report(view: RunView) -> str:
    """The whole page. All content of the run's files is escaped, and none of it comes from elsewhere by a link."""
    name = escape(view.folder.resolve().name)
    parts = "".join(_parts(view))
    return printable(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{name}</h1>{parts}</body></html>\n"
    )


def _parts(view: RunView) -> Iterator[str]:
    yield _head(view)
    yield _section("What went wrong", _faults(view))
    for title, chart in _curves(view):
        yield _section(title, chart)
    yield _section("Where the time goes, a step", _ranks(view))
    yield _section("Predicted and measured, a step", _predicted(view))
    yield _section("Memory, the largest rank of each kind", _memory(view.memory()))
    yield _section("Memory, rank by rank", _memory_of_ranks(view.memory()))
    yield _section("One step", _of_file(view.folder / TIMELINE, _timeline))
    yield _section("Table and program", _of_file(view.folder / PROGRAM, _program))
    yield _section("Plan", _pre(json.dumps(_given(view.last_start.get("plan", {})), indent=2)))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _head(view: RunView) -> str:
    start = view.last_start
    versions = ", ".join(f"{name} {version}" for name, version in start.get("versions", {}).items())
    told = [str(start.get("model", "")), view.made_of]
    told += [str(start.get("device", "")), str(start.get("started", "")), versions]
    figures = []
    if view.steps:
        last, rate = view.steps[-1], view.throughput()
        figures.append(f"step {last['step']}")
        if last.get("loss") is not None:
            figures.append(f"loss {last['loss']:.4g}")
        if rate is not None:
            figures.append(f"{format_count(rate[0])} {rate[1]}/s")
        figures.append(f"{format_seconds(view.seconds_per_step)} a step")
    written = datetime.fromtimestamp(view.now, UTC).isoformat(timespec="seconds")
    return (
        f'<p><span class="state {view.status}">{escape(view.status_text)}</span></p>'
        f"<p>{escape('  ·  '.join(figures))}</p>"
        f'<p class="dim">{escape("  ·  ".join(word for word in told if word))}<br>written {written}</p>'
    )


def _faults(view: RunView) -> str:
    notes = []
    if view.status == "crashed":
        notes.append(("error", view.status_text))
    if view.damage:
        notes.append(("warning", view.damage))
    for line in view.lines:
        if line["kind"] == "end" and line.get("error"):
            notes.append(("error", f"after step {line['step']}: {line['error']}"))
        elif line["kind"] == "resume":
            notes.append(("", f"went on after step {line['step']} on {line['world_size']} ranks, {line['started']}"))
        elif line["kind"] == "unusual":
            notes.append(("warning", f"step {line['step']}, rank {line.get('rank')}: {line.get('words')}"))
        elif line["kind"] == "fault":
            notes.append(("error", f"after step {line['step']}: {_verdict(line)}"))
        elif line["kind"] == "scale":
            notes.append(
                ("", f"after step {line['step']}: {line.get('wanted')} ranks are asked for: {line.get('why')}")
            )
    notes += [(note.level, f"{_moment(note.time)}rank {note.rank}: {note.text}") for note in view.notes[-MOST_NOTES:]]
    if len(view.notes) > MOST_NOTES:
        notes.append(("", f"These are the last {MOST_NOTES} of {len(view.notes)} notes of ranks."))
    return "".join(f'<p class="note {escape(level)}">{escape(text)}</p>' for level, text in notes)


def _verdict(line: Line) -> str:
    """What the launcher of an elastic job has found out about a fault."""
    return ": ".join(str(line[name]) for name in ("cause", "evidence") if line.get(name)) or "a fault"


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") + ", "
    except (ValueError, OverflowError, OSError):  # no time that a calendar has
        return ""


def _curves(view: RunView) -> Iterator[tuple[str, str]]:
    losses = thinned(column(view.steps, "loss"))
    checked = column([line for line in view.lines if line["kind"] == "validation"], "loss")
    smoothed = list(zip([x for x, _ in losses], smooth([y for _, y in losses]), strict=True)) if losses else []
    series = [Series("loss", losses, COLOURS[0], is_faint=True), Series("loss, smoothed", smoothed)]
    yield "Loss", line_chart([*series, Series("validation", checked, COLOURS[1])], unit="loss")
    for unit in ("tokens", "samples"):
        points = column(view.steps, f"{unit}_per_second")
        yield f"Throughput, {unit} a second", line_chart([Series(unit, points)], unit=unit, fmt=format_count)
    seconds = column(view.steps, "seconds")
    yield "Seconds a step", line_chart([Series("seconds", seconds)], unit="seconds", fmt=format_seconds)
    yield "Norm of the gradient", line_chart([Series("norm", column(view.steps, "norm"))], unit="norm")
    yield "Learning rate", line_chart([Series("lr", column(view.steps, "lr"))], unit="lr")


def column(lines: Sequence[Line], name: str) -> list[tuple[float, float]]:
    """`(step, value)` of the lines that have a value that can be drawn."""
    return [(line["step"], line[name]) for line in lines if name in line and abs(line[name]) < LARGEST]


def _ranks(view: RunView) -> str:
    verdicts = view.verdicts()
    shown, rows = chosen(verdicts, MOST_RANKS), view.ranks()
    if not rows:
        return ""
    kinds = {"computing": "computing", "waiting": "waiting", "between steps": "idle"}
    if any(row.get("disk") for row in rows):
        kinds["waiting for its disk"] = "disk"
    parts = [
        (f"rank {one.rank}", [(label, rows[one.rank].get(name, 0.0)) for label, name in kinds.items()]) for one in shown
    ]
    words = "".join(
        f'<tr class="{"slow" if one.is_slow else ""}"><td>rank {one.rank}</td>'
        f'<td class="words">{escape(one.words)}</td></tr>'
        for one in shown
    )
    rest = f"<p>{escape(others(verdicts, shown))}</p>" if len(verdicts) > len(shown) else ""
    costs = "".join(f'<p class="warning">{escape(str(one["words"]))}</p>' for one in view.stragglers())
    return costs + bars(parts, format_seconds, stacked=True) + f"<table>{words}</table>{rest}"


def _predicted(view: RunView) -> str:
    found: list[Difference | None] = [view.difference()]

    def with_actions(text: str) -> str:
        found.append(view.difference(json.loads(text)["traceEvents"]))
        return ""

    unreadable = _of_file(view.folder / TIMELINE, with_actions)
    difference, line = found[-1], view.prediction
    if difference is None or line is None:
        return ""
    row = next(iter(view.ranks()), {})
    spent = {"computing": row.get("computing", 0.0), BETWEEN: row.get("idle", 0.0), DISK: row.get("disk", 0.0)}
    spent |= {along(axis): seconds for axis, seconds in row.get("waited", {}).items()}
    parts = predicted_parts(line)
    pairs = [
        (name, [("predicted", parts.get(name, 0.0)), ("measured on rank 0", spent.get(name, 0.0))])
        for name in {**parts, **spent}
        if parts.get(name) or spent.get(name)
    ]
    words = f'<p class="{"warning" if difference.is_large else ""}">{escape(str(difference))}</p>'
    return words + bars(pairs, format_seconds, stacked=False) + unreadable


def _memory(rows: Sequence[Mapping[str, Any]]) -> str:
    kinds = most_of_all_ranks(rows)
    parts = [
        (kind if tier == "device" else f"{kind} on {tier}", [("promised", float(promised)), ("measured", float(held))])
        for tier, kind, promised, held in kinds
    ]
    return bars(parts, format_bytes, stacked=False)


def _memory_of_ranks(rows: Sequence[Mapping[str, Any]]) -> str:
    tiers = [tier for tier in ("device", "host", "disk") if any(row.get("promised", {}).get(tier) for row in rows)]
    if not tiers:
        return ""

    def total(row: Mapping[str, Any], what: str, tier: str) -> str:
        return format_bytes(sum(row.get(what, {}).get(tier, {}).values()))

    head = "".join(f"<th>{tier}, promised</th><th>measured</th>" for tier in tiers)
    body = "".join(
        f"<tr><td>rank {rank}</td>"
        + "".join(f"<td>{total(row, 'promised', tier)}</td><td>{total(row, 'measured', tier)}</td>" for tier in tiers)
        + "</tr>"
        for rank, row in enumerate(rows[:MOST_RANKS])
    )
    rest = f"<p>and {len(rows) - MOST_RANKS} more</p>" if len(rows) > MOST_RANKS else ""
    return f"<table><tr><th></th>{head}</tr>{body}</table>{rest}"


def _of_file(path: Path, draw: Callable[[str], str]) -> str:
    """What `draw` makes of a file; a sentence if it cannot be read, and nothing if it does not exist."""
    try:
        return draw(read_own_bytes(path, MOST_BYTES).decode(errors="replace")) if os.path.lexists(path) else ""
    except (
        ShardwiseError,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        return f'<p class="error">{escape(f"{path.name} cannot be read: {error}")}</p>'


def _timeline(text: str) -> str:
    return timeline(json.loads(text)["traceEvents"])


def _program(text: str) -> str:
    cut = "" if len(text) <= MOST_CHARS else f"<p>These are the first {MOST_CHARS} of {len(text)} characters.</p>"
    return _pre(text[:MOST_CHARS]) + cut


def _given(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan without empty values."""
    below = {name: _given(value) if isinstance(value, Mapping) else value for name, value in plan.items()}
    return {name: value for name, value in below.items() if value not in (None, {}, [])}
