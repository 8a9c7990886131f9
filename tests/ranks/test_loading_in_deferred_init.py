"""Weights loaded into a model while it is built in `deferred_init`, and read by `shard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_transformers import gpt2, mixtral
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError, ModelError, StateError
from shardwise.init import materialize
from shardwise.init.safetensors_headers import Stored
from shardwise.testing import run_ranks

Tensor = torch.Tensor


def net(out: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, out))


def weights(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(7)
    state = {
        name: torch.randn(value.shape) if value.is_floating_point() else torch.tensor(3)
        for name, value in model.state_dict().items()
    }
    save_file(state, folder / "model.safetensors")
    return state


def states(models: list[Any], preset: str = "zero3") -> list[dict[str, Tensor]]:
    def rank(world: sw.World) -> dict[str, Tensor]:
        with sw.shard(models[world.rank], preset, world=world) as engine:
            return {name: value.clone() for name, value in engine.state_dict().items()}

    return run_ranks(len(models), rank)


def test_values_are_those_of_the_files_and_each_rank_reads_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = weights(tmp_path, net())
    models = []
    for _ in range(2):
        with sw.deferred_init() as building:
            models.append(net())
            loaded = building.load(models[-1], tmp_path)
        assert set(loaded.names) == set(state)
        assert (loaded.missing, loaded.unexpected) == ((), ())
        assert torch.equal(models[-1][1].running_mean, state["1.running_mean"])  # a buffer gets its values at once
    num_read = []
    read = Stored.read

    def counted(self: Stored, span: Any = None) -> Tensor:
        found = read(self, span)
        num_read.append(found.numel())
        return found

    monkeypatch.setattr(Stored, "read", counted)
    for found in states(models):
        assert found.keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(found[name], value), name
    assert sum(num_read) == sum(param.numel() for param in net().parameters())


def test_what_is_done_afterwards_counts_whoever_shards(tmp_path: Path) -> None:
    """After loading, the model is changed, cast, tied and wrapped, so that its names differ from the files'."""

    def built() -> nn.Module:
        with sw.deferred_init() as building:
            inner = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4, bias=False), nn.Linear(4, 8))
            building.load(inner, [tmp_path / "model.safetensors"])
            with torch.no_grad():
                inner[0].weight[1:3].mul_(2)
                inner[2].bias.data = inner[2].bias.data.bfloat16().float()
            inner[2].weight = inner[0].weight
            return nn.ModuleDict({"wrapped": inner})

    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4, bias=False), nn.Linear(4, 8))
    state = weights(tmp_path, plain)
    state["0.weight"][1:3] *= 2
    state["2.weight"] = state["0.weight"]
    state["2.bias"] = state["2.bias"].bfloat16().float()
    for preset in ("zero3", "ddp"):
        for found in states([built() for _ in range(2)], preset):
            assert {f"wrapped.{name}" for name in state} == found.keys()
            assert all(torch.equal(found[f"wrapped.{name}"], value) for name, value in state.items())
    alone = built()
    materialize(alone)
    assert all(type(param) is nn.Parameter for param in alone.parameters())
    assert all(torch.equal(alone.get_parameter(f"wrapped.{name}"), value) for name, value in state.items())
    assert alone["wrapped"][2].weight is alone["wrapped"][0].weight


@pytest.mark.parametrize("build", [gpt2, mixtral])
def test_folders_of_transformers(build: Any, tmp_path: Path) -> None:
    torch.manual_seed(5)
    build().save_pretrained(tmp_path, max_shard_size="20KB")
    twin = build().from_pretrained(tmp_path)
    models = []
    for _ in range(2):
        with sw.deferred_init() as building:
            models.append(build())
            building.load(models[-1], sorted(tmp_path.glob("*.safetensors")))
    for found in states(models):
        assert all(torch.equal(found[name], value) for name, value in twin.state_dict().items())


def test_in_half_precision_they_are_rounded_as_by_a_copy(tmp_path: Path) -> None:
    state = weights(tmp_path, nn.Linear(4, 6))
    models: list[Any] = []
    for _ in range(2):
        with sw.deferred_init() as building:
            models.append(nn.Linear(4, 6, dtype=torch.bfloat16))
            building.load(models[-1], tmp_path)
    for found in states(models):
        assert torch.equal(found["weight"].float(), state["weight"].bfloat16().float())


def test_other_models_and_other_times_are_refused(tmp_path: Path) -> None:
    state = weights(tmp_path, net())
    wrong = r"2\.weight is \[7, 8\] in the model and \[6, 8\] in the file"
    with pytest.raises(ModelError, match=wrong), sw.deferred_init() as building:
        building.load(net(7), tmp_path)
    outside = net()
    strange = r"0\.weight was not built inside this deferred_init"
    with pytest.raises(ModelError, match=strange), sw.deferred_init() as building:
        building.load(outside, tmp_path)
    with sw.deferred_init() as building:
        model = net()
    with pytest.raises(StateError, match="after `with deferred_init"):
        building.load(model, tmp_path)
    with pytest.raises(CheckpointError, match="no such file"), sw.deferred_init() as building:
        building.load(net(), tmp_path / "elsewhere")
    save_file({**{name: state[name] for name in list(state)[:-1]}, "more": torch.ones(1)}, tmp_path / "odd.safetensors")
    assert "more" in load_file(tmp_path / "odd.safetensors")
    with sw.deferred_init() as building:
        loaded = building.load(net(), tmp_path / "odd.safetensors", strict=False)
    assert (loaded.missing, loaded.unexpected) == ((list(state)[-1],), ("more",))
    with pytest.raises(ModelError, match="rename them in the file"), sw.deferred_init() as building:
        building.load(net(), tmp_path / "odd.safetensors")


def test_a_model_is_changed_before_it_is_sharded(tmp_path: Path) -> None:
    """A model is built in one block, and enlarged in another: like embeddings, with drawn and with existing values."""

    def enlarge(model: nn.Sequential) -> None:
        with torch.no_grad():
            wider = nn.Linear(8, 7)
            wider.weight[:6] = model[2].weight
            wider.weight[6] = model[2].weight.mean(0)
            model[2] = wider
            model[0].weight.mul_(2)

    state = weights(tmp_path, net())
    torch.manual_seed(3)
    plain = net()
    plain.load_state_dict(state)
    enlarge(plain)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        with sw.deferred_init() as building:
            models.append(net())
            building.load(models[-1], tmp_path)
        with pytest.raises(StateError, match="built inside deferred_init"):
            enlarge(models[-1])
        with pytest.raises(ZeroDivisionError), sw.deferred_init(models[-1]):
            raise ZeroDivisionError
        with pytest.raises(StateError, match="built inside deferred_init"):
            models[-1][0].weight.sum()
        torch.manual_seed(3)
        net()  # this draws as many numbers
        with sw.deferred_init(models[-1]):
            enlarge(models[-1])
    for found in states(models):
        for name, value in plain.state_dict().items():
            assert torch.equal(found[name], value), name
