"""Whole tensors of a sharded model: reads return what the plain model has, and written values are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from twins import PRESETS_2, PRESETS_2X2, adamw, batches, plan_of, train_steps, work_on_ranks

import shardwise as sw
from shardwise.errors import ModelError
from tests.models import Transformer
from tests.thorough import sampled

pytestmark = sampled

CASES = [*PRESETS_2, *PRESETS_2X2, ("zero3", 3, None), ("zero3", 1, None)]
IDS = [f"{name}-{n}{'x2' if mesh else ''}" for name, n, mesh in CASES]
NAME = "blocks.1.up.weight"


def start() -> nn.Module:
    torch.manual_seed(0)
    model = Transformer(tied=True)
    model.blocks[0].down.weight.requires_grad_(False)
    model.register_buffer("seen", torch.ones(3))
    return model


@pytest.fixture(params=CASES, ids=IDS)
def case(request: pytest.FixtureRequest) -> tuple[str, int, Any]:
    return request.param


def on_ranks(case: tuple[str, int, Any], work: Callable[[sw.Engine], Any], precision: str = "fp32") -> list[Any]:
    preset, num_ranks, mesh = case
    return work_on_ranks(num_ranks, work, plan_of(preset, mesh, precision=precision), start)


def twin_after(num_steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    twin = start()
    optimizer = adamw(twin)
    for x, y in batches(num_steps, rows=12):
        optimizer.zero_grad()
        twin(x, y).backward()
        optimizer.step()
    return twin, optimizer


def test_state_dict_is_the_plain_models(case: tuple[str, int, Any]) -> None:
    def work(engine: sw.Engine) -> Any:
        train_steps(engine, range(2))
        only = engine.state_dict(rank_0_only=True)
        assert bool(only) == (engine.world.rank == 0)
        train_steps(engine, range(1))
        train_steps(engine, range(1))
        return only

    state = on_ranks(case, work)[0]
    twin, _ = twin_after()
    plain = Transformer(tied=True)
    plain.register_buffer("seen", torch.zeros(3))
    plain.load_state_dict(state)
    assert list(state) == list(twin.state_dict())
    for name, value in twin.state_dict().items():
        assert torch.allclose(state[name], value, atol=1e-6), name


def test_load_state_dict_round(case: tuple[str, int, Any]) -> None:
    twin, _ = twin_after(1)
    wanted = {name: value + 0.25 for name, value in twin.state_dict().items()}

    def work(engine: sw.Engine) -> Any:
        engine.load_state_dict(wanted)
        train_steps(engine, range(1))
        engine.load_state_dict(wanted)
        x, y = batches(1, rows=12)[0]
        with torch.no_grad():
            loss = engine(x, y).item()
        return engine.state_dict(), loss

    for state, loss in on_ranks(case, work):
        assert all(torch.equal(state[name], value) for name, value in wanted.items() if name != "head.weight")
        plain = copy.deepcopy(twin)
        plain.load_state_dict(wanted)
        assert loss == pytest.approx(plain(*batches(1, rows=12)[0]).item(), rel=1e-5)


def test_get_and_set_by_name(case: tuple[str, int, Any]) -> None:
    twin, optimizer = twin_after()
    moments = optimizer.state[dict(twin.named_parameters())[NAME]]["exp_avg"]
    x, y = batches(1, rows=12)[0]
    optimizer.zero_grad()
    twin(x, y).backward()

    def work(engine: sw.Engine) -> Any:
        assert engine.get(NAME, "exp_avg") is None
        train_steps(engine, range(2))
        mine = [part.chunk(engine.world.size)[engine.world.rank] for part in (x, y)]
        engine.backward(engine(*mine))
        found = {what: engine.get(NAME, what) for what in ("param", "grad", "exp_avg")}
        frozen = engine.get("blocks.0.down.weight")
        assert engine.get("blocks.0.down.weight", "grad") is None
        engine.set(NAME, torch.zeros(128, 32), "grad")
        engine.set(NAME, torch.full((128, 32), 0.5), "exp_avg")
        engine.set(NAME, torch.ones(128, 32))
        changed = {what: engine.get(NAME, what) for what in ("param", "grad", "exp_avg")}
        engine.step()
        assert engine.get(NAME, "grad") is None
        return found, frozen, changed

    for found, frozen, changed in on_ranks(case, work):
        assert torch.allclose(found["param"], dict(twin.named_parameters())[NAME], atol=1e-6)
        assert torch.allclose(found["grad"], dict(twin.named_parameters())[NAME].grad, atol=1e-6)
        assert torch.allclose(found["exp_avg"], moments, atol=1e-6)
        assert torch.equal(frozen, twin.blocks[0].down.weight)
        assert (changed["param"] == 1).all()
        assert (changed["grad"] == 0).all()
        assert (changed["exp_avg"] == 0.5).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gathered_parameters_can_be_edited(case: tuple[str, int, Any], precision: str) -> None:
    def work(engine: sw.Engine) -> Any:
        train_steps(engine, range(1))
        before = engine.state_dict()
        params = dict(engine.module.named_parameters())
        names = NAME, "norm.weight", "blocks.0.down.weight"
        writer = 0 if precision == "bf16" else engine.world.size - 1
        with engine.gathered(*names, write=True, writer=writer), torch.no_grad():
            if engine.world.rank == writer:
                params[NAME][0].fill_(2.0)
                params["norm.weight"].mul_(3)
                params["blocks.0.down.weight"][:, 1] = 4.0
        with engine.gathered():
            whole = {name: param.detach().float().clone() for name, param in params.items()}
        after = engine.state_dict()
        train_steps(engine, range(1))
        return before, after, whole

    for before, after, whole in on_ranks(case, work, precision):
        assert (after[NAME][0] == 2).all()
        assert torch.equal(after[NAME][1:], before[NAME][1:])
        assert (after["blocks.0.down.weight"][:, 1] == 4).all()
        assert torch.allclose(after["norm.weight"], before["norm.weight"] * 3, rtol=2**-7)
        for name, value in whole.items():
            assert torch.allclose(value, after[name].float(), rtol=2**-7, atol=1e-6), name


@pytest.mark.parametrize("plan", [{"preset": "zero3"}, {"preset": "zero1", "mesh": {"pp": 2}}], ids=["data", "stages"])
def test_tied_weights_have_both_names(plan: dict[str, Any]) -> None:
    def work(engine: sw.Engine) -> None:
        engine.train_step(batches(1, rows=8)[0])
        engine.set("head.weight", 2 * engine.get("head.weight"))
        for what in ("param", "exp_avg"):
            assert torch.equal(engine.get("head.weight", what), engine.get("tokens.weight", what))
        assert torch.equal(engine.get("head.weight"), engine.state_dict()["tokens.weight"])

    work_on_ranks(2, work, plan, lambda: Transformer(num_blocks=4, tied=True))


def test_what_is_not_there_is_named() -> None:
    def work(engine: sw.Engine) -> None:
        with pytest.raises(ModelError, match=r"Did you mean 'blocks\.1\.up\.weight'"):
            engine.get("blocks.1.up.wight")
        with pytest.raises(ModelError, match=r"has shape \[128, 32\], but the new value has \[3\]\. Give the whole"):
            engine.set(NAME, torch.ones(3))
        with pytest.raises(ModelError, match="no grad to write to; there is one between backward and step"):
            engine.set(NAME, torch.ones(128, 32), "grad")
        with pytest.raises(ModelError, match=r"The state lacks .* With strict=False"):
            engine.load_state_dict({})
        state = engine.state_dict()
        with pytest.raises(ModelError, match=rf"has {NAME} with shape \[3\], but .* Give the whole state"):
            engine.load_state_dict({**state, NAME: torch.ones(3)})
        with pytest.raises(ModelError, match=rf"has {NAME} on the meta device, without values\. Give one"):
            engine.load_state_dict({**state, NAME: state[NAME].to("meta")})

    on_ranks(("zero3", 2, None), work)
