"""One rank of `checkpoint`: ours, torch's and DeepSpeed's, `dd` beside them, in turns on the same disk.

What is compared: a GPT-shaped model in fp32 with Adam's two moments, spread over the ranks by ZeRO-3; DeepSpeed's
ZeRO-2 too. Every writer's bytes are on the disk when its clock stops, but for DeepSpeed's, which does not flush: its
flush is a figure of its own. Before anything is loaded, its files are put out of the page cache, because a job that
starts again finds them on the disk. What the loading itself costs is told by loads over a state that is there, with the
files in the page cache; by CPU time too, in which the disk and the work of others on the machine do not show. Of loads
over a state ours and DCP's come first by turns: memory that somebody has just given back is cheaper than any other.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import logging
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from benchmarks.figures import write_figures

MIB = 2**20
WIDTH = 512
STATES = 3  # a parameter in fp32 and Adam's two moments
STEPS_BESIDE = 8  # training steps while a background save writes, and after it
DEEPSPEED_STAGES = (3, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


def build(mib: int) -> nn.Module:
    block_bytes = STATES * 4 * sum(param.numel() for param in Block().parameters())
    return nn.Sequential(*(Block() for _ in range(max(1, mib * MIB // block_bytes))))


class Clock:
    """Seconds by name, each from a moment at which all ranks were ready until the last one was done; and seconds of CPU
    time, of all ranks together."""

    def __init__(self, world: sw.World) -> None:
        self.world = world
        self.seconds: dict[str, list[float]] = {}
        self.cpu_seconds: dict[str, list[float]] = {}

    def time(self, name: str, work: Callable[[], object]) -> None:
        self.world.barrier()
        started, cpu_started = time.perf_counter(), time.process_time()
        work()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        self.note(name, seconds)
        every = [float(told) for told in self.world.exchange(repr(cpu_seconds).encode())]
        self.cpu_seconds.setdefault(name, []).append(sum(every))

    def note(self, name: str, seconds: float) -> None:
        """The longest of all ranks. All ranks call."""
        slowest = max(float(told) for told in self.world.exchange(repr(seconds).encode()))
        self.seconds.setdefault(name, []).append(slowest)


def measure(clock: Clock, folder: Path, mib: int, turns: int) -> dict[str, int]:
    """Everything in turns, so that a disk that is slow for a while is slow for all. Returns the bytes on disk."""
    world, model = clock.world, build(mib)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    num_bytes: dict[str, int] = {}
    with sw.shard(model, "zero3", optimizer=optimizer, world=world) as engine:
        for _ in range(3):
            step_of(engine, engine)
        group = dist.new_group(backend="gloo") if world.size > 1 else None
        peers = {f"deepspeed-{stage}": deepspeed(mib, stage) for stage in DEEPSPEED_STAGES if has_deepspeed()}
        for turn in range(turns):
            path = folder / f"turn-{turn}"
            num_bytes["shardwise"] = ours(clock, engine, path)
            if world.size > 1:
                num_bytes["dcp"] = torchs(clock, engine, path / "dcp", group)
            loads_in_turns(clock, engine, path, ours_first=turn % 2 == 0)
            forget(world, path / "sync")
            optimizer.state.clear()  # as when a job starts
            clock.time("load", partial(engine.resume, path / "sync"))
            for name, peer in peers.items():
                num_bytes[name] = theirs(clock, name, peer, path / name)
            world.barrier()
            if world.rank == 0:
                shutil.rmtree(path)
    return num_bytes


def step_of(forward: Any, engine: Any) -> float:
    started = time.perf_counter()
    engine.backward(forward(torch.ones(1, 8, WIDTH)).square().mean())
    engine.step()
    return time.perf_counter() - started


def ours(clock: Clock, engine: sw.Engine, path: Path) -> int:
    clock.time("sync", lambda: engine.save(path / "sync"))
    num_bytes = size_of(path / "sync")
    clock.time("dd", lambda: dd(path / "dd", num_bytes) if engine.world.rank == 0 else None)
    step_of(engine, engine)  # a save follows one
    clock.time("stall", lambda: engine.save(path / "async", wait=False))
    steps = [step_of(engine, engine) for _ in range(STEPS_BESIDE)]
    clock.time("rest of the background save", engine.wait_for_save)
    clock.note("first step beside it", steps[0])
    clock.note("step", statistics.median(step_of(engine, engine) for _ in range(STEPS_BESIDE)))
    return num_bytes


def dd(path: Path, num_bytes: int) -> None:
    """The same number of bytes as fast as the disk takes them from one writer."""
    blocks = str(-(-num_bytes // (16 * MIB)))
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=16M", f"count={blocks}", "oflag=direct", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True)


def torchs(clock: Clock, engine: sw.Engine, path: Path, group: Any) -> int:
    """https://docs.pytorch.org/docs/stable/distributed.checkpoint.html; `sync_files` is its default."""
    dcp, state = torchs_dcp(), dcp_state(engine)

    def writer(name: str) -> Any:
        return dcp.FileSystemWriter(path / name, sync_files=True)

    clock.time("dcp sync", lambda: dcp.save(state, storage_writer=writer("sync")))
    step_of(engine, engine)
    under_way: list[Any] = []
    clock.time(
        "dcp stall",
        lambda: under_way.append(dcp.async_save(state, storage_writer=writer("async"), process_group=group)),
    )
    clock.time("rest of dcp's background save", under_way[0].result)
    return size_of(path / "sync")


def loads_in_turns(clock: Clock, engine: sw.Engine, path: Path, *, ours_first: bool) -> None:
    """Loads over a state that is there, from the disk, then from files that have just been read."""
    dcp, state = torchs_dcp(), dcp_state(engine)
    loads: dict[str, tuple[Path, Callable[[], object]]] = {
        "load over a state": (path / "sync", lambda: engine.resume(path / "sync")),
    }
    if engine.world.size > 1:
        theirs = path / "dcp" / "sync"
        loads["dcp load"] = theirs, lambda: dcp.load(state, checkpoint_id=theirs)
    for name in loads if ours_first else reversed(loads):
        folder, load = loads[name]
        forget(engine.world, folder)
        clock.time(name, load)
    for name in loads if ours_first else reversed(loads):
        clock.time(f"{name}, warm", loads[name][1])


def torchs_dcp() -> Any:
    return importlib.import_module("torch.distributed.checkpoint")  # which does not say what it exports


def dcp_state(engine: sw.Engine) -> dict[str, torch.Tensor]:
    """This rank's pieces under names of its own: what torch's planner has least to do with."""
    optimizer = engine._sharded.require_optimizer()
    state = {}
    for number, piece in enumerate(optimizer.pieces):
        state[f"{engine.world.rank}/{number}"] = piece.tensor.detach()
        for key, value in optimizer.state_of(piece).items():
            state[f"{engine.world.rank}/{number}/{key}"] = value
    return state


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def deepspeed(mib: int, stage: int) -> Any:
    """An engine of DeepSpeed's that has taken a step; settings as in `engines.py`."""
    import deepspeed as ds

    ds.ops.__compatible_ops__ = {}  # see `engines.deepspeed`
    ds.init_distributed("gloo", verbose=False)
    bucket = sum(param.numel() for param in Block().parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
        },
        "zero_allow_untested_optimizer": True,
    }
    model = build(mib)
    engine, *_ = ds.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), config=config)
    step_of(engine, engine)
    return engine


def theirs(clock: Clock, name: str, engine: Any, path: Path) -> int:
    """https://www.deepspeed.ai/getting-started/#model-checkpointing"""
    clock.time(f"{name} sync", lambda: engine.save_checkpoint(path, tag="one"))
    clock.time(f"{name} flush", lambda: flush(path) if clock.world.rank == 0 else None)
    forget(clock.world, path)
    clock.time(f"{name} load", lambda: engine.load_checkpoint(path, tag="one"))
    return size_of(path)


def flush(folder: Path) -> None:
    for file in files_in(folder):
        with open_file(file) as handle:
            os.fsync(handle)


def forget(world: sw.World, folder: Path) -> None:
    """Put the files of `folder` out of the page cache. All ranks call."""
    world.barrier()
    if world.rank == 0:
        for file in files_in(folder):
            with open_file(file) as handle:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    world.barrier()


@contextmanager
def open_file(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_in(folder))


@contextmanager
def shared_folder(world: sw.World, where: str) -> Iterator[Path]:
    """A temporary folder that all ranks share; rank 0 makes it and removes it."""
    made = tempfile.mkdtemp(prefix="shardwise-", dir=where) if world.rank == 0 else ""
    path = Path(world.exchange(made.encode())[0].decode())
    try:
        yield path
        world.barrier()
    finally:
        if world.rank == 0:
            shutil.rmtree(path, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with write_figures(args.out) as figures, sw.World.join() as world:
        clock = Clock(world)
        with shared_folder(world, args.folder) as folder, contextlib.redirect_stdout(None):
            figures["bytes"] = measure(clock, folder, args.mib, args.turns)
        figures["seconds"], figures["cpu_seconds"] = clock.seconds, clock.cpu_seconds


if __name__ == "__main__":
    main()
