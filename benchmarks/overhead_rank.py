"""One process of `overhead`: rank 0 of a world whose other ranks do not exist."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from benchmarks.bare import Bare
from benchmarks.calls import calls_during
from benchmarks.echo import EchoTransport
from benchmarks.figures import write_figures
from benchmarks.overhead import DTYPES, WORLD_SIZE

DIM = 16
LAYERS = 8  # a weight and a bias each: 16 parameters a block
BATCH = 4


@dataclass(frozen=True)
class Parts:
    """A step in two parts, each to be called in turn."""

    passes: Callable[[], None]
    update: Callable[[], None]
    agreed_bytes: Callable[[], int] = lambda: 0
    """What ranks have told each other so far to agree on something. In steps that follow their program they do not."""


class Block(nn.Module):
    """16 small parameters and next to no arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x)
        return out


def plain(model: nn.Sequential, dtype: str, x: Tensor) -> Parts:
    if dtype == "bf16":
        model, x = model.bfloat16(), x.bfloat16()
    return _parts(model, _adamw(model), x)


def fsdp2(model: nn.Sequential, dtype: str, x: Tensor) -> Parts:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    policy = MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _parts(model, _adamw(model), x)


def bare(model: nn.Sequential, dtype: str, x: Tensor) -> Parts:
    """The least that any engine of this kind does, written down for this model; see `Bare`."""
    if dtype == "bf16":
        model, x = model.bfloat16(), x.bfloat16()
    transport = EchoTransport()
    units = [Bare(block, WORLD_SIZE, transport) for block in model]
    optimizer = torch.optim.AdamW([unit.shard for unit in units], lr=1e-3, fused=True)
    return _parts(model, optimizer, x)


def ours(preset: str, model: nn.Sequential, dtype: str, x: Tensor) -> Parts:
    world = sw.World(0, WORLD_SIZE, EchoTransport())
    optimizer = _adamw(model)
    engine = sw.shard(model, {"preset": preset, "precision": dtype}, optimizer=optimizer, world=world)

    def passes() -> None:
        engine.backward(engine(x).sum())

    def update() -> None:
        engine.step()

    def agreed_bytes() -> int:
        sent = world.collectives(x.device).ledger.sent_bytes
        return sum(num_bytes for (verb, _), num_bytes in sent.items() if verb == "exchange")

    return Parts(passes, update, agreed_bytes)


MAKERS: dict[str, Callable[[nn.Sequential, str, Tensor], Parts]] = {
    "plain": plain,
    "bare": bare,
    "fsdp2": fsdp2,
    "shardwise-zero3": partial(ours, "zero3"),
    "shardwise-ddp": partial(ours, "ddp"),
}


def measure(engine: str, dtype: str, num_blocks: int, steps: int) -> dict[str, float]:
    """Median seconds of CPU for forward and backward, and for the update; and the calls of Python functions in both."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(num_blocks)))
    parts = MAKERS[engine](model, dtype, torch.randn(BATCH, DIM))
    for _ in range(3):
        parts.passes()
        parts.update()
    agreed_bytes = parts.agreed_bytes()
    timed = [(_seconds(parts.passes), _seconds(parts.update)) for _ in range(steps)]
    if parts.agreed_bytes() != agreed_bytes:
        raise RuntimeError("Ranks had to agree during a step: it was recorded anew, and is not what a training costs.")
    return {
        "passes_seconds": median(passes for passes, _ in timed),
        "update_seconds": median(update for _, update in timed),
        "calls": calls_during(parts.passes) + calls_during(parts.update),
    }


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Parts:
    def passes() -> None:
        model(x).sum().backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Parts(passes, update)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _seconds(call: Callable[[], None]) -> float:
    """CPU time: nothing is waited for here, and who else uses the cores does not count."""
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=MAKERS, required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with write_figures(args.out) as figures:
        figures.update(measure(args.engine, args.dtype, args.blocks, args.steps))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
