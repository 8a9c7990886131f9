"""A rank of `python -m benchmarks elastic`: a small model trained by one of several elastic libraries.

elastic_rank.py FORM FOLDER STEPS PLAN     FORM: shardwise, gpt or gpt-4 (of shardwise), torchrun, torchft or horovod
                                         PLAN: of shardwise, a preset or a name in PLANS

Writes a line for each step that it has committed: what, when, of how many ranks, the loss where all ranks know it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.model import batch_of as tokens_of
from benchmarks.model import build_model
from benchmarks.sizes import SIZES

ROWS, WIDTH, NUM_LAYERS = 12, 256, 4
PLANS: dict[str, dict[str, Any]] = {
    "infinity": {"preset": "infinity", "disk": "scratch"},
    "activations on a disk": {"preset": "zero2", "activations": "disk", "disk": "scratch"},
    "dp x tp": {
        "preset": "zero1",
        "mesh": {"dp": 2, "tp": 2},
        "tensor": {"plan": {"0.0": "column", "1.0": "row", "2.0": "column", "3.0": "row"}},
    },
    "dp x pp": {"preset": "zero1", "mesh": {"dp": 2, "pp": 2}, "accumulate": 2},
    "dp x ep": {"preset": "zero1", "mesh": {"dp": 2, "ep": 2}},
    "dp x sp": {"preset": "zero1", "mesh": {"dp": 2, "sp": 2}, "sequence": {"attention": "ulysses"}},
    "dp x pp x tp": {
        "preset": "zero1",
        "mesh": {"dp": 2, "pp": 2, "tp": 2},
        "accumulate": 2,
        "tensor": {"plan": {"0.0": "column", "1.0": "row", "2.0": "column", "3.0": "row"}},
    },
}
"""Those that are more than a preset. A folder is one below that of the job."""
NUM_TOKENS = 16
"""Of a sample, where ranks divide samples."""
SAVE_EVERY = 10
Tensor = torch.Tensor


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed: Tensor = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        out: Tensor = x + self.out(mixed)
        return out


def build(axes: Collection[str] = ()) -> nn.Module:
    """A model with something that ranks along these axes share."""
    torch.manual_seed(0)
    if "ep" in axes:
        import shardwise as sw

        experts = sw.experts.MoE(WIDTH, WIDTH, num_experts=4, top_k=2)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), experts, nn.Linear(WIDTH, 8))
    if "sp" in axes:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(), nn.Linear(WIDTH, 8))
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 8))


def sources(tokens: Sequence[int] = ()) -> torch.utils.data.TensorDataset:
    numbers = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(480, *tokens, WIDTH, generator=numbers), torch.randn(480, *tokens, 8, generator=numbers)
    )


def batch_of(step: int, rank: int, size: int) -> list[Tensor]:
    """What a rank has of a batch, in libraries without a loader that shares unevenly."""
    first = step * ROWS % 480
    own = range(first + rank * ROWS // size, first + (rank + 1) * ROWS // size)
    return [tensor[list(own)] for tensor in sources().tensors]


class Told:
    def __init__(self, folder: Path, name: str) -> None:
        self._file = (folder / f"{name}-{os.getpid()}.jsonl").open("a")

    def committed(self, step: int, size: int, loss: float | None, **more: Any) -> None:
        used = {"time": time.time(), "cpu": time.process_time()}
        line = {"step": step, **used, "size": size, "loss": loss, "pid": os.getpid(), **more}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def shardwise_form(folder: Path, num_steps: int, name: str) -> None:
    import shardwise as sw

    plan = PLANS.get(name, {"preset": name})
    if "disk" in plan:
        plan = {**plan, "disk": str(folder / plan["disk"])}
    axes = plan.get("mesh", ())
    model, samples = build(axes), sources((NUM_TOKENS,) if "sp" in axes else ())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    world = sw.World.join(timeout_seconds=60)
    member = world.membership.member if world.membership is not None else world.rank
    told = Told(folder, f"member-{member}")
    with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
        loader = sw.data.Loader(samples, batch_rows=ROWS, world=engine.data_ranks, steps=num_steps)
        loader.seek(engine.num_steps)
        for batch in loader:
            step, num_void = engine.num_steps, engine.num_void
            x, y = engine.split_sequence(batch)
            loss = engine.train_step(x, y, loss_fn=functional.mse_loss)
            if engine.num_steps > step and engine.num_void == num_void:  # where a spare comes back, steps jump
                at = time.time()
                told.committed(engine.num_steps, engine.world.size, engine.mean(loss.item()), at=at)
        loader.close()


def gpt_form(folder: Path, num_steps: int, preset: str, num_micro_batches: int = 1) -> None:
    """A model that computes for longer than its ranks talk."""
    import shardwise as sw

    size = SIZES["small"]
    model = build_model(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        sw.World.join(timeout_seconds=60) as world,
        sw.shard(
            model, {"preset": preset, "accumulate": num_micro_batches}, optimizer=optimizer, world=world
        ) as engine,
    ):
        told, tokens = Told(folder, f"rank-{world.rank}"), tokens_of(size, world.rank)
        while engine.num_steps < num_steps:
            for _ in range(num_micro_batches):
                engine.backward(engine(tokens))
                engine.step()
            told.committed(engine.num_steps, engine.world.size, None)


def torchrun_form(folder: Path, num_steps: int, _: str) -> None:
    """DDP, restarted from its last checkpoint, of every tenth step."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    told, saved = Told(folder, f"rank-{rank}"), folder / "checkpoint.pt"
    model = nn.parallel.DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < num_steps:
        _plain_step(model, optimizer, batch_of(step, rank, size))
        step += 1
        told.committed(step, size, None, attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
        if step % SAVE_EVERY == 0 and rank == 0:
            fresh = saved.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, fresh)
            fresh.replace(saved)
    dist.destroy_process_group()


def torchft_form(folder: Path, num_steps: int, _: str) -> None:
    """A replica group of one rank. Gradients are averaged by the manager in one call: with torchft 0.2.0 and torch 2.13
    its `DistributedDataParallel` ends a survivor, whose failed allreduce returns no future (`assert fut._fut`)."""
    from torchft import Manager, Optimizer, ProcessGroupGloo

    group = os.environ["REPLICA_GROUP_ID"]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state: dict[str, Callable[[Any], None]] = {"model": model.load_state_dict, "optimizer": inner.load_state_dict}

    def load(given: dict[str, Any]) -> None:
        for name, value in given.items():
            state[name](value)

    manager = Manager(
        pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica_{group}",
        hostname="127.0.0.1",
    )
    told = Told(folder, f"replica-{group}")
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < num_steps:
        before = manager.current_step()
        optimizer.zero_grad()
        x, y = batch_of(before, int(group) % 4, 4)
        functional.mse_loss(model(x), y).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        together = torch.cat([grad.flatten() for grad in grads])
        manager.allreduce(together).wait()
        for grad, part in zip(grads, torch.split(together, [grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
        optimizer.step()
        if manager.current_step() > before:
            told.committed(manager.current_step(), manager.num_participants(), None)
    manager.shutdown()


def horovod_form(folder: Path, num_steps: int, _: str) -> None:
    """Committed after every step."""
    import horovod.torch as hvd

    hvd.init()
    told = Told(folder, f"rank-{hvd.rank()}")
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        while state.step < num_steps:
            _plain_step(model, optimizer, batch_of(state.step, hvd.rank(), hvd.size()))
            state.step += 1
            state.commit()
            told.committed(state.step, hvd.size(), None)

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor]) -> None:
    optimizer.zero_grad()
    functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


FORMS: dict[str, Callable[[Path, int, str], None]] = {
    "shardwise": shardwise_form,
    "gpt": gpt_form,
    "gpt-4": partial(gpt_form, num_micro_batches=4),
    "torchrun": torchrun_form,
    "torchft": torchft_form,
    "horovod": horovod_form,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt):
        FORMS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
