"""Run by `test_inductor.py`: trains a model that inductor compiles, each way under each preset, and its eager twin."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw

sys.path.insert(0, str(Path(__file__).parents[2]))  # a script's own folder is there, not that of the tests

from tests.models import LENGTH, VOCAB, Transformer

Tensor = torch.Tensor
NUM_STEPS = 3
PRESETS = ("zero1", "zero2", "zero3")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Its `eps` is well above rounding: with Adam's default, gradients close to zero give steps of full size."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)


def compiled_before(model: nn.Module) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    whole: Any = torch.compile(model)
    return whole, lambda sharded: sharded


def compiled_after(model: nn.Module) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    return model, torch.compile


def blocks_before(model: Any) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    for block in model.blocks:
        block.compile()
    return model, lambda sharded: sharded


def by_the_plan(model: nn.Module) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    return model, lambda sharded: sharded


WAYS: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "before": (compiled_before, {}),
    "after": (compiled_after, {}),
    "blocks": (blocks_before, {}),
    "plan": (by_the_plan, {"compile": "inductor"}),
}


def train(model: Any, optimizer: torch.optim.Optimizer, data: list[Tensor], num_shares: int) -> list[float]:
    """The losses. A plain model is given all shares of each batch, a rank its own."""
    losses = []
    for tokens in data:
        total = 0.0
        for part in tokens.chunk(num_shares):
            loss = model(part[:, :-1], part[:, 1:])
            (loss / num_shares).backward()
            total += loss.item() / num_shares
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def main() -> None:
    with sw.World.join() as world:
        torch.manual_seed(0)
        model = Transformer(num_blocks=2)
        data = [torch.randint(0, VOCAB, (2 * world.size, LENGTH + 1)) for _ in range(NUM_STEPS)]
        twin = copy.deepcopy(model)
        losses = train(twin, adamw(twin), data, world.size)
        for preset in PRESETS:
            for way, (prepare, plan) in WAYS.items():
                replica = copy.deepcopy(model)
                optimizer = adamw(replica)
                whole, called = prepare(replica)
                with sw.shard(whole, {"preset": preset, **plan}, optimizer=optimizer, world=world) as engine:
                    own = [tokens.chunk(world.size)[world.rank] for tokens in data]
                    told = [engine.mean(loss) for loss in train(called(whole), optimizer, own, 1)]
                    state = engine.state_dict()
                torch.testing.assert_close(told, losses, rtol=1e-5, atol=1e-6)
                for name, value in twin.state_dict().items():
                    found = state.get(name, state.get(f"_orig_mod.{name}"))
                    torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5, msg=f"{preset}, {way}: {name}")
                if world.rank == 0:
                    print(f"{preset} {way}: equal", flush=True)
                torch.compiler.reset()


if __name__ == "__main__":
    main()
