"""Prints the content of `explain`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from shardwise.cli.explanation import NUM_STAND_INS, STAND_IN_NUMEL, Explanation, UnitSize, by_kind, said_on_host
from shardwise.config import Plan, plan_table
from shardwise.mesh import EXPERT_AXIS, MODEL_AXES, SEQUENCE_AXIS
from shardwise.placement import KINDS, PRESETS, Place, Table
from shardwise.program import OPTIMIZERS, shortened
from shardwise.program.schedule import Schedule, most_in_flight, picture, timed
from shardwise.units import format_bytes, format_count

MAX_UNITS = 16
MAX_RANKS = 8
MEANINGS = {
    "param": "parameters, between steps",
    "held": "parameters, from forward to backward",
    "grad": "gradients, waiting for the step",
    "optim": "optimizer states and master weights",
    "working": "gathered and travelling, at the peak",
    "activations": "inputs, what the backward needs and makes",
    "process": "pages and scratch of kernels: an allowance",
}
ON_HOST = {
    "param": MEANINGS["param"],
    "optim": MEANINGS["optim"],
    "buffers": "gradients, and what goes to and from the device",
    "activations": "what forwards save for backwards",
}
ON_DISK = {
    "param": MEANINGS["param"],
    "optim": "one file for each flat buffer; read and written once in a step",
    "activations": ON_HOST["activations"],
}
AT_THE_PEAK = {"grad": "gradients that wait for the step by then", "working": "gathered and travelling by then"}
"""The meaning of a kind if all are counted at one moment."""


def print_explained(explained: Explanation, console: Console, *, full: bool) -> None:
    plan, mesh = explained.plan, explained.mesh
    ranks = "1 rank" if mesh.world_size == 1 else f"{mesh.world_size} ranks"
    console.print(Text.assemble((plan.preset, "bold cyan"), f" on {mesh}, {ranks}"), soft_wrap=True)
    console.print(Text(f"known from {explained.known_from}", "dim"), soft_wrap=True)
    if mesh.parted_axes:
        _section(console, "mesh", _mesh_grid(explained))
    _section(console, "plan", _plan_grid(explained))
    if explained.subject.budget:
        _section(console, "budget", Text(explained.subject.budget.removeprefix("budget: ")))
    _section(console, "table", _table_grid(explained.table), _below_rows(explained))
    for name, table in explained.rules.items():
        _section(console, f"table under the rule {name!r}", _table_grid(table), Text(f"computes in {table.compute}"))
    if explained.schedule is not None:
        _section(console, f"pipeline, schedule {explained.schedule.name}")
        for line in _pipeline_lines(explained.schedule, explained):
            console.print(Text(f"  {line}"), soft_wrap=True)
    if explained.subject.experts:
        note = Text(f"They are placed as the table says, but never over {EXPERT_AXIS}.", "dim")
        _section(console, "experts", Text(explained.subject.experts.rstrip()), note)
    _section(console, "units", *_units_lines(explained))
    _section(console, "bytes per rank", _bytes_grid(explained), _bytes_note(explained))
    besides = [Text(said, "dim") for said in (explained.attention, explained.dispatch) if said]
    _section(console, "sent per rank and step", Text(_sent(explained)), *besides)
    if explained.why_restarted:
        text = f"An elastic job starts again from its last checkpoint, because {explained.why_restarted}."
        _section(console, "if a rank is lost", Text(text))
    if explained.tiers is not None:
        said = [*explained.tiers.lines, *_hosts(explained.tiers.num_local)]
        _section(console, "tiers per rank and step", Text("\n".join(said)))
    text = explained.program if full else shortened(explained.program)
    _section(console, "program of one step" + (" (--full prints all)" if text != explained.program else ""))
    for line in text.splitlines():
        style = "dim" if line.lstrip().startswith("#") else "" if line[0] == " " else "cyan"
        console.print(Text(f"  {line}", style), soft_wrap=True)


def _hosts(num_local: int) -> list[str]:
    return ["All ranks are taken to be on one host."] if num_local > 1 else []


def _pipeline_lines(schedule: Schedule, explained: Explanation) -> Iterator[str]:
    """Which rank has what, and the schedule as a grid: a backward is drawn twice as long as a forward."""
    yield from explained.subject.stages.splitlines()
    yield from picture(schedule).splitlines()
    most = max(most_in_flight(schedule, rank) for rank in range(schedule.num_ranks))
    waiting = f"{timed(schedule).bubble:.0%} of the time is spent waiting"
    yield f"{waiting}; on no rank do more than {most} forwards wait for their backward"
    if explained.subject.sizes:
        yield "What follows is of the pipeline rank with most parameters."


def print_presets(console: Console) -> None:
    grid = _grid("preset", "axes", *KINDS)
    sources = _grid("preset", "known from")
    for name, one in PRESETS.items():
        places = [_split_over(place) for place in (one.param, one.held, one.grad, one.optim)]
        grid.add_row(Text(name, "cyan"), " x ".join(one.axes), *places)
        sources.add_row(Text(name, "cyan"), one.known_from)
    _section(console, "what each row is split over", grid)
    _section(console, "where it is known from", sources)


def _split_over(place: Place) -> Text:
    """Only the axes, because there are many columns and a terminal is narrow."""
    if place.partial:
        return Text(f"partial {'+'.join(place.partial)}", "yellow")
    words = f"{'+'.join(place.shard) or 'copy'}{f', {place.tier}' if place.tier != 'device' else ''}"
    return Text(words, "green" if place.shard else "")


def _section(console: Console, title: str, *below: object) -> None:
    console.print()
    console.print(Text(title, "bold"))
    for one in below:
        console.print(Padding(one, (0, 0, 0, 2)) if isinstance(one, Grid | Text) else one)


def _grid(*columns: str, right: Sequence[str] = ()) -> Grid:
    grid = Grid(box=None, pad_edge=False, header_style="dim", show_header=any(columns))
    for column in columns:
        grid.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return grid


def _mesh_grid(explained: Explanation) -> Grid:
    """The ranks on a line of each axis, and what they share."""
    mesh = explained.mesh
    grid = _grid("", "ranks", "first line", "")
    for axis in mesh.axes:
        first = mesh.groups(axis)[0]
        line = ", ".join(map(str, first[:MAX_RANKS])) + (", ..." if len(first) > MAX_RANKS else "")
        said = (
            "data: batches of their own"
            if axis not in MODEL_AXES
            else f"{MODEL_AXES[axis]}: batches and experts of their own"
            if axis == EXPERT_AXIS
            else f"{MODEL_AXES[axis]}: one sample, parts of the model"
        )
        grid.add_row(Text(axis, "cyan"), str(mesh.size(axis)), line, Text(said, "dim"))
    return grid


def _plan_grid(explained: Explanation) -> Grid:
    """Every value that matters, and where it came from; unchanged rows and wires are left out."""
    grid = _grid("", "", "")
    for path, value, origin in plan_table(explained.plan):
        if origin == "default" and _says_nothing(path, value, explained.plan):
            continue
        said = "as the preset" if value is None else str(value)
        grid.add_row(path, Text(said), Text(origin, "dim" if origin == "default" else "yellow"))
    return grid


def _says_nothing(path: str, value: object, plan: Plan) -> bool:
    """Whether a default is not worth showing: it changes nothing, or does not apply."""
    if path.startswith("loss_scale."):
        return plan.precision != "fp16"
    if path.startswith("offload."):
        return plan.offload.optim == 0
    if path.startswith("pipeline.") and "pp" not in (plan.mesh or {}):
        return True
    if path.startswith("sequence."):
        return SEQUENCE_AXIS not in (plan.mesh or {})
    if path.startswith("tensor."):
        return "tp" not in (plan.mesh or {}) or value is None or value == {}
    if path.startswith("activations."):
        return plan.activations.policy is None or (value is None and plan.activations.policy != "selective")
    return path in ("rules", "resident_below", "disk_checksums") or (value is None and path != "mesh")


def _table_grid(table: Table) -> Grid:
    grid = _grid("", "place", "dtype", "tier", "")
    for kind in KINDS:
        place = table.place(kind)
        grid.add_row(Text(kind, "cyan"), _place(place), place.dtype, place.tier, Text(MEANINGS[kind], "dim"))
    return grid


def _place(place: Place) -> Text:
    """The place without its dtype, which has a column of its own."""
    words = str(place).removesuffix(place.tier).split(place.dtype)[0].strip()
    return Text(words, "" if words == "copy" else "green")


def _below_rows(explained: Explanation) -> Text:
    """Facts that the rows do not show."""
    table, mesh = explained.table, explained.mesh
    text = f"computes in {table.compute}; gradients travel in {table.wire}"
    alone = [axis for axis in mesh.axes if mesh.size(axis) == 1]
    if alone:
        text += f"; nothing is split over {' and '.join(alone)}, which has one rank"
    return Text(text)


def _units_lines(explained: Explanation) -> Iterator[Grid | Text]:
    if not explained.subject.sizes:
        count = format_count(STAND_IN_NUMEL)
        yield Text(f"No model was given: {NUM_STAND_INS} units of {count} parameters stand in. See --model.", "yellow")
        for unit in explained.subject.units:
            if said_on_host(unit.flats) and explained.plan.offload.optim > 0:
                yield Text(f"{unit.name}: {said_on_host(unit.flats)}")
        return
    grid = _grid("", "parameters", "", right=["parameters"])
    rows = list(_unit_rows(explained.subject.sizes))
    middle = len(rows) - MAX_UNITS
    for index, row in enumerate(rows):
        if middle <= 1 or not MAX_UNITS // 2 <= index < MAX_UNITS // 2 + middle:
            grid.add_row(*row)
        elif index == MAX_UNITS // 2:
            grid.add_row(Text(f"... {middle} more", "dim"))
    total = sum(size.numel for size in explained.subject.sizes)
    grid.add_row(Text("all", "bold"), Text(format_count(total), "bold"))
    yield grid


def _unit_rows(sizes: Iterable[UnitSize]) -> Iterator[tuple[str, str, str]]:
    """A row per unit; neighbours that differ only in their number share one."""
    alike = itertools.groupby(
        sizes,
        lambda size: (re.sub(r"\d+", "#", size.name), size.numel, size.frozen_numel, size.on_host, size.activations),
    )
    for (_, numel, frozen, on_host, activations), group in alike:
        names = [size.name for size in group]
        name = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        notes = [f"each of {len(names)}"] if len(names) > 1 else []
        notes += [f"{format_count(frozen)} frozen"] if frozen else []
        notes += [said for said in (on_host, activations) if said]
        yield name, format_count(numel), ", ".join(notes)


def _bytes_grid(explained: Explanation) -> Grid:
    grid = _grid("", "promised", "replicated", "", right=["promised", "replicated"])
    promised, replicated = by_kind(explained.held), by_kind(explained.replicated)
    meanings = MEANINGS | (AT_THE_PEAK if explained.subject.batch else {})
    for kind, num_bytes in promised.items():
        style = "bold" if kind == "total" else ""
        cells = [Text(format_bytes(one), style) for one in (num_bytes, replicated[kind])]
        note = f"{num_bytes / max(1, replicated[kind]):.0%} of replicated" if kind == "total" else meanings[kind]
        grid.add_row(Text(kind, style or "cyan"), *cells, Text(note, "dim"))
    on_host = explained.held.host.by_kind if explained.held.host is not None else {}
    for kind, num_bytes in on_host.items():
        grid.add_row(Text(f"{kind} on the host", "cyan"), format_bytes(num_bytes), "", Text(ON_HOST[kind], "dim"))
    if explained.images is not None:
        total = explained.images.total
        note = f"a copy of what is its own; with what is updated there {format_bytes(total)}"
        note += f", and {format_bytes(2 * total)} while ranks recover"
        grid.add_row(Text("image on the host", "cyan"), format_bytes(explained.images.copy), "", Text(note, "dim"))
    if explained.copies is not None:
        note = f"{format_bytes(explained.copies.sent)} to another host, behind each next step"
        if explained.copies.sent_once:
            note += f"; {format_bytes(explained.copies.sent_once)} once, of what is frozen"
        grid.add_row(Text("copies of others", "cyan"), format_bytes(explained.copies.kept), "", Text(note, "dim"))
    if explained.held.disk is not None:
        for kind, num_bytes in explained.held.disk.by_kind.items():
            grid.add_row(Text(f"{kind} on the disk", "cyan"), format_bytes(num_bytes), "", Text(ON_DISK[kind], "dim"))
    return grid


def _bytes_note(explained: Explanation) -> Text:
    num, peak_at = explained.subject.num_states, explained.held.peak_at
    if peak_at is None:
        lines = ["Activations are the model's own and not in these figures; --batch counts them."]
    else:
        lines = [f"All of it together, at the one moment when that is most: at or just before {str(peak_at)!r}."]
    if explained.subject.optimizer:
        lines.append(f"With {OPTIMIZERS[explained.subject.optimizer]}. Replicated is ddp.")
    else:
        states = "no state" if num == 0 else "1 state" if num == 1 else f"{num} states"
        lines.append(f"With {states} per parameter (--optimizer-states, or --optimizer). Replicated is ddp.")
    return Text("\n".join(lines), "dim")


def _sent(explained: Explanation) -> str:
    num, subject = explained.plan.accumulate, explained.subject
    text = format_bytes(explained.sent_bytes)
    by_axis = explained.sent_by_axis
    if len(by_axis) > 1:
        text += f", {', '.join(f'{format_bytes(sent)} along {axis}' for axis, sent in by_axis.items())}"
    if "tp" in explained.mesh.model_axes:
        said = format_bytes(subject.activation_bytes * num) if subject.batch else "besides what --batch would count"
        text += f", {said} of activations along tp"
    text = text if num == 1 else f"{text} in {num} micro-batches"
    if explained.per_host:
        text += f"; {format_bytes(max(explained.sent_by_hosts))} leave each host of {explained.per_host}"
    copied = explained.copied_bytes
    if any(copied.values()):
        text += f"; {format_bytes(copied.get('evict', 0))} to the host, {format_bytes(copied.get('fetch', 0))} from it"
    return text
