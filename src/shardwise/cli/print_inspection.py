"""Prints the results of `inspect` and `convert`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from shardwise.checkpoint.formats import FORMS, Conversion, Inspection, Source, Spec, dtype_word
from shardwise.system.units import format_bytes, format_count

MAX_ROWS = 24


def print_inspection(found: Inspection, console: Console, *, full: bool) -> None:
    source = found.source
    _line(console, Text.assemble((str(source.path), "bold cyan")))
    _line(console, Text(FORMS[source.form], "dim"))
    _section(console, "contents", _facts_grid(found))
    _section(console, "bytes", _pairs((kind, format_bytes(size)) for kind, size in found.bytes_by_kind.items()))
    _print_rows(console, "tensors", _tensor_rows(found), full=full)
    if source.groups:
        _section(
            console, "optimizer", *(Text(_group_text(number, group)) for number, group in enumerate(source.groups))
        )
    if source.user:
        _section(console, "user state", _pairs((key, _short(value)) for key, value in source.user.items()))
    sizes = zip(source.files, found.bytes_there, strict=True)
    _print_rows(console, "files", [(file.name, _file_size(file.num_bytes, there)) for file, there in sizes], full=full)
    if source.left_out:
        _section(console, "not included", *(Text(words) for words in source.left_out))
    if found.is_verified:
        _section(console, "verified", *_verdict(found))
    elif found.problems:
        _section(console, "damaged", *_verdict(found))


def print_conversion(done: Conversion, console: Console, *, is_dry_run: bool) -> None:
    verb = "would be written" if is_dry_run else "written"
    _line(console, Text.assemble((str(done.source.path), "cyan"), f", {FORMS[done.source.form]}"))
    files = [(name, f"{len(specs)} tensors, {_size(specs)}") for name, specs in done.files.items()]
    _print_rows(console, f"{verb} as {done.to} into {done.out}", files, full=False)
    kept = [path.name for path in done.source.kept]
    if kept:
        _section(console, "copied along", Text(", ".join(kept)))
    _section(console, "total", Text(f"{done.num_tensors} tensors, {format_bytes(done.num_bytes)}"))
    if done.notes:
        _section(console, "notes", *(Text(note) for note in done.notes))


def _facts_grid(found: Inspection) -> Grid:
    source = found.source
    facts = {
        "step": f"{source.step}, after {source.num_steps} steps of the optimizer",
        "parameters": f"{format_count(found.num_params)} in {_count(source)}",
        **{key.replace("_", " "): _short(value) for key, value in source.facts.items()},
        "tied": ", ".join(f"{alias} is {name}" for alias, name in source.ties.items()),
    }
    return _pairs((key, value) for key, value in facts.items() if value)


def _count(source: Source) -> str:
    num_buffers = sum(spec.kind == "buffer" for spec in source.specs)
    params = f"{len(source.weights) - num_buffers} tensors"
    return f"{params}, and {num_buffers} buffers" if num_buffers else params


def _tensor_rows(found: Inspection) -> list[tuple[str, ...]]:
    states: dict[str, list[str]] = {}
    for spec in found.source.states:
        states.setdefault(spec.name, []).append(spec.kind.removeprefix("state."))
    return [
        (
            spec.name,
            _shape(spec),
            dtype_word(spec),
            "buffer" if spec.kind == "buffer" else " ".join(states.get(spec.name, ())),
        )
        for spec in found.source.weights
    ]


def _shape(spec: Spec) -> str:
    return " x ".join(map(str, spec.shape)) or "scalar"


def _file_size(num_bytes: int, there: int | None) -> str:
    """The size of a file; for a truncated one also how much is left."""
    if there == num_bytes:
        return format_bytes(num_bytes)
    if there is None:
        return f"missing; {format_bytes(num_bytes)} were written"
    verb = "truncated" if there < num_bytes else "changed"
    return f"{verb}: {format_bytes(there)} ({there} bytes) of {format_bytes(num_bytes)} ({num_bytes} bytes)"


def _size(specs: Sequence[Spec]) -> str:
    return format_bytes(sum(spec.num_bytes for spec in specs))


def _group_text(number: int, group: dict[str, object]) -> str:
    params = group.get("params")
    owned = f"{len(params)} parameters, " if isinstance(params, list) else ""
    settings = ", ".join(f"{key} {value}" for key, value in group.items() if key != "params" and value is not None)
    return f"group {number}: {owned}{settings}"


def _short(value: object) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{key} {inner}" for key, inner in value.items() if inner not in ("", None))
    elif isinstance(value, list):
        value = ", ".join(map(str, value))
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _verdict(found: Inspection) -> Iterable[Text]:
    if not found.problems:
        sums = ", and all checksums match" if found.source.check is not None else "; the format has no checksums"
        return [Text(f"all tensors could be read{sums}", "green")]
    return [Text(problem, "red") for problem in found.problems]


def _print_rows(console: Console, title: str, rows: Sequence[tuple[str, ...]], *, full: bool) -> None:
    shown = rows if full else rows[:MAX_ROWS]
    grid = Grid.grid(padding=(0, 2))
    for _ in rows[0] if rows else ():
        grid.add_column(overflow="fold")
    for row in shown:
        grid.add_row(*map(Text, row))
    more = len(rows) - len(shown)
    _section(console, title, grid, *([Text(f"and {more} more (--full prints all)", "dim")] if more else []))


def _pairs(rows: Iterable[tuple[str, str]]) -> Grid:
    grid = Grid.grid(padding=(0, 2))
    for key, value in rows:
        grid.add_row(Text(key), Text(value))
    return grid


def _section(console: Console, title: str, *below: Grid | Text) -> None:
    console.print()
    _line(console, Text(title, "bold"))
    for one in below:
        console.print(Padding(one, (0, 0, 0, 2), expand=False))


def _line(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)
