"""`shardwise explain`: what a plan does on a given number of ranks, without starting any."""

from __future__ import annotations

import argparse
import importlib
import json
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from shardwise.cli.console import console_for_output
from shardwise.cli.explanation import Explanation, Subject, as_json, example_units, explain
from shardwise.cli.print_explanation import print_explained, print_presets
from shardwise.errors import ConfigError, ModelError
from shardwise.fit.clock import RankProgram
from shardwise.fit.hardware import Hardware
from shardwise.fit.hardware import hardware as hardware_named
from shardwise.fit.step_time import StepTime, step_time
from shardwise.observe.differences import Difference, compared
from shardwise.observe.run_files import RECORD
from shardwise.observe.run_view import read_run
from shardwise.plan import Budget, Plan, load_plan
from shardwise.plan.mesh import Mesh, check_num_ranks
from shardwise.plan.placement import PRESETS, Table, mesh_for, preset, table_for
from shardwise.plan.placement.islands import check_islands
from shardwise.plan.replica_groups import shrinking_axes
from shardwise.program import OPTIMIZERS
from shardwise.system.calibration import default_path, read_calibration
from shardwise.system.named_folder import folder_of

EXAMPLES = """examples:
  shardwise explain --list                                           all presets
  shardwise explain zero3 --world 8                                  a preset on 8 ranks
  shardwise explain plan.yaml --world 8 --set precision=bf16         a plan file, with one change
  shardwise explain zero3 --world 8 --model train.py:build --batch train.py:sample_batch
  shardwise explain zero3 --world 64 --model train.py:build --batch train.py:sample_batch --time --hardware h100-sxm"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("plan", nargs="?", metavar="PLAN", help="a preset, or a .yaml, .toml or .json file")
    option("--list", action="store_true", help="list all presets")
    option("--world", type=int, metavar="N", help="number of ranks")
    option(
        "--per-host",
        type=int,
        metavar="N",
        help="ranks per host, to show the bytes that leave each host, and what ranks of a host share of its memory "
        "(default: all on one)",
    )
    option("--set", action="append", default=[], metavar="a.b=c", help="change one key of the plan; repeatable")
    option(
        "--model",
        metavar="FILE:CALLABLE",
        help="a callable without arguments that builds the model; it runs on the meta device and needs no memory",
    )
    option(
        "--batch",
        metavar="FILE:CALLABLE",
        help="with --model: a callable that returns a batch (a tensor, a tuple of arguments, or a dict of keyword "
        "arguments), to count activations too. Forward and backward run on fake tensors, so only shapes and dtypes "
        "matter. The backward starts at the output, its loss, or the sum of its floating-point tensors",
    )
    option(
        "--expert-load",
        type=float,
        metavar="F",
        help="with --batch: tokens per expert, as a multiple of an even share (default: 1.5). Experts with a capacity "
        "are counted with the most tokens that all ranks may send",
    )
    option(
        "--optimizer", choices=OPTIMIZERS, help=f"count this optimizer's states: {', '.join(OPTIMIZERS)}", metavar="O"
    )
    option(
        "--optimizer-states",
        type=int,
        default=2,
        metavar="K",
        help="instead of --optimizer: states per parameter, each of its size (default: 2, like Adam)",
    )
    option(
        "--calibration",
        type=Path,
        metavar="FILE",
        help=f"results of `shardwise bench disk`, `host` and `links`, to estimate the time of offload (default: "
        f"{default_path()})",
    )
    option(
        "--time",
        action="store_true",
        help="with --batch: predict how long a step takes, and what the computation waits for",
    )
    option(
        "--hardware",
        metavar="NAME",
        help="with --time: the hardware, a name or a file such as my.yaml (default: this machine, if `shardwise "
        "calibrate` has measured it)",
    )
    option(
        "--checkpoint-every",
        type=float,
        metavar="SECONDS",
        help="with --time: seconds between two checkpoints, to say how many steps a restart makes again",
    )
    option(
        "--trace",
        type=Path,
        metavar="FILE",
        help="with --time: write the predicted timeline for chrome://tracing or ui.perfetto.dev",
    )
    option("--full", action="store_true", help="print the whole program, even if it is long")
    option("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the explanation and return 0. Raises `ShardwiseError` with the reason if that is impossible."""
    if args.list:
        _list(args)
        return 0
    found = explained(args)
    if args.trace is not None and found.time is not None:
        try:
            found.time.timeline.write(args.trace)
        except OSError as error:
            raise ConfigError(f"--trace {args.trace} cannot be written: {error.strerror}.") from error
    if args.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        print_explained(found, console_for_output(), full=args.full)
    return 0


def _list(args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps({name: one.known_from for name, one in PRESETS.items()}, indent=2))
    else:
        print_presets(console_for_output())


def explained(args: argparse.Namespace) -> Explanation:
    """What `args`, as `add_arguments` reads them, ask for; see `run`."""
    if args.plan is None:
        raise ConfigError(
            "Name a plan: a preset such as zero3, or a file. `shardwise explain --list` lists the presets."
        )
    plan = load_plan(args.plan, args.set)
    if plan.precision == "auto":
        plan = importlib.import_module("shardwise.optim.precision.auto_precision").settled_here(plan)
    known_from = preset(plan.preset).known_from
    _check_ranks(args)
    mesh = mesh_for(plan, args.world, args.per_host)
    check_islands(plan, mesh)
    table = table_for(plan, mesh)
    _check_what_goes_together(args, plan)
    hardware = _hardware(args) if args.time else None
    plan, subject, programs = _subject(args, plan, table, mesh, hardware)
    table = table_for(plan, mesh)
    calibration = read_calibration(args.calibration)
    found = explain(plan, mesh, table, known_from, subject, calibration, per_host=args.per_host or 0)
    if hardware is None:
        return found
    num_states, num_micro_batches = args.optimizer_states, plan.accumulate
    time = step_time(programs, hardware, mesh, num_micro_batches=num_micro_batches, num_states=num_states)
    time = replace(time, copies=found.state_copies)
    return replace(found, time=time, measured=_measured(plan, mesh, time), checkpoint_every=args.checkpoint_every)


def _check_ranks(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for numbers that cannot be."""
    if args.world is None or args.world < 1:
        given = "" if args.world is None else f", not {args.world}"
        raise ConfigError(f"The number of ranks is unknown. Give --world N, at least 1{given}.")
    check_num_ranks("--world", args.world)
    if args.optimizer_states < 0:
        raise ConfigError(f"--optimizer-states is {args.optimizer_states}; give 0 or more.")
    if args.per_host is not None and (args.per_host < 1 or args.world % args.per_host):
        raise ConfigError(
            f"--per-host is {args.per_host}, which does not divide --world {args.world}. Give a divisor: all "
            f"hosts have as many ranks."
        )


def _check_what_goes_together(args: argparse.Namespace, plan: Plan) -> None:
    """Raise `ConfigError` for options that need others, or files that are not there."""
    if args.batch is not None and args.model is None:
        raise ConfigError("--batch needs a model. Add --model FILE:CALLABLE.")
    if plan.budget != Budget() and args.model is None:
        raise ConfigError("The plan has a budget, which needs a model. Add --model FILE:CALLABLE.")
    if args.batch is None and args.time:
        raise ConfigError("--time needs a model and a batch. Add --model FILE:CALLABLE and --batch FILE:CALLABLE.")
    for option, value in (("--hardware", args.hardware), ("--trace", args.trace)):
        if value is not None and not args.time:
            raise ConfigError(f"{option} is for --time. Add --time.")
    if args.expert_load is not None and args.batch is None:
        raise ConfigError("--expert-load is for --batch, whose tokens it distributes. Add --batch FILE:CALLABLE.")
    if args.calibration is not None and not args.calibration.exists():
        raise ConfigError(f"--calibration {args.calibration}: there is no such file. `shardwise calibrate` makes one.")
    if args.checkpoint_every is not None and not (args.time and 0 < args.checkpoint_every < math.inf):
        raise ConfigError("--checkpoint-every takes seconds, more than 0, and --time, which says how long a step is.")


def _measured(plan: Plan, mesh: Mesh, time: StepTime) -> Difference | None:
    """How far the prediction is from what the plan's own run has measured, if that had the same preset and mesh."""
    folder = None if plan.run is None else folder_of(plan.run, "run")
    if folder is None or not (folder / RECORD).exists():
        return None
    view = read_run(folder)
    sizes = mesh.named_sizes
    if (view.last_start.get("plan", {}).get("preset"), view.mesh) != (plan.preset, sizes):
        return None
    line = {"seconds": time.step_seconds, "hardware": time.hardware.name, "parts": time.breakdown}
    return compared(line, view.seconds_per_step, next(iter(view.ranks()), {}))


def _hardware(args: argparse.Namespace) -> Hardware:
    """That on which the step is timed, with the ranks of a node."""
    if args.hardware is not None:
        found = hardware_named(args.hardware)
    else:  # needs torch, which takes a second to import
        speed = importlib.import_module("shardwise.fit.calibrate.speed")
        found = speed.calibrated_hardware(read_calibration(args.calibration), speed.this_machine())
    return found.with_ranks(
        args.per_host or (args.world if found.is_processor else min(args.world, found.ranks_per_node))
    )


def _subject(
    args: argparse.Namespace, plan: Plan, table: Table, mesh: Mesh, hardware: Hardware | None
) -> tuple[Plan, Subject, tuple[RankProgram, ...]]:
    """The given model, or example units without one; the plan after its budget was applied to that model; and the
    programs of its ranks, to be timed on `hardware`."""
    if args.model is None:
        examples = example_units(table, mesh, plan, args.optimizer)
        why = "whether fewer ranks can is known of a model (--model)" if shrinking_axes(mesh) else ""
        return plan, Subject(examples, (), args.optimizer_states, args.optimizer, why_no_smaller=why), ()
    model_file = importlib.import_module("shardwise.cli.model_file")  # needs torch, which takes a second to import
    model = model_file.build_model(args.model)
    converted = model_file.converted(model, plan)
    per_host = args.per_host or args.world
    fitted = model_file.within_budget_of(model, plan, mesh, args.optimizer, args.optimizer_states, per_host)
    ranks = model_file.ranks_on(per_host, hardware)
    optimizer = (args.optimizer, args.optimizer_states)
    smaller = model_file.smaller_meshes_of(model, plan, mesh, *optimizer, ranks)
    room = model_file.room_after_a_loss(model, fitted.plan, smaller, mesh, *optimizer, ranks)
    plan, table = fitted.plan, table_for(fitted.plan, mesh)  # in the model's own precision, if the plan says none
    specs, sizes = model_file.units_of(args.model, model, plan, mesh, args.optimizer)
    stages = model_file.stages_of(model, plan, mesh)
    experts, row_numel = model_file.experts_of(model, plan, mesh)
    subject = Subject(specs, sizes, args.optimizer_states, args.optimizer, stages=stages)
    pipeline_rank, stages_of_units = model_file.stages_by_unit(model, plan, mesh)
    subject = replace(subject, experts=experts, row_numel=row_numel, budget=fitted.summary, conversions=str(converted))
    subject = replace(subject, pipeline_rank=pipeline_rank, stages_of_units=stages_of_units)
    subject = replace(subject, smaller=smaller.meshes, why_no_smaller=smaller.why_none, room_after_a_loss=room)
    if args.batch is None:
        return plan, subject, ()
    if hardware is not None and len(smaller.meshes) > 1:  # before the model is split
        with suppress(ConfigError, ModelError):  # as in a job, which takes the largest then
            found, seconds, words = model_file.fastest_of(
                smaller, model, args.batch, plan, mesh, converted, args.optimizer, hardware=hardware
            )
            subject = replace(subject, smaller=found, smaller_times=words, smaller_seconds=seconds)
    load = model_file.expert_load_of(args.expert_load)
    if hardware is not None:  # before the model is split
        clocks = (hardware,) if args.hardware is not None else (model_file.clock_here(), hardware)
        stages += model_file.stage_times(model, args.batch, plan, mesh, converted, clocks)
    foreseen = model_file.activations_of(
        model, args.batch, plan, mesh, converted, load, args.optimizer, hardware=hardware
    )
    found = foreseen.counted
    counted = replace(subject, activations=found.activations, batch=args.batch, expert_load=load)
    counted = replace(counted, activation_bytes=found.sent_bytes, tied_bytes=found.tied_bytes)
    counted = replace(counted, stages=stages)
    return plan, counted, foreseen.programs
