"""Methods that code puts into an optimizer object, and hooks of its states, before and after `shard`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import StateError
from shardwise.testing import run_ranks

Tensor = torch.Tensor
METHODS = ("zero_grad", "state_dict", "load_state_dict", "add_param_group", "step")


def build() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.linspace(-0.5, 0.5, param.numel()).view(param.shape))
    return model


def patch(optimizer: torch.optim.Optimizer, name: str, seen: list[str]) -> None:
    """As loggers, profilers and other libraries do."""
    former = getattr(optimizer, name)

    @functools.wraps(former)
    def patched(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return former(*args, **kwargs)

    setattr(optimizer, name, patched)


def call_all(model: nn.Module, optimizer: torch.optim.Optimizer, extra: nn.Parameter) -> None:
    """Each method once. The values are those of one process: every rank has the same batch."""
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [extra], "lr": 0.5})


def optimizer_of(model: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_methods_that_code_has_patched_are_called_and_stay(when: str, preset: str) -> None:
    plain, plain_calls = build(), []
    plain_optimizer = optimizer_of(plain)
    for name in METHODS:
        patch(plain_optimizer, name, plain_calls)
    call_all(plain, plain_optimizer, plain[2].weight)
    plain(torch.ones(2, 3)).sum().backward()
    plain_optimizer.step()

    def rank(world: sw.World) -> None:
        model, seen = build(), list[str]()
        optimizer = optimizer_of(model)
        for name in METHODS if when == "before" else ():
            patch(optimizer, name, seen)
        engine = sw.shard(model, preset, optimizer=optimizer, world=world)
        for name in METHODS if when == "after" else ():
            patch(optimizer, name, seen)
        call_all(model, optimizer, model[2].weight)
        assert seen == plain_calls[: len(seen)] == ["step", "zero_grad", "state_dict", "load_state_dict", METHODS[3]]
        engine.backward(model(torch.ones(2, 3)).sum())  # makes memory for the group: the optimizer is adopted anew
        optimizer.step()
        assert seen == plain_calls
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(engine.get(name), value)
        optimizer.zero_grad()
        assert engine.get("0.weight", "grad") is None
        state = engine.state_dict()
        engine.close()
        model.load_state_dict(state)  # gives parameters memory of their own
        del seen[:]
        optimizer.zero_grad()  # of torch's own, under the patch
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        assert seen == ["zero_grad", "add_param_group"]
        assert len(optimizer.param_groups) == 3

    run_ranks(2, rank)


def test_a_patch_is_under_that_of_the_next_engine() -> None:
    def rank(world: sw.World) -> None:
        model, seen = build(), list[str]()
        optimizer = optimizer_of(model)
        engine = sw.shard(model, "zero3", optimizer=optimizer, world=world)
        patch(optimizer, "zero_grad", seen)
        engine.reshard("zero1")
        engine.backward(model(torch.ones(2, 3)).sum())
        assert engine.get("0.weight", "grad") is not None
        optimizer.zero_grad()
        assert engine.get("0.weight", "grad") is None
        assert seen == ["zero_grad"]

    run_ranks(2, rank)


def test_methods_of_ours_go_with_the_engine() -> None:
    def rank(world: sw.World) -> None:
        model = build()
        optimizer = optimizer_of(model)
        before = set(vars(optimizer))
        sw.shard(model, "zero3", optimizer=optimizer, world=world).close()
        assert set(vars(optimizer)) == before

    run_ranks(2, rank)


def named(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """How such hooks name parameters: by what `param_groups` lists."""
    names = {param: name for name, param in model.named_parameters()}
    return [f"{names[param]} {list(param.shape)}" for group in optimizer.param_groups for param in group["params"]]


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_states_find_parameters(when: str, preset: str) -> None:
    expected = ["0.weight [4, 3]", "0.bias [4]"]

    def rank(world: sw.World) -> None:
        model, seen = build(), dict[str, list[str]]()
        optimizer = optimizer_of(model)

        def hook_it(register: Callable[..., object], label: str, **prepend: bool) -> None:
            register(lambda *_: seen.update({label: named(model, optimizer)}), **prepend)

        def hook_all() -> None:
            for prepend in (False, True):
                for name in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
                    label = f"{name} {prepend}"
                    hook_it(getattr(optimizer, f"register_{name}_hook"), label, prepend=prepend)

        if when == "before":
            hook_all()
        engine = sw.shard(model, preset, optimizer=optimizer, world=world)
        if when == "after":
            hook_all()
        engine.backward(model(torch.ones(2, 3)).sum())
        engine.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        assert len(seen) == 8
        assert all(found == expected for found in seen.values()), seen
        assert state["state"][0]["momentum_buffer"].shape == (4, 3)
        torch.testing.assert_close(optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)

    run_ranks(2, rank)


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_refused_memory_says_where_a_parameter_is(preset: str) -> None:
    words = {"ddp": "would change it on this rank alone", "zero3": "whole in memory only while a computation uses it"}

    def rank(world: sw.World) -> None:
        model = build()
        sw.shard(model, preset, optimizer=optimizer_of(model), world=world)
        with pytest.raises(StateError, match=rf"0\.weight belongs to an engine, .*{words[preset]}"):
            model[0].weight.untyped_storage()
        with pytest.raises(StateError, match=rf"0\.weight belongs to an engine, .*{words[preset]}"):
            model[0].weight.detach().data_ptr()
        assert "sharded" not in repr(model[0].weight) + repr(model[0].weight.detach())

    run_ranks(2, rank)
