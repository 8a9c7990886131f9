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

SMAPS, STATUS = Path("/proc/self/smaps_rollup"), Path("/proc/self/status")
EVERY_SECONDS = 0.01


class PeakShare(threading.Thread):
    """By how much this process's share of its host's memory grows, sampled until `finish`: pages that ranks share count
    for each in part (the proportional set size), so that those of a host add up to what is taken of it. Resident memory
    counts a peer's pages, too, once they are read.

    Pages of files, nearly all of them code of libraries, count as if `num_ranks` alone had read them. Their own
    proportional size was 3 to 5 MiB of 155 beside other processes with torch, and 22 without.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(daemon=True)
        self._num_ranks = num_ranks
        self._baseline = _share_bytes(num_ranks)
        self._ended = threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            self.peak_bytes = max(self.peak_bytes, _share_bytes(self._num_ranks) - self._baseline)

    def finish(self) -> None:
        self._ended.set()
        self.join()


def _share_bytes(num_ranks: int) -> int:
    share, of_files = _rows(SMAPS), _rows(STATUS)
    return share.get("Pss", 0) - share.get("Pss_File", 0) + of_files.get("RssFile", 0) // num_ranks


def _rows(file: Path) -> dict[str, int]:
    """Bytes by name, of the rows of a file of the kernel's that have them in kB."""
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}


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
            share = PeakShare(world.size)
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
            if not args.steps:
                share.finish()
        if args.steps:
            figures["seconds"] = median(seconds[args.warm :])
        figures["peak_bytes"] = memory.peak_bytes
        figures["share_bytes"] = share.peak_bytes


if __name__ == "__main__":
    main()
