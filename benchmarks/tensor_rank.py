"""One rank of `tensor`: engines that cut the same blocks of a Llama, in turns."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.engines import adamw, optimizer_of
from benchmarks.figures import write_figures
from benchmarks.llama import (
    COLUMN,
    LLAMA_SIZES,
    ROW,
    LlamaSize,
    build_blocks,
    hidden_states,
    token_batch,
    transformers_config,
)
from benchmarks.sizes import DTYPES
from benchmarks.tensor import MODELS
from benchmarks.turns import Trainer, take_turns
from shardwise import World, shard

AXIS = "tp"
Call = Callable[[], Tensor]
Sum = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--size", choices=LLAMA_SIZES, required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    size = LLAMA_SIZES[args.size]
    with write_figures(args.out) as figures, World.join() as world:
        make = of_blocks if args.model == "blocks" else of_transformers
        figures["turns"] = take_turns(make(size, args.dtype, world), args.rounds, args.steps)
        dist.barrier()


def of_blocks(size: LlamaSize, dtype: str, world: World) -> dict[str, Trainer]:
    """Our own blocks: what each way to cut them costs beside plain functions that are written for them."""
    hidden = hidden_states(size)
    narrow = hidden.bfloat16() if dtype == "bf16" else hidden
    return {
        "whole": _plain(build_blocks(size), lambda model: model(narrow), dtype),
        "by hand, gloo": _plain(_cut_by_hand(build_blocks(size), _gloo_sum), lambda model: model(narrow), dtype),
        "by hand": _plain(_cut_by_hand(build_blocks(size), _our_sum(world)), lambda model: model(narrow), dtype),
        "dtensor": _plain(_by_dtensor(build_blocks(size), "layers.*"), lambda model: model(narrow), dtype),
        "shardwise": _ours(build_blocks(size), lambda model: model(hidden), dtype, world, _our_plan()),
    }


def of_transformers(size: LlamaSize, dtype: str, world: World) -> dict[str, Trainer]:
    """A Llama of transformers, by its own plan."""
    tokens = token_batch(size)

    def loss(model: nn.Module) -> Tensor:
        found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    return {
        "whole": _plain(_llama(size), loss, dtype),
        "dtensor": _plain(_by_dtensor(_llama(size), "model.layers.*"), loss, dtype),
        "transformers": _plain(_by_transformers(size), loss, dtype),
        "shardwise": _ours(_llama(size), loss, dtype, world, {}),
    }


# -- the engines ------------------------------------------------------------------------------------------


def _plain(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], dtype: str) -> Trainer:
    optimizer = optimizer_of(model, dtype)

    def passes() -> Tensor:
        loss = loss_of(model)
        loss.backward()
        return loss.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(passes, update)


def _ours(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], dtype: str, world: World, tensor: dict[str, Any]
) -> Trainer:
    plan = {"preset": "ddp", "mesh": {"dp": 1, AXIS: world.size}, "precision": dtype, "tensor": tensor}
    engine = shard(model, plan, optimizer=adamw(model), world=world)

    def passes() -> Tensor:
        loss = loss_of(model)
        engine.backward(loss)
        return loss.detach()

    return Trainer(passes, engine.step)


def _our_plan() -> dict[str, Any]:
    styles = {"column": COLUMN, "row": ROW}
    return {"plan": {f"layers.*.{name}": style for style, names in styles.items() for name in names}}


def _by_dtensor(model: nn.Module, blocks: str) -> nn.Module:
    """As torch's tutorial cuts a Llama."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(AXIS,))
    plan: dict[str, Any] = {f"{blocks}.{name}": ColwiseParallel() for name in COLUMN}
    plan |= {f"{blocks}.{name}": RowwiseParallel() for name in ROW}
    return parallelize_module(model, mesh, plan)


def _llama(size: LlamaSize) -> nn.Module:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(transformers_config(size))


def _by_transformers(size: LlamaSize) -> nn.Module:
    """From a checkpoint, the only way in which transformers cuts a model."""
    from transformers import LlamaForCausalLM

    with _shared_folder() as folder:
        if dist.get_rank() == 0:
            _llama(size).save_pretrained(folder)  # type: ignore[operator]  # of transformers
        dist.barrier()
        model: nn.Module = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
        dist.barrier()
    return model.train()


@contextmanager
def _shared_folder() -> Iterator[str]:
    """A folder of rank 0 that all know."""
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as own:
        told = [own]
        dist.broadcast_object_list(told)
        yield told[0]


# -- by hand ----------------------------------------------------------------------------------------------


def _cut_by_hand(model: nn.Module, total: Sum) -> nn.Module:
    """Megatron's two functions around each attention and feed-forward part, and nothing else."""
    place, num_ranks = dist.get_rank(), dist.get_world_size()
    for name, module in model.named_modules():
        if name.endswith((*COLUMN, *ROW)):
            assert isinstance(module, nn.Linear)
            part = module.weight.detach().chunk(num_ranks, 0 if name.endswith(COLUMN) else 1)[place]
            module.weight = nn.Parameter(part.contiguous())
        elif name.endswith(("self_attn", "mlp")):
            module.forward = _between(module.forward, total)
    return model


def _between(forward: Callable[..., Tensor], total: Sum) -> Callable[..., Tensor]:
    def cut(x: Tensor, *rest: Tensor) -> Tensor:
        made: Tensor = _Reduced.apply(forward(_Copied.apply(x, total), *rest), total)  # type: ignore[no-untyped-call]  # torch's own
        return made

    return cut


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Sum) -> Tensor:
        ctx.total = total
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.total(gradient), None


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Sum) -> Tensor:  # noqa: ARG004
        return total(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return gradient, None


def _gloo_sum(tensor: Tensor) -> Tensor:
    total = tensor.contiguous().clone()
    dist.all_reduce(total)
    return total


def _our_sum(world: World) -> Sum:
    """By the collectives that our engine has, so that the engine is all the difference."""
    collectives = world.collectives(torch.device("cpu"))

    def total(tensor: Tensor) -> Tensor:
        source = tensor.contiguous().view(-1)
        out = torch.empty_like(source)
        collectives.all_reduce(out, source, world.everybody, source.dtype, "by hand").wait()
        return out.view(tensor.shape)

    return total


if __name__ == "__main__":
    main()
