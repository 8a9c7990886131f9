"""One rank of `planner`: a job of its own for one plan, timed and weighed."""

from __future__ import annotations

import argparse
import json
import threading
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

SMAPS = Path("/proc/self/smaps_rollup")
EVERY_SECONDS = 0.01


class PeakShare(threading.Thread):
    """By how much this process's proportional set size grows, sampled until `finish`: pages that ranks share count for
    each in part, so that those of a host add up to what is taken of it. Resident memory counts a peer's pages, too,
    once they are read."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._baseline = _share_bytes()
        self._ended = threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            self.peak_bytes = max(self.peak_bytes, _share_bytes() - self._baseline)

    def finish(self) -> None:
        self._ended.set()
        self.join()


def _share_bytes() -> int:
    lines = SMAPS.read_text().splitlines() if SMAPS.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


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
            share = PeakShare()
            share.start()
            torch.manual_seed(0)
            model = MODELS[args.model].build()
            plan = json.loads(args.plan)
            engine = shard(model, plan, optimizer=adamw(model), world=world)
            rows = rows_of(MODELS[args.model], plan.get("accumulate", 1), args.rows)
            if SEQUENCE_AXIS in plan["mesh"]:
                rows = engine.split_sequence(rows)
            seconds = []
            for number in range(args.warm + args.steps):
                if number == args.warm:
                    share.finish()  # reading it takes time of the steps that are timed
                world.barrier()
                started = time.perf_counter()
                engine.train_step(rows)
                world.barrier()
                seconds.append(time.perf_counter() - started)
        figures["seconds"] = median(seconds[args.warm :])
        figures["peak_bytes"] = memory.peak_bytes
        figures["share_bytes"] = share.peak_bytes


if __name__ == "__main__":
    main()
