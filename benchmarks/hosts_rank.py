"""One rank of a job over several hosts: all engines in turns, at each rate of the links.

[Note: paced blocks] Each block of the model takes a time that is given, its forward a third of it, in which its core is
free, as the host's is beside a device. So ranks do not compute in each other's way, though their hosts share one
machine, and what a step takes beyond that is communication and what engines do for it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from benchmarks.engines import Step, adamw
from benchmarks.figures import write_figures
from benchmarks.hosts_names import OURS, Turn
from benchmarks.model import GPT, Block, batch_of, build_model
from benchmarks.namespaces import INTERFACE
from benchmarks.schedule import interleaved
from benchmarks.sizes import SIZES, Size
from benchmarks.worker import warm_up

NUM_WARM = 3
_STATISTICS = Path("/sys/class/net", INTERFACE, "statistics")


class Engine:
    """A step, and what the engine says of bytes that go to other hosts, if it does: those that this rank has sent so
    far, and those that its program promises of each host for a step."""

    def __init__(
        self,
        step: Step,
        told_bytes: Callable[[], int] | None = None,
        promised_bytes: Callable[[], list[int]] | None = None,
    ) -> None:
        self.step = step
        self.told_bytes = told_bytes or (lambda: 0)
        self.tells = told_bytes is not None
        self.promised_bytes = promised_bytes


def main() -> None:
    args = _arguments()
    size = SIZES[args.size]
    torch.set_num_threads(1)
    with write_figures(args.out) as figures:
        world = sw.World.join(timeout_seconds=600)
        warm_up(torch.device("cpu"))
        engines = {name: make(name, size, world, args.block_seconds) for name in args.engines.split(",")}
        batch = batch_of(size, world.rank)
        turns = take_turns(engines, batch, args)
        figures["turns"] = turns
        figures["promised"] = {name: one.promised_bytes() for name, one in engines.items() if one.promised_bytes}
    dist.barrier()
    world.close()


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        time.sleep(forward_seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None, None


class _PacedBlock(Block):
    block_seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        computed, seconds = super().forward(x), self.block_seconds
        paced: Tensor = _Pause.apply(computed, seconds / 3, seconds * 2 / 3)  # type: ignore[no-untyped-call]  # torch's own
        return paced


def paced_model(size: Size, block_seconds: float) -> GPT:
    """See [Note: paced blocks]."""
    model = build_model(size)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.__class__ = _PacedBlock
        setattr(block, "block_seconds", block_seconds)  # noqa: B010  # of the class that it has now
    return model


def make(name: str, size: Size, world: sw.World, block_seconds: float) -> Engine:
    """An engine in the process group that is there."""
    model = paced_model(size, block_seconds)
    if name.startswith("shardwise-"):
        return _ours(model, name.removeprefix("shardwise-"), world)
    if name == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=_bucket_mb(size)
        )
        return Engine(_plain(wrapped, adamw(model)))
    if name.startswith("fsdp2"):
        return Engine(_fsdp2(model, has_two_axes=name.endswith("hsdp"), world=world))
    return Engine(_deepspeed(model, size, int(name.removeprefix("deepspeed-"))))


def _bucket_mb(size: Size) -> float:
    """About one block, so that there is something to overlap, as for all others."""
    return size.block_params * 4 / 2**20


_WIRES: dict[str, dict[str, Any]] = {
    "": {},
    "bf16": {"wire": {"param": "bf16", "grad": "bf16"}},
    "codes": {"wire": {"param": {"dtype": "int8", "rest": "bf16"}, "grad": {"dtype": "int4", "rest": "bf16"}}},
}
"""What a name says behind a colon, as in `shardwise-zero2:codes`."""


def _ours(model: GPT, name: str, world: sw.World) -> Engine:
    preset, _, wire = name.partition(":")
    assert preset in OURS
    plan: dict[str, Any] = {"preset": preset, **_WIRES[wire]}
    if wire and world.local_size > 1:
        plan["mesh"] = {"node": world.size // world.local_size, "local": world.local_size}
    engine = sw.shard(model, plan, optimizer=adamw(model), world=world)

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    ledger = world.collectives(torch.device("cpu")).ledger
    programs, mesh = engine._sharded.parts.runner.programs, engine._sharded.mesh
    return Engine(
        step,
        lambda: sum(ledger.crossed_bytes.values()),
        lambda: programs.program.sent_by_hosts(mesh, world.local_size),
    )


def _fsdp2(model: GPT, *, has_two_axes: bool, world: sw.World) -> Step:
    if has_two_axes:
        mesh = init_device_mesh("cpu", (world.size // world.local_size, world.local_size), mesh_dim_names=("a", "b"))
    else:
        mesh = init_device_mesh("cpu", (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return _plain(model, adamw(model))


def _deepspeed(model: GPT, size: Size, stage: int) -> Step:
    import deepspeed as ds

    ds.ops.__compatible_ops__ = {}  # see benchmarks/engines.py
    ds.init_distributed("gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": size.micro_batch,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": size.block_params,
            "allgather_bucket_size": size.block_params,
            "stage3_prefetch_bucket_size": size.block_params,
            "stage3_param_persistence_threshold": 10 * size.dim,
        },
        "zero_allow_untested_optimizer": True,
    }
    engine: Any
    engine, *_ = ds.initialize(model=model, optimizer=adamw(model), config=config)

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def take_turns(engines: dict[str, Engine], batch: Tensor, args: argparse.Namespace) -> list[Turn]:
    """All engines at one rate, then all at the next, round by round."""
    losses = {}
    for name, engine in engines.items():
        for _ in range(NUM_WARM):
            loss = engine.step(batch)
        losses[name] = loss.item()
    turns = []
    for number in range(args.rounds):
        for rate in map(float, args.rates.split(",")):
            ask_for(rate, args.out)
            for _, name in interleaved(list(engines), 1):
                turns.append(Turn(name, rate, number, *_timed(engines[name], batch, args.steps), losses[name]))
    return turns


def ask_for(rate: float, folder: Path) -> None:
    """Have the links shaped anew by who made them, and go on when that is done."""
    dist.barrier()
    if dist.get_rank() == 0:
        wish, done = folder / "rate", folder / "rate-done"
        done.unlink(missing_ok=True)
        fresh = folder / "rate-new"
        fresh.write_text(str(rate))
        os.replace(fresh, wish)
        while not done.exists():
            time.sleep(0.02)
    dist.barrier()


def _timed(engine: Engine, batch: Tensor, num_steps: int) -> tuple[float, float, float, float, float | None]:
    """Seconds of a step and of its processor, and bytes, as in `Turn`.

    [Note: no barrier between steps] A barrier takes the connections that messages take, so it waits behind parameters
    that an engine sends behind its step, and the next forward would not begin while they are on their way. Loops have
    none, so there is one at the end only.
    """
    engine.step(batch)  # what the one before it has displaced comes back
    dist.barrier()
    cpu_before, told_before = time.process_time(), engine.told_bytes()
    sent_before, received_before = counters()
    start = time.perf_counter()
    for _ in range(num_steps):
        engine.step(batch)
    dist.barrier()
    seconds = (time.perf_counter() - start) / num_steps
    sent, received = counters()
    told = (engine.told_bytes() - told_before) / num_steps if engine.tells else None
    cpu = (time.process_time() - cpu_before) / num_steps
    dist.barrier()
    return seconds, cpu, (sent - sent_before) / num_steps, (received - received_before) / num_steps, told


def counters() -> tuple[int, int]:
    """Of this host's interface: bytes sent and received."""
    sent, received = (int((_STATISTICS / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
    return sent, received


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--rates", required=True)
    parser.add_argument("--block-seconds", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
