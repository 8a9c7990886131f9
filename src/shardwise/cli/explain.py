"""`shardwise explain`: what a plan means on a number of ranks, before any of them is started."""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from shardwise.calibration import default_path, read_calibration
from shardwise.cli.explanation import Explanation, Subject, as_json, explain, stand_in
from shardwise.cli.print_explanation import print_explained, print_presets
from shardwise.config import Budget, Plan, load_plan
from shardwise.errors import ConfigError
from shardwise.mesh import Mesh
from shardwise.placement import PRESETS, Table, mesh_for, preset, table_for
from shardwise.program import OPTIMIZERS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", nargs="?", metavar="PLAN", help="a preset, or a .yaml, .toml or .json file")
    parser.add_argument("--world", type=int, metavar="N", help="the number of ranks")
    parser.add_argument(
        "--per-host",
        type=int,
        metavar="N",
        help="ranks of each host, to print what leaves one, and what of its memory they share (default: all on one)",
    )
    parser.add_argument(
        "--model", metavar="FILE:CALLABLE", help="what builds the model, without arguments; no memory is used for it"
    )
    parser.add_argument(
        "--batch",
        metavar="FILE:CALLABLE",
        help="what returns what the model is called with, without arguments: a tensor, a tuple of arguments, or a dict "
        "of keyword arguments; only shapes and dtypes count. A forward and backward are rehearsed on it, and their "
        "activations counted. What is sent back is the model's output, or its loss, or else the sum of its "
        "floating-point tensors",
    )
    parser.add_argument(
        "--expert-load",
        type=float,
        metavar="F",
        help="with --batch: how many times an even share of the tokens experts get (default: 1.5); where they have a "
        "capacity, it is as many as all ranks may send",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="change one value of the plan; may be repeated"
    )
    parser.add_argument(
        "--optimizer-states",
        type=int,
        default=2,
        metavar="K",
        help="tensors of a parameter's size that the optimizer keeps (default: 2, as Adam)",
    )
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, help="the optimizer, instead of a number of states", metavar="NAME"
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help=f"what `shardwise bench disk`, `host` and `links` have measured, for the seconds that tiers take "
        f"(default: {default_path()})",
    )
    parser.add_argument("--full", action="store_true", help="print all of a long program")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.add_argument("--list", action="store_true", help="print all presets, and where they are known from")


def run(args: argparse.Namespace) -> int:
    """Print what `args` ask for, and return 0. Raises `ShardwiseError` with the reason if that is impossible."""
    if args.list:
        _list(args)
        return 0
    explained = _explained(args)
    if args.json:
        print(json.dumps(as_json(explained), indent=2))
    else:
        print_explained(explained, Console(), full=args.full)
    return 0


def _list(args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps({name: one.known_from for name, one in PRESETS.items()}, indent=2))
    else:
        print_presets(Console())


def _explained(args: argparse.Namespace) -> Explanation:
    if args.plan is None:
        raise ConfigError(
            "Name a plan: a preset such as zero3, or a file. shardwise explain --list prints the presets."
        )
    plan = load_plan(args.plan, args.set)
    known_from = preset(plan.preset).known_from
    if args.world is None or args.world < 1:
        given = "" if args.world is None else f", not {args.world}"
        raise ConfigError(f"For how many ranks? Give --world N of at least 1{given}.")
    if args.optimizer_states < 0:
        raise ConfigError(f"--optimizer-states is {args.optimizer_states}; give 0 or more.")
    if args.per_host is not None and (args.per_host < 1 or args.world % args.per_host):
        raise ConfigError(f"--per-host is {args.per_host}, which does not divide --world {args.world}.")
    mesh = mesh_for(plan, args.world, args.per_host)
    table = table_for(plan, mesh)
    if args.batch is not None and args.model is None:
        raise ConfigError("--batch needs a model: give --model FILE:CALLABLE too.")
    if plan.budget != Budget() and args.model is None:
        raise ConfigError("budget chooses among the units of a model: give --model FILE:CALLABLE too.")
    plan, subject = _subject(args, plan, table, mesh)
    calibration = read_calibration(args.calibration)
    return explain(plan, mesh, table, known_from, subject, calibration, per_host=args.per_host or 0)


def _subject(args: argparse.Namespace, plan: Plan, table: Table, mesh: Mesh) -> tuple[Plan, Subject]:
    """The given model, or stand-in units without one; and the plan after its budget was applied to that model."""
    if args.model is None:
        return plan, Subject(stand_in(table, mesh, plan, args.optimizer), (), args.optimizer_states, args.optimizer)
    model_file = importlib.import_module("shardwise.cli.model_file")  # needs torch, which takes a second to import
    model = model_file.build_model(args.model)
    per_host = args.per_host or args.world
    fitted = model_file.within_budget_of(model, plan, mesh, args.optimizer, args.optimizer_states, per_host)
    plan = fitted.plan
    specs, sizes = model_file.units_of(args.model, model, plan, mesh, args.optimizer)
    stages = model_file.stages_of(model, plan, mesh)
    experts, row_numel = model_file.experts_of(model, plan, mesh)
    subject = Subject(specs, sizes, args.optimizer_states, args.optimizer, stages=stages)
    place, stages_of_units = model_file.places_of(model, plan, mesh)
    subject = replace(subject, experts=experts, row_numel=row_numel, budget=fitted.said)
    subject = replace(subject, pipeline_rank=place, stages_of_units=stages_of_units)
    if args.batch is None:
        return plan, subject
    given = args.expert_load
    if given is not None and not given >= 1:
        raise ConfigError(f"--expert-load is {given}; give how many times an even share, at least 1.")
    load = model_file.EXPERT_LOAD if given is None else given
    activations, sent_bytes = model_file.activations_of(model, args.batch, plan, table, mesh, load)
    counted = replace(subject, activations=activations, batch=args.batch, activation_bytes=sent_bytes)
    return plan, replace(counted, expert_load=load)
