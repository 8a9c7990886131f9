"""One rank of `horovod`: the same script with `hvd` from shardwise or from Horovod."""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.figures import write_figures

MODULES = {"shardwise": "shardwise.integrations.horovod.torch", "horovod": "horovod.torch"}
SMALLEST_BYTES = 2**12
SMALL, NUM_SMALL = 1000, 100
WIDTH, DEPTH, ROWS, STEPS = 512, 8, 32, 12


def all_reduces(hvd: Any, side: str, largest_bytes: int) -> dict[str, dict[str, float]]:
    """Median seconds by number of bytes, in place and averaged; of gloo in turns, where it is in this process."""
    seconds: dict[str, dict[str, float]] = {side: {}}
    num_bytes = SMALLEST_BYTES
    while num_bytes <= largest_bytes:
        tensor = torch.ones(num_bytes // 4)
        other = torch.ones_like(tensor)
        calls: dict[str, Callable[[], object]] = {side: partial(hvd.allreduce_, tensor, name="large")}
        if dist.is_initialized():
            calls["gloo"] = partial(_averaged_by_gloo, other)
        for name, found in _in_turns(hvd, calls, 40 if num_bytes <= 2**20 else 10).items():
            seconds.setdefault(name, {})[str(num_bytes)] = found
        num_bytes *= 16 if num_bytes < 2**20 else 4
    tensors = [torch.ones(SMALL) for _ in range(NUM_SMALL)]
    calls = {side: lambda: _many(hvd, tensors)}
    if dist.is_initialized():
        calls["gloo"] = lambda: [work.wait() for work in [dist.all_reduce(one, async_op=True) for one in tensors]]
    for name, found in _in_turns(hvd, calls, 10).items():
        seconds[name][f"{NUM_SMALL} of {4 * SMALL} bytes"] = found
    return seconds


def _averaged_by_gloo(tensor: Tensor) -> None:
    dist.all_reduce(tensor)
    tensor.div_(dist.get_world_size())


def _many(hvd: Any, tensors: list[Tensor]) -> None:
    handles = [hvd.allreduce_async_(one, name=f"small.{place}") for place, one in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)


def _in_turns(hvd: Any, calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, call in calls.items():
            hvd.barrier()
            start = time.perf_counter()
            call()
            if repeat > 1:
                found[name].append(time.perf_counter() - start)
    return {name: median(times) for name, times in found.items()}


def train(hvd: Any) -> tuple[list[float], float, float]:
    """Losses of a loop as in Horovod's examples, seconds and CPU seconds of a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    generator = torch.Generator().manual_seed(1 + hvd.rank())
    losses, times, worked = [], [], []
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=generator)
        start, cpu = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
        worked.append(time.process_time() - cpu)
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    return losses, median(times[2:]), median(worked[2:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=MODULES, default="shardwise")
    parser.add_argument("--largest", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    hvd = importlib.import_module(MODULES[args.side])
    hvd.init()
    os.environ["RANK"] = str(hvd.rank())  # which horovodrun calls otherwise
    with write_figures(args.out) as figures:
        seconds = all_reduces(hvd, args.side, args.largest)
        losses, step, worked = train(hvd)
        seconds[args.side] |= {"step of a loop": step, "its CPU time": worked}
        figures.update({"seconds": seconds, "losses": losses})
        hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main()
