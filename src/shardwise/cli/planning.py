"""What `shardwise plan` computes and prints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table as Grid

from shardwise.cli.console import SafeConsole, console_for_output
from shardwise.cli.measured_plans import measure
from shardwise.cli.model_file import batch_from, build_model
from shardwise.cli.output_files import require_absent, require_svg, write
from shardwise.errors import ConfigError, nearest
from shardwise.fit.calibrate.speed import calibrated_hardware, this_machine
from shardwise.fit.candidates import MOST_ROWS, Space, precisions_of, wires_of
from shardwise.fit.foreseen import device_here, updates_of
from shardwise.fit.hardware import Hardware, hardware
from shardwise.fit.model_subject import ModelSubject
from shardwise.fit.search import DEVICE_SHARE, HOST_SHARE, OBJECTIVES, Found, Limits, Ranked, as_json, search
from shardwise.observe.pictures import Point, front_picture
from shardwise.plan import Offload, Plan, load_plan
from shardwise.plan.mesh import check_num_ranks
from shardwise.program import OPTIMIZERS
from shardwise.system.calibration import read_calibration
from shardwise.system.even_parts import divisors
from shardwise.system.units import bytes_of, format_bytes, format_seconds

AXES = ("tp", "pp", "sp", "ep")


def run(args: argparse.Namespace) -> int:
    require_svg(args.picture)
    if args.out is not None:
        _require_plan(args.out)
    subject, limits = _subject(args)
    space = _space(args, subject.base)
    found = search(
        subject,
        args.world,
        limits,
        base=subject.base,
        space=space,
        objective=args.objective,
        most_evaluated=args.most,
    )
    measured: list[tuple[Ranked, float]] = []
    if args.measure:
        plans = [(one, one.candidate.plan(subject.base)) for one in found.best[: args.measure]]
        measured = measure(plans, args.model, args.batch, args.optimizer, args.world)
        order = {id(one): seconds for one, seconds in measured}
        found = replace(found, best=tuple(sorted(found.best, key=lambda one: order.get(id(one), float("inf")))))
    best = found.best[0].candidate.plan(subject.base)
    if args.out is not None:
        write(args.out, _as_text(best, args.out))
    if args.picture is not None:
        write(args.picture, _picture(found, subject, args.world))
    if args.json:
        values = as_json(found, lambda candidate: candidate.plan(subject.base))
        values["measured"] = [{"plan": str(one.candidate), "seconds": seconds} for one, seconds in measured]
        print(json.dumps(values, indent=2))
    else:
        _print(found, subject, limits, best, measured, console_for_output())
    return 0


def _subject(args: argparse.Namespace) -> tuple[ModelSubject, Limits]:
    check_num_ranks("--world", args.world)
    for name, least in (("per_host", 1), ("most", 1), ("measure", 0)):
        given = getattr(args, name)
        if given is not None and given < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {given}; give at least {least}.")
    if args.optimizer not in OPTIMIZERS:
        raise ConfigError(f"--optimizer is {args.optimizer!r}. {nearest(args.optimizer, OPTIMIZERS)}")
    if args.hardware is None:
        named = calibrated_hardware(read_calibration(), this_machine())
    else:
        named = hardware(args.hardware)
    if args.measure and named.is_processor != (device_here().type == "cpu"):
        kinds = ("processors", "accelerators") if named.is_processor else ("accelerators", "processors")
        raise ConfigError(
            f"--measure runs the best plans on this machine's {kinds[1]}, and {named.name} has {kinds[0]}, on which "
            f"others may be the fastest. Leave --measure out, or run it there."
        )
    num_local = args.per_host or (args.world if named.is_processor else min(args.world, named.ranks_per_node))
    if args.world % num_local:
        most = max(size for size in divisors(args.world) if size <= num_local)
        raise ConfigError(
            f"{num_local} ranks on each host do not divide --world {args.world}. Give --per-host {most}, or another "
            f"number that does."
        )
    machine = named.with_ranks(num_local)
    base = load_plan({} if args.base is None else args.base, args.set)
    model = build_model(args.model)
    batch = batch_from(args.batch)
    subject = ModelSubject(
        model,
        batch,
        machine,
        0,
        base,
        updates_of(model, args.optimizer),
        on_cpu=machine.is_processor,
        disk=base.disk,
    )
    if subject.rehearsals.rows_of_batch < 1:
        raise ConfigError(f"The batch of {args.batch} has no samples; return one of at least 1.")
    subject.num_rows = args.rows if args.rows is not None else args.world * subject.rehearsals.rows_of_batch
    if not 1 <= subject.num_rows <= MOST_ROWS:
        raise ConfigError(f"--rows is {subject.num_rows}; give 1 to {MOST_ROWS}, the samples of a step on all ranks.")
    return subject, _limits(args, machine)


def _limits(args: argparse.Namespace, machine: Hardware) -> Limits:
    device = int(DEVICE_SHARE * machine.memory_bytes)
    if args.device_memory is not None:
        device = bytes_of("--device-memory", args.device_memory)
    host = None if machine.host is None else int(HOST_SHARE * machine.host.memory_bytes)
    if args.host_memory is not None:
        host = bytes_of("--host-memory", args.host_memory)
    return Limits(device, host)


def _space(args: argparse.Namespace, base: Plan) -> Space:
    axes = tuple(word for word in args.axes.split(",") if word and word != "none")
    for axis in axes:
        if axis not in AXES:
            raise ConfigError(f"--axes names {axis!r}. {nearest(axis, AXES)}")
    rows: tuple[int, ...] = ()
    if args.micro_batch is not None:
        try:
            rows = tuple(map(int, args.micro_batch.split(",")))
        except ValueError:
            rows = (0,)
        if min(rows) < 1:
            raise ConfigError(f"--micro-batch is {args.micro_batch!r}; give whole numbers from 1 on, such as 1,2,4.")
    wires = wires_of(*_asked("wires", args.wires, base.search.wires))
    precisions = precisions_of(*_asked("precisions", args.precisions, base.search.precisions))
    space = Space(axes=axes, rows=rows, precisions=precisions, wires=wires, shares=base.offload == Offload())
    if "preset" in base.model_fields_set and base.preset != "auto":
        space = replace(space, presets=(base.preset,))
    if base.activations.policy is not None:
        space = replace(space, activations=(base.activations.policy,))
    if base.pipeline.model_fields_set & {"schedule", "virtual_stages"}:
        space = replace(space, schedules=())
    return space


def _asked(name: str, option: str | None, of_plan: Sequence[str] | None) -> tuple[Sequence[str], str]:
    """The words of an option, or if it is not given those that the plan has, and which of them they are."""
    if option is not None:
        return [word for word in option.split(",") if word], f"--{name}"
    return of_plan or (), f"search.{name}"


def _require_plan(path: Path) -> None:
    if path.suffix.lower() not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"--out is {path}; a plan is written as .yaml or .json.")
    require_absent(path)


def _as_text(plan: Plan, path: Path) -> str:
    values = plan.model_dump(mode="json", exclude_unset=True)
    return json.dumps(values, indent=2) + "\n" if path.suffix.lower() == ".json" else _as_yaml(values)


def _as_yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False)


def _print(
    found: Found,
    subject: ModelSubject,
    limits: Limits,
    best: Plan,
    measured: Sequence[tuple[Ranked, float]],
    console: SafeConsole,
) -> None:
    machine = subject.hardware
    console.print(
        f"{OBJECTIVES[found.objective]} for {subject.num_rows:,} samples on {machine.name}, "
        f"{format_bytes(limits.device_bytes)} of each device"
    )
    console.print(_ranking(found, {id(one): seconds for one, seconds in measured}))
    for part, seconds in sorted(found.best[0].found.parts.items(), key=lambda item: -item[1]):
        console.print(f"  {seconds / found.best[0].found.seconds:>6.1%}  {_fine(seconds)} {part}")
    if found.why_not:
        console.print("why not")
        for one in found.why_not:
            console.print(f"  {one.what}: {_short(one.reason)}")
    console.print(
        f"{found.num_candidates:,} candidates: {found.num_pruned:,} are impossible, too large or too slow by their "
        f"bounds, {len(found.evaluated)} were evaluated, {found.num_left:,} were left out"
    )
    console.print("the plan")
    for line in _as_yaml(best.model_dump(mode="json", exclude_unset=True)).splitlines():
        console.print(f"  {line}")


def _short(reason: str, most: int = 200) -> str:
    return reason if len(reason) <= most else reason[: most - 3] + "..."


def _fine(seconds: float) -> str:
    """Plans differ by less than what `format_seconds` shows of short steps."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else format_seconds(seconds)


def _ranking(found: Found, measured: dict[int, float]) -> Grid:
    grid = Grid(box=None, pad_edge=False)
    heads = ["", "plan", "a step", "MFU", "device", "host", *(["measured"] if measured else [])]
    for head in heads:
        grid.add_column(head, justify="left" if head == "plan" else "right")
    for place, one in enumerate(found.best, start=1):
        about = "" if one.found.is_exact else "~"
        cells = [
            str(place),
            str(one.candidate),
            about + _fine(one.found.seconds),
            f"{one.found.mfu:.0%}",
            about + format_bytes(one.found.device_bytes),
            format_bytes(one.found.host_bytes) if one.found.host_bytes else "",
        ]
        if measured:
            cells.append(_fine(measured[id(one)]) if id(one) in measured else "")
        grid.add_row(*cells)
    return grid


def _picture(found: Found, subject: ModelSubject, world_size: int) -> str:
    front = {one.candidate for one in found.front}
    points = [
        Point(
            one.found.device_bytes / 2**30,
            one.found.seconds,
            str(one.candidate),
            one.candidate in front,
            one.found.fits(found.limits),
        )
        for one in found.evaluated
    ]
    title = f"{type(subject.model).__name__} on {world_size:,} ranks of {subject.hardware.name}"
    below = (
        f"{len(points)} plans that were evaluated; hollow ones do not fit; the line joins the best of time and memory"
    )
    return front_picture(title, below, points, "GiB of the fullest device", "seconds a step")
