"""One rank of `pipeline`: engines that cut the same GPT into stages, in turns, and what ours did when."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everybody calls it

from benchmarks.engines import adamw
from benchmarks.figures import write_figures
from benchmarks.model import Block
from benchmarks.pipeline import APART, DEEPSPEED, LOOPS, OURS_ZERO1, TORCH, WHOLE_STEP, spans_of
from benchmarks.pipeline_sizes import PIPELINE_SIZES, PipelineSize
from benchmarks.turns import Trainer, take_turns
from benchmarks.worker import warm_up
from shardwise import Engine, World, shard
from shardwise.system.process_memory import PeakOverBaseline

NUM_TIMELINES = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=PIPELINE_SIZES, required=True)
    parser.add_argument("--engines", required=True)
    parser.add_argument("--rounds", type=int, help="take turns; without it the one engine's memory is measured")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    size = PIPELINE_SIZES[args.size]
    with write_figures(args.out) as figures, World.join() as world:
        if args.rounds is None:
            figures.update(_memory(args.engines, size, world, args.steps))
            return
        engines: dict[str, Engine] = {}
        trainers = {name: _trainer(name, size, world, engines) for name in args.engines.split(",")}
        figures["turns"] = take_turns(trainers, args.rounds, args.steps)
        figures["calls"] = {name: _calls(trainer) for name, trainer in trainers.items()}
        scheduled = {name: engine for name, engine in engines.items() if name not in LOOPS}
        figures["spans"] = {name: _timelines(engine, size) for name, engine in scheduled.items()}
        dist.barrier()


def _trainer(name: str, size: PipelineSize, world: World, engines: dict[str, Engine]) -> Trainer:
    if name == APART:
        return _apart(size)
    if name == DEEPSPEED:
        return _deepspeed(size)
    if name in LOOPS:
        trainer, engines[name] = _loop(size, world, LOOPS[name])
        return trainer
    if name == WHOLE_STEP:
        return _whole_step(size, world)
    maker, _, schedule = name.partition(" ")
    if maker == TORCH:
        return _torch(size, schedule)
    preset = "zero1" if name == OURS_ZERO1 else "ddp"
    engine = engines[name] = _engine(size, "1f1b" if name == OURS_ZERO1 else schedule, world, preset)
    x, y = tokens(size)
    return Trainer(lambda: engine.forward_backward(x, y, loss_fn=cross_entropy), engine.step)


def _memory(name: str, size: PipelineSize, world: World, num_steps: int) -> dict[str, int]:
    """What the process holds most in some steps, beyond what it held before there was a model; and the promise."""
    warm_up(torch.device("cpu"))
    engines: dict[str, Engine] = {}
    with PeakOverBaseline() as memory:
        trainer = _trainer(name, size, world, engines)
        for _ in range(num_steps):
            trainer.passes()
            trainer.update()
    return {"peak_bytes": memory.peak_bytes, "promised_bytes": _promised(name, size, engines.get(name))}


def _promised(name: str, size: PipelineSize, engine: Engine | None) -> int:
    if engine is None:
        return 0
    if name in LOOPS:
        called = tuple(one.chunk(LOOPS[name])[0] for one in tokens(size))
        return engine.rehearse(called, as_call=True).total
    x, y = (one[: size.micro_batch] for one in tokens(size))
    return engine.rehearse(x, loss=lambda words: cross_entropy(words, y)).total


# -- model and data ---------------------------------------------------------------------------------------


class Head(nn.Module):
    def __init__(self, size: PipelineSize) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.dim)
        self.words = nn.Linear(size.dim, size.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        words: Tensor = self.words(self.norm(x))
        return words


def build_layers(size: PipelineSize) -> list[nn.Module]:
    """The same values on every rank and in every engine."""
    torch.manual_seed(0)
    blocks = [Block(size.dim, size.dim // 64) for _ in range(size.num_blocks)]
    return [nn.Embedding(size.vocab, size.dim), *blocks, Head(size)]


def tokens(size: PipelineSize) -> tuple[Tensor, Tensor]:
    """What all stages are given, all micro-batches of a step together."""
    shape = (size.num_micro_batches * size.micro_batch, size.seq + 1)
    drawn = torch.randint(0, size.vocab, shape, generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def cross_entropy(words: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(words.flatten(0, 1), targets.flatten())


def cut_evenly(size: PipelineSize, num_stages: int) -> list[list[int]]:
    """The layers of each stage: as many blocks each, and both ends where they belong."""
    each = size.num_blocks // num_stages
    stages = [list(range(1 + each * stage, 1 + each * (stage + 1))) for stage in range(num_stages)]
    stages[0].insert(0, 0)
    stages[-1].append(size.num_blocks + 1)
    return stages


# -- the engines ------------------------------------------------------------------------------------------


def _apart(size: PipelineSize) -> Trainer:
    """The whole model on every rank, and its share of the micro-batches: what a step takes if nobody ever waits."""
    model = nn.Sequential(*build_layers(size))
    optimizer = adamw(model)
    share = size.num_micro_batches // dist.get_world_size()
    x, y = (one.chunk(size.num_micro_batches)[:share] for one in tokens(size))

    def passes() -> Tensor:
        losses = [cross_entropy(model(part), target) for part, target in zip(x, y, strict=True)]
        for loss in losses:
            (loss / share).backward()
        return torch.stack(losses).mean().detach()

    return Trainer(passes, _update(optimizer))


def _engine(size: PipelineSize, schedule: str, world: World, preset: str) -> Engine:
    num_stages = world.size * (2 if schedule == "interleaved" else 1)
    stages = [[str(layer) for layer in stage] for stage in cut_evenly(size, num_stages)]
    plan = {
        "preset": preset,
        "mesh": {"pp": world.size, "dp": 1},
        "accumulate": size.num_micro_batches,
        "pipeline": {"schedule": schedule, "stages": stages},
    }
    model = nn.Sequential(*build_layers(size))
    return shard(model, plan, optimizer=adamw(model), world=world)


class Losing(nn.Module):
    """The same layers, with the loss in the model, so that no logits are sent."""

    def __init__(self, size: PipelineSize) -> None:
        super().__init__()
        self.layers = nn.Sequential(*build_layers(size))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.layers(x), y)


def _losing(size: PipelineSize, world: World, accumulate: int) -> tuple[Losing, Engine]:
    stages = [[f"layers.{layer}" for layer in stage] for stage in cut_evenly(size, world.size)]
    plan = {
        "preset": "ddp",
        "mesh": {"pp": world.size, "dp": 1},
        "accumulate": accumulate,
        "pipeline": {"stages": stages},
    }
    model = Losing(size)
    return model, shard(model, plan, optimizer=adamw(model), world=world)


def _whole_step(size: PipelineSize, world: World) -> Trainer:
    """`engine.train_step(batch)`, in its two parts."""
    _, engine = _losing(size, world, size.num_micro_batches)
    batch = tokens(size)
    return Trainer(lambda: engine.forward_backward(batch), engine.step)


def _loop(size: PipelineSize, world: World, num_calls: int) -> tuple[Trainer, Engine]:
    """`loss = model(x, y); engine.backward(loss)`, whose calls split their batches among the stages themselves."""
    model, engine = _losing(size, world, num_calls)
    batches = list(zip(*(one.chunk(num_calls) for one in tokens(size)), strict=True))

    def passes() -> Tensor:
        losses = []
        for number, batch in enumerate(batches):
            loss = model(*batch)
            engine.backward(loss)
            losses.append(loss.detach())
            if number + 1 < len(batches):
                engine.step()  # ends a micro-batch
        return torch.stack(losses).mean()

    return Trainer(passes, engine.step), engine


def _torch(size: PipelineSize, schedule: str) -> Trainer:
    """As in the documentation of `torch.distributed.pipelining`, with the stages cut by hand."""
    from torch.distributed import pipelining

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    layers = build_layers(size)
    cut = cut_evenly(size, num_ranks * (2 if schedule == "interleaved" else 1))
    own = {number: nn.Sequential(*(layers[at] for at in cut[number])) for number in range(rank, len(cut), num_ranks)}
    stages = [pipelining.PipelineStage(module, number, len(cut), torch.device("cpu")) for number, module in own.items()]
    kinds: dict[str, Callable[..., Any]] = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zb-h1": pipelining.ScheduleInterleavedZeroBubble,  # with one stage on each rank it is ZB-H1
    }
    given = stages if schedule in ("interleaved", "zb-h1") else stages[0]
    run = kinds[schedule](given, size.num_micro_batches, loss_fn=cross_entropy)
    optimizer = adamw(nn.ModuleList(own.values()))
    x, y = tokens(size)
    arguments = (x,) if rank == 0 else ()

    def passes() -> Tensor:
        if rank != num_ranks - 1:
            run.step(*arguments)
            return torch.zeros(())
        losses: list[Tensor] = []
        run.step(*arguments, target=y, losses=losses)
        return torch.stack(losses).mean().detach()

    return Trainer(passes, _update(optimizer))


def _deepspeed(size: PipelineSize) -> Trainer:
    """`PipelineModule` with ZeRO-1, which is all that goes with it. Its step has no two parts."""
    import deepspeed as ds
    from deepspeed.pipe import PipelineModule

    ds.init_distributed(dist_backend="gloo", verbose=False)
    batches = size.num_micro_batches
    config = {
        "train_micro_batch_size_per_gpu": size.micro_batch,
        "gradient_accumulation_steps": batches,
        "gradient_clipping": 0.0,
        "steps_per_print": 2**31,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    num_stages, layers = dist.get_world_size(), build_layers(size)
    module = PipelineModule(layers, num_stages, loss_fn=cross_entropy, partition_method="parameters")
    engine, *_ = ds.initialize(model=module, optimizer=adamw(module), config=config)
    parts = list(zip(*(one.chunk(batches) for one in tokens(size)), strict=True))

    def passes() -> Tensor:
        loss: Tensor = engine.train_batch(data_iter=iter(parts))
        return loss.detach()

    return Trainer(passes, lambda: None)


def _update(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


# -- what is called, and what happened when ---------------------------------------------------------------


def _calls(trainer: Trainer) -> int:
    """How many Python functions a forward and backward calls on this thread, anybody's."""
    num_calls = 0

    def note(_: FrameType, event: str, __: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(note)
    try:
        trainer.passes()
    finally:
        sys.setprofile(None)
    trainer.update()
    return num_calls


def _timelines(engine: Engine, size: PipelineSize) -> list[Any]:
    """Of some steps, what each rank's ops took; as rank 0 has them."""
    x, y = tokens(size)
    found = []
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        file = Path(folder) / "step.json"
        for _ in range(NUM_TIMELINES):
            dist.barrier()
            with engine.timeline(file):
                engine.forward_backward(x, y, loss_fn=cross_entropy)
            engine.step()
            if dist.get_rank() == 0:
                found.append(spans_of(json.loads(file.read_text())["traceEvents"]))
    return found


if __name__ == "__main__":
    main()
