"""Parameters that are unfrozen, frozen again or added to the optimizer while a sharded model trains: as in plain
PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError, StateError
from shardwise.testing import run_ranks

STEPS = 8
Build = Callable[[nn.Module], torch.optim.Optimizer]
Act = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def built() -> nn.Sequential:
    """Threads as ranks share one generator, so each copies the same model."""
    return copy.deepcopy(MODEL)


def _made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)), nn.Linear(6, 2))


MODEL = _made()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam_of_trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.02)


def unfreeze(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Block by block, from the last."""
    if step in (2, 4):
        model[1 if step == 2 else 0].requires_grad_(True)  # type: ignore[index]  # a Sequential


def unfreeze_and_add(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    unfreeze(step, model, optimizer)
    if step in (2, 4):
        block = model[1 if step == 2 else 0]  # type: ignore[index]  # a Sequential
        optimizer.add_param_group({"params": block.parameters(), "lr": 0.01})


def freeze_and_back(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The last block rests for two steps, in which another one is unfrozen; its momentum stays."""
    unfreeze(step, model, optimizer)
    model[2].requires_grad_(step not in (3, 4))  # type: ignore[index]  # a Sequential


def train(model: nn.Module, optimizer: torch.optim.Optimizer, act: Act, rows: slice, late: bool) -> list[list[float]]:
    """Parameters after every step; with `late`, gradients are dropped between forward and backward."""
    found = []
    for step in range(STEPS):
        act(step, model, optimizer)
        loss = model(batch(step)[rows]).square().mean()
        if late:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not late:
            optimizer.zero_grad()
        found.append(torch.cat([param.detach().reshape(-1) for param in model.parameters()]).tolist())
    return found


CASES: dict[str, tuple[Build, Act, bool]] = {
    "unfrozen": (momentum, unfreeze, False),
    "unfrozen, gradients dropped late": (momentum, unfreeze, True),
    "added": (adam_of_trained, unfreeze_and_add, False),
    "added, gradients dropped late": (adam_of_trained, unfreeze_and_add, True),
    "frozen and back": (momentum, freeze_and_back, False),
}


@pytest.mark.parametrize("preset", ["zero3", "zero1", "offload"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_unfrozen_later_is_trained_as_in_a_plain_loop(case: str, preset: str) -> None:
    build, act, late = CASES[case]

    def frozen() -> nn.Module:
        model = built()
        model[:2].requires_grad_(False)
        return model

    plain = frozen()
    expected = train(plain, build(plain), act, slice(0, 4), late)

    def work(world: sw.World) -> list[list[float]]:
        model = frozen()
        optimizer = build(model)
        engine = sw.shard(model, preset, optimizer=optimizer, world=world)
        found = train(model, optimizer, act, slice(2 * world.rank, 2 * world.rank + 2), late)
        assert engine.num_steps == STEPS
        assert "_call_impl" not in vars(model)
        engine.close()
        return found

    for found in run_ranks(2, work):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert (torch.tensor(expected[-1]) != torch.tensor(expected[0])).all()


def on_one(act: Callable[[sw.Engine, Any, torch.optim.Optimizer], None], **more: Any) -> None:
    def work(world: sw.World) -> None:
        model = built()
        model[:2].requires_grad_(False)
        optimizer = momentum(model)
        with sw.shard(model, {"preset": "zero3", **more}, optimizer=optimizer, world=world) as engine:
            engine.backward(engine(batch(0)).square().mean())
            act(engine, model, optimizer)

    run_ranks(2, work)


def test_a_state_that_was_saved_in_between_is_resumed(tmp_path: Any) -> None:
    def work(world: sw.World) -> tuple[list[float], list[float]]:
        results = []
        for is_second in (False, True):
            model = built()
            model[:2].requires_grad_(False)
            optimizer = adam_of_trained(model)
            engine = sw.shard(model, "zero2", optimizer=optimizer, world=world)
            if is_second:
                unfreeze_and_add(2, model, optimizer)
                model(batch(0))
                engine.resume(tmp_path)
            for step in range(6 if not is_second else 0):
                unfreeze_and_add(step, model, optimizer) if step == 2 else None
                engine.backward(engine(batch(step)).square().mean())
                engine.step()
                if step == 4:
                    engine.save(tmp_path)
            if is_second:
                engine.backward(engine(batch(5)).square().mean())
                engine.step()
            results.append(torch.cat([param.detach().reshape(-1) for param in model.parameters()]).tolist())
            engine.close()
        return results[0], results[1]

    for whole, resumed in run_ranks(2, work):
        assert resumed == pytest.approx(whole, abs=1e-6)


def test_evaluation_needs_no_memory_for_gradients() -> None:
    def act(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        engine.step()
        model[0].requires_grad_(True)
        with torch.no_grad():
            model(batch(1))
        with engine.inference():
            model(batch(1))
        engine.backward(engine(batch(1)).square().mean())
        assert model[0][0].weight.grad is not None

    on_one(act)


def test_where_gradients_wait_it_is_refused() -> None:
    def act(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        model[0].requires_grad_(True)
        with pytest.raises(StateError, match=r"0\.0\.bias and 1 more was frozen .* unfreeze after a step"):
            engine(batch(1))
        engine.step()
        engine.backward(engine(batch(1)).square().mean())
        engine.step()

    on_one(act)


def test_a_loop_that_adds_to_gradients_is_stopped() -> None:
    def act(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        model[0].requires_grad_(True)
        engine.backward(engine(batch(1)).square().mean())
        with pytest.raises(StateError, match=r"call zero_grad\(\) before you unfreeze"):
            optimizer.step()

    on_one(act)


def test_groups_that_cannot_be_added() -> None:
    def act(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        groups = copy.copy(optimizer.param_groups)
        with pytest.raises(ModelError, match=r"with lr=0\.5 .* shape \[3\] is not one of the model's"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5})
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": model[0].parameters()})
        assert optimizer.param_groups == groups
        engine.step()

    on_one(act)
