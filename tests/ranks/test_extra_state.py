"""Modules with extra state (`get_extra_state`), of any type: it is saved and loaded along with the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import work_on_ranks

import shardwise as sw
from shardwise.errors import ConfigError, ModelError
from tests.thorough import sampled

EXTRAS: list[Any] = [{"scale": 2.0, "history": torch.ones(3)}, 7, None, torch.ones(3), b"bytes", [1, (2, "three")]]


class Keeping(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean()

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def build(extra: Any = None) -> nn.Module:
    shared = Keeping(extra)
    return nn.ModuleDict({"first": shared, "again": shared})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other) and type(one) is type(other)


@sampled
@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: type(extra).__name__)
def test_state_dict_is_the_plain_models_and_back(extra: Any) -> None:
    def work(engine: sw.Engine) -> tuple[dict[str, Any], Any]:
        state = engine.state_dict()
        engine.module["first"].extra = "another"
        engine.load_state_dict(state)
        return state, engine.module["first"].extra

    for state, loaded in work_on_ranks(2, work, "zero3", lambda: build(extra)):
        assert same(loaded, extra)
        plain = build("another")
        plain.load_state_dict(state)
        assert same(plain["first"].extra, extra)


@sampled
@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: type(extra).__name__)
def test_it_is_saved_and_resumed(extra: Any, tmp_path: Path) -> None:
    work_on_ranks(2, lambda engine: engine.save(tmp_path), "zero3", lambda: build(extra))

    def resumed(engine: sw.Engine) -> Any:
        engine.resume(tmp_path)
        return engine.module["first"].extra

    for loaded in work_on_ranks(2, resumed, "zero2", lambda: build("another")):
        assert same(loaded, extra)


def test_what_a_checkpoint_cannot_keep_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"first\._extra_state is a object, which a checkpoint cannot store"):
        work_on_ranks(2, lambda engine: engine.save(tmp_path), "zero3", lambda: build(object()))


def test_a_tensor_that_is_none_in_the_state_is_refused() -> None:
    def work(engine: sw.Engine) -> None:
        state = engine.state_dict()
        state["first.layer.bias"] = 3  # type: ignore[assignment]
        engine.load_state_dict(state)

    with pytest.raises(ModelError, match=r"first\.layer\.bias as a int; only tensors"):
        work_on_ranks(2, work, "zero3", build)
