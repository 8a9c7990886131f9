"""A rank of a picture's run: `python -m benchmarks.pictures.rank FORM PRESET --out FOLDER`, by `run_ranks`.

Ranks send messages here instead of sharing memory, as ranks of several hosts do: then what is gathered ahead moves
while a rank computes, and every byte that a rank holds is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path

import torch
from torch import Tensor

import shardwise as sw
from benchmarks.figures import Figures, write_figures
from benchmarks.model import batch_of, build_model
from benchmarks.sizes import Size

SIZE = Size(num_blocks=6, dim=512, vocab=4096, seq=256, micro_batch=4)
WARM_STEPS, TIMED_STEPS = 3, 6
SAMPLE_SECONDS = 0.001
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class Sampler(threading.Thread):
    """Reads how much memory this process has, a thousand times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, int]] = []
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            self.samples.append((time.perf_counter(), resident_bytes()))

    def end(self) -> None:
        self._is_over.set()
        self.join()


def timeline(figures: Figures, preset: str, folder: Path) -> None:
    """The events of the quickest of a few steps, as `engine.timeline` writes them: others had company on their core."""
    trace = folder / "timeline.json"
    taken: list[tuple[float, str]] = []
    with sw.World.join(shares_memory=False) as world, _engine(world, preset) as engine:
        tokens = batch_of(SIZE, world.rank)
        _warm_up(engine, tokens)
        for _ in range(TIMED_STEPS):
            start = time.perf_counter()
            with engine.timeline(trace):
                engine.backward(engine(tokens))
                engine.step()
            taken.append((time.perf_counter() - start, trace.read_text() if world.rank == 0 else ""))
    figures["events"] = json.loads(min(taken)[1])["traceEvents"] if world.rank == 0 else "those of rank 0"


def memory(figures: Figures, preset: str, _folder: Path) -> None:
    """What the quickest of a few steps holds, in bytes beyond those before the model was built, and when its phases
    end."""
    taken: list[tuple[float, list[float], list[tuple[float, int]]]] = []
    with sw.World.join(shares_memory=False) as world:
        _import_everything(world)
        before = resident_bytes()
        with _engine(world, preset) as engine:
            tokens = batch_of(SIZE, world.rank)
            _warm_up(engine, tokens)
            for _ in range(TIMED_STEPS):
                world.barrier()
                sampler = Sampler()
                sampler.start()
                marks = [time.perf_counter()]
                loss = engine(tokens)
                marks.append(time.perf_counter())
                engine.backward(loss)
                marks.append(time.perf_counter())
                engine.step()
                marks.append(time.perf_counter())
                del loss
                sampler.end()
                samples = [(at - marks[0], held - before) for at, held in sampler.samples if at <= marks[-1]]
                taken.append((marks[-1] - marks[0], [mark - marks[0] for mark in marks], samples))
            figures["promised"] = engine.rehearse(tokens).total  # last: it imports much
    _, figures["marks"], figures["samples"] = min(taken)


def _import_everything(world: sw.World) -> None:
    """What the first optimizer and the first engine of a process import is not a model's memory."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    with sw.shard(model, {"preset": "zero3", "precision": "bf16"}, optimizer=optimizer, world=world) as engine:
        _warm_up(engine, torch.ones(2, 4))


def _warm_up(engine: sw.Engine, batch: Tensor) -> None:
    """The first step records the order of units, and makes the states."""
    for _ in range(WARM_STEPS):
        engine.backward(engine(batch).mean())
        engine.step()


def _engine(world: sw.World, preset: str) -> sw.Engine:
    model = build_model(SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return sw.shard(model, {"preset": preset, "precision": "bf16"}, optimizer=optimizer, world=world)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("form", choices=("timeline", "memory"))
    parser.add_argument("preset")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with write_figures(args.out) as found:
        {"timeline": timeline, "memory": memory}[args.form](found, args.preset, args.out)
