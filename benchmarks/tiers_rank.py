"""One rank of `tiers`: engines that keep states off the device, in turns, beside DeepSpeed's and loops by hand.

What each does is that of its name, over the same GPT, tokens and AdamW: ZeRO-2 or 3 with gradients, states and update
on the host, or with states in files. On a CPU "device" and host are the same memory, so that only the work of moving
and updating is raced. One that cannot be made is left out, with the reason.
"""

from __future__ import annotations

import argparse
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.engines import LEARNING_RATE
from benchmarks.figures import write_figures
from benchmarks.model import batch_of, build_model
from benchmarks.sizes import SIZES, Size
from benchmarks.turns import Trainer, take_turns
from benchmarks.worker import warm_up
from shardwise import Engine, World, shard
from shardwise.memory.disk_memory import WAIT
from shardwise.system.telemetry import ON_THE_WAY, UNITS, hidden_share
from shardwise.system.telemetry.timeline import HOST, Event

OURS = {"shardwise-offload": "offload", "shardwise-zero3-offload": "zero3-offload", "shardwise-infinity": "infinity"}
DEEPSPEED = {"deepspeed-2 cpu": (2, "cpu"), "deepspeed-3 cpu": (3, "cpu"), "deepspeed-3 nvme": (3, "nvme")}
HAND_HOST, HAND_DISK = "by hand, host", "by hand, files"
ENGINES = (HAND_HOST, HAND_DISK, *OURS, *DEEPSPEED)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    size = SIZES[args.size]
    with write_figures(args.out) as figures, World.join() as world:
        warm_up(torch.device("cpu"))
        engines: dict[str, Engine] = {}
        trainers, trouble = {}, {}
        for name in ENGINES:
            try:
                trainers[name] = _trainer(name, size, world, args.folder, engines)
            except Exception as error:  # a peer that is not installed or does not build: whatever that raises
                trouble[name] = f"{type(error).__name__}: {str(error).strip()[-300:]}"
                if name in OURS:
                    raise
        figures["trouble"] = trouble
        figures["turns"] = take_turns(trainers, args.rounds, args.steps)
        infinity = engines["shardwise-infinity"]
        figures["disk"] = _disk_of_a_step(infinity, batch_of(size, world.rank))
        for engine in engines.values():
            engine.close()
        tall = SIZES["tall-few-tokens"] if args.size == "few-tokens" else size
        with _ours("infinity", tall, world, args.folder / "slow", Longer) as slow:
            first = _disk_of_a_step(slow, batch_of(tall, world.rank))
            Longer.repeats = _most(world, 2 * median(first["seconds"]) / median(first["update_seconds"]))
            figures["slow"] = _disk_of_a_step(slow, batch_of(tall, world.rank)) | {"repeats": Longer.repeats}
        dist.barrier()


class Longer(torch.optim.NAdam):
    """An optimizer whose update takes longer than the disk: one that is worked out several times over."""

    repeats = 1

    def step(self, closure: Any = None) -> Any:
        for _ in range(self.repeats):
            loss = super().step(closure)
        return loss


def _most(world: World, wanted: float) -> int:
    """Of what the ranks want."""
    return max(int(message) for message in world.exchange(str(max(1, math.ceil(wanted))).encode(), "repeats"))


def _trainer(name: str, size: Size, world: World, folder: Path, engines: dict[str, Engine]) -> Trainer:
    batch = batch_of(size, world.rank)
    if name in OURS:
        engine = engines[name] = _ours(OURS[name], size, world, folder / name)

        def passes() -> Tensor:
            loss: Tensor = engine(batch)
            engine.backward(loss)
            return loss.detach()

        return Trainer(passes, engine.step)
    if name in DEEPSPEED:
        stage, where = DEEPSPEED[name]
        return _deepspeed(size, batch, stage, where, folder)
    return _by_hand(size, batch, folder / f"hand-{world.rank}" if name == HAND_DISK else None)


def _ours(
    preset: str, size: Size, world: World, folder: Path, optimizer: type[torch.optim.Optimizer] | None = None
) -> Engine:
    model = build_model(size)
    plan = {"preset": preset, **({"disk": str(folder)} if preset == "infinity" else {})}
    kind: Any = torch.optim.AdamW if optimizer is None else optimizer
    return shard(model, plan, optimizer=kind(model.parameters(), lr=LEARNING_RATE), world=world)


def _deepspeed(size: Size, batch: Tensor, stage: int, where: str, folder: Path) -> Trainer:
    """https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training, with its own CPU Adam."""
    import deepspeed as ds
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    ds.ops.__compatible_ops__ = {}  # see `engines.deepspeed`
    ds.init_distributed("gloo", verbose=False)
    bucket = size.block_params
    offload: dict[str, Any] = {"device": where, "pin_memory": False}
    if where == "nvme":
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible():
            raise ImportError("its operator async_io needs libaio and its headers (libaio-dev)")
        offload |= {"nvme_path": str(folder / "deepspeed"), "pipeline_read": True, "pipeline_write": True}
    config = {
        "train_micro_batch_size_per_gpu": size.micro_batch,
        "gradient_clipping": 0.0,
        "steps_per_print": 2**31,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_param_persistence_threshold": 10 * size.dim,
            "offload_optimizer": offload,
        },
    }
    model = build_model(size)
    adam = DeepSpeedCPUAdam(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, adamw_mode=True)
    engine: Any
    engine, *_ = ds.initialize(model=model, optimizer=adam, config=config)

    def passes() -> Tensor:
        loss: Tensor = engine(batch)
        engine.backward(loss)
        return loss.detach()

    return Trainer(passes, engine.step)


# -- as one writes it by hand ------------------------------------------------------------------------------


def _by_hand(size: Size, batch: Tensor, folder: Path | None) -> Trainer:
    """Whole parameters on each rank, each gradient averaged as it comes; a rank updates its half of the parameters'
    tensors with fused AdamW, on the host, or slice by slice from files with a thread that reads ahead and one that
    writes behind; and gives them to the other."""
    model = build_model(size)
    params = list(model.parameters())
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    owners = _even(params, num_ranks)
    own = [param for param, owner in zip(params, owners, strict=True) if owner == rank]
    update = _update_from_files(own, folder) if folder is not None else _update_in_memory(own)

    def passes() -> Tensor:
        loss: Tensor = model(batch)
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def step() -> None:
        for param, owner in zip(params, owners, strict=True):
            assert param.grad is not None
            dist.reduce(param.grad.div_(num_ranks), owner)
        update()
        for param, owner in zip(params, owners, strict=True):
            dist.broadcast(param.data, owner)
            param.grad = None

    return Trainer(passes, step)


def _even(params: list[nn.Parameter], num_ranks: int) -> list[int]:
    """Who has each of them, largest first to whoever has least."""
    loads, owners = [0] * num_ranks, [0] * len(params)
    for place in sorted(range(len(params)), key=lambda place: -params[place].numel()):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += params[place].numel()
    return owners


def _update_in_memory(own: list[nn.Parameter]) -> Callable[[], object]:
    return torch.optim.AdamW(own, lr=LEARNING_RATE, fused=True).step


def _update_from_files(own: list[nn.Parameter], folder: Path) -> Callable[[], None]:
    """One file for each tensor, with both moments."""
    folder.mkdir(parents=True, exist_ok=True)
    for place, param in enumerate(own):
        torch.zeros(2, param.numel()).numpy().tofile(folder / str(place))
    numbers = torch.tensor(0.0)

    def update() -> None:
        numbers.add_(1)
        read: dict[int, Tensor] = {}
        writer: threading.Thread | None = None

        def fetch(place: int) -> None:
            read[place] = torch.from_file(str(folder / str(place)), size=2 * own[place].numel()).clone()

        reader = threading.Thread(target=fetch, args=(0,))
        reader.start()
        for place, param in enumerate(own):
            assert param.grad is not None
            reader.join()
            assert param.grad is not None
            states = read.pop(place).view(2, *param.shape)
            if place + 1 < len(own):
                reader = threading.Thread(target=fetch, args=(place + 1,))
                reader.start()
            torch._fused_adamw_(
                [param.data],
                [param.grad],
                [states[0]],
                [states[1]],
                [],
                [numbers.clone()],
                lr=LEARNING_RATE,
                beta1=0.9,
                beta2=0.999,
                weight_decay=0.01,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
            if writer is not None:
                writer.join()
            writer = threading.Thread(target=states.numpy().tofile, args=(folder / str(place),))
            writer.start()
        if writer is not None:
            writer.join()

    return update


# -- what the disk did -------------------------------------------------------------------------------------


def _disk_of_a_step(engine: Engine, batch: Tensor) -> dict[str, Any]:
    """Of some steps: the share of the disk's time in which the model computed or something was updated, and that in
    which this rank did not wait for the disk. Of their updates alone: bytes that this rank read and wrote, seconds from
    the first read to the last write, the share of the disk's time in which something was updated, and the picture of
    the last."""
    timeline = engine._sharded.parts.timeline
    found: dict[str, list[float]] = {
        name: [] for name in ("hidden_in_step", "not_waited_for", "seconds", "hidden", "update_seconds")
    }
    for number in range(4):
        dist.barrier()
        timeline.start()
        engine.backward(engine(batch))
        dist.barrier()
        before = len(timeline.events)
        engine.step()
        step = timeline.stop()
        events = [event for event in _begun_in(step[before:]) if is_of_disk(event) or is_work(event)]
        times = [event["ts"] for event in events if is_of_disk(event)]
        if number:
            whole = [event for event in step if is_of_disk(event) or is_work(event)]
            found["hidden_in_step"].append(hidden_share([*whole, *computing(step)]))
            waits = [event for event in step if is_of_disk(event) or is_wait(event)]
            found["not_waited_for"].append(1 - hidden_share(waits))
            found["seconds"].append((max(times) - min(times)) / 1e6)
            found["hidden"].append(hidden_share(events))
            found["update_seconds"].append(sum(event["dur"] for event in events if is_work(event)) / 1e6)
    assert engine._sharded.disk is not None
    first = engine._sharded.disk._rows[0].file.num_bytes  # read while the model computes
    num_bytes = 2 * engine.memory().measured_on_disk["optim"] - first
    return {"bytes": num_bytes, **found, "picture": picture(events)}


def _begun_in(events: Sequence[Event]) -> Iterator[Event]:
    """Without the ends of what has begun before."""
    begun = set()
    for event in events:
        if event["ph"] == "b":
            begun.add((event["cat"], event["name"]))
        if event["ph"] != "e" or (event["cat"], event["name"]) in begun:
            yield event


def computing(events: Sequence[Event]) -> Iterator[Event]:
    """Forwards and backwards of units, as work of the host. They contain what it waits for in them, such as sums of
    gradients."""
    begun: dict[str, float] = {}
    for event in events:
        if event["cat"] == UNITS and event["ph"] == "b":
            begun[event["name"]] = event["ts"]
        elif event["cat"] == UNITS and event["name"] in begun:
            start = begun.pop(event["name"])
            yield {"ph": "X", "cat": HOST, "name": event["name"], "ts": start, "dur": event["ts"] - start}


def is_of_disk(event: Event) -> bool:
    return bool(event["cat"] == ON_THE_WAY and event["name"].startswith(("read ", "write ")))


def is_work(event: Event) -> bool:
    """What the host works out, and not what it waits for."""
    return bool(event["cat"] == HOST and event["name"].split()[0] in ("update", "cast"))


def is_wait(event: Event) -> bool:
    return bool(event["cat"] == HOST and event["name"] == WAIT)


def picture(events: list[Event], width: int = 100) -> list[str]:
    """Three rows over time: when anything was being read, updated and written."""
    begun: dict[str, float] = {}
    spans: dict[str, list[tuple[float, float]]] = {"read": [], "update": [], "write": []}
    for event in events:
        if event["ph"] == "X":
            spans["update"].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "b":
            begun[event["name"]] = event["ts"]
        else:
            spans[event["name"].split()[0]].append((begun.pop(event["name"]), event["ts"]))
    first = min(start for row in spans.values() for start, _ in row)
    last = max(stop for row in spans.values() for _, stop in row)
    scale = width / max(1e-9, last - first)
    lines = []
    for name, row in spans.items():
        cells = [" "] * width
        for start, stop in row:
            for cell in range(int((start - first) * scale), min(width, int((stop - first) * scale) + 1)):
                cells[cell] = "#"
        lines.append(f"{name:7}|{''.join(cells)}|")
    return [*lines, f"{'':7} {(last - first) / 1e6:.3f} s"]


if __name__ == "__main__":
    main()
