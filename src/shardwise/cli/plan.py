"""`shardwise plan`: chooses a plan for a model on given hardware, and says why."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

EXAMPLES = """examples:
  shardwise plan --model train.py:build --batch train.py:batch --world 64 --hardware h100-sxm
  shardwise plan --model train.py:build --batch train.py:batch --world 8 --hardware a100-40 --rows 512 \\
      --optimizer adamw --out plan.yaml --picture front.svg
  shardwise plan base.yaml --model train.py:build --batch train.py:batch --world 4 --hardware cpu --measure 3"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option(
        "base",
        nargs="?",
        metavar="PLAN",
        help="what all candidates have in common: a .yaml, .toml or .json file. If it has a mesh, that is kept",
    )
    option("--model", required=True, metavar="FILE:CALLABLE", help="a callable without arguments that builds the model")
    option(
        "--batch",
        required=True,
        metavar="FILE:CALLABLE",
        help="a callable that returns a micro-batch, as the model is called with it; the search varies its samples",
    )
    option("--world", type=int, required=True, metavar="N", help="number of ranks")
    option(
        "--hardware",
        metavar="NAME",
        help="such as h100-sxm, or a file such as my.yaml (default: this machine, as `shardwise calibrate` found it)",
    )
    option("--per-host", type=int, metavar="N", help="ranks on each host (default: as the hardware has)")
    option("--rows", type=int, metavar="N", help="samples of a step on all ranks (default: those of --batch on each)")
    option(
        "--optimizer", default="adamw", metavar="O", help="the optimizer, by its name in lower case (default: adamw)"
    )
    option(
        "--objective",
        choices=("time", "memory", "cost"),
        default="time",
        help="cost: the fewest device-seconds, also on fewer ranks (default: time)",
    )
    option("--device-memory", metavar="B", help="bytes that a device may hold (default: 0.92 of the hardware's)")
    option("--host-memory", metavar="B", help="bytes of a host for all of its ranks (default: 0.9 of the hardware's)")
    option(
        "--axes",
        default="tp,pp",
        metavar="A,B",
        help="axes that may split the model, of tp, pp, sp and ep; or none (default: tp,pp)",
    )
    option("--micro-batch", metavar="N,M", help="samples of a micro-batch that may be tried (default: all that divide)")
    option(
        "--precisions",
        metavar="D,E",
        help="dtypes of forward and backward that may be tried, such as fp32,bf16 (default: search.precisions of PLAN, "
        "or its precision, or the model's own)",
    )
    option(
        "--wires",
        metavar="D,E",
        help="also try to send gradients between hosts as int8 or int4, or in another dtype, which rounds them; "
        "param=int8: parameters (default: search.wires of PLAN)",
    )
    option("--set", action="append", default=[], metavar="a.b=c", help="change one key of PLAN; repeatable")
    option("--most", type=int, default=60, metavar="N", help="candidates that are evaluated at most (default: 60)")
    option("--out", type=Path, metavar="FILE", help="write the best plan, as .yaml or .json")
    option("--picture", type=Path, metavar="FILE", help="draw time and memory of the candidates, as .svg")
    option(
        "--measure",
        type=int,
        default=0,
        metavar="N",
        help="run the best N for a few steps on this machine, with --world ranks, and take the fastest",
    )
    option("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what was found and return 0. Raises `ShardwiseError` with the reason if nothing fits."""
    status: int = importlib.import_module("shardwise.cli.planning").run(args)  # needs torch, which --help does not
    return status
