"""One rank of one engine's run, in a fresh process: trains a few steps and writes down what they took."""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engines import ENGINES, Step
from benchmarks.model import GPT, batch_of, build_model
from benchmarks.sizes import SIZES, Size
from shardwise.monitor import PeakOverBaseline

TCP_INFO_BYTES_ACKED = struct.Struct("=120xQ")  # linux/tcp.h: what the other side has confirmed


@dataclass(frozen=True)
class Timed:
    step_seconds: list[float]
    sent_bytes: float | None
    loss: float


def main() -> None:
    args = _arguments()
    rank = int(os.environ["RANK"])
    size = SIZES[args.size]
    memory = PeakOverBaseline()

    def build() -> GPT:
        _load_what_is_lazy()
        memory.__enter__()
        return build_model(size)

    file = args.out / f"rank-{rank}.json"
    try:
        step = ENGINES[args.engine](build, size, args.dtype)
        timed = time_steps(step, _batch(args.engine, size, rank), args.warm, args.steps)
    except BaseException as error:
        file.write_text(json.dumps({"error": _last_line(error)}))
        raise
    figures = {**vars(timed), "peak_bytes": memory.peak_bytes, "peak_is_exact": memory.exact}
    file.write_text(json.dumps(figures))
    if dist.is_initialized():
        dist.barrier()  # nobody leaves while another still writes
        dist.destroy_process_group()


def time_steps(step: Step, batch: Tensor, num_warm: int, num_timed: int) -> Timed:
    """Steps are timed from barrier to barrier, so that the slowest rank counts."""
    for _ in range(num_warm):
        step(batch)
    seconds = []
    sent_before = tcp_sent_bytes()
    for _ in range(num_timed):
        _meet()
        start = time.perf_counter()
        loss = step(batch)
        _meet()
        seconds.append(time.perf_counter() - start)
    sent_after = tcp_sent_bytes()
    sent = None if sent_before is None or sent_after is None else (sent_after - sent_before) / num_timed
    return Timed(seconds, sent, loss.item())


def tcp_sent_bytes() -> int | None:
    """What this process has sent over TCP, as the kernel counts it, whoever sent it. None where it does not tell."""
    try:
        return sum(_sent_through(descriptor) for descriptor in _open_sockets())
    except (OSError, AttributeError, struct.error):
        return None


def _open_sockets() -> Iterator[int]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(entry).startswith("socket:"):
                yield int(entry.name)
        except FileNotFoundError:
            continue  # the listing's own descriptor


def _sent_through(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
            return 0
        info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES_ACKED.size)
    (num_bytes,) = TCP_INFO_BYTES_ACKED.unpack(info)
    return int(num_bytes)


def _batch(engine: str, size: Size, rank: int) -> Tensor:
    """The rank's own; the reference trains on all of them at once, which is what the others must agree with."""
    ranks = range(size.num_ranks) if engine == "reference" else [rank]
    return torch.cat([batch_of(size, each) for each in ranks])


def _load_what_is_lazy() -> None:
    """Some 50 MB of code that torch imports at its first optimizer step, and which is no engine's doing."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2)).sum().backward()
    optimizer.step()


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
