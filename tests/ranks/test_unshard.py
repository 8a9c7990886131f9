"""`engine.unshard()` leaves the plain model: its values, modules, hooks and training are those of one never sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import small_transformers
import torch
from experts_models import mixture
from torch import nn

import shardwise as sw
from shardwise.errors import StateError
from shardwise.testing import run_ranks
from tests.thorough import sampled

Tensor = torch.Tensor


def traits(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What a split changes in modules: plain attributes, own forwards, numbers of hooks."""
    return {
        name: {
            **{
                key: value for key, value in vars(module).items() if isinstance(value, int | None) and key != "training"
            },
            "forward": "forward" in vars(module),
            "hooks": (len(module._forward_pre_hooks), len(module._forward_hooks)),
            "shapes": [list(param.shape) for param in module.parameters(recurse=False)],
            "kinds": [type(param) for param in module.parameters(recurse=False)],
        }
        for name, module in model.named_modules()
    }


TP = {"mesh": {"dp": -1, "tp": 2}}
CASES: list[tuple[str, int, list[dict[str, Any]]]] = [
    # model, ranks, plans one after another
    ("llama", 2, [{"preset": "zero3", **TP}, {"preset": "zero2"}]),
    ("llama", 4, [{"preset": "zero1", **TP, "tensor": {"sequence": True, "verify": True}}, {"preset": "zero3", **TP}]),
    ("llama", 2, [{"preset": "ddp", **TP, "tensor": {"cut_logits": True}}, {"preset": "zero3", "mesh": {"sp": 2}}]),
    ("gpt2", 2, [{"preset": "zero3-offload", "mesh": {"dp": 1, "tp": 2}}, {"preset": "zero1", **TP}]),
    ("qwen_moe", 2, [{"preset": "zero3", "mesh": {"ep": 2}}, {"preset": "zero2", **TP}]),
    (
        "mixture",
        4,
        [{"preset": "zero1", "mesh": {"dp": 2, "ep": 2}}, {"preset": "hsdp", "mesh": {"node": 2, "local": 2}}],
    ),
]
MODELS = {
    "llama": small_transformers.llama,
    "gpt2": small_transformers.gpt2,
    "qwen_moe": small_transformers.qwen_moe,
    "mixture": mixture,
}


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    if hasattr(model, "config"):
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss
    return model(ids, ids.roll(-1, 1))


def trained(model: nn.Module, data: Tensor, engine: sw.Engine | None = None, **options: Any) -> list[float]:
    """The losses of steps of SGD, by an engine or plainly."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if engine is None else None
    losses = []
    for ids in data:
        loss = loss_of(model, ids)
        losses.append(loss.item())
        loss.backward()
        if engine is not None:
            engine.step()
        else:
            assert optimizer is not None
            optimizer.step()
            optimizer.zero_grad()
    return losses


@sampled
@pytest.mark.parametrize(("name", "ranks", "plans"), CASES)
def test_the_plain_model_is_left(name: str, ranks: int, plans: list[dict[str, Any]]) -> None:
    """Two engines after another and, on each rank by itself, plain training; all equal the unsharded model's."""
    model = MODELS[name]()
    data = torch.randint(1, 30, (6, 2, 6), generator=torch.Generator().manual_seed(1))
    twin, models = copy.deepcopy(model), [copy.deepcopy(model) for _ in range(ranks)]
    losses, untouched = trained(twin, data), traits(model)

    def rank_of(world: sw.World) -> list[float]:
        mine, found = models[world.rank], []
        for number, plan in enumerate(plans):
            optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
            engine = sw.shard(mine, plan, optimizer=optimizer, world=world)
            engine.give_whole_outputs()
            found += trained(mine, data[2 * number : 2 * number + 2], engine)
            engine.unshard()
            assert traits(mine) == untouched
            with pytest.raises(StateError, match="closed"):
                engine.get("head.weight")
        return found + trained(mine, data[4:])

    for found in run_ranks(ranks, rank_of):
        assert found == pytest.approx(losses, rel=2e-5)
    for one in models:
        for (path, param), expected in zip(one.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(
                param, expected, rtol=1e-4, atol=1e-5, msg=lambda text, path=path: f"{path}: {text}"
            )


def test_a_model_in_stages_is_not_made_whole() -> None:
    models = [mixture() for _ in range(2)]

    def rank_of(world: sw.World) -> None:
        engine = sw.shard(models[world.rank], {"preset": "zero1", "mesh": {"pp": 2}, "accumulate": 2}, world=world)
        with pytest.raises(StateError, match=r"no unshard\(\) in this version"):
            engine.unshard()
        engine.close()

    run_ranks(2, rank_of)
