"""Prints the content of `explain`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from shardwise.cli.explanation import (
    EXAMPLE_NUMEL,
    NUM_EXAMPLES,
    Explanation,
    UnitSize,
    by_kind,
    describe_offload,
)
from shardwise.plan import Plan, plan_table
from shardwise.plan.mesh import EXPERT_AXIS, ISLAND_AXIS, MODEL_AXES, SEQUENCE_AXIS
from shardwise.plan.placement import KINDS, PRESETS, Codes, Place, Table
from shardwise.plan.replica_groups import mesh_of, num_groups
from shardwise.program import OPTIMIZERS, shortened
from shardwise.program.schedule import Schedule, most_in_flight, picture, timed
from shardwise.system.units import format_bytes, format_count

MAX_UNITS = 16
MAX_RANKS = 8
MEANINGS = {
    "param": "parameters, between steps",
    "held": "parameters, from forward to backward",
    "grad": "gradients, until the step",
    "optim": "optimizer states and master weights",
    "working": "gathered units and messages, at the peak",
    "activations": "batch, activations and their gradients",
    "process": "memory outside tensors, estimated for ranks of `shardwise launch`",
}
ON_HOST = {
    "param": MEANINGS["param"],
    "optim": MEANINGS["optim"],
    "buffers": "gradients, and copies to and from the device",
    "activations": "saved by forwards for backwards",
    "staging": "activations on their way to a disk or back",
}
ON_DISK = {
    "param": MEANINGS["param"],
    "optim": "one file per flat buffer, read and written once a step",
    "activations": ON_HOST["activations"],
}
AT_THE_PEAK = {"grad": "gradients accumulated by then", "working": "gathered units and messages by then"}
"""Meanings of kinds if all are counted at one moment."""
AXIS_NOTES = {
    "tp": "ranks share samples, and split each layer",
    "pp": "ranks share samples, and have consecutive parts of the model",
    SEQUENCE_AXIS: "ranks share samples, and split their tokens",
    EXPERT_AXIS: "ranks have their own batches and experts",
    ISLAND_AXIS: "ranks have their own batches and, between outer steps, their own model",
}


def print_explained(explained: Explanation, console: Console, *, full: bool) -> None:
    plan, mesh = explained.plan, explained.mesh
    ranks = "1 rank" if mesh.world_size == 1 else f"{mesh.world_size} ranks"
    console.print(Text.assemble((plan.preset, "bold cyan"), f" on {mesh}, {ranks}"), soft_wrap=True)
    console.print(Text(f"known from {explained.known_from}", "dim"), soft_wrap=True)
    if mesh.parted_axes or mesh.island_axes:
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
    if explained.subject.conversions:
        note = Text("Their parameters and buffers, and checkpoints, are those of the plain model.", "dim")
        _section(console, "conversions", Text(explained.subject.conversions.rstrip()), note)
    if explained.subject.experts:
        note = Text(f"They follow the table above, but are never sharded over {EXPERT_AXIS}.", "dim")
        _section(console, "experts", Text(explained.subject.experts.rstrip()), note)
    _section(console, "units", *_units_lines(explained))
    _section(console, "bytes per rank", _bytes_grid(explained), _bytes_note(explained))
    beside = [Text(note, "dim") for note in (explained.attention, explained.dispatch) if note]
    _section(console, "sent per rank and step", Text("\n".join(_sent_lines(explained))), *beside)
    if explained.outer_steps:
        _section(console, "outer steps, between islands", Text(explained.outer_steps.rstrip()))
    if lost := _lost_rank_lines(explained, ranks):
        _section(console, "if a rank is lost", *lost)
    if explained.losses:
        more = filter(None, [explained.subject.room_after_a_loss, explained.begins_anew])
        lines = [*map(str, explained.losses), *more]
        note = Text("Assumed: seconds of shardwise simulate to find a loss, to regroup, and to restart.", "dim")
        _section(console, "what a loss costs an elastic job", Text("\n".join(lines)), note)
    if explained.tiers is not None and explained.tiers.lines:
        lines = [*explained.tiers.lines, *_assumed_hosts(explained.tiers.num_local)]
        _section(console, "offload per rank and step", Text("\n".join(lines)))
    if explained.time is not None:
        taken = [] if explained.measured is None else [f"{plan.run} has taken {explained.measured}"]
        _section(console, "time of a step", Text("\n".join([*explained.time.lines, *taken])))
    if explained.verification:
        _section(console, "added by verify", Text(explained.verification.rstrip()))
    text = explained.program if full else shortened(explained.program)
    _section(console, "program of one step" + (" (--full prints all)" if text != explained.program else ""))
    for line in text.splitlines():
        style = "dim" if line.lstrip().startswith("#") else "" if line[0] == " " else "cyan"
        console.print(Text(f"  {line}", style), soft_wrap=True)


def _assumed_hosts(num_local: int) -> list[str]:
    return ["These times are for all ranks on one host."] if num_local > 1 else []


def _pipeline_lines(schedule: Schedule, explained: Explanation) -> Iterator[str]:
    """Which rank has which modules, and the schedule as a grid; a backward is drawn twice as long as a forward."""
    yield from explained.subject.stages.splitlines()
    yield from picture(schedule).splitlines()
    most = max(most_in_flight(schedule, rank) for rank in range(schedule.num_ranks))
    waiting = f"{timed(schedule).bubble:.0%} of the time is spent waiting"
    yield f"{waiting}; a rank holds the activations of at most {most} micro-batches"
    if explained.subject.sizes:
        yield "The following is for the pipeline rank with the most parameters."


def print_presets(console: Console) -> None:
    grid = _grid("preset", "axes", *KINDS)
    sources = _grid("preset", "known from")
    for name, one in PRESETS.items():
        places = [_split_over(place) for place in (one.param, one.held, one.grad, one.optim)]
        grid.add_row(Text(name, "cyan"), " x ".join(one.axes), *places)
        sources.add_row(Text(name, "cyan"), one.known_from)
    _section(console, "axes over which each preset shards", grid)
    _section(console, "equivalents", sources)


def _split_over(place: Place) -> Text:
    """Only the axes, because the columns are many and a terminal is narrow."""
    if place.partial:
        return Text(f"partial {'+'.join(place.partial)}", "yellow")
    words = f"{'+'.join(place.shard) or 'copy'}{f', {place.tier}' if place.tier != 'device' else ''}"
    return Text(words, "green" if place.shard else "")


def _lost_rank_lines(explained: Explanation, ranks: str) -> list[Text]:
    """How an elastic job of `ranks` goes on; nothing where it does so without that one rank alone."""
    mesh, smaller, times = explained.mesh, explained.subject.smaller, explained.subject.smaller_times
    if explained.why_restarted:
        return [Text(f"An elastic job restarts from its last checkpoint, because {explained.why_restarted}.")]
    if smaller and num_groups(mesh) == 1:
        left = mesh.world_size - explained.num_leaving
        on = mesh_of({}, smaller, left)
        text = f"An elastic job goes on with {left} of {ranks}, on the mesh {on}, until enough others are there."
    elif explained.num_leaving > 1:
        group = "island" if mesh.island_axes else "replica group"
        leaving = f"{explained.num_leaving} of {ranks}"
        text = f"An elastic job goes on without its {group}, {leaving}, until that is complete again."
    else:
        return []
    return [Text(text), *([Text(f"If no replica group is whole, a step takes {times}.", "dim")] if times else [])]


def _section(console: Console, title: str, *below: object) -> None:
    console.print()
    console.print(Text(title, "bold"))
    for one in below:
        console.print(Padding(one, (0, 0, 0, 2), expand=False) if isinstance(one, Grid | Text) else one)


def _grid(*columns: str, right: Sequence[str] = ()) -> Grid:
    grid = Grid(box=None, pad_edge=False, header_style="dim", show_header=any(columns))
    for column in columns:
        grid.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return grid


def _mesh_grid(explained: Explanation) -> Grid:
    """For each axis its size, its first group of ranks, and what the ranks of a group share."""
    mesh = explained.mesh
    grid = _grid("", "size", "first group", "")
    for axis in mesh.axes:
        first = mesh.groups(axis)[0]
        line = ", ".join(map(str, first[:MAX_RANKS])) + (", ..." if len(first) > MAX_RANKS else "")
        name = "islands" if axis == ISLAND_AXIS else MODEL_AXES.get(axis, "data parallelism")
        note = AXIS_NOTES.get(axis, "ranks have their own batches")
        grid.add_row(Text(axis, "cyan"), str(mesh.size(axis)), line, Text(f"{name}: {note}", "dim"))
    return grid


def _plan_grid(explained: Explanation) -> Grid:
    """Every value that matters, and its origin; defaults that do not apply are left out."""
    grid = _grid("", "", "")
    for path, value, origin in plan_table(explained.plan):
        if origin == "default" and _is_irrelevant(path, value, explained.plan):
            continue
        text = "from the preset" if value is None else str(value)
        grid.add_row(path, Text(text), Text(origin, "dim" if origin == "default" else "yellow"))
    return grid


def _is_irrelevant(path: str, value: object, plan: Plan) -> bool:
    """Whether a default is not worth showing: it changes nothing, or does not apply."""
    if path.startswith("loss_scale."):
        return plan.precision != "fp16"
    if path.startswith("wire.feedback."):
        return plan.wire.feedback.beta is None
    if path.startswith("powersgd."):
        return plan.powersgd.rank is None
    if path.startswith("offload."):
        return plan.offload.optim == 0
    if path.startswith("pipeline.") and "pp" not in (plan.mesh or {}):
        return True
    if path.startswith("sequence."):
        return SEQUENCE_AXIS not in (plan.mesh or {})
    if path.startswith("islands."):
        return ISLAND_AXIS not in (plan.mesh or {}) or value is None
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
    if table.outer is not None:
        place = table.outer.place
        note = "what islands have in common" + (", and the momentum" if table.outer.num_states else "")
        grid.add_row(Text("anchor", "cyan"), _place(place), place.dtype, place.tier, Text(note, "dim"))
    return grid


def _place(place: Place) -> Text:
    """The place without its dtype, which has a column of its own."""
    words = str(place).removesuffix(place.tier).split(place.dtype)[0].strip()
    return Text(words, "" if words == "copy" else "green")


def _below_rows(explained: Explanation) -> Text:
    """Facts that the rows do not show."""
    table, mesh = explained.table, explained.mesh
    here = table.on(mesh)
    sent = f"gradients in {table.grad_wire}{_codes_words(here.grad_codes, here)}"
    if table.param_wire is not None:
        sent = f"parameters in {table.param_wire}, {sent}"
    if table.param_codes is not None:
        sent = f"parameters in {table.param.dtype}{_codes_words(table.param_codes, table)}, {sent}"
    if table.frozen_codes is not None:
        sent = f"frozen parameters{_codes_words(table.frozen_codes, table)}, {sent}"
    if table.outer is not None:
        sent = f"{sent}, outer gradients in {table.outer.codes or table.outer.wire}"
    if table.sends_codes or table.frozen_codes is not None:
        sent = f"{sent}; vectors, embeddings and routers are sent without codes{_rest_words(table)}"
    text = f"computes in {table.compute}; sends {sent}"
    if table.low_rank is not None:
        later = "" if table.low_rank.has_begun else "later "
        text += f", of matrices {later}as factors of {table.low_rank.rank} columns"
    alone = [axis for axis in mesh.axes if mesh.size(axis) == 1]
    if alone:
        text += f"; nothing is split over {' and '.join(alone)}, which has one rank"
    return Text(text)


def _rest_words(table: Table) -> str:
    """`, parameters in bf16`, where the plan says so."""
    every = {"parameters": table.param_codes, "frozen parameters": table.frozen_codes, "gradients": table.grad_codes}
    return "".join(f", {kind} in {one.rest}" for kind, one in every.items() if one is not None and one.rest is not None)


def _codes_words(codes: Codes | None, table: Table) -> str:
    """` as int4/128 along node`, without the axes if these are all."""
    if codes is None:
        return ""
    along = "" if codes.axes == table.axes else f" along {'+'.join(codes.axes)}"
    fed_back = "" if codes.feedback is None else f", with error feedback ({codes.feedback})"
    rests = ", as which they also rest" if codes.rests else ""
    return f" as {codes}{along}{fed_back}{rests}"


def _units_lines(explained: Explanation) -> Iterator[Grid | Text]:
    if not explained.subject.sizes:
        count = format_count(EXAMPLE_NUMEL)
        text = f"No model given (--model): {NUM_EXAMPLES} units of {count} parameters each are assumed."
        yield Text(text, "yellow")
        for unit in explained.subject.units:
            if describe_offload(unit.flats) and explained.plan.offload.optim > 0:
                yield Text(f"{unit.name}: {describe_offload(unit.flats)}")
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
        notes += [note for note in (on_host, activations) if note]
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
    for name, num_bytes, note in _bytes_elsewhere(explained):
        grid.add_row(Text(name, "cyan"), format_bytes(num_bytes), "", Text(note, "dim"))
    return grid


def _bytes_elsewhere(explained: Explanation) -> Iterator[tuple[str, int, str]]:
    """What is not on the device: its name, its bytes and what it is for."""
    held, images, copies = explained.held, explained.images, explained.copies
    if held.host is not None:
        yield from ((f"{kind} on the host", num_bytes, ON_HOST[kind]) for kind, num_bytes in held.host.by_kind.items())
    if images is not None:
        with_states, recovering = format_bytes(images.total), format_bytes(2 * images.total)
        note = f"a copy of its shards, to restore it; {with_states} with states kept there, and {recovering} while "
        yield "image on the host", images.copy, f"{note}ranks recover"
        if images.on_disk:
            yield "image on the disk", images.on_disk, "what was there before the last update, to restore it"
    if copies is not None:
        once = f"; {format_bytes(copies.sent_once)} once, for frozen parameters" if copies.sent_once else ""
        note = f"{format_bytes(copies.sent)} sent to another host, during each next step{once}"
        yield "copies for other hosts", copies.kept, note
        if copies.kept_on_disk:
            yield "copies for other hosts, on the disk", copies.kept_on_disk, "of what they have on theirs"
    if held.disk is not None:
        yield from ((f"{kind} on the disk", num_bytes, ON_DISK[kind]) for kind, num_bytes in held.disk.by_kind.items())


def _bytes_note(explained: Explanation) -> Text:
    num, peak_at = explained.subject.num_states, explained.held.peak_at
    if peak_at is None:
        lines = ["Activations are not included; --batch counts them."]
    else:
        lines = [f"The total is the peak of a step, at or just before {str(peak_at)!r}."]
    if explained.subject.optimizer:
        lines.append(f"Optimizer: {OPTIMIZERS[explained.subject.optimizer]}.")
    else:
        states = "no state" if num == 0 else "1 state" if num == 1 else f"{num} states"
        lines.append(f"Optimizer: {states} per parameter (change it with --optimizer or --optimizer-states).")
    lines.append("promised: an upper bound under this plan. replicated: the same model under ddp.")
    if (shared := explained.held_in_shared_memory) is not None:
        lines.append(
            f"Where the {explained.per_host} ranks of a host share memory (CPUs), parameters and the others' gradients "
            f"are read in place: working {format_bytes(shared.working)}, in all {format_bytes(shared.total)}."
        )
    return Text("\n".join(lines), "dim")


def _sent_lines(explained: Explanation) -> Iterator[str]:
    num, by_axis, activations = explained.plan.accumulate, explained.params_by_axis, explained.activations_by_axis
    text = format_bytes(explained.sent_bytes) + (f" in {num} micro-batches" if num > 1 else "")
    parts = [f"{format_bytes(sent)} along {axis}" for axis, sent in by_axis.items()]
    parts = parts if len(by_axis) > 1 or activations else []
    parts += [f"{format_bytes(sent)} of activations along {axis}" for axis, sent in activations.items()]
    yield f"{text}: {', '.join(parts)}" if parts else text
    if explained.uncounted_axes:
        axes = " and ".join(explained.uncounted_axes)
        yield f"The bytes of activations along {axes} are not included; --batch counts them."
    if explained.per_host:
        yield f"{format_bytes(max(explained.sent_by_hosts))} leave each host of {explained.per_host} ranks"
    copied = explained.copied_bytes
    if any(copied.values()):
        to_host, from_host = (format_bytes(copied.get(verb, 0)) for verb in ("evict", "fetch"))
        yield f"copied: {to_host} from device to host, {from_host} from host to device"
