"""`shardwise simulate`: a job of weeks in seconds, with failures, checkpoints, restarts and survival."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

EXAMPLES = """examples:
  shardwise simulate zero3 --world 1024 --days 30 --step-seconds 5 --checkpoint-bytes 1T --storage 50G
  shardwise simulate plan.yaml --world 16384 --days 54 --step-seconds 5 --checkpoint-bytes 5.7T --storage 2T \\
      --failures llama3-405b --picture goodput.svg
  shardwise simulate zero3 --world 512 --days 30 --model train.py:build --batch train.py:batch --hardware h100-sxm
  shardwise simulate ddp --world 64 --days 7 --step-seconds 1 --rank-hours 5000 --recovery buddy --runs 20"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("plan", metavar="PLAN", help="a preset, or a .yaml, .toml or .json file: decides what survives a lost rank")
    option("--world", type=int, required=True, metavar="N", help="number of ranks")
    option("--per-host", type=int, default=8, metavar="N", help="ranks on each host (default: 8)")
    option("--days", type=float, required=True, metavar="D", help="how long the job runs")
    option("--step-seconds", type=float, metavar="S", help="seconds of one step of all ranks")
    option(
        "--model",
        metavar="FILE:CALLABLE",
        help="instead, with --batch and --hardware: a callable that builds the model, whose step is predicted as by "
        "`shardwise explain --time`",
    )
    option("--batch", metavar="FILE:CALLABLE", help="with --model: a callable that returns a micro-batch")
    option("--hardware", metavar="NAME", help="with --model: such as h100-sxm, or a file such as my.yaml")
    option("--optimizer", metavar="O", help="with --model: the optimizer, such as adamw")
    option("--set", action="append", default=[], metavar="a.b=c", help="change one key of the plan; repeatable")
    option(
        "--checkpoint-bytes",
        metavar="B",
        help="of a checkpoint, such as 5.7T: 12 for each parameter with Adam (default: those of --model)",
    )
    option("--storage", metavar="B", help="bytes that all ranks together write or read in a second, such as 100G")
    option(
        "--checkpoint-stall",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds that a checkpoint adds to a step; the rest is written behind the following ones (default: 0)",
    )
    option("--checkpoint-every", default="auto", metavar="S", help="seconds, or auto: what costs least (default)")
    option("--failures", metavar="RATES", help="llama3-405b (default), opt-175b, or a file like theirs")
    option("--rank-hours", type=float, metavar="H", help="instead: a rank ends after so many hours on average")
    option(
        "--recovery",
        choices=("plan", "restart", "host", "buddy", "copies"),
        default="plan",
        help="when ranks are lost: as the plan says (default), or as if all restarted, or the others continued from "
        "images on their host, from a buddy's on another, or because all state is on several hosts anyway",
    )
    option("--device", choices=("gpu", "cpu"), default="gpu", help="what the plan's ranks compute on (default: gpu)")
    option(
        "--restart-seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="until all ranks train again, without reading the checkpoint (default: 300)",
    )
    option(
        "--regroup-seconds",
        type=float,
        default=1.0,
        metavar="S",
        help="until the others have a new world, when a rank is lost or joins (default: 1)",
    )
    option("--join-seconds", type=float, default=60.0, metavar="S", help="until a replacement can join (default: 60)")
    option("--least", type=int, metavar="N", help="fewer ranks do not train (default: all if ranks restart, else 1)")
    option("--spares", type=int, metavar="N", help="ranks that wait to replace others (default: always one)")
    option("--slow-hosts", metavar="R:F:H", help="a host becomes slow R times an hour, by the factor F, for H hours")
    option("--seed", type=int, default=0, metavar="N", help="of the first run (default: 0)")
    option("--runs", type=int, default=5, metavar="N", help="runs with consecutive seeds (default: 5)")
    option("--picture", type=Path, metavar="FILE", help="draw where the time goes, as .svg")
    option("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what the job would do and return 0. Raises `ShardwiseError` with the reason if that is impossible."""
    status: int = importlib.import_module("shardwise.cli.simulation").run(args)  # reads plans, which --help does not
    return status
