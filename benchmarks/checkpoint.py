"""What a checkpoint costs: the stall of a background save, bytes per second beside `dd`, and torch's own beside ours.

    shardwise launch --nproc 2 benchmarks/checkpoint.py --out checkpoint.json

Trains a GPT-shaped model of `--mib` MiB of state (parameters and Adam's moments) with ZeRO-3 for a few steps, saves it
in turns with everything it is compared with, and prints the medians. All figures are of one run on one disk.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw

MIB = 2**20
WIDTH = 512
STATES = 3  # a parameter in fp32 and Adam's two moments
CHILLED = 8  # training steps while a background save writes


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
        return x + self.down(nn.functional.gelu(self.up(x)))


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with sw.World.join() as world:
        block_bytes = STATES * 4 * sum(param.numel() for param in Block().parameters())
        model = nn.Sequential(*(Block() for _ in range(max(1, args.mib * MIB // block_bytes))))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        with (
            sw.shard(model, "zero3", optimizer=optimizer, world=world) as engine,
            folder_for(world, args.folder) as folder,
        ):
            for _ in range(3):
                step(engine)
            figures = measure(engine, optimizer, folder, args)
        if world.rank == 0:
            print(report(figures))
            if args.out:
                Path(args.out).write_text(json.dumps(figures, indent=1) + "\n")


def step(engine: sw.Engine) -> float:
    started = time.perf_counter()
    engine.backward(engine(torch.ones(1, 8, WIDTH)).square().mean())
    engine.step()
    return time.perf_counter() - started


def measure(
    engine: sw.Engine, optimizer: torch.optim.Optimizer, folder: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Everything in turns, so that a disk that is slow for a while is slow for all; the first turn warms up."""
    seconds: dict[str, list[float]] = {}
    num_bytes: dict[str, int] = {}
    local, remote = engine.world.rank, engine.world.size

    def timed(name: str, work: Callable[[], object]) -> None:
        engine.world.barrier()
        started = time.perf_counter()
        work()
        engine.world.barrier()
        seconds.setdefault(name, []).append(time.perf_counter() - started)

    for turn in range(args.turns + 1):
        path = folder / f"turn-{turn}"
        timed("sync", lambda: engine.save(path / "sync"))
        num_bytes["shardwise"] = size_of(path / "sync")
        timed("dd", lambda: local == 0 and dd(path / "dd", num_bytes["shardwise"]))
        timed("stall", lambda: engine.save(path / "async", wait=False))
        during = [step(engine) for _ in range(CHILLED)]
        timed("rest of the background save", engine.wait_for_save)
        quiet = [step(engine) for _ in range(CHILLED)]
        seconds.setdefault("step during", []).append(statistics.median(during))
        seconds.setdefault("step quiet", []).append(statistics.median(quiet))
        timed("resume", lambda: engine.resume(path / "sync"))
        if args.dcp:
            timed("dcp save", lambda: dcp_save(engine, optimizer, path / "dcp"))
            timed("dcp load", lambda: dcp_load(engine, optimizer, path / "dcp"))
            num_bytes["dcp"] = size_of(path / "dcp")
        engine.world.barrier()
        if local == 0:
            shutil.rmtree(path)
        engine.world.barrier()
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    medians["first stall"] = seconds["stall"][0]
    return {
        "ranks": remote,
        "state_bytes": num_bytes["shardwise"],
        "dcp_bytes": num_bytes.get("dcp"),
        "seconds": medians,
        "stall_of_sync": medians["stall"] / medians["sync"],
        "bytes_per_second": {name: num_bytes["shardwise"] / medians[name] for name in ("sync", "dd", "resume")},
        "sync_of_dd": medians["dd"] / medians["sync"],
        "all_seconds": seconds,
    }


def dd(path: Path, num_bytes: int) -> None:
    """The same number of bytes as fast as the disk takes them from one writer."""
    blocks = str(-(-num_bytes // (16 * MIB)))
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=16M", f"count={blocks}", "oflag=direct", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def dcp_state(engine: sw.Engine, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """This rank's pieces under names of its own: what torch's planner has least to do with."""
    state = {}
    pieces = [param for group in optimizer.param_groups for param in group["params"]]
    for number, piece in enumerate(pieces):
        state[f"{engine.world.rank}/{number}"] = piece.detach()
        for key, value in optimizer.state.get(piece, {}).items():
            state[f"{engine.world.rank}/{number}/{key}"] = value
    return state


def dcp_save(engine: sw.Engine, optimizer: torch.optim.Optimizer, path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(path, sync_files=True)
        dcp.save(dcp_state(engine, optimizer), storage_writer=writer, no_dist=engine.world.size == 1)


def dcp_load(engine: sw.Engine, optimizer: torch.optim.Optimizer, path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(dcp_state(engine, optimizer), checkpoint_id=path, no_dist=engine.world.size == 1)


class folder_for:  # noqa: N801  # read as a function: `with folder_for(world, where) as folder`
    """A temporary folder that all ranks share; rank 0 makes it and removes it."""

    def __init__(self, world: sw.World, where: str) -> None:
        self._world, self._where = world, where

    def __enter__(self) -> Path:
        made = tempfile.mkdtemp(prefix="shardwise-", dir=self._where) if self._world.rank == 0 else ""
        self._path = Path(self._world.exchange(made.encode())[0].decode())
        return self._path

    def __exit__(self, *_: object) -> None:
        self._world.barrier()
        if self._world.rank == 0:
            shutil.rmtree(self._path, ignore_errors=True)


def report(figures: dict[str, Any]) -> str:
    seconds, rates = figures["seconds"], figures["bytes_per_second"]
    rows = [(name, f"{value * 1000:10.1f} ms") for name, value in seconds.items()]
    rows += [(f"{name}, rate", f"{value / 1e9:10.2f} GB/s") for name, value in rates.items()]
    rows += [
        ("stall / sync", f"{100 * figures['stall_of_sync']:10.1f} %"),
        ("rate of sync / dd", f"{figures['sync_of_dd']:10.2f}"),
        ("bytes", f"{figures['state_bytes']:10d}"),
    ]
    if figures["dcp_bytes"]:
        rows.append(("bytes, dcp", f"{figures['dcp_bytes']:10d}"))
    head = f"{figures['ranks']} ranks, {figures['state_bytes'] / MIB:.0f} MiB, medians"
    return "\n".join([head, *(f"  {name:32} {value}" for name, value in rows)])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="state over all ranks (default: 256)")
    parser.add_argument("--turns", type=int, default=7, help="turns after the first (default: 7)")
    parser.add_argument("--folder", default=".", help="where to write, and so which disk (default: here)")
    parser.add_argument("--out", help="a JSON file for the figures")
    parser.add_argument("--no-dcp", dest="dcp", action="store_false", help="leave torch.distributed.checkpoint out")
    return parser.parse_args()


if __name__ == "__main__":
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    sys.exit(main())
