"""Several optimizers over one model: each steps, zeroes and is saved separately, as in a plain loop."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from twins import batches, share_of

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks
from tests.models import Transformer
from tests.thorough import sampled

Tensor = torch.Tensor
DATA = batches(4)
PLACES = [("zero3", True), ("zero3", False), ("zero2", True), ("ddp", False)]


def two_over(model: nn.Module, *, muon: bool = False) -> list[torch.optim.Optimizer]:
    blocks = [param for name, param in model.named_parameters() if "blocks" in name]
    others = [param for name, param in model.named_parameters() if "blocks" not in name]
    first: torch.optim.Optimizer = (
        sw.optim.Muon([{"params": blocks, "use_muon": False}], lr=1e-3)
        if muon
        else torch.optim.AdamW(blocks, lr=3e-3, eps=1e-5)
    )
    return [first, torch.optim.SGD(others, lr=0.1, momentum=0.9)]


def trained(model: Any, optimizers: list[torch.optim.Optimizer], halves: Any) -> None:
    """Both step. In every other iteration they step once more, after another backward: the first one zeroes its
    gradients before the second one's step."""
    one, two = optimizers
    for number, batch in enumerate(DATA):
        x, y = halves(batch)
        one.zero_grad()
        two.zero_grad()
        model(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        one.step()
        two.step()
        if number % 2:
            model(x, y).backward()
            one.step()
            one.zero_grad(set_to_none=number == 1)
            two.step()


@pytest.mark.parametrize("place", PLACES, ids=[f"{preset}-{shares}" for preset, shares in PLACES])
@sampled
def test_each_steps_and_zeroes_its_own(place: tuple[str, bool], tmp_path: Path) -> None:
    start = Transformer()
    twin = copy.deepcopy(start)
    trained(twin, two_over(twin), lambda batch: batch)
    replicas = [copy.deepcopy(start) for _ in range(2)]

    def rank(world: sw.World) -> dict[str, Tensor]:
        model = replicas[world.rank]
        optimizers = two_over(model)
        engine = sw.shard(model, place[0], optimizer=optimizers, world=world)
        trained(model, optimizers, lambda batch: share_of(engine, batch))
        engine.load_optimizer_state_dict(engine.optimizer_state_dict())
        for optimizer in optimizers:
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
        assert engine.num_steps == 6
        engine.save(tmp_path)
        fresh = copy.deepcopy(start)
        engine.close()
        again = sw.shard(fresh, "zero1", optimizer=two_over(fresh), world=world)
        assert again.resume(tmp_path) is not None
        return again.state_dict()

    for state in run_ranks(2, rank, shares_memory=place[1]):
        for name, param in twin.named_parameters():
            assert (state[name] - param.detach()).abs().max() < 2e-5, name


def test_the_state_dicts_are_the_plain_ones() -> None:
    start = Transformer()
    twin = copy.deepcopy(start)
    plain = two_over(twin)
    trained(twin, plain, lambda batch: batch)
    replicas = [copy.deepcopy(start) for _ in range(2)]

    def rank(world: sw.World) -> list[dict[str, Any]]:
        optimizers = two_over(replicas[world.rank])
        engine = sw.shard(replicas[world.rank], "zero3", optimizer=optimizers, world=world)
        trained(replicas[world.rank], optimizers, lambda batch: share_of(engine, batch))
        return [optimizer.state_dict() for optimizer in optimizers]

    for states in run_ranks(2, rank):
        for ours, optimizer in zip(states, plain, strict=True):
            theirs = optimizer.state_dict()
            assert ours["param_groups"] == theirs["param_groups"]
            assert ours["state"].keys() == theirs["state"].keys()
            for number, state in theirs["state"].items():
                for key, value in state.items():
                    assert torch.allclose(torch.as_tensor(ours["state"][number][key]), value, atol=1e-4), (number, key)


@pytest.mark.parametrize("several", [False, True])
def test_states_may_have_other_keys_than_numbers(several: bool) -> None:
    """Torch finds the states of a parameter by its place in the groups. `torch.distributed.checkpoint.state_dict` uses
    names, and merges the states of several optimizers."""
    start = Transformer()
    replicas = [copy.deepcopy(start) for _ in range(2)]

    def rank(world: sw.World) -> None:
        model = replicas[world.rank]
        optimizers = two_over(model) if several else [torch.optim.AdamW(model.parameters())]
        with sw.shard(model, "zero3", optimizer=optimizers, world=world) as engine:
            engine.backward(engine(*share_of(engine, DATA[0])))
            engine.step()
            kept = engine.optimizer_state_dict()
            named = dcp.get_optimizer_state_dict(model, optimizers) if several else renamed(optimizers[0].state_dict())
            engine.backward(engine(*share_of(engine, DATA[1])))
            engine.step()
            if several:
                dcp.set_optimizer_state_dict(model, optimizers, named)
            else:
                engine.load_optimizer_state_dict(named)
            now = engine.optimizer_state_dict()
            assert now["state"].keys() == kept["state"].keys()
            for number, state in kept["state"].items():
                for key, value in state.items():
                    assert torch.equal(torch.as_tensor(now["state"][number][key]), torch.as_tensor(value))

    run_ranks(2, rank)


def renamed(state: dict[str, Any]) -> dict[str, Any]:
    groups = [{**group, "params": [f"p{number}" for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {f"p{number}": entry for number, entry in state["state"].items()}, "param_groups": groups}


def test_engine_step_takes_all_of_them() -> None:
    model = Transformer()
    optimizers = two_over(model, muon=True)
    engine = sw.shard(model, "zero3", optimizer=optimizers)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine.backward(engine(*DATA[0]))
    engine.step()
    assert engine.num_steps == 1
    assert not any(torch.equal(engine.get(name), value) for name, value in before.items())


def test_what_cannot_be_meant_is_refused() -> None:
    model = Transformer()
    adam = torch.optim.AdamW(model.parameters())
    with pytest.raises(ModelError, match=r"tokens\.weight is in two of the optimizers"):
        sw.shard(model, "zero3", optimizer=[adam, torch.optim.SGD(model.parameters(), lr=0.1)])
    first, *others = model.parameters()
    with pytest.raises(ModelError, match="both look at whole parameters"):
        sw.shard(model, "zero3", optimizer=[sw.optim.Lamb([first]), sw.optim.Lamb(others)])
    with pytest.raises(ModelError, match="optimizer is a float"):
        sw.shard(model, "zero3", optimizer=0.1)  # type: ignore[arg-type]
    engine = sw.shard(model, "zero3", optimizer=adam)
    other = Transformer()
    with pytest.raises(ModelError, match=r"not one of the model's|another engine's already"):
        sw.shard(other, "zero3", optimizer=adam)
    engine.close()


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
@pytest.mark.parametrize("kind", ["other", "sharded", "frozen"])
def test_parameters_of_no_engine_that_a_loss_trains_are_named(
    kind: str, preset: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A module of the loss, such as a temperature; not one that is frozen or has an engine, nor tensors of a loop."""

    def rank(world: sw.World) -> None:
        model, other = nn.Linear(4, 4), nn.Linear(4, 2).requires_grad_(kind != "frozen")
        modules = [model, other] if kind == "sharded" else [model]
        engines = [
            sw.shard(one, preset, optimizer=torch.optim.SGD(one.parameters(), lr=0.1), world=world) for one in modules
        ]
        for _ in range(2):
            engines[0].backward(other(model(torch.ones(2, 4, requires_grad=True))).square().sum())
            engines[0].step()
        for engine in engines:
            engine.close()

    run_ranks(2, rank)
    said = [one.getMessage() for one in caplog.records if "no engine has" in one.getMessage()]
    assert len(said) == (2 if kind == "other" else 0)
    assert all("trains 2 parameters that no engine has, of shapes [2, 4], [2]" in one for one in said)
