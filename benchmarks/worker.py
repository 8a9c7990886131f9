"""One rank of one engine's run, in a fresh process: trains a few steps and writes down what they took."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engines import ENGINES, Promising, Step
from benchmarks.figures import write_figures
from benchmarks.model import GPT, batch_of, build_model
from benchmarks.names import REFERENCE
from benchmarks.sizes import DTYPES, SIZES, Race, Size
from benchmarks.traffic import tcp_sent_bytes
from shardwise.system.process_memory import PeakOverBaseline


@dataclass(frozen=True)
class Timed:
    """Per step: seconds on the clock, seconds of CPU in all threads of this rank, bytes sent; and the last loss."""

    step_seconds: list[float]
    cpu_seconds: float
    sent_bytes: float | None
    loss: float


def main() -> None:
    args = _arguments()
    race = Race(SIZES[args.size], args.dtype, args.device)
    with write_figures(args.out) as figures:
        figures.update(run(args.engine, race, args.warm, args.steps))
    if dist.is_initialized():
        dist.barrier()  # nobody leaves while another still writes
        dist.destroy_process_group()


def run(engine: str, race: Race, num_warm: int, num_timed: int) -> dict[str, object]:
    """Train; the figures of this rank."""
    rank = int(os.environ["RANK"])
    device = _own_device(race)
    memory = _CudaPeak() if device.type == "cuda" else PeakOverBaseline()

    def build() -> GPT:
        warm_up(device)
        memory.__enter__()
        return build_model(race.size, str(device))

    step = ENGINES[engine](build, race)
    batch = _batch(engine, race.size, rank).to(device)
    timed = time_steps(step, batch, num_warm, num_timed)
    figures = {**asdict(timed), "peak_bytes": memory.peak_bytes, "peak_is_exact": memory.exact}
    promised = step.promised_bytes(batch) if isinstance(step, Promising) else None
    return {**figures, "promised_bytes": promised}


def time_steps(step: Step, batch: Tensor, num_warm: int, num_timed: int) -> Timed:
    """Steps are timed from barrier to barrier, so that the slowest rank counts."""
    for _ in range(num_warm):
        step(batch)
    _meet()
    seconds = []
    sent_before, cpu_before = tcp_sent_bytes(), time.process_time()
    for _ in range(num_timed):
        start = time.perf_counter()
        loss = step(batch)
        _meet()
        seconds.append(time.perf_counter() - start)
    sent_after, cpu_after = tcp_sent_bytes(), time.process_time()
    sent = None if sent_before is None or sent_after is None else (sent_after - sent_before) / num_timed
    return Timed(seconds, (cpu_after - cpu_before) / num_timed, sent, loss.item())


class _CudaPeak:
    """`PeakOverBaseline` for a GPU: what torch's allocator had handed out at most."""

    exact = True

    def __enter__(self) -> _CudaPeak:
        torch.cuda.reset_peak_memory_stats()
        self._baseline_bytes = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        return

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self._baseline_bytes


def _own_device(race: Race) -> torch.device:
    if race.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _batch(engine: str, size: Size, rank: int) -> Tensor:
    """The rank's own; the reference trains on all of them at once, which is what the others must agree with."""
    ranks = range(size.num_ranks) if engine == REFERENCE else [rank]
    return torch.cat([batch_of(size, each) for each in ranks])


def warm_up(device: torch.device) -> None:
    """Some 50 MB of code that torch imports at its first optimizer step, and which is no engine's doing."""
    model = torch.nn.Linear(2, 2, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, device=device)).sum().backward()
    optimizer.step()


def _meet() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
