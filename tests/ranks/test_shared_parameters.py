"""Memory that a parameter shares with another tensor: refused by name, unless nothing depends on it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks
from tests.thorough import sampled


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mid(self.emb(x))))


def by_data(model: Tied) -> None:
    model.head.weight.data = model.emb.weight.data


def by_view(model: Tied) -> None:
    model.mid.weight = nn.Parameter(model.emb.weight.data[1:5])


def by_transposed_view(model: Tied) -> None:
    model.mid.weight = nn.Parameter(model.emb.weight.data[:4].T)


def by_buffer(model: Tied) -> None:
    model.register_buffer("table", model.emb.weight.data, persistent=False)


def by_attribute(model: Tied) -> None:
    model.mid.table = model.emb.weight.detach()[2:]


def in_a_list(model: Tied) -> None:
    model.tables = [model.emb.weight.detach()]


def in_a_dict(model: Tied) -> None:
    model.tables = {"emb": model.emb.weight.view(-1)}


REFUSED: dict[Callable[[Tied], None], str] = {
    by_data: "emb.weight and head.weight share memory, but are two objects.*head.weight = emb.weight",
    by_view: "emb.weight and mid.weight share a part",
    by_transposed_view: "emb.weight and mid.weight share a part",
    by_buffer: "buffer table shares memory with the parameter emb.weight.*clone",
    by_attribute: "attribute mid.table shares memory with the parameter emb.weight",
    in_a_list: "attribute tables shares memory with the parameter emb.weight",
    in_a_dict: "attribute tables shares memory with the parameter emb.weight",
}


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
@pytest.mark.parametrize("share", REFUSED, ids=lambda one: one.__name__)
def test_refuses_by_name(share: Callable[[Tied], None], preset: str) -> None:
    models = [Tied() for _ in range(2)]
    for model in models:
        share(model)

    def of_rank(world: sw.World) -> None:
        with pytest.raises(ModelError, match=REFUSED[share]):
            sw.shard(models[world.rank], preset, world=world)

    run_ranks(2, of_rank)


@pytest.mark.parametrize("share", [by_data, by_view], ids=lambda one: one.__name__)
def test_refuses_models_without_values(share: Callable[[Tied], None]) -> None:
    with torch.device("meta"):
        meta = Tied()
        share(meta)
    with sw.deferred_init():
        deferred = Tied()
        share(deferred)

    def of_rank(world: sw.World) -> None:
        for model in (meta, deferred):
            with pytest.raises(ModelError, match="share"):
                sw.shard(model, "zero3", world=world)

    run_ranks(1, of_rank)


def side_by_side(model: Tied) -> None:
    """Rows of one storage, as in a mapped file or a fused layer."""
    fused = torch.randn(10, 4)
    model.emb.weight, model.mid.weight = nn.Parameter(fused[:6]), nn.Parameter(fused[6:])


def columns(model: Tied) -> None:
    """Interleaved in memory, without an element in common."""
    fused = torch.randn(6, 8)
    model.emb.weight, model.head.weight = nn.Parameter(fused[:, :4]), nn.Parameter(fused[:, 4:])


def one_object(model: Tied) -> None:
    model.head.weight = model.emb.weight
    model.tables = [model.emb.weight]


def frozen(model: Tied) -> None:
    by_data(model)
    by_attribute(model)
    model.emb.weight.requires_grad_(False)
    model.head.weight.requires_grad_(False)


def by_old_spectral_norm(model: Tied) -> None:
    """An attribute that a hook computes before every forward, and that is the parameter's own memory until then."""
    nn.utils.spectral_norm(model.mid)


@sampled
@pytest.mark.parametrize(
    "share", [side_by_side, columns, one_object, frozen, by_old_spectral_norm], ids=lambda one: one.__name__
)
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_what_is_independent_trains_as_the_plain_loop(share: Callable[[Tied], None], preset: str) -> None:
    twin, *models = (Tied() for _ in range(3))
    state = copy.deepcopy(twin.state_dict())
    share(twin)
    if share is not by_old_spectral_norm:  # which gives the state other names
        twin.load_state_dict(state)
    for model in models:
        share(model)
        model.load_state_dict(twin.state_dict())
    tokens = torch.randint(6, (3, 4), generator=torch.Generator().manual_seed(1))

    def loss_of(model: Tied, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), (x + 1) % 6)

    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for x in tokens:
        loss_of(twin, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    def of_rank(world: sw.World) -> dict[str, torch.Tensor]:
        mine = models[world.rank]
        engine = sw.shard(mine, preset, optimizer=torch.optim.SGD(mine.parameters(), lr=0.5), world=world)
        for x in tokens:
            engine.backward(loss_of(mine, x[2 * world.rank : 2 * world.rank + 2]))
            engine.step()
        return engine.state_dict()

    for found in run_ranks(2, of_rank):
        for name, value in twin.state_dict().items():
            assert (found[name] - value).abs().max() < 1e-6, name
