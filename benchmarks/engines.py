"""The engines, one function each, in the best settings that their own documents give.

Each imports what it needs and joins the other ranks before it calls `build`: memory is counted from that
moment on. It returns what takes one whole training step with a rank's batch and gives back the loss.
Optimizer everywhere: AdamW with torch's defaults, fused. No clipping, no accumulation, no offload.

[Note: bf16 in each engine] Compute in bf16, master weights and states in fp32, everywhere. The single process
and DDP have masters written by hand, which is faster on a CPU than autocast; FSDP2, DeepSpeed and shardwise
bring their own. FSDP2 sums gradients in fp32, as its documentation advises; the others send bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.model import GPT
from benchmarks.sizes import Race

Step = Callable[[Tensor], Tensor]
Build = Callable[[], GPT]
LEARNING_RATE = 1e-3


class Promising:
    """A step of an engine that says beforehand how many bytes a rank will hold at most: `promised_bytes(batch)`."""

    def __init__(self, step: Step, promised_bytes: Callable[[Tensor], int]) -> None:
        self._step = step
        self.promised_bytes = promised_bytes

    def __call__(self, tokens: Tensor) -> Tensor:
        return self._step(tokens)


def single(build: Build, race: Race) -> Step:
    """Plain PyTorch in one process: what there is to lose."""
    model = build()
    return _plain_step(model, optimizer_of(model, race.dtype))


def apart(build: Build, race: Race) -> Step:
    """The single process on every rank, which meet between steps and share nothing but memory's bandwidth."""
    dist.init_process_group("gloo")
    return single(build, race)


def ddp(build: Build, race: Race) -> Step:
    """https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"""
    dist.init_process_group(race.backend)
    model = build()
    optimizer = optimizer_of(model, race.dtype)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    return _plain_step(wrapped, optimizer)


def fsdp2(build: Build, race: Race) -> Step:
    """https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html: each block, then the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group(race.backend)
    mesh = init_device_mesh(race.device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if race.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = build()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return _plain_step(model, adamw(model))


def deepspeed(build: Build, race: Race, *, stage: int) -> Step:
    """https://www.deepspeed.ai/docs/config-json: buckets of one block, so that there is something to overlap."""
    import deepspeed as ds

    # Its one C++ operator for communication on CPUs serves inference only, and would be compiled at this
    # point. DeepSpeed reads this dict before it compiles, and asks the compiler to fill it if it is not there.
    ds.ops.__compatible_ops__ = {}
    ds.init_distributed(race.backend, verbose=False)
    bucket = race.size.block_params
    config = {
        "train_micro_batch_size_per_gpu": race.size.micro_batch,
        "bf16": {"enabled": race.dtype == "bf16"},
        "gradient_clipping": 0.0,  # 1.0 by default since 0.19
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_param_persistence_threshold": 10 * race.size.dim,
        },
        "zero_allow_untested_optimizer": True,
    }
    model = build()
    engine: Any
    engine, *_ = ds.initialize(model=model, optimizer=adamw(model), config=config)
    return _engine_step(engine)


def shardwise(build: Build, race: Race, *, plan: str, **options: str) -> Step:
    """As in the README; `options` are more lines of the plan."""
    from shardwise import World, shard

    world = World.join()
    model = build()
    settings = {"preset": plan, "precision": race.dtype, **options}
    engine = shard(model, settings, optimizer=adamw(model), world=world)
    return Promising(_engine_step(engine), lambda tokens: engine.rehearse(tokens).total)


ENGINES: dict[str, Callable[[Build, Race], Step]] = {
    "reference": single,
    "single": single,
    "apart": apart,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "deepspeed-1": partial(deepspeed, stage=1),
    "deepspeed-2": partial(deepspeed, stage=2),
    "deepspeed-3": partial(deepspeed, stage=3),
    "shardwise-ddp": partial(shardwise, plan="ddp"),
    "shardwise-zero1": partial(shardwise, plan="zero1"),
    "shardwise-zero2": partial(shardwise, plan="zero2"),
    "shardwise-zero3": partial(shardwise, plan="zero3"),
}


class MasterAdamW:
    """Parameters in bf16, masters and states in fp32, as one writes it by hand. Makes the parameters of `model` bf16,
    and leaves its buffers: rotary frequencies in bf16 would be another model."""

    def __init__(self, model: nn.Module) -> None:
        self._masters = [param.detach().clone() for param in model.parameters()]
        for param in model.parameters():
            param.data = param.data.bfloat16()
        self._params: list[Tensor] = list(model.parameters())
        self._adamw = torch.optim.AdamW(groups_by_class(self._masters), lr=LEARNING_RATE, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for master, param in zip(self._masters, self._params, strict=True):
            if param.grad is not None:
                master.grad = param.grad.float()
        self._adamw.step()
        self._adamw.zero_grad()
        if all(type(master) is Tensor for master in self._masters):
            torch._foreach_copy_(self._params, self._masters)
            return
        for param, master in zip(self._params, self._masters, strict=True):  # DTensor has none for lists
            param.copy_(master)

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None


def optimizer_of(model: nn.Module, dtype: str) -> torch.optim.Optimizer | MasterAdamW:
    return MasterAdamW(model) if dtype == "bf16" else adamw(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_by_class(model.parameters()), lr=LEARNING_RATE, fused=True)


def groups_by_class(params: Iterable[Tensor]) -> list[dict[str, Any]]:
    """One update takes no plain tensors together with DTensors; there is one group where all are of a kind."""
    groups: dict[type, list[Tensor]] = {}
    for param in params:
        groups.setdefault(type(param.data), []).append(param)
    return [{"params": group} for group in groups.values()]


def _engine_step(engine: Any) -> Step:
    """For engines that have a `backward` and a `step` of their own."""

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer | MasterAdamW) -> Step:
    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
