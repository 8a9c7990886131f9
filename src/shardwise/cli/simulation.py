"""What `shardwise simulate` computes and prints."""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from rich.table import Table as Grid

from shardwise.cli import explain
from shardwise.cli.console import SafeConsole, console_for_output
from shardwise.cli.explanation import example_units
from shardwise.cli.output_files import require_svg, write
from shardwise.errors import ConfigError, nearest
from shardwise.fit.failure_rates import DEFAULT, FailureRates, failure_rates, ranks_that_end
from shardwise.fit.simulate import (
    LOSSES,
    Interval,
    Job,
    Loss,
    Outcome,
    Recovery,
    SlowHosts,
    best_interval,
    daly_interval,
    simulate,
)
from shardwise.observe.pictures import Bar, bar_picture
from shardwise.plan import Plan, load_plan
from shardwise.plan.mesh import Mesh, check_num_ranks
from shardwise.plan.placement import mesh_for, table_for
from shardwise.plan.replica_groups import Smaller, copy_axes, num_groups, with_fewer_ranks
from shardwise.program import OPTIMIZERS
from shardwise.program.buddies import kept_axes
from shardwise.program.image_bytes import ON_ACCELERATOR, why_no_images
from shardwise.system.units import bytes_of, format_seconds

NUM_CAUSES = 8
"""Causes that are printed: those that take most time."""
NUM_INTERVAL_SEEDS = 3
MOST_RUNS = 10_000
HOW: dict[Recovery, str] = {
    "restart": "all ranks restart from the last checkpoint",
    "host": "the others repeat the step, from images on their host; if a host is lost, all ranks restart",
    "buddy": "the others repeat the step, from images on their host or a copy on another",
    "copies": "the others repeat the step: all state is on several hosts anyway",
}


@dataclass(frozen=True)
class Simulated:
    """The job, why ranks restart (empty if the others continue), its runs, and the intervals that were tried."""

    job: Job
    rates: FailureRates
    why: str
    seed: int
    outcomes: tuple[Outcome, ...]
    intervals: tuple[Interval, ...]
    daly: float

    @property
    def goodput(self) -> float:
        return fmean(one.goodput for one in self.outcomes)

    @property
    def losses(self) -> dict[Loss, float]:
        """Shares of the time, the largest first."""
        shares = {loss: fmean(one.losses[loss] for one in self.outcomes) / self.job.seconds for loss in LOSSES}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    @property
    def causes(self) -> dict[str, tuple[float, float]]:
        """How often, and which share of the time they took, by cause, the costliest first."""
        every = [cause.name for cause in self.rates.causes]
        found = {
            name: (
                fmean(one.num_by_cause.get(name, 0) for one in self.outcomes),
                fmean(one.by_cause.get(name, 0.0) for one in self.outcomes) / self.job.seconds,
            )
            for name in every
        }
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def as_json(self) -> dict[str, Any]:
        """Everything; times are in seconds, and means of all runs unless they are of one."""
        return {
            "job": asdict(self.job),
            "failures": self.rates.source,
            "restarts_because": self.why,
            "goodput": self.goodput,
            "goodput_by_run": [one.goodput for one in self.outcomes],
            "seeds": [self.seed + index for index in range(len(self.outcomes))],
            "losses": {loss: share * self.job.seconds for loss, share in self.losses.items()},
            "causes": {
                name: {"events": num, "seconds": share * self.job.seconds} for name, (num, share) in self.causes.items()
            },
            "steps": fmean(one.num_steps for one in self.outcomes),
            "interruptions": fmean(one.num_interruptions for one in self.outcomes),
            "restarts": fmean(one.num_restarts for one in self.outcomes),
            "survived": fmean(one.num_survived for one in self.outcomes),
            "checkpoints": fmean(one.num_checkpoints for one in self.outcomes),
            "fewest_ranks": min(one.fewest_ranks for one in self.outcomes),
            "daly_interval_seconds": None if math.isinf(self.daly) else self.daly,
            "intervals": [{"seconds": one.seconds, "goodput": one.goodput} for one in self.intervals],
            "course": self.outcomes[0].course,
        }


def run(args: argparse.Namespace) -> int:
    require_svg(args.picture)
    simulated = _simulated(args)
    if args.picture is not None:
        write(args.picture, _picture(simulated))
    if args.json:
        print(json.dumps(simulated.as_json(), indent=2))
    else:
        _print(simulated, console_for_output())
    return 0


def _simulated(args: argparse.Namespace) -> Simulated:
    if not 1 <= args.runs <= MOST_RUNS:
        raise ConfigError(f"--runs is {args.runs}; give 1 to {MOST_RUNS}: the mean of more is the same.")
    if args.failures is not None and args.rank_hours is not None:
        raise ConfigError("--failures and --rank-hours both say how often ranks are lost. Give one of them.")
    rates = failure_rates(args.failures or DEFAULT) if args.rank_hours is None else ranks_that_end(args.rank_hours)
    job, why = _job(args)
    seeds = range(args.seed, args.seed + args.runs)
    daly = daly_interval(job, rates)
    intervals: tuple[Interval, ...] = ()
    if args.checkpoint_every == "auto":
        intervals = best_interval(job, rates, seeds[:NUM_INTERVAL_SEEDS])
        job = replace(job, checkpoint_interval_seconds=intervals[0].seconds)
    outcomes = tuple(simulate(job, rates, seed) for seed in seeds)
    return Simulated(job, rates, why, args.seed, outcomes, intervals, daly)


def _job(args: argparse.Namespace) -> tuple[Job, str]:
    """The job, and why its ranks restart."""
    check_num_ranks("--world", args.world)
    _check_numbers(args)
    if args.per_host < 1:
        raise ConfigError(f"--per-host is {args.per_host}; give at least 1.")
    plan = load_plan(args.plan, args.set)
    mesh = mesh_for(plan, args.world, args.per_host)
    step = _given_step(args, mesh) if args.model is None else _predicted_step(args)
    seconds = args.days * 86400
    if step.seconds > seconds:
        raise ConfigError(
            f"A step takes {format_seconds(step.seconds)} and the job {format_seconds(seconds)}: none would end. Give "
            f"more --days."
        )
    recovery, why = _recovery(args, plan, mesh, step)
    write = load = 0.0
    if args.storage is not None:
        rate = bytes_of("--storage", args.storage)
        if not rate:
            raise ConfigError("--storage is 0; give the bytes that all ranks together write in a second.")
        write = load = step.checkpoint_bytes / rate
    is_one_group = num_groups(mesh) == 1 and recovery != "restart"
    numbers = tuple(dict.fromkeys(math.prod(one.values()) for one in step.smaller)) if is_one_group else ()
    least = args.least if args.least is not None else (args.world if recovery == "restart" else min(numbers, default=1))
    job = Job(
        world_size=args.world,
        ranks_per_host=args.per_host,
        step_seconds=step.seconds,
        seconds=seconds,
        recovery=recovery,
        checkpoint_interval_seconds=_every(args.checkpoint_every, step.seconds),
        checkpoint_stall_seconds=args.checkpoint_stall,
        checkpoint_write_seconds=write,
        load_seconds=load,
        restart_seconds=args.restart_seconds,
        regroup_seconds=args.regroup_seconds,
        join_seconds=args.join_seconds,
        join_pause_seconds=args.regroup_seconds,
        least_ranks=least,
        spare_ranks=args.spares,
        leave_together=1 if recovery == "restart" or numbers else args.world // num_groups(mesh),
        numbers=numbers,
        seconds_with=step.seconds_with,
        slow=_slow(args.slow_hosts),
    )
    return job, why


_ABOVE_0 = ("days", "step_seconds", "least")
_FROM_0 = ("checkpoint_stall", "restart_seconds", "regroup_seconds", "join_seconds", "spares")


def _check_numbers(args: argparse.Namespace) -> None:
    """Here rather than by `Job`, which knows its values by other names, and days as seconds."""
    for name in (*_ABOVE_0, *_FROM_0):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and (value > 0 or (value == 0 and name in _FROM_0))):
            least = "more than 0" if name in _ABOVE_0 else "0 or more"
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}; give {least}, and a finite number.")
    if args.least is not None and args.least > args.world:
        raise ConfigError(f"--least is {args.least}, but there are {args.world} ranks.")


@dataclass(frozen=True)
class _Step:
    """What the simulation has to know about a step."""

    seconds: float
    checkpoint_bytes: int = 0
    smaller: Smaller = ()
    """The meshes on which a single replica group goes on."""
    why_no_smaller: str = ""
    seconds_with: Mapping[int, float] = field(default_factory=dict)
    """What a step takes on these, by their ranks, where that is foreseen."""


def _given_step(args: argparse.Namespace, mesh: Mesh) -> _Step:
    """Without a model, it is assumed to allow all smaller meshes that numbers do."""
    for name in ("batch", "hardware", "optimizer"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} is for --model, whose step is then predicted. Add --model FILE:CALLABLE.")
    if args.step_seconds is None:
        raise ConfigError("How long is a step? Give --step-seconds, or --model, --batch and --hardware to predict it.")
    if (args.checkpoint_bytes is None) != (args.storage is None):
        raise ConfigError("--checkpoint-bytes and --storage say how long a checkpoint takes. Give both, or neither.")
    checkpoint_bytes = bytes_of("--checkpoint-bytes", args.checkpoint_bytes or "0")
    return _Step(args.step_seconds, checkpoint_bytes, with_fewer_ranks(mesh))


def _predicted_step(args: argparse.Namespace) -> _Step:
    """The step of `--model`, and the smaller meshes, as `explain --time` predicts and chooses them; and what a
    checkpoint of it has."""
    if args.step_seconds is not None:
        raise ConfigError("--step-seconds and --model both say how long a step is. Give one of them.")
    if args.batch is None or args.hardware is None:
        raise ConfigError("--model needs --batch and --hardware too, to predict a step.")
    if args.optimizer is not None and args.optimizer not in OPTIMIZERS:
        raise ConfigError(f"--optimizer is {args.optimizer!r}. {nearest(args.optimizer, OPTIMIZERS)}")
    words = [args.plan, "--world", str(args.world), "--per-host", str(min(args.per_host, args.world)), "--time"]
    words += ["--model", args.model, "--batch", args.batch, "--hardware", args.hardware]
    words += ["--optimizer", args.optimizer] if args.optimizer else []
    words += [word for change in args.set for word in ("--set", change)]
    parser = argparse.ArgumentParser(prog="shardwise simulate", exit_on_error=False)
    explain.add_arguments(parser)
    found = explain.explained(parser.parse_args(words))
    if found.time is None:
        raise ConfigError(f"The step of {args.model} cannot be predicted.")
    if args.checkpoint_bytes is not None:
        num_bytes = bytes_of("--checkpoint-bytes", args.checkpoint_bytes)
    else:
        num_bytes = _checkpoint_bytes(args.model, found.subject.num_states)
    subject, seconds = found.subject, found.time.step_seconds
    return _Step(seconds, num_bytes, subject.smaller, subject.why_no_smaller, subject.smaller_seconds)


def _checkpoint_bytes(source: str, num_states: int) -> int:
    """Parameters as they are, and of trained ones the master weights and the states in fp32."""
    model = importlib.import_module("shardwise.cli.model_file").build_model(source)  # needs torch
    every = list(model.parameters())
    trained: int = sum(param.numel() for param in every if param.requires_grad)
    frozen_bytes: int = sum(param.nbytes for param in every if not param.requires_grad)
    return 4 * trained * (1 + num_states) + frozen_bytes


def _every(text: str, step_seconds: float) -> float:
    if text == "auto":
        return Job.checkpoint_interval_seconds
    try:
        seconds = float(text)
    except ValueError:
        raise ConfigError(f"--checkpoint-every is {text!r}; give seconds, or auto.") from None
    if not step_seconds <= seconds < math.inf:
        raise ConfigError(
            f"--checkpoint-every is {text} s, but a step takes {step_seconds:g} s, and only whole ones are saved. "
            f"Give at least that, or auto."
        )
    return seconds


def _slow(text: str | None) -> SlowHosts:
    if text is None:
        return SlowHosts()
    try:
        rate, factor, hours = map(float, text.split(":"))
    except ValueError:
        rate = factor = hours = math.nan
    if not (0 <= rate < math.inf and 1 <= factor < math.inf and 0 < hours < math.inf):
        raise ConfigError(
            f"--slow-hosts is {text!r}; write events for each host and hour, from 0 on, a factor, from 1 on, and "
            f"hours, all of them finite, such as 0.0001:1.3:2."
        )
    return SlowHosts(rate, factor, hours)


def _recovery(args: argparse.Namespace, plan: Plan, mesh: Mesh, step: _Step) -> tuple[Recovery, str]:
    """What `elastic` does with this plan; or what is asked for."""
    if args.recovery != "plan":
        recovery: Recovery = args.recovery
        if recovery == "buddy" and args.world <= args.per_host:  # no other host has a copy
            return "host", ""
        return recovery, "--recovery says so" if recovery == "restart" else ""
    if why := _why_restarted(plan, mesh, args.device, step):
        return "restart", why
    if _has_copies(plan, mesh, args.per_host):
        return "copies", ""
    return ("host" if plan.survive == "host" or args.world <= args.per_host else "buddy"), ""


def _why_restarted(plan: Plan, mesh: Mesh, device: str, step: _Step) -> str:
    if plan.survive == "checkpoint":
        return "the plan says survive: checkpoint"
    if why := why_no_images(mesh, step.smaller, step.why_no_smaller):
        return why
    return ON_ACCELERATOR if device == "gpu" else ""


def _has_copies(plan: Plan, mesh: Mesh, per_host: int) -> bool:
    """Whether ranks of several hosts hold each part of the state."""
    units = example_units(table_for(plan, mesh), mesh, plan)
    shard = {axis for unit in units for flat in unit.flats for axis in kept_axes(flat)}
    same = mesh.among(0, copy_axes(mesh, shard))
    return len({rank // per_host for rank in same}) > 1


def _print(simulated: Simulated, console: SafeConsole) -> None:
    job = simulated.job
    runs = [one.goodput for one in simulated.outcomes]
    spread = f" ({min(runs):.1%} to {max(runs):.1%} in {len(runs)} runs)" if len(runs) > 1 else ""
    console.print(f"goodput {simulated.goodput:.1%}{spread}, {job.world_size:,} ranks, {job.seconds / 86400:g} days")
    because = f", because {simulated.why}" if simulated.why else ""
    console.print(f"If ranks are lost, {HOW[job.recovery]}{because}.")
    interruptions = fmean(one.num_interruptions for one in simulated.outcomes)
    restarts, survived = (
        fmean(getattr(one, name) for one in simulated.outcomes) for name in ("num_restarts", "num_survived")
    )
    between = f", one in {format_seconds(job.seconds / interruptions)}" if interruptions else ""
    console.print(
        f"{interruptions:,.0f} interruptions{between} ({simulated.rates.source}): {restarts:,.0f} restarts, "
        f"{survived:,.0f} survived by the others"
    )
    console.print(_checkpoints(simulated))
    console.print(_grid("where the time goes", _time_rows(simulated)))
    causes = [
        (name, f"{num:,.0f}", f"{share:.2%}", format_seconds(share * job.seconds / num) if num else "")
        for name, (num, share) in list(simulated.causes.items())[:NUM_CAUSES]
    ]
    console.print(_grid("cause", causes, "events", "of the time", "each"))


def _checkpoints(simulated: Simulated) -> str:
    job = simulated.job
    every = job.checkpoint_interval_seconds
    text = f"A checkpoint every {format_seconds(every)}"
    if every >= job.seconds:
        return "Checkpoints cost more than they save: none is made."
    if simulated.intervals:
        others = ", ".join(
            f"{format_seconds(one.seconds)}: {one.goodput:.1%}"
            for one in sorted(simulated.intervals, key=lambda one: one.seconds)
        )
        daly = "none" if math.isinf(simulated.daly) else format_seconds(simulated.daly)
        text += f" costs least (Young and Daly: {daly}). Goodput by interval: {others}"
    whole_after = job.checkpoint_stall_seconds + job.checkpoint_write_seconds
    if not whole_after:
        return (
            f"{text}. Checkpoints are assumed to cost nothing and to be whole at once: say what they do with "
            f"--checkpoint-stall, and --checkpoint-bytes and --storage."
        )
    return f"{text}. It adds {format_seconds(job.checkpoint_stall_seconds)} to a step, and is whole " + (
        f"{format_seconds(whole_after)} later."
    )


def _time_rows(simulated: Simulated) -> list[tuple[str, str, str, str]]:
    seconds = simulated.job.seconds
    rows = [("useful steps", f"{simulated.goodput:.2%}", format_seconds(simulated.goodput * seconds), "")]
    for loss, share in simulated.losses.items():
        if share > 1e-9:
            rows.append((loss, f"{share:.2%}", format_seconds(share * seconds), LOSSES[loss]))
    return rows


def _grid(first: str, rows: Sequence[tuple[str, ...]], *heads: str) -> Grid:
    grid = Grid(box=None, pad_edge=False, show_header=bool(heads))
    for index, head in enumerate((first, *(heads or [""] * (len(rows[0]) - 1)))):
        grid.add_column(head, justify="left" if index in (0, 3) and not (heads and index) else "right")
    for row in rows:
        grid.add_row(*row)
    return grid


def _picture(simulated: Simulated) -> str:
    job = simulated.job
    shares = [("useful steps", simulated.goodput), *simulated.losses.items()]
    bars = [
        Bar(name, share, f"{share:.2%}  {format_seconds(share * job.seconds)}")
        for name, share in shares
        if share > 1e-9
    ]
    title = f"{job.world_size:,} ranks, {job.seconds / 86400:g} days: goodput {simulated.goodput:.1%}"
    stored = format_seconds(job.checkpoint_interval_seconds)
    below = f"{HOW[job.recovery]}; a checkpoint every {stored}; failures: {simulated.rates.source}"
    by_interval = [(one.seconds / 60, one.goodput) for one in sorted(simulated.intervals)]
    return bar_picture(title, below, bars, by_interval, "minutes between checkpoints", "goodput")
