"""Along model axes, ranks hold different parts of one model, and take the same decisions on the norm of all of it.

The tests insert the mesh: along `parts` each rank has its own stage, and along `tp` a part of one layer and copies of
the others.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.plan.mesh import MODEL_AXES, Mesh
from shardwise.sharded import sharding
from shardwise.testing import run_ranks
from tests.thorough import sampled

STAGES = Mesh(("dp", "parts"), (2, 2))
COPIES = Mesh(("dp", "tp"), (2, 2))


@pytest.fixture(autouse=True)
def _parts_is_a_model_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL_AXES, "parts", "ranks with other parts of a model")


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 6), nn.GELU()), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.LayerNorm(3))]


def batch(data_place: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(data_place))


def plain_norms(models: list[nn.Module], norm_type: float) -> list[float]:
    """Norms of the gradients of each model, and of all models together."""
    for model in models:
        for place in range(2):
            (model(batch(place)).square().sum() / 2).backward()
    grads = [[param.grad for param in model.parameters()] for model in models]
    return [float(nn.utils.get_total_norm(one, norm_type)) for one in (*grads, [grad for one in grads for grad in one])]


def on_mesh(mesh: Mesh, models: list[list[nn.Module]], plan: dict[str, Any], monkeypatch: Any, work: Any) -> list[Any]:
    """Run `work(engine, data_place)` on four ranks, with `models[model_place][data_place]`."""
    monkeypatch.setattr(sharding, "mesh_for", lambda *_: mesh)

    def rank(world: sw.World) -> Any:
        data_place, model_place = divmod(world.rank, 2)
        model = models[model_place][data_place]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
            return work(engine, data_place)

    return run_ranks(4, rank)


@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3"])
def test_the_norm_is_that_of_all_stages(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain_norms(stages(), 2.0)[-1]
    largest = plain_norms(stages(), math.inf)[-1]
    models = [[stages()[place] for _ in range(2)] for place in range(2)]

    def work(engine: sw.Engine, data_place: int) -> tuple[float, float, float]:
        engine.backward(engine(batch(data_place)).square().sum())
        biggest = float(engine.clip_grad_norm_(1e9, math.inf))
        return biggest, float(engine.clip_grad_norm_(1.0)), float(engine.clip_grad_norm_(1e9))

    told = on_mesh(STAGES, models, {"preset": preset}, monkeypatch, work)
    assert len(set(told)) == 1
    assert told[0] == pytest.approx((largest, expected, 1.0), rel=1e-5)


@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
def test_copies_count_once(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, expected3 = (plain_norms(stages()[1:], kind)[-1] for kind in (2.0, 3.0))
    models = [[stages()[1] for _ in range(2)] for _ in range(2)]

    def work(engine: sw.Engine, data_place: int) -> tuple[float, float, float]:
        engine.backward(engine(batch(data_place)).square().sum())
        cubic = float(engine.clip_grad_norm_(1e9, 3.0))
        plain = float(nn.utils.clip_grad_norm_(engine.module.parameters(), 1e9))
        return cubic, plain, float(engine.step() or 0.0)

    plan = {"preset": preset, "tensor": {"plan": {"0": "column_gathered"}}}
    told = on_mesh(COPIES, models, plan, monkeypatch, work)
    assert len(set(told)) == 1
    assert told[0] == pytest.approx((expected3, expected, expected), rel=1e-5)


def test_an_overflow_in_one_stage_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [[stages()[place] for _ in range(2)] for place in range(2)]
    plan = {"preset": "zero1", "precision": "fp16", "loss_scale": {"initial": 1024.0, "hysteresis": 1}}

    def work(engine: sw.Engine, data_place: int) -> tuple[float, float]:
        overflows = engine.world.rank == 3
        loss = engine(batch(data_place)).float().square().sum()
        engine.backward(loss * (math.inf if overflows else 1.0))
        norm = float(engine.step() or 0.0)
        assert engine.scaler is not None
        return norm, engine.scaler.scale

    told = on_mesh(STAGES, models, plan, monkeypatch, work)
    assert [scale for _, scale in told] == [512.0] * 4
    assert not any(math.isfinite(norm) for norm, _ in told)


def test_a_stage_without_anything_to_train_hears_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [[stages()[place] for _ in range(2)] for place in range(2)]
    for model in models[0]:
        model.requires_grad_(False)
    expected = plain_norms(stages()[1:], 2.0)[-1]

    def work(engine: sw.Engine, data_place: int) -> float:
        out = engine(batch(data_place))
        loss = out.square().sum()
        engine.backward(loss if loss.requires_grad else loss + torch.zeros((), requires_grad=True))
        return float(engine.clip_grad_norm_(1e9))

    told = on_mesh(STAGES, models, {"preset": "zero2"}, monkeypatch, work)
    assert told == pytest.approx([expected] * 4, rel=1e-5)
