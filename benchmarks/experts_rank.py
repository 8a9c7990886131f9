"""One rank of `experts`: layers of experts in turn on the same tokens, compared first and then timed."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from benchmarks.figures import write_figures
from shardwise.comm import World
from shardwise.parallel.experts import MoE

HIDDEN, INNER, EXPERTS, TOP_K = 256, 512, 8, 2
Call = Callable[[Tensor], Tensor]
WHOLE = "plain torch, all experts on each rank"
BY_HAND = "plain torch, all_to_all_single over gloo"
OURS = "shardwise, ep"
DEEPSPEED = "deepspeed, ep"


class Plain(nn.Module):
    """All experts here, one after the other, as in models of transformers: what there is to compute."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.router = layer.router
        self.first, self.last = layer.experts.get_parameter("gate_up_proj"), layer.experts.down_proj

    def forward(self, hidden: Tensor) -> Tensor:
        index, weights = self.router(hidden)
        out = torch.zeros_like(hidden)
        first, last = self.first.unbind(0), self.last.unbind(0)
        for expert in range(EXPERTS):
            token, choice = torch.where(index == expert)
            made = _expert(hidden[token], first[expert], last[expert])
            out = out.index_add(0, token, made * weights[token, choice, None])
        return out


class ByHand(nn.Module):
    """Some of the experts here; tokens by `all_to_all_single`, the shortest way to write it down."""

    def __init__(self, layer: MoE, rank: int, num_ranks: int) -> None:
        super().__init__()
        own = EXPERTS // num_ranks
        self.router = layer.router
        self.num_ranks = num_ranks
        first, last = layer.experts.get_parameter("gate_up_proj"), layer.experts.down_proj
        self.first = nn.Parameter(first[rank * own :][:own].detach().clone())
        self.last = nn.Parameter(last[rank * own :][:own].detach().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        index, weights = self.router(hidden)
        order = index.flatten().argsort(stable=True)
        counts = torch.bincount(index.flatten(), minlength=EXPERTS)
        told = torch.empty_like(counts)
        dist.all_to_all_single(told, counts)
        own = self.first.shape[0]
        sent, arriving = (each.view(self.num_ranks, own).sum(1).tolist() for each in (counts, told))
        rows = _swapped(hidden[order // TOP_K], sent, arriving)
        expert = torch.arange(own).repeat(self.num_ranks).repeat_interleave(told)
        back = expert.argsort(stable=True)
        parts = rows[back].split_with_sizes(torch.bincount(expert, minlength=own).tolist())
        made = torch.cat(
            [_expert(*each) for each in zip(parts, self.first.unbind(0), self.last.unbind(0), strict=True)]
        )
        made = _swapped(made[back.argsort()], arriving, sent)
        by_choice = made[order.argsort()].view(-1, TOP_K, HIDDEN)
        out: Tensor = (by_choice * weights[..., None]).sum(1)
        return out


def _swapped(rows: Tensor, sent: list[int], arriving: list[int]) -> Tensor:
    made: Tensor = _Swap.apply(rows, sent, arriving)  # type: ignore[no-untyped-call]  # torch's own
    return made


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], arriving: list[int]) -> Tensor:
        ctx.counts = arriving, sent
        arrived = rows.new_empty(sum(arriving), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), arriving, sent)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _swapped(grad, *ctx.counts), None, None


class Expert(nn.Module):
    """One of DeepSpeed's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(2 * INNER, HIDDEN) / 16)
        self.last = nn.Parameter(torch.randn(HIDDEN, INNER) / 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return _expert(hidden, self.first, self.last)


def _expert(rows: Tensor, first: Tensor, last: Tensor) -> Tensor:
    gate, up = functional.linear(rows, first).chunk(2, -1)
    return functional.linear(functional.silu(gate) * up, last)


def _deepspeeds(num_ranks: int) -> Call | None:
    """Its layer without dropping; `None` where it is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    import deepspeed
    from deepspeed.moe.layer import MoE as DeepSpeedMoE

    deepspeed.init_distributed(dist_backend="gloo")
    layer = DeepSpeedMoE(HIDDEN, Expert(), EXPERTS, ep_size=num_ranks, k=TOP_K, drop_tokens=False)
    layer.set_deepspeed_parallelism()
    return lambda hidden: layer(hidden)[0]


def measure(world: World, num_tokens: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of a forward and backward, by contestant, of the slower rank each time. Raises ValueError if an output
    is wrong. All ranks call."""
    torch.manual_seed(0)
    layer = MoE(HIDDEN, INNER, EXPERTS, TOP_K)
    plain, by_hand = Plain(copy.deepcopy(layer)), ByHand(copy.deepcopy(layer), world.rank, world.size)
    torch.manual_seed(1 + world.rank)
    hidden = torch.randn(num_tokens, HIDDEN)
    deepspeeds = _deepspeeds(world.size)
    engine = sw.shard(layer, {"preset": "ddp", "mesh": {"ep": world.size}}, world=world)
    expected = plain(hidden)
    for name, found in ((BY_HAND, by_hand(hidden)), (OURS, layer(hidden))):
        if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
            raise ValueError(f"{name} computes something else.")
    calls: dict[str, Call] = {WHOLE: plain, BY_HAND: by_hand, OURS: layer}
    if deepspeeds is not None:
        calls[DEEPSPEED] = deepspeeds
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            taken = _seconds(world, call, hidden)
            engine.zero_grad()
            if turn >= 2:
                seconds[name].append(taken)
    engine.close()
    return seconds


def _seconds(world: World, call: Call, hidden: Tensor) -> float:
    given = hidden.detach().requires_grad_()
    world.barrier()
    start = time.perf_counter()
    call(given).square().mean().backward()
    own = time.perf_counter() - start
    return max(float(told) for told in world.exchange(repr(own).encode()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with write_figures(args.out) as figures, World.join() as world:
        seconds = measure(world, args.tokens, args.repeats)
        ours = seconds[OURS]
        figures["timed"] = [
            {
                "layer": name,
                "seconds": median(taken),
                "over_ours": median(their / our for their, our in zip(taken, ours, strict=True)),
            }
            for name, taken in seconds.items()
        ]
        world.barrier()


if __name__ == "__main__":
    main()
