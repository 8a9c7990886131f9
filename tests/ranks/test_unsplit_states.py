"""`model.state_dict()` and `load_state_dict()` of models that a mesh axis splits refer to the unsplit model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from split_models import TENSOR, Transformer, tokens
from torch import nn
from twins import sgd, work_on_ranks

import shardwise as sw
from shardwise.errors import FaultError, StateError
from shardwise.testing import run_ranks
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor


def build(*, tied: bool = True) -> Transformer:
    torch.manual_seed(3)
    return Transformer(tied=tied)


def plan(preset: str) -> dict[str, Any]:
    return {"preset": preset, "mesh": {"dp": 2, "tp": 2}, "tensor": TENSOR}


def assert_same(state: dict[str, Any], other: dict[str, Any]) -> None:
    assert state.keys() == other.keys()
    for name, value in other.items():
        assert state[name].shape == value.shape, name
        assert torch.equal(state[name], value), name


@sampled
@pytest.mark.parametrize(
    ("preset", "shares_memory"), [("ddp", True), ("zero2", False), ("zero3", True), ("zero3", False)]
)
def test_a_state_is_that_of_the_unsplit_model(preset: str, shares_memory: bool) -> None:
    twin = build()

    def work(engine: sw.Engine) -> dict[str, Any]:
        model = engine.module
        assert_same({name: value.clone() for name, value in model.state_dict().items()}, twin.state_dict())
        engine.backward(engine(tokens(0).chunk(2)[engine.world.rank // 2]))
        engine.step()
        live = model.state_dict()
        taken = {name: value.clone() for name, value in live.items()}
        assert_same(taken, engine.state_dict())
        block = {name: value.clone() for name, value in model.blocks[1].state_dict(prefix="b.").items()}
        assert_same(block, {f"b.{n[9:]}": v for n, v in taken.items() if n.startswith("blocks.1.")})
        assert live["blocks.0.up.weight"].norm().item() == pytest.approx(taken["blocks.0.up.weight"].norm().item())
        kept = model.state_dict(keep_vars=True)
        assert kept["blocks.0.up.weight"] is model.blocks[0].up.weight
        return taken

    states = work_on_ranks(
        4,
        work,
        plan(preset),
        build,
        sgd,
        shares_memory=shares_memory,
    )
    for state in states[1:]:
        assert_same(state, states[0])


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_a_state_of_the_unsplit_model_is_loaded(preset: str) -> None:
    twin = build()
    other = {name: value + torch.randn_like(value) for name, value in twin.state_dict().items()}
    other["head.weight"] = other["embed.weight"]
    twin.load_state_dict(other)

    def work(engine: sw.Engine) -> tuple[dict[str, Tensor], float]:
        model = engine.module
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(other)
        assert_same({name: value.clone() for name, value in model.state_dict().items()}, other)
        loss = engine(tokens(0)).item()
        live = model.state_dict()
        with torch.no_grad():
            live["blocks.0.attn.qkv.weight"].mul_(2)
        doubled = {**other, "blocks.0.attn.qkv.weight": other["blocks.0.attn.qkv.weight"] * 2}
        assert_same(engine.state_dict(), doubled)
        model.load_state_dict(model.state_dict())
        assert_same(engine.state_dict(), doubled)
        model.load_state_dict(kept)
        return engine.state_dict(), loss

    for state, loss in work_on_ranks(4, work, plan(preset), build, sgd):
        assert_same(state, build().state_dict())
        assert loss == pytest.approx(twin(tokens(0)).item(), rel=1e-5)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_averages_of_states_are_those_of_the_unsplit_model() -> None:
    """An exponential average of `state_dict()` values, as loops write it."""

    def averaged(model: nn.Module, step: Any) -> dict[str, Tensor]:
        average = {name: value.clone() for name, value in model.state_dict().items()}
        for number in range(2):
            step(number)
            for name, value in model.state_dict().items():
                average[name].lerp_(value.clone(), 0.1)
        return average

    def work(engine: sw.Engine) -> dict[str, Tensor]:
        model = engine.module

        def step(number: int) -> None:
            engine.backward(engine(tokens(number).chunk(2)[engine.world.rank // 2]))
            engine.step()

        return averaged(model, step)

    twin = build(tied=False)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)

    def plain_step(number: int) -> None:
        optimizer.zero_grad()
        twin(tokens(number)).backward()
        optimizer.step()

    expected = averaged(twin, plain_step)
    for average in work_on_ranks(4, work, plan("zero3"), lambda: build(tied=False), sgd):
        for name, value in expected.items():
            assert torch.allclose(average[name], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("axes", [{"dp": 4}, {"dp": 2, "tp": 2}])
def test_torchs_functions_for_states_have_values(axes: dict[str, int]) -> None:
    """With some options rank 0 alone reads what they are given, which must be no whole tensor of all ranks then."""
    models, twin = [build() for _ in range(4)], build()
    every = dcp.StateDictOptions(full_state_dict=True)
    more = {"tensor": TENSOR} if "tp" in axes else {}

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        with sw.shard(model, {"preset": "zero3", "mesh": axes, **more}, optimizer=sgd(model), world=world) as engine:
            state = dcp.get_model_state_dict(model, options=every)
            assert all(type(value) is Tensor for value in state.values())
            assert_same(state, twin.state_dict())
            other = {name: value + 1 for name, value in twin.state_dict().items()}
            dcp.set_model_state_dict(model, dict(other), options=every)
            assert_same(engine.state_dict(), other)

    run_ranks(4, rank)


def test_a_part_of_a_state_is_refused_by_name() -> None:
    models = [build() for _ in range(4)]

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        with sw.shard(model, plan("zero3"), world=world) as engine:
            before = engine.state_dict()
            part = {"blocks.0.up.weight": torch.zeros(36, 24)}
            with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight: .*the unsplit model"):
                model.load_state_dict(part, strict=False)
            assert_same(engine.state_dict(), before)
            state = model.state_dict()
        with pytest.raises(StateError, match="its engine was closed"):
            state["blocks.0.up.weight"].clone()

    run_ranks(4, rank)


def test_one_rank_alone_is_told() -> None:
    models = [build() for _ in range(4)]

    def rank(world: sw.World) -> None:
        with sw.shard(models[world.rank], plan("ddp"), world=world) as engine:
            if world.rank == 0:
                models[0].state_dict()["blocks.0.up.weight"].clone()
            engine(tokens(0))
            engine.backward(engine(tokens(0)))

    with pytest.raises(FaultError, match="All ranks must call the same"):
        run_ranks(4, rank)
