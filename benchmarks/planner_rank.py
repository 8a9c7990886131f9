"""One rank of `planner`: a job of its own for one plan, timed and weighed."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.engines import adamw
from benchmarks.figures import write_figures
from benchmarks.planner_models import MODELS, rows_of
from benchmarks.worker import warm_up
from shardwise import World, shard
from shardwise.plan.mesh import SEQUENCE_AXIS
from shardwise.system.process_memory import PeakOverBaseline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with write_figures(args.out) as figures, World.join() as world:
        warm_up(torch.device("cpu"))
        with PeakOverBaseline() as memory:
            torch.manual_seed(0)
            model = MODELS[args.model].build()
            plan = json.loads(args.plan)
            engine = shard(model, plan, optimizer=adamw(model), world=world)
            rows = rows_of(MODELS[args.model], plan.get("accumulate", 1), args.rows)
            if SEQUENCE_AXIS in plan["mesh"]:
                rows = engine.split_sequence(rows)
            seconds = []
            for _ in range(args.warm + args.steps):
                world.barrier()
                started = time.perf_counter()
                engine.train_step(rows)
                world.barrier()
                seconds.append(time.perf_counter() - started)
        figures["seconds"] = median(seconds[args.warm :])
        figures["peak_bytes"] = memory.peak_bytes


if __name__ == "__main__":
    main()
