"""One rank of `compile`: the plain model, which each rank trains alone on its own tokens, or `zero3` on both."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._dynamo.utils import counters

from benchmarks.compiled import BACKEND, ENGINES
from benchmarks.engines import Build, Step, shardwise, single
from benchmarks.figures import write_figures
from benchmarks.model import GPT, batch_of, build_model
from benchmarks.sizes import SIZES, Race
from benchmarks.worker import time_steps

# The first step of an engine is recorded, the second compiles, and the third may find that a shape varies.
NUM_WARM = 3


def single_compiled(build: Build, race: Race) -> Step:
    """The whole model in one graph, its loss included."""

    def compiled() -> GPT:
        model = build()
        model.compile(backend=BACKEND)
        return model

    dist.init_process_group(race.backend)
    return single(compiled, race)


def single_beside(build: Build, race: Race) -> Step:
    """As `single`, but the ranks take each step together, so that both have their core to themselves alike."""
    dist.init_process_group(race.backend)
    return single(build, race)


MAKERS: dict[str, Callable[[Build, Race], Step]] = dict(
    zip(
        ENGINES,
        (
            single_beside,
            single_compiled,
            partial(shardwise, plan="zero3"),
            partial(shardwise, plan="zero3", compile=BACKEND),
        ),
        strict=True,
    )
)


def measure(engine: str, race: Race, steps: int) -> dict[str, Any]:
    """Seconds of each step, the loss after the last, and what torch compiled."""
    start = time.perf_counter()
    step = MAKERS[engine](lambda: build_model(race.size), race)
    batch = batch_of(race.size, int(os.environ["RANK"]))
    for _ in range(NUM_WARM):
        step(batch)
    warm_seconds = time.perf_counter() - start
    timed = time_steps(step, batch, 1, steps)
    return {
        "step_seconds": timed.step_seconds,
        "cpu_seconds": timed.cpu_seconds,
        "warm_seconds": warm_seconds,
        "loss": timed.loss,
        "num_graphs": counters["stats"]["unique_graphs"],
        "num_graph_breaks": sum(counters["graph_break"].values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with write_figures(args.out) as figures:
        figures.update(measure(args.engine, Race(SIZES[args.size], "fp32"), args.steps))
    dist.barrier()  # nobody leaves while another still writes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
