"""A run as one page on a terminal, printed once or repeatedly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.observe.run_view import MostBytes, RunView, bytes_by_tier, most_of_all_ranks
from shardwise.observe.slowness import chosen, others
from shardwise.system.units import format_bytes, format_count, format_seconds

COLOURS = {"running": "green", "ended": "blue", "failed": "red", "crashed": "red", "silent": "yellow"}
BARS = "▁▂▃▄▅▆▇█"
NUM_BARS = 60
MOST_RANKS = 32
"""With more ranks, the slow ones are shown, and as many others as fit."""
LEAST_RANKS = 4
MOST_NOTES = 5
MOST_STRAGGLERS = 3
NUM_OTHER_LINES = 9
"""Lines of a page that are neither ranks nor notes, nor of the table of memory."""


def page(view: RunView, height: int | None = None) -> RenderableType:
    """Everything about a run that fits on a screen; on one of `height` lines, if that is given."""
    return Group(*_parts(view, height))


def _parts(view: RunView, height: int | None) -> Iterator[RenderableType]:
    yield Text.assemble((str(view.folder), "bold"), "  ", (view.status_text, COLOURS[view.status]))
    start = view.last_start
    told = [start.get("model", ""), view.made_of, start.get("device", "")]
    yield Text("  ".join(str(word) for word in told if word), style="dim")
    if view.damage:
        yield Text(view.damage, style="yellow")
    if view.steps:
        yield _figures(view)
        losses = [line["loss"] for line in view.steps if "loss" in line]
        difference = view.difference()
        if difference is not None:
            yield Text(str(difference), style="yellow" if difference.is_large else "")
        yield Text(f"loss  {sparkline(losses)}  {losses[0]:.4g} to {losses[-1]:.4g}") if losses else Text("")
    else:
        yield Text("no step has been logged yet")
    costs = view.stragglers()[:MOST_STRAGGLERS]
    for one in costs:
        yield Text(str(one["words"]), style="red" if one["share"] >= 0.1 else "yellow")
    notes, memory = view.notes[-MOST_NOTES:], most_of_all_ranks(view.memory())
    if view.ranks():
        rest = len(costs) + len(notes) + NUM_OTHER_LINES + (len(memory) + 2 if memory else 0)
        yield _ranks(view, MOST_RANKS if height is None else min(MOST_RANKS, max(LEAST_RANKS, height - rest)))
    if memory:
        yield _memory(memory)
    for note in notes:
        yield Text(f"rank {note.rank}, {note.level}: {note.text}", style="red" if note.level == "error" else "yellow")


def sparkline(values: Sequence[float]) -> str:
    """The course of `values` as a line of bars, each the mean of neighbouring values."""
    if not values:
        return ""
    num_bars = min(NUM_BARS, len(values))
    edges = [len(values) * place // num_bars for place in range(num_bars + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    least, span = min(means), max(means) - min(means)
    if not math.isfinite(span):  # the values are finite, but sums of them are not
        return ""
    return "".join(BARS[round((value - least) / span * (len(BARS) - 1)) if span else 0] for value in means)


def _figures(view: RunView) -> Text:
    last, rate = view.steps[-1], view.throughput()
    figures = [f"step {last['step']}"]
    figures += [f"{name} {last[name]:.4g}" for name in ("loss", "norm", "lr") if last.get(name) is not None]
    if rate is not None:
        figures.append(f"{format_count(rate[0]) if rate[0] >= 10 else f'{rate[0]:.2f}'} {rate[1]}/s")
    if view.seconds_per_step:
        figures.append(f"{format_seconds(view.seconds_per_step)} per step")
    checked = view.latest("validation")
    if checked is not None and checked.get("loss") is not None:
        figures.append(f"validation {checked['loss']:.4g} at step {checked['step']}")
    return Text("   ".join(figures))


def _ranks(view: RunView, most: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title="ranks, time per step", title_justify="left")
    held = bytes_by_tier(view.memory())
    tiers = list(dict.fromkeys(tier for one in held for tier in one))
    times = {"computing": "computing", "waiting": "waiting", "between": "idle"}
    if any(row.get("disk") for row in view.ranks()):
        times["for disk"] = "disk"
    for name in ("rank", *times, *tiers, "process", ""):
        table.add_column(name, justify="left" if not name else "right")
    verdicts = view.verdicts()
    order = chosen(verdicts, most)
    for verdict in order:
        row = view.ranks()[verdict.rank]
        spent = (format_seconds(row.get(name, 0.0)) for name in times.values())
        mine = held[verdict.rank] if verdict.rank < len(held) else {}
        tensors = (format_bytes(mine.get(tier, 0)) for tier in tiers)
        style = "red" if verdict.is_slow else ""
        table.add_row(str(verdict.rank), *spent, *tensors, format_bytes(row["process"]), verdict.words, style=style)
    if len(verdicts) > len(order):
        table.add_row(*[""] * (2 + len(times) + len(tiers)), others(verdicts, order))
    return table


def _memory(rows: Sequence[MostBytes]) -> Table:
    """For each tier and kind the rank that holds most, with its promised bytes."""
    table = Table(
        box=None, pad_edge=False, header_style="bold", title="memory of the largest rank", title_justify="left"
    )
    for name in MostBytes._fields:
        table.add_column(name, justify="right" if name in ("promised", "measured") else "left")
    for tier, kind, promised, measured in rows:
        table.add_row(tier, kind, format_bytes(promised), format_bytes(measured))
    return table
